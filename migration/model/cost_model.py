"""Cost of a placement in seconds per engine step, and payback of a placement change. Pure.

All terms are seconds of one step, so they can be added: the time of the slowest rank for its experts, the
time of the busiest link for dispatched tokens, and the time that requests wait for KV blocks displaced by
replicas. Ranks step together, so each layer costs as much as its slowest rank.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray
from fleet.dispatch import LocalReplicas
from fleet.experts import ModelShape
from fleet.placement import FULL, Placement
from fleet.timing import EngineSpeed
from migration.model.dispatch_traffic import DispatchedPairs, dispatched
from migration.model.sampling_noise import expected_most

_TINY = 1e-300
"""below any real demand"""


@dataclass(frozen=True, slots=True, eq=False)
class CostTerms:
    """Cost inputs besides placement and demand. Raises ValueError naming the value that is out of range."""

    speed: EngineSpeed
    node: NDArray[np.intp]
    """[ranks]: node number of each rank, from 0"""
    top_k: int
    step_tokens: float
    """tokens of one engine step, summed over all ranks"""
    shape: ModelShape | None = None
    """model shape, for gates with group-limited routing; None: the gate does not choose groups"""
    gather_seconds: float = 0.0
    """seconds of a step in the collectives of sharded layers, the same for every placement of the others"""

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"terms: top_k must be at least 1, not {self.top_k}")
        if not 0 < self.step_tokens < np.inf:
            raise ValueError(f"terms: step_tokens must be above 0 and finite, not {self.step_tokens}")

    def step_seconds(self, spent: "StepSeconds", layers: int, blocks: float = 0.0) -> float:
        """Return the duration of a step with `layers` whole layers, given the placement-dependent part
        `spent`.

        Engine speeds measured under an even load already contain the even part of the expert time
        (`EngineSpeed.expert_pair`). blocks: KV blocks in use, mean over the ranks.
        """
        speed, ranks = self.speed, len(self.node)
        alone = speed.step + speed.decode_sequence * self.step_tokens / ranks + speed.decode_block * blocks
        even = speed.expert_pair * layers * self.step_tokens * self.top_k / ranks
        return alone + self.gather_seconds + max(spent.experts - even, 0.0) + spent.dispatch + spent.memory

    def pairs_per_demand(self, demand: NDArray[Any]) -> float:
        """Return the (token, k) pairs of one step and layer per unit of demand [ranks, layers, experts]; 0
        without demand."""
        return self.pairs_per_unit(float(demand.sum(dtype=np.float64)), demand.shape[1])

    def pairs_per_unit(self, total: float, layers: int) -> float:
        """Return the (token, k) pairs of one step and layer per unit of demand. 0 without demand.

        total: demand of all layers together.
        """
        return self.step_tokens * self.top_k * layers / total if total else 0.0


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Placement-dependent seconds of one engine step, summed over layers."""

    experts: float = 0.0
    """time of the slowest rank of each layer for its experts, including sampling noise"""
    dispatch: float = 0.0
    """time of the busiest link of each layer for tokens sent to other ranks and nodes and back"""
    memory: float = 0.0
    """time that requests wait for KV blocks displaced by replicas, spread over their steps"""

    @property
    def total(self) -> float:
        return self.experts + self.dispatch + self.memory


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Cost and balance figures of a placement under a given demand."""

    seconds: StepSeconds
    balance: float
    """mean rank load / max rank load, mean over layers"""
    least_balance: float
    """balance of the worst layer"""
    step_ceiling: float
    """upper bound on the balance of a single step, due to sampling noise, for any placement"""
    remote_ranks: float
    """distinct other ranks that a token must reach per layer, mean"""
    remote_nodes: float
    local: float
    """share of (token, k) pairs served by the rank of their own request"""


class PricedPlacement(NamedTuple):
    """Figures of a placement under a given demand, with the cost of each layer."""

    figures: Figures
    seconds: FloatArray
    """float64 [layers]: seconds of a step for experts and dispatch"""
    experts: FloatArray
    """float64 [layers]: the part for experts"""


def priced(
    placement: Placement, demand: NDArray[Any], terms: CostTerms, memory_seconds: float = 0.0
) -> PricedPlacement:
    """Evaluate a placement under a demand.

    demand: [ranks, layers, experts], (token, k) pairs in any unit, by the rank of their requests.
    memory_seconds: from `migration.planning.slots_vs_kv_cache`. Without demand all times are 0 and everything
    is balanced and local.
    """
    served = dispatched(placement, demand, terms.node, terms.top_k, terms.shape)
    pairs = float(served.pairs.sum())
    load = served.load * terms.pairs_per_unit(pairs, placement.layers)
    sent = DispatchTraffic.of(served, placement.layers, terms)
    even, experts, dispatch = balance(load), expert_seconds(load, terms.speed), sent.seconds(terms.speed)
    tokens = terms.step_tokens * placement.layers
    found = Figures(
        seconds=StepSeconds(
            experts=float(experts.sum()), dispatch=float(dispatch.sum()), memory=memory_seconds
        ),
        balance=float(even.mean()),
        least_balance=float(even.min()),
        step_ceiling=step_ceiling(placement.ranks, terms.step_tokens * terms.top_k),
        remote_ranks=float(sent.ranks_out.sum()) / tokens,
        remote_nodes=float(sent.nodes_out.sum()) / tokens,
        local=float(sent.local.sum() / pairs) if pairs else 1.0,
    )
    return PricedPlacement(found, experts + dispatch, experts)


def priced_by_samples(
    found: PricedPlacement, placement: Placement, samples: NDArray[Any], terms: CostTerms
) -> PricedPlacement:
    """Correct the price of a placement by samples of demand [n, layers, experts] of short intervals.

    In place of the imbalance under the mean demand comes the mean imbalance under each sample, which shows
    the experts that are in demand together. The placement's split does not depend on the rank of a request.
    """
    held, spill = LocalReplicas.of(placement), placement.split.spill / FULL
    ranks, mean = placement.ranks, terms.step_tokens * terms.top_k / placement.ranks
    fullest = np.ones(placement.layers)
    for layer in range(placement.layers):
        load = samples[:, layer] @ held.by_rank(spill[layer], layer).T
        if load.any():
            fullest[layer] = load.max(axis=1).sum() / load.mean(axis=1).sum()
    # One rank has the fullest load, and the others share the rest.
    pairs = np.full((placement.layers, ranks), mean)
    pairs[:, 0] *= fullest
    pairs[:, 1:] -= (mean * (fullest - 1.0) / max(ranks - 1, 1))[:, None]
    experts, even = expert_seconds(pairs, terms.speed), 1.0 / fullest
    spent = found.figures.seconds
    return PricedPlacement(
        msgspec.structs.replace(
            found.figures,
            seconds=msgspec.structs.replace(spent, experts=float(experts.sum())),
            balance=float(even.mean()),
            least_balance=float(even.min()),
        ),
        found.seconds - found.experts + experts,
        experts,
    )


def priced_by_tokens(found: PricedPlacement, together: FloatArray) -> PricedPlacement:
    """Correct the price of sending for experts that tokens need together.

    together: [layers], the distinct ranks that a token reaches, in parts of what independent experts would
    reach.
    """
    sent, spent = (found.seconds - found.experts) * together, found.figures.seconds
    return PricedPlacement(
        msgspec.structs.replace(
            found.figures,
            seconds=msgspec.structs.replace(spent, dispatch=float(sent.sum())),
            remote_ranks=found.figures.remote_ranks * float(together.mean()),
        ),
        found.experts + sent,
        found.experts,
    )


def figures(
    placement: Placement, demand: NDArray[Any], terms: CostTerms, memory_seconds: float = 0.0
) -> Figures:
    """Return the figures of a placement under a demand, over all layers. Arguments as in `priced`."""
    return priced(placement, demand, terms, memory_seconds).figures


def balance(load: FloatArray) -> FloatArray:
    """Return mean rank load / max rank load of a load [layers, ranks], as float64 [layers]; 1 without
    demand."""
    most = load.max(axis=1)
    return np.asarray(np.where(most > 0, load.mean(axis=1) / np.where(most > 0, most, 1.0), 1.0))


def expert_seconds(pairs: FloatArray, speed: EngineSpeed) -> FloatArray:
    """Return the expected time of the slowest rank of a step, float64 [layers]. pairs: [layers, ranks], mean
    pairs per step.

    The slowest rank exceeds the mean rank by the imbalance of the placement and by sampling noise. The two
    combine like independent deviations: as the root of the sum of their squares. Balancing below the noise
    therefore gains nothing.
    """
    mean = pairs.mean(axis=1)
    chance = expected_most(pairs.shape[1]) / np.sqrt(np.maximum(mean, _TINY))
    return np.asarray(speed.expert_pair * mean * (1.0 + np.hypot(1.0 / balance(pairs) - 1.0, chance)))


def step_ceiling(ranks: int, step_pairs: float) -> float:
    """Return the upper bound that sampling noise puts on the balance of a single step.

    1 / (1 + z / sqrt(n)), with n = pairs per rank and z = `expected_most`.
    """
    return 1.0 / (1.0 + expected_most(ranks) / sqrt(max(step_pairs / ranks, _TINY)))


class DispatchTraffic(NamedTuple):
    """Dispatch traffic of one step: expected distinct (token, destination) pairs, float64 [layers, ranks]
    each."""

    ranks_out: FloatArray
    """from tokens of this rank to other ranks"""
    ranks_in: FloatArray
    """from tokens of other ranks to this rank"""
    nodes_out: FloatArray
    """from tokens of this rank to other nodes"""
    nodes_in: FloatArray
    """from tokens of other nodes to the node of this rank, divided evenly among its ranks"""
    local: FloatArray
    """pairs of this rank's tokens that the rank serves itself, in the unit of the demand"""

    @classmethod
    def of(cls, served: DispatchedPairs, layers: int, terms: CostTerms) -> "DispatchTraffic":
        """Convert demand that is served to the tokens of one step."""
        tokens = terms.pairs_per_unit(float(served.pairs.sum()), layers) / terms.top_k
        return cls(
            ranks_out=served.ranks_out * tokens,
            ranks_in=served.ranks_in * tokens,
            nodes_out=served.nodes_out * tokens,
            nodes_in=served.nodes_in * tokens,
            local=served.local,
        )

    def seconds(self, speed: EngineSpeed) -> FloatArray:
        """Return the time of the busiest rank, float64 [layers]: max of sent and received, summed over the
        link classes."""
        busiest = [
            np.maximum(out, into).max(axis=1)
            for out, into in ((self.ranks_out, self.ranks_in), (self.nodes_out, self.nodes_in))
        ]
        return np.asarray(speed.dispatch * busiest[0] + speed.dispatch_node * busiest[1])


