"""Dispatch statistics of a rank: tokens sent and pairs served. The step thread records, and counting is
deferred until the statistics are taken.

Every rank knows which rank serves every pair of a step, for the tokens of all ranks. Counting takes about
twenty NumPy calls regardless of the number of steps. So steps are stored until several can be counted
together.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine import DispatchCounts, balance

KEPT_PAIRS = 1 << 15
"""Stored (token, k) pairs, over all ranks and layers, from which steps are counted early."""
KEPT_STEPS = 256
MAX_EPOCHS = 16
"""Epochs kept apart until they are taken. Beyond it, the oldest are dropped."""


class FinishedStep(NamedTuple):
    """A completed step."""

    seconds: float
    tokens_by_rank: Sequence[int]
    served_by: Sequence[NDArray[np.int64]]
    """int64 [tokens of all ranks, k] per whole layer: the rank that served each pair. Empty with one rank."""
    communication_seconds: float = 0.0
    """Part of `seconds` spent in collectives, waiting for slower ranks included."""


class DispatchLog:
    """Log of dispatched tokens. `add` is for the step thread, and `take` is thread-safe."""

    def __init__(self, rank: int, *, layers: int, top_k: int) -> None:
        self._rank = rank
        self._layers, self._top_k = layers, top_k
        self._lock = threading.Lock()
        self._epoch = 0
        self._whole: NDArray[np.intp] = np.arange(layers)
        """Whole layers of this epoch."""
        self._steps: list[FinishedStep] = []
        """Steps of this epoch that are not counted yet."""
        self._pairs = 0
        """Pairs in these steps."""
        self._counted: deque[DispatchCounts] = deque(maxlen=MAX_EPOCHS)
        """Counts, one per epoch."""

    def add(self, epoch: int, step: FinishedStep, sharded: Sequence[int] = ()) -> None:
        """Add a completed step in which any rank had a token. epoch: the epoch served in it. sharded: layers
        sharded in this epoch, ascending, for which nothing is counted."""
        with self._lock:
            if epoch != self._epoch:
                self._count_into(self._counted)
                self._epoch = epoch
            self._whole = np.delete(np.arange(self._layers), list(sharded))
            self._steps.append(step)
            self._pairs += sum(step.tokens_by_rank) * self._top_k * self._layers
            if self._pairs >= KEPT_PAIRS or len(self._steps) >= KEPT_STEPS:
                self._count_into(self._counted)

    def take(self) -> tuple[DispatchCounts, ...]:
        """Return the counts since the last call, one per epoch. Empty when there was no step."""
        with self._lock:
            taken, self._counted = self._counted, deque(maxlen=MAX_EPOCHS)
            epoch, whole, steps = self._epoch, self._whole, self._drained()
        self._count(epoch, whole, steps, taken)  # Outside the lock, so that the step thread does not wait.
        return tuple(taken)

    def _drained(self) -> list[FinishedStep]:
        steps, self._steps, self._pairs = self._steps, [], 0
        return steps

    def _count_into(self, counted: deque[DispatchCounts]) -> None:
        self._count(self._epoch, self._whole, self._drained(), counted)

    def _count(
        self, epoch: int, whole: NDArray[np.intp], steps: list[FinishedStep], into: deque[DispatchCounts]
    ) -> None:
        if not steps:
            return
        new = counted(epoch, steps, self._rank, layers=self._layers, whole=whole, top_k=self._top_k)
        into.append(into.pop().with_more(new) if into and into[-1].epoch == epoch else new)


def counted(
    epoch: int,
    steps: Sequence[FinishedStep],
    rank: int,
    *,
    layers: int,
    whole: NDArray[np.intp],
    top_k: int,
) -> DispatchCounts:
    """Count what rank `rank` sent and served in steps of one epoch. There must be at least one step. whole:
    the whole layers, ascending; the others are zero."""
    tokens = np.array([step.tokens_by_rank for step in steps])  # [steps, ranks].
    own = int(tokens[:, rank].sum())
    seconds = sum(step.seconds for step in steps)
    found = np.zeros((4, layers))
    if len(whole):
        alone = tokens.shape[1] == 1
        found[:, whole] = _alone(own, len(steps), top_k) if alone else _among(steps, tokens, rank)
    remote, local, served, balanced = found
    communication = sum(step.communication_seconds for step in steps)
    return DispatchCounts(
        epoch, len(steps), seconds, own, own * top_k, remote, local, served, balanced, communication
    )


def _alone(tokens: int, steps: int, top_k: int) -> NDArray[np.float64]:
    """Same as `_among`, for one rank: all pairs are local. float64 [4, 1]."""
    return np.array([0.0, tokens * top_k, tokens * top_k, steps])[:, None]


def _among(steps: Sequence[FinishedStep], tokens: NDArray[np.int64], rank: int) -> NDArray[np.float64]:
    """float64 [4, whole layers]: ranks reached, local pairs, pairs served, balance. Summed over steps.
    tokens: [steps, ranks]."""
    ranks, layers = tokens.shape[1], len(steps[0].served_by)
    every = _by_layer(steps, [slice(None)] * len(steps))
    # One histogram over (layer, step, rank) in place of one for each: the calls cost more than the counting.
    place = (
        np.arange(layers)[:, None] * len(steps) + np.repeat(np.arange(len(steps)), tokens.sum(axis=1))
    ) * ranks
    loads = np.bincount((place[:, :, None] + every).ravel(), minlength=layers * len(steps) * ranks).reshape(
        layers, len(steps), ranks
    )
    first = tokens[:, :rank].sum(axis=1)
    own = _by_layer(
        steps,
        [
            slice(begin, begin + count)
            for begin, count in zip(first.tolist(), tokens[:, rank].tolist(), strict=True)
        ],
    )
    reached = np.zeros((*own.shape[:2], ranks), np.bool_)
    np.put_along_axis(reached, own, True, axis=2)
    went = reached.sum(axis=1)  # [layers, ranks] own tokens that reach each rank.
    return np.stack(
        [
            went.sum(axis=1) - went[:, rank],
            (own == rank).sum(axis=(1, 2)),
            loads[:, :, rank].sum(axis=1),
            balance(loads).sum(axis=1),
        ]
    )


def _by_layer(steps: Sequence[FinishedStep], rows: Sequence[slice]) -> NDArray[np.int64]:
    """int64 [whole layers, tokens, k] of these rows of each step, in step order."""
    layers = len(steps[0].served_by)
    found = np.concatenate(
        [
            step.served_by[layer][part]
            for layer in range(layers)
            for step, part in zip(steps, rows, strict=True)
        ]
    )
    return found.reshape(layers, -1, found.shape[1])
