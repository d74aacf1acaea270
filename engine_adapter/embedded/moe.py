"""The sparse block: a softmax top-k router, and experts computed as grouped matrix products over the arena's slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine_adapter.embedded.dispatch import Dispatch


class GroupedMatrices:
    """The same matrix of every slot of a layer, and products of rows sorted by slot with them.

    A plain loop over views made once, each of which may lie anywhere: torch's grouped_mm does the same on a CPU, but slices anew in every turn
    (190 against 500 us for 20 groups of a decode step), and a product batched over all slots reads the weights of those that nobody asked for.
    """

    def __init__(self, matrices: Sequence[torch.Tensor]) -> None:
        """matrices: [A, B] of each slot, any strides: views, kept."""
        self._each = list(matrices)
        self._width = self._each[0].shape[1]

    def product(self, rows: torch.Tensor, groups: "NonEmpty") -> torch.Tensor:
        """rows [n, A], sorted by slot: [n, B]."""
        out = rows.new_empty((rows.shape[0], self._width))
        for slot, given, found in zip(groups.slots, rows.split_with_sizes(groups.sizes), out.split_with_sizes(groups.sizes), strict=True):
            torch.mm(given, self._each[slot], out=found)
        return out


class NonEmpty(NamedTuple):
    """The slots that have rows."""

    slots: list[int]
    sizes: list[int]
    """rows of each"""

    @classmethod
    def of(cls, ends: torch.Tensor) -> "NonEmpty":
        """From int32 [slots] ends."""
        sizes = ends.numpy().copy()
        sizes[1:] -= ends.numpy()[:-1]
        slots = np.flatnonzero(sizes)
        return cls(slots.tolist(), sizes[slots].tolist())


@dataclass(frozen=True, slots=True)
class Routing:
    """The router's choice for T tokens."""

    experts: NDArray[np.int64]
    """int64 [T, k], best first"""
    weights: torch.Tensor
    """fp32 [T, k]"""


def route(hidden: torch.Tensor, gate: torch.Tensor, top_k: int, normalise: bool) -> Routing:
    """hidden [T, H], gate [E, H]. Softmax over all experts in fp32, then the k best; as Hugging Face's Qwen3-MoE, its rounding of weights included."""
    logits = F.linear(hidden, gate)
    weights, experts = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(experts.numpy(), weights.to(logits.dtype).to(torch.float32))


@dataclass(frozen=True, slots=True)
class SparseBlock:
    """One layer's router and this rank's experts."""

    layer: int
    gate: torch.Tensor
    """[E, H]"""
    gate_up: GroupedMatrices
    """[slots, H, 2I]"""
    down: GroupedMatrices
    """[slots, I, H]"""
    top_k: int
    normalise: bool

    def forward(self, hidden: torch.Tensor, tokens: int, dispatch: Dispatch) -> tuple[torch.Tensor, NDArray[Any]]:
        """hidden [rows >= tokens, H], rows beyond `tokens` being padding: fp32 [tokens, H] and the experts chosen, int64 [tokens, k]."""
        routing = route(hidden, self.gate, self.top_k, self.normalise)
        experts = routing.experts[:tokens]
        work = dispatch.dispatch(self.layer, hidden[:tokens], experts)
        results = self.compute(work.rows, work.ends)
        return dispatch.combine(results, routing.weights[:tokens], work.handle), experts

    def compute(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """rows [n, H] sorted by slot, ends int32 [slots]: what each row's expert makes of it, [n, H]."""
        if not rows.shape[0]:
            return rows
        groups = NonEmpty.of(ends)
        gate, up = self.gate_up.product(rows, groups).chunk(2, dim=-1)
        return self.down.product(F.silu(gate).mul_(up), groups)
