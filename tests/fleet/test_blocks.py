"""Block identity equals Dynamo's."""

import pytest
from dynamo._core import RadixTree, compute_block_hash_for_seq
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json

from fleet import blocks
from fleet.events import KvBlock, KvChange, KvEvent, KvStored

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@given(tokens, st.sampled_from([16, 64]))
def test_local_hashes_equal_those_of_dynamo(ids: list[int], size: int) -> None:
    theirs = [value % 2**64 for value in compute_block_hash_for_seq(ids, size)]
    assert blocks.local_hashes(ids, size) == theirs


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=30), st.integers(0, 29))
def test_a_chain_can_be_continued_from_any_prefix(local: list[int], cut: int) -> None:
    cut = min(cut, len(local) - 1)
    whole = blocks.sequence_hashes(local)
    head = blocks.sequence_hashes(local[:cut])
    assert head + blocks.sequence_hashes(local[cut:], head[-1] if head else None) == whole


def test_equal_blocks_behind_different_prefixes_are_different() -> None:
    assert blocks.sequence_hashes([1, 7])[1] != blocks.sequence_hashes([2, 7])[1]


def test_ids_beyond_32_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        blocks.local_hashes([2**32] * 16)


def test_dynamos_index_matches_our_local_hashes() -> None:
    ids = list(range(64))
    local = blocks.local_hashes(ids)
    stored = KvStored(blocks=tuple(KvBlock(s, h) for s, h in zip(blocks.sequence_hashes(local), local, strict=True)))
    tree = RadixTree()
    tree.apply_event(2**63 + 5, json.encode(KvEvent(event_id=1, data=KvChange(stored=stored))))
    assert tree.find_matches([*local[:3], 1]).scores == {(2**63 + 5, 0): 3}
