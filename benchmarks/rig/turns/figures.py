"""Figures of switches: time beside the bytes, and gaps between tokens with and without turning. Pure."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from benchmarks.rig.engine_ranks import Carried, Diaries, Seconds, Window, gaps_of, within


def covered(begins: Seconds, ends: Seconds, window: Window) -> float:
    """Return the seconds of a window in which at least one of the intervals is open."""
    begins, ends = begins.clip(window.begin, window.end), ends.clip(window.begin, window.end)
    order = np.argsort(begins, kind="stable")
    reached, total = window.begin, 0.0
    for begin, end in zip(begins[order].tolist(), ends[order].tolist(), strict=True):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def bytes_seconds(diaries: Diaries, window: Window) -> float:
    """Return the seconds of a window in which some rank copies parts or compares their checksums."""
    begins, ends = (
        np.concatenate([diary[name][np.isin(diary["stage_name"], ("pull", "verify"))] for diary in diaries])
        for name in ("stage_begin", "stage_end")
    )
    return covered(begins, ends, window)


class Handed(NamedTuple):
    """A switch on an idle engine."""

    seconds: float
    """From the request to the record of the last handover."""
    beside: tuple[float, ...]
    """Of each handover: its time beside the bytes, in seconds; the first includes the making of the plan."""


def handed(carried: Carried, diaries: Diaries) -> Handed:
    """Split a switch into its handovers. Each begins with the record of the one before."""
    moments = (carried.began, *carried.committed)
    windows = [Window(begin, end) for begin, end in pairwise(moments)]
    return Handed(
        carried.seconds,
        tuple(window.end - window.begin - bytes_seconds(diaries, window) for window in windows),
    )


def least_steps(diaries: Diaries, carried: Sequence[Carried]) -> int:
    """Return the fewest steps that any rank ended during any handover."""
    return min(
        int(within(diary["step"], Window(end - event.seconds, end)).sum())
        for one in carried
        for event, end in zip(one.events, one.committed, strict=True)
        for diary in diaries
    )


class Gaps(NamedTuple):
    """Gaps between tokens in windows of several kinds."""

    by_kind: Mapping[str, Sequence[Seconds]]
    """By kind: the gaps of each window, in seconds."""

    @classmethod
    def of(cls, diaries: Diaries, windows: Mapping[str, Sequence[Window]]) -> "Gaps":
        return cls({kind: [gaps_of(diaries, one) for one in found] for kind, found in windows.items()})

    def pooled(self, *kinds: str) -> Seconds:
        """Return all gaps of some kinds of windows."""
        return np.concatenate([gaps for kind in kinds for gaps in self.by_kind[kind]])

    def p99(self, *kinds: str) -> float:
        return float(np.percentile(self.pooled(*kinds), 99))

    def shares_above(self, limit: float, *kinds: str) -> list[float]:
        """Return, for each window, the share of its gaps above a limit."""
        return [float((gaps > limit).mean()) for kind in kinds for gaps in self.by_kind[kind]]


class Excess(NamedTuple):
    """Difference of two means."""

    more: float
    error: float
    """Standard error of the difference."""

    @property
    def beyond_two_errors(self) -> float:
        return self.more - 2 * self.error


def excess(one: Sequence[float], other: Sequence[float]) -> Excess:
    """Return the mean of some windows' figures minus that of others."""

    def squared_error(figures: Sequence[float]) -> float:
        return float(np.var(figures, ddof=1)) / len(figures) if len(figures) > 1 else 0.0

    return Excess(float(np.mean(one) - np.mean(other)), (squared_error(one) + squared_error(other)) ** 0.5)
