"""Sampled tokens on the ranks that homes send their requests to, and the ranks that they reach. Pure.

Tokens are counted as they are: each has a home, the rank of its request, and is served there where that rank
holds the expert. Replicas elsewhere take turns.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray, FloatArray, IntArray
from fleet.dispatch import SPLIT
from migration import kernels
from migration.model.engine_view import EngineView

MIN_REQUESTS = 64
"""Requests with sampled tokens below which the tokens do not represent the traffic."""
_CELLS = 1 << 24
"""tokens x layers x k x ranks that a price counts; of more tokens it takes a part."""
_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are even over any run of tokens."""


class SampledTokens(NamedTuple):
    """S tokens that represent the traffic."""

    experts: NDArray[np.integer]
    """[S, layers, k]"""
    homes: IntArray
    """[S]: rank of each token's request."""

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    def thinned(self, most: int) -> "SampledTokens":
        """Return about `most` of the tokens, from all requests and from everywhere in them."""
        # An odd step takes other places of each request than of the one before.
        step = -(-len(self.homes) // max(most, 1)) | 1
        return SampledTokens(self.experts[::step], np.ascontiguousarray(self.homes[::step]))

    @property
    def by_layer(self) -> IntArray:
        """Experts, int64 [layers, S, k], contiguous."""
        return np.ascontiguousarray(self.experts.swapaxes(0, 1), np.int64)


class SampledTraffic(NamedTuple):
    """Sampled tokens of an engine's traffic, with homes. The two parts are of different requests."""

    fit: SampledTokens
    """Placements are fitted to these."""
    evaluation: SampledTokens
    """Placements are evaluated on these."""

    def together(self, held: BoolArray) -> FloatArray:
        """Return the distinct other ranks that a token reaches, in parts of what they would be if its experts
        were independent of each other: float64 [layers]. held: [layers, ranks, experts]."""
        tokens = self.evaluation.thinned(_CELLS // (held.shape[0] * held.shape[1] * self.evaluation.top_k))
        sent, alone = destinations(held, tokens)
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
    at, every = drawn_homes(where, view.tokens.shape[1]), len(layers) == view.tokens.shape[2]
    halves = [half if every else half[layers] for half in view.token_halves]
    return SampledTraffic(
        *(SampledTokens(half.swapaxes(0, 1), at[first::2].ravel()) for first, half in enumerate(halves))
    )


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
    library = kernels.compiled()
    if library is None:
        return _destinations(held, tokens)
    found = np.empty(len(held)), np.empty(len(held))
    homes = kernels.plain(tokens.homes)
    library.tokens_destinations(kernels.plain(held), tokens.by_layer, homes, *held.shape[:2], *found)
    return found


def _destinations(held: BoolArray, tokens: SampledTokens) -> tuple[FloatArray, FloatArray]:
    """Implement `destinations` in numpy."""
    ranks, top_k = held.shape[1], tokens.top_k
    pairs = np.maximum(np.bincount(tokens.homes, minlength=ranks) * top_k, 1)
    found = np.zeros((2, len(held)))
    for layer, (one, experts) in enumerate(zip(held, tokens.by_layer, strict=True)):
        served, found[0, layer] = sent(one, experts, tokens.homes)
        to = tokens.homes[:, None] * ranks + served
        mass = np.bincount(to.ravel(), minlength=ranks * ranks).reshape(ranks, ranks) / pairs[:, None]
        reached = 1.0 - _power(1.0 - mass, top_k)
        np.fill_diagonal(reached, 0.0)
        found[1, layer] = (pairs * reached.sum(axis=1)).sum() / pairs.sum()
    return found[0], found[1]


def _power(values: FloatArray, exponent: int) -> FloatArray:
    """Return values ** exponent, by squaring: numpy's own takes ten times as long."""
    found = values if exponent % 2 else np.ones_like(values)
    while exponent := exponent // 2:
        values = values * values
        if exponent % 2:
            found = found * values
    return found


def sent(held: BoolArray, experts: IntArray, homes: IntArray) -> tuple[IntArray, float]:
    """Return the rank that serves each pair, int64 [S, k], and the mean number of ranks besides its home that
    serve a token. held: [ranks, experts]; experts: [S, k]; homes: [S].
    """
    holders = np.argsort(~held, axis=0, kind="stable")  # holders first
    nth = np.arange(len(homes))[:, None] % np.maximum(held.sum(axis=0), 1)[experts]
    served = np.where(held[homes[:, None], experts], homes[:, None], holders[nth, experts])
    there = pairs_served(served, len(held)) > 0
    there[np.arange(len(homes)), homes] = False
    return served, int(there.sum()) / max(len(homes), 1)


def pairs_served(served: IntArray, ranks: int) -> IntArray:
    """int64 [S, ranks]: pairs of each token that each rank serves."""
    places = np.arange(len(served))[:, None] * ranks + served
    return np.bincount(places.ravel(), minlength=len(served) * ranks).reshape(-1, ranks)
