"""Plans at random, and plans that cannot be carried out."""

import uuid
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleet.placement import EMPTY, Placement, linear, with_rows
from migration.model.plan import Copy, Handover, Plan, PlanStep, applied, planned
from migration.planning.layout_switch import switch
from migration.planning.staging_capacity import StagingRoom
from tests.faults.expert_contents import EXPERT_BYTES, PART_BYTES


class Impossible(Exception):
    """There is no such plan."""


def series(
    placement: Placement,
    random: np.random.Generator,
    handovers: int,
    *,
    source: int | None = None,
    target: int | None = None,
) -> Plan:
    """So many handovers of one copy or two (a swap) each, in layers that are whole. source, target: ranks;
    None: any. Impossible when the one has nothing for the other."""
    found, now = [], placement
    for _ in range(handovers):
        step = _step(now, random, source, target)
        handover = Handover(epoch=now.epoch + 1, steps=(step,))
        found.append(handover)
        now = applied(now, handover)
    return planned(placement, found, reason="a test", name=f"plan-{uuid.uuid4().hex[:12]}")


def turns(placement: Placement, random: np.random.Generator, handovers: int) -> Plan:
    """So many handovers, each of which turns one layer over, or several, and often moves an expert in another
    that stays whole."""
    found, now = [], placement
    for _ in range(handovers):
        handover = Handover(epoch=now.epoch + 1, steps=_turning(now, random))
        found.append(handover)
        now = applied(now, handover)
    return planned(placement, found, reason="a test", name=f"plan-{uuid.uuid4().hex[:12]}")


def landing(plan: Plan, rank: int) -> int:
    """Bytes that a plan brings into a rank's free cells, those of its own included."""
    return sum(_landing(step, rank, plan) for step in plan.steps)


def _landing(step: PlanStep, rank: int, plan: Plan) -> int:
    mine = range(rank * plan.slots_per_rank, (rank + 1) * plan.slots_per_rank)
    if step.kind == "shard":
        return plan.experts * PART_BYTES
    if step.kind == "gather":
        row = np.frombuffer(step.slots, "<i2")
        return int(np.count_nonzero(row[mine] != EMPTY)) * EXPERT_BYTES
    return sum(copy.bytes for copy in step.copies if copy.slot in mine)


def _turning(placement: Placement, random: np.random.Generator) -> tuple[PlanStep, ...]:
    """The steps of one handover. A layer that becomes whole by itself gets replicas, too: several at once
    would not have the room."""
    count = 1 if random.random() < 0.7 else placement.layers
    layers = [int(layer) for layer in random.permutation(placement.layers)[:count]]
    one_machine = StagingRoom(np.zeros(placement.ranks, np.intp), EXPERT_BYTES)
    steps: list[PlanStep] = []
    for layer in layers:
        row = _row(placement, random) if count == 1 else _even(placement)
        goal = with_rows(placement, {layer: row}, epoch=placement.epoch)
        wanted = sorted(set(placement.sharded) ^ {layer})
        steps += switch(placement, wanted, one_machine, goal=goal).plan.steps
    rest = [int(layer) for layer in placement.whole if layer not in layers]
    if rest and random.random() < 0.5:
        steps.append(_step(placement, random, None, None, rest))
    return tuple(steps)


