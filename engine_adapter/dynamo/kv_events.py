"""KV events of one rank in the form that Dynamo's publisher takes: token ids, from which it makes the hashes
that `fleet.blocks` makes as well. Pure.

The engine reports hashes alone. The tokens come from its cache, which may have evicted a block before its
event is translated. Such a block was never published and is not needed; its removal, which follows, is
skipped as well.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from engine_adapter.batching.kv_cache import Block
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvStored

_SIGN = 1 << 63
MAX_REMOVED = 1024
"""Block hashes of one removal."""


class KvEventTranslator:
    """Published blocks of one rank. `events` must be given every change, in order."""

    def __init__(self, find: Callable[[int], Block | None]) -> None:
        """find: returns the cached block of a sequence hash. None: it is no longer cached."""
        self._find = find
        self._published: dict[int, None] = {}
        """Sequence hashes, parents before children."""

    def __len__(self) -> int:
        """Number of published blocks."""
        return len(self._published)

    def events(self, changes: Sequence[KvChange | Literal["cleared"]]) -> list[dict[str, Any]]:
        """Return the events of these changes, for `KvEventPublisher.publish_batch`."""
        return [event for change in changes for event in self._events(change)]

    def _events(self, change: KvChange | Literal["cleared"]) -> Iterator[dict[str, Any]]:
        if isinstance(change, str):
            # the publisher has no event for a cleared cache
            yield from self._removed(tuple(reversed(self._published)))
            return
        if change.stored is not None:
            stored = self._stored(change.stored)
            if stored is not None:
                yield stored
        if change.removed is not None:
            yield from self._removed(change.removed.block_hashes)

    def _stored(self, stored: KvStored) -> dict[str, Any] | None:
        parent = stored.parent_hash
        if parent is not None and parent not in self._published:
            return None
        found = self._still_cached(stored.blocks)
        if not found:
            return None
        self._published.update(dict.fromkeys(block.block_hash for block in found))
        event: dict[str, Any] = {
            "type": "stored",
            "token_ids": array("I", b"".join(block.tokens for block in found)).tolist(),
            "num_block_tokens": [len(block.tokens) // 4 for block in found],
            "block_hashes": [signed(block.block_hash) for block in found],
            "parent_hash": None if parent is None else signed(parent),
        }
        return {**event, "cache_salt": found[0].salt} if found[0].salt else event

    def _still_cached(self, blocks: Sequence[KvBlock]) -> list[Block]:
        """Return the blocks up to the first one that was evicted. Those after it were evicted before it."""
        found = []
        for block in blocks:
            cached = self._find(block.block_hash)
            if cached is None:
                break
            found.append(cached)
        return found

    def _removed(self, hashes: Sequence[int]) -> Iterator[dict[str, Any]]:
        known = [one for one in hashes if one in self._published]
        for one in known:
            del self._published[one]
        for start in range(0, len(known), MAX_REMOVED):
            part = known[start : start + MAX_REMOVED]
            yield {"type": "removed", "block_hashes": [signed(one) for one in part]}


def signed(block_hash: int) -> int:
    """Return a u64 hash as the i64 of the same bits, which Dynamo's Python interface takes."""
    return block_hash - (_SIGN << 1) if block_hash >= _SIGN else block_hash
