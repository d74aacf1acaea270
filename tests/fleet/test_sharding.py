"""Where parts of experts lie and what moves when layers turn over, against counting one by one."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.placement import EMPTY, Placement, linear, with_rows
from fleet.sharding import PartCopies, contents, group_of, groups, turn, turned


def row(experts: int, ranks: int, slots: int, random: np.random.Generator) -> np.ndarray:
    """Return a legal row: every expert somewhere, no rank with an expert twice, some slots empty."""
    order = random.permutation(experts)
    table = np.full((ranks, slots), EMPTY, np.int16)
    for rank, part in enumerate(np.array_split(order, ranks)):
        table[rank, : len(part)] = part
        spare = slots - len(part)
        others = np.setdiff1d(order, part)
        more = random.permutation(others)[: random.integers(0, min(spare, len(others)) + 1)]
        table[rank, len(part) : len(part) + len(more)] = more
        random.shuffle(table[rank])
    return table.ravel()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Placement, Placement]:
    """Return two placements of one engine, with any layers sharded in each."""
    layers, ranks, experts = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 13))
    slots = -(-experts // ranks) + draw(st.integers(0, 3))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))

    def one(epoch: int) -> Placement:
        rows = np.stack([row(experts, ranks, slots, random) for _ in range(layers)])
        sharded = draw(st.sets(st.integers(0, layers - 1)))
        whole = Placement(rows, experts=experts, ranks=ranks, epoch=epoch)
        return with_rows(whole, dict.fromkeys(sharded), epoch=epoch)

    return one(1), one(2)


def parts_held(placement: Placement, layer: int, rank: int) -> set[tuple[int, int]]:
    """Return the (expert, part) pairs in a rank's cells of a layer, from the definition of the forms."""
    if layer in placement.sharded:
        return {(expert, rank) for expert in range(placement.experts)}
    held = {int(expert) for expert in placement.on_rank(rank)[layer] if expert != EMPTY}
    return {(expert, part) for expert in held for part in range(placement.ranks)}


def each(copies: PartCopies) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in copies), strict=True))


@given(pairs())
def test_a_turn_brings_each_rank_the_parts_that_it_is_to_hold_from_ranks_that_hold_them(
    pair: tuple[Placement, Placement],
) -> None:
    before, after = pair
    copies = each(turn(before, after))
    changed = [
        layer
        for layer in range(before.layers)
        if before.ranks > 1 and (layer in before.sharded) != (layer in after.sharded)
    ]
    assert list(turned(before, after)) == changed
    for layer in range(before.layers):
        for rank in range(before.ranks):
            got = [(expert, part) for on, expert, part, _, to in copies if (on, to) == (layer, rank)]
            assert len(set(got)) == len(got)
            assert set(got) == (parts_held(after, layer, rank) if layer in changed else set())
    for layer, expert, part, source, _ in copies:
        assert (expert, part) in parts_held(before, layer, source)


@given(pairs())
def test_a_rank_never_reads_from_another_what_it_holds_itself(pair: tuple[Placement, Placement]) -> None:
    before, after = pair
    for layer, expert, part, source, to in each(turn(before, after)):
        assert (source == to) == ((expert, part) in parts_held(before, layer, to))


@given(pairs())
def test_the_ranks_own_parts_in_their_groups_are_all_parts_of_a_sharded_layer(
    pair: tuple[Placement, Placement],
) -> None:
    placement, _ = pair
    count = groups(placement.experts, placement.ranks)
    assert count <= placement.slots_per_rank
    for rank in range(placement.ranks):
        held = contents(placement, rank)
        for layer in range(placement.layers):
            if layer not in placement.sharded:
                np.testing.assert_array_equal(held[layer], placement.on_rank(rank)[layer])
            else:
                assert held[layer].tolist() == [*range(count)] + [EMPTY] * (held.shape[1] - count)
    places = [group_of(expert, placement.ranks) for expert in range(placement.experts)]
    assert len(set(places)) == len(places)
    assert all(group < count and position < placement.ranks for group, position in places)


def test_one_rank_turns_nothing_over_because_its_forms_coincide() -> None:
    before = linear(layers=2, experts=4, ranks=1)
    assert each(turn(before, with_rows(before, {0: None}, epoch=1))) == []


def test_replicas_share_the_reads_of_a_layer_that_becomes_sharded() -> None:
    table = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]])
    before = Placement(table, experts=8, ranks=4)
    copies = turn(before, with_rows(before, {0: None}, epoch=1))
    read = Counter(copies.source[~copies.is_local].tolist())
    assert read == {0: 4, 1: 4, 2: 4, 3: 4}


def test_placements_of_different_engines_have_no_turn() -> None:
    with pytest.raises(ValueError, match="not of one engine"):
        turn(linear(layers=1, experts=4, ranks=2), linear(layers=1, experts=4, ranks=4))
