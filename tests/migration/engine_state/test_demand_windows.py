"""Demand known to the planner: windows, missing reports, invalid reports."""

from typing import Any

import numpy as np
import pytest

from fleet.facts.activity import DispatchMeasured, ExpertsActivated, RearrangementTime
from fleet.facts.demand import DemandPublished
from fleet.facts.dynamo_kv import KvMetrics
from fleet.layout import TP_EP
from fleet.placement import with_attention, with_rows
from fleet.popularity import ExpertCounts, ExpertTable
from fleet.signatures import ClusterModel
from fleet.timing import RearrangeSpeed
from migration.config import MigrationConfig
from migration.engine_state.demand_samples import MAX_SAMPLES, DemandSamples
from migration.engine_state.demand_windows import DemandWindows
from migration.engine_state.placement_registry import EngineEntry, InvalidPlacementEvent, PlacementFault
from migration.model.engine_view import EngineView
from tests.migration.builders import FIRST, SHAPE, joined

ENTRY = EngineEntry("a", 1, FIRST)
CONFIG = MigrationConfig(window_seconds=60.0, stale_seconds=15.0)


def wanted(rank: int, rate: float, version: int, **fields: Any) -> DemandPublished:
    table = ExpertTable.of(np.full((2, 8), rate))
    plain: dict[str, Any] = {
        "engine": "a",
        "worker_id": 1,
        "model": "m",
        "tokens_per_second": 4 * rate,
        "pairs": 20 * 8 * rate,
        "demand": table,
    }
    return DemandPublished(rank=rank, version=version, **{**plain, **fields})


def load(rank: int, **fields: Any) -> KvMetrics:
    return KvMetrics(
        worker_id=1,
        dp_rank=rank,
        **{"running": 0, "waiting": 0, "active_prefill_tokens": 0, "kv_used_blocks": 0, **fields},
    )


def watching(config: MigrationConfig = CONFIG) -> DemandWindows:
    watch = DemandWindows(config)
    watch.joined(joined(), ENTRY, 0.0)
    return watch


def steady(watch: DemandWindows, rates: tuple[float, float], began: int, ended: int) -> None:
    """Publish the demand of both ranks every two seconds."""
    for now in range(began, ended, 2):
        for rank, rate in enumerate(rates):
            watch.demand(wanted(rank, rate, 10 * now + rank), float(now))
        watch.turn(float(now))


def refused(watch: DemandWindows, now: float) -> InvalidPlacementEvent:
    with pytest.raises(InvalidPlacementEvent) as refusal:
        watch.view(ENTRY, now)
    return refusal.value


def test_what_was_just_said_is_seen_at_once_with_the_evidence_of_whoever_said_it() -> None:
    watch = watching()
    steady(watch, (3.0, 1.0), 0, 2)
    view = watch.view(ENTRY, 0.0)
    np.testing.assert_allclose(view.demand.rates[:, 1, 5], [3.0, 1.0])
    np.testing.assert_allclose(view.demand.pairs, [480.0, 160.0])
    assert view.later is None
    assert view.demand.tokens_per_second(SHAPE.top_k) == pytest.approx(16.0)


def test_plans_are_made_from_one_window_and_judged_on_the_next() -> None:
    watch = watching()
    steady(watch, (1.0, 1.0), 0, 60)
    steady(watch, (5.0, 1.0), 60, 150)
    view = watch.view(ENTRY, 150.0)
    assert view.later is not None
    np.testing.assert_allclose(view.demand.rates[0], 5.0, rtol=0.05)
    np.testing.assert_allclose(view.later.rates[0], 5.0)
    np.testing.assert_allclose(view.later.pairs[1], 8 * view.later.seconds, rtol=0.2)
    early = watching()
    steady(early, (1.0, 1.0), 0, 62)
    steady(early, (5.0, 1.0), 62, 96)
    view = early.view(ENTRY, 96.0)
    assert view.later is not None
    np.testing.assert_allclose(
        [view.demand.rates[0].mean(), view.later.rates[0].mean()], [1.0, 5.0], rtol=0.05
    )


def test_a_rank_that_nobody_spoke_of_is_unknown_until_it_says_that_it_is_idle() -> None:
    watch = watching()
    watch.demand(wanted(0, 2.0, 1), 1.0)
    assert "ranks 1 of" in str(refused(watch, 1.0))
    watch.load(load(1, running=3), 1.5)
    assert refused(watch, 2.0).fault is PlacementFault.DEMAND
    watch.load(load(1), 2.5)
    np.testing.assert_allclose(watch.view(ENTRY, 3.0).demand.rates[1], 0.0)


