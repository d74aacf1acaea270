"""Switches of layout: what their handovers lead to, what they move, and what is refused."""

import re
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.experts import ModelShape
from fleet.layout import EP, AttentionKind, Layout, experts_tp, layer_ranges, layers_named, layout_named, tp
from fleet.placement import EMPTY, Placement, linear, with_attention, with_rows
from migration.model.cost_model import LinkSpeeds
from migration.model.placement_changes import taken
from migration.model.plan import Inapplicable, PartsMoved, Plan, PlanCause, planned, replay
from migration.planning.handover_batching import ordered
from migration.planning.layout_switch import choices, switch, turning_refusal
from migration.planning.operator_plans import read, restoring_plan
from migration.planning.staging_capacity import StagingRoom
from tests.migration.model.test_plan import random_changes, random_split, random_table

SHAPE = ModelShape(layers=4, experts=8, top_k=2, hidden=16, expert_intermediate=24)


@st.composite
def engines(draw: st.DrawFn) -> tuple[Placement, StagingRoom, np.random.Generator]:
    """Draw a placement with some sharded layers and uneven shares, and its staging room."""
    dice = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks, experts, layers = draw(st.integers(2, 4)), draw(st.integers(2, 9)), draw(st.integers(1, 5))
    per = -(-experts // ranks) + draw(st.integers(0, 2))
    placement = Placement(
        random_table(dice, layers, experts, ranks, per), experts=experts, ranks=ranks, epoch=7
    )
    node = np.arange(ranks) // draw(st.sampled_from([1, 2, 4]))
    if draw(st.booleans()):
        placement = Placement(
            placement.expert_of_slot,
            experts=experts,
            ranks=ranks,
            epoch=7,
            split=random_split(dice, placement.expert_of_slot, experts),
        )
    sharded = np.flatnonzero(dice.random(layers) < 0.4).tolist()
    if sharded:
        placement = with_rows(placement, dict.fromkeys(sharded), epoch=7)
    room = StagingRoom(node=node, expert_bytes=60 * ranks, staging=per * draw(st.integers(1, 3)))
    return placement, room, dice


@given(engines(), st.sets(st.integers(0, 4)))
@settings(max_examples=60, deadline=None)
def test_a_switch_leads_to_the_forms_wanted_and_leaves_other_layers_alone(
    drawn: tuple[Placement, StagingRoom, np.random.Generator], wanted: set[int]
) -> None:
    placement, room, _ = drawn
    target = sorted(layer for layer in wanted if layer < placement.layers)
    if target == list(placement.sharded):
        with pytest.raises(ValueError, match="already; nothing would change"):
            switch(placement, target, room)
        return
    found = switch(placement, target, room)
    assert read(msgspec.json.encode(found.plan), placement) == found.plan
    before = placement
    for handover, after in zip(found.plan.handovers, replay(placement, found.plan), strict=True):
        layers = sorted(set(before.sharded) ^ set(after.sharded))
        assert [step.layer for step in handover.steps] == layers
        assert len(layers) <= (room.staging or 0) // placement.slots_per_rank
        others = np.setdiff1d(np.arange(placement.layers), layers)
        assert np.array_equal(after.expert_of_slot[others], before.expert_of_slot[others])
        for part, old in zip(after.split, before.split, strict=True):
            assert np.array_equal(part[others], old[others])
        for step in handover.steps:
            assert _by_link(step.parts) == _counted(before, after, step.layer, room)
        before = after
    assert before.sharded == tuple(target)
    for layer in set(placement.sharded) - set(target):
        held = (before.expert_of_slot[layer].reshape(placement.ranks, -1) != EMPTY).sum(axis=1)
        assert held.max() - held.min() <= 1, "even shares"
        assert held.sum() == placement.experts, "without replicas"


@given(engines(), st.booleans(), st.booleans(), st.sets(st.integers(0, 4)))
@settings(max_examples=60, deadline=None)
def test_attention_changes_alone_in_one_handover_while_all_layers_are_sharded(
    drawn: tuple[Placement, StagingRoom, np.random.Generator], before: bool, after: bool, some: set[int]
) -> None:
    placement, room, _ = drawn
    every = tuple(range(placement.layers))
    if before:
        placement = with_attention(with_rows(placement, dict.fromkeys(every), epoch=7), "tp", epoch=7)
    attention: AttentionKind = "tp" if after else "dp"
    wanted = Layout(attention, every if after else tuple(sorted(some & set(every))))
    if wanted == placement.layout:
        with pytest.raises(ValueError, match="already; nothing would change"):
            switch(placement, wanted.sharded, room, attention=attention)
        return
    found = switch(placement, wanted.sharded, room, attention=attention)
    assert read(msgspec.json.encode(found.plan), placement) == found.plan
    epochs = [placement, *replay(placement, found.plan)]
    assert epochs[-1].layout == wanted
    switches = [two for one, two in pairwise(epochs) if one.attention != two.attention]
    assert len(switches) == (before or after), "never both there and back, except to turn layers over between"
    for one, two in pairwise(epochs):
        if one.attention != two.attention:
            assert with_attention(one, two.attention, epoch=two.epoch) == two, "and nothing else"
            assert one.sharded == every
    assert found.plan.attention == (attention if before != after else None)
    end = epochs[-1]
    back = restoring_plan(end, placement, "x", room)
    assert replay(end, back)[-1].layout == placement.layout
    assert _held(replay(end, back)[-1]) == _held(placement)
    assert _shares(replay(end, back)[-1]) == _shares(placement)


def test_a_switch_to_tensor_parallel_attention_needs_all_layers_sharded() -> None:
    placement = linear(layers=3, experts=4, ranks=2)
    room = StagingRoom(np.zeros(2, np.intp), 100)
    with pytest.raises(ValueError, match="needs all 3 layers sharded, not 0-1"):
        switch(placement, (0, 1), room, attention="tp")
    assert [len(one.steps) for one in switch(placement, range(3), room, attention="tp").plan.handovers] == [
        1,
        1,
        1,
        1,
    ]


@given(engines(), st.sets(st.integers(0, 4)))
@settings(max_examples=60, deadline=None)
def test_after_moves_and_switches_a_rollback_restores_every_expert_and_share(
    drawn: tuple[Placement, StagingRoom, np.random.Generator], wanted: set[int]
) -> None:
    placement, room, dice = drawn
    target = sorted(layer for layer in wanted if layer < placement.layers)
    now = placement
    full = with_rows(
        placement, dict.fromkeys(placement.sharded, _even_row(placement)), epoch=7
    ).expert_of_slot
    changes = random_changes(dice, full, placement.ranks, placement.experts, 6)
    changes = taken(changes, ~np.isin(changes.layer, placement.sharded))
    if changes:
        now = replay(now, planned(now, ordered(now, changes, StagingRoom(room.node, 60))))[-1]
    if target != list(now.sharded):
        now = replay(now, switch(now, target, room).plan)[-1]
    if _held(now) == _held(placement) and now.serves_as(placement):
        return
    try:
        plan = restoring_plan(now, placement, "x", room)
    except ValueError as error:
        assert "already" in str(error)  # noqa: PT017
        plan = planned(now)
    end = replay(now, plan)[-1] if plan.handovers else now
    assert end.sharded == placement.sharded
    assert _held(end) == _held(placement)
    assert _shares(end) == _shares(placement)


def test_as_many_layers_turn_over_at_a_time_as_there_are_free_cells_for() -> None:
    placement = linear(layers=5, experts=8, ranks=4, slots_per_rank=3)
    node = np.zeros(4, np.intp)
    for free, handovers, cells in ((2, 5, 2), (5, 5, 2), (6, 3, 4), (100, 1, 10)):
        found = switch(placement, range(5), StagingRoom(node, 64, free))
        assert (len(found.plan.handovers), found.cells) == (handovers, cells)
    with pytest.raises(ValueError, match="needs 2 free cells to turn a layer over, and one has only 1"):
        switch(placement, range(5), StagingRoom(node, 64, 1))


def test_a_switch_there_and_back_moves_the_bytes_that_can_be_counted_by_hand() -> None:
    placement = linear(layers=1, experts=4, ranks=2)
    room = StagingRoom(np.array([0, 1]), 100, 2)
    there = switch(placement, (0,), room)
    # Each rank keeps half of its own two experts, and gets half of the other two.
    assert there.plan.steps[0].parts == (
        PartsMoved(link="local", parts=4, bytes=200),
        PartsMoved(link="cross-node", parts=4, bytes=200),
    )
    assert (there.plan.bytes, there.plan.local_bytes, there.plan.transfers) == (200, 200, 4)
    links = LinkSpeeds(same_node=1e9, cross_node=50.0, checksum=1e12, handover_seconds=0.25)
    assert there.seconds(room.node, links) == pytest.approx(100 / 50 + 0.25), "both ranks at once"
    back = switch(replay(placement, there.plan)[-1], (), room)
    assert (back.plan.bytes, back.plan.local_bytes) == (200, 200)
    assert replay(replay(placement, there.plan)[-1], back.plan)[-1].serves_as(placement)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""),
        ({"ranks": 1}, "one rank"),
        ({"attention": "tp"}, "its attention is tensor-parallel, .* and its heads do not divide"),
        ({"attention": "tp", "tp_refusal": ""}, ""),
        ({"unshardable": "its agent cannot"}, "its agent cannot"),
        ({"ranks": 5}, "do not divide into parts for 5 ranks"),
    ],
)
def test_why_an_engine_cannot_turn_layers_over_is_said(fields: dict[str, Any], reason: str) -> None:
    about: dict[str, Any] = {
        "shape": SHAPE,
        "attention": "dp",
        "ranks": 4,
        "unshardable": "",
        "tp_refusal": "its heads do not divide",
        **fields,
    }
    assert re.search(reason, turning_refusal(**about))
    assert bool(reason) == bool(turning_refusal(**about))
    others = {name: value for name, value in about.items() if name != "attention"}
    by_name = {choice.name: choice.refusal for choice in choices(**others, layout=Layout(about["attention"]))}
    dp = about["attention"] == "dp"
    if dp:
        assert by_name["ep"] == "", "the present layout is never refused"
        assert bool(by_name["experts-tp"]) == bool(reason)
    if about["tp_refusal"]:
        assert "attention" in by_name["tp"] or "divide" in by_name["tp"]


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["", "its agent is old"]),
    st.sampled_from(["", "its heads do not divide"]),
    st.sampled_from([EP, Layout("dp", (0, 2)), experts_tp(4), tp(4)]),
)
def test_every_layout_but_the_present_one_is_refused_for_the_changes_that_lead_there(
    ranks: int, unshardable: str, tp_refusal: str, layout: Layout
) -> None:
    named = {"ep": EP, "experts-tp": experts_tp(4), "some layers": Layout("dp", (0, 2)), "tp": tp(4)}
    for choice in choices(SHAPE, layout, ranks, unshardable, tp_refusal):
        wanted = named[choice.name]
        turns = wanted.sharded != layout.sharded
        switches = wanted.attention != layout.attention
        lone = ranks == 1 and (turns or switches)
        assert bool(choice.refusal) == bool(lone or (turns and unshardable) or (switches and tp_refusal)), (
            choice,
            layout,
        )


