"""The sparse block: a softmax top-k router, and experts computed as grouped matrix products over the arena's slots."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine_adapter.embedded.dispatch import Dispatch

GroupedMatmul = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows [n, A], matrices [groups, A, B], ends int32 [groups]) -> [n, B]"""


def grouped_matmul_loop(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """One product per non-empty group of rows; where torch has no grouped_mm, and for a handful of groups faster than it."""
    out = rows.new_empty((len(rows), matrices.shape[2]))
    begin = 0
    for group, end in enumerate(ends.tolist()):
        if end > begin:
            torch.mm(rows[begin:end], matrices[group], out=out[begin:end])
            begin = end
    return out


def _grouped_matmul_torch(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(rows, matrices, offs=ends)


def best_grouped_matmul() -> GroupedMatmul:
    """torch's grouped_mm, measured best or near best at every batch size; the loop where this torch has none."""
    return _grouped_matmul_torch if hasattr(F, "grouped_mm") else grouped_matmul_loop


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
    gate_up: torch.Tensor
    """[slots, 2I, H]"""
    down: torch.Tensor
    """[slots, I, H]"""
    top_k: int
    normalise: bool
    grouped_matmul: GroupedMatmul

    def forward(self, hidden: torch.Tensor, tokens: int, dispatch: Dispatch) -> tuple[torch.Tensor, NDArray[Any]]:
        """hidden [rows >= tokens, H], rows beyond `tokens` being padding: fp32 [tokens, H] and the experts chosen, int64 [tokens, k]."""
        routing = route(hidden, self.gate, self.top_k, self.normalise)
        experts = routing.experts[:tokens]
        work = dispatch.dispatch(self.layer, hidden[:tokens], experts)
        results = self.compute(work.rows, work.ends)
        return dispatch.combine(results, routing.weights[:tokens], work.handle), experts

    def compute(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """rows [n, H] sorted by slot, ends int32 [slots]: what each row's expert makes of it, [n, H]."""
        if not len(rows):
            return rows
        gate, up = self.grouped_matmul(rows, self.gate_up.transpose(1, 2), ends).chunk(2, dim=-1)
        return self.grouped_matmul(F.silu(gate) * up, self.down, ends)
