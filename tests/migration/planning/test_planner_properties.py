"""Every decision can be carried out, keeps to its limits, and states its reason; small engines of every
kind."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.experts import ModelShape
from fleet.placement import EMPTY, Placement, with_rows
from fleet.signatures import ClusterModel
from fleet.timing import EngineSpeed
from migration.config import POLICIES, MigrationConfig
from migration.model.engine_view import CacheUse, Demand, EngineView
from migration.model.move_history import MoveHistory
from migration.model.plan import replay
from migration.planning.planner import decide
from migration.planning.planner_decision import ReasonCode
from migration.planning.problem import PlanningQuestion

LAYERS, EXPERTS = 3, 8
SHAPE = ModelShape(layers=LAYERS, experts=EXPERTS, top_k=2, hidden=4, expert_intermediate=4)


def some_placement(dice: np.random.Generator, ranks: int, slots: int) -> Placement:
    """Every expert at least once, some several times, some slots empty."""
    table = np.full((LAYERS, ranks, slots), EMPTY, np.int16)
    for layer in range(LAYERS):
        for nth, expert in enumerate(dice.permutation(EXPERTS)):
            table[layer, nth % ranks, nth // ranks] = expert
        for rank in range(ranks):
            for slot in np.flatnonzero(table[layer, rank] == EMPTY):
                other = int(dice.integers(EXPERTS))
                if dice.random() < 0.6 and other not in table[layer, rank]:
                    table[layer, rank, slot] = other
    return Placement(table.reshape(LAYERS, -1), experts=EXPERTS, ranks=ranks, epoch=int(dice.integers(5)))


def some_view(
    seed: int,
    ranks: int,
    slots: int,
    nodes: int,
    sharded: tuple[int, ...],
    order: Sequence[int] = range(LAYERS),
) -> EngineView:
    """order: layer i of the view is layer `order[i]` of the one without an order."""
    dice = np.random.default_rng(seed)
    drawn = some_placement(dice, ranks, slots)
    placement = with_rows(
        Placement(drawn.expert_of_slot[[*order]], experts=EXPERTS, ranks=ranks, epoch=drawn.epoch),
        dict.fromkeys(sharded),
        epoch=drawn.epoch,
    )
    windows = [
        np.floor(dice.pareto(0.8, (ranks, LAYERS, EXPERTS)) * dice.integers(0, 3, (ranks, 1, 1))).clip(
            0, 1e9
        )[:, [*order]]
        for _ in range(2)
    ]
    pairs = 10.0 ** dice.uniform(0, 6)
    profiles = dice.dirichlet(np.full(EXPERTS, 0.2), (3, LAYERS)).astype(np.float32)[:, [*order]]
    speed = EngineSpeed(
        expert_pair=10.0 ** dice.uniform(-8, -4),
        dispatch=10.0 ** dice.uniform(-8, -4),
        dispatch_node=10.0 ** dice.uniform(-8, -4),
    )
    return EngineView(
        engine="e",
        worker_id=1,
        model="m",
        shape=SHAPE,
        placement=placement,
        node=np.arange(ranks) * nodes // ranks,
        speed=speed,
        demand=Demand.of(windows[0], np.full(ranks, pairs), 60.0),
        later=(
            None
            if seed % 3 == 0
            else Demand.of(windows[1] if seed % 2 else windows[0], np.full(ranks, pairs), 60.0)
        ),
        running=None if seed % 5 == 0 else dice.integers(0, 9, ranks).astype(np.float64),
        waiting=np.zeros(ranks),
        cache=None if seed % 7 == 0 else CacheUse(100, dice.uniform(0, 100, ranks), 16, 1000),
        clusters=ClusterModel(
            3, profiles / profiles.sum(axis=2, keepdims=True), np.array([0.5, 0.5, 0.0], np.float32), 1.0
        ),
        history=MoveHistory.begin(1, placement),
        now=100.0,
    )


ENGINES = {
    "seed": st.integers(0, 1 << 20),
    "size": st.sampled_from([(2, 5, 1), (3, 4, 1), (4, 3, 2), (4, 2, 2), (8, 1, 4), (1, 8, 1)]),
    "policy": st.sampled_from(POLICIES),
    "sharded": st.sets(st.integers(0, LAYERS - 1), max_size=LAYERS - 1).map(lambda some: tuple(sorted(some))),
    "data": st.data(),
}
"""size: (ranks, slots per rank, nodes)."""


@given(**ENGINES)
@settings(max_examples=5)
def test_what_is_decided_can_be_done_within_its_limits_and_says_why(**engine: Any) -> None:
    check(**engine)


@pytest.mark.slow
@given(**ENGINES)
@settings(max_examples=100)
def test_the_same_for_many_engines(**engine: Any) -> None:
    check(**engine)


def check(
    seed: int, size: tuple[int, int, int], policy: Any, sharded: tuple[int, ...], data: st.DataObject
) -> None:
    ranks, slots, nodes = size
    view = some_view(seed, ranks, slots, nodes, sharded)
    budget = data.draw(st.sampled_from([0, 3, 1000])) * SHAPE.expert_bytes
    dead = (
        tuple(sorted(data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))))
        if seed % 4 == 0
        else ()
    )
    config = MigrationConfig(
        min_pairs=0.0,
        min_gain=0.0,
        critical_experts=data.draw(st.sampled_from([0.0, 0.25])),
        max_replicas=None,
    )
    found = decide(
        view, PlanningQuestion(policy, budget, memory=seed % 2 == 0, dead=dead, bounds=True), config
    )
    record = found.record
    assert (found.plan is None) == (record.refused is not None) == (found.why is not None)
    assert np.isfinite([record.gain_seconds, record.net_seconds, record.cost_seconds]).all()
    if found.homes.share is not None:
        np.testing.assert_allclose(found.homes.share.sum(axis=1), [1, 1, 0], atol=1e-5)
    if found.plan is None:
        return
    series = replay(view.placement, found.plan)
    assert found.plan.bytes == record.copied_bytes
    assert (
        np.array_equal(series[-1].expert_of_slot[[*sharded]], view.placement.expert_of_slot[[*sharded]])
        if series
        else True
    )
    assert record.copied_bytes <= budget or dead
    assert all(step.why for step in found.plan.steps)
    assert all(step.layer not in sharded for step in record.steps)
    assert (
        record.net_seconds > 0
        or dead
        or "second replicas" in " ".join(record.reasons)
        or config.critical_experts
    )


@given(
    seed=st.integers(0, 1 << 20),
    size=st.sampled_from([(2, 5, 1), (4, 3, 2)]),
    policy=st.sampled_from(POLICIES),
    sharded=st.sets(st.integers(0, LAYERS - 1), min_size=1, max_size=LAYERS - 1),
)
@settings(max_examples=15)
def test_a_plan_is_the_same_whichever_numbers_the_sharded_layers_have(
    seed: int, size: tuple[int, int, int], policy: Any, sharded: set[int]
) -> None:
    """Compare with the same engine whose sharded layers come first."""
    order = [*sorted(sharded), *sorted(set(range(LAYERS)) - sharded)]
    question, config = PlanningQuestion(policy, 1000 * SHAPE.expert_bytes), MigrationConfig(min_pairs=0.0)
    views = (
        some_view(seed, *size, tuple(sorted(sharded))),
        some_view(seed, *size, tuple(range(len(sharded))), order),
    )
    found, first = (decide(replace(view, predictability=1.0), question, config) for view in views)
    assert (found.why, found.homes.note) == (first.why, first.homes.note)
    assert found.record.gain_seconds == pytest.approx(first.record.gain_seconds, rel=1e-9, abs=1e-15)
    if found.plan is None or first.plan is None:
        return
    moves = [{(step.layer, copy) for step in found.plan.steps for copy in step.copies}]
    moves.append({(order[step.layer], copy) for step in first.plan.steps for copy in step.copies})
    assert moves[0] == moves[1]


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_of_which_nothing_is_wanted_is_left_alone(seed: int) -> None:
    view = some_view(seed, 4, 3, 2, ())
    nothing = Demand.of(np.zeros((4, LAYERS, EXPERTS)), np.zeros(4), 60.0)
    for policy in POLICIES:
        found = decide(
            EngineView(
                **{name: getattr(view, name) for name in EngineView.__dataclass_fields__}
                | {"demand": nothing, "later": nothing}
            ),
            PlanningQuestion(policy, 0),
            MigrationConfig(),
        )
        assert found.why is ReasonCode.DATA
