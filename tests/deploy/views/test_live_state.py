"""What `roost top` knows of a fleet: what was heard lately, and what happened in words."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus import Message, Received
from deploy.client.fleet_status import EngineNow
from deploy.views.event_lines import event_line
from deploy.views.live_state import LAST_SECONDS, MAX_EVENTS, LiveState, figures, is_plausible
from fleet.facts.activity import DispatchMeasured
from fleet.facts.demand import PopularityShifted
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import ConfigChanged, EngineHeartbeat, EngineJoined, EngineLeft, RankDrained
from fleet.facts.migrations import (
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    MigrationStaged,
    PlanEvaluated,
)
from fleet.facts.placements import HomesPublished, PlacementCommitted
from fleet.layout import DP_ATTENTION
from fleet.placement import linear, with_rows
from tests.deploy.loop_figures import PREDICTED, START

WHO: dict[str, Any] = {"engine": "engine-0", "worker_id": 7}
PLAN: dict[str, Any] = {**WHO, "plan": "cafe"}
PLACEMENT = linear(layers=2, experts=8, ranks=2).record()
JOINED = EngineJoined(
    **WHO,
    model="m",
    node="n",
    urls=("http://x", "http://y"),
    block_size=16,
    kv_blocks=8,
    max_context=512,
    max_batch_tokens=256,
)
PLANNED = MigrationPlanned(
    **PLAN,
    origin="planner",
    base_epoch=0,
    handovers=1,
    copies=3,
    bytes=3000,
    reason="it pays",
    before=START,
    after=PREDICTED,
    policy="roost",
)
COMMITTED = MigrationCommitted(
    **PLAN, handover=1, number=0, epoch=1, copies=3, bytes=3000, seconds=0.2, commit_seconds=0.1, last=True
)
HOMES = HomesPublished(
    **WHO,
    model="m",
    version=3,
    epoch=1,
    clusters=2,
    count=4,
    ranks=2,
    homes=bytes(32),
    reason="they are foretold",
)


def measured(rank: int = 0, **fields: Any) -> DispatchMeasured:
    plain: dict[str, Any] = {
        "rank": rank,
        "model": "m",
        "epoch": 0,
        "seconds": 1.0,
        "steps": 10,
        "step_seconds": 0.1,
        "tokens": 20,
        "pairs": 40,
    }
    layers = {
        "remote_ranks": (0.0, 30.0),
        "local": (0.0, 10.0),
        "served": (0.0, 40.0),
        "balance": (10.0, 8.0),
    }
    return DispatchMeasured(**{**WHO, **plain, **layers, **fields})


def received(message: Message, at: float = 1_700_000_000.0) -> Received:
    return Received("subject", 1, 0, at, message)


def live(*messages: Message, now: float = 0.0) -> LiveState:
    found = LiveState(0.0)
    found.apply(received(JOINED), 0.0)
    for message in messages:
        found.apply(received(message), now)
    return found


def test_the_layout_is_that_of_the_last_recorded_epoch() -> None:
    first = linear(layers=4, experts=8, ranks=2)
    turned = PlacementCommitted(
        engine=JOINED.engine,
        worker_id=JOINED.worker_id,
        attention=DP_ATTENTION,
        placement=with_rows(first, {1: None}, epoch=3).record(),
    )
    joined = msgspec.structs.replace(JOINED, attention=DP_ATTENTION, placement=first.record())
    other = msgspec.structs.replace(turned, worker_id=JOINED.worker_id + 1)
    for messages, layout in (
        ((joined,), "dp, experts whole"),
        ((joined, other), "dp, experts whole"),
        ((joined, turned), "dp, layers 1 sharded"),
    ):
        assert str(live(*messages).engines[JOINED.engine].layout) == layout


# Figures


def test_figures_are_means_over_tokens_pairs_and_steps_of_the_layers_that_are_not_sharded() -> None:
    found = figures(
        [measured(0), measured(1, tokens=60, pairs=120, remote_ranks=(0.0, 10.0), local=(0.0, 110.0))]
    )
    assert found is not None
    assert (
        found.remote_ranks,
        found.local,
        found.balance,
        found.step_seconds,
        found.tokens,
    ) == pytest.approx((0.5, 0.75, 0.8, 0.01, 80.0))
    assert figures([]) is None
    assert figures([measured(tokens=0, pairs=0, remote_ranks=(0.0, 0.0), local=(0.0, 0.0))]) is None, (
        "no token, no mean"
    )


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=6))
def test_figures_do_not_depend_on_how_the_time_is_cut(parts: list[tuple[int, int]]) -> None:
    output = [
        measured(
            tokens=tokens,
            pairs=2 * tokens,
            steps=steps,
            step_seconds=0.01 * steps,
            balance=(steps, 0.5 * steps),
        )
        for tokens, steps in parts
    ]
    names = ("steps", "step_seconds", "tokens", "pairs")
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in output) for name in names}
    layers = {
        name: tuple(np.sum([getattr(one, name) for one in output], axis=0).tolist())
        for name in ("remote_ranks", "local", "served", "balance")
    }
    apart, whole = figures(output), figures([measured(**sums, **layers)])
    assert apart is not None
    assert whole is not None
    assert msgspec.structs.astuple(apart) == pytest.approx(msgspec.structs.astuple(whole))


@pytest.mark.parametrize(
    "fields",
    [
        {"remote_ranks": (math.nan, 0.0)},
        {"local": (-1.0, 0.0)},
        {"balance": (math.inf, 0.0)},
        {"served": ()},
        {"served": (1.0,)},
        {"steps": 0},
        {"tokens": -1},
        {"step_seconds": math.nan},
    ],
)
def test_what_cannot_have_been_measured_is_left_out(fields: dict[str, Any]) -> None:
    assert not is_plausible(measured(**fields))
    assert live(measured(**fields)).figures() == {}


def test_only_the_last_seconds_of_the_newest_epoch_count() -> None:
    found = live(measured(local=(0.0, 40.0)), measured(epoch=1, local=(0.0, 20.0)), now=1.0)
    assert found.figures()["engine-0"].local == pytest.approx(0.5)
    assert found.tokens_per_second(2.0) == pytest.approx(20.0)
    found.drop_outdated(1.1 + LAST_SECONDS)
    assert found.figures() == {}
    assert found.tokens_per_second(12.0) == 0.0


# Who is there


def test_an_engine_is_silent_when_its_heart_is_not_heard_and_gone_when_it_left() -> None:
    found = live(
        EngineHeartbeat(**WHO, epoch=4),
        KvMetrics(worker_id=7, dp_rank=1, running=2),
        KvMetrics(worker_id=7, dp_rank=9, running=2),
        measured(),
    )
    (engine,) = found.engines.values()
    assert engine.heartbeat is not None
    assert list(engine.load) == [1], "it has no rank 9"
    found.drop_outdated(2.0)
    assert engine.heartbeat is not None
    found.drop_outdated(3.5)
    assert engine.heartbeat is None
    found.apply(received(EngineLeft(engine="engine-0", worker_id=8, reason="an older life")), 4.0)
    assert found.engines
    found.apply(received(EngineLeft(**WHO, reason="told to")), 4.0)
    assert not found.engines
    assert found.figures() == {}


def test_plans_and_drains_are_followed() -> None:
    found = live(PLANNED, RankDrained(**WHO, rank=1, draining=True, reason="fan"))
    engine = found.engines["engine-0"]
    assert (engine.migrating, engine.drained(1)) == ("cafe", "fan")
    for message in (COMMITTED, RankDrained(**WHO, rank=1, draining=False)):
        found.apply(received(message), 1.0)
    assert (engine.migrating, engine.drained(1)) == ("", None)


def test_what_the_log_says_again_does_not_undo_what_was_heard() -> None:
    found = live(EngineHeartbeat(**WHO, epoch=4), measured())
    found.set_members([EngineNow(JOINED)])
    assert found.engines["engine-0"].heartbeat is not None
    assert found.figures()
    found.set_members([EngineNow(msgspec.structs.replace(JOINED, worker_id=8))])
    assert found.engines["engine-0"].heartbeat is None
    assert found.figures() == {}


def test_no_more_events_are_kept_than_can_be_looked_at() -> None:
    found = live(*(RankDrained(**WHO, rank=0, draining=bool(number % 2)) for number in range(2 * MAX_EVENTS)))
    assert (len(found.events), found.happened) == (MAX_EVENTS, 2 * MAX_EVENTS + 1)


# Words


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (JOINED, "engine-0 joined: m, 2 ranks"),
        (
            PLANNED,
            (
                "engine-0: plan cafe of the planner begins, 3 copies, 3 kB: predicted remote ranks 1.969 >"
                " 1.430, step 1.15 ms shorter"
            ),
        ),
        (
            MigrationStaged(
                **PLAN,
                handover=1,
                number=0,
                epoch=1,
                placement=PLACEMENT,
                copies=3,
                bytes=2_500_000,
                seconds=0.5,
            ),
            "engine-0: handover 1 of cafe is staged, 2.5 MB in 0.50 s",
        ),
        (COMMITTED, "engine-0: handover 1 committed, epoch 1 is served; plan cafe is done"),
        (
            MigrationAborted(**PLAN, handover=1, number=0, epoch=1, reason="no\x1b room", fault="room"),
            "engine-0: plan cafe is given up: no  room",
        ),
        (
            PlacementCommitted(**WHO, attention=DP_ATTENTION, placement=PLACEMENT),
            "engine-0 serves epoch 0",
        ),
        (
            PlacementCommitted(**WHO, attention=DP_ATTENTION, placement=PLACEMENT, plan="cafe"),
            None,
        ),
        (
            PlanEvaluated(
                **PLAN,
                epoch=1,
                verdict="harmful",
                predicted_before=START,
                predicted_after=PREDICTED,
                plan_discount=0.5,
                reason="steps got longer",
            ),
            "engine-0: plan cafe is evaluated: harmful, plan discount 0.50: steps got longer",
        ),
        (
            PopularityShifted(
                model="m", version=2, settled=False, divergence=0.0123, threshold=0.004, layers=(3, 1)
            ),
            "popularity of m shifted by 0.0123 nats of 0.0040 that chance explains, most in layers 3, 1",
        ),
        (
            PopularityShifted(model="m", version=2, settled=True, divergence=0.0, threshold=0.0, layers=()),
            "popularity of m is stable again",
        ),
        (HOMES, "engine-0: new homes of clusters from epoch 1 on: they are foretold"),
        (EngineLeft(**WHO, reason="told to"), "engine-0 left: told to"),
        (RankDrained(**WHO, rank=None, draining=True, reason="fan"), "engine-0 takes no new requests: fan"),
        (
            ConfigChanged(part="planner", instance=1, changed={"policy": ("eplb", "roost")}),
            "settings of planner: policy = roost",
        ),
        (
            ConfigChanged(part="router", instance=1, changed={}, refused="no such key"),
            "settings of router: refused: no such key",
        ),
        (KvMetrics(worker_id=7), None),
    ],
)
def test_what_happens_is_a_line(message: Message, says: str | None) -> None:
    assert event_line(message) == says


def test_homes_that_are_only_said_again_are_no_news() -> None:
    found = live(HOMES, HOMES, msgspec.structs.replace(HOMES, version=4, homes=b""))
    output = [one.words for one in found.events if one.kind == "HomesPublished"]
    assert len(output) == 2
    assert "none" in output[1]
