"""Which expert sits in which slot of which rank, per layer; invariants are checked at birth."""

from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.experts import ExpertId

EMPTY = -1
"""Value of a slot that holds no expert."""
MOST_CELLS = 1 << 27
"""layers x ranks x experts of the largest placement that is taken seriously: what arrives from elsewhere must not exhaust memory."""


class PlacementRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A placement as it travels: `slots` is int16 little endian, [layers, ranks * slots_per_rank], row-major."""

    epoch: int
    experts: int
    layers: int
    ranks: int
    slots_per_rank: int
    slots: bytes


class Placement:
    """One epoch's placement of an engine. Immutable.

    `expert_of_slot` is int16 [layers, ranks * slots_per_rank], rank-major: slot `s` lives on rank
    `s // slots_per_rank`; -1 marks an empty slot.

    Invariants (ValueError names the offender): every expert of every layer has at least one replica, no rank holds two
    replicas of one expert in a layer, and ids lie in range.
    """

    def __init__(self, expert_of_slot: NDArray[Any], *, experts: int, ranks: int, epoch: int = 0) -> None:
        table = np.ascontiguousarray(expert_of_slot, dtype=np.int16)
        if table.ndim != 2 or table.shape[0] < 1 or ranks < 1 or table.shape[1] == 0 or table.shape[1] % ranks:
            raise ValueError(f"placement: slots have shape {table.shape}; expected [layers, ranks * slots_per_rank] with {ranks} ranks")
        if epoch < 0:
            raise ValueError(f"placement: epoch must not be negative, got {epoch}")
        table.flags.writeable = False
        self.expert_of_slot: NDArray[np.int16] = table
        self.experts = experts
        self.ranks = ranks
        self.epoch = epoch
        self._check()

    def _check(self) -> None:
        table = self.expert_of_slot
        if not 1 <= self.experts <= table.shape[1]:
            raise ValueError(f"placement: {self.experts} experts do not fit into the {table.shape[1]} slots of a layer")
        if self.layers * self.ranks * self.experts > MOST_CELLS:
            raise ValueError(f"placement: {self.layers} layers x {self.ranks} ranks x {self.experts} experts are more than {MOST_CELLS} cells")
        outside = np.argwhere((table < EMPTY) | (table >= self.experts))
        if len(outside):
            layer, slot = outside[0]
            raise ValueError(f"placement: layer {layer} slot {slot} names expert {table[layer, slot]}; ids run from 0 to {self.experts - 1}, {EMPTY} is empty")
        copies = self.replicas_on_rank
        twice = np.argwhere(copies > 1)
        if len(twice):
            layer, rank, expert = twice[0]
            raise ValueError(f"placement: rank {rank} holds expert {ExpertId(int(layer), int(expert))} more than once")
        missing = np.argwhere(copies.sum(axis=1) == 0)
        if len(missing):
            layer, expert = missing[0]
            raise ValueError(f"placement: expert {ExpertId(int(layer), int(expert))} has no replica")

    @property
    def layers(self) -> int:
        return int(self.expert_of_slot.shape[0])

    @property
    def slots_per_rank(self) -> int:
        return int(self.expert_of_slot.shape[1]) // self.ranks

    @cached_property
    def replicas_on_rank(self) -> NDArray[np.int32]:
        """int32 [layers, ranks, experts]: how many slots of the rank hold the expert (0 or 1)."""
        counts = np.zeros((self.layers, self.ranks, self.experts), np.int32)
        layer, slot = np.nonzero(self.expert_of_slot != EMPTY)
        np.add.at(counts, (layer, slot // self.slots_per_rank, self.expert_of_slot[layer, slot]), 1)
        counts.flags.writeable = False
        return counts

    @cached_property
    def share(self) -> NDArray[np.float64]:
        """float64 [layers, ranks, experts]: each rank's share of an expert's tokens when replicas split evenly; sums to 1 over ranks."""
        copies = self.replicas_on_rank
        share: NDArray[np.float64] = np.divide(copies, copies.sum(axis=1, keepdims=True), dtype=np.float64)
        share.flags.writeable = False
        return share

    def on_rank(self, rank: int) -> NDArray[np.int16]:
        """int16 [layers, slots_per_rank]: the experts in a rank's slots."""
        return self.expert_of_slot[:, rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def holders(self, expert: ExpertId) -> list[int]:
        """Ranks that hold a replica of the expert, ascending."""
        return [int(rank) for rank in np.nonzero(self.replicas_on_rank[expert.layer, :, expert.expert])[0]]

    def record(self) -> PlacementRecord:
        """The placement as it travels on the bus."""
        return PlacementRecord(
            epoch=self.epoch,
            experts=self.experts,
            layers=self.layers,
            ranks=self.ranks,
            slots_per_rank=self.slots_per_rank,
            slots=self.expert_of_slot.astype("<i2").tobytes(),
        )

    @classmethod
    def from_record(cls, record: PlacementRecord) -> "Placement":
        """Rebuild from the wire form; ValueError when the bytes do not fit the stated shape or break an invariant."""
        width = record.ranks * record.slots_per_rank
        if len(record.slots) != 2 * record.layers * width:
            raise ValueError(f"placement: {len(record.slots)} bytes of slots, expected {2 * record.layers * width} for [{record.layers}, {width}] int16")
        table = np.frombuffer(record.slots, "<i2").reshape(record.layers, width)
        return cls(table, experts=record.experts, ranks=record.ranks, epoch=record.epoch)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        same_head = (self.experts, self.ranks, self.epoch) == (other.experts, other.ranks, other.epoch)
        return same_head and np.array_equal(self.expert_of_slot, other.expert_of_slot)

    def __hash__(self) -> int:
        return hash((self.experts, self.ranks, self.epoch, self.expert_of_slot.tobytes()))

    def __repr__(self) -> str:
        return f"<Placement epoch {self.epoch}: {self.layers} layers x {self.experts} experts on {self.ranks} ranks, {self.slots_per_rank} slots each>"


def linear(*, layers: int, experts: int, ranks: int, slots_per_rank: int | None = None) -> Placement:
    """Epoch 0: contiguous blocks of experts, rank 0 first; the first `experts % ranks` ranks take one more.

    `slots_per_rank` defaults to the least that fits; surplus slots stay empty. ValueError when it is too small.
    """
    least = -(-experts // ranks)
    slots = least if slots_per_rank is None else slots_per_rank
    if slots < least:
        raise ValueError(f"placement: {experts} experts over {ranks} ranks need {least} slots per rank, not {slots}")
    row = np.full((ranks, slots), EMPTY, np.int16)
    for rank, block in enumerate(np.array_split(np.arange(experts), ranks)):
        row[rank, : len(block)] = block
    return Placement(np.tile(row.reshape(1, -1), (layers, 1)), experts=experts, ranks=ranks)
