"""Plan the recovery from lost ranks: surviving experts, experts to load from storage, and the slots for them.
Pure.

Layer by layer, in this order. First, survivors share the load of their experts at once, which costs no bytes.
Second, lost experts are loaded, those of most demand first, into empty slots or into those of the cheapest
spare replicas. Third, experts that must have several live holders get them back, on other nodes where
possible. Last, few copies even out the survivors (`migration.solvers.even_split_copies`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray, FloatArray, SlotTable
from fleet.placement import EMPTY, Placement, Split, even_split
from migration.model.constraints import Constraints
from migration.model.cost_model import balance
from migration.model.placement_changes import NONE, NOWHERE, ChangeKind, PlacementChanges, joined, made
from migration.solvers.even_split_copies import even_split_copies
from migration.solvers.full_placement import full_placement
from migration.solvers.table_diff import shortened

_CLEARLY = 1.25
"""Factor by which an expert's demand must exceed that of an expert with a second holder to replace it
there."""


class Recovery(NamedTuple):
    """Plan to continue serving without some of the ranks."""

    lost: NDArray[np.intp]
    """int [n, 2]: (layer, expert) without a live holder; ascending."""
    missing: NDArray[np.intp]
    """int [layers]: slots that the survivors lack for one replica of every expert. As many lost experts stay
    lost."""
    short: NDArray[np.intp]
    """int [m, 2]: (layer, expert) with at least one live holder at the end, but fewer than required."""
    changes: PlacementChanges
    """Drops of what dead ranks held, moves of lost experts out of their slots (to be read from storage),
    replicas, and copies for balance. gain: in mean loads of a live rank; for a reloaded expert, its load."""
    table: SlotTable
    """int16 [layers, slots] at the end: dead ranks are empty, except for experts that could not be saved."""
    split: Split
    """At the end: even."""

    @property
    def possible(self) -> bool:
        """True if every expert can be served again."""
        return not self.missing.any()


def critical(
    load: NDArray[Any], count: int, replicas: NDArray[Any] | None = None, later: NDArray[Any] | None = None
) -> NDArray[np.int64]:
    """int64 [layers, experts], for `Constraints.min_replicas`: 2 for the `count` experts of most demand per
    layer, else 1.

    load: [layers, experts]. replicas: int [layers, experts], the present ones. An expert that has several is
    replaced only by one of clearly more demand, so that noise causes no moves. later: another window's load;
    the condition must then hold in both windows. ValueError when `count` exceeds the number of experts.
    """
    layers, experts = load.shape
    if not 0 <= count <= experts:
        raise ValueError(f"recovery: {count} critical experts of {experts}; choose 0 to {experts}")
    least, part = np.ones((layers, experts), np.int64), _parts(load)
    if replicas is not None:
        others = part if later is None else _parts(later)
        part = np.where(replicas > 1, _CLEARLY * np.maximum(part, others), np.minimum(part, others))
    np.put_along_axis(least, np.argsort(-part, axis=1, kind="stable")[:, :count], 2, axis=1)
    return least


def _parts(load: NDArray[Any]) -> FloatArray:
    """[layers, experts]: parts of a layer's total load."""
    return np.asarray(load / np.maximum(load.sum(axis=1, keepdims=True), 1e-300), np.float64)


def recover(
    placement: Placement,
    dead: NDArray[np.bool_],
    load: NDArray[Any],
    node: NDArray[np.intp],
    min_replicas: NDArray[Any] | None = None,
    *,
    max_copies: int | None = None,
    frozen: NDArray[np.bool_] | None = None,
) -> Recovery:
    """Plan the recovery of a placement from the loss of ranks.

    dead: bool [ranks]. load: [layers, experts], any unit. node: [ranks], numbers from 0. min_replicas: int
    [layers, experts], required live holders. max_copies: limit on copies for balance alone, in layers that
    change anyway, beside what must be brought back; None: no limit. frozen: bool [layers, experts], experts
    whose replicas stay where they are: they neither give way to a second holder nor move for balance; but
    lost experts may replace them.

    A second holder of an expert that must have two is given up where a lost expert finds no other slot. So
    the changes are ordered under `Constraints(live=~dead)` alone. ValueError when no rank is left, or the
    arrays do not fit the placement.
    """
    shape = (placement.layers, placement.experts)
    if dead.shape != (placement.ranks,) or node.shape != dead.shape or load.shape != shape:
        raise ValueError(
            f"recovery: dead {dead.shape}, node {node.shape}, load {load.shape}; the placement has"
            f" {placement.ranks} ranks and {shape}"
        )
    if dead.all():
        raise ValueError("recovery: all ranks are dead; restart the engine")
    least = np.ones(shape, np.int64) if min_replicas is None else np.asarray(min_replicas, np.int64)
    state = _Survivors.of(placement, dead, np.asarray(load, np.float64), node, frozen)
    lost = state.count == 0
    changes = [state.give_up_dead()]
    changes += state.reload(lost, least)
    changes += state.restore(least)
    gone, changed = (state.count == 0).sum(axis=1), (state.table != placement.expert_of_slot).any(axis=1)
    changes.append(state.even_out(np.flatnonzero((gone == 0) & changed), least, max_copies))
    return Recovery(
        lost=np.argwhere(lost),
        missing=gone,
        short=np.argwhere((state.count > 0) & (state.count < least)),
        changes=joined([part for part in changes if part]),
        table=state.table,
        split=even_split(state.table, placement.experts),
    )


