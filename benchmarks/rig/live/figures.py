"""Figures of a serving fleet from its own messages: token destinations, copied bytes, decisions, by
interval."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from bus import Bus, Subscription
from bus.protocol.subjects import Subjects
from fleet.facts.activity import DispatchMeasured
from fleet.facts.demand import PopularityShifted, TablesPublished
from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationPlanned, PlanEvaluated
from fleet.facts.placements import HomesPublished, PlacementCommitted
from fleet.placement import Placement

WIDTH_SECONDS = 5.0
"""window length of a time series"""


class Sent(NamedTuple):
    """Dispatch figures of an interval, all ranks together."""

    tokens: int
    """computed tokens of prompts and answers"""
    remote_ranks: float
    """distinct remote ranks per token, mean over tokens and layers"""
    remote: float
    """share of (token, k) pairs served by a remote rank"""
    step_balance: float
    """mean / highest load of a rank: of single steps, mean over steps and layers"""
    balance: float
    """mean / highest load of a rank: over the whole interval"""
    step_seconds: float
    """mean duration of a step"""
    steps: int


NOTHING = Sent(0, float("nan"), float("nan"), float("nan"), float("nan"), float("nan"), 0)


def sent(reports: Iterable[DispatchMeasured]) -> Sent:
    """Combine the reports of all ranks of one engine; layers without served pairs are sharded and do not
    count."""
    several = list(reports)
    if not several:
        return NOTHING
    served = _by_rank(several)
    layers = served.sum(axis=0) > 0
    tokens, pairs = sum(one.tokens for one in several), sum(one.pairs for one in several)
    steps = sum(one.steps for one in several)
    if not (tokens and pairs and steps and layers.any()):
        return NOTHING
    remote = np.sum([one.remote_ranks for one in several], axis=0)[layers] / tokens
    local = np.sum([one.local for one in several], axis=0)[layers] / pairs
    balance = np.sum([one.balance for one in several], axis=0)[layers] / steps
    loads = served[:, layers]
    ranks = len({one.rank for one in several})
    return Sent(
        tokens=tokens,
        remote_ranks=float(remote.mean()),
        remote=float(1 - local.mean()),
        step_balance=float(balance.mean()),
        balance=float((loads.mean(axis=0) / loads.max(axis=0)).mean()),
        step_seconds=sum(one.step_seconds for one in several) / steps,
        steps=steps // ranks,
    )


def _by_rank(several: list[DispatchMeasured]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return float64 [ranks, layers]: pairs served."""
    ranks = 1 + max(one.rank for one in several)
    found = np.zeros((ranks, len(several[0].served)))
    for one in several:
        found[one.rank] += one.served
    return found


@dataclass
class Watcher:
    """Received messages, with the monotonic second of each."""

    dispatched: list[tuple[float, DispatchMeasured]] = field(default_factory=list)
    moved: list[tuple[float, MigrationCommitted]] = field(default_factory=list)
    planned: list[tuple[float, MigrationPlanned]] = field(default_factory=list)
    aborted: list[tuple[float, MigrationAborted]] = field(default_factory=list)
    judged: list[tuple[float, PlanEvaluated]] = field(default_factory=list)
    shifts: list[tuple[float, PopularityShifted]] = field(default_factory=list)
    gains: list[tuple[float, float, dict[str, float]]] = field(default_factory=list)
    """second, gain, reliability"""
    homes: list[tuple[float, HomesPublished]] = field(default_factory=list)
    placements: list[tuple[float, Placement]] = field(default_factory=list)
    dropped: int = 0

    def hear(self, message: object, now: float) -> None:
        match message:
            case DispatchMeasured():
                self.dispatched.append((now, message))
            case MigrationCommitted():
                self.moved.append((now, message))
            case MigrationPlanned():
                self.planned.append((now, message))
            case MigrationAborted():
                self.aborted.append((now, message))
            case PlanEvaluated():
                self.judged.append((now, message))
            case PopularityShifted():
                self.shifts.append((now, message))
            case TablesPublished():
                self.gains.append((now, message.gain, message.reliability))
            case HomesPublished():
                self.homes.append((now, message))
            case PlacementCommitted():
                self.placements.append((now, Placement.from_record(message.placement)))

    def sent(self, begin: float, end: float) -> Sent:
        """Return the dispatch figures of (begin, end]; a report counts at its arrival, at most a second
        late."""
        return sent(one for arrived, one in self.dispatched if begin < arrived <= end)

    def bytes_moved(self, begin: float, end: float) -> int:
        return sum(one.bytes for arrived, one in self.moved if begin < arrived <= end)

    def handovers(self, begin: float, end: float) -> int:
        return sum(begin < arrived <= end for arrived, _ in self.moved)

    def plans(self, begin: float, end: float) -> list[MigrationPlanned]:
        return [one for arrived, one in self.planned if begin < arrived <= end]

    def course(self, begin: float, end: float) -> "Course":
        """Return the figures of consecutive windows of `WIDTH_SECONDS`."""
        edges = np.arange(begin, end, WIDTH_SECONDS).tolist()
        several = [self.sent(at, at + WIDTH_SECONDS) for at in edges]
        return Course(
            seconds=[round(at + WIDTH_SECONDS / 2 - begin, 2) for at in edges],
            remote_ranks=[_rounded(one.remote_ranks) for one in several],
            balance=[_rounded(one.step_balance) for one in several],
            bytes=[self.bytes_moved(at, at + WIDTH_SECONDS) for at in edges],
        )


class Course(NamedTuple):
    """Time series by window: [windows] each."""

    seconds: list[float]
    """middle of the window, from the beginning"""
    remote_ranks: list[float | None]
    balance: list[float | None]
    """balance of steps; None: no dispatch"""
    bytes: list[int]


def _rounded(value: float) -> float | None:
    return round(value, 4) if np.isfinite(value) else None


@asynccontextmanager
async def watching(bus: Bus, subjects: Subjects) -> AsyncIterator[Watcher]:
    """Collect messages while the context lasts."""
    watcher = Watcher()
    followed = (
        subjects.dispatched(),
        subjects.migrations(),
        subjects.placements(),
        subjects.shifts,
        subjects.homes,
        subjects.tables,
    )

    async def listen(subscription: Subscription) -> None:
        async for received in subscription:
            watcher.hear(received.message, time.monotonic())
            watcher.dropped = subscription.dropped

    async with bus.subscribe(*followed) as subscription:
        task = asyncio.create_task(listen(subscription), name="receives messages of the fleet")
        try:
            yield watcher
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
