"""Expert demand: counts as reported by engines, rates and profiles as published by the tracker."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


class ExpertTable(msgspec.Struct, frozen=True, kw_only=True):
    """A [layers, experts] table of non-negative float32 in wire format (`values`: little endian,
    row-major)."""

    layers: int
    experts: int
    values: bytes

    @classmethod
    def of(cls, table: NDArray[Any]) -> "ExpertTable":
        """Pack any numeric [layers, experts] array."""
        layers, experts = table.shape
        return cls(
            layers=int(layers), experts=int(experts), values=np.ascontiguousarray(table, "<f4").tobytes()
        )

    def array(self) -> NDArray[np.float32]:
        """Return float32 [layers, experts], read-only.

        ValueError if the bytes do not fit, or if a value is negative or not finite.
        """
        if self.layers < 1 or self.experts < 1 or len(self.values) != 4 * self.layers * self.experts:
            raise ValueError(
                f"expert table: {len(self.values)} bytes do not make [{self.layers}, {self.experts}] float32"
            )
        table = np.frombuffer(self.values, "<f4").reshape(self.layers, self.experts)
        if not np.isfinite(table).all() or (table < 0).any():
            raise ValueError("expert table: values must be finite and not negative")
        return table


class ExpertCounts(msgspec.Struct, frozen=True, kw_only=True):
    """A [layers, experts] table of counts in wire format: unsigned little endian integers of the narrowest
    `width` (1, 2, 4 or 8 bytes).
    """

    layers: int
    experts: int
    width: int
    values: bytes

    @classmethod
    def of(cls, counts: NDArray[Any]) -> "ExpertCounts":
        """Pack a [layers, experts] array of integers >= 0. ValueError if one is negative."""
        layers, experts = counts.shape
        if counts.size and counts.min() < 0:
            raise ValueError(f"expert counts: {counts.min()} is negative")
        largest = int(counts.max()) if counts.size else 0
        width = next(width for width in (1, 2, 4, 8) if largest < 1 << 8 * width)
        return cls(
            layers=int(layers),
            experts=int(experts),
            width=width,
            values=np.ascontiguousarray(counts, f"<u{width}").tobytes(),
        )

    def array(self) -> NDArray[np.unsignedinteger[Any]]:
        """Return unsigned [layers, experts], read-only. ValueError if the bytes do not fit."""
        if (
            self.layers < 1
            or self.experts < 1
            or self.width not in (1, 2, 4, 8)
            or len(self.values) != self.width * self.layers * self.experts
        ):
            raise ValueError(
                f"expert counts: {len(self.values)} bytes do not make [{self.layers}, {self.experts}] of"
                f" width {self.width}"
            )
        return np.frombuffer(self.values, f"<u{self.width}").reshape(self.layers, self.experts)


PROMPT_EXPERTS = "prompt_experts"
"""Key of `PromptExperts` in the `engine_data` of a prefill worker's answer."""


class PromptExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Experts that a prompt activated, from the prefill worker that computed it to the router that chooses
    the decode worker. Tokens from its KV cache activated none there: `tokens` counts the others.
    """

    tokens: int
    counts: ExpertCounts


def profile(counts: NDArray[Any], prior_tokens: float = 1.0) -> NDArray[np.float64]:
    """Return the probability [layers, experts] that a routed (token, k) pair goes to an expert. Every layer
    sums to 1.

    `counts` are (token, k) pairs per [layers, experts]. `prior_tokens` pairs per layer are distributed
    evenly, so that without evidence the profile is uniform.
    """
    smoothed = np.asarray(counts, np.float64) + prior_tokens / counts.shape[1]
    return np.asarray(smoothed / smoothed.sum(axis=1, keepdims=True))


def uniform(layers: int, experts: int) -> NDArray[np.float64]:
    """Return the profile of an unobserved model: float64 [layers, experts]."""
    return np.full((layers, experts), 1.0 / experts)
