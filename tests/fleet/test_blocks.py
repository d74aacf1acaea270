"""Block identity equals Dynamo's."""

import pytest
from dynamo._core import RadixTree, compute_block_hash_for_seq
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json

from fleet import blocks
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvEvent, KvStored

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@given(tokens, st.sampled_from([16, 64]))
def test_local_hashes_equal_those_of_dynamo(ids: list[int], size: int) -> None:
    theirs = [value % 2**64 for value in compute_block_hash_for_seq(ids, size)]
    assert blocks.local_hashes(ids, size) == theirs


names = st.text(max_size=40)


@given(tokens, st.sampled_from([1, 16, 64]), names, names)
def test_salted_local_hashes_equal_those_of_dynamo(
    ids: list[int], size: int, adapter: str, namespace: str
) -> None:
    theirs = [
        value % 2**64
        for value in compute_block_hash_for_seq(ids, size, lora_name=adapter, cache_namespace=namespace)
    ]
    assert blocks.local_hashes(ids, size, blocks.salted_seed(namespace, adapter)) == theirs


def test_no_salt_leaves_the_hashes_as_they_are() -> None:
    assert blocks.salted_seed() == blocks.salted_seed("", "") == blocks.SEED


@given(names, names, names, names)
def test_an_adapter_is_never_taken_for_a_namespace(one: str, other: str, third: str, fourth: str) -> None:
    if (one, other) != (third, fourth):
        assert blocks.salted_seed(one, other) != blocks.salted_seed(third, fourth)


@given(tokens, st.sampled_from([1, 16]), names)
def test_a_chain_of_bytes_is_the_chain_of_salted_local_hashes(ids: list[int], size: int, salt: str) -> None:
    seed = blocks.salted_seed(salt)
    chained: list[int] = []
    blocks.extend(chained, blocks.words(ids[: len(ids) // size * size]), 4 * size, seed)
    assert chained == blocks.sequence_hashes(blocks.local_hashes(ids, size, seed))


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
    stored = KvStored(
        blocks=tuple(KvBlock(s, h) for s, h in zip(blocks.sequence_hashes(local), local, strict=True))
    )
    tree = RadixTree()
    tree.apply_event(2**63 + 5, json.encode(KvEvent(event_id=1, data=KvChange(stored=stored))))
    assert tree.find_matches([*local[:3], 1]).scores == {(2**63 + 5, 0): 3}
