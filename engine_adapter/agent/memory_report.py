"""Memory that one rank uses now: its expert cells by use, what its engine states, and the resident size of
its process."""

from collections.abc import Sequence

import msgspec
import numpy as np

from engine_adapter.engine import ExpertMemory
from engine_adapter.handover.cell_table import CellTable
from engine_adapter.reporting.rank_context import RankContext
from engine_adapter.resident_memory import resident_memory
from engine_adapter.transfer.port import Transfer
from fleet.handover import Cell
from fleet.placement import EMPTY, Placement
from fleet.requests.engines import MemoryDescribed


def memory_described(
    context: RankContext,
    memory: ExpertMemory,
    cell_table: CellTable,
    placement: Placement,
    transfers: Sequence[Transfer],
) -> MemoryDescribed:
    """Report the memory of a rank. placement: the one that `cell_table` serves."""
    found, stated = resident_memory(), context.about.memory
    # Where cells have a file, so has the KV pool.
    own = memory.cells * memory.cell_bytes + (0 if stated is None else stated.kv_pool)
    described = MemoryDescribed(
        worker_id=context.worker_id,
        rank=context.rank,
        cell_bytes=memory.cell_bytes,
        cells=cells_by_use(cell_table, placement),
        resident=found.total,
        resident_shared=found.shared,
        resident_foreign=max(found.shared - (own if memory.descriptor >= 0 else 0), 0),
        resident_files=found.files,
    )
    if stated is None:
        return described
    opened = sum(transfer.opened_bytes for transfer in transfers)
    stated = stated._replace(communicators=stated.communicators + opened)
    return msgspec.structs.replace(described, **stated._asdict())


def cells_by_use(cell_table: CellTable, placement: Placement) -> dict[str, int]:
    """Count the cells by use (`MemoryDescribed.cells`)."""
    held: list[int] = np.count_nonzero(cell_table.held != EMPTY, axis=1).tolist()
    sharded = sum(held[layer] for layer in placement.sharded)
    return {
        "whole": sum(held) - sharded,
        "sharded": sharded,
        "empty": cell_table.held.size - sum(held),
        **{use.value: cell_table.count(use) for use in Cell if use is not Cell.LIVE},
    }
