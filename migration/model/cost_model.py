"""What a placement costs, in seconds per engine step, and when changing it pays. Pure.

Nothing unlike is added up: the time of the slowest rank over its experts, the time of the busiest link over what tokens send, and the time
requests wait for KV blocks that replicas took are all seconds of one step. Ranks step together, so each layer costs what it costs its
slowest rank.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.dispatch import loads, served_by
from fleet.experts import ModelShape
from fleet.placement import Placement
from fleet.timing import EngineSpeed
from migration.model.grouped_routing import draws_of, limited
from migration.model.sampling_noise import expected_most

Array = NDArray[np.float64]
_LEAST = 1e-300
"""below any demand"""


@dataclass(frozen=True, slots=True, eq=False)
class CostTerms:
    """What seconds depend on, beside placement and demand. ValueError names what is out of range."""

    speed: EngineSpeed
    node: NDArray[np.intp]
    """[ranks], numbers from 0"""
    top_k: int
    step_tokens: float
    """tokens of one engine step, of all ranks together"""
    shape: ModelShape | None = None
    """for gates that choose groups of experts first; None: they do not"""

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"terms: top_k must be at least 1, not {self.top_k}")
        if not 0 < self.step_tokens < np.inf:
            raise ValueError(f"terms: step_tokens must be above 0 and finite, not {self.step_tokens}")

    def step_seconds(self, spent: "StepSeconds", layers: int, blocks: float = 0.0) -> float:
        """How long a step lasts whose layers, so many, take this for what placement decides. Speeds of an even load hold the even part of
        the experts' time already (`EngineSpeed.expert_pair`). blocks: KV blocks in use, mean over the ranks."""
        speed, ranks = self.speed, len(self.node)
        alone = speed.step + speed.decode_sequence * self.step_tokens / ranks + speed.decode_block * blocks
        even = speed.expert_pair * layers * self.step_tokens * self.top_k / ranks
        return alone + max(spent.experts - even, 0.0) + spent.dispatch + spent.memory

    def pairs_per_demand(self, demand: NDArray[Any]) -> float:
        """(token, k) pairs of one step and layer that a unit of demand [ranks, layers, experts] stands for; 0 where nothing is wanted."""
        total = float(demand.sum(dtype=np.float64))
        return self.step_tokens * self.top_k * demand.shape[1] / total if total else 0.0


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Of one engine step, all layers together."""

    experts: float = 0.0
    """of the slowest rank of each layer, over what it serves, chance included"""
    dispatch: float = 0.0
    """of the busiest link of each layer, over what tokens send to other ranks and nodes and get back"""
    memory: float = 0.0
    """that requests wait for KV blocks which replicas took, shared out over their steps"""

    @property
    def total(self) -> float:
        return self.experts + self.dispatch + self.memory


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A placement under a demand, in figures."""

    seconds: StepSeconds
    balance: float
    """mean rank load / max rank load, mean over layers"""
    least_balance: float
    """of the worst layer"""
    step_ceiling: float
    """balance that a single step's sampling noise leaves at best, however good the placement"""
    remote_ranks: float
    """distinct other ranks that a token must reach in a layer, mean"""
    remote_nodes: float
    local: float
    """share of (token, k) pairs that the rank of their own request serves"""


class PricedPlacement(NamedTuple):
    """A placement under a demand."""

    figures: Figures
    seconds: Array
    """float64 [layers]: of a step, experts and dispatch"""


def judged(placement: Placement, demand: NDArray[Any], terms: CostTerms, memory_seconds: float = 0.0) -> PricedPlacement:
    """demand: [ranks, layers, experts], (token, k) pairs in any unit by the rank their requests live on.

    memory_seconds: of `migration.planning.slots_vs_kv_cache`. Without any demand, nothing takes time and everything is balanced and local.
    """
    load = loads(placement, demand, terms.node) * terms.pairs_per_demand(demand)
    sent = traffic(placement, demand, terms)
    even, experts, dispatch = balance(load), expert_seconds(load, terms.speed), sent.seconds(terms.speed)
    tokens, pairs = terms.step_tokens * placement.layers, float(demand.sum(dtype=np.float64))
    found = Figures(
        seconds=StepSeconds(experts=float(experts.sum()), dispatch=float(dispatch.sum()), memory=memory_seconds),
        balance=float(even.mean()),
        least_balance=float(even.min()),
        step_ceiling=step_ceiling(placement.ranks, terms.step_tokens * terms.top_k),
        remote_ranks=float(sent.ranks_out.sum()) / tokens,
        remote_nodes=float(sent.nodes_out.sum()) / tokens,
        local=float(sent.local.sum() / pairs) if pairs else 1.0,
    )
    return PricedPlacement(found, experts + dispatch)


