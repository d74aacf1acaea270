"""Memory of ranks, as they state it on request."""

import asyncio
from dataclasses import dataclass

from bus import Bus, BusError
from bus.protocol.subjects import Subjects
from fleet.handover import Cell
from fleet.requests.engines import DescribeMemory, MemoryDescribed

ASK_SECONDS = 5.0
"""Time limit for the answer of a rank."""
STAGING = (Cell.PULLING, Cell.VERIFYING, Cell.STAGED, Cell.DRAINING, Cell.QUARANTINED)
"""Uses of cells during and after a handover, beside those in service"""


@dataclass(frozen=True, slots=True)
class MemoryItems:
    """Memory of one rank in bytes, itemised. Items that the rank does not state are None."""

    described: MemoryDescribed

    @property
    def items(self) -> dict[str, int | None]:
        """Items by name. Together they are the resident size, if all of them are known."""
        return {**self._accounted, "other": self.other}

    @property
    def _accounted(self) -> dict[str, int | None]:
        described = self.described
        return {
            "whole_experts": self._cells("whole"),
            "sharded_experts": self._cells("sharded"),
            "empty_slots": self._cells("empty"),
            "spare_cells": self._cells(Cell.FREE),
            "staging": self._cells(*STAGING),
            "attention": described.attention,
            "other_weights": described.other_weights,
            "kv_pool": described.kv_pool,
            "communicators": described.communicators,
            "shared_with_ranks": described.resident_foreign if self.alone else None,
            "libraries": described.resident_files if self.alone else None,
            "runtime": described.runtime,
        }

    @property
    def other(self) -> int | None:
        """Rest of the resident size: buffers, and freed memory that is kept for reuse. Below 0 if part of the
        items is not resident. None: unknown."""
        known = [size for size in self._accounted.values() if size is not None]
        complete = len(known) == len(self._accounted) and self.resident is not None
        return self.described.resident - sum(known) if complete else None

    @property
    def resident(self) -> int | None:
        """Resident size of the rank's process, other ranks in it included. None: unknown."""
        return self.described.resident or None

    @property
    def alone(self) -> bool:
        """True if no other rank is in the process, and its resident size is known."""
        return self.described.ranks_in_process == 1 and bool(self.described.resident)

    def _cells(self, *uses: str) -> int:
        return self.described.cell_bytes * sum(self.described.cells.get(use, 0) for use in uses)


async def memory_of_ranks(
    bus: Bus, subjects: Subjects, engine: str, worker_id: int, ranks: int
) -> list[MemoryItems | str]:
    """Return the memory of each rank, or the reason why it is not known."""
    return await asyncio.gather(
        *(_memory_of(bus, subjects, engine, worker_id, rank) for rank in range(ranks))
    )


async def _memory_of(
    bus: Bus, subjects: Subjects, engine: str, worker_id: int, rank: int
) -> MemoryItems | str:
    request = DescribeMemory(worker_id=worker_id, rank=rank)
    try:
        answer = await bus.request(subjects.handover(engine, worker_id, rank), request, ASK_SECONDS)
    except BusError as error:
        return str(error)
    if not isinstance(answer, MemoryDescribed) or (answer.worker_id, answer.rank) != (worker_id, rank):
        return f"it answered with {type(answer).__name__}; is it of another version of Roost?"
    return MemoryItems(answer)
