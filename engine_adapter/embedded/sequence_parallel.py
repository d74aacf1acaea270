"""Split a large step of a one-rank engine among threads. Each computes whole sequences with one torch thread,
so no result bit changes."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch

Result = TypeVar("Result")

MIN_TOKENS = 128
"""Minimum tokens per thread for splitting. Below it, operations are so short that threads mostly wait for the
GIL."""


def share(tokens: Sequence[int], threads: int, min_tokens: int = MIN_TOKENS) -> list[slice]:
    """Split sequences with these `tokens` into runs of about equal sums, one per thread. Use fewer runs, down
    to one, where a run would have under `min_tokens`."""
    ends = np.cumsum(tokens, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    for parts in range(min(threads, total // min_tokens), 1, -1):
        # A sequence belongs to the run that contains its midpoint.
        run = ((2 * ends - tokens) * parts // (2 * total)).clip(max=parts - 1)
        if np.bincount(run, weights=tokens, minlength=parts).min() >= min_tokens:
            bounds = np.searchsorted(run, np.arange(parts + 1)).tolist()
            return [slice(begin, end) for begin, end in pairwise(bounds)]
    return [slice(0, len(tokens))]


class ThreadTeam:
    """The calling thread and `threads - 1` more, which sleep between calls."""

    def __init__(self, threads: int) -> None:
        """ValueError for fewer than one thread."""
        if threads < 1:
            raise ValueError(f"thread team: {threads} threads; at least 1 must compute")
        self.threads = threads
        # Each worker uses one torch thread. The setting is per thread.
        self._others = (
            ThreadPoolExecutor(threads - 1, "computes", torch.set_num_threads, (1,)) if threads > 1 else None
        )

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run the calls in parallel, at most one per thread, and return their results in order. All calls
        have ended when this returns or raises."""
        if self._others is None or len(calls) == 1:
            return [call() for call in calls]
        with ExitStack() as ended:
            others = [self._others.submit(call) for call in calls[1:]]
            for other in others:
                ended.callback(other.exception)
            return [calls[0](), *(other.result() for other in others)]

    def close(self) -> None:
        """End the other threads."""
        if self._others is not None:
            self._others.shutdown()
