"""Build the plans that operators request: one expert to a rank, a plan from a file, the placement before a
plan. Pure.

Every plan returned here is valid on the placement that it was made for: `migration.model.plan.replay` has
tried it.
"""

import re
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.experts import ExpertId
from fleet.facts.migrations import MigrationPlanned
from fleet.placement import EMPTY, Placement, Split, even_split
from fleet.requests.plans import MigrateExpert
from fleet.sharding import turned
from migration.model.placement_changes import NONE, NOWHERE, ChangeKind, PlacementChanges, made
from migration.model.plan import Copy, Handover, Plan, planned, replay
from migration.model.plan_log import EnginePlans
from migration.planning.handover_batching import ordered, same_holders
from migration.planning.layout_switch import switch
from migration.planning.staging_capacity import StagingRoom
from migration.solvers.table_diff import between

MAX_PLAN_BYTES = 16 * 1024 * 1024
"""Bytes of JSON in the largest plan accepted."""
MAX_EXPERT_BYTES = 1 << 40
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def checked(placement: Placement, plan: Plan, *, rearranges: bool = False) -> Plan:
    """Return the plan if it can be carried out on the served placement. ValueError (also Inapplicable) gives
    the reason. rearranges: the engine moves its experts itself."""
    if plan.refused or not plan.handovers:
        raise ValueError(f"plan {plan.id} does nothing: {plan.refused or 'it has no handovers'}")
    if plan.base_epoch != placement.epoch:
        raise ValueError(
            f"plan is for epoch {plan.base_epoch}, the engine serves {placement.epoch}; plan anew"
        )
    unheld = next((copy for copy in plan.copies if copy.source is None), None)
    if unheld is not None:
        raise ValueError(
            f"plan {plan.id} reads expert {unheld.expert} from storage, which no engine can do while it"
            " serves; restart the engine instead"
        )
    end = replay(placement, plan)[-1]
    if rearranges:
        _check_map(plan, end)
    return plan


def _check_map(plan: Plan, end: Placement) -> None:
    """Raise ValueError unless a plan is one handover to a full map with even shares. That no expert comes to
    a rank twice, `replay` has checked."""
    layers = sorted({step.layer for step in plan.steps})
    if len(plan.handovers) != 1:
        problem = f"it has {len(plan.handovers)} handovers"
    elif not end.even:
        problem = "its shares are not even"
    elif (end.expert_of_slot[layers] == EMPTY).any():
        problem = "it leaves a slot empty"
    else:
        return
    raise ValueError(
        f"plan {plan.id}: {problem}; an engine that moves its experts itself takes one full map: plan anew"
        " for this engine"
    )


def read(content: bytes, placement: Placement, *, rearranges: bool = False) -> Plan:
    """Parse a plan from JSON. ValueError when it is malformed, or not valid on the placement. rearranges: as
    in `checked`."""
    if len(content) > MAX_PLAN_BYTES:
        raise ValueError(
            f"a plan of {len(content)} bytes exceeds the limit of {MAX_PLAN_BYTES}; apply it in parts"
        )
    try:
        plan = msgspec.json.decode(content, type=Plan)
    except msgspec.DecodeError as error:
        raise ValueError(f"this is no plan ({error}); make one with `roost plan --out`") from error
    if not _ID.fullmatch(plan.id):
        raise ValueError(
            f"plan {plan.id[:64]!r}: an id has 1 to 64 letters, digits, '.', '-' or '_'; make the plan with"
            " `roost plan --out`"
        )
    parts = [moved for step in plan.steps for moved in step.parts]
    heavy = next((moved for moved in parts if not 0 <= moved.bytes <= moved.parts * MAX_EXPERT_BYTES), None)
    if heavy is not None:
        raise ValueError(
            f"plan {plan.id}: {heavy.parts} parts have {heavy.bytes} bytes; each must have 0 to"
            f" {MAX_EXPERT_BYTES}"
        )
    odd = next((copy for copy in plan.copies if not 0 <= copy.bytes <= MAX_EXPERT_BYTES), None)
    if odd is not None:
        raise ValueError(
            f"plan {plan.id}: expert {odd.expert} has {odd.bytes} bytes; they must be 0 to {MAX_EXPERT_BYTES}"
        )
    return checked(placement, plan, rearranges=rearranges)


# One expert


def one_expert(
    placement: Placement, request: MigrateExpert, room: StagingRoom, demand: NDArray[Any] | None = None
) -> Plan:
    """Plan to bring an expert to a rank. demand: [ranks, layers, experts] demand of each rank's requests;
    None: unknown.

    The expert goes into a free slot, or replaces a spare replica. Where there is neither, or `swap` names an
    expert, the two ranks exchange: the least demanded expert goes the other way, and of equal ones the lowest
    number. ValueError gives the reason why it is impossible.
    """
    change = _Change(placement, request, room, layer_load(placement, request, demand))
    changes = change.made()
    handovers = ordered(
        placement,
        changes,
        room,
        split=_kept_split(placement, made(placement.expert_of_slot, changes)),
        why=[reason_of(request)],
    )
    if request.source is not None:
        handovers = tuple(_read_from(handover, request, change.there, room) for handover in handovers)
    return checked(placement, planned(placement, handovers, reason=f"requested: {reason_of(request)}"))