def figures(placement: Placement, demand: NDArray[Any], terms: CostTerms, memory_seconds: float = 0.0) -> Figures:
    """A placement under a demand, all layers together. Arguments as of `judged`."""
    return judged(placement, demand, terms, memory_seconds).figures


def balance(load: Array) -> Array:
    """float64 [layers]: mean rank load / max rank load of a load [layers, ranks]; 1 where nothing is wanted."""
    most = load.max(axis=1)
    return np.asarray(np.where(most > 0, load.mean(axis=1) / np.where(most > 0, most, 1.0), 1.0))


def expert_seconds(pairs: Array, speed: EngineSpeed) -> Array:
    """float64 [layers]: expected time of the slowest rank of a step whose ranks serve `pairs` [layers, ranks] on average.

    It exceeds the mean rank's by what the placement leaves uneven and by what the chance of so few tokens adds, as independent deviations do: by the
    root of the sum of their squares. So nothing is gained by evening out what chance unevens again.
    """
    mean = pairs.mean(axis=1)
    chance = expected_most(pairs.shape[1]) / np.sqrt(np.maximum(mean, _LEAST))
    return np.asarray(speed.expert_pair * mean * (1.0 + np.hypot(1.0 / balance(pairs) - 1.0, chance)))


def step_ceiling(ranks: int, step_pairs: float) -> float:
    """Balance that sampling noise leaves to a single step: 1 / (1 + z / sqrt(n)), n = pairs per rank, z = `expected_most`."""
    return 1.0 / (1.0 + expected_most(ranks) / sqrt(max(step_pairs / ranks, _LEAST)))


class DispatchTraffic(NamedTuple):
    """What one step sends: expected distinct (token, destination) pairs, float64 [layers, ranks] each."""

    ranks_out: Array
    """from this rank's tokens to other ranks"""
    ranks_in: Array
    """from other ranks' tokens to this rank"""
    nodes_out: Array
    """from this rank's tokens to other nodes"""
    nodes_in: Array
    """from other nodes' tokens to this rank's node, in even parts to its ranks"""
    local: Array
    """pairs of this rank's tokens that it serves itself, in the unit of the demand"""

    def seconds(self, speed: EngineSpeed) -> Array:
        """float64 [layers]: time of the busiest rank, max of in and out, over each class of links."""
        busiest = [np.maximum(out, into).max(axis=1) for out, into in ((self.ranks_out, self.ranks_in), (self.nodes_out, self.nodes_in))]
        return np.asarray(speed.dispatch * busiest[0] + speed.dispatch_node * busiest[1])


def traffic(placement: Placement, demand: NDArray[Any], terms: CostTerms) -> DispatchTraffic:
    """Distinct destinations of one step's tokens, by the rule of `fleet.dispatch`. A token's k experts are taken as independent draws, so a
    place that serves the part m of a rank's pairs is reached by its tokens with probability 1 - (1 - m)^k; of gates limited to groups, nodes are
    reached as `migration.model.grouped_routing` says."""
    pairs = demand.sum(axis=2, dtype=np.float64).T
    tokens = pairs * (terms.pairs_per_demand(demand) / terms.top_k)
    part = served_by(placement, demand, terms.node)
    local = np.einsum("lrr->lr", part).copy()
    part /= np.maximum(pairs, _LEAST)[:, None, :]
    member = (terms.node[:, None] == np.arange(int(terms.node.max()) + 1)).astype(np.float64)
    across = _nodes_reached(member.T @ part, placement, terms) * tokens[:, None, :] * (1.0 - member.T)
    reached = _reached(part, terms.top_k) * tokens[:, None, :]
    np.einsum("lrr->lr", reached)[...] = 0.0
    return DispatchTraffic(
        ranks_out=reached.sum(axis=1),
        ranks_in=reached.sum(axis=2),
        nodes_out=across.sum(axis=1),
        nodes_in=(across.sum(axis=2) / np.maximum(member.sum(axis=0), 1.0))[:, terms.node],
        local=local,
    )


