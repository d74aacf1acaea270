"""Mirror of a rank's KV cache, built from its published events. The source of snapshots. Pure."""

from collections.abc import Iterator

from fleet.facts.dynamo_kv import KvBlock, KvChange, KvEvent, KvStored


class KvMirror:
    """Stored blocks of one rank, at most `limit`. Beyond it, the oldest are dropped and counted in
    `forgotten`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.forgotten = 0
        self._blocks: dict[
            int, tuple[int, int | None]
        ] = {}  # sequence hash -> (local hash, sequence hash of the parent)

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, change: KvChange | str) -> None:
        """Apply one change of the cache. "cleared" empties the mirror."""
        if isinstance(change, str):
            self._blocks.clear()
            return
        if change.stored is not None:
            self._store(change.stored)
        if change.removed is not None:
            for block in change.removed.block_hashes:
                self._blocks.pop(block, None)

    def snapshot(self, rank: int) -> tuple[KvEvent, ...]:
        """Return events that rebuild the same contents from nothing, parents first. Runs of one chain share
        an event.

        A block with a missing ancestor is omitted: no index can attach it, and no prefix can reach it.
        """
        runs: list[tuple[int | None, list[KvBlock]]] = []
        last: int | None = None
        for block, (local, parent) in self._parents_first():
            if not runs or parent is None or parent != last:
                runs.append((parent, []))
            runs[-1][1].append(KvBlock(block, local))
            last = block
        changes = (
            KvChange(stored=KvStored(parent_hash=parent, blocks=tuple(blocks))) for parent, blocks in runs
        )
        return tuple(
            KvEvent(event_id=number, data=change, dp_rank=rank)
            for number, change in enumerate(changes, start=1)
        )

    def _store(self, stored: KvStored) -> None:
        parent = stored.parent_hash
        for block in stored.blocks:
            self._blocks.setdefault(block.block_hash, (block.tokens_hash, parent))
            parent = block.block_hash
        while len(self._blocks) > self.limit:
            del self._blocks[next(iter(self._blocks))]
            self.forgotten += 1

    def _parents_first(self) -> Iterator[tuple[int, tuple[int, int | None]]]:
        """Iterate over all blocks reachable from the start of a prompt, each after its parent."""
        reached: dict[int, bool] = {}  # Block -> True if it is reachable.
        for start in self._blocks:
            path: list[int] = []
            at: int | None = start
            while at is not None and at not in reached and at in self._blocks:
                path.append(at)
                at = self._blocks[at][1]
            reachable = at is None or reached.get(at, False)
            for block in reversed(path):
                reached[block] = reachable
                if reachable:
                    yield block, self._blocks[block]
