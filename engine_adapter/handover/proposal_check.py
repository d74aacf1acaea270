"""Check a proposed placement for one rank, and derive the incoming experts and the sources to read them from.
Pure.

A proposal comes from the bus. So all of it is checked against the served placement before the rank acts on
it.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.experts import ExpertId
from fleet.facts.engines import FIXED_ATTENTION
from fleet.placement import EMPTY, Placement, with_attention
from fleet.requests.handovers import ExpertCopy, ProposeHandover
from fleet.sharding import ALL_PARTS, contents, group_of, turn, turned

LONGEST_SECONDS = 86_400.0
"""Upper limit of the staging deadline."""


class StagingFault(StrEnum):
    """Reason code for a rank that cannot stage."""

    PLACEMENT = "placement"
    """The proposal does not fit the served placement."""
    COPIES = "copies"
    """The copies do not fit the proposed placement."""
    DEADLINE = "deadline"
    """The deadline is out of range."""
    ROOM = "room"
    """Too few cells are free."""
    QUARANTINE = "quarantine"
    """Too many cells are quarantined."""
    SOURCE = "source"
    """No holder grants a read lease, or none responds."""
    TRANSFER = "transfer"
    """A read failed."""
    CHECKSUM = "checksum"
    """The checksums do not match."""
    OVERDUE = "overdue"
    """The deadline passed."""
    ENGINE = "engine"
    """The engine could not prepare the placement."""
    REFUSED = "refused"
    """A worker of an engine that rearranges has dropped the map that it held."""


class CannotStage(Exception):
    """A rank cannot stage a proposal. The text names the cause and the remedy."""

    def __init__(self, fault: StagingFault, text: str) -> None:
        super().__init__(text)
        self.fault = fault


class IncomingExperts(NamedTuple):
    """An expert, or a part of one, that the rank must copy into a cell."""

    layer: int
    slot: int
    """Slot of this rank. In a layer that becomes sharded that of the expert's group."""
    expert: int
    sources: tuple[int, ...]
    """Slots over all ranks that hold it in the served epoch, the proposed source first. A part of a layer
    that turns over has one, which may be this rank's own."""
    part: int = ALL_PARTS
    sharded: bool = False
    """The layer becomes sharded."""


class ProposalRequest(NamedTuple):
    """Work that a proposal demands from one rank."""

    coming: tuple[IncomingExperts, ...]
    moved: int
    """Experts that only change slots on this rank. They keep their cells."""


def required_work(
    command: ProposeHandover,
    proposed: Placement,
    served: Placement,
    rank: int,
    parts: int = 1,
    tp_refusal: str = FIXED_ATTENTION,
) -> ProposalRequest:
    """Return the work that a proposal demands from this rank. parts: into how many its memory cuts an expert;
    1: layers cannot turn over. tp_refusal: `EngineJoined.tp_refusal`. CannotStage names the mismatch: the
    shape, the attention, the deadline, a copy, or a slot without a copy."""
    check_terms(command.deadline_seconds, proposed, served, parts, tp_refusal)
    if proposed.duplicates:
        raise CannotStage(
            StagingFault.PLACEMENT,
            "a rank would hold an expert twice in a layer, which this engine does not do; plan anew",
        )
    work = _coming(proposed, served, rank, _sources(command.copies, proposed, served))
    return work._replace(coming=work.coming + _turning(proposed, served, rank))


def check_terms(
    deadline_seconds: float,
    proposed: Placement,
    served: Placement,
    parts: int = 1,
    tp_refusal: str = FIXED_ATTENTION,
) -> None:
    """Check the shape, the attention and the deadline of a proposal. parts, tp_refusal: as in
    `required_work`. CannotStage names the mismatch."""
    shape = (proposed.layers, proposed.experts, proposed.ranks, proposed.slots_per_rank)
    present = (served.layers, served.experts, served.ranks, served.slots_per_rank)
    if shape != present:
        raise CannotStage(
            StagingFault.PLACEMENT,
            f"a placement of (layers, experts, ranks, slots per rank) {shape}, and this engine has {present};"
            " plan anew",
        )
    changed = turned(served, proposed)
    if changed and served.attention == proposed.attention == "tp":
        raise CannotStage(
            StagingFault.PLACEMENT,
            f"layers {list(changed)} would change their form while attention is tensor-parallel; make it"
            " data-parallel first",
        )
    if changed and parts != served.ranks:
        raise CannotStage(
            StagingFault.PLACEMENT,
            f"layers {list(changed)} change between whole and sharded, but the memory of this engine does not"
            f" cut experts into {served.ranks} parts; plan anew",
        )
    if proposed.attention != served.attention:
        _check_attention(proposed, served, tp_refusal)
    if not 0 < deadline_seconds <= LONGEST_SECONDS:
        raise CannotStage(
            StagingFault.DEADLINE,
            f"{deadline_seconds} s for staging: use more than 0, and {LONGEST_SECONDS:.0f} at most",
        )


