"""Who watches a fleet over a long time: how much memory each process has, whether any is left over, and
whether epochs only go forward."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import psutil
from numpy.typing import NDArray

from bus import Bus, Received
from bus.protocol.subjects import Subjects
from fleet.facts.activity import ExpertsActivated
from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationPlanned
from fleet.facts.placements import PlacementCommitted
from fleet.placement import Placement
from tests.system.fleets import Fleet

MIB = 2**20
HOUR = 3600.0
MAX_SLOPE = 24 * MIB
"""bytes per hour, in the second half of a life"""
MAX_GROWN = 12 * MIB
"""in an hour's life, between the third quarter and the last, by their medians"""


@dataclass
class Life:
    """One process from its start to its end: when it was looked at, in seconds since the beginning, and its
    resident memory in bytes."""

    name: str
    pid: int
    at: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.at[-1] - self.at[0]


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one life, over its second half. Bytes."""

    name: str
    pid: int
    seconds: float
    """of the whole life"""
    middle: float
    """median of the third quarter"""
    end: float
    """median of the last quarter"""
    slope: float
    """per hour; Theil-Sen"""
    highest: float
    """highest median of the first three quarters"""
    last_slope: float
    """per hour, in the last quarter alone"""

    @property
    def grown(self) -> float:
        return self.end - self.middle

    @property
    def leaks(self) -> bool:
        """Memory is higher at the end than ever before, and still rising.

        What a leak loses never comes back, so that both hold for it at any time. They do not hold for a
        cache that fills and empties with its users, nor for memory that one large answer needed once
        and that the allocator keeps for the next.
        """
        return (
            self.slope > MAX_SLOPE
            and self.last_slope > MAX_SLOPE
            and self.end > self.highest
            and self.grown > MAX_GROWN * min(1.0, self.seconds / HOUR)
        )


def later(life: Life, seconds: float) -> Life:
    """A life without its first seconds."""
    first = next((at for at, when in enumerate(life.at) if when - life.at[0] >= seconds), len(life.at))
    return Life(life.name, life.pid, life.at[first:], life.resident[first:])


def growth(life: Life) -> Growth:
    """ValueError for a life that was looked at less than eight times."""
    if len(life.at) < 8:
        raise ValueError(f"{life.name} was looked at {len(life.at)} times; 8 are needed")
    at, resident = np.array(life.at), np.array(life.resident, np.float64)
    quarters = [round(len(at) * part / 4) for part in range(5)]
    medians = [float(np.median(resident[first:end])) for first, end in pairwise(quarters)]
    half, last = quarters[2], quarters[3]
    return Growth(
        life.name,
        life.pid,
        life.seconds,
        middle=medians[2],
        end=medians[3],
        slope=theil_sen(at[half:], resident[half:]),
        highest=max(medians[:3]),
        last_slope=theil_sen(at[last:], resident[last:]),
    )


def theil_sen(at: NDArray[np.float64], value: NDArray[np.float64]) -> float:
    """The median of the slopes of all pairs of points, per hour. Sen, "Estimates of the regression
    coefficient based on Kendall's tau", 1968."""
    if len(at) > 400:
        chosen = np.linspace(0, len(at) - 1, 400).astype(int)
        at, value = at[chosen], value[chosen]
    first, second = np.triu_indices(len(at), 1)
    return float(np.median((value[second] - value[first]) / (at[second] - at[first]))) * HOUR


class Memories:
    """Looks at every process of a fleet now and then, while `look_on` runs."""

    def __init__(self, fleet: Fleet) -> None:
        self.lives: list[Life] = []
        self.left_over: list[str] = []
        """processes of the fleet that are nobody's children any more"""
        self._fleet = fleet
        self._present: dict[int, Life] = {}

    async def look_on(self, every: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            await asyncio.to_thread(self._look, loop.time() - began)
            await asyncio.sleep(every)

    def _look(self, now: float) -> None:
        there = {"up": psutil.Process(self._fleet.up.process.pid), **self._fleet.processes()}
        for name, process in there.items():
            life = self._present.get(process.pid)
            if life is None or life.name != name:
                life = self._present[process.pid] = Life(name, process.pid)
                self.lives.append(life)
            try:
                resident = process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            life.at.append(now)
            life.resident.append(resident)
        self._present = {process.pid: self._present[process.pid] for process in there.values()}
        self.left_over += [entries for entries in strays(self._fleet) if entries not in self.left_over]


def strays(fleet: Fleet) -> list[str]:
    """Processes of a fleet that its supervisor does not have below it."""
    ours = {fleet.up.process.pid, *(child.pid for child in fleet.up.children())}
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if (
            str(fleet.run_directory) in command
            and process.pid not in ours
            and process.is_running()
            and process.pid not in _below(fleet)
        ):
            found.append(f"pid {process.pid}: {command[:200]}")
    return found


def _below(fleet: Fleet) -> set[int]:
    """Looked at once more: it may have been started meanwhile."""
    return {child.pid for child in fleet.up.children()}


@dataclass
class Epochs:
    """What an independent listener hears of epochs, and what is wrong with it."""

    messages: int = 0
    committed: int = 0
    highest: dict[tuple[int, int], int] = field(default_factory=dict)
    """by worker and rank: what it said last that it serves; rank -1: what is stored of the worker"""
    wrong: list[str] = field(default_factory=list)

    def note(self, received: Received) -> None:
        match received.message:
            case ExpertsActivated() as counts:
                self.messages += 1
                self._forward((counts.worker_id, counts.rank), counts.epoch, counts.engine)
            case PlacementCommitted() as committed:
                self.committed += 1
                placement = Placement.from_record(committed.placement)
                self._forward((committed.worker_id, -1), placement.epoch, committed.engine)
                for layer in placement.whole:
                    missing = set(range(placement.experts)) - set(placement.expert_of_slot[layer].tolist())
                    if missing:
                        self.wrong.append(
                            f"epoch {placement.epoch} of {committed.engine}, layer {layer}: nobody has"
                            f" experts {sorted(missing)}"
                        )

    def _forward(self, key: tuple[int, int], epoch: int, engine: str) -> None:
        before = self.highest.get(key, -1)
        if epoch < before:
            self.wrong.append(f"{engine} (worker {key[0]}, rank {key[1]}): epoch {epoch} after {before}")
        self.highest[key] = max(epoch, before)


async def listen(bus: Bus, subjects: Subjects, epochs: Epochs) -> None:
    """For ever: to what ranks say that they serve, and to what is stored."""

    async def hear() -> None:
        async with bus.subscribe(subjects.experts()) as messages:
            async for received in messages:
                epochs.note(received)

    async def follow() -> None:
        async for received in bus.replay(subjects.placements()):
            epochs.note(received)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hear(), name="hears which epochs are served")
        tasks.create_task(follow(), name="reads which epochs are stored")


Plans = Sequence[MigrationPlanned | MigrationCommitted | MigrationAborted | object]


def unended(entries: Plans) -> list[str]:
    """Plans of one engine that began, and of which nothing says that they ended."""
    begun = [one.plan for one in entries if isinstance(one, MigrationPlanned)]
    ended = {
        one.plan
        for one in entries
        if isinstance(one, MigrationAborted) or (isinstance(one, MigrationCommitted) and one.last)
    }
    return [plan for plan in dict.fromkeys(begun) if plan not in ended]
