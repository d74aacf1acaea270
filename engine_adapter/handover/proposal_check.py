"""What a proposed placement asks of one rank: which experts come, and from where they can be read. Pure.

A proposal came over the bus, so everything in it is compared with what is served before anything is done about it.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from fleet.events import ExpertCopy, ProposeHandover
from fleet.experts import ExpertId
from fleet.placement import EMPTY, Placement

LONGEST_SECONDS = 86_400.0
"""that staging may be given"""


class StagingFault(StrEnum):
    """Why a rank could not stage, in a word."""

    PLACEMENT = "placement"
    """the proposal does not fit what is served"""
    COPIES = "copies"
    """its copies do not fit its placement"""
    DEADLINE = "deadline"
    """its deadline makes no sense"""
    ROOM = "room"
    """too few cells are free"""
    QUARANTINE = "quarantine"
    """too many cells are quarantined"""
    SOURCE = "source"
    """no holder lets us read, or answers"""
    TRANSFER = "transfer"
    """reading failed"""
    CHECKSUM = "checksum"
    """what was read is not what was promised"""
    OVERDUE = "overdue"
    """it took too long"""
    ENGINE = "engine"
    """the engine could not prepare the placement"""


class CannotStage(Exception):
    """A rank cannot stage what was proposed; the text says whose fault it is and what to do."""

    def __init__(self, fault: StagingFault, text: str) -> None:
        super().__init__(text)
        self.fault = fault


class IncomingExperts(NamedTuple):
    """An expert that a rank does not hold, and shall."""

    layer: int
    slot: int
    """of this rank"""
    expert: int
    sources: tuple[int, ...]
    """slots over all ranks that hold it in the epoch that is served, the proposed one first"""


class ProposalRequest(NamedTuple):
    """What a proposal asks of one rank."""

    coming: tuple[IncomingExperts, ...]
    moved: int
    """experts that only change slots on this rank: they take their cells along"""


def asked(command: ProposeHandover, proposed: Placement, served: Placement, rank: int) -> ProposalRequest:
    """CannotStage names what does not fit: the shape, the deadline, a copy, or a slot that none fills."""
    wanted = (proposed.layers, proposed.experts, proposed.ranks, proposed.slots_per_rank)
    present = (served.layers, served.experts, served.ranks, served.slots_per_rank)
    if wanted != present:
        raise CannotStage(StagingFault.PLACEMENT, f"a placement of (layers, experts, ranks, slots per rank) {wanted}, and this engine has {present}; plan anew")
    if not 0 < command.deadline_seconds <= LONGEST_SECONDS:
        raise CannotStage(StagingFault.DEADLINE, f"{command.deadline_seconds} s for staging: use more than 0, and {LONGEST_SECONDS:.0f} at most")
    return _coming(proposed, served, rank, _sources(command.copies, proposed, served))


def _sources(copies: Sequence[ExpertCopy], proposed: Placement, served: Placement) -> dict[tuple[int, int], int]:
    """Where each (layer, slot over all ranks) is filled from."""
    sources: dict[tuple[int, int], int] = {}
    layers, slots = proposed.expert_of_slot.shape
    for copy in copies:
        what = f"copy of expert {copy.layer}/{copy.expert} from slot {copy.source} to slot {copy.slot}"
        if not (0 <= copy.layer < layers and 0 <= copy.slot < slots and 0 <= copy.source < slots):
            raise CannotStage(StagingFault.COPIES, f"{what}: there are {layers} layers of {slots} slots; plan anew")
        if copy.expert == EMPTY or int(proposed.expert_of_slot[copy.layer, copy.slot]) != copy.expert:
            raise CannotStage(StagingFault.COPIES, f"{what}: slot {copy.slot} of the new placement does not hold it; plan anew")
        if int(served.expert_of_slot[copy.layer, copy.source]) != copy.expert:
            raise CannotStage(StagingFault.COPIES, f"{what}: slot {copy.source} does not hold it in epoch {served.epoch}, which is served; plan anew")
        if sources.setdefault((copy.layer, copy.slot), copy.source) != copy.source:
            raise CannotStage(StagingFault.COPIES, f"{what}: another copy fills slot {copy.slot} too; plan anew")
    return sources


def _coming(proposed: Placement, served: Placement, rank: int, sources: dict[tuple[int, int], int]) -> ProposalRequest:
    first = rank * proposed.slots_per_rank
    before, after = served.on_rank(rank), proposed.on_rank(rank)
    coming: list[IncomingExperts] = []
    moved = 0
    for layer, slot in np.argwhere((after != before) & (after != EMPTY)).tolist():
        expert = int(after[layer, slot])
        if expert in before[layer]:
            moved += 1
            continue
        source = sources.get((layer, first + slot))
        if source is None:
            raise CannotStage(
                StagingFault.COPIES, f"expert {ExpertId(layer, expert)} comes to slot {first + slot} of rank {rank}, and no copy says where from; plan anew"
            )
        others = (holder for holder in np.flatnonzero(served.expert_of_slot[layer] == expert).tolist() if holder != source)
        coming.append(IncomingExperts(layer, slot, expert, (source, *others)))
    return ProposalRequest(tuple(coming), moved)
