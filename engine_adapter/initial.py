"""Which placement an engine of ours begins with: experts in order, or what a file says (`roost plan --profile` writes such files)."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.placement import EMPTY, Placement, PlacementRecord, Split, linear

MOST_BYTES = 64 << 20
"""of a file that is taken seriously"""


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


def with_slots(placement: Placement, slots_per_rank: int) -> Placement:
    """The same with further slots on every rank, which are empty. ValueError when it has more than that already."""
    more = slots_per_rank - placement.slots_per_rank
    if more < 0:
        raise ValueError(f"placement: it uses {placement.slots_per_rank} slots per rank and layer, and the engine is to have {slots_per_rank}")
    if not more:
        return placement

    def wider(part: NDArray[Any], fill: int) -> NDArray[Any]:
        by_rank = part.reshape(placement.layers, placement.ranks, -1)
        return np.pad(by_rank, ((0, 0), (0, 0), (0, more)), constant_values=fill).reshape(placement.layers, -1)

    split = None if placement.even else Split(*(wider(part, 0).astype(np.uint16) for part in placement.split))
    return Placement(wider(placement.expert_of_slot, EMPTY), experts=placement.experts, ranks=placement.ranks, epoch=placement.epoch, split=split)