def _spoilt(plan: Plan, **fields: Any) -> Plan:
    (handover,) = plan.handovers
    step = msgspec.structs.replace(handover.steps[0], **fields)
    return msgspec.structs.replace(plan, handovers=(msgspec.structs.replace(handover, steps=(step,)),))


def test_a_switch_does_not_apply_to_what_it_was_not_made_for() -> None:
    placement = linear(layers=2, experts=4, ranks=2)
    room = StagingRoom(np.array([0, 0]), 100, 2)
    plan = switch(placement, (1,), room).plan
    sharded = replay(placement, plan)[-1]
    back = switch(sharded, (), room).plan
    doubled = msgspec.structs.replace(
        plan, handovers=(msgspec.structs.replace(plan.handovers[0], steps=plan.steps * 2),)
    )
    moves = ordered(
        placement, random_changes(np.random.default_rng(1), placement.expert_of_slot, 2, 4, 9), room
    )
    late = msgspec.structs.replace(moves[0], epoch=2)
    for base, one, cause, words in (
        (placement, _spoilt(plan, layer=2), PlanCause.SHAPE, "layer 2 does not exist"),
        (placement, _spoilt(plan, parts=()), PlanCause.COPY, "it moves 8 parts, but names"),
        (placement, _spoilt(plan, slots=b"ab"), PlanCause.SHAPE, "2 bytes of slots"),
        (placement, doubled, PlanCause.SLOT, "has other steps in the same handover"),
        (sharded, _spoilt(back, slots=b""), PlanCause.SHAPE, "0 bytes of slots"),
        (sharded, _spoilt(back, layer=0), PlanCause.SLOT, "layer 0 is whole already"),
        (
            sharded,
            _spoilt(back, slots=np.zeros(4, "<i2").tobytes()),
            PlanCause.PLACEMENT,
            "holds expert 1/0 more than once",
        ),
        (
            sharded,
            msgspec.structs.replace(back, handovers=(msgspec.structs.replace(late, steps=_of(late, 1)),)),
            PlanCause.SLOT,
            "layer 1 is sharded",
        ),
    ):
        with pytest.raises(Inapplicable, match=words) as refused:
            replay(base, one)
        assert refused.value.cause == cause


