"""Build the plans that operators request of an engine that moves its experts itself: one expert to a rank,
the map before a plan. Pure.

Every plan is one handover to a full map, and has been tried (`operator_plans.checked`). Layers that it does
not touch stay as the engine reported them.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import SlotTable
from fleet.experts import ExpertId
from fleet.placement import EMPTY, Placement
from fleet.requests.plans import MigrateExpert
from fleet.text import counted
from migration.model.plan import Plan, planned
from migration.planning.operator_plans import check_named, checked, layer_load, reason_of
from migration.planning.rearrangement import one_map
from migration.planning.staging_capacity import StagingRoom
from migration.solvers.full_tables import completed


class _Write(NamedTuple):
    """Experts to write into slots of a layer, and the sentence that names what gives way."""

    slots: dict[int, int]
    why: str


def one_expert_of_a_map(
    placement: Placement, request: MigrateExpert, room: StagingRoom, demand: NDArray[Any] | None = None
) -> Plan:
    """Plan to bring an expert to a rank. demand: [targets, layers, experts]; None: unknown.

    It overwrites the least useful redundant copy on the rank: the one whose loss adds least load to another
    copy. Where there is none, or `swap` names an expert, the two ranks exchange. ValueError gives the reason
    why neither is legal, and the remedy.
    """
    check_named(placement, request)
    layer = _Layer(placement, request, layer_load(placement, request, demand))
    write = layer.swap(request.swap) if request.swap is not None else layer.overwrite() or layer.swap(None)
    table = placement.expert_of_slot.copy()
    for slot, expert in write.slots.items():
        table[request.layer, slot] = expert
    handovers = one_map(placement, table, room, why=write.why)
    reason = f"requested: {reason_of(request)}; {write.why}"
    return checked(placement, planned(placement, handovers, reason=reason), rearranges=True)


class _Layer:
    """The layer of the requested expert."""

    def __init__(self, placement: Placement, request: MigrateExpert, load: NDArray[np.float64]) -> None:
        self._request, self._load, self._per = request, load, placement.slots_per_rank
        self._row: list[int] = placement.expert_of_slot[request.layer].tolist()
        self._name = ExpertId(request.layer, request.expert)
        self._holders = placement.holders(self._name)
        if request.move:
            raise ValueError(
                f"to move expert {self._name} would leave an empty slot, which an engine that moves its"
                " experts itself cannot have; omit --move, or name what comes back with --swap"
            )
        if request.rank in self._holders:
            raise ValueError(f"rank {request.rank} holds expert {self._name} already")
        if request.source is not None and request.source not in self._holders:
            held = ", ".join(map(str, self._holders))
            raise ValueError(f"rank {request.source} does not hold expert {self._name}; it is on rank {held}")

    def overwrite(self) -> _Write | None:
        """Return the write over the least useful redundant copy on the rank; None: it has none."""
        spare = [slot for slot in self._slots(self._request.rank) if self._row.count(self._row[slot]) > 1]
        if not spare:
            return None
        slot = min(spare, key=self._loss)
        left = counted(self._row.count(self._row[slot]) - 1, "copy", "copies")
        why = f"overwrites the least useful redundant copy, of expert {self._row[slot]}, which keeps {left}"
        return _Write({slot: self._request.expert}, why)

    def swap(self, named: int | None) -> _Write:
        """Return the exchange with the source rank. named: the expert that goes there; None: the least
        demanded one that may."""
        request = self._request
        source = self._holders[0] if request.source is None else request.source
        there, here = self._held(source), self._slots(request.rank)
        if named is not None and named not in self._held(request.rank):
            raise ValueError(
                f"rank {request.rank} does not hold expert {ExpertId(request.layer, named)}, so it cannot be"
                " swapped"
            )
        legal = [slot for slot in here if self._row[slot] not in there and named in (None, self._row[slot])]
        if not legal and named is not None:
            raise ValueError(
                f"rank {source} holds expert {ExpertId(request.layer, named)} already, so they cannot swap;"
                " omit --swap, and a redundant copy can give way"
            )
        if not legal:
            raise ValueError(
                f"rank {request.rank} has no redundant copy to overwrite for expert {self._name}, and rank"
                f" {source} holds all of its experts already, so they cannot swap either; name another --from"
                " rank, or start the engine with more redundant experts"
            )
        slot = min(legal, key=lambda slot: (float(self._load[self._row[slot]]), self._row[slot]))
        back = self._row.index(request.expert, source * self._per)
        why = f"swaps with expert {self._row[slot]}, which goes to rank {source}"
        return _Write({slot: request.expert, back: self._row[slot]}, why)

    def _loss(self, slot: int) -> tuple[float, int, int]:
        """Load that another copy gets when this one goes; none if the rank has the expert twice."""
        expert, copies = self._row[slot], self._row.count(self._row[slot])
        twice = self._held(slot // self._per).count(expert) > 1
        return 0.0 if twice else float(self._load[expert]) / (copies * (copies - 1)), expert, slot

    def _slots(self, rank: int) -> range:
        return range(rank * self._per, (rank + 1) * self._per)

    def _held(self, rank: int) -> list[int]:
        return self._row[rank * self._per : (rank + 1) * self._per]


def restoring_map(placement: Placement, goal: Placement, undoes: str, room: StagingRoom) -> Plan:
    """Plan from the served map back to `goal`: the same experts on every rank.

    Experts that the goal held twice on a rank, as an initial map may, come back once; another one fills the
    slot. ValueError when that is impossible, or already the case.
    """
    _check_shape(placement, goal, f"the placement before plan {undoes}")
    handovers = one_map(placement, _legal(goal), room, why=f"as before plan {undoes}")
    if not handovers:
        raise ValueError(f"the engine serves what it served before plan {undoes} already")
    reason = f"back to epoch {goal.epoch}, before plan {undoes}"
    return checked(placement, planned(placement, handovers, reason=reason), rearranges=True)


def requested_map(placement: Placement, goal: Placement, room: StagingRoom) -> Plan:
    """Plan from the served map to one that an operator names. ValueError when it has another shape, an empty
    slot or an expert twice on a rank, or is served already."""
    _check_shape(placement, goal, "the map")
    empty = np.argwhere(goal.expert_of_slot == EMPTY)
    if len(empty):
        layer, slot = empty[0]
        raise ValueError(f"the map leaves layer {layer} slot {slot} empty; every slot must hold an expert")
    if goal.duplicates:
        raise ValueError("the map holds an expert twice on a rank; name another expert in one of the slots")
    handovers = one_map(placement, goal.expert_of_slot, room, why="requested")
    if not handovers:
        raise ValueError("the engine serves the same experts on every rank already")
    return checked(placement, planned(placement, handovers, reason="requested: a whole map"), rearranges=True)


def _check_shape(placement: Placement, goal: Placement, what: str) -> None:
    now, then = ((one.layers, one.experts, one.ranks, one.slots_per_rank) for one in (placement, goal))
    if now != then:
        raise ValueError(
            f"{what} has (layers, experts, ranks, slots per rank) {then}, the engine has {now}: it was made"
            " for another engine or configuration"
        )


def _legal(goal: Placement) -> SlotTable:
    """Return a table with the goal's experts on every rank, each once."""
    nothing = np.zeros((goal.layers, goal.experts))
    return completed(goal.expert_of_slot, nothing, goal.ranks)
