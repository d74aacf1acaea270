"""What ranks without KV events probably have cached: the prompts routed there, as chained block hashes. Pure, bounded."""

from collections import OrderedDict
from collections.abc import Sequence

import xxhash

from fleet.blocks import SEED
from router.roster import RankKey


def text_hashes(text: bytes, block_bytes: int) -> list[int]:
    """u64 local hash of each full block of a text, for prompts nobody can tokenise here."""
    full = len(text) - len(text) % block_bytes
    return [xxhash.xxh3_64_intdigest(text[at : at + block_bytes], SEED) for at in range(0, full, block_bytes)]


class Prefixes:
    """State: per rank the sequence hashes of blocks routed to it, least recently used first, at most `capacity` each."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"prefix index: the capacity must be at least 1 block per rank, not {capacity}")
        self._capacity = capacity
        self._blocks: dict[RankKey, OrderedDict[int, None]] = {}

    def overlap(self, ranks: Sequence[RankKey], chained: Sequence[int]) -> dict[RankKey, int]:
        """Leading blocks (of a prompt by sequence hashes) that each of `ranks` probably holds; ranks without any are left out."""
        found = {rank: _leading(self._blocks[rank], chained) for rank in ranks if rank in self._blocks}
        return {rank: blocks for rank, blocks in found.items() if blocks}

    def routed(self, rank: RankKey, chained: Sequence[int], capacity: int | None = None) -> None:
        """A prompt (by sequence hashes) went to a rank. Later blocks are older in the eviction order than the ones they depend on."""
        blocks = self._blocks.setdefault(rank, OrderedDict())
        for block in reversed(chained[: self._capacity]):
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = None
        limit = min(self._capacity, capacity or self._capacity)
        while len(blocks) > limit:
            blocks.popitem(last=False)

    def forget_worker(self, worker_id: int) -> None:
        for rank in [rank for rank in self._blocks if rank[0] == worker_id]:
            del self._blocks[rank]

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self._blocks.values())


def _leading(blocks: OrderedDict[int, None], chained: Sequence[int]) -> int:
    for depth, block in enumerate(chained):
        if block not in blocks:
            return depth
    return len(chained)
