"""Routing model: the experts of a token as a fixed function of the tokens up to it, and their placement in
epoch 0. Pure NumPy.

The hash of a prompt's first full blocks selects its domain. Tokens of the first block itself have no domain
yet. So the experts of a position depend only on the tokens up to it, as in a model, and equal prefixes choose
equal experts everywhere. Popularity is log-normal per layer. Domains and tokens deviate from it by further
normal terms, and a token takes the top k after Gumbel noise. This is the model of the Monte Carlo simulation
behind Roost's cost model. Tokens share `BUCKETS` rows per domain, so every effect of a step is a sum over
rows.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.kv_cache import Block
from engine_adapter.simulated.model.config import SimulatedConfig
from fleet.blocks import BLOCK_SIZE, local_hash, sequence_hashes
from fleet.experts import ModelShape
from fleet.placement import Placement, linear, with_slots
from fleet.routings import UNKNOWN

BUCKETS = 64
"""Token classes per domain."""
TOKEN_SKEW = 0.5
"""Sigma of a token's deviation from its domain's preferences."""
_MIX = 0x9E3779B1
_BALANCE = 1.05
"""Accepted load of a rank relative to the mean, for the aligned placement."""


class RoutingModel:
    """Routing table. Token class `bucket` of a domain has row `domain * BUCKETS + bucket`. Domain `domains`
    is for tokens whose prefix has not selected one yet."""

    def __init__(self, config: SimulatedConfig) -> None:
        self.shape: ModelShape = config.model_shape
        self.domains = config.domains
        self.rows = (config.domains + 1) * BUCKETS
        self._domain_blocks = config.domain_blocks
        self.table = _table(config)
        """int16 [rows, layers, k] distinct experts."""
        places = (
            self.table.astype(np.int32)
            + np.arange(self.shape.layers, dtype=np.int32)[None, :, None] * self.shape.experts
        )
        self.places = places.reshape(self.rows, -1)
        """int32 [rows, layers * k]: the same as layer * experts + expert."""

    def domain_of(self, blocks: Sequence[Block]) -> int:
        """Return the domain of the tokens after these full blocks, which begin a prompt. `domains` when there
        are no blocks. Equal prompts of different tenants have the same domain."""
        if not blocks:
            return self.domains
        first = blocks[: self._domain_blocks]
        name = (
            first[-1].block_hash
            if not first[-1].salt
            else sequence_hashes([local_hash(block.tokens) for block in first])[-1]
        )
        return (name >> 17) % self.domains

    def row(self, token: int, position: int, blocks: Sequence[Block]) -> int:
        """Return the row of the token at a position. blocks: the full blocks of the sequence, at least those
        before the position's block."""
        before = min(position // BLOCK_SIZE, self._domain_blocks)
        return self.domain_of(blocks[:before]) * BUCKETS + _bucket(token)

    def rows_of(self, tokens: Sequence[int], start: int, blocks: Sequence[Block]) -> NDArray[np.int16]:
        """Return the rows, int16 [n], of consecutive tokens from position `start`."""
        known = min(len(blocks), self._domain_blocks)
        domains = np.array([self.domain_of(blocks[:before]) for before in range(known + 1)], np.int64)
        before = np.minimum(np.arange(start, start + len(tokens)) // BLOCK_SIZE, known)
        return (domains[before] * BUCKETS + _buckets(np.asarray(tokens, np.uint64))).astype(np.int16)

    def counts(self, tokens_of_row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return int64 [layers, experts] (token, k) pairs. tokens_of_row: [rows] number of tokens of each
        row."""
        there = np.flatnonzero(tokens_of_row)
        pairs = self.places[there]
        weights = np.repeat(tokens_of_row[there], pairs.shape[1])
        counted = np.bincount(pairs.ravel(), weights, minlength=self.shape.layers * self.shape.experts)
        return counted.astype(np.int64).reshape(self.shape.layers, self.shape.experts)

    def chosen(self, rows: NDArray[np.int16]) -> NDArray[np.int16]:
        """Return int16 [positions, layers, k]. UNKNOWN where the row is."""
        chosen = self.table[rows]
        chosen[rows == UNKNOWN] = UNKNOWN
        return chosen


def _table(config: SimulatedConfig) -> NDArray[np.int16]:
    shape, random = config.model_shape, np.random.default_rng(config.seed)
    layers, experts = shape.layers, shape.experts
    popular = config.popularity_skew * random.standard_normal((layers, experts), np.float32)
    domain = config.domain_skew * random.standard_normal((config.domains + 1, 1, layers, experts), np.float32)
    domain[-1] = 0.0
    token = TOKEN_SKEW * random.standard_normal((1, BUCKETS, layers, experts), np.float32)
    gumbel = -np.log(
        random.standard_exponential((config.domains + 1, BUCKETS, layers, experts), np.float32) + 1e-30
    )
    score = popular + domain + token + gumbel
    best = np.argpartition(-score, shape.top_k - 1, axis=-1)[..., : shape.top_k]
    return best.astype(np.int16).reshape(-1, layers, shape.top_k)


def _bucket(token: int) -> int:
    return (token * _MIX & 0xFFFFFFFF) * BUCKETS >> 32


def _buckets(tokens: NDArray[np.uint64]) -> NDArray[np.int64]:
    return ((tokens * np.uint64(_MIX) & np.uint64(0xFFFFFFFF)) * np.uint64(BUCKETS) >> np.uint64(32)).astype(
        np.int64
    )


def place(routing: RoutingModel, config: SimulatedConfig) -> Placement:
    """Return the configured placement as epoch 0, for a named one."""
    if config.placement == "aligned":
        placement = aligned(routing, config.ranks)
        return placement if config.slots_per_rank is None else with_slots(placement, config.slots_per_rank)
    return linear(
        layers=routing.shape.layers,
        experts=routing.shape.experts,
        ranks=config.ranks,
        slots_per_rank=config.slots_per_rank,
    )


def aligned(routing: RoutingModel, ranks: int) -> Placement:
    """Place each expert on the rank whose domains demand it most. Ranks are balanced within 5 %, and there
    are no replicas. Domain d belongs to rank d mod ranks.

    Per layer, experts are placed in descending order of their best rank's demand above the mean. When a rank
    is full or would exceed its share of the load, the expert goes to the rank with the next highest demand.
    """
    shape = routing.shape
    slots = -(-shape.experts // ranks)
    of_domain = routing.table[: routing.domains * BUCKETS].reshape(
        routing.domains, -1, shape.layers, shape.top_k
    )
    table = np.full((shape.layers, ranks, slots), -1, np.int16)
    for layer in range(shape.layers):
        demand = np.stack(
            [np.bincount(one[:, layer].ravel(), minlength=shape.experts) for one in of_domain]
        ).astype(np.float64)
        by_rank = np.stack(
            [demand[rank % routing.domains :: max(ranks, 1)].sum(axis=0) for rank in range(ranks)]
        )
        for rank, experts in enumerate(_balanced(by_rank, demand.sum(axis=0), slots)):
            table[layer, rank, : len(experts)] = experts
    return Placement(table.reshape(shape.layers, -1), experts=shape.experts, ranks=ranks)


def _balanced(demand: NDArray[np.float64], load: NDArray[np.float64], slots: int) -> list[list[int]]:
    """Assign experts to ranks and return the experts of each rank. demand: [ranks, experts]. load:
    [experts]."""
    ranks, max_load = len(demand), _BALANCE * load.sum() / len(demand)
    held: list[list[int]] = [[] for _ in range(ranks)]
    carried = np.zeros(ranks)
    for expert in np.argsort(demand.mean(axis=0) - demand.max(axis=0), kind="stable"):
        free = np.array([len(one) < slots for one in held])
        fits = free & (carried + load[expert] <= max_load)
        chosen = (
            int(np.argmax(np.where(fits, demand[:, expert], -1.0)))
            if fits.any()
            else int(np.argmin(np.where(free, carried, np.inf)))
        )
        held[chosen].append(int(expert))
        carried[chosen] += load[expert]
    return held
