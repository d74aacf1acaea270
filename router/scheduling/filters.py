"""Filter of the ranks that may serve a request, with a reason for each exclusion. Pure."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import IntArray
from fleet.timing import queue_seconds
from router import kernels
from router.fleet_state.reservations import BLOCKS, PREFILL, SEQUENCES
from router.fleet_state.target_table import Excluded, RankKey, TargetTable

NONE_EXCLUDED: Mapping[RankKey, str] = MappingProxyType({})
FAILED = "this request failed there before"
REPORTED_BUSY = "saturated: it reported so a moment ago"


class SaturationLimits(NamedTuple):
    """Limits beyond which a rank is saturated."""

    requests: int
    """concurrent requests per rank, unless the rank declares fewer. Those of `TargetTable.ranks` add up"""
    queue_seconds: float
    kv_share: float = 1.0
    """share of its KV blocks; 1: no limit"""

    def max_requests(self, target_table: TargetTable) -> NDArray[np.int64]:
        """Return the number of requests at which each rank is saturated, int64 [targets]."""
        return np.minimum(target_table.max_requests, self.requests * target_table.ranks)

    def blocks(self, target_table: TargetTable) -> NDArray[np.float64]:
        """Return the number of held KV blocks beyond which each rank is saturated, float64 [targets]; inf: no
        limit.
        """
        return (
            np.full(len(target_table.targets), np.inf)
            if self.kv_share >= 1
            else np.asarray(self.kv_share * target_table.kv_blocks)
        )


class QueuePrices(NamedTuple):
    """Seconds per queued prompt token, used to judge saturation: float64 [targets], 0 where the speed is
    neither stated nor measured. highest: the largest of them.
    """

    token_s: NDArray[np.float64]
    highest: float

    @classmethod
    def of(cls, token_s: NDArray[np.float64]) -> "QueuePrices":
        return cls(token_s, float(token_s.max(initial=0.0)))

    @classmethod
    def stated(cls, target_table: TargetTable) -> "QueuePrices":
        """Return the prices declared by the engines."""
        return cls.of(np.where(target_table.stated, target_table.prefill_token_s, 0.0))


class ExclusionReasons(Sequence[Excluded]):
    """Excluded ranks with reasons, rendered only on first access. Under load every decision excludes most
    ranks.
    """

    def __init__(self, render: Callable[[], tuple[Excluded, ...]]) -> None:
        self._render: Callable[[], tuple[Excluded, ...]] | None = render
        self._rendered: tuple[Excluded, ...] = ()

    @property
    def rendered(self) -> tuple[Excluded, ...]:
        if self._render is not None:
            self._rendered, self._render = self._render(), None
        return self._rendered

    @overload
    def __getitem__(self, at: int) -> Excluded: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Excluded]: ...
    def __getitem__(self, at: int | slice) -> Excluded | Sequence[Excluded]:
        return self.rendered[at]

    def __len__(self) -> int:
        return len(self.rendered)


class Candidates(msgspec.Struct, frozen=True):
    """`at`: int [candidates], indices into the target table. `busy`: some ranks were left out only because
    they are saturated. `wait_seconds`: the shortest queue among those, 0.0 without any. `ignored`: exclusions
    that were ignored because no other rank was left.
    """

    at: NDArray[np.intp]
    excluded: Sequence[Excluded]
    busy: bool
    wait_seconds: float
    ignored: tuple[Excluded, ...] = ()


def candidates(
    target_table: TargetTable,
    load: IntArray,
    needed_context: int,
    limits: SaturationLimits,
    avoid: frozenset[RankKey] = frozenset(),
    exclusions: Mapping[RankKey, str] = NONE_EXCLUDED,
    reported_busy: frozenset[RankKey] = frozenset(),
    prices: QueuePrices | None = None,
) -> Candidates:
    """Leave out ranks with too small a context (tokens), saturated ranks (including those that reported so),
    the ranks to `avoid` because this request failed there, and the ranks in `exclusions`, with reasons.

    load: int64 [AMOUNTS, targets]. prices None: as declared by the engines.
    """
    prices = prices or QueuePrices.stated(target_table)
    if (
        not avoid
        and not exclusions
        and not reported_busy
        and needed_context <= target_table.smallest_context
        and _none_saturated(target_table, load, limits, prices)
    ):
        return Candidates(target_table.all_at, target_table.excluded, False, 0.0)
    small, busy = (
        target_table.max_context < needed_context,
        saturated(target_table, load, limits, reported_busy, prices),
    )
    failed = np.zeros(len(small), np.bool_)
    failed[[target_table.index[key] for key in {*exclusions, *avoid} if key in target_table.index]] = True
    out = small | busy | failed
    only_busy = busy & ~small & ~failed
    excluded: Sequence[Excluded] = target_table.excluded
    if out.any():
        excluded = ExclusionReasons(
            partial(
                _exclusions,
                target_table,
                load,
                needed_context,
                limits,
                avoid,
                exclusions,
                reported_busy,
                np.flatnonzero(out),
            )
        )
    wait = float(queue_seconds(prices.token_s, load[PREFILL])[only_busy].min()) if only_busy.any() else 0.0
    return Candidates(np.flatnonzero(~out), excluded, bool(only_busy.any()), wait)


def saturated(
    target_table: TargetTable,
    load: IntArray,
    limits: SaturationLimits,
    reported_busy: frozenset[RankKey] = frozenset(),
    prices: QueuePrices | None = None,
) -> NDArray[np.bool_]:
    """Return the ranks that accept no further request, bool [targets]. Arguments as in `candidates`."""
    prices = prices or QueuePrices.stated(target_table)
    queue = queue_seconds(prices.token_s, load[PREFILL])
    busy: NDArray[np.bool_] = (
        (load[SEQUENCES] >= limits.max_requests(target_table))
        | (queue > limits.queue_seconds)
        | (load[BLOCKS] > limits.blocks(target_table))
    )
    busy[[target_table.index[key] for key in reported_busy if key in target_table.index]] = True
    return busy


def _none_saturated(
    target_table: TargetTable, load: IntArray, limits: SaturationLimits, prices: QueuePrices
) -> bool:
    """Recognise the usual case, no saturated rank, by maxima. May return False although no rank is
    saturated."""
    if not len(target_table.targets):
        return True
    library = kernels.compiled()
    most: Sequence[int] = (
        [max(row) for row in load.tolist()]
        if library is None
        else library.maxima(len(load), load.shape[1], load)
    )
    return (
        most[SEQUENCES] < limits.requests
        and most[SEQUENCES] < target_table.min_requests
        and most[PREFILL] * prices.highest <= limits.queue_seconds
        and (limits.kv_share >= 1 or most[BLOCKS] <= limits.kv_share * target_table.min_kv_blocks)
    )


def _exclusions(
    target_table: TargetTable,
    load: IntArray,
    needed_context: int,
    limits: SaturationLimits,
    avoid: frozenset[RankKey],
    exclusions: Mapping[RankKey, str],
    reported_busy: frozenset[RankKey],
    out: NDArray[np.intp],
) -> tuple[Excluded, ...]:
    """Return the exclusions of the target table, and those of the targets `out`."""
    found = list(target_table.excluded)
    for at in out.tolist():
        target = target_table.targets[at]
        if target.key in exclusions or target.key in avoid:
            reason = exclusions.get(target.key, FAILED)
        elif target.key in reported_busy:
            reason = REPORTED_BUSY
        else:
            reason = _reason(target_table, load, needed_context, limits, at)
        found.append(Excluded(target.engine.engine, target.rank, reason))
    return tuple(found)


def _reason(
    target_table: TargetTable, load: IntArray, needed_context: int, limits: SaturationLimits, at: int
) -> str:
    if target_table.max_context[at] < needed_context:
        return f"its context of {target_table.max_context[at]} tokens is too small for {needed_context}"
    most = int(limits.max_requests(target_table)[at])
    if load[SEQUENCES, at] >= most:
        return f"saturated: {load[SEQUENCES, at]} requests of at most {most}"
    if load[BLOCKS, at] > limits.blocks(target_table)[at]:
        return (
            f"saturated: {load[BLOCKS, at]} of {target_table.kv_blocks[at]:.0f} KV blocks are held by"
            f" requests, more than a share of {limits.kv_share:g}"
        )
    return f"saturated: {load[PREFILL, at]} prompt tokens wait, more than {limits.queue_seconds:g} s of work"
