"""The page pool: sharing, eviction order, events, books that always agree."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_adapter.batching.kv_cache import Block, BlockTable, KvCache, identify
from fleet.facts.dynamo_kv import KvBlock
from tests.engine_adapter.kv_event_mirror import KvEventMirror

SIZE = 4


def blocks_of(text: str, salt: str = "") -> list[Block]:
    """Blocks of `SIZE` tokens, one per letter."""
    return identify([ord(letter) for letter in text for _ in range(SIZE)], SIZE, salt)


def compute(cache: KvCache, text: str, salt: str = "") -> BlockTable:
    """Open a sequence of these blocks, give it pages and register all of them."""
    return compute_blocks(cache, blocks_of(text, salt))


def compute_blocks(cache: KvCache, blocks: Sequence[Block]) -> BlockTable:
    table = cache.open(blocks)
    assert cache.extend(table, len(blocks))
    cache.register(table, blocks, len(blocks))
    return table


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
    reader = KvEventMirror()
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
    assert change.stored.blocks == tuple(block.identity for block in expected[2:])


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


def named(block: Block, like: Block) -> Block:
    """The block under the hash of another one: what finding a collision would give an attacker."""
    return Block(like.identity, block.tokens, block.salt)


def test_a_collision_of_hashes_shares_no_page() -> None:
    cache = KvCache(8, SIZE)
    theirs = blocks_of("abc")
    compute(cache, "abc")
    forged = [theirs[0], named(blocks_of("ax")[1], theirs[1]), theirs[2]]
    assert cache.open(forged).pages == cache.open(theirs[:1]).pages
    assert cache.fits(forged, 7, spare=0) is False, "two pages of the three are its own"


def test_a_block_behind_another_parent_is_not_shared_though_tokens_and_hash_are_equal() -> None:
    cache = KvCache(8, SIZE)
    compute(cache, "ab")
    cache.close(compute(cache, "x"))
    forged = [blocks_of("x")[0], named(blocks_of("xb")[1], blocks_of("ab")[1])]
    assert len(cache.open(forged).pages) == 1


def test_who_computes_a_collision_keeps_it_and_what_follows_to_himself() -> None:
    cache = KvCache(12, SIZE)
    first = compute(cache, "abc")
    own = blocks_of("axyz")
    forged = [own[0], named(own[1], blocks_of("ab")[1]), *own[2:]]
    cache.take_changes()
    second = compute_blocks(cache, forged)
    assert cache.take_changes() == []
    assert second.pages[0] == first.pages[0]
    assert not set(second.pages[1:]) & set(first.pages)
    cache.check_integrity([first, second])
    cache.close(second)
    assert cache.used == 3, "what is not registered is free again"
    assert cache.open(blocks_of("abc")).pages == first.pages


def test_equal_prompts_of_two_salts_share_nothing() -> None:
    cache = KvCache(8, SIZE)
    ours = compute(cache, "ab", "ours")
    assert cache.open(blocks_of("ab", "theirs")).pages == []
    assert cache.open(blocks_of("ab")).pages == []
    assert cache.open(blocks_of("ab", "ours")).pages == ours.pages


def test_a_collision_of_two_salts_shares_nothing() -> None:
    cache = KvCache(8, SIZE)
    ours = compute(cache, "ab", "ours")
    forged = [
        named(theirs, own)
        for theirs, own in zip(blocks_of("ab", "theirs"), blocks_of("ab", "ours"), strict=True)
    ]
    assert cache.open(forged).pages == []
    assert not set(compute_blocks(cache, forged).pages) & set(ours.pages)


def rebuilt(cache: KvCache, tables: Sequence[BlockTable]) -> tuple[KvCache, list[BlockTable]]:
    """A cache with the same pages, built from what the first one tells. Pins end with the first one."""
    copies = [BlockTable(list(table.pages), table.registered, table.collided) for table in tables]
    built = KvCache.of(
        cache.pages, cache.registered, cache.kept, copies, cache.block_size, reserved=cache.reserved
    )
    return built, copies


def test_a_cache_that_is_built_from_another_serves_and_evicts_as_it_would() -> None:
    cache = KvCache(5, SIZE)
    cache.close(compute(cache, "ab"))
    cache.close(compute(cache, "cd"))
    held = compute(cache, "cx")
    other, tables = rebuilt(cache, [held])
    other.check_integrity(tables)
    assert (other.used, other.held, other.free) == (cache.used, cache.held, cache.free)
    assert other.take_changes() == cache.restated()
    assert other.open(blocks_of("ab")).pages == cache.open(blocks_of("ab")).pages
    assert other.extend(tables[0], 3)
    (change,) = other.take_changes()
    assert change != "cleared"
    assert change.removed is not None
    assert change.removed.block_hashes == (blocks_of("cd")[1].block_hash,)


def test_blocks_that_are_known_are_not_identified_again() -> None:
    blocks = blocks_of("abcd", "salt")
    tokens = [ord(letter) for letter in "abcd" for _ in range(SIZE)] + [0]
    assert identify(tokens, SIZE, "salt", known=blocks[:2]) == blocks


def test_a_pinned_page_is_not_reused_before_all_its_readers_are_done() -> None:
    cache = KvCache(3, SIZE)
    cache.close(compute(cache, "ab"))
    (pinned, other) = (entry.page for entry in cache.registered)
    cache.pin(pinned)
    cache.pin(pinned)
    assert cache.obtainable == 2
    table = cache.open([])
    assert not cache.extend(table, 3)
    assert cache.extend(table, 2)
    assert pinned not in table.pages
    assert other in table.pages
    cache.check_integrity([table])
    cache.unpin(pinned)
    assert not cache.extend(table, 3)
    cache.unpin(pinned)
    assert cache.extend(table, 3)
    cache.check_integrity([table])


def test_a_pinned_page_that_is_evicted_is_withheld_and_its_block_unregistered() -> None:
    cache = KvCache(2, SIZE)
    cache.close(compute(cache, "a"))
    (entry,) = cache.registered
    cache.pin(entry.page)
    cache.clear()
    assert cache.withheld == (entry.page,)
    assert cache.registered_at(entry.page) is None
    assert not cache.has(entry.block.block_hash)
    cache.check_integrity([])
    cache.unpin(entry.page)
    assert (cache.withheld, len(cache.free)) == ((), 2)


def test_a_reserved_page_is_neither_used_nor_obtainable() -> None:
    cache = KvCache(2, SIZE)
    cache.close(compute(cache, "a"))
    page = cache.reserve()
    assert page is not None
    assert cache.reserve() is None, "the other page is kept"
    assert (cache.used, cache.held, cache.obtainable, cache.reserved) == (1, 0, 1, (page,))
    assert cache.reserve(evict=True) is not None
    assert (cache.used, cache.obtainable) == (0, 0)
    cache.unreserve(page)
    assert cache.free == (page,)


class Pool(RuleBasedStateMachine):
    """Any order of opening, growing, registering, closing and clearing keeps books and readers right."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCache(7, SIZE)
        self.tables: list[tuple[BlockTable, list[Block]]] = []
        self.reader = KvEventMirror()
        self.pinned: list[int] = []

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

    @rule(evict=st.booleans())
    def reserve(self, evict: bool) -> None:
        self.cache.reserve(evict=evict)

    @precondition(lambda self: self.cache.reserved)
    @rule()
    def unreserve(self) -> None:
        self.cache.unreserve(self.cache.reserved[0])

    @precondition(lambda self: self.cache.registered)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.pinned.append(data.draw(st.sampled_from(self.cache.registered)).page)
        self.cache.pin(self.pinned[-1])

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.cache.unpin(self.pinned.pop(0))

    @rule()
    def rebuild(self) -> None:
        self.pinned.clear()
        self.cache, tables = rebuilt(self.cache, [table for table, _ in self.tables])
        self.tables = [(table, blocks) for table, (_, blocks) in zip(tables, self.tables, strict=True)]

    @invariant()
    def books_agree(self) -> None:
        self.cache.check_integrity(table for table, _ in self.tables)
        self.reader.apply(self.cache.take_changes())
        late = KvEventMirror()
        late.apply(self.cache.restated())
        assert late.parents == self.reader.parents
        for table, blocks in self.tables:
            registered = blocks[: table.registered]
            assert all(block.block_hash in self.reader.parents for block in registered)


class Collisions(Pool):
    """The same where almost every hash names several blocks: whatever shares a page has the same tokens and
    salt up to there."""

    @rule(text=st.text("ab", min_size=1, max_size=5), salt=st.sampled_from(["", "s"]))
    def open(self, text: str, salt: str = "") -> None:
        blocks = [
            Block(KvBlock(block.block_hash % 5, block.identity.tokens_hash), block.tokens, salt)
            for block in blocks_of(text, salt)
        ]
        table = self.cache.open(blocks)
        if self.cache.extend(table, len(blocks)):
            self.tables.append((table, blocks))
        else:
            self.cache.close(table)

    @invariant()
    def only_equal_prefixes_share(self) -> None:
        prefixes: dict[int, list[tuple[bytes, str]]] = {}
        for table, blocks in self.tables:
            for at, page in enumerate(table.pages):
                prefix = [(block.tokens, block.salt) for block in blocks[: at + 1]]
                assert prefixes.setdefault(page, prefix) == prefix


TestCollisions = Collisions.TestCase
TestCollisions.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyHistory = Pool.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
