"""Which ranks hold which blocks: one dictionary from a block's sequence hash to the set of its holders, as a bit mask. Pure, no clock.

A sequence hash stands for the whole prefix that ends with its block, so no tree is needed, and blocks of all sizes and models share the
dictionary. A rank that is cleared or forgotten leaves its bits behind at once by taking another slot; they are swept out a few
blocks at a time, along with what is written next: everything is moved into a fresh dictionary, which also gives back the room of
blocks that are gone. Bits of a slot nobody has are harmless until then: every look-up masks them out.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from router.fleet_state.target_table import RankKey, TargetTable
from router.prefix_index.block_hash_chain import HashRuns

NOBODY = 0
"""The slot that no rank has."""
_WIDEST_STEP = 32
"""Blocks of a prompt that are looked up at once, at most: so many may be hashed in vain."""
_MOST_MASKS = 65_536
"""Masks that are kept to be shared; with more, sharing begins anew."""
_SWEPT_AT_LEAST, _SWEPT_PER_WRITE = 64, 4
"""Blocks moved with each writing, and more for each block it writes."""
_FEW_LEFT = 1024
"""Entries and slots left behind that are not worth a sweep."""
_FEW_SLOTS = 64
_MANY_CHILDREN, _MOST_CHILDREN = 64, 4096
"""Blocks behind one block: with so many, and each time they have doubled, those that are gone are forgotten; more are not searched."""
_MOST_MODELS = 256
_MOST_UNPACKED = 1024
_FEW_BITS = 4
"""Bits of a mask that are faster taken one by one."""


class Reachable(Protocol):
    """A prompt's blocks by sequence hash, made as they are asked for (`router.prefix_index.block_hash_chain.BlockHashChain`)."""

    def __len__(self) -> int: ...
    def reach(self, depth: int, runs: HashRuns | None = None) -> Sequence[int]: ...


class BlockRuns(Protocol):
    """A prompt (`router.prefix_index.prompt.Prompt`)."""

    def chained(self, block_size: int) -> Reachable: ...


