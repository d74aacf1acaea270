"""Engines of ranks without a model, coordinators and a NATS server, each in a process of its own: to be
killed, stopped, and judged by what is left."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bus import Bus, BusError
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.configuration_loader import Configuration
from deploy.launch_spec import LaunchSpec
from deploy.local.parent_death import wrapped
from deploy.parts.resume import last_record
from deploy.process import alongside
from deploy.sections import read_settings
from fleet.requests.handovers import (
    AbortHandover,
    CommitHandover,
    DescribeHandover,
    HandoverDescribed,
    ProposeHandover,
)
from migration.model.plan import Plan
from tests.conftest import NatsServer
from tests.faults.expert_contents import RANKS, first_placement
from tests.faults.rank_alone import Life
from tests.faults.records import History, Records

ROOT = Path(__file__).resolve().parents[2]
RANK = Path(__file__).with_name("rank_alone.py")
START_SECONDS = 30.0
LOOK_SECONDS = 0.02
TRANSFER = {
    "backend": "nixl",
    "bytes_per_second": 1_000_000,
    "piece_bytes": 8192,
    "min_seconds": 1.0,
    "lease_seconds": 2.0,
    "retries": 1,
    "niceness": 0,
}
"""An expert takes a tenth of a second, in a dozen pieces: time for something to go wrong"""
PLANNER = {
    "lease_seconds": 0.6,
    "silent_seconds": 1.0,
    "repeat_seconds": 0.2,
    "retry_seconds": 0.2,
    "stage_seconds": 3.0,
}
AGENT = {"heartbeat_seconds": 0.25, "lease_seconds": 0.8}
Found = TypeVar("Found")


async def until(
    condition: Callable[[], Awaitable[Found | None] | Found | None],
    what: str | Callable[[], str],
    seconds: float,
    *,
    every: float = LOOK_SECONDS,
) -> Found:
    """Look until something is true, and return it: other processes have no event to wait for. every:
    seconds."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return found
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {seconds} s: {what if isinstance(what, str) else what()}")
        await asyncio.sleep(every)


class Process:
    """A child that dies with us. It answers lines on its standard input, if it is one that does."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self.ended = False
        """by us"""
        self.caught_up = False
        """Whether all that it was to say has been read. A test that fails while it waits for an answer leaves
        one behind, and the next test would take it for its own."""
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()

    async def start(self, *command: str, environment: dict[str, str] | None = None) -> None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ROOST_", "OTEL_", "UCX_"))
        }
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *wrapped([sys.executable, *command], os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})},
            )

    @property
    def running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.name} was never started"
        return self._process

    @property
    def pid(self) -> int:
        return self.running.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def line(self, seconds: float) -> str:
        """The next line it says; AssertionError when it ends instead, or is silent."""
        assert self.running.stdout is not None
        self.caught_up = False
        try:
            async with asyncio.timeout(seconds):
                messages = await self.running.stdout.readline()
        except TimeoutError:
            raise AssertionError(
                f"{self.name} says nothing within {seconds} s; its log ends:\n{self.tail}"
            ) from None
        assert messages, f"{self.name} has ended; its log ends:\n{self.tail}"
        self.caught_up = True
        return messages.decode()

    async def ask(self, question: str = "standing", seconds: float = 10.0) -> dict[str, Any]:
        """How it stands; or its belongings."""
        assert self.running.stdin is not None
        async with self._asking:
            self.caught_up = False
            self.running.stdin.write(f"{question}\n".encode())
            await self.running.stdin.drain()
            found: dict[str, Any] = json.loads(await self.line(seconds))
            return found

    async def kill(self) -> None:
        """As `kill -9` does, and gone when this returns."""
        await self.end(signal.SIGKILL)

    async def end(self, number: signal.Signals, seconds: float = 10.0) -> int:
        """Send a signal and wait for the end."""
        self.ended = True
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.send(number)
        assert self.running.stdin is not None
        self.running.stdin.close()
        async with asyncio.timeout(seconds):
            status = await self.running.wait()
        self.running._transport.close()  # type: ignore[attr-defined]  # a pipe that a grandchild kept would leave it open
        return status

    @property
    def token(self) -> int:
        """With which it led last, if it is a coordinator; 0: it never did."""
        return max(
            map(int, re.findall(r"leading, with token (\d+)", self.log.read_text(errors="replace"))),
            default=0,
        )

    @property
    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


class FleetFixture:
    """Everything of one test module: NATS, coordinators, engines, and the judge's own connection."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.namespace = f"faults-{secrets.token_hex(4)}"
        self.subjects = Subjects(self.namespace)
        self.nats = NatsServer(folder / "nats")
        self.coordinators: list[Process] = []
        self.bus: Bus
        self.records: Records
        self._numbers = itertools.count()

    @asynccontextmanager
    async def open(self) -> AsyncIterator["FleetFixture"]:
        self.nats.start()
        try:
            self.bus = await NatsBus.connect(self.nats.url, self.subjects, self.bus_config, name="judge")
            try:
                self.records = Records(self.bus, self.subjects)
                async with alongside(self.records.follow(), "reads what is stored"):
                    yield self
            finally:
                for coordinator in self.coordinators:
                    if coordinator.alive:
                        await coordinator.kill()
                await self.bus.close()
        finally:
            self.nats.stop()

    @property
    def bus_config(self) -> BusConfig:
        return BusConfig(url=self.nats.url, namespace=self.namespace, reconnect_max_seconds=0.2)

    async def add_coordinator(self, **settings: Any) -> Process:
        """Another migration service, serving when this returns (as leader or not)."""
        number = next(self._numbers)
        ready, config = (
            self.folder / f"coordinator-{number}.ready",
            self.folder / f"coordinator-{number}.toml",
        )
        config.write_text(self._settings(settings).as_toml(sources=False))
        process = Process(f"coordinator {number}", self.folder / f"coordinator-{number}.log")
        await process.start(
            "-P",
            "-m",
            "deploy",
            msgspec.json.encode(LaunchSpec(part="planner", config=str(config), ready=str(ready))).decode(),
        )
        self.coordinators.append(process)
        await until(
            lambda: ready.exists() or not process.alive,
            lambda: f"{process.name} is ready:\n{process.tail}",
            START_SECONDS,
        )
        assert process.alive, f"{process.name} ended with {process.running.returncode}:\n{process.tail}"
        return process

    def check(self) -> None:
        """AssertionError when a coordinator has ended by itself."""
        for one in self.coordinators:
            assert one.alive or one.ended, (
                f"{one.name} has ended by itself, with status {one.running.returncode}; its log"
                f" ends:\n{one.tail}"
            )

    @property
    def leader(self) -> Process:
        """The coordinator that took the lead last. AssertionError when none did."""
        assert any(one.token for one in self.coordinators if one.alive), "nobody ever led"
        return max((one for one in self.coordinators if one.alive), key=lambda one: one.token)

    def _settings(self, planner: dict[str, Any]) -> Configuration:
        environment = {
            "ROOST_BUS_URL": self.nats.url,
            "ROOST_BUS_NAMESPACE": self.namespace,
            "ROOST_BUS_RECONNECT_MAX_SECONDS": "0.2",
        }
        environment |= {
            f"ROOST_PLANNER_{name.upper()}": str(value) for name, value in (PLANNER | planner).items()
        }
        return read_settings(None, environment, self.folder)