@dataclass(slots=True, eq=False)
class _Survivors:
    """State of all layers, processed at once."""

    table: SlotTable
    count: NDArray[np.int64]
    """[layers, experts]: live holders."""
    held: BoolArray
    """[layers, ranks, experts], of live ranks."""
    load: FloatArray
    ranks: int
    dead: NDArray[np.bool_]
    node: NDArray[np.intp]
    frozen: NDArray[np.bool_]
    """[layers, experts]."""

    @classmethod
    def of(
        cls,
        placement: Placement,
        dead: NDArray[np.bool_],
        load: FloatArray,
        node: NDArray[np.intp],
        frozen: NDArray[np.bool_] | None,
    ) -> "_Survivors":
        held = (placement.replicas_on_rank > 0) & ~dead[:, None]
        table, resting = (
            placement.expert_of_slot.copy(),
            np.zeros(load.shape, bool) if frozen is None else frozen,
        )
        return cls(table, held.sum(axis=1), held, load, placement.ranks, dead, node, resting)

    @property
    def per(self) -> int:
        return int(self.table.shape[1]) // self.ranks

    @property
    def mean(self) -> FloatArray:
        """[layers]: mean load of a live rank."""
        return np.asarray(np.maximum(self.load.sum(axis=1), 1e-300) / max(int((~self.dead).sum()), 1))

    @property
    def rank_of_slot(self) -> NDArray[np.intp]:
        return np.arange(self.table.shape[1]) // self.per

    def give_up_dead(self) -> PlacementChanges:
        """Drop dead ranks' replicas, except one of each lost expert: the table must name a holder until there
        is another one."""
        layer, slot = np.nonzero((self.table != EMPTY) & self.dead[self.rank_of_slot])
        expert = self.table[layer, slot]
        # Of a lost expert the replica in the lowest slot stays named.
        first = np.full(self.count.shape, self.table.shape[1])
        np.minimum.at(first, (layer, expert), slot)
        goes = (self.count[layer, expert] > 0) | (first[layer, expert] != slot)
        layer, slot = layer[goes], slot[goes]
        self.table[layer, slot] = EMPTY
        return _changes(ChangeKind.DROP, layer, slot, np.full(len(layer), EMPTY), None, np.zeros(len(layer)))

    def reload(self, lost: BoolArray, least: NDArray[np.int64]) -> list[PlacementChanges]:
        """Reload lost experts, those of most demand first: one per layer and round. Each leaves its slot on a
        dead rank."""
        rounds = list[PlacementChanges]()
        for _ in range(int(lost.sum(axis=1).max(initial=0))):
            expert = np.where(self.count == 0, self.load, -1.0).argmax(axis=1)
            layer = np.flatnonzero((self.count == 0).any(axis=1))
            slot = self._slot_for(layer, expert[layer], least, at_need=True)
            layer, slot = layer[slot != NOWHERE], slot[slot != NOWHERE]
            if len(layer):
                rounds.append(self._bring(layer, slot, expert[layer], from_dead=True))
        return rounds

    def restore(self, least: NDArray[np.int64]) -> list[PlacementChanges]:
        """Add holders to experts that require several, those of most demand first. Experts without a possible
        slot are skipped."""
        rounds = list[PlacementChanges]()
        # Experts that could not be reloaded have no source to copy from.
        tried = self.count == 0
        while True:
            wanting = (self.count < least) & ~tried
            layer = np.flatnonzero(wanting.any(axis=1))
            if not len(layer):
                return rounds
            expert = np.where(wanting, self.load, -1.0).argmax(axis=1)[layer]
            slot = self._slot_for(layer, expert, least, at_need=False)
            tried[layer[slot == NOWHERE], expert[slot == NOWHERE]] = True
            layer, expert, slot = (part[slot != NOWHERE] for part in (layer, expert, slot))
            if len(layer):
                rounds.append(self._bring(layer, slot, expert, from_dead=False))

    def even_out(
        self, layers: NDArray[np.intp], least: NDArray[np.int64], max_copies: int | None
    ) -> PlacementChanges:
        """Make few copies for the balance of the survivors, in these layers."""
        live, load = ~self.dead, self.load[layers]
        if not len(layers) or live.sum() < 2 or max_copies == 0:
            return NONE
        # A full re-placement of the survivors sets the balance that few copies aim at.
        goal = full_placement(load, self.ranks, self.per, live=live)
        each = load / np.maximum((goal[:, :, None] == np.arange(load.shape[1])).sum(axis=1), 1)
        served = np.where(
            goal == EMPTY,
            0.0,
            np.take_along_axis(each, np.where(goal == EMPTY, 0, goal).astype(np.intp), axis=1),
        )
        reach = balance(served.reshape(len(layers), self.ranks, -1).sum(axis=2)[:, live])
        limits = Constraints(max_copies, frozen=self.frozen[layers], live=live, min_replicas=least[layers])
        found = shortened(
            self.table[layers],
            even_split_copies(self.table[layers], load, self.ranks, limits, goal=reach, node=self.node),
            self.ranks,
        )
        found = found._replace(layer=layers[found.layer].astype(np.int32))
        self.table = made(self.table, found)
        self.count[layers] = (self.table[layers][:, :, None] == np.arange(load.shape[1])).sum(axis=1)
        return found

    def _slot_for(
        self, layer: NDArray[np.intp], expert: NDArray[np.intp], least: NDArray[np.int64], *, at_need: bool
    ) -> NDArray[np.intp]:
        """int [n]: the slot for an expert in each of these layers; NOWHERE: there is none.

        The slot is on a live rank without the expert. It is empty, or holds a spare replica that may give
        way. With `at_need` it may also hold a replica that its expert should keep, but not the last one.
        Preferences, in this order: a node without the expert; the least load of the rank afterwards,
        including what it takes over from the replaced replica; the replaced replica of least demand.
        """
        table, rank = self.table[layer], self.rank_of_slot
        # Candidates: ranks without the expert, and on which nodes it is already (for spreading replicas over
        # nodes).
        lacks = ~np.take_along_axis(self.held[layer], expert[:, None, None], axis=2)[:, :, 0]
        on_node = np.zeros((len(layer), int(self.node.max()) + 1), bool)
        at, where = np.nonzero(~lacks)
        on_node[at, self.node[where]] = True
        # A slot may be used if it is empty, or its replica is above the required number, or (at_need) not the
        # last.
        count = self._of_slot(self.count)[layer]
        empty, spare = (
            table == EMPTY,
            (count > self._of_slot(least)[layer]) & ~self._of_slot(self.frozen)[layer].astype(bool),
        )
        open_to = (lacks & ~self.dead)[:, rank] & (empty | spare | (at_need & (count > 1)))
        # Load of each rank, less what leaves the slot, plus the part that the rank would take over from that
        # expert.
        each = self.load / np.maximum(self.count, 1)
        carried = np.stack([(each * self.held[:, one]).sum(axis=1) for one in range(self.ranks)], axis=1)[
            layer
        ][:, rank]
        leaves = self._of_slot(each)[layer]
        shifted = carried - leaves + leaves / np.maximum(count - 1, 1)
        # Sort keys from least to most important: possible at all, not at need, new node, load, demand of what
        # gives way.
        first = np.lexsort(
            (leaves, shifted, on_node[:, self.node][:, rank], ~(empty | spare), ~open_to), axis=1
        )[:, 0]
        return np.where(open_to[np.arange(len(layer)), first], first, NOWHERE)

    def _bring(
        self, layer: NDArray[np.intp], slot: NDArray[np.intp], expert: NDArray[np.intp], *, from_dead: bool
    ) -> PlacementChanges:
        other = None
        rank, found = slot // self.per, self.table[layer, slot].astype(np.intp)
        gone = found != EMPTY
        self.count[layer[gone], found[gone]] -= 1
        self.held[layer[gone], rank[gone], found[gone]] = False
        if from_dead:
            other = (self.table[layer] == expert[:, None]).argmax(axis=1)
            self.table[layer, other] = EMPTY
        self.table[layer, slot] = expert
        self.count[layer, expert] += 1
        self.held[layer, rank, expert] = True
        return _changes(
            ChangeKind.MOVE if from_dead else ChangeKind.REPLICATE,
            layer,
            slot,
            expert,
            other,
            self.load[layer, expert] / self.mean[layer],
        )

    def _of_slot(self, by_expert: NDArray[Any]) -> NDArray[Any]:
        """[layers, slots] of [layers, experts]; 0 in empty slots."""
        filled = self.table != EMPTY
        return np.where(
            filled, np.take_along_axis(by_expert, np.where(filled, self.table, 0).astype(np.intp), axis=1), 0
        )


def _changes(
    kind: ChangeKind,
    layer: NDArray[Any],
    slot: NDArray[Any],
    expert: NDArray[Any],
    other: NDArray[Any] | None,
    gain: FloatArray,
) -> PlacementChanges:
    count = len(layer)
    if not count:
        return NONE
    return PlacementChanges(
        np.full(count, kind, np.uint8),
        layer.astype(np.int32),
        slot.astype(np.int32),
        expert.astype(np.int16),
        np.full(count, NOWHERE, np.int32) if other is None else other.astype(np.int32),
        np.full(count, EMPTY, np.int16),
        gain,
    )
