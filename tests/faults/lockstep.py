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

from engine_adapter.engine import EngineFailed
from fleet.handover import disagreement, flips
from fleet.placement import Placement

LOOK_SECONDS = 0.01
_STEP, _READY, _DIGEST = 0, 1, 2
_FIELDS = 3


def headers(file: Path, ranks: int) -> NDArray[np.int64]:
    """int64 [2, ranks, 3]: step, epoch ready and the digest of its placement, of even steps and of odd ones.
    The file is made by whoever comes first."""
    size = 2 * ranks * _FIELDS * 8
    with file.open("a+b") as opened:
        opened.truncate(size)
        return np.frombuffer(mmap.mmap(opened.fileno(), size), np.int64).reshape(2, ranks, _FIELDS)


class Steps:
    """One rank's steps. `served` and `ready` are epochs; `flipped` is set anew whenever `served` grows."""

    def __init__(self, file: Path, rank: int, ranks: int, placement: Placement) -> None:
        self.served = self.ready = placement.epoch
        self.digest = placement.digest
        """of the placement that is ready"""
        self.taken = 0
        self.flips: list[tuple[int, int]] = []
        """(step, epoch) of each flip so far"""
        self._rank = rank
        self._headers = headers(file, ranks)
        self._flipped = asyncio.Condition()

    async def run(self) -> None:
        """Step for ever. EngineFailed when ranks mean different placements by one epoch."""
        while True:
            self.taken += 1
            row = self._headers[self.taken % 2]
            row[self._rank, _READY] = self.ready
            row[self._rank, _DIGEST] = self.digest
            row[self._rank, _STEP] = self.taken
            while (row[:, _STEP] < self.taken).any():  # noqa: ASYNC110  # other processes have no event to wait for
                await asyncio.sleep(LOOK_SECONDS)
            ready = tuple(row[:, _READY].tolist())
            pair = disagreement(ready, tuple(row[:, _DIGEST].tolist()))
            if pair is not None:
                raise EngineFailed(f"step {self.taken}: ranks {pair} have different placements of one epoch")
            if flips(self.served, ready):
                self.served += 1
                self.flips.append((self.taken, self.served))
                async with self._flipped:
                    self._flipped.notify_all()

    async def adopted(self, placement: Placement) -> None:
        """Be ready for a placement, and return once its epoch is served."""
        self.ready, self.digest = placement.epoch, placement.digest
        async with self._flipped:
            await self._flipped.wait_for(lambda: self.served >= placement.epoch)
