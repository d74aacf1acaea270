"""Which layouts are legal for a model and a number of ranks."""

import msgspec
import pytest

from fleet.experts import ModelShape
from fleet.layout import sharding_refusal, tp_refusal


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
