"""Ranks for `handover_parties`: the real protocol and cell table, over a memory in which each piece of a cell
is a number, the checksum of its part of an expert.
"""

from dataclasses import dataclass

import numpy as np

from engine_adapter.config import TransferConfig
from engine_adapter.handover.cell_table import CellTable
from engine_adapter.handover.inbound_copies import CellRead, RequestLease
from engine_adapter.handover.rank_protocol import Prepare, RankProtocol
from fleet.placement import EMPTY, Placement
from fleet.requests.handovers import MemoryAddress
from fleet.sharding import ALL_PARTS, contents

RANKS, EXPERTS, SLOTS = 3, 5, 3
TRANSFER = TransferConfig(retries=1, quarantine_cells=2)
STAGE_SECONDS, LEASE_SECONDS = 8.0, 5.0
MEMORY = MemoryAddress(cells=6, cell_bytes=192, layout="x", parts=RANKS, base=4096)
TORN = -1
FIRST = Placement(np.array([[0, 1, 2, 2, 3, EMPTY, 4, 0, 1]]), experts=EXPERTS, ranks=RANKS)


class Unsafe(AssertionError):
    """An invariant is violated. The text gives the invariant and the events."""


def checksum(expert: int, part: int) -> int:
    return 100 + 10 * expert + part


def due(placement: Placement, rank: int) -> list[tuple[int, ...]]:
    """Return the pieces that each slot's cell shall hold; 0 where it may hold anything."""
    held, first = contents(placement, rank)[0].tolist(), range(RANKS)
    if placement.sharded:
        experts = [[number * RANKS + piece for piece in first] for number in held]
        return [
            tuple(checksum(expert, rank) if number != EMPTY and expert < EXPERTS else 0 for expert in group)
            for number, group in zip(held, experts, strict=True)
        ]
    return [tuple(checksum(expert, part) if expert != EMPTY else 0 for part in first) for expert in held]


@dataclass(slots=True, eq=False)
class Flow:
    """A read that is physically in progress."""

    reader: "Seat"
    source: "Seat"
    batch: int
    reads: tuple[CellRead, ...]
    began_with: tuple[tuple[int, ...], ...]
    """pieces that were read, as they were at the start"""
    late: bool = False

    @property
    def is_local(self) -> bool:
        """True for a copy within the rank's memory, which is neither stopped nor overdue."""
        return self.reader is self.source


class Seat:
    """One rank of one incarnation: its protocol state, its memory, and the placement that its steps serve."""

    def __init__(self, life: int, rank: int, placement: Placement) -> None:
        self.life, self.rank, self.alive = life, rank, True
        held = placement.on_rank(rank)
        self.cells = np.arange(held.size, dtype=np.int32).reshape(held.shape)
        self.memory = [list(pieces) for pieces in due(placement, rank)] + [[0] * RANKS for _ in range(SLOTS)]
        self.cell_table = CellTable(placement, rank, self.cells, len(self.memory), RANKS)
        for resident in self.cell_table.residents():
            self.cell_table.seal(resident, tuple(self.memory[resident.cell]))
        self.protocol = RankProtocol(
            worker_id=life,
            rank=rank,
            placement=placement,
            cell_table=self.cell_table,
            tensors=1,
            config=TRANSFER,
            tp_refusal="",
        )
        self.served = placement
        """the placement that its steps serve"""
        self.prepared: Prepare | None = None
        self.ready: Prepare | None = None
        self.leases: dict[int, RequestLease] = {}
        """leases to renew, by batch"""

    def content(self, cell: int, piece: int) -> tuple[int, ...]:
        """Return a piece of a cell, or all."""
        return tuple(self.memory[cell]) if piece == ALL_PARTS else (self.memory[cell][piece],)

    def write(self, cell: int, piece: int, content: tuple[int, ...]) -> None:
        self.memory[cell][slice(None) if piece == ALL_PARTS else slice(piece, piece + 1)] = content

    @property
    def headers(self) -> tuple[int, int]:
        """Return the epoch served and the highest ready epoch, as in its step headers."""
        return self.served.epoch, self.served.epoch if self.ready is None else self.ready.placement.epoch
