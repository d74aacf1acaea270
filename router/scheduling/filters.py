"""Which ranks may take a request: a filter that gives a reason for each it leaves out. Pure."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.timing import queue_seconds
from router.fleet_state.reservations import BLOCKS, PREFILL, SEQUENCES, Amounts
from router.fleet_state.target_table import Excluded, RankKey, TargetTable

NOBODY: Mapping[RankKey, str] = MappingProxyType({})
FAILED = "this request failed there before"
SAID_BUSY = "saturated: it said so itself a moment ago"


class SaturationLimits(NamedTuple):
    """What makes a rank saturated."""

    requests: int
    """that a rank is given at once, unless it names fewer itself"""
    queue_seconds: float
    kv_share: float = 1.0
    """of its KV blocks; 1: never for this reason"""

    def most_requests(self, roster: TargetTable) -> NDArray[np.int64]:
        """int64 [targets]: requests with which each rank is saturated."""
        return np.minimum(roster.max_requests, self.requests)

    def blocks(self, roster: TargetTable) -> NDArray[np.float64]:
        """float64 [targets]: KV blocks held beyond which each rank is saturated; inf: never."""
        return np.full(len(roster.targets), np.inf) if self.kv_share >= 1 else np.asarray(self.kv_share * roster.kv_blocks)


class QueuePrices(NamedTuple):
    """Seconds of each queued prompt token by which a rank may be called saturated: float64 [targets], 0 where nobody stated or measured a
    speed. highest: the largest of them."""

    token_s: NDArray[np.float64]
    highest: float

    @classmethod
    def of(cls, token_s: NDArray[np.float64]) -> "QueuePrices":
        return cls(token_s, float(token_s.max(initial=0.0)))

    @classmethod
    def stated(cls, roster: TargetTable) -> "QueuePrices":
        """As engines state them."""
        return cls.of(np.where(roster.stated, roster.prefill_token_s, 0.0))


class ExclusionReasons(Sequence[Excluded]):
    """Who was left out, put into words when somebody reads it: under load that is most ranks, with every decision."""

    def __init__(self, tell: Callable[[], tuple[Excluded, ...]]) -> None:
        self._tell: Callable[[], tuple[Excluded, ...]] | None = tell
        self._told: tuple[Excluded, ...] = ()

    @property
    def told(self) -> tuple[Excluded, ...]:
        if self._tell is not None:
            self._told, self._tell = self._tell(), None
        return self._told

    @overload
    def __getitem__(self, at: int) -> Excluded: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Excluded]: ...
    def __getitem__(self, at: int | slice) -> Excluded | Sequence[Excluded]:
        return self.told[at]

    def __len__(self) -> int:
        return len(self.told)


class Candidates(msgspec.Struct, frozen=True):
    """`at`: int [candidates], indices into the roster. `busy`: some ranks were left out for saturation alone.
    `wait_seconds`: the shortest queue among those, 0.0 without any. `ignored`: reasons that were not heeded because nobody else was left."""

    at: NDArray[np.intp]
    excluded: Sequence[Excluded]
    busy: bool
    wait_seconds: float
    ignored: tuple[Excluded, ...] = ()


def candidates(
    roster: TargetTable,
    load: Amounts,
    needed_context: int,
    limits: SaturationLimits,
    avoid: frozenset[RankKey] = frozenset(),
    barred: Mapping[RankKey, str] = NOBODY,
    said_busy: frozenset[RankKey] = frozenset(),
    prices: QueuePrices | None = None,
) -> Candidates:
    """Leave out ranks whose context is too small (tokens), saturated ones, also by their own word, those to avoid because this request failed
    there, and those that nobody should use now, with the reason.

    load: int64 [AMOUNTS, targets]. prices: None, as engines state them.
    """
    prices = prices or QueuePrices.stated(roster)
    if not avoid and not barred and not said_busy and needed_context <= roster.smallest_context and _nobody_busy(roster, load, limits, prices):
        return Candidates(roster.all_at, roster.excluded, False, 0.0)
    small, busy = roster.max_context < needed_context, saturated(roster, load, limits, said_busy, prices)
    failed = np.zeros(len(small), np.bool_)
    failed[[roster.index[key] for key in {*barred, *avoid} if key in roster.index]] = True
    out = small | busy | failed
    only_busy = busy & ~small & ~failed
    excluded = (
        ExclusionReasons(partial(_told, roster, load, needed_context, limits, avoid, barred, said_busy, np.flatnonzero(out))) if out.any() else roster.excluded
    )
    wait = float(queue_seconds(prices.token_s, load[PREFILL])[only_busy].min()) if only_busy.any() else 0.0
    return Candidates(np.flatnonzero(~out), excluded, bool(only_busy.any()), wait)


def saturated(
    roster: TargetTable, load: Amounts, limits: SaturationLimits, said_busy: frozenset[RankKey] = frozenset(), prices: QueuePrices | None = None
) -> NDArray[np.bool_]:
    """bool [targets]: which ranks take no more requests. Arguments as above."""
    prices = prices or QueuePrices.stated(roster)
    queue = queue_seconds(prices.token_s, load[PREFILL])
    busy: NDArray[np.bool_] = (load[SEQUENCES] >= limits.most_requests(roster)) | (queue > limits.queue_seconds) | (load[BLOCKS] > limits.blocks(roster))
    busy[[roster.index[key] for key in said_busy if key in roster.index]] = True
    return busy


def _nobody_busy(roster: TargetTable, load: Amounts, limits: SaturationLimits, prices: QueuePrices) -> bool:
    """The usual case, told by two maxima; it may say no where the answer is yes."""
    if not len(roster.targets):
        return True
    most: list[int] = np.maximum.reduce(load, axis=1).tolist()
    return (
        most[SEQUENCES] < limits.requests
        and most[SEQUENCES] < roster.fewest_requests
        and most[PREFILL] * prices.highest <= limits.queue_seconds
        and (limits.kv_share >= 1 or most[BLOCKS] <= limits.kv_share * roster.fewest_kv_blocks)
    )


def _told(
    roster: TargetTable,
    load: Amounts,
    needed_context: int,
    limits: SaturationLimits,
    avoid: frozenset[RankKey],
    barred: Mapping[RankKey, str],
    said_busy: frozenset[RankKey],
    out: NDArray[np.intp],
) -> tuple[Excluded, ...]:
    """The roster's own, and those at `out`."""
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


def _reason(roster: TargetTable, load: Amounts, needed_context: int, limits: SaturationLimits, at: int) -> str:
    if roster.max_context[at] < needed_context:
        return f"its context of {roster.max_context[at]} tokens is too small for {needed_context}"
    most = min(limits.requests, int(roster.max_requests[at]))
    if load[SEQUENCES, at] >= most:
        return f"saturated: {load[SEQUENCES, at]} requests of at most {most}"
    if load[BLOCKS, at] > limits.blocks(roster)[at]:
        return f"saturated: {load[BLOCKS, at]} of {roster.kv_blocks[at]:.0f} KV blocks are held by requests, more than a share of {limits.kv_share:g}"
    return f"saturated: {load[PREFILL, at]} prompt tokens wait, more than {limits.queue_seconds:g} s of work"
