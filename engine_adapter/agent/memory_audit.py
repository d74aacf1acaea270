"""Compares the experts that a rank serves with their checksums, one after another, all day.

Memory that NIXL registers can be written to by every process that has its metadata: its UCX backend maps memory without the field of
`ucp_mem_map` that would make it readable only, and within a machine the kernel's cross-memory attach asks for no permission of UCX at all.
Metadata goes out with every lease. Checksums are compared when an expert is copied; this compares them where experts are served.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from engine_adapter.engine import EngineFailed, ExpertMemory
from engine_adapter.handover.cell_table import CellTable, ResidentCell
from engine_adapter.transfer.checksums import checksums, compare

log = logging.getLogger(__name__)

Sums = tuple[int, ...]
Aside = Callable[..., Awaitable[Sums]]
"""Calls a function with arguments in another thread, which yields to those that compute."""


class MemoryAudit:
    """Of one rank. seconds: in which each expert that is served is compared once. `run` ends when one is not what it was."""

    def __init__(self, residency: CellTable, memory: ExpertMemory, seconds: float, aside: Aside) -> None:
        self.compared = 0
        self._residency = residency
        self._memory = memory
        self._seconds = seconds
        self._aside = aside

    async def run(self) -> None:
        """Compare until cancelled. EngineFailed names the first expert in whose memory something else lies: no answer of this rank can be trusted."""
        while True:
            residents = tuple(self._residency.residents())
            for resident in residents:
                await asyncio.sleep(self._seconds / len(residents))
                await self._compare(resident)
            if not residents:
                await asyncio.sleep(self._seconds)

    async def _compare(self, resident: ResidentCell) -> None:
        promised = self._residency.sealed(resident)
        if promised is None:
            return
        tensors = self._memory.tensors
        found = await self._aside(checksums, self._memory.cell(resident.cell), tensors)
        self.compared += 1
        if found == promised or self._residency.sealed(resident) != promised:  # it may have left meanwhile, and its cell be in another use
            return
        damaged = ", ".join(compare(tensors, promised, found))
        said = f"the memory of expert {resident.layer}/{resident.expert} (cell {resident.cell}: {damaged}) was changed while it was served"
        log.error("ALARM: %s; the engine ends, and is started again with weights that are loaded anew", said)
        raise EngineFailed(said)
