"""Masks of the ranks that hold each block, by the block's sequence hash. Pure.

`kernels.BlockMasks` is the compiled form, `MasksInPython` the same in Python: a dictionary.
"""

from collections.abc import Callable, Sequence
from typing import cast

from router import kernels
from router.kernels import BlockMasks


class MasksInPython(dict[int, int]):
    """Python form of `kernels.BlockMasks`."""

    def grant(
        self, blocks: Sequence[int], bit: int, old: "MasksInPython", live: int, shared: dict[int, int]
    ) -> int:
        """Add a rank's bit to the masks of blocks. Return how many lacked it."""
        added = 0
        for block in blocks:
            mask = self.get(block)
            if mask is None:
                if not old:
                    self[block] = bit
                    added += 1
                    continue
                # Writing a block sweeps it: it moves to the new masks without its stale bits.
                mask = old.pop(block, 0) & live
            elif mask & bit:
                continue
            added += not mask & bit
            # Integers of many bits are large, and most blocks of a prompt have the same holders: share them.
            grown = mask | bit
            self[block] = shared.setdefault(grown, grown)
        return added

    def withdraw(
        self, blocks: Sequence[int], bit: int, old: "MasksInPython", shared: dict[int, int]
    ) -> list[int]:
        """Remove a rank's bit from the masks of blocks. Return those that had it."""
        lost: list[int] = []
        for block in blocks:
            masks = old if old and block in old else self
            mask = masks.get(block, 0)
            if mask == bit:
                del masks[block]
            elif mask & bit:
                masks[block] = shared.setdefault(mask ^ bit, mask ^ bit)
            else:
                continue
            lost.append(block)
        return lost

    def sweep(self, count: int, live: int, into: "MasksInPython", shared: dict[int, int]) -> list[int]:
        """Move at most `count` blocks to other masks, with their valid bits. Return those without any: they
        are removed.
        """
        gone: list[int] = []
        for _ in range(min(count, len(self))):
            block, mask = self.popitem()
            mask &= live
            if mask:
                into[block] = shared.setdefault(mask, mask)
            else:
                gone.append(block)
        return gone


def masks_form() -> Callable[[], BlockMasks]:
    """Return the class of empty masks: the compiled form, or else the Python form."""
    library = kernels.compiled()
    if library is None:
        return cast("Callable[[], BlockMasks]", MasksInPython)
    form = library.BlockMasks
    return lambda: form(kernels.SALT)
