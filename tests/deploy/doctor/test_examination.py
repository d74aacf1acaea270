"""The doctor before deployments in which one thing was broken on purpose, with real NATS and HTTP servers."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bus import Received
from bus.config import BusConfig
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.codec import encode, seal, topic_of
from bus.protocol.subjects import Subjects
from deploy.doctor import examination
from deploy.doctor.examination import Examined
from deploy.doctor.judgements import DeploymentFinding, judge_server
from deploy.doctor.probes import HeardMessages, ask_server, knock, spaces
from deploy.http.server import HttpServer
from deploy.http.sockets import listen, url_of
from deploy.security.credentials import ServerCredentials
from deploy.security.tls import ServerTls
from fleet.event import PROTOCOL
from fleet.facts.demand import TrackerHeartbeat
from fleet.facts.engines import EngineHeartbeat, EngineLeft
from router.api.app import create_app
from router.api.bus_api import BusApi
from router.api.library import Decider
from router.config import RouterConfig
from router.service import RouterService
from tests.certificates import certificate
from tests.conftest import free_port
from tests.deploy.commands import roost
from tests.router.router_fixture import engine_joined, running, served_app
from tests.web_server import served_web

SUBJECTS = Subjects()
QUICK = BusConfig(connect_seconds=2.0, request_seconds=1.0, record_seconds=3.0)


class Guarded:
    """A server with a user for every role."""

    def __init__(self, folder: Path, nats_server_type: Any, change: Any = lambda text: text) -> None:
        self.logins = folder / "bus"
        self.logins.mkdir()
        drawn = ServerCredentials(self.logins, SUBJECTS, ("a",))
        (folder / "nats.conf").write_text(change(f"jetstream: enabled\n{drawn.authorization()}"))
        self.server = nats_server_type(folder / "store", "-c", str(folder / "nats.conf"))

    def examined(self, **about: Any) -> Examined:
        config = replace(QUICK, url=self.server.url, credentials_file=self.logins / "operator.json")
        values = {
            "routers": (),
            "run_directories": self.logins,
            "logins": {file.stem: file for file in sorted(self.logins.glob("*.json"))},
            "listen_seconds": 0.2,
        } | about
        return Examined(bus=config, **values)


@pytest.fixture
def guarded(tmp_path: Path, nats_server_type: Any) -> Iterator[Any]:
    """Start such a server, with a change of its configuration."""
    started: list[Guarded] = []

    def start(change: Any = lambda text: text) -> Guarded:
        started.append(Guarded(tmp_path, nats_server_type, change))
        started[-1].server.start()
        return started[-1]

    yield start
    for one in started:
        one.server.stop()


def about(found: list[DeploymentFinding], check: str) -> list[str]:
    return [one.what for one in found if one.check == check]


async def test_a_server_with_the_rights_of_all_roles_is_in_order(guarded: Any) -> None:
    assert await examination.nats(guarded().examined()) == []


async def test_a_right_that_a_role_lacks_is_named_with_its_user(guarded: Any) -> None:
    def without(text: str) -> str:
        router, rest = text.split('user: "tracker"')
        return router.replace(f', "{SUBJECTS.describe_plan}"', "", 1) + f'user: "tracker"{rest}'

    server = guarded(lambda text: without(text))
    (finding,) = await examination.nats(server.examined())
    assert finding.check == "rights"
    assert finding.what == f"user router (router) may not publish on {SUBJECTS.describe_plan}"


async def test_authorization_of_an_older_version_is_noticed_and_is_no_problem(guarded: Any) -> None:
    server = guarded(lambda text: text.replace(', "$SYS.REQ.USER.INFO"', ""))
    found = await examination.nats(server.examined(logins={}))
    assert [(one.check, one.level) for one in found] == [("rights", "note")]


async def test_a_wrong_password_is_named(guarded: Any) -> None:
    server = guarded()
    login = server.logins / "planner.json"
    login.write_text(json.dumps(json.loads(login.read_text()) | {"password": "old"}))
    subject = server.examined(logins={"planner": login})
    found = await examination.nats(replace(subject, bus=replace(subject.bus, connect_seconds=0.5)))
    assert "refuses this user" in about(found, "rights")[0]


async def test_a_server_without_jetstream_is_named(guarded: Any) -> None:
    server = guarded(lambda text: text.replace("jetstream: enabled", ""))
    subject = server.examined(logins={})
    subject = replace(subject, bus=replace(subject.bus, connect_seconds=0.5))
    assert "has no JetStream" in about(await examination.nats(subject), "jetstream")[0]
    assert "cannot be used" in about(await examination.fleet(subject), "jetstream")[0]


async def test_the_end_of_the_servers_certificate_is_read(tmp_path: Path, nats_server_type: Any) -> None:
    (tmp_path / "tls").mkdir()
    files = certificate(tmp_path / "tls", "127.0.0.1")
    (tmp_path / "tls.conf").write_text(
        f'jetstream: enabled\ntls {{ cert_file: "{files.cert}", key_file: "{files.key}" }}\n'
    )
    server = nats_server_type(tmp_path / "store", "-c", str(tmp_path / "tls.conf"))
    server.start()
    try:
        report = await ask_server(replace(QUICK, url=server.url, tls_ca=str(files.ca)))
        unknown = Examined(
            replace(QUICK, url=f"tls://{server.url[7:]}", connect_seconds=0.5), (), tmp_path, {}
        )
        (finding,) = await examination.nats(unknown)
    finally:
        server.stop()
    assert report.tls
    assert report.certificate_ends is not None
    assert judge_server("s", report, time.time()) == []
    (expired,) = judge_server("s", report, report.certificate_ends + 1)
    assert expired.check == "tls"
    assert finding.check == "nats"
    assert "certificate verify failed" in finding.what


async def test_no_server_is_one_finding_that_names_the_address(tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    subject = Examined(replace(QUICK, url=url, connect_seconds=0.3), (), tmp_path, {})
    (finding,) = await examination.nats(subject)
    assert finding.check == "nats"
    assert url in finding.what


async def test_a_fleet_without_parts_is_examined_to_the_end(guarded: Any) -> None:
    found = await examination.fleet(guarded().examined())
    assert [one.what.split(" ")[1] for one in found] == ["router", "engine", "planner", "tracker"]


@asynccontextmanager
async def memory_fleet() -> AsyncIterator[tuple[MemoryBus, RouterService]]:
    """A router on a bus of its own."""
    broker = MemoryBroker(SUBJECTS)
    service = RouterService(MemoryBus(broker), SUBJECTS, RouterConfig())
    async with running(service), asyncio.TaskGroup() as tasks:
        api = BusApi(MemoryBus(broker), SUBJECTS, Decider(service))
        task = tasks.create_task(api.run(), name="answers on the bus")
        await api.listening.wait()
        yield MemoryBus(broker), service
        task.cancel()


def beat(bus: MemoryBus, engine: str, at: float) -> None:
    subject = SUBJECTS.heartbeats(engine)
    payload = encode(topic_of(subject), EngineHeartbeat(engine=engine, worker_id=1, epoch=0))
    bus.broker.deliver(subject, seal(7, 0, at, topic_of(subject), payload))


async def test_dead_engines_wrong_clocks_newer_parts_and_closed_doors_are_found() -> None:
    async with memory_fleet() as (bus, _):
        closed = f"http://127.0.0.1:{free_port()}"
        for engine in ("dead", "late"):
            joined = engine_joined(engine, [closed], None, protocol=PROTOCOL + 2 * (engine == "late"))
            await bus.record(SUBJECTS.membership(engine), joined)
        subject = Examined(QUICK, (), Path(), {}, listen_seconds=1.0)
        examining = asyncio.create_task(examination.on_bus(bus, SUBJECTS, subject))
        while not examining.done():
            beat(bus, "late", time.time() - 100.0)
            tracker = encode("tracker", TrackerHeartbeat(protocol=PROTOCOL + 1, reports=0))
            bus.broker.deliver(SUBJECTS.tracker_heartbeat, seal(9, 0, time.time(), "tracker", tracker))
            future = b"\x81\xa4kind\xa6Future"
            bus.broker.deliver(SUBJECTS.homes, seal(8, 0, time.time(), "homes", future))
            await asyncio.sleep(0.05)
        found = await examining
    assert "engine dead has joined and sent no heartbeat" in about(found, "engines")[0]
    assert len(about(found, "engines")) == 1
    assert any("engine late is 100 s behind" in one for one in about(found, "clocks"))
    newer, apart, tracker_apart = sorted(about(found, "versions"))
    assert f"the tracker speaks protocol {PROTOCOL + 1}" in tracker_apart
    assert "that this version does not know" in newer
    assert f"engine late speaks protocol {PROTOCOL + 2}" in apart
    assert f"late/0 at {closed} does not answer" in about(found, "doors")[0]
    assert {one.what for one in found if one.level == "note"} == {
        "no planner answers: experts stay where they are",
        "no tracker answers: experts are not predicted, and demand is not learnt",
        f"the tracker speaks protocol {PROTOCOL + 1}; this version of Roost speaks {PROTOCOL}",
    }


def test_the_clock_that_differs_most_speaks_for_a_subject_and_late_messages_do_not_count() -> None:
    heard = HeardMessages()
    for publisher, ahead in ((1, -9.0), (1, -0.5), (2, -30.0), (2, -31.0), (3, 4.0)):
        heard.note(
            Received("s", publisher, 0, 1000.0 + ahead, EngineLeft(engine="", worker_id=1, reason="")), 1000.0
        )
    assert heard.offsets == {"the publisher on s": -30.0}


async def test_a_router_is_told_from_another_program_on_its_port() -> None:
    async def other(_: web.Request) -> web.Response:
        return web.Response(text="OK")

    app = web.Application()
    app.router.add_get("/health", other)
    async with AsyncExitStack() as stack:
        wrong = await stack.enter_async_context(served_web(app))
        service = RouterService(None, SUBJECTS, RouterConfig())
        right = await stack.enter_async_context(served_app(create_app(service)))
        subject = Examined(QUICK, (wrong, right), Path(), {})
        (finding,) = await examination.routers(subject)
    assert finding.check == "ports"
    assert wrong in finding.what


async def test_certificates_are_verified_by_the_named_authority_and_read_for_their_end(
    tmp_path: Path,
) -> None:
    files = certificate(tmp_path, "127.0.0.1")
    door = listen("127.0.0.1", 0)
    url = url_of(door, tls=True)
    app = create_app(RouterService(None, SUBJECTS, RouterConfig()))
    async with HttpServer(app, door, drain_seconds=0.1, tls=ServerTls(files.cert, files.key)):
        (unknown,) = await knock([("router", url)], None)
        (known,) = await knock([("router", url)], files.ca, b'"alive"')
    assert unknown.untrusted
    assert (known.status, known.is_other_program, known.protocol) == (200, False, PROTOCOL)
    assert known.certificate_ends is not None
    assert known.certificate_ends > time.time()


async def test_an_unusable_authority_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    subject = Examined(QUICK, ("https://127.0.0.1:1",), tmp_path, {}, ca=tmp_path / "ca.pem")
    assert "ca.pem cannot be used" in about(await examination.routers(subject), "tls")[0]


async def test_a_key_of_another_certificate_is_found(tmp_path: Path) -> None:
    pairs = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        pairs.append(certificate(tmp_path / name, "127.0.0.1"))
    one, other = pairs
    subject = Examined(QUICK, (), tmp_path, {}, certificates=((one.cert, one.key), (None, None)))
    assert about(await examination.machine(subject), "tls") == []
    subject = replace(subject, certificates=((one.cert, other.key),))
    assert str(other.key) in about(await examination.machine(subject), "tls")[0]


async def test_secret_files_that_others_may_read_are_found(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o640)
    subject = Examined(QUICK, (), tmp_path / "not" / "yet", {}, secrets=(secret, None, tmp_path / "none"))
    assert str(secret) in about(await examination.machine(subject), "secrets")[0]
    assert {space.kind for space in spaces(tmp_path / "not" / "yet")} <= {"disk", "shared memory"}


@pytest.mark.usefixtures("elsewhere")
def test_the_command_prints_findings_and_fails_when_there_are_problems() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    config = Path("roost.toml")
    config.write_text("[bus]\nconnect_seconds = 0.3\n")
    done = roost("doctor", "--nats", url, "--router", f"http://127.0.0.1:{free_port()}", "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert not report["ok"]
    assert {"nats", "doors"} <= {one["check"] for one in report["findings"]}
    assert all(one["what"] and one["remedy"] for one in report["findings"])
    done = roost("doctor", "--nats", url, "--logins", ".")
    assert done.exit_code == 2
    assert "no login" in done.output
