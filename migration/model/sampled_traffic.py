"""Sampled tokens on the ranks that homes send their requests to, and the ranks that they reach. Pure.

Tokens are counted as they are: each has a home, the rank of its request, and is served there where that rank
holds the expert. Replicas elsewhere take turns.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray, FloatArray, IntArray
from fleet.dispatch import SPLIT
from migration.model.engine_view import EngineView

MIN_REQUESTS = 64
"""Requests with sampled tokens below which the tokens do not represent the traffic."""
_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are even over any run of tokens."""


class SampledTokens(NamedTuple):
    """S tokens that represent the traffic."""

    experts: NDArray[np.integer]
    """[S, layers, k]"""
    homes: IntArray
    """[S]: rank of each token's request."""

    def part(self, kept: slice | BoolArray) -> "SampledTokens":
        """Return some of the tokens."""
        return SampledTokens(self.experts[kept], self.homes[kept])


class SampledTraffic(NamedTuple):
    """Sampled tokens of an engine's traffic, with homes. The two parts are of different requests."""

    fit: SampledTokens
    """Placements are fitted to these."""
    evaluation: SampledTokens
    """Placements are evaluated on these."""

    def together(self, held: BoolArray) -> FloatArray:
        """Return the distinct other ranks that a token reaches, in parts of what they would be if its experts
        were independent of each other: float64 [layers]. held: [layers, ranks, experts]."""
        sent, alone = destinations(held, self.evaluation)
        return np.where(alone > 0, sent / np.where(alone > 0, alone, 1.0), 1.0)


def sampled_traffic(
    view: EngineView, layers: NDArray[np.intp], homes: FloatArray | None, leak: float
) -> SampledTraffic | None:
    """Return the sampled tokens of these layers under these homes [K, ranks] (None: every request goes
    anywhere). None if there are too few, or if the engine chooses replicas for whole tokens."""
    weights = view.token_weights
    if view.tokens is None or weights is None or len(weights) < MIN_REQUESTS or view.dispatch != SPLIT:
        return None
    ranks = len(view.node)
    even = np.full(ranks, 1.0 / ranks)
    share = np.broadcast_to(even, (weights.shape[1], ranks)) if homes is None else homes
    known = share.sum(axis=1, keepdims=True) > 0
    where = (1.0 - leak) * weights @ np.where(known, share, even) + leak * even
    requests, each = view.tokens.shape[:2]
    at = drawn_homes(where, each)
    parts = [
        SampledTokens(
            view.tokens[part][:, :, layers].reshape(-1, len(layers), view.tokens.shape[3]),
            at[part].reshape(-1),
        )
        for part in (slice(0, requests, 2), slice(1, requests, 2))
    ]
    return SampledTraffic(*parts)


def drawn_homes(where: FloatArray, each: int) -> IntArray:
    """Return ranks in proportion to where [n, ranks], rows sum to 1: int64 [n, each]. Not random."""
    point = np.modf(np.arange(len(where) * each) * _GOLDEN)[0].reshape(len(where), each)
    ends = np.cumsum(where, axis=1)[:, None, :-1]
    return np.asarray((point[:, :, None] > ends).sum(axis=2), np.int64)


def destinations(held: BoolArray, tokens: SampledTokens) -> tuple[FloatArray, FloatArray]:
    """Return the mean number of other ranks that a token is sent to, and what it would be if the k experts of
    a token were independent draws from the demand of its home: float64 [layers] each.

    held: [layers, ranks, experts]. An expert that no rank holds counts as one of rank 0.
    """
    ranks, top_k = held.shape[1], tokens.experts.shape[2]
    pairs = np.maximum(np.bincount(tokens.homes, minlength=ranks) * top_k, 1)
    found = np.zeros((2, len(held)))
    for layer, one in enumerate(held):
        served = serving_ranks(one, tokens.experts[:, layer], tokens.homes)
        found[0, layer] = mean_sent(pairs_served(served, ranks), tokens.homes)
        to = tokens.homes[:, None] * ranks + served
        mass = np.bincount(to.ravel(), minlength=ranks * ranks).reshape(ranks, ranks) / pairs[:, None]
        reached = 1.0 - (1.0 - mass) ** top_k
        np.fill_diagonal(reached, 0.0)
        found[1, layer] = pairs @ reached.sum(axis=1) / pairs.sum()
    return found[0], found[1]


def serving_ranks(held: BoolArray, experts: NDArray[np.integer], homes: IntArray) -> IntArray:
    """int64 [S, k]: the rank that serves each pair. held: [ranks, experts]; experts: [S, k]."""
    holders = np.argsort(~held, axis=0, kind="stable")  # holders first
    nth = np.arange(len(homes))[:, None] % np.maximum(held.sum(axis=0), 1)[experts]
    return np.where(held[homes[:, None], experts], homes[:, None], holders[nth, experts])


def pairs_served(served: IntArray, ranks: int) -> IntArray:
    """int64 [S, ranks]: pairs of each token that each rank serves."""
    places = np.arange(len(served))[:, None] * ranks + served
    return np.bincount(places.ravel(), minlength=len(served) * ranks).reshape(-1, ranks)


def mean_sent(counts: IntArray, homes: IntArray) -> float:
    """Return the mean number of ranks besides its home that serve a token."""
    there = counts > 0
    there[np.arange(len(homes)), homes] = False
    return float(there.sum()) / max(len(homes), 1)