def layer_load(
    placement: Placement, request: MigrateExpert, demand: NDArray[Any] | None
) -> NDArray[np.float64]:
    """[experts]: demand of the layer, summed over ranks."""
    fits = (
        demand is not None
        and demand.shape[1:] == (placement.layers, placement.experts)
        and 0 <= request.layer < placement.layers
    )
    return (
        np.asarray(demand[:, request.layer].sum(axis=0), np.float64)
        if demand is not None and fits
        else np.zeros(placement.experts)
    )


def reason_of(request: MigrateExpert) -> str:
    return f"expert {ExpertId(request.layer, request.expert)} to rank {request.rank}"


class _Change:
    """The one change that brings the expert."""

    def __init__(
        self, placement: Placement, request: MigrateExpert, room: StagingRoom, load: NDArray[np.float64]
    ) -> None:
        check_named(placement, request)
        self._request = request
        self._per = placement.slots_per_rank
        self._load = load
        self._row: list[int] = placement.expert_of_slot[request.layer].tolist()
        holders = placement.holders(ExpertId(request.layer, request.expert))
        if request.rank in holders:
            raise ValueError(
                f"rank {request.rank} holds expert {ExpertId(request.layer, request.expert)} already"
            )
        if request.source is not None and request.source not in holders:
            held = ", ".join(map(str, holders))
            raise ValueError(
                f"rank {request.source} does not hold expert {ExpertId(request.layer, request.expert)}; it is"
                f" on rank {held}"
            )
        node = room.node.tolist()
        self.source: int = (
            min(holders, key=lambda rank: (node[rank] != node[request.rank], rank))
            if request.source is None
            else request.source
        )
        self.there = self._place(request.expert, self.source)
        """Slot that the expert is read from."""

    def made(self) -> PlacementChanges:
        request, here = (
            self._request,
            range(self._request.rank * self._per, (self._request.rank + 1) * self._per),
        )
        there = self.there
        if request.swap is not None:
            return self._swap(self._named(request.swap), there)
        slot = next((slot for slot in here if self._row[slot] == EMPTY), None)
        if slot is None:
            spare = [slot for slot in here if self._row.count(self._row[slot]) > 1]
            slot = min(spare, key=self._least, default=None)
        if slot is not None:
            return (
                self._one(ChangeKind.MOVE, slot, there, EMPTY)
                if request.move
                else self._one(ChangeKind.REPLICATE, slot, NOWHERE, EMPTY)
            )
        others = [slot for slot in here if self._row[slot] not in self._held(self.source)]
        if not others:
            raise ValueError(
                f"rank {request.rank} has no slot for expert {ExpertId(request.layer, request.expert)}, and"
                f" rank {self.source} can take none of its experts"
            )
        return self._swap(min(others, key=self._least), there)

    def _named(self, expert: int) -> int:
        """Return the slot of the expert that `swap` names."""
        request = self._request
        if expert not in self._held(request.rank):
            raise ValueError(
                f"rank {request.rank} does not hold expert {ExpertId(request.layer, expert)}, so it cannot be"
                " swapped"
            )
        if expert in self._held(self.source):
            raise ValueError(
                f"rank {self.source} holds expert {ExpertId(request.layer, expert)} already; omit swap, and a"
                " replica can give way"
            )
        return self._place(expert, request.rank)

    def _swap(self, slot: int, there: int) -> PlacementChanges:
        return self._one(ChangeKind.SWAP, slot, there, self._row[slot])

    def _one(self, kind: ChangeKind, slot: int, other_slot: int, other_expert: int) -> PlacementChanges:
        return PlacementChanges(
            kind=np.array([kind], np.uint8),
            layer=np.array([self._request.layer], np.int32),
            slot=np.array([slot], np.int32),
            expert=np.array([self._request.expert], np.int16),
            other_slot=np.array([other_slot], np.int32),
            other_expert=np.array([other_expert], np.int16),
            gain=np.zeros(1),
        )

    def _least(self, slot: int) -> tuple[float, int]:
        return float(self._load[self._row[slot]]), self._row[slot]

    def _held(self, rank: int) -> list[int]:
        return self._row[rank * self._per : (rank + 1) * self._per]

    def _place(self, expert: int, rank: int) -> int:
        return self._row.index(expert, rank * self._per)


