"""Heat-map content for placements and demand: rows of panels, made of arrays. Pure;
`deploy.terminal.heatmaps` draws them."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatingArray
from fleet.dispatch import served_by
from fleet.placement import Placement

Scale = Literal["amount", "signed", "holding"]
"""amount: from 0 up; signed: centred on 0; holding: 0, 1, 2, ... replicas of an expert held by a rank"""
MAX_LAYERS = 12
"""most layers drawn rank by rank; of more, evenly spaced layers including the first and the last"""


_PALE = 1.5
"""end of a scale on which 1 is not the darkest colour"""


class Panel(NamedTuple):
    """One heat map."""

    title: str
    values: FloatingArray
    """[down, across]"""
    scale: Scale = "amount"
    down: str = "layer"
    across: str = "expert"
    marks: NDArray[np.bool_] | None = None
    """[down, across]: cells with a dot"""
    maximum: float | None = None
    """upper end of the scale; None: the largest value"""


Rows = list[tuple[Panel, ...]]


def shown_layers(layers: int) -> list[int]:
    """Return the layers that are drawn rank by rank."""
    return sorted({round(at) for at in np.linspace(0, layers - 1, min(layers, MAX_LAYERS))})


def placement_panels(now: Placement, before: Placement | None, layer: int | None = None) -> Rows:
    """Return panels of the replica count of each expert, then of the holders, layer by layer.

    before: an earlier placement, drawn beside it together with the differences. layer: only this one. Raises
    ValueError for placements of different shapes.
    """
    if before is not None and (before.layers, before.experts, before.ranks) != (
        now.layers,
        now.experts,
        now.ranks,
    ):
        raise ValueError(f"{before} and {now} cannot be compared")
    times = (
        [("now", now)]
        if before is None
        else [(f"first epoch, {before.epoch}", before), (f"now, epoch {now.epoch}", now)]
    )
    replicas = [(name, one.replicas_on_rank.sum(axis=1, dtype=np.float64)) for name, one in times]
    maximum = max(2.0, *(float(table.max()) for _, table in replicas))
    rows: Rows = [] if layer is not None else [_beside("replicas", "layer", replicas, maximum)]
    for at in shown_layers(now.layers) if layer is None else (layer,):
        holding = [(f"{name}{_form(one, at)}", _holding(one, at)) for name, one in times]
        rows.append(_beside(f"layer {at}", "rank", holding, maximum))
    return rows


def _form(placement: Placement, layer: int) -> str:
    """Return the form of a layer for a title; empty: its experts are whole."""
    return ", sharded: every rank holds a part of each" if layer in placement.sharded else ""


def _beside(
    what: str, down: str, tables: Sequence[tuple[str, FloatingArray]], maximum: float
) -> tuple[Panel, ...]:
    """Return a panel per table, and for two tables a panel of differences: gained and lost experts by rank,
    else the change in number."""
    panels = [Panel(f"{what}: {name}", values, "holding", down, maximum=maximum) for name, values in tables]
    if len(tables) > 1:
        (_, first), (_, now) = tables
        if down == "rank":
            panels.append(
                Panel(
                    f"{what}: came (red), went (blue)",
                    np.sign(now) - np.sign(first),
                    "signed",
                    down,
                    maximum=_PALE,
                )
            )
        else:
            panels.append(
                Panel(f"{what}: more (red), fewer (blue)", now - first, "signed", down, maximum=maximum)
            )
    return tuple(panels)


def _holding(placement: Placement, layer: int) -> FloatingArray:
    """Return float64 [ranks, experts]: the total replicas of an expert if the rank holds one; else 0."""
    held = placement.replicas_on_rank[layer]
    return np.asarray(held * held.sum(axis=0), np.float64)


def demand_panels(
    demand: FloatingArray,
    placements: Sequence[tuple[str, Placement]],
    node: NDArray[np.intp],
    layer: int | None = None,
) -> Rows:
    """Return panels of each rank's demand per expert, layer by layer. For each placement: dots on the experts
    that the rank holds, and the share of demand served locally.

    demand: [ranks, layers, experts] pairs/s; each rank is drawn relative to its own even share. node:
    [ranks], machine of each.
    """
    served = [served_by(placement, demand, node) for _, placement in placements]
    relative = demand * demand.shape[2] / np.maximum(demand.sum(axis=2, keepdims=True), 1e-12)
    rows: Rows = []
    for at in shown_layers(demand.shape[1]) if layer is None else (layer,):
        row = [
            Panel(
                f"layer {at}: {name}{_form(one, at) or f', {_local(found[at]):.0%} local'}",
                relative[:, at],
                "amount",
                "rank",
                marks=one.replicas_on_rank[at] > 0,
            )
            for (name, one), found in zip(placements, served, strict=True)
        ]
        rows.append(tuple(row or [Panel(f"layer {at}", relative[:, at], "amount", "rank")]))
    return rows


def _local(served: FloatingArray) -> float:
    """Return the local share. served: [ranks, ranks], serving rank by requesting rank."""
    return float(np.trace(served) / max(float(served.sum()), 1e-12))
