"""Place experts by the origin of their tokens: serve as many as possible on their own rank or node, under a
cap of load. Pure.

Demand that is equal on every rank leaves 1 - 1/ranks of it remote for any placement without replicas.
Locality pays only where ranks differ (`migration.solvers.specialisation_test`) and dispatch prefers local
replicas (`fleet.dispatch`). Without the cap, each layer is a transportation problem (totally unimodular: the
linear programme has an integral optimum). Here it is solved by exchanges, to within a few thousandths, and
then levelled.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array, vstack

from fleet.arrays import BoolArray, FloatArray, SlotTable
from fleet.dispatch import flows, loads
from fleet.placement import Placement, Split
from fleet.timing import EngineSpeed
from migration.solvers.holder_value import HolderValue, filled, held_by_worth
from migration.solvers.load_cap import held_of, layer_sums, levelled, split_under, table_of
from migration.solvers.pairwise_exchange import exchange_experts

BALANCE = 0.955
"""Mean rank load / fullest rank load of every layer, where weights and exchanges can reach it. It is slightly
above the required value, as the next window is another sample."""
_TINY = 1e-12


class LocalityPrices(NamedTuple):
    """Cost of a (token, k) pair that is served elsewhere, in any unit."""

    rank: float = 1.0
    """On another rank."""
    node: float = 0.0
    """Added on another node."""

    @classmethod
    def of(cls, speed: EngineSpeed, top_k: int, node: NDArray[np.intp]) -> "LocalityPrices":
        """Seconds that a pair saves by staying. node: [ranks].

        A token's k pairs share what is sent to a destination. A destination of mass m is reached with
        probability 1 - (1 - m)^k, so a pair that stays saves k (1 - m)^(k - 1) of a destination's share of
        its k pairs. Only ranks count where an engine reports that sending costs nothing.
        """
        nodes = int(node.max()) + 1
        ranks, machines = ((1.0 - 1.0 / count) ** (top_k - 1) for count in (len(node), nodes))
        found = cls(speed.dispatch * ranks, speed.dispatch_node * machines if nodes > 1 else 0.0)
        return found if sum(found) > 0 else cls()


ONE_NODE = LocalityPrices()
"""Only ranks count."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalityProblem:
    """Slots, links and prices of a locality placement. ValueError names the value out of range."""

    node: NDArray[np.intp]
    """[ranks], numbers from 0."""
    slots: int
    """Of a rank."""
    prices: LocalityPrices = ONE_NODE
    most: int | None = None
    """Replicas of an expert; None: one per rank."""
    balance: float = BALANCE
    home: BoolArray | None = None
    """bool [layers, ranks, experts]: ranks that must hold at least one of the expert's replicas; None:
    anywhere."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"locality: a rank needs at least one slot, not {self.slots}")
        if self.most is not None and self.most < 1:
            raise ValueError(f"locality: an expert needs at least one replica, not {self.most}")
        if not 0 < self.balance <= 1:
            raise ValueError(f"locality: balance must be above 0 and at most 1, not {self.balance}")
        if min(self.prices) < 0 or sum(self.prices) <= 0:
            raise ValueError(f"locality: prices must not be negative, and one above 0, not {self.prices}")

    @property
    def ranks(self) -> int:
        return len(self.node)

    @property
    def replicas(self) -> int:
        return self.ranks if self.most is None else min(self.most, self.ranks)


class LocalityPlacement(NamedTuple):
    """A placement and its figures under the demand. Arrays of floats are [layers]."""

    table: SlotTable
    split: Split
    local: FloatArray
    """Share of the pairs served on their own rank."""
    near: FloatArray
    """Share served on their own node, including those; 1 where there is one node."""
    balance: FloatArray
    """Mean rank load / fullest rank load."""
    saved: FloatArray
    """Part saved of the dispatch cost with all pairs served on other nodes (ranks, where there is one node),
    at these prices."""


def worth_of(demand: NDArray[Any], room: LocalityProblem) -> HolderValue:
    """Return the worth of replicas, as parts of the dispatch cost with nothing local. demand: [ranks, layers,
    experts] pairs."""
    total = np.maximum(layer_sums(demand), _TINY)[:, None, None]
    rank, node = (price / sum(room.prices) for price in room.prices)
    share = np.ascontiguousarray(demand.transpose(1, 0, 2), np.float64) / total
    if node == 0.0 or int(room.node.max()) == 0:
        return HolderValue(
            share * (rank if rank > 0 else 1.0), np.zeros((len(share), 1, share.shape[2])), room.node
        )
    of_nodes = np.stack(
        [share[:, room.node == at].sum(axis=1) for at in range(int(room.node.max()) + 1)], axis=1
    )
    return HolderValue(rank * share, node * of_nodes, room.node)


def locality_placement(
    demand: NDArray[Any], room: LocalityProblem, present: SlotTable | None = None, stay: float = 0.05
) -> LocalityPlacement:
    """Return the placement that saves most dispatch at the required balance; see `locality_table`."""
    return measured(locality_table(demand, room, present, stay), None, demand, room)


def locality_table(
    demand: NDArray[Any], room: LocalityProblem, present: SlotTable | None = None, stay: float = 0.05
) -> SlotTable:
    """Return the table of the placement that saves most dispatch at the required balance.

    demand: [ranks, layers, experts] pairs by the rank that serves their requests. present: int16 [layers,
    ranks * slots], the present placement: the worth of its replicas is raised by the part `stay`, so that
    ties do not cause moves. ValueError when the experts do not fit.
    """
    ranks, _, experts = demand.shape
    if ranks != room.ranks or experts > ranks * room.slots:
        raise ValueError(
            f"locality: {experts} experts of {ranks} ranks do not fit on {room.ranks} ranks of {room.slots}"
            " slots"
        )
    worth, start = worth_of(demand, room), None
    if present is not None:
        start = held_of(present, ranks, experts)
        # Hysteresis: present replicas count slightly more.
        worth = worth._replace(own=worth.own * (1.0 + stay * start))
    held = placed(worth, room, start=start)
    return levelled(table_of(held, room.slots), demand, worth, 1.0 / room.balance, room.replicas, room.home)


def placed(
    worth: HolderValue, room: LocalityProblem, rounds: int = 32, start: BoolArray | None = None
) -> BoolArray:
    """bool [layers, ranks, experts]: placement by worth alone, whatever the load of ranks.

    start: a placement to improve; None: from nothing.
    """
    # The present placement is the start only if it is legal under these limits.
    if (
        start is None
        or start.sum(axis=2).max() > room.slots
        or start.sum(axis=1).max() > room.replicas
        or not _at_home(start, room)
    ):
        held = held_by_worth(worth, room.slots, room.replicas, room.home)
    else:
        held = filled(worth, start, room.slots, room.replicas, room.home, passes=1)
    held = exchange_experts(worth, held, room.slots, room.replicas, room.home, rounds)
    return filled(worth, held, room.slots, room.replicas, room.home, passes=1)


def _at_home(held: BoolArray, room: LocalityProblem) -> bool:
    """True if every expert has a holder where it must have one."""
    return bool((held if room.home is None else held & room.home).any(axis=1).all())


def measured(
    table: SlotTable, split: Split | None, demand: NDArray[Any], room: LocalityProblem
) -> LocalityPlacement:
    """Return the figures of any placement, as `locality_placement` does for its own.

    split: None: the one that levels it best.
    """
    return _levelled_figures(table, demand, room) if split is None else _figures(table, split, demand, room)


def _levelled_figures(table: SlotTable, demand: NDArray[Any], room: LocalityProblem) -> LocalityPlacement:
    return _figures(
        table, split_under(table, demand, room.ranks, room.node, 1.0 / room.balance), demand, room
    )


def _figures(
    table: SlotTable, split: Split, demand: NDArray[Any], room: LocalityProblem
) -> LocalityPlacement:
    placement = Placement(table, experts=demand.shape[2], ranks=room.ranks, split=split)
    sent = flows(placement, demand, room.node)
    total = np.maximum(layer_sums(demand), _TINY)
    load = sent.served.reshape(len(table), room.ranks, -1).sum(axis=2)
    balance = np.where(load.max(axis=1) > 0, load.mean(axis=1) / np.maximum(load.max(axis=1), _TINY), 1.0)
    local = sent.kept.sum(axis=1) / total
    near = _on_own_node(placement, demand, room) / total
    rank, node = room.prices if int(room.node.max()) > 0 else (1.0, 0.0)
    return LocalityPlacement(table, split, local, near, balance, (rank * local + node * near) / (rank + node))


def _on_own_node(placement: Placement, demand: NDArray[Any], room: LocalityProblem) -> FloatArray:
    """[layers]: pairs served on their own node. Flows are additive, so each node's demand is followed
    separately."""
    nodes = int(room.node.max()) + 1
    if nodes == 1:
        return layer_sums(demand)
    found = np.zeros(placement.layers)
    for at in range(nodes):
        here = room.node == at
        found += loads(placement, demand * here[:, None, None], room.node)[:, here].sum(axis=1)
    return found


def bound(
    demand: NDArray[Any], room: LocalityProblem, max_layers: int = 8
) -> tuple[NDArray[np.intp], FloatArray]:
    """Return (layers, saved): upper bound of the saving (`LocalityPlacement.saved`) of any placement,
    whatever its balance.

    This is the optimum of the linear programme, for at most `max_layers` layers, evenly spaced. About 10 ms
    a layer of 256 experts at 8 ranks, 70 ms at 64.
    """
    layers = np.unique(
        np.linspace(0, demand.shape[1] - 1, min(max_layers, demand.shape[1])).round().astype(np.intp)
    )
    worth = worth_of(demand[:, layers], room)
    return layers, np.array(
        [_optimum(own, shared, room) for own, shared in zip(worth.own, worth.shared, strict=True)]
    )


def _optimum(own: FloatArray, shared: FloatArray, room: LocalityProblem) -> float:
    """Maximise sum own x + sum shared y over fractional placements.

    x: [ranks, experts] replicas; y: [nodes, experts], 1 where the node has one.
    """
    (ranks, experts), nodes = own.shape, len(shared)
    cells, places = ranks * experts, nodes * experts
    at = np.arange(cells)
    rank, expert = at // experts, at % experts
    one, minus = np.ones(cells), -np.ones(cells)
    # Constraints: slots of ranks, at most `replicas` and at least one replica per expert, and y only on nodes
    # with a replica.
    full = coo_array((one, (rank, at)), (ranks, cells + places))
    replicas = coo_array((one, (expert, at)), (experts, cells + places))
    node = np.arange(places)
    first = coo_array(
        (
            np.r_[np.ones(places), minus],
            (np.r_[node, room.node[rank] * (nodes > 1) * experts + expert], np.r_[cells + node, at]),
        ),
        (places, cells + places),
    )
    limits = np.r_[
        np.full(ranks, room.slots), np.full(experts, room.replicas), -np.ones(experts), np.zeros(places)
    ]
    found = linprog(
        -np.r_[own.ravel(), shared.ravel()],
        A_ub=vstack([full, replicas, -replicas, first]),
        b_ub=limits,
        bounds=(0.0, 1.0),
        method="highs",
    )
    if found.status != 0:
        raise ValueError(
            f"locality: no bound for {experts} experts on {ranks} ranks of {room.slots} slots:"
            f" {found.message}"
        )
    return float(-found.fun)
