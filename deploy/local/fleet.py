"""A whole fleet on this machine: NATS, router, tracker, planner and engines as child processes, started
together, stopped in order.

An engine is a unit of P rank processes. If a rank is lost, the others are ended, and the engine restarts as a
new incarnation (new worker_id, new sockets, new meeting folder). Readiness is probed: a NATS ping, /health,
the ranks' confirmation that the join is stored, and at last the router's /ready, which requires an engine.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
import urllib.parse
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bus import BusError
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.roles import Role
from bus.protocol.subjects import Subjects
from deploy.configuration_loader import ConfigError, Configuration, Key, without_settings
from deploy.http.sockets import HttpError, listen, probe, url_of
from deploy.launch_spec import LaunchSpec, PartName, RankLaunch
from deploy.local.nats_server import NatsServer, greet
from deploy.local.router_sockets import RouterSockets
from deploy.local.supervise import Command, Incarnation, Policy, Say, Unit, UnitFailed
from deploy.process import at_hangup
from deploy.reload import Read, check
from deploy.run_directory import SETTINGS, RunDirectory, Running, private_text
from deploy.sections import UpConfig, WorkerConfig, engine_ranks
from deploy.security.credentials import FOLDER, ServerCredentials
from fleet.facts.engines import ConfigChanged
from fleet.redaction import without_secrets
from fleet.settings import FilePath
from router.config import RouterConfig

LOOK_SECONDS = 0.02
FLEET_SECRET = "fleet.secret"
"""file in the run directory with the secret that routers present to ranks"""
TRACKER_STATE = "tracker.state"
"""file in the run directory with the tracker's state, restored after a restart"""
LOG_CARE_SECONDS = 30.0
NATS_SECONDS = 5.0
"""time limit for the greeting of a NATS server elsewhere"""
NATS_START_SECONDS = 30.0


NIXL_VARIABLES = {"UCX_RCACHE_MAX_UNRELEASED": "1024", "NIXL_LOG_LEVEL": "ERROR"}
"""Variables that NIXL reads at load time: a bound on the registered memory that UCX may leak, and a log with
errors only."""

