"""Plain data of a switch: head groups, and the wire form."""

import msgspec
import pytest

from engine_adapter.batching.kv_cache import identify
from engine_adapter.kv_switch.kv_state import KvPage, KvState, OpenSequence, group_of_rank
from fleet.layout import head_groups


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "groups"), [(1, 4, [0]), (2, 4, [0, 1]), (4, 2, [0, 0, 1, 1]), (4, 1, [0, 0, 0, 0])]
)
def test_every_rank_computes_one_head_group(ranks: int, kv_heads: int, groups: list[int]) -> None:
    count = head_groups(ranks, kv_heads)
    assert [group_of_rank(rank, ranks, count) for rank in range(ranks)] == groups


def test_a_state_survives_the_wire() -> None:
    first, second = identify(range(32), 16, "tenant")
    pages = [
        KvPage((3, 1), first, None),
        KvPage((0, 2), second, first.block_hash),
        KvPage((4, 5), None, None),
    ]
    sequence = OpenSequence(
        rank=1,
        number=7,
        arrived=5,
        request=b"\x00\xff",
        tokens=list(range(40)),
        max_new=3,
        computed=33,
        generated=1,
        cached_tokens=16,
        admissions=1,
        salt="tenant",
        registered=2,
        collided=False,
        pages=[0, 1, 2],
    )
    state = KvState(pages, [], [sequence], [], [[6, 7]])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=KvState) == state