def traffic(placement: Placement, demand: NDArray[Any], terms: CostTerms) -> DispatchTraffic:
    """Return the distinct destinations of one step's tokens."""
    return DispatchTraffic.of(
        dispatched(placement, demand, terms.node, terms.top_k, terms.shape), placement.layers, terms
    )


class LinkSpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Bandwidths of weight transfers, in bytes per second into or out of one rank, and fixed costs of a
    handover."""

    same_node: float
    cross_node: float
    checkpoint: float = 1e9
    """from storage into one rank"""
    checksum: float = 10e9
    """checksum computation over staged weights, by the receiving rank"""
    handover_seconds: float = 0.05
    """time from propose to commit, excluding the transfer"""
    contention: float = 0.3
    """fraction of the transfer time by which concurrent engine steps are slowed down"""

    def __post_init__(self) -> None:
        for name in ("same_node", "cross_node", "checkpoint", "checksum"):
            if not 0 < getattr(self, name):
                raise ValueError(f"links: {name} must be above 0 bytes per second, not {getattr(self, name)}")
        if not self.handover_seconds >= 0 or not 0 <= self.contention <= 1:
            raise ValueError(
                f"links: handover_seconds {self.handover_seconds} must not be negative, contention"
                f" {self.contention} must be a share"
            )


class Transfers(NamedTuple):
    """Copies of a plan, as arrays of equal length."""

    handover: NDArray[np.intp]
    """number of the handover that contains the copy, from 0"""
    source: NDArray[np.intp]
    """source rank; -1: the checkpoint"""
    destination: NDArray[np.intp]
    """destination rank"""
    bytes: NDArray[np.float64]


class Payback(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a plan and the time until its gain covers that cost. Seconds of engine time, unless stated
    otherwise."""

    gain_per_second: float
    """seconds saved per second of serving"""
    cost_seconds: float
    """slowdown of engine steps during the transfers"""
    transfer_seconds: float
    """duration of the transfers"""
    lifetime_seconds: float
    """expected time for which the demand stays as it is"""
    bytes: int
    after_seconds: float | None
    """seconds of serving until the gain covers the cost; None: never"""

    @property
    def pays(self) -> bool:
        """True if the plan gains more than it costs during the lifetime of the demand."""
        return self.after_seconds is not None and self.after_seconds < self.lifetime_seconds


