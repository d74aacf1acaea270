"""Steps of ranks without a model: each begins with a header of every rank, as in a real engine, and nothing
is computed in it.

The headers are in a file that all ranks map: two rows per rank, used in turn, so that what a rank says for a
step stays readable until all have read it. A rank that is stopped or dead stops the others' steps, as it
would in an engine.
"""

import asyncio
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet.handover import flips

LOOK_SECONDS = 0.01
_STEP, _READY = 0, 1


def headers(file: Path, ranks: int) -> NDArray[np.int64]:
    """int64 [2, ranks, 2]: step and epoch ready, of even steps and of odd ones. The file is made by whoever
    comes first."""
    size = 2 * ranks * 2 * 8
    with file.open("a+b") as opened:
        opened.truncate(size)
        return np.frombuffer(mmap.mmap(opened.fileno(), size), np.int64).reshape(2, ranks, 2)


class Steps:
    """One rank's steps. `served` and `ready` are epochs; `flipped` is set anew whenever `served` grows."""

    def __init__(self, file: Path, rank: int, ranks: int, epoch: int) -> None:
        self.served = self.ready = epoch
        self.taken = 0
        self.flips: list[tuple[int, int]] = []
        """(step, epoch) of each flip so far"""
        self._rank = rank
        self._headers = headers(file, ranks)
        self._flipped = asyncio.Condition()

    async def run(self) -> None:
        """Step for ever."""
        while True:
            self.taken += 1
            row = self._headers[self.taken % 2]
            row[self._rank, _READY] = self.ready
            row[self._rank, _STEP] = self.taken
            while (row[:, _STEP] < self.taken).any():  # noqa: ASYNC110  # other processes have no event to wait for
                await asyncio.sleep(LOOK_SECONDS)
            if flips(self.served, tuple(row[:, _READY].tolist())):
                self.served += 1
                self.flips.append((self.taken, self.served))
                async with self._flipped:
                    self._flipped.notify_all()

    async def adopted(self, epoch: int) -> None:
        """Be ready for an epoch, and return once it is served."""
        self.ready = epoch
        async with self._flipped:
            await self._flipped.wait_for(lambda: self.served >= epoch)
