"""Mixes of running requests, and the experts that one more request would make an engine read."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from fleet.layout import EP, Layout, tp
from fleet.placement import Placement, with_attention, with_rows
from fleet.timing import EngineSpeed
from router.evaluation.distinct_experts import ClusterMixes, MixShare, ReadingGroup, read
from router.feedback.active_cluster_mix import ActiveClusterMix
from router.fleet_state.dispatch_cost import locality
from tests.router.learnt_tables import halves
from tests.router.router_fixture import SHAPE
from tests.router.scheduling.test_decision import decided, prediction_of, view_of

FIRST, SECOND = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
READS = EngineSpeed(expert_read=1e-4, gather_byte=1e-5)


def mix(mixes: ClusterMixes, sequences: int, worker: int = 1, version: int = 1) -> list[float] | None:
    found = mixes.changed(worker, sequences, halves(version=version), delivered=True)
    return None if found is None else found.tolist()


def test_a_mix_is_the_sum_of_what_runs_and_strangers_are_as_the_traffic_is() -> None:
    mixes = ClusterMixes()
    mixes.book(1, FIRST, 1)
    share = mixes.book(1, FIRST, 1)
    mixes.book(1, SECOND, 1)
    assert mix(mixes, 3) == [2.0, 1.0]
    assert mix(mixes, 5) == [3.0, 2.0]
    assert share is not None
    share.end()
    share.end()
    assert mix(mixes, 2) == [1.0, 1.0]
    assert mix(mixes, 0, worker=2) == [0.0, 0.0]


def test_a_mix_is_reported_when_it_changed_noticeably_or_was_lost() -> None:
    mixes = ClusterMixes()
    for _ in range(100):
        mixes.book(1, FIRST, 1)
    assert mix(mixes, 100) == [100.0, 0.0]
    mixes.book(1, SECOND, 1)
    assert mix(mixes, 101) is None
    assert mixes.changed(1, 101, halves(), delivered=False) is not None
    for _ in range(6):
        mixes.book(1, SECOND, 1)
    assert mix(mixes, 107) == [100.0, 7.0]


def test_newer_clusters_begin_anew_and_older_bookings_are_strangers_to_them() -> None:
    mixes = ClusterMixes()
    old = mixes.book(1, FIRST, 1)
    new = mixes.book(1, np.array([0, 0, 1], np.float32), 2)
    assert mixes.book(1, FIRST, 1) is None
    assert old is not None
    assert new is not None
    old.end()
    new.end()
    assert mix(mixes, 2, version=3) == [1.0, 1.0]


def test_a_forgotten_engine_takes_no_notice_of_bookings_that_end_later() -> None:
    mixes = ClusterMixes()
    share = mixes.book(1, FIRST, 1)
    mixes.forget_worker(1)
    mixes.book(1, SECOND, 1)
    assert share is not None
    share.end()
    assert mix(mixes, 1) == [0.0, 1.0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=40))
def test_any_order_of_bookings_and_ends_leaves_what_is_open(events: list[tuple[int, int, bool]]) -> None:
    mixes = ClusterMixes()
    open_now: list[tuple[int, int, MixShare]] = []
    for worker, cluster, ends in events:
        if ends and open_now:
            open_now.pop(worker % len(open_now))[2].end()
        else:
            share = mixes.book(worker, (FIRST, SECOND)[cluster], 1)
            assert share is not None
            open_now.append((worker, cluster, share))
    for worker in range(3):
        expected = [
            float(sum(1 for w, c, _ in open_now if (w, c) == (worker, cluster))) for cluster in range(2)
        ]
        found = mixes.changed(worker, int(sum(expected)), halves(), delivered=False)
        assert found is not None
        assert found == pytest.approx(expected)


def test_a_request_adds_least_where_its_experts_are_read_anyway() -> None:
    reads = read(
        ReadingGroup(halves(skew=30.0), 1).misses(),
        [np.array([8.0, 0.0]), np.array([0.0, 8.0]), np.zeros(2)],
    )
    assert reads.added[0, 0] < 0.3 * reads.added[1, 0]
    assert reads.added[1, 1] < 0.3 * reads.added[0, 1]
    assert reads.added[2] == pytest.approx([2.0, 2.0])  # one expert in each of two layers
    assert reads.now[2] == 0.0
    assert reads.now[0] == pytest.approx(reads.now[1])


def test_a_cluster_without_traffic_reads_what_the_mean_reads() -> None:
    model = halves()
    unused = type(model)(1, model.profiles, np.array([1, 0], np.float32), 0.1)
    misses = ReadingGroup(unused, 2).misses()
    assert misses[0].tolist() == misses[1].tolist()  # the mean, which is the first's


class Running:
    """Two engines. The first runs eight requests of the first cluster."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        layout: Layout = EP,
        speed: EngineSpeed | None = READS,
        tp_speed: EngineSpeed | None = None,
    ) -> None:
        engines = [{"layout": layout, "speed": speed, "tp_speed": tp_speed} for _ in range(2)]
        self.view, self.reservations = view_of(*engines, clusters=halves(skew=30.0))
        self.mixing = ActiveClusterMix(self.view, self.reservations, threads)
        target_table = self.view.target_table("demo")
        for _ in range(8):
            decision = decided(target_table, prediction=_of_the_first(len(target_table.targets)))
            assert decision.target.key == (1, 0)
            self.mixing.booked(decision)
            self.reservations.book(decision.target.key, (0, 1, 0, 10), 0.0)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def _of_the_first(targets: int) -> Any:
    """Make all ranks but the first expensive, so that the request goes there."""
    prediction = prediction_of([0.0, *[1e9] * (targets - 1)])
    request = structs.replace(prediction.request, weights=FIRST, clusters=1)
    return structs.replace(prediction, request=request)


