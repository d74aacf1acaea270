"""Blocks of a rank as a router knows them from its KV events alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_adapter.batching.kv_cache import Change


@dataclass
class KvEventMirror:
    """Refuses events that no router could apply: a child announced before its parent, a block announced
    twice, a parent removed before its child."""

    parents: dict[int, int | None] = field(default_factory=dict)
    """by block hash: that of the block before; None: it begins a prompt"""

    def apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change == "cleared":
                self.parents.clear()
                continue
            if change.stored is not None:
                parent = change.stored.parent_hash
                for block in change.stored.blocks:
                    assert parent is None or parent in self.parents, "a child was announced before its parent"
                    assert block.block_hash not in self.parents, "a block was announced twice"
                    self.parents[block.block_hash] = parent
                    parent = block.block_hash
            if change.removed is not None:
                for block_hash in change.removed.block_hashes:
                    del self.parents[block_hash]
                    assert block_hash not in self.parents.values(), "a parent was removed before its child"
