"""Probable KV caches of ranks without KV events: the prompts routed there, as sequence hashes of blocks.
Pure, bounded.
"""

from collections import OrderedDict
from collections.abc import Sequence

from router.fleet_state.target_table import RankKey
from router.prefix_index.block_index import BlockIndex

MAX_BLOCKS = 1 << 21
"""Blocks of all ranks together, about 300 MB. With more ranks than this allows `capacity`, each gets an equal
share.
"""
_EVICTED_TOGETHER = 256
"""Most blocks evicted beyond those that must be, so that the next prompts evict none: one loop costs less
than a few blocks for each prompt.
"""


class ApproximateIndex:
    """State: per rank the sequence hashes of blocks routed to it, least recently used first, at most
    `capacity` each; `block_index` has the same by block.
    """

    def __init__(self, capacity: int, block_index: BlockIndex) -> None:
        if capacity < 1:
            raise ValueError(f"prefix index: the capacity must be at least 1 block per rank, not {capacity}")
        self.block_index = block_index
        self._capacity = capacity
        self._blocks: dict[RankKey, OrderedDict[int, None]] = {}

    def routed(self, rank: RankKey, chained: Sequence[int], capacity: int | None = None) -> None:
        """Record a prompt (by sequence hashes) that went to a rank. Later blocks are evicted before the
        blocks they depend on.
        """
        blocks = self._blocks.get(rank)
        if blocks is None:
            blocks = self._blocks[rank] = OrderedDict()
        limit = max(1, min(self._capacity, capacity or self._capacity, MAX_BLOCKS // len(self._blocks)))
        new = []
        for block in reversed(chained[:limit]):
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = None
                new.append(block)
        self.block_index.add(rank, new)
        if len(blocks) > limit:
            more = len(blocks) - limit + min(_EVICTED_TOGETHER, limit // 16)
            self.block_index.discard(rank, [blocks.popitem(last=False)[0] for _ in range(more)])

    def forget_worker(self, worker_id: int) -> None:
        for rank in [rank for rank in self._blocks if rank[0] == worker_id]:
            del self._blocks[rank]
            self.block_index.clear(rank)

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self._blocks.values())