class _Slot:
    """A rank's place in the masks. `entries`: blocks that carry its bit."""

    __slots__ = ("bit", "entries", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.bit = 1 << number
        self.entries = 0


class BlockIndex:
    """State: masks by block, of which `_old` are yet to be swept; slots by rank; what was left behind."""

    def __init__(self) -> None:
        self.version = 0
        """counts changes of who has which slot"""
        self._masks: dict[int, int] = {}
        self._old: dict[int, int] = {}
        """what the sweep has not reached yet; empty when none is under way"""
        self._shared: dict[int, int] = {}
        self._slots: dict[RankKey, _Slot] = {}
        self._live = 0
        """bits of all slots that a rank has"""
        self._numbers = NOBODY + 1
        """slots there ever were"""
        self._free: list[int] = []
        self._left: list[int] = []
        self._left_entries = 0
        """slots left behind for the next sweep, and how many blocks carry their bits at most"""
        self._swept: list[int] = []
        """slots whose bits the present sweep takes away"""
        self.entries = 0
        """(block, rank) pairs that count"""
        self._children: dict[int, int | set[int]] = {}
        """by block, the one that was stored behind it, or those; some may be gone"""
        self._gappy = 0
        """bits of ranks that may hold a block without holding its parent"""
        self.runs = HashRuns()
        self._unpacked: dict[int, NDArray[np.intp]] = {}
        self._rosters: dict[str, tuple[TargetTable, int, NDArray[np.intp]]] = {}
        """by model, the slots of its targets at one version"""

    def __len__(self) -> int:
        """Blocks, those that nobody holds any more but are not swept yet included."""
        return len(self._masks) + len(self._old)

    def holds(self, rank: RankKey, block: int) -> bool:
        slot = self._slots.get(rank)
        return slot is not None and bool((self._masks.get(block) or self._old.get(block, 0)) & slot.bit)

    def held(self, rank: RankKey) -> int:
        """Blocks of one rank."""
        slot = self._slots.get(rank)
        return 0 if slot is None else slot.entries

    def store(self, rank: RankKey, parent: int | None, blocks: Sequence[int]) -> None:
        """A rank holds blocks that follow one another behind a parent that it holds (None: from the start), and may lose them in any order."""
        children, behind = self._children, parent
        for block in blocks:
            if behind is not None:
                known = children.setdefault(behind, block)
                if known != block:
                    self._branch(behind, known, block)
            behind = block
        self.add(rank, blocks)

    def _branch(self, parent: int, known: int | set[int], block: int) -> None:
        """Another block is stored behind one that has some already."""
        if not isinstance(known, set):
            self._children[parent] = {known, block}
        elif block not in known:
            if len(known) >= _MANY_CHILDREN and not len(known) & (len(known) - 1):
                known -= {child for child in known if child not in self._masks and child not in self._old}
            known.add(block)

    def add(self, rank: RankKey, blocks: Sequence[int]) -> None:
        """A rank holds these blocks from now on, and loses none before those that follow it."""
        slot = self._slots.get(rank) or self._settle(rank)
        masks, shared, bit, old = self._masks, self._shared, slot.bit, self._old
        added = 0
        for block in blocks:
            mask = masks.get(block)
            if mask is None:
                mask = old.pop(block, 0) & self._live if old else 0
            elif mask & bit:
                continue
            added += not mask & bit
            grown = mask | bit
            masks[block] = shared.setdefault(grown, grown)
        slot.entries += added
        self.entries += added
        if len(shared) > _MOST_MASKS:
            shared.clear()
        if old or self._left:
            self.sweep(_SWEPT_AT_LEAST + _SWEPT_PER_WRITE * len(blocks))

    def discard(self, rank: RankKey, blocks: Iterable[int]) -> int:
        """A rank holds these blocks no more. Returns how many it did not hold anyway."""
        slot = self._slots.get(rank)
        missing, lost = 0, list[int]()
        for block in blocks:
            masks = self._old if block in self._old else self._masks
            mask = masks.get(block, 0)
            if slot is None or not mask & slot.bit:
                missing += 1
                continue
            lost.append(block)
            rest = mask ^ slot.bit
            if rest:
                masks[block] = self._shared.setdefault(rest, rest)
            else:
                del masks[block]
        if slot is not None and lost:
            slot.entries -= len(lost)
            self.entries -= len(lost)
            self._look_behind(slot.bit, lost)
        if self._old or self._left:
            self.sweep(_SWEPT_AT_LEAST + _SWEPT_PER_WRITE * len(lost))
        return missing

    def _look_behind(self, bit: int, lost: list[int]) -> None:
        """Whether a rank still holds what was stored behind the blocks it lost: then it has gaps."""
        for block in lost:
            child = self._children.get(block)
            if child is None:
                continue
            some = child if isinstance(child, set) else (child,)
            if not self._gappy & bit and (len(some) > _MOST_CHILDREN or any((self._look_up(one) or 0) & bit for one in some)):
                self._gappy |= bit
            if self._look_up(block) is None:
                del self._children[block]

    def clear(self, rank: RankKey) -> None:
        """A rank holds nothing any more."""
        slot = self._slots.pop(rank, None)
        if slot is None:
            return
        self.version += 1
        self._live ^= slot.bit
        self._gappy &= self._live
        self.entries -= slot.entries
        if slot.entries:
            self._left.append(slot.number)
            self._left_entries += slot.entries
        else:
            self._free.append(slot.number)

    def ranks(self) -> list[RankKey]:
        """Those that hold something, or did since they were cleared."""
        return list(self._slots)

    def overlap(self, roster: TargetTable, prompt: BlockRuns) -> NDArray[np.int64]:
        """int64 [targets]: leading blocks of a prompt that each target of a model holds, in its own block size."""
        overlap = np.zeros(len(roster.targets), np.int64)
        for size in roster.block_sizes:
            found = self.leading(prompt.chained(size))
            if found is not None:
                depths = found.take(self._of(roster))
                overlap = depths if len(roster.block_sizes) == 1 else np.where(roster.block_size == size, depths, overlap)
        return overlap

    def overlaps(self, prompt: Reachable) -> dict[RankKey, int]:
        """Leading blocks of a prompt by rank, for readers; ranks without any are left out."""
        found = self.leading(prompt)
        return {} if found is None else {rank: int(found[slot.number]) for rank, slot in self._slots.items() if found[slot.number]}

    def _of(self, roster: TargetTable) -> NDArray[np.intp]:
        """intp [targets]: the slot of each target, NOBODY for those that hold nothing."""
        known = self._rosters.get(roster.model)
        if known is None or known[0] is not roster or known[1] != self.version:
            if len(self._rosters) >= _MOST_MODELS:
                self._rosters.clear()
            slots = (self._slots.get(target.key) for target in roster.targets)
            known = roster, self.version, np.array([NOBODY if slot is None else slot.number for slot in slots], np.intp)
            self._rosters[roster.model] = known
        return known[2]

    def leading(self, prompt: Reachable) -> NDArray[np.int64] | None:
        """int64 [slots]: leading blocks of a prompt that the rank of each slot holds, without a gap; None: nobody holds the first one.

        Reads no more of the prompt than somebody holds, but for a few blocks. Who has the last block of a stretch has all of it, unless there may be gaps.
        """
        held, at, total, step = self._live, 0, len(prompt), 1
        look_up = self._look_up if self._old else self._masks.get
        ends: list[tuple[int, int]] = []
        while at < total and held:
            asked = min(total, at + step)
            chained = prompt.reach(asked, self.runs)
            step = 1 if len(chained) > asked else min(2 * step, _WIDEST_STEP)  # a run that was never hashed before is hardly held
            while at < len(chained) and held:
                stop = min(len(chained), at + _WIDEST_STEP)
                if stop == at + 1 or held & self._gappy or held & (look_up(chained[stop - 1]) or 0) != held:
                    held = _walk(map(look_up, chained[at:stop]), at, held, ends)
                at = stop
        if held:
            ends.append((total, held))
        return self._spread(ends)

    def _look_up(self, block: int) -> int | None:
        return self._masks.get(block) or self._old.get(block)

    def _spread(self, ends: list[tuple[int, int]]) -> NDArray[np.int64] | None:
        """What `leading` returns, of (depth, mask of those whose blocks end there)."""
        if not ends or not ends[-1][0]:
            return None
        depths = np.zeros(self._numbers, np.int64)
        for depth, mask in ends:
            if depth and mask.bit_count() > _FEW_BITS:
                depths[self._bits(mask)] = depth
            elif depth:
                while mask:
                    highest = mask.bit_length() - 1
                    depths[highest] = depth
                    mask ^= 1 << highest
        return depths

    def _bits(self, mask: int) -> NDArray[np.intp]:
        """The slots of a mask, ascending. Remembered: many prompts begin alike."""
        found = self._unpacked.get(mask)
        if found is None:
            raw = np.frombuffer(mask.to_bytes(self._numbers + 7 >> 3, "little"), np.uint8)
            found = np.flatnonzero(np.unpackbits(raw, bitorder="little"))
            if len(self._unpacked) >= _MOST_UNPACKED:
                self._unpacked.clear()
            self._unpacked[mask] = found
        return found

    def sweep(self, blocks: int) -> bool:
        """Look at so many blocks, at most, for bits that were left behind; returns whether there is more to do."""
        if not self._old and not self._begin():
            return False
        old, masks, shared, live = self._old, self._masks, self._shared, self._live
        for _ in range(min(blocks, len(old))):
            block, mask = old.popitem()
            mask &= live
            if mask:
                masks[block] = shared.setdefault(mask, mask)
            else:
                self._children.pop(block, None)
        if len(shared) > _MOST_MASKS:
            shared.clear()
        if not old:
            self._old = {}  # an emptied dictionary keeps its room
            self._free += self._swept
            self._swept = []
        return True

    def _begin(self) -> bool:
        """Begin a sweep when it is worth it: so it costs a few steps for each entry that was left."""
        if self._left_entries < max(_FEW_LEFT, len(self._masks) // 4) and len(self._left) < max(_FEW_SLOTS, len(self._slots)):
            return False
        self._swept, self._left, self._left_entries = self._left, [], 0
        self._old, self._masks, self._shared = self._masks, {}, {}
        return True

    def _settle(self, rank: RankKey) -> _Slot:
        if not self._free:
            self._free.append(self._numbers)
            self._numbers += 1
        slot = self._slots[rank] = _Slot(self._free.pop())
        self._live |= slot.bit
        self.version += 1
        return slot


def _walk(masks: Iterable[int | None], at: int, held: int, ends: list[tuple[int, int]]) -> int:
    """Who of `held` holds every block of a stretch that begins at a depth, by the blocks' masks; where the others end is added to `ends`."""
    last: int | None = -1
    for depth, mask in enumerate(masks, at):
        if mask is last:
            continue
        last = mask
        still = held & mask if mask else 0
        if still != held:
            ends.append((depth, held ^ still))
            held = still
            if not held:
                break
    return held
