"""Index of the prompt prefixes in each rank's KV cache, from the rank's own KV events. Pure.

A block is identified by the sequence hash derived from its local hash and its parent. Prompts are looked up
by this hash, regardless of the rank's own name for the block. Such names are stored only if they differ from
it.
"""

from collections.abc import Iterable, Sequence

from fleet.blocks import chain
from fleet.facts.dynamo_kv import KvBlock, KvEvent, KvStored, RoutedKvEvent
from router.fleet_state.target_table import RankKey
from router.prefix_index.block_index import BlockIndex

_MAX_U64 = (1 << 64) - 1
MAX_BLOCKS = 1 << 22
DEVICE = "device"


class OrphanBlock(Exception):
    """A block was stored after a parent that this rank does not hold. An event was missed, and a snapshot is
    needed.
    """


class BadKvEvent(Exception):
    """Invalid event: a number outside u64, or an unknown form."""


class KvEventIndex:
    """All hashes and worker_ids are unsigned 64-bit. State: `block_index`, and names of blocks by rank."""

    def __init__(self, block_index: BlockIndex) -> None:
        self.block_index = block_index
        self.missing_removals = 0
        """removals of blocks that the index did not have"""
        self._names: dict[RankKey, dict[int, int]] = {}
        """sequence hash by rank and the rank's own name of a block; only where they differ"""

    def apply(self, routed: Iterable[RoutedKvEvent]) -> None:
        """Apply a batch in order. OrphanBlock if a stored block's parent is not held, BadKvEvent for an
        invalid event; the events before it stay applied.

        Blocks in tiers other than device memory do not count as cached.
        """
        for one in routed:
            if one.storage_tier == DEVICE:
                self._apply((one.worker_id, one.event.dp_rank), one.event)

    def follow(self, rank: RankKey, events: Iterable[KvEvent]) -> None:
        """Apply a rank's events in order, like `apply`, regardless of the rank they name: a part of its
        snapshot.
        """
        for event in events:
            self._apply(rank, event)

    def clear(self, rank: RankKey) -> None:
        """Remove all blocks of a rank."""
        self.block_index.clear(rank)
        self._names.pop(rank, None)

    def remove_worker(self, worker_id: int) -> None:
        for rank in {*self.block_index.ranks(), *self._names}:
            if rank[0] == worker_id:
                self.clear(rank)

    def _apply(self, rank: RankKey, event: KvEvent) -> None:
        change = event.data
        if isinstance(change, str):
            self.clear(rank)
        elif change.stored is not None and change.removed is None:
            self._store(rank, change.stored)
        elif change.removed is not None and change.stored is None:
            self._remove(rank, change.removed.block_hashes)
        else:
            raise BadKvEvent(
                f"worker {rank[0]} rank {rank[1]}: event {event.event_id} must contain exactly one of stored"
                " and removed"
            )

    def _store(self, rank: RankKey, stored: KvStored) -> None:
        names = self._names.get(rank, {})
        parent = stored.parent_hash
        if parent is not None:
            if not 0 <= parent <= _MAX_U64:
                raise BadKvEvent(
                    f"worker {rank[0]} rank {rank[1]}: parent {parent}; it must be unsigned 64-bit"
                )
            parent = names.get(parent, parent)
            if not self.block_index.holds(rank, parent):
                raise OrphanBlock(
                    f"worker {rank[0]} rank {rank[1]}: block stored after {stored.parent_hash}, which it does"
                    " not hold"
                )
        blocks, other = _read(rank, parent, stored.blocks)
        if max(self.block_index.held(rank), len(names)) + len(blocks) > MAX_BLOCKS:
            raise BadKvEvent(
                f"worker {rank[0]} rank {rank[1]}: more than {MAX_BLOCKS} blocks of one rank are not credible"
            )
        self._call(rank, names, blocks, other)
        self.block_index.store(rank, parent, blocks)

    def _call(
        self, rank: RankKey, names: dict[int, int], blocks: Sequence[int], other: dict[int, int]
    ) -> None:
        for block in blocks if names else ():
            names.pop(block, None)
        if other:
            names.update(other)
            self._names[rank] = names

    def _remove(self, rank: RankKey, named: Sequence[int]) -> None:
        """Remove blocks. Blocks that are already gone are no error and do not affect the others."""
        names = self._names.get(rank)
        blocks = [names.pop(name, name) for name in named] if names else named
        self.missing_removals += self.block_index.discard(rank, blocks)


def _read(rank: RankKey, parent: int | None, stored: Sequence[KvBlock]) -> tuple[list[int], dict[int, int]]:
    """Return the sequence hashes of blocks, and the names that differ from them. BadKvEvent for a number
    outside u64.
    """
    blocks: list[int] = []
    names: dict[int, int] = {}
    for block in stored:
        name, local = block.block_hash, block.tokens_hash
        if not (0 <= name <= _MAX_U64 and 0 <= local <= _MAX_U64):
            raise BadKvEvent(
                f"worker {rank[0]} rank {rank[1]}: block {name} with local hash {local}; both must be"
                " unsigned 64-bit"
            )
        parent = chain(parent, local)
        if parent == name:
            parent = name  # share one int object
        else:
            names[name] = parent
        blocks.append(parent)
    return blocks, names
