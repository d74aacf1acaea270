"""Dispatch rule: expected values against a token-by-token evaluation, and the choice for single tokens
against them.
"""

from fractions import Fraction
from math import log
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.dispatch import (
    MANY_ROWS,
    ROW_HASH,
    SPLIT,
    Chooser,
    LocalReplicas,
    as_dispatched,
    flows,
    loads,
    numbered,
    onward,
    own_part,
    row_copies,
    row_shares,
    served_by,
    shares,
)
from fleet.placement import EMPTY, FULL, Placement, even_split, linear, with_rows
from tests.fleet.splits import random_split, random_table


@st.composite
def placed(draw: st.DrawFn) -> tuple[Placement, NDArray[np.intp]]:
    """Return a placement with a random split, and the node of each rank."""
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers, ranks, experts = draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.integers(1, 7))
    nodes = draw(st.integers(1, ranks))
    table = random_table(dice, layers, ranks, experts, draw(st.integers(0, 3)))
    node = np.concatenate([np.arange(nodes), dice.integers(nodes, size=ranks - nodes)])
    split = (
        random_split(dice, table, experts, nodes=nodes > 1 or draw(st.booleans()))
        if draw(st.booleans())
        else None
    )
    return Placement(table, experts=experts, ranks=ranks, split=split), dice.permutation(node)


