"""Identifiers of ranks and experts, and the shape of a Mixture-of-Experts model."""

from typing import NamedTuple

import msgspec

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes of one stored weight by dtype name (torch's names without the `torch.` prefix)."""


class RankId(NamedTuple):
    """One GPU (or CPU process) of an engine: the target that the router chooses."""

    engine: str
    rank: int

    def __str__(self) -> str:
        return f"{self.engine}/{self.rank}"


class ExpertId(NamedTuple):
    """A *logical* expert. Expert 5 of layer 10 is unrelated to expert 5 of layer 11."""

    layer: int
    expert: int

    def __str__(self) -> str:
        return f"{self.layer}/{self.expert}"


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Dimensions of an MoE model that placement, cost and bookkeeping need.

    `layers` counts only the MoE layers, from 0. Dense layers have no experts and are not counted.
    """

    layers: int
    experts: int
    top_k: int
    hidden: int
    expert_intermediate: int
    dtype: str = "float32"
    groups: int = 1
    """groups of consecutive experts among which the gate chooses; 1: the gate is not group-limited"""
    groups_per_token: int = 1
    """groups from which a token's experts may come"""
    scale_block: int = 0
    """intermediate rows that share a quantisation scale; 0: no scales by block"""
    heads: int = 0
    """attention heads; 0: not stated"""
    kv_heads: int = 0
    """KV heads; 0: not stated, or not divisible (MLA)"""

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "top_k", "hidden", "expert_intermediate"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"model shape: {name} must be at least 1, not {value}")
        for name in ("scale_block", "heads", "kv_heads"):
            if getattr(self, name) < 0:
                raise ValueError(f"model shape: {name} must not be negative, not {getattr(self, name)}")
        if self.top_k > self.experts:
            raise ValueError(f"model shape: top_k {self.top_k} exceeds the {self.experts} experts of a layer")
        if not 1 <= self.groups_per_token <= self.groups or self.experts % self.groups:
            raise ValueError(
                f"model shape: {self.groups_per_token} of {self.groups} groups per token; {self.experts}"
                " experts must divide into the groups"
            )
        if self.top_k > self.groups_per_token * (self.experts // self.groups):
            raise ValueError(
                f"model shape: top_k {self.top_k} exceeds the experts of {self.groups_per_token} of"
                f" {self.groups} groups"
            )
        if self.dtype not in BYTES_PER_VALUE:
            raise ValueError(
                f"model shape: unknown dtype {self.dtype!r}; known: {', '.join(BYTES_PER_VALUE)}"
            )

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of one layer: gate, up and down projections, without quantisation scales."""
        return 3 * self.hidden * self.expert_intermediate * BYTES_PER_VALUE[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's hidden state between ranks. Weights of 8 bits work on states of 16."""
        return self.hidden * max(2, BYTES_PER_VALUE[self.dtype])
