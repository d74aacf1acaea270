"""The sparse block: a softmax top-k router, and experts computed as grouped matrix products over the arena's slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine_adapter.embedded.dispatch import Dispatch

FEW_GROUPS = 12
"""Non-empty groups up to which a plain loop beats torch's grouped_mm (measured: 60 against 116 us at 4, even at 15); the bits are equal."""


class GroupedMatrices:
    """The same matrix of every slot of a layer, and products of rows sorted by slot with them."""

    def __init__(self, matrices: torch.Tensor, *, few_groups: int = FEW_GROUPS) -> None:
        """matrices [slots, A, B], any strides: a view, kept. `few_groups`: above it torch's grouped_mm is used, where this torch has it."""
        self._matrices = matrices
        self._each = matrices.unbind(0)
        self._few_groups = few_groups if hasattr(F, "grouped_mm") else len(self._each)

    def product(self, rows: torch.Tensor, ends: torch.Tensor, groups: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """rows [n, A], ends int32 [slots], the same as (slot, begin, end) of the non-empty ones: [n, B]."""
        if len(groups) > self._few_groups:
            return F.grouped_mm(rows, self._matrices, offs=ends)
        out = rows.new_empty((rows.shape[0], self._matrices.shape[2]))
        for slot, begin, end in groups:
            torch.mm(rows[begin:end], self._each[slot], out=out[begin:end])
        return out


def non_empty(ends: torch.Tensor) -> list[tuple[int, int, int]]:
    """(slot, begin, end) of every non-empty group of rows, from int32 [slots] ends."""
    bounds = [0, *ends.tolist()]
    return [(slot, begin, end) for slot, (begin, end) in enumerate(pairwise(bounds)) if end > begin]


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
        groups = non_empty(ends)
        gate, up = self.gate_up.product(rows, ends, groups).chunk(2, dim=-1)
        return self.down.product(F.silu(gate) * up, ends, groups)
