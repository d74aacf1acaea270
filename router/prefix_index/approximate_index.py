"""Probable KV caches of ranks without KV events: the prompts routed there, as sequence hashes of blocks.
Pure, bounded.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from router import kernels
from router.fleet_state.target_table import RankKey
from router.kernels import Hashes, RecentBlocks
from router.prefix_index.block_index import BlockIndex

MAX_BLOCKS = 1 << 21
"""Blocks of all ranks together, about 250 MB (400 in the Python form). With more ranks than this allows
`capacity`, each gets an equal share.
"""
_EVICTED_TOGETHER = 256
"""Most blocks evicted beyond those that must be, so that the next prompts evict none: one loop costs less
than a few blocks for each prompt.
"""


class RecentBlocksInPython:
    """Python form of `kernels.RecentBlocks`."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def touch(self, blocks: Hashes, most: int) -> list[int]:
        """Use the first `most` blocks of a prompt, from the last to the first. Return those that are new, in
        this order.
        """
        known, new = self._blocks, list[int]()
        for block in reversed(blocks[:most]):
            if block in known:
                known.move_to_end(block)
            else:
                known[block] = None
                new.append(block)
        return new

    def evict(self, count: int) -> list[int]:
        """Remove as many blocks, and return them: the least recently used, in this order."""
        return [self._blocks.popitem(last=False)[0] for _ in range(min(count, len(self._blocks)))]

    def __len__(self) -> int:
        return len(self._blocks)


class ApproximateIndex:
    """State: per rank the sequence hashes of blocks routed to it, least recently used first, at most
    `capacity` each; `block_index` has the same by block.
    """

    def __init__(self, capacity: int, block_index: BlockIndex) -> None:
        if capacity < 1:
            raise ValueError(f"prefix index: the capacity must be at least 1 block per rank, not {capacity}")
        self.block_index = block_index
        self._capacity = capacity
        self._blocks: dict[RankKey, RecentBlocks] = {}

    def routed(self, rank: RankKey, chained: Sequence[int], capacity: int | None = None) -> None:
        """Record a prompt (by sequence hashes) that went to a rank. Later blocks are evicted before the
        blocks they depend on.
        """
        blocks = self._blocks.get(rank)
        if blocks is None:
            blocks = self._blocks[rank] = _no_blocks()
        limit = max(1, min(self._capacity, capacity or self._capacity, MAX_BLOCKS // len(self._blocks)))
        hashes = chained if isinstance(chained, array) else array("Q", chained)
        self.block_index.add(rank, blocks.touch(hashes, limit))
        more = len(blocks) - limit
        if more > 0:
            self.block_index.discard(rank, blocks.evict(more + min(_EVICTED_TOGETHER, limit // 16)))

    def forget_worker(self, worker_id: int) -> None:
        for rank in [rank for rank in self._blocks if rank[0] == worker_id]:
            del self._blocks[rank]
            self.block_index.clear(rank)

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self._blocks.values())


def _no_blocks() -> RecentBlocks:
    library = kernels.compiled()
    return RecentBlocksInPython() if library is None else library.RecentBlocks(kernels.SALT)