LARGE_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Allocator setting for parts that exchange whole tables (router, tracker, planner). By default, glibc soon
keeps freed blocks of up to 32 MB, separately for each thread, and a process grows to several times its used
memory. Ranks keep the default: their steps allocate and free large blocks all the time."""


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for children: settings come by file, this installation's packages come first,
    one compute thread (the engine requires it), and NIXL's variables unless the user has set them."""
    ours = str(Path(__file__).resolve().parents[2])
    path = ":".join(part for part in (ours, environment.get("PYTHONPATH", "")) if part)
    return {
        **NIXL_VARIABLES,
        **without_settings(environment),
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


@dataclass(frozen=True, slots=True)
class FleetFiles:
    """Files and settings that all children share."""

    run: RunDirectory
    config_file: Path
    environment: Mapping[str, str]
    credentials: ServerCredentials | None = None
    """logins of the private NATS server"""
    bus: bool = True
    """False: engines without NATS"""

    def command(
        self,
        part: PartName,
        ready: Path,
        *,
        listener: socket.socket | None = None,
        sockets: Sequence[socket.socket] = (),
        rank: RankLaunch | None = None,
    ) -> Command:
        """Return the command of a Roost process of this installation."""
        descriptor, descriptors = (
            None if listener is None else listener.fileno(),
            tuple(one.fileno() for one in sockets),
        )
        order = LaunchSpec(
            part=part,
            config=str(self.config_file),
            ready=str(ready),
            descriptor=descriptor,
            descriptors=descriptors,
            rank=rank,
            bus=self.bus,
        )
        return self.ordered(
            part if rank is None else rank.engine if part == "simulated" else f"{rank.engine}/{rank.rank}",
            order,
        )

    def ordered(self, name: str, order: LaunchSpec) -> Command:
        """Return the command for a launch spec, with the process's own NATS login. -P keeps the working
        directory out of its imports."""
        if self.credentials is not None:
            file = (
                self.credentials.file("engine", order.rank.engine)
                if order.rank is not None
                else self.credentials.file(_role(order.part))
            )
            order = msgspec.structs.replace(order, credentials=str(file))
        arguments = [sys.executable, "-P", "-m", "deploy", msgspec.json.encode(order).decode()]
        keep = tuple(
            descriptor
            for descriptor in (order.descriptor, order.private, *order.descriptors)
            if descriptor is not None
        )
        environment = (
            self.environment if order.part in ("rank", "simulated") else {**LARGE_BLOCKS, **self.environment}
        )
        return Command(
            name=name, arguments=arguments, log=self.run.log(name), environment=environment, keep=keep
        )


def _role(part: PartName) -> Role:
    """Return the bus role of a part."""
    return "engine" if part == "rank" or part == "simulated" else part


class EngineLauncher:
    """Launcher for the incarnations of one engine: embedded, a process per rank; or simulated, one process
    for all ranks."""

    def __init__(self, name: str, ranks: int, worker: WorkerConfig, files: FleetFiles) -> None:
        self.name = name
        self._worker = worker
        self.worker_id: int | None = None
        """of the current incarnation"""
        self.urls: tuple[str, ...] = ()
        self._ranks = ranks
        self._files = files

    async def launch(self) -> Incarnation:
        """Create a new incarnation with its own identity, sockets and meeting folder."""
        before, self.worker_id = self.worker_id, secrets.randbits(64)
        if before is not None:
            self._files.run.drop(f"{before:016x}")
        meet = self._files.run.meeting_folder(f"{self.worker_id:016x}")
        worker = self._worker
        sockets = [listen(worker.host, 0) for _ in range(self._ranks)]
        tls = worker.tls_cert is not None  # routers then compare the name in the URL with the certificate
        self.urls = tuple(
            url_of(listener, tls=tls, host=worker.host if tls else None) for listener in sockets
        )
        orders = [
            RankLaunch(
                engine=self.name,
                rank=rank,
                worker_id=self.worker_id,
                urls=self.urls,
                meet=str(meet),
                replaces=before,
            )
            for rank in range(self._ranks)
        ]
        joined = [meet / f"joined-{rank}" for rank in range(self._ranks)]
        if worker.engine == "simulated":
            joined = joined[:1]
            commands = [self._files.command("simulated", joined[0], sockets=sockets, rank=orders[0])]
        else:
            commands = [
                self._files.command("rank", file, listener=listener, rank=order)
                for file, listener, order in zip(joined, sockets, orders, strict=True)
            ]
        return Incarnation(
            commands, ready=lambda: _existing(*joined), healthy=self._healthy, started=lambda: _close(sockets)
        )

    async def _healthy(self) -> None:
        for url in self.urls:
            await _answering(f"{url}/health")


def _close(sockets: Sequence[socket.socket]) -> None:
    """Close this process's copies; the ranks have theirs. An open copy would keep a dead rank's port
    accepting connections."""
    for listener in sockets:
        listener.close()


async def _existing(*files: Path) -> None:
    """Wait until other processes have created these files; a check costs microseconds."""
    while not all(file.exists() for file in files):  # noqa: ASYNC110
        await asyncio.sleep(LOOK_SECONDS)


async def _answering(url: str) -> None:
    """Raise OSError or TimeoutError unless a server answers with any status."""
    with contextlib.suppress(HttpError):
        await probe(url)


async def _until_good(url: str) -> None:
    """Return once a page answers 200; wait without limit."""
    while True:
        try:
            await probe(url, seconds=2.0)
        except (HttpError, OSError, TimeoutError):
            await asyncio.sleep(LOOK_SECONDS)
        else:
            return


async def _reach_nats(urls: str) -> None:
    """Return whether any of the servers (comma-separated URLs) answers. Raises UnitFailed with the servers
    tried."""
    troubles = []
    for url in urls.split(","):
        try:
            parts = urllib.parse.urlsplit(url if "://" in url else f"nats://{url}")
            async with asyncio.timeout(NATS_SECONDS):
                return await greet(parts.hostname or "127.0.0.1", parts.port or 4222)
        except (OSError, ValueError, TimeoutError) as error:
            troubles.append(without_secrets(f"{url}: {error or 'timed out'}"))
    raise UnitFailed(f"no NATS server at {'; '.join(troubles)}; start one with: nats-server -js")


class Fleet:
    """Processes of one `roost up` or `roost worker` while the context lasts; reports events through `say`."""

    def __init__(
        self, settings: Configuration, run: RunDirectory, environment: Mapping[str, str], say: Say
    ) -> None:
        self.nats_url = ""
        self.router_url = ""
        self.router_urls: tuple[str, ...] = ()
        """URL of each single router process, if there are several"""
        self.engines: list[EngineLauncher] = []
        self.engine_units: list[Unit] = []
        """units that may fail, as long as one is left"""
        self._credentials: ServerCredentials | None = None
        """set if the NATS server is ours"""
        self._settings = settings
        self._worker = settings.part(WorkerConfig)
        self._policy = Policy(
            ready_seconds=self._worker.ready_seconds, grace_seconds=self._worker.grace_seconds
        )
        self.run = run
        self._environment = environment
        self._say = say
        self._secret_files: dict[Key, Path] = {}
        """settings with the path of the fleet secret, if it is generated here"""
        self.reading_units: list[Unit] = []
        """units that are notified when settings change"""
        self._phases: list[list[Unit]] = []
        """units in start order; stopped in reverse order, the units of one phase together"""
        self._began = time.monotonic()

    @property
    def logins(self) -> Path | None:
        """Return the folder with the logins of the NATS server, if that is ours."""
        return None if self._credentials is None else self._credentials.folder

    async def start_up(self, sockets: RouterSockets) -> None:
        """Start everything, with the router on listening sockets; return when the router is ready.

        Raises UnitFailed, CannotListen, NoNats or OSError.
        """
        up = self._settings.part(UpConfig)
        self._make_fleet_secret()
        self.nats_url = up.nats or await self._start_nats()
        await _reach_nats(self.nats_url)
        files = self.write_files()
        parts = [self._single(files, "tracker"), self._single(files, "planner")]
        self.reading_units.append(parts[1])
        await self.add(
            *parts, *(self._engine(self._engine_name(number), files) for number in range(up.engines))
        )
        await self.add(*self.routers(files, sockets))
        await self._all_ready()
        for url in sockets.urls if up.engines else ():
            await self._watched(_until_good(f"{url}/ready"))
        self._write_record()

    async def start_routers(self, sockets: RouterSockets, *, bus: bool) -> None:
        """Start the router's processes for engines elsewhere, and return when they serve. bus: on the
        configured NATS server."""
        if bus:
            self.nats_url = ",".join(self._settings.part(BusConfig).servers)
            await _reach_nats(self.nats_url)
        await self.add(*self.routers(self.write_files(), sockets, bus=bus))
        await self._all_ready()
        self._write_record()

    async def start_engine(self, *, bus: bool = True) -> None:
        """Start one engine that joins a fleet on a NATS server elsewhere, and return when it has joined.
        Raises UnitFailed. bus: False for an engine in Dynamo that joins no fleet of Roost."""
        if bus:
            self.nats_url = ",".join(self._settings.part(BusConfig).servers)
            await _reach_nats(self.nats_url)
        await self.add(self._engine(self._worker.name, replace(self.write_files(), bus=bus)))
        await self._all_ready()
        self._write_record()

    async def serve(self) -> None:
        """Keep everything running until cancelled. Raises UnitFailed when a part is given up; of several
        engines, when the last one is."""
        while True:
            try:
                await self._watched(self._care_for_logs())
            except UnitFailed as failure:
                lost = [unit for unit in self.engine_units if unit.is_given_up]
                if not lost or len(lost) == len(self.engine_units):
                    raise
                self._say(f"{failure}\n  going on without {', '.join(unit.name for unit in lost)}")
                self.engine_units = [unit for unit in self.engine_units if unit not in lost]
                self._phases = [[unit for unit in phase if unit not in lost] for phase in self._phases]

    async def reload(self, read: Read) -> None:
        """Read the settings again, write them for routers and planner, and notify these. Invalid settings
        change nothing; the error is reported, and stored on the bus as the parts store theirs."""
        try:
            settings = read()
            check(self._settings, settings)
        except ConfigError as error:
            self._say(f"new settings are refused: {error}")
            await self._audit(ConfigChanged(part="up", instance=os.getpid(), changed={}, refused=str(error)))
            return
        before, self._settings = self._settings, settings
        try:
            self.write_files()
        except OSError as error:
            self._settings = before
            self._say(f"new settings cannot be written down: {error}")
            return
        self._say("settings were read again; routers, planner and engines are notified")
        async with asyncio.TaskGroup() as tasks:  # a unit that is restarting must not delay the others
            for unit in self.reading_units:
                tasks.create_task(_notify(unit), name=f"tell {unit.name} to read its settings")

    async def _audit(self, event: ConfigChanged) -> None:
        """Store the event, if there is a bus."""
        if not self.nats_url:
            return
        config = replace(self._settings.part(BusConfig), urls=tuple(self.nats_url.split(",")))
        if self._credentials is not None:
            config = replace(config, credentials_file=FilePath(str(self._credentials.file("operator"))))
        subjects = Subjects(config.namespace)
        try:
            bus = await NatsBus.connect(config.servers, subjects, config, name="up")
            try:
                await bus.record(subjects.config(event.part), event)
            finally:
                await bus.close()
        except BusError as error:
            self._say(f"that cannot be stored on the bus: {error}")

    async def __aenter__(self) -> "Fleet":
        return self

    async def __aexit__(self, *_: object) -> None:
        for phase in reversed(self._phases):
            await asyncio.gather(*(unit.stop() for unit in phase))

    async def _start_nats(self) -> str:
        names = [self._engine_name(number) for number in range(self._settings.part(UpConfig).engines)]
        logins = self._credentials = ServerCredentials(
            self.run.folder(FOLDER), Subjects(self._settings.part(BusConfig).namespace), names
        )
        server = NatsServer(
            self.run.folder("nats"), self.run.log("nats"), logins.authorization(), logins.login("operator")
        )
        await self.add(
            Unit("nats", server.launch, replace(self._policy, ready_seconds=NATS_START_SECONDS), self._say)
        )
        await self._all_ready()
        logins.write_files(server.url)
        return server.url

    def _engine_name(self, number: int) -> str:
        return f"{self._worker.name}-{number}"

    def _make_fleet_secret(self) -> None:
        """Create a random fleet secret in the run directory, for routers and ranks whose settings name
        none."""
        unset = [(section, "fleet_secret_file") for section in ("router", "worker")]
        unset = [key for key in unset if dict(self._settings.items())[key].value is None]
        file = self.run.path / FLEET_SECRET
        if len(unset) == 1:
            section, name = unset[0]
            raise UnitFailed(
                f"{section}.{name} is not set, and its counterpart is: routers and ranks need the same"
                " secret; set both, or neither"
            )
        if unset:
            with open(
                os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii"
            ) as out:
                out.write(f"{secrets.token_urlsafe(32)}\n")
            self._secret_files = dict.fromkeys(unset, file.absolute())

    def write_files(self) -> FleetFiles:
        """Write the settings for the children; return all that they share."""
        kept = Path(
            dict(self._settings.items())["tracker", "state_file"].value or self.run.path / TRACKER_STATE
        )
        where: dict[Key, Any] = {
            ("bus", "urls"): self.nats_url.split(",") if self.nats_url else None,
            ("tracker", "state_file"): kept.absolute(),
        }
        where |= self._secret_files
        settings = self._settings.with_flags({key: ("the supervisor", value) for key, value in where.items()})
        file = self.run.path / SETTINGS
        draft = file.with_suffix(".new")
        private_text(draft, settings.as_toml(secrets=True))
        draft.replace(file)  # atomic: a part may be reading it
        return FleetFiles(self.run, file, child_environment(self._environment), self._credentials)

    def _single(self, files: FleetFiles, part: PartName) -> Unit:
        """Return the unit of a single-process part that starts in the same way each time."""
        ready = self.run.path / f"{part}.ready"
        return self._process(files.command(part, ready), ready, None)

    def routers(self, files: FleetFiles, sockets: RouterSockets, *, bus: bool = True) -> list[Unit]:
        """Return one unit per router process: each restarts separately."""
        self.router_url, self.router_urls = sockets.url, sockets.urls if sockets.private else ()
        router = self._settings.part(RouterConfig)
        grace = router.pre_stop_seconds + router.drain_seconds + self._worker.grace_seconds
        units: list[Unit] = []
        for number, url in enumerate(sockets.urls):
            name = f"router-{number}" if sockets.private else "router"
            ready = self.run.path / f"{name}.ready"
            order = sockets.order(number, config=str(files.config_file), ready=str(ready), bus=bus)
            unit = self._process(
                files.ordered(name, order),
                ready,
                f"{url}/health",
                replace(self._policy, grace_seconds=grace),
                units,
            )
            units.append(unit)
        self.reading_units.extend(units)
        return units

    def _process(
        self,
        command: Command,
        ready: Path,
        health: str | None,
        policy: Policy | None = None,
        group: Sequence[Unit] = (),
    ) -> Unit:
        """Return an incarnation of one process. It serves once the file exists, and is healthy while the page
        answers. A process that was stopped separately removes the file and ends within its own time limits:
        it finishes its answers after closing its listen socket."""

        async def answers(page: str) -> None:
            if ready.exists():  # noqa: ASYNC240 a file of one's own
                await _answering(page)

        async def launch() -> Incarnation:
            ready.unlink(missing_ok=True)  # noqa: ASYNC240 a file of one's own
            return Incarnation(
                [command],
                ready=lambda: _existing(ready),
                healthy=None if health is None else lambda: answers(health),
            )

        return Unit(command.name, launch, policy or self._policy, self._say, group)

    def _engine(self, name: str, files: FleetFiles) -> Unit:
        launcher = EngineLauncher(name, engine_ranks(self._settings), self._worker, files)
        self.engines.append(launcher)
        unit = Unit(name, launcher.launch, self._policy, self._say, self.engine_units)
        self.engine_units.append(unit)
        self.reading_units.append(unit)
        return unit

    async def add(self, *units: Unit) -> None:
        """Start units as the next phase: stopped together, before the phases started earlier."""
        self._phases.append([])
        for unit in units:
            unit.start()
            self._phases[-1].append(unit)

    @property
    def _units(self) -> list[Unit]:
        return [unit for phase in self._phases for unit in phase]

    async def _all_ready(self) -> None:
        waiting = [unit for unit in self._units if not unit.is_ready]
        await self._watched(asyncio.gather(*(self._report_ready(unit) for unit in waiting)))

    async def _report_ready(self, unit: Unit) -> None:
        await unit.ready()
        self._say(f"{unit.name} is ready ({time.monotonic() - self._began:.1f} s)")

    def _write_record(self) -> None:
        namespace = self._settings.part(BusConfig).namespace
        engines = tuple(launcher.name for launcher in self.engines)
        nats, router = self.nats_url or None, self.router_url or None
        folder = None if self.logins is None else str(self.logins)
        self.run.write_record(
            Running(
                pid=os.getpid(),
                namespace=namespace,
                nats=nats,
                router=router,
                routers=self.router_urls,
                engines=engines,
                credentials=folder,
            )
        )

    async def _watched(self, work: Awaitable[object]) -> None:
        """Run work while every unit is supervised. Raises UnitFailed when a unit is given up meanwhile."""
        task = asyncio.ensure_future(work)
        failures = [asyncio.create_task(unit.failed(), name=f"watch {unit.name}") for unit in self._units]
        try:
            done, _ = await asyncio.wait([task, *failures], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            for ending in (task, *failures):
                ending.cancel()
            await asyncio.gather(task, *failures, return_exceptions=True)

    async def _care_for_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_CARE_SECONDS)
            await asyncio.to_thread(self.run.shorten_logs)


async def _notify(unit: Unit) -> None:
    """Notify a unit once it serves. A unit that is given up is skipped; `serve` reports it."""
    with contextlib.suppress(UnitFailed):
        await unit.ready()
        for child in unit.children:
            child.signal(signal.SIGHUP)


async def serve_and_reload(fleet: Fleet, read: Read) -> None:
    """Run `Fleet.serve`; at every SIGHUP read the settings again."""
    async with at_hangup(partial(fleet.reload, read), "read the settings again"):
        await fleet.serve()