def test_attention_does_not_change_together_with_anything_else() -> None:
    placement = with_rows(linear(layers=2, experts=4, ranks=2), {0: None, 1: None}, epoch=3)
    room = StagingRoom(np.array([0, 0]), 100, 2)
    plan = switch(placement, (0, 1), room, attention="tp").plan
    (end,) = replay(placement, plan)
    whole = switch(placement, (), room).plan
    late = msgspec.structs.replace(whole.handovers[0], epoch=end.epoch + 1)
    doubled = msgspec.structs.replace(plan.handovers[0], steps=plan.steps + whole.steps)
    for base, handovers, words in (
        (placement, (doubled,), "together with something else"),
        (placement, _spoilt(plan, attention="dp").handovers, "attention is data-parallel already"),
        (with_attention(end, "tp", epoch=3), plan.handovers, "attention is tensor-parallel already"),
        (linear_at(3), plan.handovers, "while 2 layers are whole"),
        (end, (late,), "turns over while attention is tensor-parallel"),
    ):
        with pytest.raises(Inapplicable, match=words) as refused:
            replay(base, msgspec.structs.replace(plan, handovers=handovers))
        assert refused.value.cause == PlanCause.ATTENTION


def linear_at(epoch: int) -> Placement:
    whole = linear(layers=2, experts=4, ranks=2)
    return Placement(whole.expert_of_slot, experts=4, ranks=2, epoch=epoch)


