"""Makespan of a rollout in one layout, or with one switch, by predicted decode steps. Pure."""

from collections.abc import Callable, Mapping, Sequence
from math import exp

import numpy as np
from scipy.special import ndtri

from fleet.layout_times import LayoutName

_CHUNK = 32
"""tokens of each sequence that are generated at one price; a sequence that ends earlier stays until then"""
StepTime = Callable[[LayoutName, int, int], float]
"""(layout, sequences, mean context) -> seconds"""


def lognormal_lengths(count: int, median: float, spread: float, limit: int) -> list[int]:
    """Return lengths at even quantiles of a log-normal distribution, cut at the limit, in a fixed mixed
    order."""
    quantiles = (np.arange(count) + 0.5) / count
    lengths = [min(limit, max(1, round(median * exp(spread * one)))) for one in ndtri(quantiles).tolist()]
    return [lengths[(at * 1_000_003) % count] for at in range(count)]


def rollout_seconds(
    lengths: Sequence[int],
    prompt: int,
    step: StepTime,
    capacity: Mapping[LayoutName, int],
    layouts: tuple[LayoutName, ...],
    switch_seconds: float = 0.0,
) -> float:
    """Return the seconds to generate all sequences, decoding alone.

    lengths: tokens to generate of each, in their order of admission; capacity: KV tokens of each layout. A
    sequence is admitted when its whole context fits. layouts: one, or two of which the second is changed to
    once nothing waits, everything running fits in it and its step is shorter.
    """
    waiting, seconds = list(lengths[::-1]), 0.0
    left = np.zeros(0, np.int64)
    total = np.zeros(0, np.int64)
    layout, later = layouts[0], layouts[1:]
    while waiting or len(left):
        reserved = int(total.sum()) + prompt * len(total)
        admitted = []
        while waiting and reserved + prompt + waiting[-1] <= capacity[layout]:
            reserved += prompt + waiting[-1]
            admitted.append(waiting.pop())
        if not admitted and not len(left):
            raise ValueError(
                f"rollout: a sequence of {prompt + waiting[-1]:,} tokens does not fit in the"
                f" {capacity[layout]:,} KV tokens of {layout}"
            )
        left, total = (np.concatenate([old, admitted]).astype(np.int64) for old in (left, total))
        context = prompt + int(np.mean(total - left)) + _CHUNK // 2
        if (
            later
            and not waiting
            and reserved <= capacity[later[0]]
            and step(later[0], len(left), context) < step(layout, len(left), context)
        ):
            layout, later = later[0], later[1:]
            seconds += switch_seconds
        generated = int(min(_CHUNK, left.max()))
        seconds += generated * step(layout, len(left), context)
        left = left - generated
        total, left = total[left > 0], left[left > 0]
    return seconds
