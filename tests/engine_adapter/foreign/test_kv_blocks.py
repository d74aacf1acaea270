"""KV events of vLLM in our hashes: against recorded caches, and against a model of the cache."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.foreign.kv_blocks import Change, KvBlocks
from engine_adapter.foreign.kv_frames import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    UnreadableEvents,
    events_of,
)
from fleet.blocks import local_hashes, salted_seed, sequence_hashes
from tests.engine_adapter.vllm.recorded_server import FRAMES, RECORDING, frames_after

SIZE = 4


def chained(tokens: list[int], size: int = SIZE, salt: str = "", adapter: str = "") -> list[int]:
    """Our hashes of the blocks of a prompt."""
    return sequence_hashes(local_hashes(tokens, size, salted_seed(salt, adapter)))


class Mirror:
    """What a reader of the changes believes to be cached. Fails when a change contradicts it."""

    def __init__(self) -> None:
        self.blocks: dict[int, int | None] = {}

    def apply(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, str):
                self.blocks.clear()
            elif change.stored is not None:
                parent = change.stored.parent_hash
                assert parent is None or parent in self.blocks
                for block in change.stored.blocks:
                    assert block.block_hash not in self.blocks
                    self.blocks[block.block_hash] = parent
                    parent = block.block_hash
            elif change.removed is not None:
                for gone in change.removed.block_hashes:
                    del self.blocks[gone]

    def overlap(self, hashes: list[int]) -> int:
        """Leading blocks that are cached."""
        return next((at for at, one in enumerate(hashes) if one not in self.blocks), len(hashes))


def stored(tokens: list[int], **about: Any) -> BlocksStored:
    """An event for all blocks of a prompt, which are named by their content."""
    count = len(tokens) // SIZE
    names = tuple(hash((tuple(tokens[: SIZE * (at + 1)]), str(about))) for at in range(count))
    return BlocksStored(names, None, tuple(tokens[: count * SIZE]), SIZE, **about)


# Recorded


@pytest.mark.parametrize("rank", [0, 1])
def test_the_overlap_is_what_vllm_itself_found_in_its_cache(rank: int) -> None:
    """For every request of the recording that ran alone: our hashes of its prompt, found in the cache as it was told
    before, against `cached_tokens` of vLLM's answer."""
    blocks, mirror, compared = KvBlocks(32, 24), Mirror(), 0
    for number, step in enumerate(RECORDING["steps"]):
        for request in step["requests"][:1] if step["what"] != "under load" else []:
            if request["rank"] == rank:
                hashes = chained(request["prompt"], 32, request["salt"])
                usable = (len(request["prompt"]) - 1) // 32  # vLLM computes the last token anew
                assert 32 * min(mirror.overlap(hashes), usable) == request["cached"], step["what"]
                compared += 1
        first, last = frames_after(number - 1)[rank], frames_after(number)[rank]
        for payload in FRAMES[rank][first:last]:
            for event in events_of(payload):
                mirror.apply(blocks.apply(event))
    assert compared >= 10
    assert blocks.counts.orphans == blocks.counts.foreign == blocks.counts.unfollowed == 0


def test_the_recording_has_removals_and_a_clearing() -> None:
    kinds = Counter(type(event) for payload in FRAMES[0] + FRAMES[1] for event in events_of(payload))
    assert kinds[BlocksStored] > 20
    assert kinds[BlocksRemoved] > 20
    assert kinds[BlocksCleared] == 2


# Forms of events


def test_older_versions_send_arrays() -> None:
    batch = [
        1.0,
        [
            ["BlockStored", [7, b"\x01" * 32], None, [1] * 8, 4, None],
            ["BlockRemoved", [7]],
            ["AllBlocksCleared"],
        ],
    ]
    first, second, third = events_of(msgspec.msgpack.encode(batch))
    assert first == BlocksStored((7, b"\x01" * 32), None, (1,) * 8, 4)
    assert second == BlocksRemoved((7,))
    assert third == BlocksCleared()