class Engine:
    """One engine of the house through its lives. Ranks are processes; all of one life are started and ended
    together."""

    def __init__(
        self, deployment: FleetFixture, name: str, *, ucx: str = "", transfer: dict[str, Any] | None = None
    ) -> None:
        """ucx: which of UCX's transports; empty: all there are. transfer: beside TRANSFER."""
        self.name = name
        self.deployment = deployment
        self.ranks: list[Process] = []
        self.worker_id = 0
        self._lives = 0
        self._environment = {"UCX_TLS": ucx} if ucx else {}
        self._transfer = {**TRANSFER, **(transfer or {})}

    @property
    def history(self) -> History:
        return self.deployment.records.history(self.name)

    async def live(self) -> None:
        """Begin a new life where the record says that the last one ended."""
        before, self.worker_id = self.worker_id or None, secrets.randbits(63) + 1
        self._lives += 1
        stem = f"{self.name}-{self._lives}"
        placement = (
            await last_record(self.deployment.bus, self.deployment.subjects, self.name)
            or first_placement().record()
        )
        self.ranks = []
        for rank in range(RANKS):
            life = Life(
                engine=self.name,
                worker_id=self.worker_id,
                rank=rank,
                ranks=RANKS,
                nats=self.deployment.nats.url,
                namespace=self.deployment.namespace,
                meet=str(self.deployment.folder / f"{stem}.steps"),
                placement=placement,
                replaces=before,
                transfer=self._transfer,
                agent=AGENT,
            )
            file = self.deployment.folder / f"{stem}-{rank}.json"
            file.write_bytes(msgspec.json.encode(life))
            process = Process(f"{self.name}/{rank}", self.deployment.folder / f"{stem}-{rank}.log")
            self.ranks.append(process)
            await process.start(str(RANK), str(file), environment=self._environment)
        for process in self.ranks:
            assert await process.line(START_SECONDS) == "joined\n", process.tail
        self.deployment.check()
        await until(self._known, f"the placement of {self.name} is recorded", 20.0)

    def _known(self) -> bool:
        return any(one.worker_id == self.worker_id for one in self.history.placements)

    async def die(self) -> None:
        """All ranks at once, as a supervisor ends an engine of which one is gone."""
        await asyncio.gather(*(process.kill() for process in self.ranks))

    async def leave(self) -> None:
        """In good order: every rank ends by itself, with status 0."""
        await asyncio.gather(*(self._leave(process) for process in self.ranks))

    async def _leave(self, process: Process) -> None:
        assert process.running.stdin is not None
        process.running.stdin.close()
        async with asyncio.timeout(15):
            assert await process.running.wait() == 0, process.tail

    async def order(self, plan: Plan, seconds: float = 20.0, *, patiently: bool = True) -> None:
        """`Records.order`."""
        await self.deployment.records.order(self.name, plan, seconds, patiently=patiently)

    async def command(self, command: ProposeHandover | CommitHandover | AbortHandover) -> HandoverDescribed:
        """What a rank answers to a command, from whoever it is."""
        answer = await self.deployment.bus.request(
            self.deployment.subjects.handover(self.name, self.worker_id, command.rank), command
        )
        assert isinstance(answer, HandoverDescribed)
        return answer

    async def described(self, rank: int) -> HandoverDescribed | None:
        """Where a rank says it is; None: it does not answer."""
        try:
            answer = await self.deployment.bus.request(
                self.deployment.subjects.handover(self.name, self.worker_id, rank),
                DescribeHandover(worker_id=self.worker_id, rank=rank),
                1.0,
            )
        except BusError:
            return None
        assert isinstance(answer, HandoverDescribed)
        return answer
