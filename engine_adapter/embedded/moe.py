"""Sparse MoE block: a softmax top-k router, and experts computed as grouped matrix products over the arena's
cells."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine_adapter.embedded.arena import Arena
from engine_adapter.embedded.dispatch import Dispatch, PartExchange
from engine_adapter.embedded.kernels import LayerLoops
from engine_adapter.embedded.kernels.row_operations import compiled_loops, product, swiglu
from fleet.sharding import group_of


class GroupedMatrices:
    """One matrix per slot of a whole layer, or per expert of a sharded one, and their products with rows
    sorted likewise. *Slot* stands for both here.

    Without compiled loops, a Python loop over views that are created once and may be anywhere in memory. On a
    CPU, torch's grouped_mm does the same but slices anew in every iteration (500 us instead of 190 us for 20
    groups of a decode step). A product batched over all slots would read the weights of slots without rows.
    """

    def __init__(self, matrices: Sequence[torch.Tensor]) -> None:
        """matrices: [A, B] of each slot. All have the same strides, one of which is 1. The views are kept."""
        self._each = list(matrices)
        self._inputs, self._width = self._each[0].shape
        across, along = self._each[0].stride()
        self._by_input, self._stride = along == 1, max(across, along)
        self._addresses = np.array([one.data_ptr() for one in self._each], np.int64)

    def product(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Multiply rows [n, A], sorted by slot, with ends int32 [slots], and return [n, B]."""
        out = rows.new_empty((rows.shape[0], self._width))
        loops = compiled_loops(rows.dtype)
        if loops is None:
            self._by_torch(rows, NonEmpty.of(ends), out)
        else:
            self._compiled(loops, rows.contiguous(), ends, out)
        return out

    def _compiled(self, loops: LayerLoops, rows: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
        loops.grouped(
            rows.data_ptr(),
            self._inputs,
            self._addresses.ctypes.data,
            self._stride,
            self._by_input,
            ends.data_ptr(),
            len(self._each),
            out.data_ptr(),
            self._width,
            self._inputs,
            self._width,
        )

    def _by_torch(self, rows: torch.Tensor, groups: "NonEmpty", out: torch.Tensor) -> None:
        for slot, given, found in zip(
            groups.slots, rows.split_with_sizes(groups.sizes), out.split_with_sizes(groups.sizes), strict=True
        ):
            torch.mm(given, self._each[slot], out=found)


class CellMatrices:
    """Matrices in the cells of an arena, as views that are created once."""

    def __init__(self, arena: Arena, experts: int) -> None:
        """experts: of a layer."""
        self._of_cell = [(arena.gate_up(cell).t(), arena.down(cell)) for cell in range(arena.cells)]
        self._of_piece = [
            [
                (arena.part_gate_up(cell, piece).t(), arena.part_down(cell, piece))
                for piece in range(arena.parts)
            ]
            for cell in range(arena.cells)
        ]
        self._places = [group_of(expert, arena.parts) for expert in range(experts)]

    def of_layer(self, cells: NDArray[np.int32], *, sharded: bool) -> tuple[GroupedMatrices, GroupedMatrices]:
        """Return gate_up and down of a layer whose slots map to these cells: one per slot, or, of a sharded
        layer, one per expert."""
        if sharded:
            pairs = [self._of_piece[cells[group]][piece] for group, piece in self._places]
        else:
            pairs = [self._of_cell[cell] for cell in cells.tolist()]
        gate_up, down = zip(*pairs, strict=True)
        return GroupedMatrices(gate_up), GroupedMatrices(down)


class NonEmpty(NamedTuple):
    """Slots that have rows."""

    slots: list[int]
    sizes: list[int]
    """Rows of each slot."""

    @classmethod
    def of(cls, ends: torch.Tensor) -> "NonEmpty":
        """Build from the ends of all slots, int32 [slots]."""
        sizes = ends.numpy().copy()
        sizes[1:] -= ends.numpy()[:-1]
        slots = np.flatnonzero(sizes)
        return cls(slots.tolist(), sizes[slots].tolist())


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing decisions for T tokens."""

    experts: NDArray[np.int64]
    """int64 [T, k], best first."""
    weights: torch.Tensor
    """fp32 [T, k]."""


def route(hidden: torch.Tensor, gate: torch.Tensor, top_k: int, normalise: bool) -> Routing:
    """Route hidden [T, H] with gate [E, H]: softmax over all experts in fp32, then the top k. Matches Hugging
    Face's Qwen3-MoE, including the rounding of the weights."""
    logits = product(hidden, gate)
    loops = compiled_loops(hidden.dtype)
    if loops is not None:
        return _chosen(loops, logits, top_k, normalise)
    weights, experts = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(experts.numpy(), weights.to(logits.dtype).to(torch.float32))


def _chosen(loops: LayerLoops, logits: torch.Tensor, top_k: int, normalise: bool) -> Routing:
    """Route by contiguous logits fp32 [T, E]. Of equal ones the first is chosen."""
    experts = np.empty((len(logits), top_k), np.int64)
    weights = logits.new_empty((len(logits), top_k))
    loops.route(logits.data_ptr(), experts.ctypes.data, weights.data_ptr(), *logits.shape, top_k, normalise)
    return Routing(experts, weights)


@dataclass(frozen=True, slots=True)
class SparseBlock:
    """Router of one layer, and this rank's experts, or its parts of all experts."""

    layer: int
    gate: torch.Tensor
    """[E, H]."""
    gate_up: GroupedMatrices
    """[slots, H, 2I]; of a sharded layer [experts, H, 2I/P]."""
    down: GroupedMatrices
    """[slots, I, H]; of a sharded layer [experts, I/P, H]."""
    top_k: int
    normalise: bool
    sharded: bool = False

    def forward(
        self, hidden: torch.Tensor, tokens: int, dispatch: Dispatch
    ) -> tuple[torch.Tensor, NDArray[Any]]:
        """Compute hidden [rows >= tokens, H], where rows beyond `tokens` are padding. Return fp32 [tokens, H]
        and the chosen experts, int64 [tokens, k]."""
        if self.sharded:
            return self.forward_parts(hidden, tokens, dispatch)
        routing = self._route(hidden, tokens)
        work = dispatch.dispatch(self.layer, hidden[:tokens], routing.experts)
        results = self.compute(work.rows, work.ends)
        return dispatch.combine(results, routing.weights, work.handle), routing.experts

    def forward_parts(
        self, hidden: torch.Tensor, tokens: int, exchange: PartExchange
    ) -> tuple[torch.Tensor, NDArray[Any]]:
        """Compute as `forward`, in a sharded layer."""
        routing = self._route(hidden, tokens)
        gathered = exchange.gather(hidden[:tokens], routing.experts, routing.weights)
        results = self.compute(gathered.rows, gathered.ends)
        return exchange.reduce(results, gathered.handle), routing.experts

    def _route(self, hidden: torch.Tensor, tokens: int) -> Routing:
        """Route with the padding, and return the routing of the tokens."""
        routing = route(hidden, self.gate, self.top_k, self.normalise)
        return Routing(routing.experts[:tokens], routing.weights[:tokens])

    def compute(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Apply the experts, or this rank's parts of them, to rows [n, H], sorted by slot, with ends int32
        [slots]. Return [n, H]."""
        if not rows.shape[0]:
            return rows
        return self.down.product(swiglu(self.gate_up.product(rows, ends)), ends)
