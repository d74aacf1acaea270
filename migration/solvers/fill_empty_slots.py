"""Fill empty slots with replicas: for each rank, the experts of most local demand that it does not hold.
Pure.

The memory of an empty slot is already paid for. A replica there serves its rank's own tokens locally, and
gives the shares of its expert more freedom. Ranks take turns, one slot each, so that limits on replicas are
spread over all of them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import SlotTable
from fleet.placement import EMPTY
from migration.model.constraints import UNLIMITED, Constraints
from migration.model.placement_changes import NONE, NOWHERE, ChangeKind, PlacementChanges, joined
from migration.solvers.load_cap import held_of


def filled(
    table: SlotTable, demand: NDArray[Any], ranks: int, limits: Constraints = UNLIMITED
) -> PlacementChanges:
    """Return replications into empty slots.

    table: int16 [layers, slots]; demand: [ranks, layers, experts], any unit. gain: part of its layer's pairs
    that becomes local. The caller enforces the budget. ValueError when shapes contradict each other.
    """
    layers, slots = table.shape
    if demand.shape[:2] != (ranks, layers) or slots % ranks:
        raise ValueError(
            f"filling: a table of {table.shape} and demand {demand.shape} do not fit {ranks} ranks"
        )
    if not (table == EMPTY).any():
        return NONE
    held = held_of(table, ranks, demand.shape[2])
    share = demand / np.maximum(demand.sum(axis=(0, 2), dtype=np.float64), 1e-300)[None, :, None]
    open_to = np.ones(held.shape[::2], bool) if limits.frozen is None else ~limits.frozen
    count, most, per = held.sum(axis=1), limits.max_replicas or ranks, slots // ranks
    parts: list[PlacementChanges] = []
    # First slot of every rank, then the second of every rank, and so on.
    for slot in sorted(range(slots), key=lambda slot: (slot % per, slot)):
        rank = slot // per
        if limits.live is not None and not limits.live[rank]:
            continue
        worth = np.where(open_to & ~held[:, rank] & (count < most), share[rank], 0.0)
        layer = np.flatnonzero((table[:, slot] == EMPTY) & (worth.max(axis=1) > 0))
        if len(layer):
            expert = worth[layer].argmax(axis=1)
            held[layer, rank, expert] = True
            count[layer, expert] += 1
            parts.append(_replications(layer, slot, expert, worth[layer, expert]))
    return joined(parts)


def _replications(
    layer: NDArray[np.intp], slot: int, expert: NDArray[np.intp], gain: NDArray[np.float64]
) -> PlacementChanges:
    count = len(layer)
    return PlacementChanges(
        kind=np.full(count, ChangeKind.REPLICATE, np.uint8),
        layer=layer.astype(np.int32),
        slot=np.full(count, slot, np.int32),
        expert=expert.astype(np.int16),
        other_slot=np.full(count, NOWHERE, np.int32),
        other_expert=np.full(count, EMPTY, np.int16),
        gain=gain,
    )
