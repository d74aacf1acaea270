"""Which layouts are legal for a model and a number of ranks."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.experts import ModelShape
from fleet.layout import head_groups, kv_units_read, sharding_refusal, tp_refusal


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({}, 2, ""),
        ({}, 4, ""),
        ({"expert_intermediate": 96}, 5, "96 do not divide into parts for 5 ranks"),
        ({"scale_block": 128}, 4, "a part of 64 of the 256 intermediate rows"),
        ({"scale_block": 64}, 4, ""),
        ({"hidden": 3, "expert_intermediate": 8}, 2, "48 bytes, which is not a multiple of 64"),
        ({"hidden": 3, "expert_intermediate": 8}, 1, ""),
    ],
)
def test_experts_are_cut_only_where_rows_blocks_and_alignment_allow(
    changes: dict[str, int], ranks: int, reason: str
) -> None:
    shape = ModelShape(layers=2, experts=8, top_k=2, hidden=64, expert_intermediate=256)
    found = sharding_refusal(msgspec.structs.replace(shape, **changes), ranks)
    assert reason in found if reason else not found


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "reason"),
    [
        (64, 4, 8, ""),
        (64, 4, 2, ""),
        (64, 0, 8, ""),
        (0, 0, 8, ""),
        (36, 4, 8, "36 attention heads"),
        (24, 6, 4, "6 KV heads"),
    ],
)
def test_attention_is_split_only_where_heads_divide(
    heads: int, kv_heads: int, ranks: int, reason: str
) -> None:
    shape = ModelShape(
        layers=2, experts=8, top_k=2, hidden=64, expert_intermediate=256, heads=heads, kv_heads=kv_heads
    )
    found = tp_refusal(shape, ranks)
    assert reason in found if reason else not found


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "groups"),
    [(8, 4, 4), (8, 8, 8), (4, 8, 4), (1, 4, 1), (2, 4, 2), (6, 4, 1), (0, 4, 1), (4, 1, 1)],
)
def test_kv_heads_are_divided_into_as_many_groups_as_can_be(kv_heads: int, ranks: int, groups: int) -> None:
    assert head_groups(ranks, kv_heads) == groups


@given(
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 4), (8, 8)]),
    st.lists(st.integers(0, 9), min_size=8, max_size=8),
    st.booleans(),
)
def test_ranks_read_the_units_that_they_need_and_do_not_hold(
    width: tuple[int, int], used: list[int], to_tp: bool
) -> None:
    ranks, groups = width
    group_of_rank = [rank * groups // ranks for rank in range(ranks)]
    pages = used[:ranks] if to_tp else [sum(used)]
    read = [0] * ranks
    for number in range(sum(pages)):
        if to_tp:
            owner = int(np.searchsorted(np.cumsum(pages), number, side="right"))
            held = {(owner, group) for group in range(groups)}
            needed = set(enumerate(group_of_rank))
        else:
            held = set(enumerate(group_of_rank))
            needed = {(number % ranks, group) for group in range(groups)}
        for rank, _ in needed - held:
            read[rank] += 1
    assert kv_units_read(pages, "tp" if to_tp else "dp", ranks, groups).tolist() == read


@pytest.mark.parametrize(
    ("kv_heads", "page", "to_tp", "to_dp"),
    [(4, 188, 329, 141), (4, 96, 168, 72), (8, 72, 63, 63), (8, 224, 196, 196)],
)
def test_models_move_as_much_as_can_be_counted_by_hand(
    kv_heads: int, page: int, to_tp: int, to_dp: int
) -> None:
    """KiB per token of models on 8 ranks: all that is held becomes a page here."""
    groups = head_groups(8, kv_heads)
    pages = [groups] * 8
    for moved, found in (
        (to_tp, kv_units_read(pages, "tp", 8, groups)),
        (to_dp, kv_units_read([sum(pages)], "dp", 8, groups)),
    ):
        assert found.sum() * page / groups / sum(pages) == moved
