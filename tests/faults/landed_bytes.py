"""Bytes that land in a rank's memory, counted from outside while they do: a fault comes at a random one."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tests.faults.expert_contents import CELLS, POISON, memory_of
from tests.faults.fleet_fixture import Engine, until

EACH = 128
"""one of so many bytes is looked at"""
OFFSET = 2
"""of the first: of a bfloat16 weight that is held as float32, bytes 0 and 1 are 0"""
LOOK_SECONDS = 0.002


class LandedBytes:
    """Of one rank, from now on. memory: uint8, that of its cells itself."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._samples = memory[..., OFFSET::EACH]
        self._known = self._samples.copy()
        self._changes = 0

    @property
    def count(self) -> int:
        """So far; too few by what happens to be as it was."""
        now = self._samples.copy()
        self._changes += int(np.count_nonzero(now != self._known))
        self._known = now
        return self._changes * EACH

    async def reach(self, byte: int, ended: Callable[[], object], seconds: float) -> bool:
        """Wait until more bytes than that have landed. False: what brings them has ended before."""

        def there() -> str:
            return "landed" if self.count > byte else "ended" if ended() else ""

        what = f"more than {byte} bytes land"
        return await until(there, what, seconds, every=LOOK_SECONDS) == "landed"


async def landing_in(engine: Engine, rank: int) -> LandedBytes:
    """Of a rank that is at rest. What is free is made to hold nothing first, so that no byte lies where it
    shall land."""
    process = engine.ranks[rank]
    standing = await process.ask()
    with memory_of(process.pid, standing["descriptor"], standing["cell_bytes"]) as memory:
        memory[np.setdiff1d(np.arange(CELLS), standing["cells"])] = POISON
    return LandedBytes(memory)