def _of(handover: Any, layer: int) -> Any:
    """Return the steps of a handover as if they were of another layer."""
    return tuple(msgspec.structs.replace(step, layer=layer) for step in handover.steps)


def test_layers_are_named_in_one_way() -> None:
    assert layers_named("ep", 4) == ()
    assert layers_named("experts-tp", 3) == (0, 1, 2)
    assert layers_named("0-2, 7,2", 8) == (0, 1, 2, 7)
    assert layers_named(layer_ranges((0, 1, 5)), 6) == (0, 1, 5)
    for text, words in (
        ("0-4", "the model has MoE layers 0 to 3"),
        ("3-1", "'3-1' names no layers"),
        ("tp", "use ep"),
    ):
        with pytest.raises(ValueError, match=words):
            layers_named(text, 4)


def test_layouts_are_named_in_one_way() -> None:
    assert [layout_named(text, 3) for text in ("ep", "experts-tp", "tp", "0,2")] == [
        EP,
        experts_tp(3),
        tp(3),
        Layout("dp", (0, 2)),
    ]


# Oracles


def _by_link(parts: tuple[PartsMoved, ...]) -> dict[str, int]:
    return {moved.link: moved.bytes for moved in parts}


def _counted(before: Placement, after: Placement, layer: int, room: StagingRoom) -> dict[str, int]:
    """Count the bytes of a turned layer by path, from what each rank holds. A part from several possible ranks
    of both kinds of path counts as what the plan may choose, so those layers are given the plan's own rule."""
    ranks, size, found = before.ranks, room.expert_bytes // before.ranks, dict[str, int]()
    read = [0] * ranks
    for expert in range(before.experts):
        for rank in range(ranks):
            if layer in after.sharded:
                holders = [one for one in range(ranks) if expert in before.on_rank(one)[layer]]
                if rank in holders:
                    sources = [rank]
                else:
                    sources = [min(holders, key=lambda one: (read[one], one))]
                    read[sources[0]] += 1
            else:
                sources = list(range(ranks)) if expert in after.on_rank(rank)[layer] else []
            for source in sources:
                far = "cross-node" if room.node[source] != room.node[rank] else "same-node"
                link = "local" if source == rank else far
                found[link] = found.get(link, 0) + size
    return found


def _even_row(placement: Placement) -> Any:
    return linear(
        layers=1, experts=placement.experts, ranks=placement.ranks, slots_per_rank=placement.slots_per_rank
    ).expert_of_slot[0]


def _held(placement: Placement) -> list[list[list[int]]]:
    return [
        [
            sorted(e for e in placement.on_rank(rank)[layer].tolist() if e != EMPTY)
            for rank in range(placement.ranks)
        ]
        for layer in range(placement.layers)
    ]


def _shares(placement: Placement) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """Return the split by layer, rank and expert, whatever the slots."""
    return {
        (
            int(layer),
            int(slot) // placement.slots_per_rank,
            int(placement.expert_of_slot[layer, slot]),
        ): tuple(int(part[layer, slot]) for part in placement.split)
        for layer, slot in np.argwhere(placement.expert_of_slot != EMPTY)
    }