def _check_attention(proposed: Placement, served: Placement, tp_refusal: str) -> None:
    """Check a change of attention: the engine can do it, all layers are sharded, and nothing else changes.
    CannotStage names the mismatch."""
    change = f"its attention would change from {served.attention} to {proposed.attention}"
    if tp_refusal:
        raise CannotStage(StagingFault.PLACEMENT, f"{change}, but {tp_refusal}; plan anew")
    if len(served.whole):
        raise CannotStage(
            StagingFault.PLACEMENT,
            f"{change} while {len(served.whole)} of {served.layers} layers are whole; make all layers sharded"
            " first",
        )
    if not with_attention(served, proposed.attention, epoch=proposed.epoch).serves_as(proposed):
        raise CannotStage(
            StagingFault.PLACEMENT,
            f"{change} together with layers or experts; plan a handover for each",
        )


def check_whole_map(proposed: Placement) -> None:
    """Check that an engine that moves its experts itself can serve a placement. CannotStage names the
    slot or the rule: all slots are filled, and replicas share evenly."""
    empty = np.argwhere(proposed.expert_of_slot == EMPTY)
    if len(empty):
        layer, slot = empty[0].tolist()
        raise CannotStage(
            StagingFault.PLACEMENT,
            f"layer {layer} slot {slot} is empty, and this engine has no empty slots; plan anew",
        )
    even = Placement(
        proposed.expert_of_slot,
        experts=proposed.experts,
        ranks=proposed.ranks,
        duplicates=proposed.duplicates,
        attention=proposed.attention,
    )
    if not proposed.serves_as(even):
        raise CannotStage(
            StagingFault.PLACEMENT,
            "replicas share their tokens unevenly, and this engine shares them evenly; plan anew (policy"
            " uniform)",
        )


def _sources(
    copies: Sequence[ExpertCopy], proposed: Placement, served: Placement
) -> dict[tuple[int, int], int]:
    """Map each (layer, slot over all ranks) to the slot that it is copied from."""
    sources: dict[tuple[int, int], int] = {}
    layers, slots = proposed.expert_of_slot.shape
    for copy in copies:
        what = f"copy of expert {copy.layer}/{copy.expert} from slot {copy.source} to slot {copy.slot}"
        if not (0 <= copy.layer < layers and 0 <= copy.slot < slots and 0 <= copy.source < slots):
            raise CannotStage(
                StagingFault.COPIES, f"{what}: there are {layers} layers of {slots} slots; plan anew"
            )
        if copy.expert == EMPTY or int(proposed.expert_of_slot[copy.layer, copy.slot]) != copy.expert:
            raise CannotStage(
                StagingFault.COPIES,
                f"{what}: slot {copy.slot} of the new placement does not hold it; plan anew",
            )
        if int(served.expert_of_slot[copy.layer, copy.source]) != copy.expert:
            raise CannotStage(
                StagingFault.COPIES,
                f"{what}: slot {copy.source} does not hold it in epoch {served.epoch}, which is served; plan"
                " anew",
            )
        if sources.setdefault((copy.layer, copy.slot), copy.source) != copy.source:
            raise CannotStage(
                StagingFault.COPIES, f"{what}: another copy fills slot {copy.slot} too; plan anew"
            )
    return sources


def _coming(
    proposed: Placement, served: Placement, rank: int, sources: dict[tuple[int, int], int]
) -> ProposalRequest:
    first = rank * proposed.slots_per_rank
    before, after = contents(served, rank), contents(proposed, rank)
    changed = (after != before) & (after != EMPTY)
    changed[list(turned(served, proposed))] = False
    coming: list[IncomingExperts] = []
    moved = 0
    for layer, slot in np.argwhere(changed).tolist():
        expert = int(after[layer, slot])
        if expert in before[layer]:
            moved += 1
            continue
        source = sources.get((layer, first + slot))
        if source is None:
            raise CannotStage(
                StagingFault.COPIES,
                f"expert {ExpertId(layer, expert)} is new in slot {first + slot} of rank {rank}, and no copy"
                " names its source; plan anew",
            )
        others = (
            holder
            for holder in np.flatnonzero(served.expert_of_slot[layer] == expert).tolist()
            if holder != source
        )
        coming.append(IncomingExperts(layer, slot, expert, (source, *others)))
    return ProposalRequest(tuple(coming), moved)


def _turning(proposed: Placement, served: Placement, rank: int) -> tuple[IncomingExperts, ...]:
    """Return the parts that this rank gets of the layers that turn over."""
    slots = served.slots_per_rank
    # The slot of each (rank, expert), in the form in which the layer is whole.
    slot_of = {
        layer: _slots_by_expert(served if layer in proposed.sharded else proposed, layer)
        for layer in turned(served, proposed)
    }
    coming: list[IncomingExperts] = []
    columns = (column.tolist() for column in turn(served, proposed).to(rank))
    for layer, expert, part, source, _ in zip(*columns, strict=True):
        group, _ = group_of(expert, served.ranks)
        if sharded := layer in proposed.sharded:
            there, here = int(slot_of[layer][source, expert]), group
        else:
            there, here = group, int(slot_of[layer][rank, expert])
        coming.append(IncomingExperts(layer, here, expert, (source * slots + there,), part, sharded))
    return tuple(coming)


def _slots_by_expert(placement: Placement, layer: int) -> NDArray[np.int64]:
    """Return the slot of each rank that holds an expert of a whole layer: int64 [ranks, experts], -1 for
    none."""
    row = placement.expert_of_slot[layer].reshape(placement.ranks, -1)
    rank, slot = np.nonzero(row != EMPTY)
    found = np.full((placement.ranks, placement.experts), EMPTY, np.int64)
    found[rank, row[rank, slot]] = slot
    return found
