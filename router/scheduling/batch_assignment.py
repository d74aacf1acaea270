"""Assignment of many waiting requests at once: greedy with regret, under capacities. Pure numpy.

The regret of a request is the difference between its second-best and its best price (Potvin and Rousseau, "A
parallel route building algorithm", EJOR 66, 1993). The request with the largest regret is assigned first, to
the rank that is cheapest for it at that moment. Each assignment adds to its rank's load, and all prices that
depend on this load are computed anew. A batch is thus an *order* in which to decide: deciding for the
requests one after another in that order, with the same prices, gives the same ranks and the same scores.

Where capacities bind, greedy assignment has no bound, and the plain order may be better. Up to _BOTH_UP_TO
requests both are therefore tried, and the result never costs more than that of the plain order. Where
capacities do not bind, the result costs at most twice as much as the best ranks for the same order (tested
against all of them, where each price contains the request's own work; not proven).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray, IntArray
from fleet.timing import own_seconds, prefill_seconds
from router.fleet_state.reservations import BLOCKS, PREFILL, SEQUENCES, STEPS
from router.fleet_state.target_table import TargetTable
from router.scheduling.cost import COST_TERMS, RequestWork, Weights, outstanding_seconds
from router.scheduling.decision import Decision
from router.scheduling.filters import QueuePrices, SaturationLimits

_NEVER = 1e300
"""Price of a forbidden assignment. Finite, so that differences of prices are numbers."""

_MIN_SECONDS = 1e-12
"""Price of a token above 0, used if an engine declares that a token costs nothing."""
_BOTH_UP_TO = 64
"""Larger batches are assigned by regret only."""


class Pricing(Protocol):
    """Prices under changing loads. Targets whose prices change together are adjacent: those of one engine,
    whose ranks step together.
    """

    @property
    def engine(self) -> NDArray[np.intp]:
        """Number of each target's engine, [targets], ascending."""
        ...

    def prices(self, requests: slice, targets: slice, load: IntArray) -> FloatArray:
        """Return the price of each request under this load, float64 [targets, requests], as a new array.
        load: int64 [AMOUNTS, all targets]. targets: those of one entire engine, or all.
        """
        ...


@dataclass(frozen=True, slots=True)
class BatchAssignment:
    """Requests in the order of their right to a place, and the targets allowed for them.

    load: int64 [AMOUNTS, targets] before any assignment. may: bool [requests, targets]. prefill, blocks:
    int64 [requests, targets], added by a request there. steps: int64 [requests]. seeds: per request, to break
    ties as a decision does. max_requests: int64 [targets], capacity; max_prefill: float64 [targets], prompt
    tokens beyond which a rank accepts no further request; max_blocks: float64 [targets], likewise.
    """

    load: IntArray
    may: NDArray[np.bool_]
    prefill: NDArray[np.int64]
    blocks: NDArray[np.int64]
    steps: NDArray[np.int64]
    seeds: NDArray[np.int64]
    max_requests: NDArray[np.int64]
    max_prefill: NDArray[np.float64]
    max_blocks: NDArray[np.float64]

    def full(self, load: IntArray, target: int | slice) -> NDArray[np.bool_]:
        """Return the targets that accept no further request under this load, bool [targets]."""
        return np.asarray(
            (load[SEQUENCES, target] >= self.max_requests[target])
            | (load[PREFILL, target] > self.max_prefill[target])
            | (load[BLOCKS, target] > self.max_blocks[target])
        )


class Assignment(NamedTuple):
    """Target of one request, and its price at the time of assignment."""

    request: int
    target: int
    price: float


def route_batch(batch: BatchAssignment, pricing: Pricing) -> list[Assignment]:
    """Assign at most one place per request, in the returned order. Requests without a place keep waiting.
    Deterministic; equal regrets are ordered by right.

    As many requests as fit are assigned: a place stays empty only if no remaining request may use it.
    """
    requests = len(batch.steps)
    tries = [greedy(batch, pricing, regret=True)] if requests > 1 else []
    if requests <= _BOTH_UP_TO:
        tries.append(greedy(batch, pricing, regret=False))
    return min(tries, key=_worth)


