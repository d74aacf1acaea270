"""Tables without empty slots, for engines that move their experts themselves. Pure.

Such an engine (vLLM's EPLB) takes a whole map: every slot filled, equally many slots on every rank, replicas
at even shares. Only its initial map may hold an expert twice on a rank.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import SlotTable
from fleet.placement import EMPTY, repeated

_NO_LOAD = 1e-9
"""Load of an expert without demand, against the mean: it too deserves a second replica before a third."""


def completed(table: SlotTable, load: NDArray[Any], ranks: int) -> SlotTable:
    """Return the table with every slot filled and no expert twice on a rank: int16 [layers, slots].

    Empty slots, and all but the first slot of an expert on a rank, get the expert of most load per replica
    that is not on the rank. Other slots stay. load: [layers, experts], any unit. ValueError if a rank has
    more slots than there are experts.
    """
    experts, per = load.shape[1], table.shape[1] // ranks
    if per > experts:
        raise ValueError(
            f"a rank has {per} slots and a layer {experts} experts, so that some would be on it twice; start"
            " the engine with fewer redundant experts"
        )
    after = np.where(repeated(table, ranks), EMPTY, table).astype(np.int16)
    weight = np.asarray(load, np.float64)
    weight = weight + _NO_LOAD * np.maximum(weight.mean(axis=1, keepdims=True), 1.0)
    for layer, slot in np.argwhere(after == EMPTY).tolist():
        row = after[layer]
        counts = np.bincount(row[row != EMPTY], minlength=experts)
        # An expert without a holder comes first, whatever its load.
        worth = np.where(counts > 0, weight[layer] / np.maximum(counts, 1), np.inf)
        here = row[slot // per * per : (slot // per + 1) * per]
        worth[here[here != EMPTY]] = -1.0
        row[slot] = worth.argmax()
    return after


def in_place(before: SlotTable, after: SlotTable, ranks: int) -> SlotTable:
    """Return `after` with the experts that stay on a rank in the slots that they have in `before`.

    Both tables are full; every rank keeps its experts, only their slots change. An expert that arrives takes
    a slot of one that leaves, both in order.
    """
    layers, slots = before.shape
    old, new = (table.reshape(layers * ranks, -1) for table in (before, after))
    found = np.full(old.shape, EMPTY, np.int16)
    for row, (has, wants) in enumerate(zip(old.tolist(), new.tolist(), strict=True)):
        if has == wants:
            found[row] = wants
            continue
        left = list(wants)
        for at, expert in enumerate(has):
            if expert in left:
                left.remove(expert)
                found[row, at] = expert
        found[row, found[row] == EMPTY] = left
    return found.reshape(layers, slots)


def arrivals(before: SlotTable, after: SlotTable, ranks: int) -> NDArray[np.bool_]:
    """Return the slots whose expert comes from another rank: bool [layers, slots]. Both tables are full."""
    layers, slots = before.shape
    here = before.reshape(layers, ranks, 1, -1)
    held = (after.reshape(layers, ranks, -1, 1) == here).any(axis=3)
    return np.asarray(~held.reshape(layers, slots))
