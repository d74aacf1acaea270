"""Examination of a deployment: all probes, and the judgements on what they found."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bus import Bus, BusError
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.doctor import judgements as judge
from deploy.doctor import probes
from deploy.doctor.judgements import DeploymentFinding

LISTEN_SECONDS = 2.5
"""Engines send a heartbeat once a second."""


@dataclass(frozen=True, slots=True)
class Examined:
    """A deployment to examine. logins: credential files by user, to be checked too. routers: URLs."""

    bus: BusConfig
    routers: tuple[str, ...]
    run_directories: Path
    logins: Mapping[str, Path]
    ca: Path | None = None
    secrets: tuple[Path | str | None, ...] = ()
    certificates: tuple[tuple[Path | None, Path | None], ...] = ()
    """certificate and key of servers on this machine"""
    listen_seconds: float = LISTEN_SECONDS


Check = Callable[[Examined], Awaitable[list[DeploymentFinding]]]


async def examined(subject: Examined, say: Callable[[str], None]) -> list[DeploymentFinding]:
    """Return all findings. say: receives the name of each step as it begins."""
    steps: tuple[tuple[str, Check], ...] = (
        ("this machine", machine),
        ("NATS, and the rights of its users", nats),
        (f"parts and engines ({subject.listen_seconds:g} s)", fleet),
        ("routers", routers),
    )
    found: list[DeploymentFinding] = []
    for name, check in steps:
        say(name)
        found += await check(subject)
    return list(dict.fromkeys(found))


async def machine(subject: Examined) -> list[DeploymentFinding]:
    """Check files and limits of this machine."""
    secrets = (subject.bus.credentials_file, *subject.logins.values(), *subject.secrets)
    return [
        *(one for space in probes.spaces(subject.run_directories) for one in judge.judge_space(space)),
        *judge.judge_descriptors(probes.descriptor_limit()),
        *(
            judge.problem("tls", fault, "put a certificate and its unencrypted key there")
            for cert, key in subject.certificates
            if (fault := probes.certificate_fault(cert, key)) is not None
        ),
        *(one for file in probes.secret_files(dict.fromkeys(secrets)) for one in judge.judge_secret(file)),
    ]


async def nats(subject: Examined) -> list[DeploymentFinding]:
    """Check the server and every login."""
    config, subjects = subject.bus, Subjects(subject.bus.namespace)
    try:
        report = await probes.ask_server(config)
    except BusError as error:
        return [judge.problem("nats", str(error), "the fleet cannot work without its NATS server")]
    found = judge.judge_server(config.where, report, time.time())
    if report.logins and report.user is not None and (role := judge.role_of(report.user)) is not None:
        found += judge.judge_rights(report.user, report, role[0], subjects, role[1])
    elif report.logins and report.user is None:
        found += judge.judge_rights("of this command", report, "operator", subjects, "*")
    for user, file in subject.logins.items():
        found += await _login(user, replace(config, credentials_file=file), subjects)  # type: ignore[arg-type]
    return found


async def _login(user: str, config: BusConfig, subjects: Subjects) -> list[DeploymentFinding]:
    role = judge.role_of(user)
    if role is None:
        return []
    try:
        report = await probes.ask_server(config)
    except BusError as error:
        remedy = "write logins and authorization anew with `roost bus credentials`, and reload the server"
        return [judge.problem("rights", f"user {user}: {error}", remedy)]
    return judge.judge_rights(user, report, role[0], subjects, role[1]) if report.logins else []


async def fleet(subject: Examined) -> list[DeploymentFinding]:
    """Check what can be heard and asked on the bus, and the engines' HTTP servers."""
    config, subjects = subject.bus, Subjects(subject.bus.namespace)
    try:
        bus = await NatsBus.connect(config.servers, subjects, config, name="roost doctor")
    except BusError as error:
        remedy = "see the findings about NATS, and the server's log"
        return [judge.problem("jetstream", f"the stores cannot be used: {error}", remedy)]
    try:
        return await on_bus(bus, subjects, subject)
    except BusError as error:
        remedy = "use the operator's login: [bus] credentials_file"
        return [judge.problem("rights", f"the fleet cannot be seen: {error}", remedy)]
    finally:
        await bus.close()


async def on_bus(bus: Bus, subjects: Subjects, subject: Examined) -> list[DeploymentFinding]:
    """Check the fleet over an open bus."""
    found = judge.judge_stores(await bus.stores())
    parts = await probes.answering_parts(bus, subjects)
    engines = await probes.joined_engines(bus, subjects)
    heard = await probes.listen(bus, subjects, subject.listen_seconds)
    found += judge.judge_parts(**parts, engines=len(engines))
    names = [joined.engine for joined in engines]
    found += judge.judge_silence(names, heard.beating, subject.listen_seconds)
    found += judge.judge_clocks(heard.offsets)
    found += judge.judge_messages(bus.rejected)
    protocols = {f"engine {joined.engine}": joined.protocol for joined in engines}
    if (planner := await probes.planner_protocol(bus, subjects)) is not None:
        protocols["the planner"] = planner
    if heard.tracker_protocol is not None:
        protocols["the tracker"] = heard.tracker_protocol
    found += judge.judge_protocols(protocols)
    doors = [
        (f"{joined.engine}/{rank}", url)
        for joined in engines
        if joined.engine in heard.beating
        for rank, url in enumerate(joined.urls)
        if url.startswith("http")
    ]
    return found + await _doors(doors, subject.ca)


async def routers(subject: Examined) -> list[DeploymentFinding]:
    """Check the routers' HTTP servers."""
    return await _doors([("router", url) for url in subject.routers], subject.ca, b'"alive"')


async def _doors(
    doors: list[tuple[str, str]], ca: Path | None, expected: bytes = b""
) -> list[DeploymentFinding]:
    try:
        reports = await probes.knock(doors, ca, expected)
    except OSError as error:
        return [judge.problem("tls", f"the authorities {ca} cannot be used: {error}", "name a PEM file")]
    stated = {f"{door.name} at {door.url}": door.protocol for door in reports if door.protocol is not None}
    return [
        *(one for door in reports for one in judge.judge_door(door, time.time())),
        *judge.judge_protocols(stated),
    ]