def greedy(batch: BatchAssignment, pricing: Pricing, *, regret: bool) -> list[Assignment]:
    """Assign each request in turn to the target that is cheapest then. regret: take the largest regret first,
    and use the given order only for ties; otherwise follow the given order.
    """
    table = _Table(batch, pricing)
    turns = table.by_regret() if regret else table.as_given()
    return [table.assign(request) for request in turns]


def total(places: list[Assignment]) -> float:
    """Return the sum of all prices, each at the time of its assignment."""
    return sum(place.price for place in places)


def _worth(places: list[Assignment]) -> tuple[int, float]:
    return -len(places), total(places)


class _Table:
    """Prices of all requests on all targets, [targets, requests], kept current with the assignments. The rows
    of one engine are adjacent and are updated together.

    `_forbidden` is added to prices: 0, or _NEVER for forbidden assignments.
    """

    def __init__(self, batch: BatchAssignment, pricing: Pricing) -> None:
        self._batch = batch
        self._pricing = pricing
        self._load = batch.load.copy()
        self._requests, targets = batch.may.shape
        everywhere = slice(0, targets)
        self._forbidden = np.where(batch.may & ~batch.full(self._load, everywhere), 0.0, _NEVER).T.copy()
        self._costs = pricing.prices(slice(0, self._requests), everywhere, self._load) + self._forbidden
        ends = [*(np.flatnonzero(np.diff(pricing.engine)) + 1).tolist(), targets]
        self._engines = [slice(start, end) for start, end in pairwise([0, *ends]) for _ in range(start, end)]
        self._first_left = 0

    def as_given(self) -> Iterator[int]:
        """Yield every request that can be assigned, in the given order."""
        for request in range(self._requests):
            self._first_left = request
            if self._costs[:, request].min() < _NEVER:
                yield request

    def by_regret(self) -> Iterator[int]:
        """Yield the request with the largest regret while any can be assigned."""
        prices = self._costs.reshape(-1)
        columns = np.arange(self._requests)
        while True:
            cheapest = self._costs.argmin(axis=0) * self._requests + columns
            best = prices.take(cheapest)
            prices[cheapest] = _NEVER
            regret = self._costs.min(axis=0) - best
            prices[cheapest] = best
            regret[best >= _NEVER] = -1.0
            request = int(regret.argmax())
            if regret[request] < 0.0:
                return
            yield request

    def assign(self, request: int) -> Assignment:
        """Assign a request to the cheapest target. Its seed breaks ties."""
        batch, load = self._batch, self._load
        costs = self._costs[:, request]
        price = costs.min()
        ties = (costs == price).nonzero()[0]
        target = int(ties[batch.seeds[request] % len(ties)])
        place = Assignment(request, target, float(price))
        load[PREFILL, target] += batch.prefill[request, target]
        load[SEQUENCES, target] += 1
        load[BLOCKS, target] += batch.blocks[request, target]
        load[STEPS, target] += batch.steps[request]
        self._forbidden[:, request] = _NEVER
        costs[:] = _NEVER
        if batch.full(load, target):
            self._forbidden[target] = _NEVER
        left, engine = slice(self._first_left, self._requests), self._engines[target]
        np.add(
            self._pricing.prices(left, engine, load),
            self._forbidden[engine, left],
            out=self._costs[engine, left],
        )
        return place