async def test_engines_are_priced_by_what_they_run(threads: ThreadPoolExecutor) -> None:
    running = Running(threads)
    await running.mixing.refresh(0.0)
    prices = running.view.prices("demo")
    _, _, _, added = prices.of(FIRST)
    assert added[0] == added[1] < 0.3 * added[2]
    assert prices.of(SECOND)[3][0] == pytest.approx(prices.of(SECOND)[3][2], rel=0.3)
    assert running.mixing.surcharge(1).reading > running.mixing.surcharge(2).reading == 0.0
    assert len(running.mixing.surcharge(1).token) == 2


@pytest.mark.parametrize(
    "speed",
    [EngineSpeed(), None],
    ids=["no reading time", "no speed"],
)
async def test_engines_whose_reads_have_no_price_are_left_out(
    threads: ThreadPoolExecutor, speed: EngineSpeed | None
) -> None:
    running = Running(threads, speed=speed)
    await running.mixing.refresh(0.0)
    assert not running.view.prices("demo").distinct.any()
    assert running.mixing.surcharge(1).reading == 0.0


async def test_an_engine_that_introduces_itself_again_is_priced_again(threads: ThreadPoolExecutor) -> None:
    running = Running(threads)
    await running.mixing.refresh(0.0)
    state = running.view.engine(1)
    assert state is not None
    before = state.distinct
    running.view.join(state.joined, 1.0)
    await running.mixing.refresh(1.0)
    again = running.view.engine(1)
    assert before is not None
    assert again is not None
    assert again.distinct is not None
    assert again.distinct.tolist() == before.tolist()


@pytest.mark.parametrize("sharded", [(1,), (0, 1)])
async def test_an_engine_whose_layers_become_sharded_reads_as_much_and_pays_for_their_collectives(
    threads: ThreadPoolExecutor, sharded: tuple[int, ...]
) -> None:
    running = Running(threads)
    await running.mixing.refresh(0.0)
    before, state = running.mixing.surcharge(1), running.view.engine(1)
    assert state is not None
    assert state.placement is not None
    placement = with_rows(state.placement, dict.fromkeys(sharded), epoch=state.placement.epoch + 1)
    layout = Layout(attention="dp", sharded=sharded)
    assert running.view.place(1, placement, layout)
    running.view.price(1, placement.epoch, locality((0, 0), SHAPE, layout, placement, halves(skew=30.0)))
    await running.mixing.refresh(1.0)
    after = running.mixing.surcharge(1)
    assert after._replace(token=()) == before._replace(token=())
    # Two ranks with as many tokens each; half of a token's bytes go to the other rank, and come back.
    collectives = 2 * READS.gather_byte * len(sharded) * 2 * SHAPE.hidden * 4 / 2
    sent = np.array(before.token) / 2 * (2 - len(sharded))  # both layers are alike
    assert after.token == pytest.approx(sent + collectives)
    assert running.mixing.surcharge(2).token == before.token


async def test_reading_has_the_price_of_the_layout_from_the_next_refresh_on(
    threads: ThreadPoolExecutor,
) -> None:
    parts = EngineSpeed(expert_read=7e-5, gather_byte=0.0)
    running = Running(threads, tp_speed=parts)
    await running.mixing.refresh(0.0)
    before, state = running.mixing.surcharge(1), running.view.engine(1)
    assert state is not None
    assert state.placement is not None
    every = with_rows(state.placement, {0: None, 1: None}, epoch=state.placement.epoch + 1)
    assert running.view.place(1, with_attention(every, "tp", epoch=every.epoch), tp(2))
    await running.mixing.refresh(1.0)
    after = running.mixing.surcharge(1)
    # Two ranks share the experts of a step, or have a part of every expert each.
    assert after.reading == pytest.approx(before.reading / (READS.expert_read / 2) * parts.expert_read)
    assert not any(after.token)


async def test_an_engine_that_switches_to_tensor_parallelism_sends_nothing_of_its_own_any_more(
    threads: ThreadPoolExecutor,
) -> None:
    running = Running(threads)
    await running.mixing.refresh(0.0)
    before = running.mixing.surcharge(1)
    assert before.reading > 0
    assert before.token[0] > 0
    state = running.view.engine(1)
    assert state is not None
    assert state.placement is not None
    placement = Placement.from_record(
        structs.replace(state.placement.record(), epoch=state.placement.epoch + 1)
    )
    assert running.view.place(1, placement, tp(2))
    await running.mixing.refresh(1.0)
    after = running.mixing.surcharge(1)
    assert after.reading == pytest.approx(before.reading)
    assert after.token == pytest.approx([READS.gather_byte * 2 * 2 * SHAPE.hidden * 4 / 2])
    assert running.mixing.surcharge(2).token == before.token
