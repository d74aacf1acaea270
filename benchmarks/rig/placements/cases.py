"""Shared parts of the placement benchmark: cases, windows of demand before and after a drift, scores, and
rows with their targets.

A plan is made from one window's sample and scored on the next window's, never on its own. A *table* is int16
[layers, slots], rank-major, -1 empty; `share`, float64 [layers, slots], is the part of its expert's load that
a slot serves; None: replicas share it evenly.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.rig.placements.popularity import SKEWS, Load, drifted, load, sampled
from benchmarks.rig.report import Target
from fleet.dispatch import flows
from fleet.placement import Placement

Table = NDArray[np.int16]
Result = TypeVar("Result")
STEP_TOKENS, TOP_K = 128, 8
"""tokens of a rank in one decode step, and experts per token"""
WINDOW_STEPS = 100
"""steps in a window of demand: 2 % of noise on an expert of average popularity at 8 ranks, 0.6 % at 64"""
SHAPES = ((58, 256), (94, 128))
"""layers, experts"""
SLOTS = {
    (256, 8): (320,),
    (256, 32): (288,),
    (256, 64): (320,),
    (128, 8): (160,),
    (128, 32): (160,),
    (128, 64): (192, 320),
}
"""slots of a layer by experts and ranks"""
DRIFTS = ("noise", "jitter10", "jitter30", "mix25", "full")


@dataclass(frozen=True)
class Row:
    """One measured case with its targets."""

    part: str
    """subject of the measurement; the rows of a part form a table"""
    case: str
    figures: dict[str, float | str]
    """by column name; the same names in all rows of a part"""
    held: tuple[Target, ...] = ()


@dataclass(frozen=True)
class Case:
    """A model on an engine, and one domain's demand for its experts."""

    skew: str
    layers: int
    experts: int
    ranks: int
    slots: int
    seed: int

    def __str__(self) -> str:
        return f"{self.layers} x {self.experts}, {self.ranks} ranks, {self.slots} slots, {self.skew}"

    @property
    def per_rank(self) -> int:
        return self.slots // self.ranks

    @property
    def window(self) -> int:
        """pairs of a layer in a window"""
        return WINDOW_STEPS * self.step

    @property
    def step(self) -> int:
        """pairs of a layer in a decode step"""
        return STEP_TOKENS * TOP_K * self.ranks


def cases(*, skews: tuple[str, ...] = SKEWS, seeds: int = 3) -> Iterator[Case]:
    """Yield every shape, number of ranks, skew and seed, in that order."""
    for layers, experts in SHAPES:
        for ranks in (8, 32, 64):
            for slots in SLOTS[experts, ranks]:
                for skew in skews:
                    for seed in range(seeds):
                        yield Case(skew, layers, experts, ranks, slots, seed)


@dataclass(frozen=True)
class Drifting:
    """A case whose demand changes after its placement has been made."""

    case: Case
    drift: str

    def _dice(self, use: int) -> np.random.Generator:
        return np.random.default_rng(
            [self.case.seed, SKEWS.index(self.case.skew), DRIFTS.index(self.drift), use]
        )

    def __str__(self) -> str:
        return f"{self.case}, {self.drift}"

    @cached_property
    def _truths(self) -> tuple[Load, Load]:
        case, dice = self.case, self._dice(0)
        before, foreign = (load(case.skew, case.layers, case.experts, dice) for _ in range(2))
        return before, drifted(before, foreign, self.drift, dice)

    @cached_property
    def _windows(self) -> tuple[Load, Load, Load]:
        before, after = self._truths
        dice = self._dice(1)
        first, second, third = (sampled(truth, self.case.window, dice) for truth in (before, after, after))
        return first, second, third

    @property
    def before(self) -> Load:
        """Return counts of the window for the placement before the drift."""
        return self._windows[0]

    @property
    def now(self) -> Load:
        """Return counts of the window for new plans."""
        return self._windows[1]

    @property
    def next(self) -> Load:
        """Return counts of the window for scoring."""
        return self._windows[2]

    @cached_property
    def steps(self) -> NDArray[np.float64]:
        """Return float64 [10, layers, experts]: pairs of ten decode steps after the drift."""
        after, dice = self._truths[1], self._dice(2)
        return np.stack(
            [dice.multinomial(self.case.step, truth / truth.sum(), 10) for truth in after], axis=1
        ).astype(np.float64)


def even(table: Table, experts: int) -> NDArray[np.float64]:
    """Return float64 [layers, slots]: even share per replica of an expert; duplicates on a rank count as
    replicas."""
    layers = len(table)
    held = table >= 0
    place = np.arange(layers)[:, None] * experts + np.where(held, table, 0)
    counts = np.bincount(place[held], minlength=layers * experts)
    return np.where(held, 1.0 / np.maximum(counts[place], 1), 0.0)


def rank_loads(
    table: Table, demand: NDArray[Any], ranks: int, share: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Return float64 [..., layers, ranks] of demand [..., layers, experts]."""
    held = table >= 0
    part = even(table, demand.shape[-1]) if share is None else np.where(held, share, 0.0)
    served = demand[..., np.arange(len(table))[:, None], np.where(held, table, 0)] * part
    return np.asarray(served.reshape(*served.shape[:-1], ranks, -1).sum(axis=-1))


def balance(
    table: Table, demand: NDArray[Any], ranks: int, share: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Return float64 [..., layers]: mean over highest load of a rank."""
    loads = rank_loads(table, demand, ranks, share)
    return np.asarray(loads.mean(axis=-1) / np.maximum(loads.max(axis=-1), 1e-300))


def duplicates(table: Table, ranks: int) -> int:
    """Count the slots whose expert is also in another slot of the same rank."""
    rows = np.sort(table.reshape(len(table), ranks, -1), axis=2)
    return int(((rows[:, :, 1:] == rows[:, :, :-1]) & (rows[:, :, 1:] >= 0)).sum())


def split_shares(placement: Placement) -> NDArray[np.float64]:
    """Return float64 [layers, slots]: each slot's part of its expert's load under the placement's split, with
    requests spread evenly over ranks."""
    alike = np.full((placement.ranks, placement.layers, placement.experts), 1.0 / placement.ranks)
    return flows(placement, alike, np.zeros(placement.ranks, np.intp)).served


def timed(call: Callable[[], Result], times: int = 3) -> tuple[Result, float]:
    """Return a call's result, and its median processor milliseconds, all threads together."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        result = call()
        taken.append(1e3 * (time.process_time() - began))
    return result, statistics.median(taken)