def test_silence_is_no_demand_only_where_the_last_word_was_that_nothing_is_wanted() -> None:
    watch = watching()
    watch.demand(wanted(0, 2.0, 1), 1.0)
    watch.demand(wanted(1, 0.0, 2, tokens_per_second=0.0, pairs=0.0), 1.0)
    assert watch.view(ENTRY, 10.0).demand.rates[0, 0, 0] == pytest.approx(2.0)
    assert "ranks 0 of" in str(refused(watch, 30.0)), (
        "rank 1 wanted nothing, and nobody says that it does now"
    )
    watch.load(load(1, running=1), 29.0)
    assert "ranks 0, 1 of" in str(refused(watch, 30.0))


def test_time_of_which_nothing_is_known_counts_neither_way() -> None:
    watch = watching()
    watch.demand(wanted(0, 2.0, 1), 0.0)
    watch.demand(wanted(1, 2.0, 2), 0.0)
    watch.demand(wanted(0, 2.0, 3), 50.0)
    watch.demand(wanted(1, 2.0, 4), 50.0)
    rates = watch.view(ENTRY, 55.0).demand.rates
    np.testing.assert_allclose(rates, 2.0)


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (wanted(0, 1.0, 5, worker_id=9), PlacementFault.UNKNOWN),
        (wanted(2, 1.0, 5), PlacementFault.SHAPE),
        (wanted(-1, 1.0, 5), PlacementFault.SHAPE),
        (wanted(0, 1.0, 1), PlacementFault.STALE),
        (wanted(0, 1.0, 5, model="other"), PlacementFault.CONTRADICTION),
        (wanted(0, 1.0, 5, engine="b"), PlacementFault.CONTRADICTION),
        (wanted(0, np.nan, 5), PlacementFault.DEMAND),
        (wanted(0, 1.0, 5, pairs=-1.0), PlacementFault.DEMAND),
        (wanted(0, 1.0, 5, pairs=float("nan")), PlacementFault.DEMAND),
    ],
)
def test_words_that_cannot_be_used_change_nothing(said: DemandPublished, fault: PlacementFault) -> None:
    watch = watching()
    steady(watch, (1.0, 1.0), 0, 2)
    watch.demand(wanted(0, 1.0, 4), 1.0)
    before = watch.view(ENTRY, 1.0).demand
    with pytest.raises(InvalidPlacementEvent) as refusal:
        watch.demand(said, 1.0)
    assert refusal.value.fault is fault
    np.testing.assert_array_equal(watch.view(ENTRY, 1.0).demand.rates, before.rates)


def test_a_demand_of_another_shape_is_refused() -> None:
    with pytest.raises(InvalidPlacementEvent, match="3 x 8"):
        watching().demand(wanted(0, 1.0, 5, demand=ExpertTable.of(np.ones((3, 8)))), 1.0)


def test_a_new_incarnation_begins_with_nothing_and_the_old_one_is_forgotten() -> None:
    watch = watching()
    steady(watch, (1.0, 1.0), 0, 2)
    again = EngineEntry("a", 2, ENTRY.placement)
    watch.joined(joined(2), again, 3.0)
    assert refused(watch, 3.0).fault is PlacementFault.UNKNOWN
    with pytest.raises(InvalidPlacementEvent, match="was never reported"):
        watch.view(again, 3.0)
    watch.left(2)
    assert watch.stored_bytes == 0


def test_what_is_kept_is_bounded() -> None:
    watch = watching(MigrationConfig(max_cells=40))
    with pytest.raises(InvalidPlacementEvent, match="max_cells"):
        watch.joined(joined(2, engine="b"), EngineEntry("b", 2, ENTRY.placement), 0.0)
    steady(watch, (1.0, 1.0), 0, 600)
    assert watch.stored_bytes == 4 * 11 * 2 * 2 * 8
    model = ClusterModel(1, np.full((1, 2, 8), 1 / 8, np.float32), np.ones(1, np.float32), 1.0)
    for number in range(200):
        watch.clusters(str(number), model)
        watch.predictability(str(number), {})
    assert watch.stored_models == {str(number) for number in range(136, 200)}