def test_kinds_of_events_and_fields_of_later_versions_are_ignored() -> None:
    batch = [
        1.0,
        [{"type": "Moved", "x": 1}, {"type": "BlockRemoved", "block_hashes": [1], "new": 2}, ["New", 1]],
        0,
    ]
    assert events_of(msgspec.msgpack.encode(batch)) == (BlocksRemoved((1,)),)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(5),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, 7]),
        msgspec.msgpack.encode([1.0, [{"kind": 1}]]),
        msgspec.msgpack.encode([1.0, [[]]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, ["x"], 4, None]]]),
        msgspec.msgpack.encode({"ts": 1}),
    ],
)
def test_what_is_no_batch_of_events_is_refused(payload: bytes) -> None:
    with pytest.raises(UnreadableEvents, match="no batch of KV events"):
        events_of(payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    try:
        found = events_of(payload)
    except UnreadableEvents:
        return
    assert all(isinstance(one, BlocksStored | BlocksRemoved | BlocksCleared) for one in found)


# Blocks


def test_a_salt_and_an_adapter_keep_blocks_apart() -> None:
    prompt = list(range(12))
    kinds: dict[tuple[str, str], BlocksStored] = {
        ("", ""): stored(prompt, extra_keys=(None, None, None)),
        ("s", ""): stored(prompt, extra_keys=(("s",), None, None)),
        ("", "lora"): stored(prompt, lora_id=1, lora_name="lora", extra_keys=(("lora",),) * 3),
        ("s", "lora"): stored(
            prompt, lora_id=1, lora_name="lora", extra_keys=(("lora", "s"), ("lora",), ("lora",))
        ),
    }
    for (salt, adapter), event in kinds.items():
        mirror = Mirror()
        mirror.apply(KvBlocks(SIZE).apply(event))
        assert list(mirror.blocks) == chained(prompt, salt=salt, adapter=adapter)
    together, everything = KvBlocks(SIZE), Mirror()
    for event in kinds.values():
        everything.apply(together.apply(event))
    assert len(everything.blocks) == 12


def test_later_blocks_of_a_salted_prompt_keep_its_seed() -> None:
    blocks, mirror = KvBlocks(SIZE), Mirror()
    mirror.apply(blocks.apply(BlocksStored((1,), None, (1, 2, 3, 4), SIZE, extra_keys=(("s",),))))
    mirror.apply(blocks.apply(BlocksStored((2,), 1, (5, 6, 7, 8), SIZE, extra_keys=(None,))))
    assert list(mirror.blocks) == chained([1, 2, 3, 4, 5, 6, 7, 8], salt="s")


@pytest.mark.parametrize(
    "about",
    [
        {"extra_keys": (None, (["image", 2],), None)},
        {"extra_keys": (None, (b"embedding",), None)},
        {"extra_keys": (None, ("a salt in the middle",), None)},
    ],
)
def test_blocks_that_tokens_do_not_identify_are_left_out_with_all_that_follow(about: dict[str, Any]) -> None:
    prompt, blocks, mirror = list(range(12)), KvBlocks(SIZE), Mirror()
    event = stored(prompt, **about)
    mirror.apply(blocks.apply(event))
    mirror.apply(blocks.apply(BlocksStored((99,), event.block_hashes[-1], (1, 2, 3, 4), SIZE)))
    assert list(mirror.blocks) == chained(prompt)[:1]
    assert (blocks.counts.foreign, blocks.counts.orphans) == (2, 1)


def test_an_adapter_without_a_name_is_not_guessed() -> None:
    blocks = KvBlocks(SIZE)
    assert blocks.apply(stored([1, 2, 3, 4], lora_id=1)) == []
    assert blocks.counts.foreign == 1


@pytest.mark.parametrize(
    "about",
    [{"medium": "CPU"}, {"kv_cache_spec_kind": "sliding_window"}, {"group_idx": 1}, {"locality": "REMOTE"}],
)
def test_blocks_of_other_media_and_groups_are_not_followed(about: dict[str, Any]) -> None:
    blocks, mirror = KvBlocks(SIZE), Mirror()
    mirror.apply(blocks.apply(stored([1, 2, 3, 4], group_idx=0)))
    before = dict(mirror.blocks)
    mirror.apply(blocks.apply(stored([5, 6, 7, 8], **about)))
    same = stored([1, 2, 3, 4], group_idx=0).block_hashes
    where = {key: value for key, value in about.items() if key in ("medium", "group_idx")}
    if where:
        mirror.apply(blocks.apply(BlocksRemoved(same, **where)))
    assert mirror.blocks == before
    assert blocks.counts.unfollowed == 1


def test_repeated_reports_do_not_keep_a_block_forever() -> None:
    """More copies than the cache has blocks cannot be copies."""
    blocks, mirror = KvBlocks(SIZE, capacity=4), Mirror()
    for _ in range(5):
        mirror.apply(blocks.apply(stored([1, 2, 3, 4])))
    mirror.apply(blocks.apply(BlocksRemoved(stored([1, 2, 3, 4]).block_hashes)))
    assert not mirror.blocks


TOKENS = st.lists(st.integers(0, 2), min_size=SIZE, max_size=4 * SIZE)
STEPS = st.lists(
    st.tuples(st.sampled_from(["cache", "evict", "clear"]), TOKENS, st.sampled_from(["", "s"]), st.randoms()),
    max_size=40,
)


@given(STEPS)
def test_changes_follow_a_cache_with_copies(steps: list[Any]) -> None:
    """The model: a bag of (salt, prefix), of which vLLM reports every copy."""
    blocks, mirror = KvBlocks(SIZE), Mirror()
    cache: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for what, tokens, salt, random in steps:
        if what == "clear" and random.random() < 0.2:
            cache.clear()
            mirror.apply(blocks.apply(BlocksCleared()))
        elif what == "evict" and cache:
            # vLLM evicts the end of a prompt before its beginning
            last = [
                one
                for one in cache
                if not any(
                    other[0] == one[0] and len(other[1]) > len(one[1]) and other[1][: len(one[1])] == one[1]
                    for other in cache
                )
            ]
            gone = random.choice(sorted(last))
            cache[gone] -= 1
            cache += Counter()
            mirror.apply(blocks.apply(BlocksRemoved((hash(gone),))))
        elif what == "cache":
            prefixes = [(salt, tuple(tokens[:end])) for end in range(SIZE, len(tokens) + 1, SIZE)]
            reused = random.randrange(len(prefixes) + 1)
            while not all(one in cache for one in prefixes[:reused]):
                reused -= 1
            new = prefixes[reused:]
            if new:
                cache.update(new)
                keys = tuple((salt,) if salt and reused == at == 0 else None for at in range(len(new)))
                event = BlocksStored(
                    tuple(map(hash, new)),
                    hash(prefixes[reused - 1]) if reused else None,
                    tuple(tokens[reused * SIZE : len(prefixes) * SIZE]),
                    SIZE,
                    extra_keys=keys,
                )
                mirror.apply(blocks.apply(event))
    assert set(mirror.blocks) == {chained(list(tokens), salt=salt)[-1] for salt, tokens in cache}
    assert len(blocks) == len(mirror.blocks)
    assert blocks.counts.orphans == 0
