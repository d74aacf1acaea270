"""The page pool: sharing, eviction order, events, books that always agree."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_adapter.rank.kv_cache import BlockTable, Change, KvCache
from engine_adapter.rank.scheduler import identify
from fleet.events import KvBlock

SIZE = 4


def blocks_of(text: str) -> list[KvBlock]:
    """Blocks of `SIZE` tokens, one per letter."""
    return identify([ord(letter) for letter in text for _ in range(SIZE)], SIZE)


def compute(cache: KvCache, text: str) -> BlockTable:
    """Open a sequence of these blocks, give it pages and register all of them."""
    blocks = blocks_of(text)
    table = cache.open(blocks)
    assert cache.extend(table, len(blocks))
    cache.register(table, blocks, len(blocks))
    return table


class Reader:
    """What a router's index knows from the events alone; refuses a block whose parent it does not know."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}

    def apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change == "cleared":
                self.parents.clear()
                continue
            if change.stored is not None:
                parent = change.stored.parent_hash
                for block in change.stored.blocks:
                    assert parent is None or parent in self.parents, "a child was announced before its parent"
                    assert block.block_hash not in self.parents, "a block was announced twice"
                    self.parents[block.block_hash] = parent
                    parent = block.block_hash
            if change.removed is not None:
                for block_hash in change.removed.block_hashes:
                    del self.parents[block_hash]
                    assert block_hash not in self.parents.values(), "a parent was removed before its child"


def test_a_prefix_that_was_computed_is_shared_and_the_rest_is_not() -> None:
    cache = KvCache(8, SIZE)
    first = compute(cache, "abc")
    second = cache.open(blocks_of("abd"))
    assert second.pages == first.pages[:2]
    assert cache.open(blocks_of("bcd")).pages == []


def test_blocks_stay_for_reuse_after_their_sequence_is_gone() -> None:
    cache = KvCache(8, SIZE)
    table = compute(cache, "abc")
    pages = list(table.pages)
    cache.close(table)
    assert (cache.held, cache.used) == (0, 3)
    assert cache.open(blocks_of("abc")).pages == pages


def test_the_least_recently_used_tail_is_evicted_first() -> None:
    cache = KvCache(4, SIZE)
    cache.close(compute(cache, "ab"))
    cache.close(compute(cache, "cd"))
    cache.close(cache.open(blocks_of("ab")))
    cache.take_changes()
    assert cache.extend(cache.open([]), 1)
    (change,) = cache.take_changes()
    assert change != "cleared"
    assert change.removed is not None
    assert change.removed.block_hashes == (blocks_of("cd")[1].block_hash,)


def test_blocks_computed_twice_at_once_end_up_in_one_page_and_are_announced_once() -> None:
    cache = KvCache(8, SIZE)
    blocks = blocks_of("abc")
    tables = [cache.open(blocks), cache.open(blocks)]
    for table in tables:
        assert cache.extend(table, 3)
        cache.register(table, blocks, 3)
    assert tables[0].pages == tables[1].pages
    assert cache.held == 3
    reader = Reader()
    reader.apply(cache.take_changes())
    assert len(reader.parents) == 3
    cache.check_integrity(tables)


def test_a_run_of_blocks_is_one_event_behind_its_parent() -> None:
    cache = KvCache(8, SIZE)
    compute(cache, "ab")
    cache.take_changes()
    compute(cache, "abcd")
    (change,) = cache.take_changes()
    assert change != "cleared"
    assert change.stored is not None
    expected = blocks_of("abcd")
    assert change.stored.parent_hash == expected[1].block_hash
    assert change.stored.blocks == tuple(expected[2:])


def test_a_table_that_cannot_grow_is_left_alone() -> None:
    cache = KvCache(3, SIZE)
    held = compute(cache, "ab")
    other = cache.open([])
    assert not cache.extend(other, 2)
    assert other.pages == []
    assert cache.extend(other, 1)
    cache.check_integrity([held, other])


def test_fits_counts_kept_pages_it_would_share_only_once() -> None:
    cache = KvCache(4, SIZE)
    cache.close(compute(cache, "abc"))
    assert cache.fits(blocks_of("abc"), 4)
    assert not cache.fits(blocks_of("abc"), 4, spare=1)
    assert cache.fits(blocks_of("xyz"), 4)


def test_clearing_is_announced_and_refused_while_pages_are_held() -> None:
    cache = KvCache(4, SIZE)
    table = compute(cache, "ab")
    with pytest.raises(ValueError, match="2 pages are held"):
        cache.clear()
    cache.close(table)
    cache.clear()
    assert cache.take_changes()[-1] == "cleared"
    assert cache.used == 0
    assert cache.open(blocks_of("ab")).pages == []


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="0 pages"):
        KvCache(0)


class Pool(RuleBasedStateMachine):
    """Any order of opening, growing, registering, closing and clearing keeps books and readers right."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCache(7, SIZE)
        self.tables: list[tuple[BlockTable, list[KvBlock]]] = []
        self.reader = Reader()

    @rule(text=st.text("ab", min_size=1, max_size=5))
    def open(self, text: str) -> None:
        blocks = blocks_of(text)
        table = self.cache.open(blocks)
        if self.cache.extend(table, len(blocks)):
            self.tables.append((table, blocks))
        else:
            self.cache.close(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        table, blocks = data.draw(st.sampled_from(self.tables))
        self.cache.register(table, blocks, data.draw(st.integers(0, len(blocks))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.cache.close(table)

    @precondition(lambda self: not self.tables)
    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def books_agree(self) -> None:
        self.cache.check_integrity(table for table, _ in self.tables)
        self.reader.apply(self.cache.take_changes())
        late = Reader()
        late.apply(self.cache.restated())
        assert late.parents == self.reader.parents
        for table, blocks in self.tables:
            registered = blocks[: table.registered]
            assert all(block.block_hash in self.reader.parents for block in registered)


TestAnyHistory = Pool.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
