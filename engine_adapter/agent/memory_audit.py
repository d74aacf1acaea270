"""Compare the experts that a rank serves with their checksums, one after another, continuously.

Every process that has the metadata of NIXL-registered memory can write to that memory. NIXL's UCX backend
maps memory without the `ucp_mem_map` field that would make it read-only. Within a machine, the kernel's
cross-memory attach needs no permission from UCX at all. Every lease contains the metadata. Copies are
verified when they arrive. This audit verifies experts while they are served.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from engine_adapter.engine import EngineFailed, ExpertMemory
from engine_adapter.handover.cell_table import CellTable, ResidentCell
from engine_adapter.transfer.checksums import checksums, compare
from engine_adapter.transfer.parts import CellFormat

log = logging.getLogger(__name__)

Sums = tuple[int, ...]
Aside = Callable[..., Awaitable[Sums]]
"""Call a function with arguments in another thread, at lower priority than the computing threads."""


def resident_checksums(memory: ExpertMemory, form: CellFormat, resident: ResidentCell) -> Sums:
    """Compute the checksums of a served cell, [tensors, parts] row by row (`CellTable.seal`)."""
    cell, content = memory.cell(resident.cell), resident.content
    return checksums(cell, form, sharded=content.sharded, pieces=resident.pieces)


class MemoryAudit:
    """Memory audit of one rank. seconds: period in which each served expert is compared once. `run` ends at
    the first mismatch."""

    def __init__(self, cell_table: CellTable, memory: ExpertMemory, seconds: float, aside: Aside) -> None:
        self.compared = 0
        self._cell_table = cell_table
        self._memory = memory
        self._form = CellFormat.of(memory)
        self._seconds = seconds
        self._aside = aside

    async def run(self) -> None:
        """Compare until cancelled. EngineFailed names the first expert whose memory has changed. No output of
        this rank can be trusted then."""
        while True:
            residents = tuple(self._cell_table.residents())
            for resident in residents:
                await asyncio.sleep(self._seconds / len(residents))
                await self._compare(resident)
            if not residents:
                await asyncio.sleep(self._seconds)

    async def _compare(self, resident: ResidentCell) -> None:
        expected = self._cell_table.sealed(resident)
        if expected is None:
            return
        found = await self._aside(resident_checksums, self._memory, self._form, resident)
        self.compared += 1
        # The expert may have moved during the comparison, and the cell may have another use.
        if found == expected or self._cell_table.sealed(resident) != expected:
            return
        damaged = ", ".join(compare(self._form.tensors, expected, found, self._form.parts))
        text = (
            f"the memory of {resident.content} (cell {resident.cell}: {damaged}) was changed while it was"
            " served"
        )
        log.error("ALARM: %s; the engine ends, and restarts with freshly loaded weights", text)
        raise EngineFailed(text)