def test_load_and_clusters_are_part_of_the_view() -> None:
    watch = watching()
    steady(watch, (1.0, 1.0), 0, 2)
    for rank in (0, 1):
        watch.load(load(rank, running=rank + 1, active_decode_blocks=4, kv_used_blocks=8), 1.0)
    old, new = (
        ClusterModel(version, np.full((1, 2, 8), 1 / 8, np.float32), np.ones(1, np.float32), 1.0)
        for version in (1, 2)
    )
    watch.clusters("m", new)
    watch.clusters("m", old)
    view = watch.view(ENTRY, 1.0)
    assert view.clusters == new
    assert view.running is not None
    np.testing.assert_array_equal(view.running, [1, 2])
    assert view.cache is not None
    assert (view.cache.blocks, view.cache.used.tolist()) == (8, [4, 4])


def test_an_engine_that_is_one_target_is_seen_without_a_demand_for_each_rank() -> None:
    every = with_rows(ENTRY.placement, {0: None, 1: None}, epoch=0)
    sharded = EngineEntry("a", 1, with_attention(every, "tp", epoch=0))
    view: EngineView = watching().view(sharded, 1.0)
    assert not len(view.placement.whole)


def test_the_demand_of_a_target_belongs_to_all_of_its_ranks_alike() -> None:
    whole = EngineEntry("a", 1, with_attention(FIRST, "tp", epoch=0))
    watch = DemandWindows(CONFIG)
    watch.joined(joined(layout=TP_EP, urls=("http://x",), gathers_all=True), whole, 0.0)
    watch.demand(wanted(0, 3.0, 1), 0.0)
    view = watch.view(whole, 0.0)
    np.testing.assert_allclose(view.demand.rates[:, 1, 5], [1.5, 1.5])
    np.testing.assert_allclose(view.demand.pairs, [240.0, 240.0])
    assert view.demand.tokens_per_second(SHAPE.top_k) == pytest.approx(12.0)
    assert (view.targets, view.gathers_all) == (1, True)


def test_after_a_shift_windows_begin_anew_and_the_next_two_are_short() -> None:
    watch = watching()
    steady(watch, (30.0, 10.0), 0, 100)
    watch.shifted("m", 100.0)
    assert watch.hurried(1) == pytest.approx(20.0)
    steady(watch, (10.0, 30.0), 100, 106)
    watch.shifted("m", 106.0)
    assert watch.view(ENTRY, 106.0).demand.began == 100.0, "one shift begins anew, however often it is said"
    steady(watch, (10.0, 30.0), 106, 124)
    assert watch.hurried(1) is None
    view = watch.view(ENTRY, 124.0)
    assert view.later is not None
    assert (view.demand.began, view.later.began) == (100.0, 110.0)
    np.testing.assert_allclose(view.demand.rates[:, 1, 5], [10.0, 30.0])
    watch.shifted("another", 124.0)
    assert watch.hurried(1) is None


def test_a_short_window_waits_for_requests_but_no_longer_than_a_long_one_lasts() -> None:
    watch = watching()
    watch.shifted("m", 0.0)
    steady(watch, (0.05, 0.05), 0, 50)
    assert watch.view(ENTRY, 50.0).later is None
    steady(watch, (0.05, 0.05), 50, 64)
    assert watch.view(ENTRY, 64.0).demand.began == 0.0
    assert watch.hurried(1) == pytest.approx(20.0), "of two, one is over"


def test_experts_of_a_plan_that_did_harm_rest_whatever_was_moved() -> None:
    watch = watching()
    cells = np.zeros((2, 8), bool)
    cells[1, 3] = True
    watch.harmed(1, cells, 50.0)
    watch.harmed(1, np.ones((3, 8), bool), 50.0)
    watch.harmed(7, cells, 50.0)
    assert (watch.resting(1, 49.0), watch.resting(1, 50.0), watch.resting(7, 0.0)) == (1, 0, 0)
    assert watch.model(1) == "m"
    assert watch.model(7) == ""


# Engines that move their experts themselves


def activated(rank: int, counts: int, layers: int = 2) -> ExpertsActivated:
    return ExpertsActivated(
        engine="a",
        worker_id=1,
        rank=rank,
        model="m",
        epoch=0,
        seconds=0.5,
        tokens=8,
        cached_tokens=0,
        counts=ExpertCounts.of(np.full((layers, 8), counts)),
    )


def rearranging() -> DemandWindows:
    watch = DemandWindows(CONFIG)
    watch.joined(joined(rearranges=True), ENTRY, 0.0)
    return watch


