"""Placements as text, as JSON, and as heat maps: current, or current beside the first epoch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.config import BusConfig
from deploy.client.placements import Placements, placements
from deploy.terminal.bus_connection import on_bus
from deploy.terminal.drawing import Draw, drawer, named
from deploy.terminal.output import console, fail, in_json, note, show, table
from deploy.terminal.panels import placement_panels
from fleet.experts import ExpertId
from fleet.placement import FULL, Placement

_SAME = 0.1
"""Largest difference, in percent, at which a share still counts as even."""


def show_placement(
    bus_config: BusConfig, layer: int | None, plot: Path | None = None, *, before: bool = False, as_json: bool
) -> None:
    """Print each engine's epoch, slots, and the experts of each rank, of one layer or of all.

    plot: file of the picture; with `before` it also shows the first epoch of the engine's incarnation.
    """
    draw = None if plot is None else drawer()
    found = on_bus(bus_config, placements)
    for name, one in found.items():
        if layer is not None and layer >= one.now.layers:
            fail(f"engine {name} has MoE layers 0 to {one.now.layers - 1}, not {layer}")
    if as_json:
        show(in_json({name: _placement_record(one.now, layer) for name, one in found.items()}))
    else:
        _print({name: one.now for name, one in found.items()}, layer)
    if draw is not None and plot is not None:
        _draw(draw, plot, found, layer, before=before)


def _print(found: dict[str, Placement], layer: int | None) -> None:
    if not found:
        console().print("no engine with experts has joined")
    for name, now in found.items():
        console().print(
            f"{name}: epoch {now.epoch}, {now.layers} layers x {now.experts} experts on {now.ranks} ranks,"
            f" {now.slots_per_rank} slots each per layer"
        )
        rows = (
            (str(at), *(_experts(now, at, rank) for rank in range(now.ranks)))
            for at in _shown_layers(now, layer)
        )
        table(("layer", *(f"rank {rank}" for rank in range(now.ranks))), rows)
        if not now.even:
            console().print(
                "e*30%,k50%,n20%: this replica takes 30 % of the tokens that no rank keeps, keeps 50 % of its"
                " own rank's tokens, takes 20 % of its node's"
            )


def _draw(draw: Draw, plot: Path, found: dict[str, Placements], layer: int | None, *, before: bool) -> None:
    for name, one in found.items():
        file, now = named(plot, name, len(found) > 1), one.now
        if before and one.first is None:
            note(f"{name} did not say with which placement it began; only the present one is drawn")
        about = (
            f"{name}: epoch {now.epoch}, {now.experts} experts on {now.ranks} ranks of {now.slots_per_rank}"
            " slots per layer"
        )
        draw(file, placement_panels(now, one.first if before else None, layer), about)
        note(f"drew {file}")


def _shown_layers(now: Placement, layer: int | None) -> range:
    return range(now.layers) if layer is None else range(layer, layer + 1)


def _placement_record(now: Placement, layer: int | None) -> dict[str, Any]:
    return {
        "epoch": now.epoch,
        "layers": now.layers,
        "experts": now.experts,
        "ranks": now.ranks,
        "slots_per_rank": now.slots_per_rank,
        "sharded": now.sharded,
        "expert_of_slot": {
            str(at): [now.on_rank(rank)[at].tolist() for rank in range(now.ranks)]
            for at in _shown_layers(now, layer)
        },
        "split": (
            None
            if now.even
            else {name: _of_layers(now, part, layer) for name, part in now.split._asdict().items()}
        ),
    }


def _of_layers(now: Placement, part: NDArray[np.uint16], layer: int | None) -> dict[str, list[list[int]]]:
    """Return expert ids by layer and rank, in slot order."""
    return {str(at): part[at].reshape(now.ranks, -1).tolist() for at in _shown_layers(now, layer)}


def _experts(now: Placement, layer: int, rank: int) -> str:
    """Return the experts in a rank's slots, in runs; `*` marks replicated experts, followed by this replica's
    share if shares are uneven."""
    if layer in now.sharded:
        return "a part of each"
    first = rank * now.slots_per_rank
    held = sorted(
        (int(expert), slot)
        for slot, expert in enumerate(now.on_rank(rank)[layer], start=first)
        if expert >= 0
    )
    replicas = {expert: len(now.holders(ExpertId(layer, expert))) for expert, _ in held}
    copied = [
        f"{expert}*{_uneven(now, layer, slot, replicas[expert])}"
        for expert, slot in held
        if replicas[expert] > 1
    ]
    return " ".join([*_runs([expert for expert, _ in held if replicas[expert] == 1]), *copied]) or "-"


def _uneven(now: Placement, layer: int, slot: int, replicas: int) -> str:
    """Return a slot's share of unkept tokens, of its own rank's tokens, and of its node's; each only if it
    differs from the default."""
    keep, spill, near = (100 * int(part[layer, slot]) / FULL for part in now.split)
    shares = [] if abs(spill - 100 / replicas) < _SAME else [f"{spill:.0f}%"]
    return ",".join(
        [*shares, *([f"k{keep:.0f}%"] if keep < 100 else []), *([f"n{near:.0f}%"] if near else [])]
    )


def _runs(numbers: Sequence[int]) -> list[str]:
    """Format 0 1 2 5 as "0-2", "5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
