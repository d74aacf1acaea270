"""Rank processes of one engine under closed load (`flip_rank`), plans requested of a real planner, and the
gaps between tokens."""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.rig.flip_rank import Job
from benchmarks.rig.processes import ROOT
from bus import Bus, Declined, Message, Subscription
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from fleet.facts.migrations import MigrationAborted, MigrationCommitted
from fleet.facts.placements import PlacementCommitted
from fleet.placement import Placement
from fleet.requests.plans import MigrationAccepted

START_SECONDS = 120.0
PLAN_SECONDS = 120.0
ORDER_SECONDS = 120.0
DONE = b"done\n"
"""Answer of a rank to an order."""
_TRIES, _PAUSE_SECONDS = 500, 0.002
Seconds = NDArray[np.float64]
Diaries = list[dict[str, NDArray[Any]]]
"""by rank: `flip_rank.Diary` by the names of its fields"""


@dataclass
class Window:
    """A stretch of a run, in seconds of the machine-wide clock."""

    begin: float
    end: float
    migrating: bool = False
    handover_seconds: list[float] = field(default_factory=list)
    """of each migration, from the request to the last rank's flip"""


class Ranks:
    """Rank processes; ended with the context."""

    def __init__(self, folder: Path, children: Sequence[asyncio.subprocess.Process]) -> None:
        self._folder = folder
        self._children = children

    async def obey(self, order: bytes) -> None:
        """Give all ranks an order, one line, and wait until each has carried it out. RuntimeError when a rank
        ends instead."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write(order + b"\n")
        for rank, child in enumerate(self._children):
            assert child.stdout is not None
            answer = await asyncio.wait_for(child.stdout.readline(), ORDER_SECONDS)
            if answer != DONE:
                raise RuntimeError(f"rank {rank} answers an order with {answer!r}; see its standard error")

    async def diaries(self) -> Diaries:
        """Stop the ranks and read their diaries."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
        for child in self._children:
            await asyncio.wait_for(child.wait(), START_SECONDS)
        return [dict(np.load(self._folder / f"{rank}.npz")) for rank in range(len(self._children))]


@asynccontextmanager
async def ranks_of(job: Job, program: str = "benchmarks.rig.flip_rank") -> AsyncIterator[Ranks]:
    """Run the ranks of a job until the context ends; they serve when it begins. program: module of a rank."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-")))
        (folder / "job.json").write_bytes(msgspec.json.encode(job))
        children = []
        for rank in range(job.ranks):
            command = [sys.executable, "-m", program, str(folder / "job.json"), str(rank)]
            child = await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            stack.push_async_callback(_end, child)
            children.append(child)
        for rank, child in enumerate(children):
            assert child.stdout is not None
            if b"ready" not in await asyncio.wait_for(child.stdout.readline(), START_SECONDS):
                raise RuntimeError(f"rank {rank} did not start; see its standard error")
        yield Ranks(folder, children)


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.kill()
    await child.wait()


class Carried(NamedTuple):
    """A plan that was carried out, in seconds of the machine-wide clock."""

    began: float
    """Request."""
    committed: tuple[float, ...]
    """Records of its handovers, each after the last rank's flip."""
    events: tuple[MigrationCommitted, ...]

    @property
    def seconds(self) -> float:
        return self.committed[-1] - self.began


class Requester:
    """Request one plan after the other, and follow each to its end."""

    def __init__(
        self, bus: Bus, subjects: Subjects, engine: str, heard: Subscription, placement: Placement
    ) -> None:
        self.engine = engine
        self.placement = placement
        self._bus = bus
        self._subjects = subjects
        self._messages = aiter(heard)

    async def carry_out(self, request: Message) -> Carried:
        """Request a plan, and wait until its last handover is recorded. RuntimeError when it is given up."""
        began = time.monotonic()
        answer = await self._ask(request)
        if not isinstance(answer, MigrationAccepted):
            raise TypeError(f"the planner answered with {answer!r}")
        events: list[MigrationCommitted] = []
        times: list[float] = []
        async with asyncio.timeout(PLAN_SECONDS):
            # The two kinds of events are heard in either order.
            while not events or not events[-1].last or self.placement.epoch < events[-1].epoch:
                message = (await anext(self._messages)).message
                if isinstance(message, PlacementCommitted):
                    self.placement = Placement.from_record(message.placement)
                elif isinstance(message, MigrationAborted):
                    raise RuntimeError(f"a migration was given up: {message}")  # noqa: TRY004
                elif isinstance(message, MigrationCommitted):
                    events.append(message)
                    times.append(time.monotonic())
        return Carried(began, tuple(times), tuple(events))

    async def _ask(self, request: Message) -> Message:
        """Send a request. The planner may hear a moment later than we that its last plan has ended."""
        for _ in range(_TRIES):
            try:
                return await self._bus.request(self._subjects.migrate, request, 10.0)
            except Declined as refusal:
                if "try again when that has ended" not in str(refusal):
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)
        raise TimeoutError("the planner does not end its plan")


@asynccontextmanager
async def requester(url: str, engine: str) -> AsyncIterator[Requester]:
    """Connect to the bus, and learn the engine's first placement."""
    subjects = Subjects()
    bus = await NatsBus.connect(url, subjects, BusConfig(), name="operator")
    try:
        async with bus.subscribe(subjects.placements(engine), subjects.migrations(engine)) as heard:
            first = [
                one.message
                async for one in bus.replay(subjects.placements(engine), latest=True, follow=False)
            ]
            if not first or not isinstance(first[-1], PlacementCommitted):
                raise RuntimeError("the planner did not record the engine's first placement")
            yield Requester(bus, subjects, engine, heard, Placement.from_record(first[-1].placement))
    finally:
        await bus.close()


def within(times: Seconds, window: Window) -> NDArray[np.bool_]:
    """Return which times lie in a window: bool [n]."""
    return (times >= window.begin) & (times < window.end)


def gaps_of(diaries: Diaries, window: Window) -> Seconds:
    """Return the seconds between tokens that came in a window, on all ranks."""
    return np.concatenate([diary["gap"][within(diary["token"], window)] for diary in diaries])
