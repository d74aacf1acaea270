"""The KV cache of one rank of vLLM or SGLang in the hashes of `fleet.blocks`, followed by its events. Pure.

Their own hashes only name blocks here: ours are computed anew, from the tokens of a block and our hash of
its parent. A block whose parent is unknown is left out and counted, never guessed; so is a block whose hash
covers more than its tokens (images, prompt embeddings).

A cache salt, which vLLM names at the first block of a prompt and SGLang with each event, and a LoRA adapter
give all blocks of the prompt another seed (`fleet.blocks.salted_seed`): they never mix with others.

Several copies of one block may be cached. vLLM reports each, and each removal, so copies are counted."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from engine_adapter.foreign.kv_frames import BlockEvent, BlockHash, BlocksCleared, BlocksRemoved, BlocksStored
from fleet.blocks import chain, local_hash, salted_seed, words
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvRemoved, KvStored

Change = KvChange | Literal["cleared"]
_WHOLE_PREFIX = (None, "full_attention", "mla_attention", "sink_full_attention", "unknown")
"""Kinds of attention whose blocks hold a whole prefix. Blocks of a sliding window or a state are of no use
without these."""
_DEVICE = (None, "GPU")


@dataclass(slots=True)
class _Known:
    """A block by the server's hash."""

    sequence: int
    seed: int
    copies: int = 1


@dataclass(slots=True)
class KvCounts:
    """Blocks that were stored and are not followed."""

    orphans: int = 0
    """Their parent is unknown."""
    foreign: int = 0
    """Their hash covers more than tokens, salt and adapter."""
    unfollowed: int = 0
    """Of other block sizes, media or kinds of attention."""


@dataclass(slots=True)
class KvBlocks:
    """Blocks of one rank. capacity: blocks of its cache; 0: unknown."""

    block_size: int
    capacity: int = 0
    counts: KvCounts = field(default_factory=KvCounts)
    _known: dict[BlockHash, _Known] = field(default_factory=dict)
    _holders: dict[int, int] = field(default_factory=dict)
    """By our sequence hash, the number of cached copies."""
    _copies: int = 0
    _group: int | None = None
    """Cache group that is followed: the first with a whole prefix."""

    def __len__(self) -> int:
        """Return the number of different blocks."""
        return len(self._holders)

    def apply(self, event: BlockEvent) -> list[Change]:
        """Apply an event, and return what it changed."""
        match event:
            case BlocksCleared():
                return self.clear()
            case BlocksStored():
                return list(self._store(event)) if self._followed(event) else []
            case BlocksRemoved():
                return self._remove(event)

    def clear(self) -> list[Change]:
        """Forget all blocks, because they are gone or because events were lost for good."""
        self._known.clear()
        self._holders.clear()
        self._copies = 0
        return ["cleared"]

    def _followed(self, event: BlocksStored) -> bool:
        fits = event.block_size == self.block_size and event.medium in _DEVICE and event.locality != "REMOTE"
        if fits and event.kv_cache_spec_kind in _WHOLE_PREFIX:
            group = event.group_idx or 0
            self._group = group if self._group is None else self._group
            if group == self._group:
                return True
        self.counts.unfollowed += len(event.block_hashes)
        return False

    def _store(self, event: BlocksStored) -> Iterator[KvChange]:
        parent = None if event.parent_block_hash is None else self._known.get(event.parent_block_hash)
        if event.parent_block_hash is not None and parent is None:
            self.counts.orphans += len(event.block_hashes)
            return
        seed = _seed(event) if parent is None else parent.seed
        keys = _usable(event, first=parent is None)
        self.counts.foreign += len(event.block_hashes) - keys
        before = None if parent is None else parent.sequence
        new: list[KvBlock] = []
        after = before
        size = self.block_size
        for at, name in enumerate(event.block_hashes[:keys]):
            local = local_hash(words(event.token_ids[at * size : (at + 1) * size]), seed)
            sequence = chain(before, local)
            if self._hold(name, sequence, seed):
                new.append(KvBlock(sequence, local))
            elif new:
                yield KvChange(stored=KvStored(blocks=tuple(new), parent_hash=after))
                new = []
            if not new:
                after = sequence
            before = sequence
        if new:
            yield KvChange(stored=KvStored(blocks=tuple(new), parent_hash=after))

    def _hold(self, name: BlockHash, sequence: int, seed: int) -> bool:
        """Count a copy of a block. True: it is the first."""
        known = self._known.get(name)
        if known is None:
            self._known[name] = _Known(sequence, seed)
        else:
            known.copies += 1
        self._copies += 1
        holders = self._holders.get(sequence, 0)
        self._holders[sequence] = holders + 1
        if self.capacity and self._copies > self.capacity:
            self._recount()
        return holders == 0

    def _recount(self) -> None:
        """Count every block once. More copies than the cache has blocks are repeated reports (a request with
        vLLM's `kv_cache_report_mode` "full"), of which none will be removed."""
        self._holders = {}
        for known in self._known.values():
            known.copies = 1
            self._holders[known.sequence] = self._holders.get(known.sequence, 0) + 1
        self._copies = len(self._known)

    def _remove(self, event: BlocksRemoved) -> list[Change]:
        if event.medium not in _DEVICE or (event.group_idx or 0) != (self._group or 0):
            return []
        gone: list[int] = []
        for name in event.block_hashes:
            known = self._known.get(name)
            if known is None:
                continue
            known.copies -= 1
            self._copies -= 1
            if not known.copies:
                del self._known[name]
            left = self._holders[known.sequence] - 1
            if left:
                self._holders[known.sequence] = left
            else:
                del self._holders[known.sequence]
                gone.append(known.sequence)
        return [KvChange(removed=KvRemoved(block_hashes=tuple(gone)))] if gone else []


def _own_keys(event: BlocksStored, at: int) -> tuple[Any, ...]:
    """Return what the hash of a block covers beside tokens and adapter."""
    keys = (event.extra_keys or ())[at : at + 1]
    own = keys[0] or () if keys else ()
    return own[1:] if event.lora_name is not None and own[:1] == (event.lora_name,) else own


def _seed(event: BlocksStored) -> int:
    """Return the seed of the blocks of a prompt that begins with this event."""
    own = _own_keys(event, 0)
    salt = own[0] if own and isinstance(own[0], str) else event.cache_salt or ""
    return salted_seed(salt, event.lora_name or "")


def _usable(event: BlocksStored, *, first: bool) -> int:
    """Return the number of leading blocks that tokens, salt and adapter identify. first: the event begins a
    prompt."""
    if event.lora_id is not None and event.lora_name is None:
        return 0
    whole = len(event.token_ids) == len(event.block_hashes) * event.block_size
    for at in range(len(event.block_hashes) if whole else 0):
        own = _own_keys(event, at)
        salted = first and at == 0 and len(own) == 1 and isinstance(own[0], str)
        if own and not salted:
            return at
    return len(event.block_hashes) if whole else 0
