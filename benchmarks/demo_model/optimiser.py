"""Optimisers: Muon for the weight matrices, AdamW for everything else.

Muon (K. Jordan et al., 2024) replaces the momentum of a matrix by the nearest orthogonal matrix, computed by
a few Newton-Schulz steps. It reportedly needs markedly fewer tokens than AdamW, and a machine without a GPU
is limited by tokens. The scale 0.2 * sqrt(larger side) gives its updates the size of AdamW's (J. Liu et al.,
"Muon is scalable for LLM training", 2025).
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3MoeForCausalLM

__all__ = ["Muon", "build_optimisers", "orthogonalise"]

MATRIX_RATE = 1.2e-2
OTHER_RATE = 3e-3
WEIGHT_DECAY = 0.05


class Muon(torch.optim.Optimizer):
    """Muon for parameters of two dimensions, or three when they are stacks of matrices (the experts)."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        """Create the optimiser. `momentum` is Nesterov's; `weight_decay` is decoupled and scaled by `lr`."""
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        velocity = state.setdefault("velocity", torch.zeros_like(parameter))
        velocity.lerp_(gradient, 1 - group["momentum"])
        update = orthogonalise(gradient.lerp(velocity, group["momentum"]))
        scale = 0.2 * max(parameter.shape[-2:]) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def orthogonalise(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return about U V^T for matrix = U S V^T: singular values between 0.7 and 1.2, by a quintic
    Newton-Schulz iteration.

    Args:
        matrix: float [..., rows, columns].
        steps: iterations; 5 are enough for singular values down to 1 % of the largest.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[-2] > matrix.shape[-1]
    x: torch.Tensor = (matrix.mT if tall else matrix).to(torch.bfloat16)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


def build_optimisers(model: Qwen3MoeForCausalLM) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return the optimisers with their peak learning rates.

    AdamW trains routers, embeddings and norms: a router is a classifier, whose rows should not be
    orthogonalised.
    """
    matrices, plain, bare = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            bare.append(parameter)
        elif "embed" in name or "mlp.gate.weight" in name:
            plain.append(parameter)
        else:
            matrices.append(parameter)
    groups = [{"params": plain, "weight_decay": WEIGHT_DECAY}, {"params": bare, "weight_decay": 0.0}]
    return [
        (Muon(matrices, lr=MATRIX_RATE, weight_decay=WEIGHT_DECAY), MATRIX_RATE),
        (torch.optim.AdamW(groups, lr=OTHER_RATE, betas=(0.9, 0.95)), OTHER_RATE),
    ]