def test_samples_are_the_demand_of_all_targets_in_an_interval_and_split_as_the_windows_are() -> None:
    watch = rearranging()
    for now in range(0, 130, 2):
        for rank in (0, 1):
            watch.demand(wanted(rank, 1.0, 10 * now + rank), float(now))
            watch.activated(activated(rank, now + rank + 1), float(now))
        watch.turn(float(now))
    view = watch.view(ENTRY, 130.0)
    assert view.samples is not None
    assert view.later_samples is not None
    assert len(view.samples) == 30
    assert view.samples[-1, 0, 0] + 4 == view.later_samples[0, 0, 0]
    assert (view.samples[1] - view.samples[0] == 4).all()


def test_an_interval_ends_when_a_target_reports_again_without_the_others() -> None:
    samples = DemandSamples(2)
    for target, counts, now in ((0, 1.0, 1.0), (0, 2.0, 2.0), (1, 4.0, 2.0), (0, 0.0, 3.0), (1, 0.0, 3.0)):
        samples.add(target, np.full((1, 1), counts, np.float32), now)
    found = samples.between(0.0, 9.0)
    assert found is not None
    assert found.ravel().tolist() == [1.0, 6.0], "intervals without demand are no samples"
    assert samples.between(3.0, 9.0) is None


def test_samples_are_bounded() -> None:
    samples = DemandSamples(1)
    for now in range(2 * MAX_SAMPLES):
        samples.add(0, np.ones((1, 1), np.float32), float(now))
    found = samples.between(-1.0, 1e9)
    assert found is not None
    assert len(found) == MAX_SAMPLES


def test_engines_that_are_moved_by_roost_need_no_samples() -> None:
    watch = watching()
    steady(watch, (1.0, 1.0), 0, 20)
    for rank in (0, 1):
        watch.activated(activated(rank, 1), 20.0)
    assert watch.view(ENTRY, 20.0).samples is None


@pytest.mark.parametrize(
    "report",
    [activated(0, 1, layers=1), activated(2, 1)],
    ids=["layers", "target"],
)
def test_activations_that_do_not_fit_are_refused(report: ExpertsActivated) -> None:
    with pytest.raises(InvalidPlacementEvent, match="targets, layers, experts"):
        rearranging().activated(report, 1.0)


def measured(*times: RearrangementTime) -> DispatchMeasured:
    zeros = (0.0, 0.0)
    return DispatchMeasured(
        engine="a",
        worker_id=1,
        rank=0,
        model="m",
        epoch=0,
        seconds=1.0,
        steps=1,
        step_seconds=0.1,
        tokens=1,
        pairs=2,
        remote_ranks=zeros,
        local=zeros,
        served=zeros,
        balance=zeros,
        rearrangements=times,
    )


def test_measured_map_changes_correct_the_price_of_the_next() -> None:
    watch = rearranging()
    steady(watch, (1.0, 1.0), 0, 20)
    stated = watch.view(ENTRY, 20.0).rearrange_speed
    assert stated == RearrangeSpeed()
    expected = 2 * stated.layer + 1000 * stated.byte
    watch.rearranged(measured(RearrangementTime(layers=2, bytes=1000, seconds=3 * expected)))
    watch.rearranged(measured(RearrangementTime(layers=0, bytes=0, seconds=99.0)))
    found = watch.view(ENTRY, 20.0).rearrange_speed
    assert found.layer == pytest.approx(3 * stated.layer)
    assert found.byte == pytest.approx(3 * stated.byte)
    with pytest.raises(InvalidPlacementEvent, match="impossible"):
        watch.rearranged(measured(RearrangementTime(layers=1, bytes=0, seconds=float("nan"))))


def test_windows_begin_anew_where_layers_change_their_form_and_only_there() -> None:
    watch = watching()
    steady(watch, (3.0, 1.0), 0, 130)
    moved = with_rows(FIRST, {0: FIRST.expert_of_slot[0, ::-1]}, epoch=1)
    watch.placed(1, moved, "p", 130.0)
    entry = EngineEntry("a", 1, moved)
    assert watch.view(entry, 131.0).later is not None, "experts moved, and demand is as it was"
    turned = with_rows(moved, {0: None}, epoch=2)
    watch.placed(1, turned, "p", 131.0)
    seen = watch.view(EngineEntry("a", 1, turned), 132.0)
    assert (seen.later, seen.since, seen.demand.seconds) == (None, None, 1.0)
    assert seen.placement.whole.tolist() == [1]
    assert not watch.resting(1, 132.0) - 8, "the experts that moved rest, those that turned over do not"
