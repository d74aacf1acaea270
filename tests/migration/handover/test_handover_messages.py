"""Description of a handover: cells that ranks fill, bytes that they stage, copies that they make."""

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.placement import EMPTY, Placement, linear
from fleet.sharding import contents, turn
from migration.config import MigrationConfig
from migration.engine_state.placement_registry import EngineEntry
from migration.handover.handover_messages import next_of, received
from migration.model.plan import Copy, Handover, Plan, PlanStep, applied, planned
from migration.planning.layout_switch import switch
from migration.planning.staging_capacity import StagingRoom

CONFIG = MigrationConfig(stage_seconds=10.0, stage_bytes_per_second=1.0)
PART = 50


def series(ranks: int, experts: int, layers: int, spare: int) -> list[tuple[Placement, Plan]]:
    """Return switches of all layers to sharded and back, each with the placement that it applies to."""
    per = -(-experts // ranks) + spare
    begin = linear(layers=layers, experts=experts, ranks=ranks, slots_per_rank=per)
    room = StagingRoom(np.zeros(ranks, np.intp), PART * ranks, 2 * per)
    there = switch(begin, range(layers), room).plan
    end = begin
    for handover in there.handovers:
        end = applied(end, handover)
    return [(begin, there), (end, switch(end, (), room).plan)]


@given(st.integers(2, 4), st.integers(2, 9), st.integers(1, 4), st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_turned_layers_fill_the_cells_and_stage_the_bytes_that_their_parts_take(
    ranks: int, experts: int, layers: int, spare: int
) -> None:
    for begin, plan in series(ranks, experts, layers, spare):
        before = begin
        for number, handover in enumerate(plan.handovers):
            after = applied(before, handover)
            turned = [step.layer for step in handover.steps]
            cells = [int((contents(after, rank)[turned] != EMPTY).sum()) for rank in range(ranks)]
            assert received(handover, before) == cells
            parts = turn(before, after)
            staged = max(np.bincount(parts.destination, minlength=ranks)) * PART
            entry = EngineEntry("a", 1, before)
            what = next_of(entry, plan, number, after, 5, CONFIG)
            assert what.stage_seconds == 10.0 + staged
            assert (what.copied, what.bytes) == (
                int((~parts.is_local).sum()),
                int((~parts.is_local).sum()) * PART,
            )
            assert (what.copies, what.last) == ((), number + 1 == len(plan.handovers))
            before = after


def test_experts_that_move_beside_a_layer_that_turns_over_are_counted_with_it() -> None:
    begin, plan = series(2, 4, 2, 1)[0]
    turns = plan.steps[0]
    copy = Copy(expert=0, slot=5, source=0, link="same-node", bytes=100)
    moves = PlanStep(kind="replicate", layer=1, slot=5, expert=0, copies=(copy,), why="so")
    both = Handover(epoch=1, steps=(turns, moves))
    after = applied(begin, both)
    assert received(both, begin) == [2, 3]
    what = next_of(EngineEntry("a", 1, begin), planned(begin, [both]), 0, after, 1, CONFIG)
    assert [(one.layer, one.expert, one.source, one.slot) for one in what.copies] == [(1, 0, 0, 5)]
    assert what.stage_seconds == 10.0 + 4 * PART + 100
    assert what.bytes == 4 * PART + 100
    assert msgspec.json.decode(msgspec.json.encode(both), type=Handover) == both
