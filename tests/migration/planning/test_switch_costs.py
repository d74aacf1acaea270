"""Costs of switches in closed form, beside the plans themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.experts import ModelShape
from fleet.layout import EP, Layout, experts_tp, tp
from fleet.placement import Placement, linear, with_attention, with_rows
from migration.model.cost_model import LinkSpeeds
from migration.planning.layout_switch import switch
from migration.planning.staging_capacity import StagingRoom
from migration.planning.switch_costs import priced_switch

LAYERS = 3
LINKS = LinkSpeeds(same_node=40e9, cross_node=9e9)


def served(layout: Layout, experts: int, ranks: int) -> Placement:
    placement = linear(layers=LAYERS, experts=experts, ranks=ranks)
    placement = with_rows(placement, dict.fromkeys(layout.sharded), epoch=0)
    return with_attention(placement, layout.attention, epoch=0)


def shape_of(experts: int) -> ModelShape:
    return ModelShape(
        layers=LAYERS, experts=experts, top_k=2, hidden=256, expert_intermediate=512, heads=8, kv_heads=4
    )


@given(
    st.sampled_from([EP, experts_tp(LAYERS), tp(LAYERS), Layout("dp", (1,))]),
    st.sampled_from([EP, experts_tp(LAYERS), tp(LAYERS), Layout("dp", (0, 2))]),
    st.sampled_from([2, 4]),
    st.integers(1, 4),
    st.integers(1, 2),
)
def test_bytes_and_duration_are_those_of_the_plan(
    before: Layout, after: Layout, ranks: int, each: int, nodes: int
) -> None:
    shape = shape_of(ranks * each)
    node = np.arange(ranks) % nodes
    if before == after:
        return
    room = StagingRoom(node=node, expert_bytes=shape.expert_bytes)
    plan = switch(served(before, shape.experts, ranks), after.sharded, room, attention=after.attention)
    found = priced_switch(before, after, shape, node, LINKS, 0)
    assert found.bytes == sum(handover.bytes for handover in plan.plan.handovers)
    assert found.handovers == len(plan.plan.handovers)
    overhead = LINKS.handover_seconds * (before.attention == "tp" and bool(len(plan.transfers.bytes)))
    assert found.weights_seconds == pytest.approx(plan.seconds(node, LINKS) - overhead)


def test_kv_heads_below_ranks_make_tp_the_dear_direction() -> None:
    shape = ModelShape(
        layers=94, experts=128, top_k=8, hidden=4096, expert_intermediate=1536, heads=64, kv_heads=4
    )
    to_tp, to_dp = (
        priced_switch(one, other, shape, np.zeros(8, np.intp), LINKS, 1 << 20).page_bytes
        for one, other in ((experts_tp(94), tp(94)), (tp(94), experts_tp(94)))
    )
    # Sheet: 329 KiB of 188 a token to TP, 141 back; on the busiest rank an eighth of either.
    assert to_tp * 8 / (1 << 20) == pytest.approx(329 / 188, rel=0.01)
    assert to_dp * 8 / (1 << 20) == pytest.approx(141 / 188, rel=0.01)


def test_the_cost_grows_with_the_pages_and_with_contention() -> None:
    shape = shape_of(8)
    priced = priced_switch(EP, tp(LAYERS), shape, np.zeros(2, np.intp), LINKS, 1 << 20)
    few, many, quiet = (priced.cost(pages, share) for pages, share in ((10, 0.3), (1000, 0.3), (10, 0.0)))
    assert many.loss(0) > few.loss(0) > quiet.loss(0) > 0
    assert few.loss(10_000) > few.loss(0)
