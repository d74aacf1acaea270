"""Memory of a GPU that can serve several layouts, item by item, and the KV tokens that remain. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from fleet.layout_times import LayoutName
from migration.hardware.machines import Machine
from migration.hardware.models import ConsideredModel
from migration.hardware.sizes import (
    attention_bytes,
    dense_bytes,
    expert_sizes,
    kv_sizes,
    vocabulary_bytes,
)

MEMORY_FRACTION = 0.85
"""Share of a GPU's memory for weights and KV, as in the Moebius paper; the rest is for activations, graphs
and the driver."""
COMMUNICATORS = 0.411e9
"""Bytes of NCCL communicators of one layout, 4 or 8 GPUs (NVIDIA aiconfigurator-core 0.12.0)."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One item of a GPU's memory."""

    name: str
    bytes: float | None
    """None: no published figure"""
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """Memory of one GPU of an engine that can change between EP, experts-tp and TP."""

    lines: tuple[MemoryLine, ...]
    budget: float
    """bytes for all known items together"""
    kv_pool: float
    """bytes; 0 or less: the model does not fit"""

    @property
    def for_switching(self) -> float:
        """Bytes of an engine that can switch beyond those of one in EP alone."""
        return sum(line.bytes or 0.0 for line in self.lines if line.note == _FOR_SWITCHING)


_FOR_SWITCHING = "only to switch"


def memory_table(model: ConsideredModel, machine: Machine, ranks: int, spare_layers: int = 1) -> MemoryTable:
    """Return the memory of a GPU. spare_layers: as in `engine.spare_layers`."""
    lines = tuple(_lines(model, ranks, spare_layers))
    budget = MEMORY_FRACTION * machine.memory
    return MemoryTable(lines, budget, budget - sum(line.bytes or 0.0 for line in lines))


def _lines(model: ConsideredModel, ranks: int, spare_layers: int) -> Iterator[MemoryLine]:
    experts = expert_sizes(model, ranks)
    yield MemoryLine("experts", experts.total, "the same bytes in both forms")
    yield MemoryLine("attention, full copy", attention_bytes(model), "data-parallel attention")
    yield MemoryLine("embedding and output", vocabulary_bytes(model), "a full copy")
    yield MemoryLine("routers, shared experts, dense layers", dense_bytes(model), "a full copy")
    yield MemoryLine("attention, shard", attention_bytes(model, ranks), _FOR_SWITCHING)
    yield MemoryLine(f"spare layers ({spare_layers})", spare_layers * experts.layer, _FOR_SWITCHING)
    yield MemoryLine("communicators of EP", COMMUNICATORS, "NVIDIA's estimate")
    yield MemoryLine("communicators of TP", COMMUNICATORS, _FOR_SWITCHING)
    yield MemoryLine("captured graphs of both layouts", None, "no published figure")


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """Tokens of context that fit into an engine's KV pools in one layout."""

    engine: int
    request: int
    """longest single request: under data-parallel attention it lies on one rank"""


def kv_capacity(model: ConsideredModel, table: MemoryTable, ranks: int, layout: LayoutName) -> KvCapacity:
    """Return the tokens that fit. Under tensor-parallel attention every rank holds its head group of every
    token."""
    sizes, pool = kv_sizes(model, ranks), max(0.0, table.kv_pool)
    if layout == "tp":
        tokens = int(pool / (sizes.tp / ranks))
        return KvCapacity(tokens, tokens)
    request = int(pool / sizes.ep)
    return KvCapacity(ranks * request, request)