def check_named(placement: Placement, request: MigrateExpert) -> None:
    """Raise ValueError for numbers out of range."""
    named = [
        ("layer", request.layer, placement.layers),
        ("expert", request.expert, placement.experts),
        ("rank", request.rank, placement.ranks),
    ]
    named += [("rank", request.source, placement.ranks)] if request.source is not None else []
    named += [("expert", request.swap, placement.experts)] if request.swap is not None else []
    for what, number, most in named:
        if not 0 <= number < most:
            raise ValueError(
                f"engine {request.engine!r} has no {what} {number}; they run from 0 to {most - 1}"
            )
    if request.layer in placement.sharded:
        raise ValueError(
            f"layer {request.layer} is sharded: every rank holds a part of each of its experts, so none can"
            " move; make the layer whole first (roost layout)"
        )


def _kept_split(placement: Placement, end: NDArray[np.int16]) -> Split | None:
    """Return the split after a change: experts with new holders share evenly, others as before. None: even,
    as before."""
    if placement.even:
        return None
    same = same_holders(end, placement.expert_of_slot, placement.experts)
    return Split(
        *(
            np.where(same, before, even).astype(np.uint16)
            for before, even in zip(placement.split, even_split(end, placement.experts), strict=True)
        )
    )


def _read_from(handover: Handover, request: MigrateExpert, source: int, room: StagingRoom) -> Handover:
    """Return the handover with the expert read from the slot of the named source."""
    return msgspec.structs.replace(
        handover,
        steps=tuple(
            msgspec.structs.replace(
                step,
                copies=tuple(
                    _copy_from(copy, source, request, room) if copy.slot == step.slot else copy
                    for copy in step.copies
                ),
            )
            for step in handover.steps
        ),
    )


def _copy_from(copy: Copy, source: int, request: MigrateExpert, room: StagingRoom) -> Copy:
    near = room.node[request.source] == room.node[request.rank]
    return msgspec.structs.replace(copy, source=source, link="same-node" if near else "cross-node")


# Back


def plan_to_undo(plans: EnginePlans, plan: str = "") -> MigrationPlanned:
    """Return the plan to undo: the one with this id, or (empty) the last one with a committed handover.
    ValueError when there is none."""
    committed = {name: run for name, run in plans.runs.items() if run.progress.numbers}
    if not committed or (plan and plan not in committed):
        known = ", ".join(reversed(committed)) or "none"
        raise ValueError(
            f"no plan {plan!r} of which anything was committed; there are: {known}"
            if plan
            else "no plan of this engine was ever committed"
        )
    return committed[plan or next(reversed(committed))].planned


def restoring_plan(placement: Placement, goal: Placement, undoes: str, room: StagingRoom) -> Plan:
    """Plan from the served placement back to `goal`: the same experts on every rank, and the same split.

    ValueError when that is impossible, or already the case.
    """
    now, then = ((one.layers, one.experts, one.ranks, one.slots_per_rank) for one in (placement, goal))
    if now != then:
        raise ValueError(
            f"the placement before plan {undoes} had (layers, experts, ranks, slots per rank) {then}, the"
            f" engine has {now}: it was restarted with another configuration"
        )
    handovers = _moves_back(placement, goal, room)
    if placement.layout != goal.layout:
        moved = replay(placement, planned(placement, handovers))[-1] if handovers else placement
        switched = switch(moved, goal.sharded, room, attention=goal.attention, goal=goal)
        handovers += switched.plan.handovers
    if not handovers:
        raise ValueError(f"the engine serves what it served before plan {undoes} already")
    return checked(
        placement, planned(placement, handovers, reason=f"back to epoch {goal.epoch}, before plan {undoes}")
    )


def _moves_back(placement: Placement, goal: Placement, room: StagingRoom) -> tuple[Handover, ...]:
    """Return the handovers that restore the layers which are whole in both placements."""
    turns = list(turned(placement, goal))
    target = goal.expert_of_slot.copy()
    target[turns] = placement.expert_of_slot[turns]
    changes = between(placement.expert_of_slot, target, placement.ranks)
    end = made(placement.expert_of_slot, changes) if changes else placement.expert_of_slot
    split = None
    if not goal.even or (turns and not placement.even):
        split = _split_of(goal, end)
        for part, now in zip(split, placement.split, strict=True):
            part[turns] = now[turns]
    return ordered(placement, changes if changes else NONE, room, split=split)


def _split_of(goal: Placement, end: NDArray[np.int16]) -> Split:
    """Return the split of `goal` for a table with the same experts on every rank, perhaps in other slots."""
    per, rank = goal.slots_per_rank, np.arange(end.shape[1]) // goal.slots_per_rank
    where = np.zeros((goal.layers, goal.ranks, goal.experts), np.intp)
    layer, slot = np.nonzero(goal.expert_of_slot != EMPTY)
    where[layer, slot // per, goal.expert_of_slot[layer, slot]] = slot
    filled = end != EMPTY
    found = where[np.arange(goal.layers)[:, None], rank, np.where(filled, end, 0)]
    return Split(
        *(
            np.where(filled, np.take_along_axis(part, found, axis=1), 0).astype(np.uint16)
            for part in goal.split
        )
    )
