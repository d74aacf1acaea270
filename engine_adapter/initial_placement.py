"""Choose the placement that Roost's own engines start with: the last epoch of a previous incarnation, else
the placement in a file, else experts in order. `roost plan --profile` writes such files.

Rank 0 asks the bus for the last epoch and writes it into the folder where the ranks meet.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from fleet.facts.engines import FIXED_ATTENTION, UNSHARDABLE
from fleet.facts.migrations import MigrationStaged
from fleet.facts.placements import PlacementCommitted
from fleet.placement import Placement, PlacementRecord, linear, with_slots

MAX_BYTES = 64 << 20
"""Largest placement file that is read."""
_LAST = "last-placement.json"

log = logging.getLogger(__name__)


def initial(
    file: Path | None,
    *,
    layers: int,
    experts: int,
    ranks: int,
    slots_per_rank: int | None,
    unshardable: str = UNSHARDABLE,
    tp_refusal: str = FIXED_ATTENTION,
) -> Placement:
    """Return the configured placement as epoch 0. file: JSON of a PlacementRecord. None: experts in order.
    slots_per_rank: None for as many as needed, or as many as in the file. unshardable: why the engine cannot
    serve sharded layers; empty: it can. tp_refusal: why it cannot serve tensor-parallel attention.

    ValueError when the file cannot be read, when its placement is for another model or number of ranks, when
    it needs more slots, or when it has sharded layers or attention that the engine cannot serve.
    """
    if file is None:
        return linear(layers=layers, experts=experts, ranks=ranks, slots_per_rank=slots_per_rank)
    placement = read(file)
    if refusal := _refusal(placement, unshardable, tp_refusal):
        raise ValueError(f"{file}: {refusal}; make a placement with roost plan --profile")
    found, expected = (placement.layers, placement.experts, placement.ranks), (layers, experts, ranks)
    if found != expected:
        raise ValueError(
            f"{file}: a placement of (layers, experts, ranks) {found}; this engine has {expected}: make one"
            " for it with roost plan --profile"
        )
    return placement if slots_per_rank is None else with_slots(placement, slots_per_rank)


def read(file: Path) -> Placement:
    """Read a placement from a file, as epoch 0. At most MOST_BYTES are read. ValueError states what is wrong
    with the file."""
    try:
        with file.open("rb") as source:
            content = source.read(MAX_BYTES)
        record = msgspec.json.decode(content, type=PlacementRecord)
        return _once(Placement.from_record(msgspec.structs.replace(record, epoch=0)))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: no placement can be read from it: {error}") from error


def last_decided(
    committed: PlacementCommitted | None, staged: MigrationStaged | None
) -> PlacementRecord | None:
    """Return the last epoch that an engine served, or was about to serve when it ended. None: it never left
    its initial placement.

    committed: the last committed placement of the engine on record. staged: the placement that its ranks
    staged last, if its commit was decided and the completion is not yet on record (`fleet.handover`). Epochs
    order the two, whichever incarnations they come from. The record of a dead incarnation's decided placement
    may follow the record of the next incarnation's initial placement. Both hold the same placement then.
    """
    if committed is None:
        return None if staged is None else staged.placement
    follows = staged is not None and staged.epoch == committed.placement.epoch + 1
    record = staged.placement if staged is not None and follows else committed.served
    return record if record.epoch > 0 else None


def epoch_above(recorded: int | None, open_: int | None) -> int:
    """Return the epoch under which an engine that moves its experts itself joins after a start. Such an
    engine serves the map that it was built with, whatever was decided before, so its epoch is one that no
    earlier placement of the engine can have.

    recorded: highest epoch of the engine on record. open_: epoch that the handover in the engine's key
    creates, whatever its state: it may still be recorded as committed. None: there is none. The key is to be
    read before the log, and both after the engine has started.
    """
    return max(0 if recorded is None else recorded, 0 if open_ is None else open_) + 1


def leave_last(meeting: Path, record: PlacementRecord | None) -> None:
    """Write the last epoch for the ranks that meet in a folder. None: there was none. OSError when it cannot
    be written."""
    unfinished = meeting / f"{_LAST}.part"
    unfinished.write_bytes(msgspec.json.encode(record))
    os.replace(unfinished, meeting / _LAST)


def last_is_left(meeting: Path) -> bool:
    """True once `leave_last` has written the last epoch."""
    return (meeting / _LAST).exists()


def resumed(
    meeting: Path, first: Placement, unshardable: str = UNSHARDABLE, tp_refusal: str = FIXED_ATTENTION
) -> Placement:
    """Return the placement that the ranks in a meeting folder start with: the last epoch if it is known and
    fits, else `first`, the configured placement. unshardable, tp_refusal: as in `initial`."""
    if not last_is_left(meeting):
        return first

    def read_last() -> PlacementRecord | None:
        return msgspec.json.decode((meeting / _LAST).read_bytes(), type=PlacementRecord | None)

    return fitting_or(first, read_last, unshardable, tp_refusal)


def fitting_or(
    first: Placement,
    last: Callable[[], PlacementRecord | None],
    unshardable: str = UNSHARDABLE,
    tp_refusal: str = FIXED_ATTENTION,
) -> Placement:
    """Return the placement of the previous incarnation if it fits the engine that starts with `first`, else
    `first`. last: reads its record, if there is one, and may raise OSError or ValueError. unshardable,
    tp_refusal: as in `initial`."""
    try:
        record = last()
        return first if record is None else fitting(record, first, unshardable, tp_refusal)
    except (OSError, ValueError) as error:
        log.warning(
            "the engine starts with its configured placement, not with the last epoch of its previous"
            " run: %s",
            error,
        )
        return first


def _once(placement: Placement) -> Placement:
    """Return the placement. ValueError if it holds an expert twice on a rank: that is for engines that
    rearrange their experts themselves."""
    if placement.duplicates:
        raise ValueError(
            "a rank holds an expert twice, which Roost's own engines cannot serve; make a placement with"
            " roost plan --profile"
        )
    return placement


def _refusal(placement: Placement, unshardable: str, tp_refusal: str) -> str:
    """Return why the engine cannot serve a placement's attention or the forms of its layers; empty: it
    can."""
    if placement.attention == "tp":
        reason = tp_refusal or ("its experts are whole" if len(placement.whole) else "")
        if reason:
            return f"it has tensor-parallel attention, which this engine cannot serve: {reason}"
    if not placement.sharded or not unshardable:
        return ""
    return f"it has sharded layers, which this engine cannot serve: {unshardable}"


def fitting(
    record: PlacementRecord,
    first: Placement,
    unshardable: str = UNSHARDABLE,
    tp_refusal: str = FIXED_ATTENTION,
) -> Placement:
    """Return the placement of a record. ValueError states why it does not fit `first`, or the engine
    (`unshardable` and `tp_refusal`, as in `initial`)."""
    placement = _once(Placement.from_record(record))
    if refusal := _refusal(placement, unshardable, tp_refusal):
        raise ValueError(f"epoch {placement.epoch}: {refusal}")
    found, expected = ((one.layers, one.experts, one.ranks, one.slots_per_rank) for one in (placement, first))
    if found != expected:
        raise ValueError(
            f"epoch {placement.epoch} was of (layers, experts, ranks, slots per rank) {found}; the engine now"
            f" has {expected}"
        )
    return placement
