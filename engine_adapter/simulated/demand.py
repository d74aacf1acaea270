"""Which experts a token goes to, as a fixed function of the tokens up to it, and what that costs under a placement. Pure numpy.

A prompt's first full blocks choose its domain by their hash; tokens of the first block itself are of no domain yet. So the experts of
a position depend on the tokens before it and on itself alone, as in a model, and equal prefixes want equal experts everywhere.
Popularity is log-normal per layer, domains and tokens differ from it by further normal terms, and a token takes the best k after
Gumbel noise: the model of the Monte-Carlo behind Roost's cost model. Tokens share `BUCKETS` rows per domain, so that
whatever a step does is a sum over rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.initial import with_slots
from engine_adapter.simulated.config import SimulatedConfig
from fleet.dispatch import shares
from fleet.events import KvBlock
from fleet.experts import ModelShape
from fleet.placement import EMPTY, Placement, linear
from fleet.routings import UNKNOWN

BUCKETS = 64
"""kinds of tokens of one domain"""
_MIX = 0x9E3779B1
_NEVER = 1e-300
"""in place of 0, which has no logarithm"""
_BALANCE = 1.05
"""load of a rank above the mean that alignment accepts"""


class Tastes:
    """The table of routings: row `domain * BUCKETS + bucket`; domain `domains` is that of tokens whose prefix has chosen none yet."""

    def __init__(self, config: SimulatedConfig) -> None:
        self.shape: ModelShape = config.model_shape
        self.domains = config.domains
        self.rows = (config.domains + 1) * BUCKETS
        self._domain_blocks = config.domain_blocks
        self._block_size = config.block_size
        self.table = _table(config)
        """int16 [rows, layers, k] distinct experts"""
        places = self.table.astype(np.int32) + np.arange(self.shape.layers, dtype=np.int32)[None, :, None] * self.shape.experts
        self.places = places.reshape(self.rows, -1)
        """int32 [rows, layers * k]: the same as layer * experts + expert"""

    def domain_of(self, blocks: Sequence[KvBlock]) -> int:
        """The domain of what follows these full blocks, which begin a prompt; `domains` when there are none."""
        if not blocks:
            return self.domains
        return (blocks[min(len(blocks), self._domain_blocks) - 1].block_hash >> 17) % self.domains

    def row(self, token: int, position: int, blocks: Sequence[KvBlock]) -> int:
        """Row of the token at a position; blocks: the full blocks of the sequence, at least those before the position's."""
        before = min(position // self._block_size, self._domain_blocks)
        return self.domain_of(blocks[:before]) * BUCKETS + _bucket(token)

    def rows_of(self, tokens: Sequence[int], start: int, blocks: Sequence[KvBlock]) -> NDArray[np.int16]:
        """int16 [n]: rows of consecutive tokens from position `start`."""
        known = min(len(blocks), self._domain_blocks)
        domains = np.array([self.domain_of(blocks[:before]) for before in range(known + 1)], np.int64)
        before = np.minimum(np.arange(start, start + len(tokens)) // self._block_size, known)
        return (domains[before] * BUCKETS + _buckets(np.asarray(tokens, np.uint64))).astype(np.int16)

    def counts(self, tokens_of_row: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [layers, experts] (token, k) pairs of so many tokens [rows] of each row."""
        there = np.flatnonzero(tokens_of_row)
        pairs = self.places[there]
        weights = np.repeat(tokens_of_row[there], pairs.shape[1])
        counted = np.bincount(pairs.ravel(), weights, minlength=self.shape.layers * self.shape.experts)
        return counted.astype(np.int64).reshape(self.shape.layers, self.shape.experts)

    def chosen(self, rows: NDArray[np.int16]) -> NDArray[np.int16]:
        """int16 [positions, layers, k]; UNKNOWN where the row is."""
        chosen = self.table[rows]
        chosen[rows == UNKNOWN] = UNKNOWN
        return chosen


def _table(config: SimulatedConfig) -> NDArray[np.int16]:
    shape, dice = config.model_shape, np.random.default_rng(config.seed)
    layers, experts = shape.layers, shape.experts
    popular = config.popularity_skew * dice.standard_normal((layers, experts), np.float32)
    domain = config.domain_skew * dice.standard_normal((config.domains + 1, 1, layers, experts), np.float32)
    domain[-1] = 0.0
    token = config.token_skew * dice.standard_normal((1, BUCKETS, layers, experts), np.float32)
    gumbel = -np.log(dice.standard_exponential((config.domains + 1, BUCKETS, layers, experts), np.float32) + 1e-30)
    score = popular + domain + token + gumbel
    best = np.argpartition(-score, shape.top_k - 1, axis=-1)[..., : shape.top_k]
    return best.astype(np.int16).reshape(-1, layers, shape.top_k)


def _bucket(token: int) -> int:
    return (token * _MIX & 0xFFFFFFFF) * BUCKETS >> 32


def _buckets(tokens: NDArray[np.uint64]) -> NDArray[np.int64]:
    return ((tokens * np.uint64(_MIX) & np.uint64(0xFFFFFFFF)) * np.uint64(BUCKETS) >> np.uint64(32)).astype(np.int64)


class Traffic(NamedTuple):
    """What the tokens of a step cause, as is to be expected. The first three per rank: float64 [ranks], summed over tokens and layers."""

    remote_ranks: NDArray[np.float64]
    remote_nodes: NDArray[np.float64]
    distinct_experts: NDArray[np.float64]
    """experts that the rank must read"""
    served: NDArray[np.float64]
    """[layers, ranks] (token, k) pairs"""


class Routes:
    """Where rows go under one placement: by the rule of `fleet.dispatch`, in expectation. Exact numbers where nothing is shared out."""

    def __init__(self, tastes: Tastes, placement: Placement, node_of_rank: Sequence[int]) -> None:
        node = np.asarray(node_of_rank, np.intp)
        layer, slot = np.nonzero(placement.expert_of_slot != EMPTY)
        part = np.stack([shares(placement, home, node)[layer, slot] for home in range(placement.ranks)])
        held = _Held(layer * placement.experts + placement.expert_of_slot[layer, slot], layer, slot // placement.slots_per_rank, part)
        replicas = np.bincount(held.place)[held.place]
        self.placement = placement
        self._sole = _Sole(tastes, held.only(replicas == 1), placement)
        self._several = _Several(tastes, held.only(replicas > 1), placement)
        self._remote_ranks = _remote(tastes, placement, held, np.arange(placement.ranks))
        self._remote_nodes = _remote(tastes, placement, held, node)

    def traffic(self, tokens_of_row: NDArray[np.int64]) -> Traffic:
        """tokens_of_row: int [ranks, rows] of one step."""
        remote = (tokens_of_row * self._remote_ranks).sum(axis=1, dtype=np.float64)
        nodes = (tokens_of_row * self._remote_nodes).sum(axis=1, dtype=np.float64)
        pairs = self._several.pairs(tokens_of_row)
        read = self._sole.read(tokens_of_row) + self._several.read(pairs)
        return Traffic(remote, nodes, read, self._sole.served(tokens_of_row) + self._several.served(pairs))


class _Held(NamedTuple):
    """Slots that hold an expert."""

    place: NDArray[np.intp]
    """[slots]: layer * experts + expert"""
    layer: NDArray[np.intp]
    rank: NDArray[np.intp]
    part: NDArray[np.float64]
    """[homes, slots]: `fleet.dispatch.shares`"""

    def only(self, these: NDArray[np.bool_]) -> "_Held":
        return _Held(self.place[these], self.layer[these], self.rank[these], self.part[:, these])


class _Sole:
    """Experts with one replica: it does not matter who asks."""

    def __init__(self, tastes: Tastes, held: _Held, placement: Placement) -> None:
        layers, self._ranks = placement.layers, placement.ranks
        self._place, self._rank = held.place, held.rank
        servers = layers * placement.ranks
        server = np.full(layers * placement.experts, servers)  # the last one: of no interest here
        server[held.place] = held.layer * placement.ranks + held.rank
        cells = np.arange(tastes.rows)[:, None] * (servers + 1) + server[tastes.places]
        by_row = np.bincount(cells.ravel(), minlength=tastes.rows * (servers + 1)).reshape(tastes.rows, -1)
        self._pairs = by_row[:, :servers].astype(np.float32)
        """[rows, layers * ranks] that a token of each row wants there"""
        wanted = np.zeros((tastes.rows, layers * placement.experts), bool)
        np.put_along_axis(wanted, tastes.places, True, axis=1)
        bits = np.packbits(wanted[:, held.place], axis=1)
        self._wanted = np.ascontiguousarray(np.pad(bits, ((0, 0), (0, -bits.shape[1] % 8)))).view(np.uint64)
        """[rows, slots / 64]: a bit of each slot"""

    def served(self, tokens_of_row: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 [layers, ranks]"""
        found = tokens_of_row.sum(axis=0).astype(np.float32) @ self._pairs
        return np.asarray(found.astype(np.float64).reshape(-1, self._ranks))

    def read(self, tokens_of_row: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 [ranks] experts that each must read"""
        joined = np.bitwise_or.reduce(self._wanted[tokens_of_row.any(axis=0)], axis=0)
        read = np.flatnonzero(np.unpackbits(joined.view(np.uint8), count=len(self._rank)))
        return np.bincount(self._rank[read], minlength=self._ranks).astype(np.float64)


class _Several:
    """Experts with more replicas than one: it matters who asks."""

    def __init__(self, tastes: Tastes, held: _Held, placement: Placement) -> None:
        self._ranks, self._servers = placement.ranks, placement.layers * placement.ranks
        places, self._which = np.unique(held.place, return_inverse=True)
        self._rank, self._server = held.rank, held.layer * placement.ranks + held.rank
        self._part = held.part
        self._miss = np.log(np.maximum(1.0 - held.part, _NEVER))
        """logarithm of the probability that a pair goes to another slot"""
        wanted = np.zeros((tastes.rows, placement.layers * placement.experts), bool)
        np.put_along_axis(wanted, tastes.places, True, axis=1)
        self._wanted = wanted[:, places].astype(np.float32)

    def pairs(self, tokens_of_row: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 [homes, slots]: what each home wants of the expert in each slot"""
        there = np.flatnonzero(tokens_of_row.any(axis=0))
        wanted = tokens_of_row[:, there].astype(np.float32) @ self._wanted[there]
        return np.asarray(wanted.astype(np.float64)[:, self._which])

    def served(self, pairs: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 [layers, ranks]"""
        found = np.bincount(self._server, (pairs * self._part).sum(axis=0), self._servers)
        return found.astype(np.float64).reshape(-1, self._ranks)

    def read(self, pairs: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 [ranks] experts that each is expected to have to read"""
        return np.bincount(self._rank, -np.expm1((pairs * self._miss).sum(axis=0)), self._ranks).astype(np.float64)


def _remote(tastes: Tastes, placement: Placement, held: _Held, spot: NDArray[np.intp]) -> NDArray[np.float64]:
    """float64 [ranks, rows]: how many spots other than its own a token of each home and row goes to, summed over layers. spot: of each rank, from 0."""
    found, shape = np.zeros((placement.ranks, tastes.rows)), (placement.layers * placement.experts, int(spot.max()) + 1)
    if shape[1] == 1:
        return found
    alike = bool((held.part == held.part[0]).all())
    for home in range(placement.ranks):
        if not home or not alike:
            share = np.zeros(shape)
            np.add.at(share, (held.place, spot[held.rank]), held.part[home])
            went = _went(tastes.table, share.reshape(placement.layers, placement.experts, -1))
        found[home] = went.sum(axis=1) - went[:, spot[home]]
    return found


def _went(table: NDArray[np.int16], share: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [rows, places]: the probability that a token of a row goes to a place, summed over layers.

    table: [rows, layers, k] distinct experts; share: [layers, experts, places] of an expert's tokens. Each of the k goes its own way.
    """
    went = np.zeros((len(table), share.shape[2]))
    for layer, elsewhere in enumerate(1.0 - share):
        missed = np.ones_like(went)
        for experts in table[:, layer].T:
            missed *= elsewhere[experts]
        went += 1.0 - missed
    return went


def place(tastes: Tastes, config: SimulatedConfig) -> Placement:
    """Epoch 0 as configured, where that is a named one."""
    if config.placement == "aligned":
        placement = aligned(tastes, config.ranks)
        return placement if config.slots_per_rank is None else with_slots(placement, config.slots_per_rank)
    return linear(layers=tastes.shape.layers, experts=tastes.shape.experts, ranks=config.ranks, slots_per_rank=config.slots_per_rank)


def aligned(tastes: Tastes, ranks: int) -> Placement:
    """Each expert on the rank whose domains want it most, ranks kept balanced within 5 %; no replicas. Domain d belongs to rank d mod ranks.

    Per layer, experts in descending order of their best rank's wish above the mean; a rank that is full, or would have more than its
    share of load, passes to the next that wants it.
    """
    shape = tastes.shape
    slots = -(-shape.experts // ranks)
    of_domain = tastes.table[: tastes.domains * BUCKETS].reshape(tastes.domains, -1, shape.layers, shape.top_k)
    table = np.full((shape.layers, ranks, slots), -1, np.int16)
    for layer in range(shape.layers):
        wish = np.stack([np.bincount(one[:, layer].ravel(), minlength=shape.experts) for one in of_domain]).astype(np.float64)
        by_rank = np.stack([wish[rank % tastes.domains :: max(ranks, 1)].sum(axis=0) for rank in range(ranks)])
        for rank, experts in enumerate(_balanced(by_rank, wish.sum(axis=0), slots)):
            table[layer, rank, : len(experts)] = experts
    return Placement(table.reshape(shape.layers, -1), experts=shape.experts, ranks=ranks)


def _balanced(wish: NDArray[np.float64], load: NDArray[np.float64], slots: int) -> list[list[int]]:
    """The experts of each rank; wish: [ranks, experts]; load: [experts]."""
    ranks, most = len(wish), _BALANCE * load.sum() / len(wish)
    held: list[list[int]] = [[] for _ in range(ranks)]
    carried = np.zeros(ranks)
    for expert in np.argsort(wish.mean(axis=0) - wish.max(axis=0), kind="stable"):
        free = np.array([len(one) < slots for one in held])
        fits = free & (carried + load[expert] <= most)
        chosen = int(np.argmax(np.where(fits, wish[:, expert], -1.0))) if fits.any() else int(np.argmin(np.where(free, carried, np.inf)))
        held[chosen].append(int(expert))
        carried[chosen] += load[expert]
    return held