class LoadPrices:
    """Prices, at any load, of requests that were decided at one load: the terms that depend on load are
    computed anew, the rest stays.
    """

    def __init__(
        self,
        target_table: TargetTable,
        weights: Weights,
        load: IntArray,
        costs: FloatArray,
        uncached: NDArray[np.int64],
        prompts: NDArray[np.int64],
        outputs: NDArray[np.int64],
        factors: NDArray[np.float64] | None = None,
    ) -> None:
        """costs: float64 [requests, targets] under `load`, int64 [AMOUNTS, targets]; uncached: int64
        [requests, targets]; prompts, outputs: tokens, int64 [requests]; factors: float64 [2, targets], as in
        `cost.score`.
        """
        self.engine = target_table.engine
        self._target_table = target_table
        self._terms = [
            (term, 1000.0 * weights.by_term[term.name])
            for term in COST_TERMS
            if term.by_load and weights.by_term[term.name]
        ]
        self._outputs = outputs
        prefill, decode = np.ones((2, len(target_table.targets))) if factors is None else factors
        columns = (
            target_table.prefill_token_s * prefill,
            target_table.decode_sequence_s * decode,
            target_table.decode_block_s * decode,
            target_table.decode_token_block_s * decode,
            target_table.prefill_pair_s * prefill,
        )
        self._token_s, self._sequence_s, self._block_s, token_block_s, pair_s = (
            column[:, None] for column in columns
        )
        self._added = np.stack(
            [
                prefill_seconds(self._token_s, pair_s, uncached.T, prompts),
                own_seconds(self._sequence_s, token_block_s, prompts + outputs, outputs),
            ]
        )
        self._in_lockstep = None if target_table.in_lockstep is None else target_table.in_lockstep[:, None]
        self._fixed = costs.T - self._by_load(
            slice(0, len(outputs)), slice(0, len(target_table.targets)), load
        )

    def prices(self, requests: slice, targets: slice, load: IntArray) -> FloatArray:
        return np.asarray(self._fixed[targets, requests] + self._by_load(requests, targets, load))

    def _by_load(self, requests: slice, targets: slice, load: IntArray) -> FloatArray:
        """Return the sum of the terms that depend on load, float64 [targets, requests]."""
        added = self._added[:, targets, requests]
        outstanding = np.empty_like(added)
        outstanding_seconds(
            self._token_s[targets],
            self._sequence_s[targets],
            self._block_s[targets],
            load[:, targets, None].astype(np.float64),
            self._outputs[requests],
            outstanding,
        )
        work = RequestWork(
            self._target_table,
            outstanding,
            added,
            outstanding + added,
            self._longest(outstanding),
            None if self._in_lockstep is None else self._in_lockstep[targets],
        )
        costs = np.zeros(added.shape[1:])
        for term, factor in self._terms:
            seconds = term.seconds(work)
            if seconds is not None:
                costs += factor * seconds
        return costs

    def _longest(self, outstanding: FloatArray) -> FloatArray | None:
        """Return `RequestWork.longest` of one entire engine, or of all targets."""
        if self._in_lockstep is None:
            return None
        if outstanding.shape[1] < len(self.engine):
            return np.asarray(outstanding.max(axis=1, keepdims=True))
        return np.maximum.reduceat(outstanding, self._target_table.first, axis=1).take(self.engine, axis=1)


def order_of(
    decisions: Sequence[Decision],
    load: IntArray,
    limits: SaturationLimits,
    factors: NDArray[np.float64] | None = None,
    prices: QueuePrices | None = None,
) -> list[int]:
    """Return the order in which to decide anew for requests that were each decided alone, so that their total
    cost is low. Requests without a place are left out. Arguments as in `gathered`.
    """
    return [place.request for place in route_batch(*gathered(decisions, load, limits, factors, prices))]


def gathered(
    decisions: Sequence[Decision],
    load: IntArray,
    limits: SaturationLimits,
    factors: NDArray[np.float64] | None = None,
    prices: QueuePrices | None = None,
) -> tuple[BatchAssignment, LoadPrices]:
    """Combine requests that were each decided alone at the same load, int64 [AMOUNTS, targets], over the same
    target table. factors: float64 [2, targets], as in `cost.score`; prices: as in `candidates`.
    """
    target_table = decisions[0].target_table
    prices = prices or QueuePrices.stated(target_table)
    shape = len(decisions), len(target_table.targets)
    may, costs, uncached = np.zeros(shape, np.bool_), np.full(shape, _NEVER), np.ones(shape, np.int64)
    for at, decision in enumerate(decisions):
        may[at, decision.at], costs[at, decision.at], uncached[at, decision.at] = (
            True,
            decision.scores.total,
            decision.uncached,
        )
    prompts = np.array([decision.ask.prompt_tokens for decision in decisions])
    outputs = np.array([decision.ask.output_tokens for decision in decisions])
    batch = BatchAssignment(
        load=load,
        may=may,
        prefill=uncached,
        blocks=-(-(prompts + outputs)[:, None] // target_table.block_size),
        steps=outputs,
        seeds=np.array([decision.ask.seed for decision in decisions]),
        max_requests=limits.max_requests(target_table),
        max_prefill=limits.queue_seconds / np.maximum(prices.token_s, _MIN_SECONDS),
        max_blocks=limits.blocks(target_table),
    )
    return batch, LoadPrices(
        target_table, decisions[0].weights, load, costs, uncached, prompts, outputs, factors
    )
