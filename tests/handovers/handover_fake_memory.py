"""Ranks for `handover_parties`: the real protocol and cell table, over a memory in which a cell is a number,
the checksum of its expert.
"""

from dataclasses import dataclass

import numpy as np

from engine_adapter.config import TransferConfig
from engine_adapter.handover.cell_table import CellTable
from engine_adapter.handover.inbound_copies import RequestLease
from engine_adapter.handover.rank_protocol import Prepare, RankProtocol
from fleet.placement import EMPTY, Placement
from fleet.requests.handovers import MemoryAddress

RANKS, EXPERTS, SLOTS = 3, 5, 3
TRANSFER = TransferConfig(retries=1, quarantine_cells=2)
STAGE_SECONDS, LEASE_SECONDS = 8.0, 5.0
MEMORY = MemoryAddress(cells=9, cell_bytes=64, layout="x", base=4096)
TORN = -1
FIRST = Placement(np.array([[0, 1, 2, 2, 3, EMPTY, 4, 0, 1]]), experts=EXPERTS, ranks=RANKS)


class Unsafe(AssertionError):
    """An invariant is violated. The text gives the invariant and the events."""


def checksum(expert: int) -> int:
    return 100 + expert


@dataclass(slots=True, eq=False)
class Flow:
    """A read that is physically in progress."""

    reader: "Seat"
    source: "Seat"
    batch: int
    pulls: tuple[tuple[int, int], ...]
    began_with: tuple[int, ...]
    """contents of the source's cells at the start"""
    late: bool = False


class Seat:
    """One rank of one incarnation: its protocol state, its memory, and the placement that its steps serve."""

    def __init__(self, life: int, rank: int, placement: Placement) -> None:
        self.life, self.rank, self.alive = life, rank, True
        held = placement.on_rank(rank)
        self.cells = np.arange(held.size, dtype=np.int32).reshape(held.shape)
        self.memory = [checksum(expert) if expert != EMPTY else 0 for expert in held.flat] + [0] * SLOTS
        self.cell_table = CellTable(held, self.cells, len(self.memory))
        for resident in self.cell_table.residents():
            self.cell_table.seal(resident, (checksum(resident.expert),))
        self.protocol = RankProtocol(
            worker_id=life,
            rank=rank,
            placement=placement,
            cell_table=self.cell_table,
            tensors=1,
            config=TRANSFER,
        )
        self.served = placement
        """the placement that its steps serve"""
        self.prepared: Prepare | None = None
        self.ready: Prepare | None = None
        self.leases: dict[int, RequestLease] = {}
        """leases to renew, by batch"""

    @property
    def headers(self) -> tuple[int, int]:
        """Return the epoch served and the highest ready epoch, as in its step headers."""
        return self.served.epoch, self.served.epoch if self.ready is None else self.ready.placement.epoch