def payback(
    gain_seconds: float,
    steps_per_second: float,
    lifetime_seconds: float,
    transfers: Transfers,
    node: NDArray[np.intp],
    links: LinkSpeeds,
) -> Payback:
    """Compute the payback of a plan. gain_seconds: reduction of the step time.

    A plan without gain never pays. A plan without cost pays at once.
    """
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
    """Return the duration of all handovers, which run one after another.

    Each handover takes the time of its busiest rank (max of sent and received) over its slowest link, plus
    the checksums of the received weights and a fixed overhead.
    """
    if not len(transfers.bytes):
        return 0.0
    ranks, rounds = len(node), int(transfers.handover.max()) + 1
    stored = transfers.source < 0
    crosses = ~stored & (node[transfers.source] != node[transfers.destination])
    slowest = np.zeros(rounds)
    for chosen, speed in (
        (~stored & ~crosses, links.same_node),
        (crosses, links.cross_node),
        (stored, links.checkpoint),
    ):
        for end in (transfers.source, transfers.destination):
            taken = chosen & (end >= 0)
            amount = np.bincount(
                (transfers.handover * ranks + end)[taken], transfers.bytes[taken], rounds * ranks
            )
            slowest = np.maximum(slowest, amount.reshape(rounds, ranks).max(axis=1) / speed)
    arrived = (
        np.bincount(transfers.handover * ranks + transfers.destination, transfers.bytes, rounds * ranks)
        .reshape(rounds, ranks)
        .max(axis=1)
    )
    return float((slowest + arrived / links.checksum + links.handover_seconds).sum())
