"""Maps of physical to logical experts, as plain arrays: int16 [layers, slots of all ranks], rank-major."""

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int16]


class MapRejected(Exception):
    """Raised for a map that this worker must not hold. The message says why."""


def checked_map(data: bytes, *, layers: int, slots: int, experts: int) -> Table:
    """Return the map in `data`, int16 little endian [layers, slots]. MapRejected when its width is wrong, a
    slot is empty or names an expert that the model lacks, or an expert has no slot."""
    if len(data) != layers * slots * 2:
        raise MapRejected(
            f"wrong width: {len(data)} bytes; {layers} layers of {slots} slots take {layers * slots * 2}"
        )
    table = np.frombuffer(data, "<i2").astype(np.int16).reshape(layers, slots)
    strange = np.argwhere((table < 0) | (table >= experts))
    if len(strange):
        layer, slot = (int(value) for value in strange[0])
        expert = int(table[layer, slot])
        if expert == -1:
            raise MapRejected(f"slot {slot} of layer {layer} is empty; vLLM needs an expert in every slot")
        raise MapRejected(
            f"slot {slot} of layer {layer} names expert {expert}; the model has experts 0 to {experts - 1}"
        )
    present = np.zeros((layers, experts), bool)
    np.put_along_axis(present, table.astype(np.int64), True, axis=1)
    lost = np.argwhere(~present)
    if len(lost):
        raise MapRejected(f"expert {lost[0][1]} of layer {lost[0][0]} has no slot; each needs at least one")
    return table


def arrivals(old: Table, new: Table, *, rank: int, slots: int) -> int:
    """Return the number of (layer, expert) pairs that the slots of `rank` hold in `new` and not in `old`."""
    own = slice(rank * slots, (rank + 1) * slots)
    pairs = zip(old[:, own], new[:, own], strict=True)
    return sum(len(set(after.tolist()) - set(before.tolist())) for before, after in pairs)


def demand_by_expert(slots: NDArray[np.int64], table: Table, experts: int) -> NDArray[np.int64]:
    """Return counts by physical expert [layers, slots] as counts by logical expert [layers, experts]."""
    demand = np.zeros((len(table), experts), np.int64)
    layers = np.arange(len(table))[:, None]
    np.add.at(demand, (layers, table.astype(np.int64)), slots)
    return demand