def _nodes_reached(mass: Array, placement: Placement, terms: CostTerms) -> Array:
    """[layers, nodes, ranks]: probability that a rank's token reaches a node."""
    nodes = mass.shape[1]
    if terms.shape is None or not limited(terms.shape) or nodes == 1:
        return _reached(mass, terms.top_k)
    on_node = np.stack([placement.replicas_on_rank[:, terms.node == at].any(axis=1) for at in range(nodes)], axis=1)
    return np.asarray(1.0 - (1.0 - mass.clip(0.0, 1.0)) ** draws_of(terms.shape, on_node)[:, None, None])


def _reached(mass: Array, top_k: int) -> Array:
    """1 - (1 - mass)^k, the power by squaring."""
    square, power, left = 1.0 - mass.clip(0.0, 1.0), np.ones(1), top_k
    while left:
        power = power * square if left & 1 else power
        left >>= 1
        square = square * square if left else square
    return np.asarray(1.0 - power)


class LinkSpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """How fast weights travel, bytes per second into or out of one rank, and what else a handover costs."""

    same_node: float
    cross_node: float
    checkpoint: float = 1e9
    """from storage into one rank"""
    checksum: float = 10e9
    """of staged weights, by the rank that received them"""
    handover_seconds: float = 0.05
    """from propose to commit, beside the transfer"""
    contention: float = 0.3
    """share of a transfer's time by which the engine's steps take longer meanwhile"""

    def __post_init__(self) -> None:
        for name in ("same_node", "cross_node", "checkpoint", "checksum"):
            if not 0 < getattr(self, name):
                raise ValueError(f"links: {name} must be above 0 bytes per second, not {getattr(self, name)}")
        if not self.handover_seconds >= 0 or not 0 <= self.contention <= 1:
            raise ValueError(f"links: handover_seconds {self.handover_seconds} must not be negative, contention {self.contention} must be a share")


class Transfers(NamedTuple):
    """Copies of a plan, arrays of one length."""

    handover: NDArray[np.intp]
    """number of the handover that it belongs to, from 0"""
    source: NDArray[np.intp]
    """rank; -1: the checkpoint"""
    destination: NDArray[np.intp]
    """rank"""
    bytes: NDArray[np.float64]


class Payback(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan costs and when it has earned that. Seconds of engine time, unless said otherwise."""

    gain_per_second: float
    """seconds that it saves in each second of serving"""
    cost_seconds: float
    """what its transfers cost the steps meanwhile"""
    transfer_seconds: float
    """how long it takes"""
    lifetime_seconds: float
    """how long the demand is expected to stay as it is"""
    bytes: int
    after_seconds: float | None
    """seconds of serving until it has earned its cost; None: never"""

    @property
    def pays(self) -> bool:
        """Whether it earns more than it costs while the demand lasts."""
        return self.after_seconds is not None and self.after_seconds < self.lifetime_seconds


def payback(gain_seconds: float, steps_per_second: float, lifetime_seconds: float, transfers: Transfers, node: NDArray[np.intp], links: LinkSpeeds) -> Payback:
    """gain_seconds: by which a step gets shorter. A plan that gains nothing never pays; one that costs nothing has paid at once."""
    taken = transfer_seconds(transfers, node, links)
    gain, cost = gain_seconds * steps_per_second, taken * links.contention
    return Payback(
        gain_per_second=gain,
        cost_seconds=cost,
        transfer_seconds=taken,
        lifetime_seconds=lifetime_seconds,
        bytes=int(transfers.bytes.sum()),
        after_seconds=cost / gain if gain > 0 else None,
    )


def transfer_seconds(transfers: Transfers, node: NDArray[np.intp], links: LinkSpeeds) -> float:
    """Handovers follow one another. Each takes its busiest rank, the larger of in and out, over its slowest link, and the checksums of what arrived."""
    if not len(transfers.bytes):
        return 0.0
    ranks, rounds = len(node), int(transfers.handover.max()) + 1
    stored = transfers.source < 0
    crosses = ~stored & (node[transfers.source] != node[transfers.destination])
    slowest = np.zeros(rounds)
    for chosen, speed in ((~stored & ~crosses, links.same_node), (crosses, links.cross_node), (stored, links.checkpoint)):
        for end in (transfers.source, transfers.destination):
            taken = chosen & (end >= 0)
            amount = np.bincount((transfers.handover * ranks + end)[taken], transfers.bytes[taken], rounds * ranks)
            slowest = np.maximum(slowest, amount.reshape(rounds, ranks).max(axis=1) / speed)
    arrived = np.bincount(transfers.handover * ranks + transfers.destination, transfers.bytes, rounds * ranks).reshape(rounds, ranks).max(axis=1)
    return float((slowest + arrived / links.checksum + links.handover_seconds).sum())