def _row(placement: Placement, random: np.random.Generator) -> NDArray[np.int16]:
    """int16 [slots] of a layer that becomes whole: each expert somewhere, and of one a replica."""
    row = np.full((placement.ranks, placement.slots_per_rank), EMPTY, np.int16)
    for at, expert in enumerate(random.permutation(placement.experts)):
        row[at % placement.ranks, at // placement.ranks] = expert
    rank = int(random.integers(placement.ranks))
    row[rank, -1] = random.choice([expert for expert in range(placement.experts) if expert not in row[rank]])
    return row.reshape(-1)


def _even(placement: Placement) -> NDArray[np.int16]:
    """int16 [slots]: each expert once, in order."""
    even = linear(
        layers=1, experts=placement.experts, ranks=placement.ranks, slots_per_rank=placement.slots_per_rank
    )
    return even.expert_of_slot[0]


def copies(placement: Placement, target: int, count: int) -> Plan | None:
    """One handover that brings so many experts to one rank at once, into whatever slots; None: it has no
    slots for so many."""
    steps, table, per = [], placement.expert_of_slot.copy(), placement.slots_per_rank
    for layer in range(placement.layers):
        for slot in range(target * per, (target + 1) * per):
            if len(steps) < count and _is_spare(table, layer, slot):
                comes = [
                    one
                    for one in _replicable(placement, layer, target)
                    if one not in table[layer, target * per : (target + 1) * per]
                ]
                if comes:
                    steps.append(_replicate(placement, table, layer, comes[0], slot))
    if len(steps) < count:
        return None
    return planned(
        placement,
        [Handover(epoch=placement.epoch + 1, steps=tuple(steps))],
        reason="a test of room",
        name=f"plan-{uuid.uuid4().hex[:12]}",
    )


def swaps(placement: Placement, random: np.random.Generator, count: int) -> Plan:
    """One handover of so many swaps between ranks 0 and 1: each of the two has to bring in as many
    experts."""
    steps = []
    for layer in range(placement.layers):
        mine, theirs = (
            [int(one) for one in placement.on_rank(rank)[layer] if one != EMPTY] for rank in (0, 1)
        )
        pairs = zip(
            random.permutation([one for one in mine if one not in theirs]),
            random.permutation([one for one in theirs if one not in mine]),
            strict=False,
        )
        for expert, back in list(pairs)[: -(-count // placement.layers)]:
            old, slot = (
                int(np.flatnonzero(placement.expert_of_slot[layer] == one)[0]) for one in (expert, back)
            )
            both = (_copy(int(expert), old, slot), _copy(int(back), slot, old))
            steps.append(
                PlanStep(
                    kind="swap",
                    layer=layer,
                    slot=slot,
                    expert=int(expert),
                    other_slot=old,
                    other_expert=int(back),
                    copies=both,
                    why="a test",
                )
            )
    return planned(
        placement,
        [Handover(epoch=placement.epoch + 1, steps=tuple(steps))],
        reason="a test of room",
        name=f"plan-{uuid.uuid4().hex[:12]}",
    )


def _step(
    placement: Placement,
    random: np.random.Generator,
    source: int | None,
    target: int | None,
    layers: Sequence[int] | None = None,
) -> PlanStep:
    """layers: in one of these; None: in any that is whole."""
    among = placement.whole if layers is None else layers
    for _ in range(100 if len(among) else 0):
        layer = int(among[random.integers(len(among))])
        a, b = (int(rank) for rank in random.permutation(placement.ranks)[:2])
        found = _between(
            placement, random, layer, a if source is None else source, b if target is None else target
        )
        if found is not None:
            return found
    raise Impossible(f"nothing can be moved from rank {source} to rank {target} in {placement!r}")


def _between(
    placement: Placement, random: np.random.Generator, layer: int, source: int, target: int
) -> PlanStep | None:
    table, per = placement.expert_of_slot.copy(), placement.slots_per_rank
    mine, theirs = (table[layer, rank * per : (rank + 1) * per] for rank in (source, target))
    comes = [int(expert) for expert in mine if expert != EMPTY and expert not in theirs]
    if source == target or not comes:
        return None
    expert, at = int(random.choice(comes)), source * per
    old = at + int(np.flatnonzero(mine == expert)[0])
    room = [target * per + int(slot) for slot in np.flatnonzero(theirs == EMPTY)]
    if room and random.random() < 0.7:
        copy = _copy(expert, old, int(random.choice(room)))
        return PlanStep(
            kind="move",
            layer=layer,
            slot=copy.slot,
            expert=expert,
            other_slot=old,
            copies=(copy,),
            why="a test",
        )
    spare = (
        []
        if (table[layer] != EMPTY).sum() > placement.experts
        else [slot for slot in range(target * per, (target + 1) * per) if _is_spare(table, layer, slot)]
    )
    if spare and random.random() < 0.5:
        return _replicate(placement, table, layer, expert, int(random.choice(spare)), old)
    goes = [int(one) for one in theirs if one != EMPTY and one not in mine]
    if not goes:
        return None
    back = int(random.choice(goes))
    slot = target * per + int(np.flatnonzero(theirs == back)[0])
    both = (_copy(expert, old, slot), _copy(back, slot, old))
    return PlanStep(
        kind="swap",
        layer=layer,
        slot=slot,
        expert=expert,
        other_slot=old,
        other_expert=back,
        copies=both,
        why="a test",
    )


def _replicate(
    placement: Placement,
    table: NDArray[np.int16],
    layer: int,
    expert: int,
    slot: int,
    source: int | None = None,
) -> PlanStep:
    held = np.flatnonzero(placement.expert_of_slot[layer] == expert)
    evicted = int(table[layer, slot])
    table[layer, slot] = expert
    copy = _copy(expert, int(held[0]) if source is None else source, slot)
    return PlanStep(
        kind="replicate",
        layer=layer,
        slot=slot,
        expert=expert,
        evicted=None if evicted == EMPTY else evicted,
        copies=(copy,),
        why="a test",
    )


def _is_spare(table: NDArray[np.int16], layer: int, slot: int) -> bool:
    held = table[layer, slot]
    return bool(held == EMPTY or (table[layer] == held).sum() > 1)


def _replicable(placement: Placement, layer: int, target: int) -> list[int]:
    return [
        expert for expert in range(placement.experts) if not placement.replicas_on_rank[layer, target, expert]
    ]


def _copy(expert: int, source: int, slot: int) -> Copy:
    return Copy(expert=expert, slot=slot, source=source, link="same-node", bytes=EXPERT_BYTES)
