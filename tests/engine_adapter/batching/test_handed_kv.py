"""Blocks that another engine computed, taken over by a cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.batching.handed_kv import take_over
from engine_adapter.batching.kv_cache import KvCache, identify

SIZE = 4


def prompt(blocks: int, first: int = 0) -> list[int]:
    return [first + at for at in range(blocks * SIZE)]


def cache_with(pages: int, blocks: int) -> KvCache:
    """A cache that keeps the first blocks of the prompt."""
    cache = KvCache(pages, SIZE)
    table = cache.open([])
    assert cache.extend(table, blocks)
    cache.register(table, identify(prompt(blocks), SIZE), blocks)
    cache.close(table)
    cache.take_changes()
    return cache


@given(
    pages=st.integers(1, 12),
    known=st.integers(0, 6),
    count=st.integers(0, 10),
    good=st.integers(0, 12),
    held=st.integers(0, 6),
)
def test_as_many_blocks_as_fit_and_are_good_are_registered_and_nothing_is_held(
    pages: int, known: int, count: int, good: int, held: int
) -> None:
    known = min(known, pages)
    cache, blocks = cache_with(pages, known), identify(prompt(count), SIZE)
    running = cache.open([])
    held = held if cache.extend(running, min(held, pages)) else 0
    there = sum(cache.has(one.block_hash) for one in blocks)
    obtainable = cache.obtainable
    filled: list[int] = []

    def fill(block: int, page: int) -> bool:
        filled.append(block)
        return block < good

    copied = take_over(cache, blocks, fill)
    assert there + copied == sum(cache.has(one.block_hash) for one in blocks)
    assert filled == list(range(there, there + len(filled)))
    assert copied == sum(block < good for block in filled)
    assert copied <= obtainable
    cache.check_integrity([running])
    assert cache.held == len(running.pages)
    cache.close(running)
    assert not cache.held


def test_what_was_taken_over_is_announced_and_shared() -> None:
    cache, blocks = KvCache(8, SIZE), identify(prompt(3), SIZE)
    assert take_over(cache, blocks, lambda block, page: True) == 3
    (change,) = cache.take_changes()
    assert change != "cleared"
    assert change.stored is not None
    assert [one.block_hash for one in change.stored.blocks] == [one.block_hash for one in blocks]
    assert len(cache.open(blocks).pages) == 3


def test_an_error_while_copying_leaves_nothing_behind() -> None:
    cache, blocks = KvCache(8, SIZE), identify(prompt(3), SIZE)

    def fill(block: int, page: int) -> bool:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        take_over(cache, blocks, fill)
    assert (cache.held, len(cache.free)) == (0, 8)