def walked(
    placement: Placement, layer: int, expert: int, home: int, node: NDArray[np.intp]
) -> dict[int, Fraction]:
    """Evaluate the rule literally: the exact share of each slot of a token of `home` for the expert."""
    slots = [slot for slot, held in enumerate(placement.expert_of_slot[layer].tolist()) if held == expert]
    rank = {slot: slot // placement.slots_per_rank for slot in slots}
    keep, spill, near = (
        {slot: Fraction(int(part[layer, slot]), FULL) for slot in slots} for part in placement.split
    )
    part = dict.fromkeys(slots, Fraction(0))
    left = Fraction(1)
    for slot in slots:
        if rank[slot] == home:
            part[slot] = keep[slot]
            left = 1 - keep[slot]
    beside = [slot for slot in slots if node[rank[slot]] == node[home]]
    claimed = sum((near[slot] for slot in beside), Fraction(0))
    scale = 1 / claimed if claimed > 1 else Fraction(1)
    for slot in beside:
        part[slot] += left * near[slot] * scale
    rest = left * (1 - claimed * scale)
    for slot in slots:
        part[slot] += rest * spill[slot]
    return part


@given(placed())
@settings(max_examples=60, deadline=None)
def test_the_shares_of_each_home_are_those_of_the_rule_in_words(
    case: tuple[Placement, NDArray[np.intp]],
) -> None:
    placement, node = case
    own = own_part(placement, node)
    for home in range(placement.ranks):
        found = shares(placement, home, node)
        here = LocalReplicas.of(placement).rank[0] == home
        assert own[:, here] == pytest.approx(found[:, here])
        assert not found[placement.expert_of_slot == EMPTY].any()
        for layer, expert in np.ndindex(placement.layers, placement.experts):
            expected = walked(placement, layer, expert, home, node)
            assert sum(expected.values()) == 1
            assert [found[layer, slot] for slot in expected] == pytest.approx(
                [float(part) for part in expected.values()], abs=1e-12
            )


@given(placed())
@settings(max_examples=25, deadline=None)
def test_what_is_sent_on_goes_where_the_rule_in_words_sends_it(
    case: tuple[Placement, NDArray[np.intp]],
) -> None:
    placement, node = case
    found, held = onward(placement, node), LocalReplicas.of(placement)
    for home, layer in np.ndindex(placement.ranks, placement.layers):
        part, keep = found[min(int(node[home]), len(found) - 1), layer], placement.split.keep[layer] / FULL
        assert held.by_rank(part, layer).sum(axis=0) == pytest.approx(np.ones(placement.experts))
        for expert in range(placement.experts):
            walk = walked(placement, layer, expert, home, node)
            kept = sum(keep[slot] for slot in walk if held.rank[0, slot] == home)
            assert [
                (1.0 - kept) * part[slot] + kept * (held.rank[0, slot] == home) for slot in walk
            ] == pytest.approx([float(each) for each in walk.values()])


@given(placed(), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_flows_are_the_walks_of_all_tokens_and_nothing_is_lost(
    case: tuple[Placement, NDArray[np.intp]], seed: int
) -> None:
    placement, node = case
    demand = np.random.default_rng(seed).integers(
        0, 9, (placement.ranks, placement.layers, placement.experts)
    )
    expected = np.zeros(placement.expert_of_slot.shape)
    for home, layer, expert in np.ndindex(*demand.shape):
        for slot, part in walked(placement, layer, expert, home, node).items():
            expected[layer, slot] += int(demand[home, layer, expert]) * float(part)
    found = flows(placement, demand, node)
    assert found.served == pytest.approx(expected, abs=1e-9)
    assert all((part >= 0).all() for part in found)
    between = served_by(placement, demand, node)
    for home in range(placement.ranks):
        own = shares(placement, home, node) * np.take_along_axis(
            demand[home], np.maximum(placement.expert_of_slot, 0), axis=1
        )
        assert between[:, :, home] == pytest.approx(
            own.reshape(placement.layers, placement.ranks, -1).sum(axis=2), abs=1e-9
        )
    by_rank = loads(placement, demand, node)
    assert by_rank.sum(axis=1) == pytest.approx(demand.sum(axis=(0, 2)))
    assert by_rank == pytest.approx(
        expected.reshape(placement.layers, placement.ranks, -1).sum(axis=2), abs=1e-9
    )


@given(placed(), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_equal_demand_on_all_ranks_loads_the_replicas_of_the_even_split_evenly(
    case: tuple[Placement, NDArray[np.intp]], seed: int
) -> None:
    even, node = Placement(case[0].expert_of_slot, experts=case[0].experts, ranks=case[0].ranks), case[1]
    load = np.random.default_rng(seed).random((even.layers, even.experts))
    served = flows(even, np.repeat(load[None], even.ranks, axis=0), node).served
    for layer, expert in np.ndindex(load.shape):
        at = even.expert_of_slot[layer] == expert
        assert served[layer, at] == pytest.approx(
            np.full(at.sum(), even.ranks * load[layer, expert] / at.sum()), rel=1e-4
        )


def sent(
    chooser: Chooser, layer: int, wanted: NDArray[Any], steps: NDArray[Any], experts: int
) -> NDArray[np.int64]:
    """Return the slots of the pairs of these steps, counted as an engine counts them."""
    turns = np.zeros(experts, np.int64)
    found = []
    for step in np.unique(steps):
        now = wanted[steps == step]
        found.append(chooser.choose(layer, now, turns))
        turns += np.bincount(now, minlength=experts)
    return np.concatenate(found)


@given(placed(), st.integers(0, 2**32 - 1), st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_single_tokens_keep_to_the_shares_over_any_steps(
    case: tuple[Placement, NDArray[np.intp]], seed: int, count: int
) -> None:
    placement, node = case
    dice = np.random.default_rng(seed)
    home, layer = int(dice.integers(placement.ranks)), int(dice.integers(placement.layers))
    wanted = dice.choice(placement.experts, count, p=dice.dirichlet(np.ones(placement.experts)))
    found = sent(
        Chooser(placement, (home,), node),
        layer,
        wanted,
        np.sort(dice.integers(0, 20, count)),
        placement.experts,
    )
    assert (placement.expert_of_slot[layer, found] == wanted).all()
    part = shares(placement, home, node)[layer]
    for expert in np.unique(wanted):
        pairs = int((wanted == expert).sum())
        for slot in np.flatnonzero(placement.expert_of_slot[layer] == expert):
            here = int((found == slot).sum())
            assert abs(here - pairs * part[slot]) < 3 + 3.6 * log(pairs + 1)
            if part[slot] == 0:
                assert not here
            if part[slot] == 1:
                assert here == pairs


def test_at_no_moment_is_a_share_off_by_more_than_a_few_tokens() -> None:
    split = even_split(np.array([[0, 1, 0, 1]], np.int16), 2)._replace(
        keep=np.zeros((1, 4), np.uint16),
        spill=np.array([[20_000, 50_000, FULL - 20_000, FULL - 50_000]], np.uint16),
    )
    placement = Placement(np.array([[0, 1, 0, 1]]), experts=2, ranks=2, split=split)
    chooser = Chooser(placement, (0,), np.zeros(2, np.intp))
    wanted = np.random.default_rng(1).integers(0, 2, 1000)
    found = sent(chooser, 0, wanted, np.arange(1000) // 3, 2)
    for slot in range(4):
        mine = wanted == slot % 2
        assert (
            np.abs(
                np.cumsum(found[mine] == slot) - np.arange(1, mine.sum() + 1) * split.spill[0, slot] / FULL
            ).max()
            < 3
        )


def test_a_step_is_spread_well_by_a_number_of_steps_too_and_the_same_each_time() -> None:
    placement = Placement(
        np.array([[0, 0, 0]]),
        experts=1,
        ranks=3,
        split=even_split(np.array([[0, 0, 0]], np.int16), 1)._replace(keep=np.zeros((1, 3), np.uint16)),
    )
    chooser = Chooser(placement, (2,), np.zeros(3, np.intp))
    for turn in (0, 7, 2**40 + 5):
        found = chooser.choose(0, np.zeros(30, np.int64), turn)
        assert np.abs(np.bincount(found, minlength=3) - 10).max() <= 2
        assert found.tolist() == chooser.choose(0, np.zeros(30, np.int64), turn).tolist()
    assert len(chooser.choose(0, np.zeros(0, np.int64), 3)) == 0


def test_single_tokens_of_several_ranks_do_not_go_the_same_way() -> None:
    table = np.array([[0, 1, 0, 1, *([EMPTY] * 12)]], np.int16)
    placement = Placement(table, experts=2, ranks=8)
    assert [Chooser(placement, (home,), np.zeros(8, np.intp)).plain for home in (0, 1, 2)] == [
        (True,),
        (True,),
        (False,),
    ]
    first = [
        int(Chooser(placement, (home,), np.zeros(8, np.intp)).choose(0, np.array([0]), 0)[0])
        for home in range(2, 8)
    ]
    assert sorted(first) == [0, 0, 0, 2, 2, 2]


def test_nodes_are_numbered_in_the_order_in_which_they_come() -> None:
    assert numbered(("b", "a", "b", "c")) == (0, 1, 0, 2)
    assert numbered(()) == ()


@given(placed(), st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_several_homes_at_once_are_each_alone(case: tuple[Placement, NDArray[np.intp]], seed: int) -> None:
    (placement, node), dice = case, np.random.default_rng(seed)
    homes = dice.permutation(placement.ranks).tolist()
    at, experts = np.sort(dice.integers(0, len(homes), 50)), dice.integers(0, placement.experts, 50)
    turns = dice.integers(0, 1000, (len(homes), placement.experts))
    together = Chooser(placement, homes, node)
    for layer in range(placement.layers):
        found = together.choose(layer, at * placement.experts + experts, turns.ravel())
        alone = [
            Chooser(placement, (home,), node).choose(layer, experts[at == nth], turns[nth])
            for nth, home in enumerate(homes)
        ]
        assert found.tolist() == np.concatenate(alone).tolist()


def test_where_there_is_no_choice_it_is_a_table() -> None:
    chooser = Chooser(linear(layers=2, experts=6, ranks=3), (1,), np.zeros(3, np.intp))
    assert chooser.plain == (True, True)
    assert chooser.choose(1, np.array([5, 0, 3, 5]), 0).tolist() == [5, 0, 3, 5]


# Row hash: the replica is chosen by the token's row in the step's batch

RECORDED = msgspec.json.decode((Path(__file__).parent / "row_hash_vllm.json").read_bytes())
"""Outputs of vLLM's own functions (`source` names them) for random maps and routings. To record them again,
run the kernel's text from vLLM's file with TRITON_INTERPRET=1: the CPU build defines it only for GPUs.
"""


def slots_of(table: NDArray[Any], routed: NDArray[Any]) -> NDArray[np.int64]:
    """The slot of each pair [rows, k] of a layer's table [slots], by `row_copies`."""
    holders = [np.flatnonzero(table == expert) for expert in range(int(table.max()) + 1)]
    copies = np.array([len(slots) for slots in holders])[routed]
    chosen = row_copies(np.arange(len(routed))[:, None], copies)
    return np.array(
        [
            [holders[expert][nth] for expert, nth in zip(*both, strict=True)]
            for both in zip(routed, chosen, strict=True)
        ]
    )


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: f"{len(case['routed'])} rows")
def test_every_pair_goes_to_the_slot_that_vllms_kernel_chooses(case: dict[str, Any]) -> None:
    found = slots_of(np.array(case["table"]), np.array(case["routed"]))
    assert found.tolist() == case["slots"]
    assert np.bincount(found.ravel(), minlength=len(case["table"])).tolist() == case["load"]


def test_row_0_takes_the_first_copy_of_every_expert() -> None:
    assert (row_copies(np.zeros(9, np.int64), np.arange(1, 10)) == 0).all()
    assert row_shares(3, 1).tolist() == [1.0, 0.0, 0.0]


@given(copies=st.integers(1, 40), rows=st.lists(st.integers(1, 300), min_size=1, max_size=5))
def test_shares_are_those_of_rows_counted_one_by_one(copies: int, rows: list[int]) -> None:
    chosen = np.concatenate([row_copies(np.arange(step), copies) for step in rows])
    counted = np.bincount(chosen, minlength=copies) / len(chosen)
    assert np.allclose(row_shares(copies, np.array(rows)), counted)


@given(copies=st.integers(1, 64))
def test_copies_share_evenly_over_many_rows(copies: int) -> None:
    assert np.abs(row_shares(copies, MANY_ROWS) - 1.0 / copies).max() < 5e-3


def test_a_step_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row, not 0"):
        row_shares(2, 0)


@given(seed=st.integers(0, 1 << 16), rows=st.integers(1, 200))
def test_expected_loads_are_those_of_all_rows_taken_in_turn(seed: int, rows: int) -> None:
    """Independent oracle: every row of the step routes to every expert once."""
    random = np.random.default_rng(seed)
    table = random.permutation(np.concatenate([np.arange(5), random.integers(0, 5, 7)]))
    placement = Placement(table[None], experts=5, ranks=3, duplicates=True)
    demand = np.full((3, 1, 5), rows / 3)
    found = loads(as_dispatched(placement, ROW_HASH, rows), demand, np.zeros(3, np.intp))
    slots = slots_of(table, np.tile(np.arange(5), (rows, 1)))
    counted = np.bincount(slots.ravel() // 4, minlength=3)
    assert found[0] == pytest.approx(counted, abs=5 * rows * 7 / FULL)


def test_no_rank_keeps_its_own_tokens() -> None:
    placement = Placement(np.array([[0, 1, 0, 1]]), experts=2, ranks=2)
    assert loads(placement, np.array([[[8.0, 0.0]], [[0.0, 0.0]]]), np.zeros(2, np.intp)).tolist() == [
        [8.0, 0.0]
    ]
    hashed = as_dispatched(placement, ROW_HASH)
    assert loads(hashed, np.array([[[8.0, 0.0]], [[0.0, 0.0]]]), np.zeros(2, np.intp)) == pytest.approx(
        4, 1e-3
    )


def test_sharded_layers_stay_so_under_any_rule_and_no_slot_serves_their_experts() -> None:
    whole = linear(layers=3, experts=4, ranks=2, slots_per_rank=3)
    for sharded in ({1}, {0, 2}, {0, 1, 2}):
        placement = with_rows(whole, dict.fromkeys(sharded), epoch=1)
        hashed = as_dispatched(placement, ROW_HASH)
        assert hashed.sharded == placement.sharded
        assert (hashed.expert_of_slot == placement.expert_of_slot).all()
        chooser, node = Chooser(placement, (0, 1), np.zeros(2, np.intp)), np.zeros(2, np.intp)
        demand = np.ones((2, 3, 4))
        for layer in range(3):
            chosen = chooser.choose(layer, np.arange(8), 0)
            assert (chosen == -1).all() == (layer in sharded)
            assert loads(placement, demand, node)[layer].sum() == (0 if layer in sharded else 8)


def test_other_rules_leave_the_placement_as_it_is() -> None:
    placement = Placement(np.array([[0, 1, 0, 1]]), experts=2, ranks=2)
    assert as_dispatched(placement, SPLIT) is placement
