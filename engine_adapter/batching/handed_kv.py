"""KV of a prompt that another engine has computed: where it is, and how a cache takes it over. Pure.

Nothing is locked. Once its answer has ended, the pages of a prompt are kept for reuse like all others, the
last to be evicted, and the rank that copied them compares checksums. A page that was evicted meanwhile is
computed again, so pages are never held for a reader that has died.
"""

from collections.abc import Callable, Sequence

import msgspec

from engine_adapter.batching.kv_cache import Block, KvCache
from fleet.requests.handovers import MemoryAddress


class PromptKv(msgspec.Struct, frozen=True, kw_only=True):
    """Place of the KV of a prompt's full blocks, in order."""

    layout: str
    """Form of the pages. Only ranks with the same one can read them."""
    blocks: int
    page_bytes: int
    """Memory of a block's KV."""
    address: MemoryAddress | None = None
    """Memory with the units, as its cells. None: there is none, since the engine is simulated."""
    units: tuple[tuple[int, ...], ...] = ()
    """By block, the units of its page."""
    checksums: tuple[int, ...] = ()
    """By block, xxh3_64 of its units, one after another."""


Fill = Callable[[int, int], bool]
"""Copies the KV of a block, by its index, into a page. False: it is not the KV that was promised."""


def take_over(cache: KvCache, blocks: Sequence[Block], fill: Fill) -> int:
    """Register blocks that another engine computed, and keep them for reuse. Return how many were copied.

    blocks: the first ones of a prompt. Those in the cache are not copied. The first that does not fit or
    cannot be copied is the last.
    """
    table = cache.open(blocks)
    first = len(table.pages)
    try:
        if not cache.extend(table, min(len(blocks), first + cache.obtainable)):
            return 0
        end = first
        while end < len(table.pages) and fill(end, table.pages[end]):
            end += 1
        cache.register(table, blocks, end)
        return end - first
    finally:
        cache.close(table)
