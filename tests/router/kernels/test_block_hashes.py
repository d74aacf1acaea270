"""The compiled hashes of blocks are those of the xxhash package, of `fleet.blocks`, and of Dynamo."""

from array import array

import numpy as np
import pytest
import xxhash
from dynamo._core import compute_block_hash_for_seq
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.blocks import SEED, local_hashes, salted_seed, sequence_hashes, words
from router import kernels
from router.prefix_index.block_index import BlockIndex
from router.prefix_index.prompt import TextPrompt, TokenPrompt

_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1


def _library() -> kernels.DecisionKernels:
    library = kernels.compiled()
    assert library is not None, kernels.missing
    return library


def _hash(raw: bytes, seed: int) -> int:
    """The hash of one block of these bytes."""
    return int.from_bytes(_library().chain(raw, len(raw) // 4, seed, array("Q"), 1), "little")


@pytest.mark.parametrize("seed", [0, SEED, salted_seed("a tenant"), _U64])
def test_every_length_of_block_has_the_hash_of_the_xxhash_package(seed: int) -> None:
    raw = bytes((7 * at + (at >> 8)) % 251 for at in range(3_300))
    for length in range(4, len(raw), 4):
        assert _hash(raw[:length], seed) == xxhash.xxh3_64_intdigest(raw[:length], seed)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, _U32), max_size=300),
    st.sampled_from([1, 2, 3, 4, 8, 16, 31, 64, 70]),
    st.integers(0, _U64),
    st.lists(st.integers(1, 60), max_size=6),
)
def test_a_chain_is_the_same_in_both_forms_however_it_is_reached(
    ids: list[int], size: int, seed: int, steps: list[int]
) -> None:
    expected = sequence_hashes(local_hashes(ids, size, seed))
    with kernels.python_form():
        assert TokenPrompt(ids, seed).chained(size)[:] == expected
    chain, others = TokenPrompt(ids, seed).chained(size), TokenPrompt(tuple(ids), seed).chained(size)
    for step in steps:
        depth = min(step, len(chain))
        assert list(chain.reach(depth)[:depth]) == expected[:depth] == list(others.reach(depth)[:depth])
    assert chain[:] == others[:] == expected


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=2_000), st.sampled_from([1, 4, 16, 64]), st.integers(0, _U64))
def test_a_text_is_hashed_the_same_in_both_forms(text: bytes, size: int, seed: int) -> None:
    with kernels.python_form():
        expected = TextPrompt(text, "m", seed).chained(size)[:]
    assert TextPrompt(text, "m", seed).chained(size)[:] == expected


@pytest.mark.parametrize("size", [1, 16, 64, 512])
def test_hashes_are_those_of_dynamo(size: int) -> None:
    ids = [(at * 2_654_435_761) % 100_003 for at in range(4 * size)]
    local = [_hash(words(ids[at * size : (at + 1) * size]), SEED) for at in range(4)]
    assert local == [value % 2**64 for value in compute_block_hash_for_seq(ids, size)]
    assert TokenPrompt(ids).chained(size)[:] == sequence_hashes(local)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_leading_blocks_are_the_same_in_both_forms(data: st.DataObject) -> None:
    """Ranks hold beginnings of prompts that branch; some lose blocks, some are cleared and swept."""
    ids, index = list(range(400)), BlockIndex()
    with kernels.python_form():
        python = BlockIndex()
    for rank in range(data.draw(st.integers(0, 90), label="ranks")):
        tokens = data.draw(st.integers(0, 400), label="held")
        chained = TokenPrompt(ids[:tokens] + [7] * (tokens % 3)).chained(2)[:]
        fate = data.draw(st.sampled_from(["lost", "cleared", *8 * ["kept"]]), label="fate")
        lost = data.draw(st.sampled_from(chained), label="lost") if chained and fate == "lost" else None
        for one in (index, python):
            one.store((1, rank), None, chained)
            if lost is not None:
                assert one.discard((1, rank), [lost, 5]) == 1
            elif fate == "cleared":
                one.clear((1, rank))
    swept = data.draw(st.integers(0, 40), label="swept")
    for one in (index, python):
        one.sweep(swept)  # which blocks it reaches first is free
    assert index.entries == python.entries
    asked = ids[: data.draw(st.integers(0, 400), label="asked")] + data.draw(
        st.lists(st.integers(0, 9), max_size=9), label="new"
    )
    with kernels.python_form():
        expected = python.overlaps(TokenPrompt(asked).chained(2))
        assert index.overlaps(TokenPrompt(asked).chained(2)) == expected
    found = TokenPrompt(asked).chained(2)
    found.reach(data.draw(st.integers(0, len(found)), label="known before"))
    assert index.overlaps(found) == expected
    assert python.overlaps(found) == expected
    assert found[:] == sequence_hashes(local_hashes(asked, 2))


def test_ids_outside_u32_and_blocks_beyond_the_end_are_refused() -> None:
    chain, nothing = _library().chain, array("Q")
    for ids in ([1, 1 << 32], [1, -1], [1, 1 << 70]):
        with pytest.raises(OverflowError):
            chain(ids, 2, SEED, nothing, 1)
    with pytest.raises(TypeError):
        chain([1, 2.0], 2, SEED, nothing, 1)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        chain((1, 2), 2, SEED, nothing, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block 2 of a prompt of 1"):
        chain([1, 2, 3], 2, SEED, nothing, 2)
    with pytest.raises(ValueError, match="blocks of 0 tokens"):
        chain([1, 2, 3], 0, SEED, nothing, 1)
    with pytest.raises(ValueError, match="16 bytes of hashes of 1 blocks"):
        chain([1, 2, 3], 2, SEED, array("Q", [1, 2]), 1)


def test_a_walk_without_masks_or_slots_is_refused() -> None:
    library, nothing, slots = _library(), array("Q"), np.zeros(1, np.intp)
    depths, masks, none = np.zeros(1, np.int64), library.BlockMasks(1), library.BlockMasks(1)
    with pytest.raises(TypeError, match="masks are BlockMasks"):
        library.walk([1, 2], 1, SEED, nothing, masks, {}, 1, 0, 32, 1, 1, slots, depths)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 numbers in an array, expected 2"):
        library.walk([1, 2], 1, SEED, nothing, masks, none, 1, 0, 32, 2, 2, slots, depths)
    for slot in (-1, 1):
        with pytest.raises(ValueError, match="no such slot"):
            library.walk([1, 2], 1, SEED, nothing, masks, none, 1, 0, 32, 1, 1, slots + slot, depths)
    masks.grant(TokenPrompt([1, 2]).chained(1)[:], 256, none, 256, {})
    with pytest.raises(OverflowError):  # a rank without a slot
        library.walk([1, 2], 1, SEED, nothing, masks, none, 256, 0, 32, 1, 1, slots, depths)


def test_the_python_form_serves_while_it_is_asked_for() -> None:
    with kernels.python_form():
        assert kernels.compiled() is None
    assert kernels.compiled() is not None, kernels.missing
