"""The compiled order of blocks by last use is that of its Python form."""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import kernels
from router.prefix_index.approximate_index import RecentBlocksInPython

BLOCKS = st.integers(0, 2**64 - 1)


def _compiled(salt: int) -> kernels.RecentBlocks:
    library = kernels.compiled()
    assert library is not None, kernels.missing
    return library.RecentBlocks(salt)


@given(
    st.integers(0, 2**64 - 1),
    st.lists(
        st.one_of(
            st.tuples(st.lists(st.integers(0, 40) | BLOCKS, max_size=30), st.integers(0, 30)),
            st.integers(0, 40),
        ),
        max_size=40,
    ),
)
def test_both_forms_name_the_same_new_and_oldest_blocks(
    salt: int, steps: list[tuple[list[int], int] | int]
) -> None:
    found, expected = _compiled(salt), RecentBlocksInPython()
    for step in steps:
        if isinstance(step, int):
            assert found.evict(step) == expected.evict(step)
        else:
            blocks, most = step
            assert found.touch(array("Q", blocks), most) == expected.touch(array("Q", blocks), most)
        assert len(found) == len(expected)
    assert found.evict(10_000) == expected.evict(10_000)


@pytest.mark.parametrize("salt", [0, 1, 0x9E3779B97F4A7C15])
def test_as_many_blocks_as_a_rank_has_are_kept_in_order(salt: int) -> None:
    """Small numbers collide under a salt of 1, where the index has room for a few thousand places."""
    chance = random.Random(salt)
    found, expected = _compiled(salt), RecentBlocksInPython()
    for _ in range(3_000):
        start = chance.randrange(20_000)
        blocks = array("Q", [block << chance.choice([0, 40]) for block in range(start, start + 20)])
        assert found.touch(blocks, 20) == expected.touch(blocks, 20)
        if len(found) > 4_000:
            assert found.evict(256) == expected.evict(256)
    assert found.evict(len(found)) == expected.evict(len(expected))
    assert len(found) == 0


def test_half_a_block_and_fewer_than_none_are_refused() -> None:
    found = _compiled(7)
    with pytest.raises(ValueError, match="8 bytes"):
        found.touch(array("I", [1, 2, 3]), 3)
    with pytest.raises(ValueError, match="fewer than none"):
        found.touch(array("Q", [1]), -1)
    with pytest.raises(TypeError):
        found.touch([1, 2], 2)  # type: ignore[arg-type]
    assert found.evict(-1) == []
    assert len(found) == 0
