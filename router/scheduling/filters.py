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
from router.fleet_state.reservations import BLOCKS, PREFILL, SEQUENCES
from router.fleet_state.target_table import Excluded, RankKey, TargetTable

NOBODY: Mapping[RankKey, str] = MappingProxyType({})
FAILED = "this request failed there before"
SAID_BUSY = "saturated: it reported so a moment ago"


class SaturationLimits(NamedTuple):
    """Limits beyond which a rank is saturated."""

    requests: int
    """concurrent requests per rank, unless the rank declares fewer"""
    queue_seconds: float
    kv_share: float = 1.0
    """share of its KV blocks; 1: no limit"""

    def most_requests(self, roster: TargetTable) -> NDArray[np.int64]:
        """Return the number of requests at which each rank is saturated, int64 [targets]."""
        return np.minimum(roster.max_requests, self.requests)

    def blocks(self, roster: TargetTable) -> NDArray[np.float64]:
        """Return the number of held KV blocks beyond which each rank is saturated, float64 [targets]; inf: no
        limit.
        """
        return (
            np.full(len(roster.targets), np.inf)
            if self.kv_share >= 1
            else np.asarray(self.kv_share * roster.kv_blocks)
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
    def stated(cls, roster: TargetTable) -> "QueuePrices":
        """Return the prices declared by the engines."""
        return cls.of(np.where(roster.stated, roster.prefill_token_s, 0.0))


class ExclusionReasons(Sequence[Excluded]):
    """Excluded ranks with reasons, rendered only on first access. Under load every decision excludes most
    ranks.
    """

    def __init__(self, tell: Callable[[], tuple[Excluded, ...]]) -> None:
        self._render: Callable[[], tuple[Excluded, ...]] | None = tell
        self._rendered: tuple[Excluded, ...] = ()

    @property
    def told(self) -> tuple[Excluded, ...]:
        if self._render is not None:
            self._rendered, self._render = self._render(), None
        return self._rendered

    @overload
    def __getitem__(self, at: int) -> Excluded: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Excluded]: ...
    def __getitem__(self, at: int | slice) -> Excluded | Sequence[Excluded]:
        return self.told[at]

    def __len__(self) -> int:
        return len(self.told)


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
    roster: TargetTable,
    load: IntArray,
    needed_context: int,
    limits: SaturationLimits,
    avoid: frozenset[RankKey] = frozenset(),
    barred: Mapping[RankKey, str] = NOBODY,
    said_busy: frozenset[RankKey] = frozenset(),
    prices: QueuePrices | None = None,
) -> Candidates:
    """Leave out ranks with too small a context (tokens), saturated ranks (including those that reported so),
    the ranks to `avoid` because this request failed there, and the `barred` ranks with their reasons.

    load: int64 [AMOUNTS, targets]. prices None: as declared by the engines.
    """
    prices = prices or QueuePrices.stated(roster)
    if (
        not avoid
        and not barred
        and not said_busy
        and needed_context <= roster.smallest_context
        and _none_saturated(roster, load, limits, prices)
    ):
        return Candidates(roster.all_at, roster.excluded, False, 0.0)
    small, busy = roster.max_context < needed_context, saturated(roster, load, limits, said_busy, prices)
    failed = np.zeros(len(small), np.bool_)
    failed[[roster.index[key] for key in {*barred, *avoid} if key in roster.index]] = True
    out = small | busy | failed
    only_busy = busy & ~small & ~failed
    excluded: Sequence[Excluded] = roster.excluded
    if out.any():
        excluded = ExclusionReasons(
            partial(
                _exclusions,
                roster,
                load,
                needed_context,
                limits,
                avoid,
                barred,
                said_busy,
                np.flatnonzero(out),
            )
        )
    wait = float(queue_seconds(prices.token_s, load[PREFILL])[only_busy].min()) if only_busy.any() else 0.0
    return Candidates(np.flatnonzero(~out), excluded, bool(only_busy.any()), wait)


def saturated(
    roster: TargetTable,
    load: IntArray,
    limits: SaturationLimits,
    said_busy: frozenset[RankKey] = frozenset(),
    prices: QueuePrices | None = None,
) -> NDArray[np.bool_]:
    """Return the ranks that accept no further request, bool [targets]. Arguments as in `candidates`."""
    prices = prices or QueuePrices.stated(roster)
    queue = queue_seconds(prices.token_s, load[PREFILL])
    busy: NDArray[np.bool_] = (
        (load[SEQUENCES] >= limits.most_requests(roster))
        | (queue > limits.queue_seconds)
        | (load[BLOCKS] > limits.blocks(roster))
    )
    busy[[roster.index[key] for key in said_busy if key in roster.index]] = True
    return busy


def _none_saturated(
    roster: TargetTable, load: IntArray, limits: SaturationLimits, prices: QueuePrices
) -> bool:
    """Recognise the usual case, no saturated rank, by maxima. May return False although no rank is
    saturated."""
    if not len(roster.targets):
        return True
    most: list[int] = np.maximum.reduce(load, axis=1).tolist()
    return (
        most[SEQUENCES] < limits.requests
        and most[SEQUENCES] < roster.fewest_requests
        and most[PREFILL] * prices.highest <= limits.queue_seconds
        and (limits.kv_share >= 1 or most[BLOCKS] <= limits.kv_share * roster.fewest_kv_blocks)
    )


def _exclusions(
    roster: TargetTable,
    load: IntArray,
    needed_context: int,
    limits: SaturationLimits,
    avoid: frozenset[RankKey],
    barred: Mapping[RankKey, str],
    said_busy: frozenset[RankKey],
    out: NDArray[np.intp],
) -> tuple[Excluded, ...]:
    """Return the exclusions of the target table, and those of the targets `out`."""
    found = list(roster.excluded)
    for at in out.tolist():
        target = roster.targets[at]
        if target.key in barred or target.key in avoid:
            reason = barred.get(target.key, FAILED)
        elif target.key in said_busy:
            reason = SAID_BUSY
        else:
            reason = _reason(roster, load, needed_context, limits, at)
        found.append(Excluded(target.engine.engine, target.rank, reason))
    return tuple(found)


def _reason(
    roster: TargetTable, load: IntArray, needed_context: int, limits: SaturationLimits, at: int
) -> str:
    if roster.max_context[at] < needed_context:
        return f"its context of {roster.max_context[at]} tokens is too small for {needed_context}"
    most = min(limits.requests, int(roster.max_requests[at]))
    if load[SEQUENCES, at] >= most:
        return f"saturated: {load[SEQUENCES, at]} requests of at most {most}"
    if load[BLOCKS, at] > limits.blocks(roster)[at]:
        return (
            f"saturated: {load[BLOCKS, at]} of {roster.kv_blocks[at]:.0f} KV blocks are held by requests,"
            f" more than a share of {limits.kv_share:g}"
        )
    return f"saturated: {load[PREFILL, at]} prompt tokens wait, more than {limits.queue_seconds:g} s of work"
