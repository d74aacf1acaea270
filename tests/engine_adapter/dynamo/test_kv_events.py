"""KV events in the form of Dynamo's publisher."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.batching.kv_cache import Block, KvCache, identify
from engine_adapter.dynamo.kv_events import MAX_REMOVED, KvEventTranslator, signed
from fleet.blocks import local_hashes, salted_seed, sequence_hashes

PAGE = 4


class PublishedBlocks:
    """Reader of events, by the rules of an index: a block is under its parent or at the start of a prompt.
    Hashes come from the tokens, as Dynamo's publisher makes them."""

    def __init__(self) -> None:
        self.blocks: dict[int, int | None] = {}

    def apply(self, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] == "removed":
                assert event["block_hashes"], "an empty event"
                for name in event["block_hashes"]:
                    del self.blocks[name % 2**64]
                continue
            assert event["num_block_tokens"] == [PAGE] * len(event["block_hashes"])
            seed = salted_seed(event.get("cache_salt", ""))
            parent = None if event["parent_hash"] is None else event["parent_hash"] % 2**64
            assert parent is None or parent in self.blocks, "an orphan"
            own = sequence_hashes(local_hashes(event["token_ids"], PAGE, seed), parent)
            assert own == [name % 2**64 for name in event["block_hashes"]]
            for name in own:
                self.blocks[name] = parent
                parent = name


def serve(cache: KvCache, tokens: Sequence[int], salt: str = "") -> list[Block]:
    """Compute a prompt and finish its request."""
    blocks = identify(tokens, PAGE, salt)
    table = cache.open(blocks)
    assert cache.extend(table, cache.blocks_for(len(tokens)))
    cache.register(table, blocks, len(blocks))
    cache.close(table)
    return blocks


def cached(cache: KvCache) -> set[int]:
    return {entry.block.block_hash for entry in cache.registered}


_PROMPTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=PAGE, max_size=5 * PAGE),
        st.sampled_from(["", "tenant"]),
        st.booleans(),
    ),
    max_size=30,
)


@given(_PROMPTS)
def test_readers_end_up_with_the_engines_cache_however_late_events_are_translated(
    prompts: list[tuple[list[int], str, bool]],
) -> None:
    cache, reader = KvCache(6, PAGE), PublishedBlocks()
    events = KvEventTranslator(cache.block)
    for tokens, salt, now in prompts:
        serve(cache, tokens, salt)
        if now:
            reader.apply(events.events(cache.take_changes()))
    reader.apply(events.events(cache.take_changes()))
    assert set(reader.blocks) == cached(cache)
    assert len(events) == len(reader.blocks)


def test_a_cleared_cache_is_removals_of_all_that_was_published() -> None:
    cache, reader = KvCache(3000, PAGE), PublishedBlocks()
    events = KvEventTranslator(cache.block)
    serve(cache, list(range(PAGE * (MAX_REMOVED + 10))))
    reader.apply(events.events(cache.take_changes()))
    cache.clear()
    found = events.events(cache.take_changes())
    assert [len(event["block_hashes"]) for event in found] == [MAX_REMOVED, 10]
    reader.apply(found)
    assert not reader.blocks


def test_a_restated_cache_replaces_what_was_published() -> None:
    cache, reader = KvCache(8, PAGE), PublishedBlocks()
    events = KvEventTranslator(cache.block)
    serve(cache, list(range(3 * PAGE)))
    reader.apply(events.events(cache.take_changes()))
    reader.apply(events.events(cache.restated()))
    assert set(reader.blocks) == cached(cache)


def test_the_salt_of_a_block_is_named_with_it() -> None:
    cache = KvCache(8, PAGE)
    serve(cache, list(range(PAGE)), "tenant")
    serve(cache, list(range(PAGE)))
    events = KvEventTranslator(cache.block).events(cache.take_changes())
    assert [event.get("cache_salt") for event in events] == ["tenant", None]


@given(st.integers(0, 2**64 - 1))
def test_hashes_keep_their_bits(value: int) -> None:
    assert -(2**63) <= signed(value) < 2**63
    assert signed(value) % 2**64 == value
