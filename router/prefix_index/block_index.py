"""Index from blocks to ranks: one table from a block's sequence hash to the set of its holders, as a bit
mask. Pure, no clock.

A sequence hash identifies the entire prefix that ends with its block. No tree is needed, and blocks of all
sizes and models share the table. A rank that is cleared or forgotten takes another slot, which invalidates
its old bits at once. These bits are removed incrementally, a few blocks with each write: all entries move to
a new table, which also releases the memory of removed blocks. Until then the bits of an unused slot are
harmless, since every lookup masks them out.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from router import kernels
from router.fleet_state.target_table import RankKey, TargetTable
from router.prefix_index.block_hash_chain import BlockHashChain
from router.prefix_index.block_masks import MasksInPython, masks_form

NO_RANK = 0
"""Slot that no rank has."""
_WIDEST_STEP = 32
"""Most blocks of a prompt looked up at once; up to this number may be hashed in vain."""
_MAX_MASKS = 65_536
"""Most masks kept for sharing. Beyond, sharing starts anew."""
_MIN_SWEPT, _SWEPT_PER_WRITE = 64, 4
"""Blocks moved with each write, and additionally per block written."""
_FEW_STALE = 1024
"""Stale entries and slots that are not worth a sweep."""
_FEW_SLOTS = 64
_MANY_CHILDREN, _MAX_CHILDREN = 64, 4096
"""Blocks that follow one block: at this number, and each time it has doubled, removed ones are forgotten;
more than the second number are not searched.
"""
_MAX_MODELS = 256
_MAX_UNPACKED = 1024
_FEW_BITS = 4
"""Masks with at most this number of bits are decoded bit by bit, which is faster."""


class Reachable(Protocol):
    """A prompt's blocks by sequence hash, computed lazily
    (`router.prefix_index.block_hash_chain.BlockHashChain`).
    """

    def __len__(self) -> int: ...
    def reach(self, depth: int) -> Sequence[int]: ...


class BlockRuns(Protocol):
    """A prompt (`router.prefix_index.prompt.Prompt`)."""

    def chained(self, block_size: int) -> Reachable: ...


class Overlap(NamedTuple):
    """Leading blocks of a prompt that ranks hold, int64 [ranks], and the largest of them."""

    blocks: NDArray[np.int64]
    longest: int


class _Slot:
    """A rank's place in the masks. `entries`: blocks that carry its bit."""

    __slots__ = ("bit", "entries", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.bit = 1 << number
        self.entries = 0


class BlockIndex:
    """State: masks by block, of which `_old` are yet to be swept; slots by rank; stale slots."""

    def __init__(self) -> None:
        self.version = 0
        """number of changes of the slots"""
        self._no_masks = masks_form()
        self._masks, self._old = self._no_masks(), self._no_masks()
        """entries that the sweep has not reached yet; empty when no sweep is in progress"""
        self._shared: dict[int, int] = {}
        self._slots: dict[RankKey, _Slot] = {}
        self._live = 0
        """bits of all slots that belong to a rank"""
        self.slot_count = NO_RANK + 1
        """slots ever created"""
        self._free: list[int] = []
        self._stale: list[int] = []
        self._stale_entries = 0
        """stale slots for the next sweep, and an upper bound on the blocks with their bits"""
        self._swept: list[int] = []
        """slots whose bits the present sweep removes"""
        self.entries = 0
        """valid (block, rank) pairs"""
        self._children: dict[int, int | set[int]] = {}
        """by block, the block or blocks stored after it; some may have been removed"""
        self._gappy = 0
        """bits of ranks that may hold a block without its parent"""
        self._unpacked: dict[int, NDArray[np.intp]] = {}
        self._slot_tables: dict[str, tuple[TargetTable, int, NDArray[np.intp]]] = {}
        """by model, the slots of its targets at one version"""

    def __len__(self) -> int:
        """Return the number of blocks, including removed ones that are not swept yet."""
        return len(self._masks) + len(self._old)

    def holds(self, rank: RankKey, block: int) -> bool:
        slot = self._slots.get(rank)
        return slot is not None and bool((self._look_up(block) or 0) & slot.bit)

    def held(self, rank: RankKey) -> int:
        """Return the number of blocks of one rank."""
        slot = self._slots.get(rank)
        return 0 if slot is None else slot.entries

    def may_have_gaps(self, rank: RankKey) -> bool:
        """Return True if a rank may hold a block without its parent."""
        slot = self._slots.get(rank)
        return slot is not None and bool(self._gappy & slot.bit)

    @property
    def links(self) -> int:
        """Number of stored links from a block to one stored after it."""
        return sum(len(after) if isinstance(after, set) else 1 for after in self._children.values())

    def store(self, rank: RankKey, parent: int | None, blocks: Sequence[int]) -> None:
        """Add consecutive blocks to a rank, after a parent that it holds (None: from the start). The rank may
        lose them in any order.
        """
        children, behind = self._children, parent
        for block in blocks:
            if behind is not None:
                known = children.setdefault(behind, block)
                if known != block:
                    self._branch(behind, known, block)
            behind = block
        self.add(rank, blocks)

    def _branch(self, parent: int, known: int | set[int], block: int) -> None:
        """Record another block stored after one that has followers already."""
        if not isinstance(known, set):
            self._children[parent] = {known, block}
        elif block not in known:
            if len(known) >= _MANY_CHILDREN and not len(known) & (len(known) - 1):
                known -= {child for child in known if child not in self._masks and child not in self._old}
            known.add(block)

    def add(self, rank: RankKey, blocks: Sequence[int]) -> None:
        """Add blocks to a rank that never loses a block before those that follow it."""
        slot = self._slots.get(rank) or self._assign_slot(rank)
        added = self._masks.grant(blocks, slot.bit, self._old, self._live, self._shared)
        slot.entries += added
        self.entries += added
        self._after_writing(len(blocks))

    def discard(self, rank: RankKey, blocks: Sequence[int]) -> int:
        """Remove blocks from a rank. Return how many it did not hold."""
        slot = self._slots.get(rank)
        if slot is None:
            return len(blocks)
        lost = self._masks.withdraw(blocks, slot.bit, self._old, self._shared)
        slot.entries -= len(lost)
        self.entries -= len(lost)
        if self._children:
            self._check_children(slot.bit, lost)
        self._after_writing(len(lost))
        return len(blocks) - len(lost)

    def _after_writing(self, blocks: int) -> None:
        """Bound what is shared, and sweep for as many blocks as were written."""
        if len(self._shared) > _MAX_MASKS:
            self._shared.clear()
        if self._old or self._stale:
            self.sweep(_MIN_SWEPT + _SWEPT_PER_WRITE * blocks)

    def _check_children(self, bit: int, lost: list[int]) -> None:
        """Mark a rank as gappy if it still holds a block stored after one that it lost."""
        for block in lost:
            child = self._children.get(block)
            if child is None:
                continue
            some = child if isinstance(child, set) else (child,)
            if not self._gappy & bit and (
                len(some) > _MAX_CHILDREN or any((self._look_up(one) or 0) & bit for one in some)
            ):
                self._gappy |= bit
            if self._look_up(block) is None:
                del self._children[block]

    def clear(self, rank: RankKey) -> None:
        """Remove all blocks of a rank."""
        slot = self._slots.pop(rank, None)
        if slot is None:
            return
        self.version += 1
        self._live ^= slot.bit
        self._gappy &= self._live
        self.entries -= slot.entries
        if slot.entries:
            self._stale.append(slot.number)
            self._stale_entries += slot.entries
        else:
            self._free.append(slot.number)

    def ranks(self) -> list[RankKey]:
        """Return the ranks that hold or held something since they were cleared."""
        return list(self._slots)

    def overlap(self, table: TargetTable, prompt: BlockRuns) -> Overlap:
        """Return the leading prompt blocks held by each target of a model, in its own block size."""
        of = self._of(table)
        if len(table.block_sizes) == 1:
            return self._leading(prompt.chained(table.block_sizes[0]), of)
        blocks = np.zeros(len(of), np.int64)
        for size in table.block_sizes:
            blocks = np.where(
                table.block_size == size, self._leading(prompt.chained(size), of).blocks, blocks
            )
        return Overlap(blocks, int(blocks.max(initial=0)))

    def overlaps(self, prompt: Reachable) -> dict[RankKey, int]:
        """Return the leading blocks of a prompt by rank, for readers. Ranks without any are left out."""
        slots = np.fromiter((slot.number for slot in self._slots.values()), np.intp, len(self._slots))
        found = self._leading(prompt, slots).blocks.tolist()
        return {rank: blocks for rank, blocks in zip(self._slots, found, strict=True) if blocks}

    def _of(self, table: TargetTable) -> NDArray[np.intp]:
        """Return the slot of each target, intp [targets]; the unused slot for targets that hold nothing."""
        known = self._slot_tables.get(table.model)
        if known is None or known[0] is not table or known[1] != self.version:
            if len(self._slot_tables) >= _MAX_MODELS:
                self._slot_tables.clear()
            slots = (self._slots.get(target.key) for target in table.targets)
            known = (
                table,
                self.version,
                np.array([NO_RANK if slot is None else slot.number for slot in slots], np.intp),
            )
            self._slot_tables[table.model] = known
        return known[2]

    def _leading(self, prompt: Reachable, slots: NDArray[np.intp]) -> Overlap:
        """Return the leading prompt blocks without a gap held by the rank of each of some slots.

        Reads only a few blocks more of the prompt than some rank holds. A rank that holds the last block of a
        stretch holds all of it, unless it may have gaps.
        """
        library = kernels.compiled()
        if (
            library is None
            or not isinstance(prompt, BlockHashChain)
            or isinstance(self._masks, MasksInPython)
        ):
            look_up = self._look_up if self._old else self._masks.get
            depths = self._spread(ends_of(prompt, look_up, self._live, self._gappy)).take(slots)
            return Overlap(depths, int(depths.max(initial=0)))
        depths = np.empty(len(slots), np.int64)
        hashes, longest = library.walk(
            prompt.prompt,
            prompt.size,
            prompt.seed,
            prompt.hashes,
            self._masks,
            self._old,
            self._live,
            self._gappy,
            _WIDEST_STEP,
            self.slot_count,
            len(slots),
            slots,
            depths,
        )
        prompt.hashes = array("Q", hashes)
        return Overlap(depths, longest)

    def _look_up(self, block: int) -> int | None:
        return self._masks.get(block) or self._old.get(block)

    def _spread(self, ends: list[tuple[int, int]]) -> NDArray[np.int64]:
        """Convert pairs of (depth, mask of the ranks whose blocks end there) to the depth of each slot, int64
        [slots].
        """
        depths = np.zeros(self.slot_count, np.int64)
        for depth, mask in ends:
            # numpy's overhead pays from a few bits on; most prompts end at one or two ranks.
            if depth and mask.bit_count() > _FEW_BITS:
                depths[self._bits(mask)] = depth
            elif depth:
                while mask:
                    highest = mask.bit_length() - 1
                    depths[highest] = depth
                    mask ^= 1 << highest
        return depths

    def _bits(self, mask: int) -> NDArray[np.intp]:
        """Return the slots of a mask, ascending. Cached, since many prompts begin alike."""
        found = self._unpacked.get(mask)
        if found is None:
            raw = np.frombuffer(mask.to_bytes(self.slot_count + 7 >> 3, "little"), np.uint8)
            found = np.flatnonzero(np.unpackbits(raw, bitorder="little"))
            if len(self._unpacked) >= _MAX_UNPACKED:
                self._unpacked.clear()
            self._unpacked[mask] = found
        return found

    def sweep(self, blocks: int) -> bool:
        """Check at most `blocks` blocks for stale bits. Return True if more work remains."""
        if not self._old and not self._begin():
            return False
        for block in self._old.sweep(blocks, self._live, self._masks, self._shared):
            self._children.pop(block, None)
        if len(self._shared) > _MAX_MASKS:
            self._shared.clear()
        if not self._old:
            self._old = self._no_masks()  # an emptied table keeps its memory
            self._free += self._swept
            self._swept = []
        return True

    def _begin(self) -> bool:
        """Start a sweep once it is worthwhile, so that it costs a few steps per stale entry."""
        if self._stale_entries < max(_FEW_STALE, len(self._masks) // 4) and len(self._stale) < max(
            _FEW_SLOTS, len(self._slots)
        ):
            return False
        self._swept, self._stale, self._stale_entries = self._stale, [], 0
        self._old, self._masks, self._shared = self._masks, self._no_masks(), {}
        return True

    def _assign_slot(self, rank: RankKey) -> _Slot:
        if not self._free:
            self._free.append(self.slot_count)
            self.slot_count += 1
        slot = self._slots[rank] = _Slot(self._free.pop())
        self._live |= slot.bit
        self.version += 1
        return slot


def ends_of(
    prompt: Reachable, look_up: Callable[[int], int | None], held: int, gappy: int
) -> list[tuple[int, int]]:
    """Return the ends of a prompt's prefixes: pairs of a depth and the mask of the ranks, of those in `held`,
    whose leading blocks end there. Ranks in `gappy` may hold a block without its parent.
    """
    at, total, step = 0, len(prompt), 1
    ends: list[tuple[int, int]] = []
    while at < total and held:
        reached = min(total, at + step)
        chained = prompt.reach(reached)
        step = min(2 * step, _WIDEST_STEP)
        while at < len(chained) and held:
            stop = min(len(chained), at + _WIDEST_STEP)
            if held & gappy:
                held = _walk(map(look_up, chained[at:stop]), at, held, ends)
            else:
                # A sequence hash stands for the whole prefix, so the last block of a stretch speaks for the
                # others.
                still = held & (look_up(chained[stop - 1]) or 0)
                _halve(look_up, chained, at, stop, held, still, ends)
                held = still
            at = stop
    if held:
        ends.append((total, held))
    return ends


def _halve(
    look_up: Callable[[int], int | None],
    chained: Sequence[int],
    at: int,
    stop: int,
    held: int,
    still: int,
    ends: list[tuple[int, int]],
) -> None:
    """Append the ends of the ranks that are in `held` before block `at` and no longer in `still` after block
    `stop` - 1, by halving the stretch. No rank has gaps.
    """
    if held == still:
        return
    if stop == at + 1:
        ends.append((at, held ^ still))
        return
    middle = (at + stop) // 2
    between = held & (look_up(chained[middle - 1]) or 0)
    _halve(look_up, chained, at, middle, held, between, ends)
    _halve(look_up, chained, middle, stop, between, still, ends)


def _walk(masks: Iterable[int | None], at: int, held: int, ends: list[tuple[int, int]]) -> int:
    """Find the ranks in `held` that hold every block of a stretch beginning at a depth, by the blocks' masks.
    The ends of all others are added to `ends`.
    """
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
