"""Many requests assigned at once: none lost or duplicated, capacities respected, as cheap as possible, priced
as decisions are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.arrays import IntArray
from fleet.facts.engines import Capabilities
from fleet.timing import EngineSpeed
from router.admission.queue_policy import Saturated
from router.config import RouterConfig
from router.fleet_state.reservations import PREFILL, SEQUENCES, Reservations
from router.fleet_state.target_table import TargetTable
from router.fleet_state.view import FleetView
from router.prefix_index.approximate_index import ApproximateIndex
from router.prefix_index.block_index import BlockIndex
from router.prefix_index.kv_event_index import KvEventIndex
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.batch_assignment import (
    Assignment,
    BatchAssignment,
    LoadPrices,
    gathered,
    greedy,
    route_batch,
    total,
)
from router.scheduling.cost import Weights, score
from router.scheduling.filters import SaturationLimits
from router.scheduling.routing_request import RoutingRequest
from router.scheduling.scheduler import Scheduler
from tests.router.router_fixture import engine_joined

FACTOR = 2.0
"""Where capacities do not bind, a batch costs at most this multiple of the best ranks in the same order."""


@dataclass
class Table:
    """Prices that rise with outstanding work, simple enough to check by hand: a fixed part, and a price per
    token ahead.
    """

    fixed: NDArray[np.float64]
    token: NDArray[np.float64]
    engine: NDArray[np.intp]

    def prices(self, requests: slice, targets: slice, load: IntArray) -> NDArray[np.float64]:
        return np.asarray(
            (self.fixed[requests, targets] + self.token[targets] * load[PREFILL, targets]).T, np.float64
        )


def batch_of(
    pricing: Table,
    *,
    prefill: Any,
    room: Any = 1000,
    may: Any = True,
    max_prefill: float = np.inf,
    seeds: Any = 0,
) -> BatchAssignment:
    requests, targets = pricing.fixed.shape
    shape = (requests, targets)
    return BatchAssignment(
        load=np.zeros((4, targets), np.int64),
        may=np.broadcast_to(np.asarray(may, np.bool_), shape).copy(),
        prefill=np.broadcast_to(np.asarray(prefill, np.int64), shape).copy(),
        blocks=np.ones(shape, np.int64),
        steps=np.full(requests, 10),
        seeds=np.broadcast_to(np.asarray(seeds, np.int64), requests).copy(),
        max_requests=np.broadcast_to(np.asarray(room, np.int64), targets).copy(),
        max_prefill=np.full(targets, max_prefill),
        max_blocks=np.full(targets, np.inf),
    )


def in_turn(
    batch: BatchAssignment, pricing: Table, order: Iterator[int] | range | tuple[int, ...]
) -> list[Assignment]:
    """Assign in the plain way, without numpy: each request in its turn takes the cheapest target."""
    load = batch.load.copy()
    places = []
    for request in order:
        open_to = [
            target
            for target in range(load.shape[1])
            if batch.may[request, target]
            and load[SEQUENCES, target] < batch.max_requests[target]
            and load[PREFILL, target] <= batch.max_prefill[target]
        ]
        if open_to:
            costs = {
                target: float(pricing.fixed[request, target] + pricing.token[target] * load[PREFILL, target])
                for target in open_to
            }
            best = min(costs.values())
            ties = [target for target in open_to if costs[target] == best]
            target = ties[int(batch.seeds[request]) % len(ties)]
            places.append(Assignment(request, target, best))
            load[PREFILL, target] += batch.prefill[request, target]
            load[SEQUENCES, target] += 1
    return places


def optimum(batch: BatchAssignment, pricing: Table) -> tuple[int, float]:
    """Return the most places, and their lowest cost, over every order and every choice, by exhaustive
    search."""
    requests, targets = pricing.fixed.shape

    @cache
    def rest(left: frozenset[int], queued: tuple[int, ...], held: tuple[int, ...]) -> tuple[int, float]:
        best = (0, 0.0)
        for request in left:
            for target in range(targets):
                if (
                    not batch.may[request, target]
                    or held[target] >= batch.max_requests[target]
                    or queued[target] > batch.max_prefill[target]
                ):
                    continue
                price = float(pricing.fixed[request, target] + pricing.token[target] * queued[target])
                more = (
                    *queued[:target],
                    queued[target] + int(batch.prefill[request, target]),
                    *queued[target + 1 :],
                )
                placed, saved = rest(
                    left - {request}, more, (*held[:target], held[target] + 1, *held[target + 1 :])
                )
                best = max(best, (placed + 1, saved - price))
        return best

    placed, saved = rest(frozenset(range(requests)), (0,) * targets, (0,) * targets)
    return placed, -saved


def best_ranks(batch: BatchAssignment, pricing: Table, order: list[int]) -> float:
    """Return the lowest cost of requests in this order, over every choice of ranks, by exhaustive search."""
    targets = pricing.fixed.shape[1]
    least = np.inf
    for chosen in product(range(targets), repeat=len(order)):
        queued, cost = [0.0] * targets, 0.0
        for request, target in zip(order, chosen, strict=True):
            cost += float(pricing.fixed[request, target]) + float(pricing.token[target]) * queued[target]
            queued[target] += float(batch.prefill[request, target])
        least = min(least, cost)
    return least


@st.composite
def cases(draw: st.DrawFn, *, bound: bool) -> tuple[BatchAssignment, Table]:
    requests, targets = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    numbers = st.integers(0, 20)
    fixed = np.array([[draw(numbers) for _ in range(targets)] for _ in range(requests)], np.float64)
    token = np.array([draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(targets)])
    engine = np.sort(np.array([draw(st.integers(0, 1)) for _ in range(targets)], np.intp))
    prefill = np.array([[draw(st.integers(1, 20)) for _ in range(targets)] for _ in range(requests)])
    pricing = Table(fixed + prefill * token, token, engine)
    may = [[draw(st.booleans()) for _ in range(targets)] for _ in range(requests)] if bound else True
    return (
        batch_of(
            pricing,
            prefill=prefill,
            room=[draw(st.integers(0, 3)) for _ in range(targets)] if bound else 1000,
            may=may,
            max_prefill=draw(st.sampled_from([15.0, 30.0])) if bound else np.inf,
            seeds=[draw(st.integers(0, 100)) for _ in range(requests)],
        ),
        pricing,
    )


@settings(max_examples=150, deadline=None)
@given(cases(bound=True))
def test_no_request_is_lost_or_duplicated_and_capacities_hold(case: tuple[BatchAssignment, Table]) -> None:
    batch, pricing = case
    places = route_batch(batch, pricing)
    assert len({place.request for place in places}) == len(places)
    load = batch.load.copy()
    for place in places:
        assert batch.may[place.request, place.target]
        assert load[SEQUENCES, place.target] < batch.max_requests[place.target]
        assert load[PREFILL, place.target] <= batch.max_prefill[place.target]
        assert (
            place.price
            == pricing.fixed[place.request, place.target]
            + pricing.token[place.target] * load[PREFILL, place.target]
        )
        load[PREFILL, place.target] += batch.prefill[place.request, place.target]
        load[SEQUENCES, place.target] += 1
    still_open = (load[SEQUENCES] < batch.max_requests) & (load[PREFILL] <= batch.max_prefill)
    waiting = [
        request for request in range(len(batch.steps)) if request not in {place.request for place in places}
    ]
    assert not (batch.may[waiting] & still_open).any()  # no request waits while a place is open


@settings(max_examples=100, deadline=None)
@given(cases(bound=True))
def test_a_batch_is_never_dearer_than_the_plain_order_nor_smaller(
    case: tuple[BatchAssignment, Table],
) -> None:
    batch, pricing = case
    places, plain = route_batch(batch, pricing), in_turn(batch, pricing, range(len(batch.steps)))
    assert (-len(places), total(places)) <= (-len(plain), total(plain) + 1e-9)


@settings(max_examples=40, deadline=None)
@given(cases(bound=False))
def test_without_binding_capacities_a_batch_costs_at_most_twice_what_the_best_ranks_would(
    case: tuple[BatchAssignment, Table],
) -> None:
    batch, pricing = case
    places = route_batch(batch, pricing)
    assert len(places) == len(batch.steps)
    least = best_ranks(batch, pricing, [place.request for place in places])
    assert least - 1e-9 <= total(places) <= FACTOR * least + 1e-9


def test_on_average_a_batch_is_near_the_optimum_and_nearer_than_the_order_of_arrival() -> None:
    chance = np.random.default_rng(5)
    ratios, plainly = [], []
    for _ in range(40):
        pricing = Table(chance.integers(0, 100, (4, 4)).astype(float), np.ones(4), np.array([0, 0, 1, 1]))
        batch = batch_of(pricing, prefill=chance.integers(1, 30, (4, 4)), room=1)
        _, least = optimum(batch, pricing)
        ratios.append((total(route_batch(batch, pricing)) + 1) / (least + 1))
        plainly.append((total(in_turn(batch, pricing, range(4))) + 1) / (least + 1))
    assert np.mean(ratios) < 1.1
    assert np.mean(ratios) < np.mean(plainly) - 0.1


def test_who_loses_most_by_coming_second_comes_first() -> None:
    pricing = Table(np.array([[0.0, 1.0, 1.0], [0.0, 90.0, 90.0]]), np.zeros(3), np.zeros(3, np.intp))
    places = route_batch(batch_of(pricing, prefill=1, room=1), pricing)
    assert [(place.request, place.target) for place in places] == [(1, 0), (0, 1)]


def test_who_has_but_one_rank_left_is_not_kept_from_it() -> None:
    pricing = Table(np.array([[0.0, 50.0], [0.0, 1.0]]), np.zeros(2), np.zeros(2, np.intp))
    places = route_batch(batch_of(pricing, prefill=1, room=1, may=[[True, True], [True, False]]), pricing)
    assert sorted((place.request, place.target) for place in places) == [(0, 1), (1, 0)]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_order_in_which_requests_are_given_does_not_matter_where_nothing_is_equal(seed: int) -> None:
    chance = np.random.default_rng(seed)
    fixed = chance.uniform(0.0, 400.0, (5, 4))
    prefill, token, engine = (
        chance.integers(1, 50, (5, 1)),
        np.array([0.31, 0.37, 0.41, 0.43]),
        np.array([0, 1, 1, 2]),
    )
    assigned, costs = set(), []
    for order in list(permutations(range(5)))[::17]:
        at = list(order)
        pricing = Table(fixed[at], token, engine)
        batch = batch_of(pricing, prefill=prefill[at])
        places = greedy(batch, pricing, regret=True)
        assigned.add(tuple((at[place.request], place.target) for place in places))
        costs.append(total(route_batch(batch, pricing)))
    assert len(assigned) == 1
    assert max(costs) <= total(places) + 1e-9


def test_ties_between_ranks_are_broken_only_by_the_seed() -> None:
    pricing = Table(np.zeros((1, 4)), np.zeros(4), np.zeros(4, np.intp))
    targets = [
        route_batch(batch_of(pricing, prefill=1, seeds=seed), pricing)[0].target
        for seed in (0, 1, 2, 3, 4, 0)
    ]
    assert targets == [0, 1, 2, 3, 0, 0]


SPEEDS = (
    EngineSpeed(prefill_token=1e-3, prefill_pair=1e-7, decode_sequence=1e-3, decode_block=1e-5),
    EngineSpeed(prefill_token=2e-4, decode_sequence=3e-4, decode_block=4e-5),
    EngineSpeed(prefill_token=5e-4, decode_sequence=1e-4),
)


def fleet(*ranks: int) -> TargetTable:
    """Return engines with these numbers of ranks, of different speeds."""
    view = FleetView(Reservations(settle_seconds=0.1, stale_seconds=5.0))
    for number, count in enumerate(ranks):
        urls = [f"http://h:{100 * number + rank}" for rank in range(count)]
        view.join(
            engine_joined(
                f"e{number}",
                urls,
                "f" * 64,
                worker_id=number + 1,
                speed=SPEEDS[number % 3],
                shape=None,
                placement=None,
            ),
            0.0,
        )
        view.sign_of_life(number + 1, 0.0)
    return view.target_table("demo")


def some_load(chance: np.random.Generator, targets: int) -> IntArray:
    sequences = chance.integers(0, 30, targets) * (chance.random() < 0.8)  # sometimes nothing runs
    return np.array(
        [
            chance.integers(0, 5000, targets),
            sequences,
            sequences * 7,
            sequences * chance.integers(1, 90, targets),
        ]
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_a_load_is_priced_as_a_decision_would_price_it(seed: int, measured: bool, lone: bool) -> None:
    chance = np.random.default_rng(seed)
    target_table = fleet(1, 1, 1) if lone else fleet(3, 1, 4)
    targets = len(target_table.targets)
    before, after = some_load(chance, targets), some_load(chance, targets)
    prompts, outputs = chance.integers(10, 900, 6), chance.integers(1, 200, 6)
    uncached = np.minimum(chance.integers(1, 900, (6, targets)), prompts[:, None])
    weights = Weights.of(queue=0.7, decode=1.3, lockstep=0.9)
    factors = chance.uniform(0.5, 2.0, (2, targets)) if measured else None

    def scores(load: IntArray) -> NDArray[np.float64]:
        rows = [
            score(
                target_table,
                load,
                uncached[at],
                int(prompts[at]),
                int(outputs[at]),
                weights,
                None,
                None,
                factors,
            ).total
            for at in range(6)
        ]
        return np.stack(rows)

    pricing = LoadPrices(target_table, weights, before, scores(before), uncached, prompts, outputs, factors)
    everybody, everywhere = slice(0, 6), slice(0, targets)
    assert np.allclose(pricing.prices(everybody, everywhere, after).T, scores(after), rtol=1e-9, atol=1e-9)
    if not lone:
        assert np.allclose(
            pricing.prices(slice(2, 5), slice(4, 8), after).T, scores(after)[2:5, 4:8], rtol=1e-9, atol=1e-9
        )


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_deciding_one_after_another_in_the_order_found_gives_the_same_ranks_at_the_same_prices(
    seed: int,
) -> None:
    chance = np.random.default_rng(seed)
    config = RouterConfig(max_requests_per_rank=12, max_queue_seconds=3.0, max_kv_share=0.9)
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    view = FleetView(reservations)
    for number, ranks in enumerate((3, 1, 4)):
        urls = [f"http://h:{100 * number + rank}" for rank in range(ranks)]
        about = {"speed": SPEEDS[number], "shape": None, "placement": None, "capabilities": Capabilities()}
        view.join(engine_joined(f"e{number}", urls, "f" * 64, worker_id=number + 1, **about), 0.0)
        view.sign_of_life(number + 1, 0.0)
    holders = BlockIndex()
    scheduler = Scheduler(view, reservations, KvEventIndex(holders), ApproximateIndex(100, holders), config)
    target_table = view.target_table("demo")
    for target in target_table.targets:
        running = int(chance.integers(8, 13))
        reservations.report(
            target.key,
            (int(chance.integers(0, 2000)), running, 60 * running, int(chance.integers(0, 100)) * running),
            0.0,
        )
    needs = [
        RoutingRequest(
            "demo",
            TokenPrompt(list(range(at, at + int(chance.integers(5, 900))))),
            0,
            int(chance.integers(1, 200)),
            "f" * 64,
        )
        for at in range(9)
    ]
    try:
        alone = [scheduler.decide(need, "d", at, 0.0) for at, need in enumerate(needs)]
    except Saturated:
        return
    load = reservations.load(target_table.rows, 0.0)
    places = route_batch(*gathered(alone, load, SaturationLimits(12, 3.0, 0.9)))
    for place in places:
        decision = scheduler.decide(needs[place.request], "d", place.request, 0.0)
        assert np.isclose(decision.scores.total[decision.chosen], place.price, rtol=1e-9)
        if (
            target_table.index[decision.target.key] != place.target
        ):  # a tie: a decision looks at the load as well
            tied = decision.scores.total[decision.at.tolist().index(place.target)]
            assert np.isclose(tied, place.price, rtol=1e-9)
            return
        scheduler.book(decision, needs[place.request].prompt, 0.0)
    for request in set(range(9)) - {place.request for place in places}:
        with pytest.raises(Saturated):
            scheduler.decide(needs[request], "d", request, 0.0)
