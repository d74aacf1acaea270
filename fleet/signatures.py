"""Signatures: expert activations of a request (or a prefix) as weights over a few learnt clusters; and
cluster models. Pure.

A cluster is an expert profile [layers, experts]. A profile of counts is read as a draw from one cluster. With
shares s_k and profiles c_k, its signature is the tempered posterior w_k ~ s_k * exp(t * sum counts * log(c_k
/ c)), c = sum_k s_k c_k. The temper t = sharpness / (1 + saturation * n), for n pairs, accounts for the
dependence between draws (layers of one token, tokens of one text: the design effect of Kish 1965), which a
plain multinomial ignores. Signatures are additive: the signature of a prefix is the token-weighted mean over
its blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array

MAX_CLUSTERS = 64
NAMED = 4
"""Clusters in a packed signature. The remaining mass is distributed over all clusters in proportion to their
shares.
"""
PACKED = 2 * NAMED
"""Bytes of a packed signature: NAMED times (cluster, weight in 1/255)."""
MIN_PROBABILITY = 1e-6
"""Floor of a cluster's probabilities, to keep logarithms finite."""


def pack(weights: NDArray[Any]) -> NDArray[np.uint8]:
    """Pack the NAMED heaviest of weights [..., K], in descending order: uint8 [..., PACKED]."""
    wide = np.asarray(weights, np.float64)
    heaviest = np.argsort(-wide, axis=-1, kind="stable")[..., :NAMED]
    packed = np.zeros((*wide.shape[:-1], NAMED, 2), np.uint8)
    count = heaviest.shape[-1]
    packed[..., :count, 0] = heaviest
    packed[..., :count, 1] = np.floor(255.0 * np.take_along_axis(wide, heaviest, axis=-1) + 0.5)
    return packed.reshape(*wide.shape[:-1], PACKED)


def unpack(packed: Sequence[int], shares: Float32Array) -> Float32Array:
    """Unpack one signature: float32 [K].

    The mass of clusters that no longer exist, and the mass not in the signature, is distributed by `shares`.
    """
    # Python integers: rounded weights may add up to 257, which overflows numpy's uint8
    numbers = [int(number) for number in packed]
    named = [
        (numbers[at], numbers[at + 1])
        for at in range(0, PACKED, 2)
        if numbers[at + 1] and numbers[at] < len(shares)
    ]
    total = sum(weight for _, weight in named)
    scale = 1.0 / max(255, total)
    weights = shares * np.float32(1.0 - total * scale)
    for cluster, weight in named:
        weights[cluster] += weight * scale
    return weights


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster model in wire format: `profiles` float16 [clusters, layers, experts], `shares` float32
    [clusters], little endian.
    """

    version: int
    layers: int
    experts: int
    clusters: int
    sharpness: float
    shares: bytes
    profiles: bytes
    saturation: float = 0.0


@dataclass(frozen=True, eq=False)
class ClusterModel:
    """Clusters of one model at one version. A slot keeps its meaning across versions; an unused slot has
    share 0.

    profiles: float32 [K, layers, experts], rows sum to 1. shares: float32 [K], sum 1: the current traffic
    mix. saturation: redundancy between the tokens of one text. n pairs carry the evidence of n / (1 +
    saturation * n) independent pairs, so a single block is weighted more per pair than a long text.
    """

    version: int
    profiles: NDArray[np.float32]
    shares: Float32Array
    sharpness: float
    saturation: float = 0.0

    @property
    def clusters(self) -> int:
        return len(self.shares)

    @cached_property
    def mean(self) -> NDArray[np.float32]:
        """Profile of the whole traffic: float32 [layers, experts]."""
        return np.asarray(np.tensordot(self.shares, self.profiles, 1), np.float32)

    @cached_property
    def log_ratios(self) -> NDArray[np.float32]:
        """log(c_k / c): float32 [layers * experts, K]."""
        ratios = np.log(np.maximum(self.profiles, MIN_PROBABILITY)) - np.log(
            np.maximum(self.mean, MIN_PROBABILITY)
        )
        return np.ascontiguousarray(ratios.reshape(self.clusters, -1).T, np.float32)

    def signature(self, counts: NDArray[Any]) -> Float32Array:
        """Return the signature float32 [..., K] of counts [..., layers, experts] of (token, k) pairs. Without
        counts it equals the shares.
        """
        flat = np.asarray(counts, np.float32).reshape(*counts.shape[:-2], -1)
        sharpness = np.asarray(
            self.sharpness / (1.0 + self.saturation * flat.sum(axis=-1, keepdims=True)), np.float32
        )
        return posterior(self.shares, sharpness * (flat @ self.log_ratios))

    def expected(self, weights: Float32Array) -> NDArray[np.float32]:
        """Return the profile that weights [K] represent: float32 [layers, experts]."""
        return np.asarray(np.tensordot(weights, self.profiles, 1), np.float32)

    def record(self) -> ClusterRecord:
        clusters, layers, experts = self.profiles.shape
        return ClusterRecord(
            version=self.version,
            layers=layers,
            experts=experts,
            clusters=clusters,
            sharpness=self.sharpness,
            shares=self.shares.astype("<f4").tobytes(),
            profiles=self.profiles.astype("<f2").tobytes(),
            saturation=self.saturation,
        )

    @classmethod
    def from_record(cls, record: ClusterRecord) -> "ClusterModel":
        """Decode a record. ValueError if the bytes do not fit or are not probabilities."""
        shape = (record.clusters, record.layers, record.experts)
        if (
            not 1 <= record.clusters <= MAX_CLUSTERS
            or min(shape) < 1
            or len(record.shares) != 4 * record.clusters
        ):
            raise ValueError(
                f"cluster model: {record.clusters} clusters and {len(record.shares)} bytes of shares; 1 to"
                f" {MAX_CLUSTERS} are allowed"
            )
        if len(record.profiles) != 2 * record.clusters * record.layers * record.experts:
            raise ValueError(
                f"cluster model: {len(record.profiles)} bytes do not make profiles of shape {shape}"
            )
        # Before any arithmetic, which warns of signalling NaNs.
        halves, singles = np.frombuffer(record.profiles, "<f2"), np.frombuffer(record.shares, "<f4")
        if not np.isfinite(halves).all():
            raise ValueError("cluster model: profiles must be probabilities")
        if not np.isfinite(singles).all():
            raise ValueError("cluster model: shares must be probabilities")
        profiles = halves.astype(np.float32).reshape(shape)
        sums = profiles.sum(axis=2, keepdims=True)
        if not ((profiles >= 0).all() and (sums > 0).all()):
            raise ValueError("cluster model: profiles must be probabilities")
        shares = singles.astype(np.float64)
        if not ((shares >= 0).all() and shares.sum() > 0):
            raise ValueError("cluster model: shares must be probabilities")
        if not 0 < record.sharpness < float("inf"):
            raise ValueError(f"cluster model: sharpness must be finite and above 0, not {record.sharpness}")
        if not 0 <= record.saturation < float("inf"):
            raise ValueError(
                f"cluster model: saturation must be finite and not negative, not {record.saturation}"
            )
        return cls(
            record.version,
            profiles / sums,
            np.asarray(shares / shares.sum(), np.float32),
            record.sharpness,
            record.saturation,
        )


def posterior(shares: Float32Array, ratios: NDArray[Any]) -> Float32Array:
    """Return shares * exp(ratios), normalised: float32 [..., K]. Clusters with share 0 stay at 0."""
    with np.errstate(divide="ignore"):
        logits = np.log(shares) + ratios
    likely = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(likely / likely.sum(axis=-1, keepdims=True), np.float32)
