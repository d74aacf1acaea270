"""Which placement an engine of ours begins with: the one of its last epoch, if there was a life before this one; else experts in order, or
what a file says (`roost plan --profile` writes such files).

What the last epoch was is found by rank 0, which asks the bus and leaves the answer in the folder where the ranks meet.
"""

import logging
import os
from pathlib import Path

import msgspec

from fleet.events import MigrationStaged, PlacementCommitted
from fleet.placement import Placement, PlacementRecord, linear, with_slots

MOST_BYTES = 64 << 20
"""of a file that is taken seriously"""
_LAST = "last-placement.json"

log = logging.getLogger(__name__)


def initial(file: Path | None, *, layers: int, experts: int, ranks: int, slots_per_rank: int | None) -> Placement:
    """Epoch 0. file: JSON of a PlacementRecord, None: experts in order; slots_per_rank: None: as many as needed, or as the file has.

    ValueError when the file cannot be read, or its placement is not of this model and these ranks, or needs more slots.
    """
    if file is None:
        return linear(layers=layers, experts=experts, ranks=ranks, slots_per_rank=slots_per_rank)
    placement = read(file)
    found, wanted = (placement.layers, placement.experts, placement.ranks), (layers, experts, ranks)
    if found != wanted:
        raise ValueError(f"{file}: a placement of (layers, experts, ranks) {found}; this engine has {wanted}: make one for it with roost plan --profile")
    return placement if slots_per_rank is None else with_slots(placement, slots_per_rank)


def read(file: Path) -> Placement:
    """The placement in a file, as epoch 0; what lies beyond MOST_BYTES is not read. ValueError says what is wrong with it."""
    try:
        with file.open("rb") as source:
            content = source.read(MOST_BYTES)
        record = msgspec.json.decode(content, type=PlacementRecord)
        return Placement.from_record(msgspec.structs.replace(record, epoch=0))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: no placement can be read from it: {error}") from error


def last_decided(committed: PlacementCommitted | None, staged: MigrationStaged | None) -> PlacementRecord | None:
    """The last epoch that an engine served, or was about to serve when it ended; None: no other than its first.

    committed: the last one recorded of the engine. staged: what its ranks had staged last, if it was decided to commit that, and not said yet
    that it is done (`fleet.handover`). It follows what is committed by its epoch, whichever lives the two are of: what a dead life had been about to
    serve may be recorded behind what the next one began with, which is the same.
    """
    if committed is None:
        return None if staged is None else staged.placement
    goes_on = staged is not None and staged.epoch == committed.placement.epoch + 1
    record = staged.placement if staged is not None and goes_on else committed.placement
    return record if record.epoch > 0 else None


def leave_last(meeting: Path, record: PlacementRecord | None) -> None:
    """Tell the ranks that meet in a folder what the last epoch was; None: there was none. OSError when it cannot be written."""
    unfinished = meeting / f"{_LAST}.part"
    unfinished.write_bytes(msgspec.json.encode(record))
    os.replace(unfinished, meeting / _LAST)


def last_is_left(meeting: Path) -> bool:
    """Whether that has been told."""
    return (meeting / _LAST).exists()


def resumed(meeting: Path, first: Placement) -> Placement:
    """What the ranks that meet in a folder begin with: the last epoch, if one was told and it fits, else the `first` placement, as configured."""
    if not last_is_left(meeting):
        return first
    try:
        record = msgspec.json.decode((meeting / _LAST).read_bytes(), type=PlacementRecord | None)
        return first if record is None else fitting(record, first)
    except (OSError, ValueError) as error:
        log.warning("the engine begins with its configured placement, not with that of its last life: %s", error)
        return first


def fitting(record: PlacementRecord, first: Placement) -> Placement:
    """A placement of the last life, if it fits where the `first` one does. ValueError says why it does not."""
    placement = Placement.from_record(record)
    found, wanted = ((one.layers, one.experts, one.ranks, one.slots_per_rank) for one in (placement, first))
    if found != wanted:
        raise ValueError(f"epoch {placement.epoch} was of (layers, experts, ranks, slots per rank) {found}; the engine now has {wanted}")
    return placement
