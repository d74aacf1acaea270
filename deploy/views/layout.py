"""Layouts of engines as text and as JSON: which layers are sharded, and which layouts can be set."""

from typing import Any

from bus import Bus
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.client.migrations import NoSuchEngine
from deploy.client.placements import Placements, placements_of
from deploy.terminal.bus_connection import on_bus
from deploy.terminal.output import console, fail, in_json, show, table
from fleet.layout import Layout
from fleet.text import counted
from migration.planning.layout_switch import LayoutChoice, choices


def show_layouts(bus_config: BusConfig, engine: str | None, *, as_json: bool) -> None:
    """Print the layouts of one engine or (None) of all, and why others cannot be set. Ends the command with
    status 1 if there is no such engine."""

    async def ask(bus: Bus, subjects: Subjects) -> dict[str, Placements]:
        return await placements_of(bus, subjects, engine)

    try:
        found = on_bus(bus_config, ask)
    except NoSuchEngine as error:
        fail(str(error))
    if as_json:
        show(in_json({name: as_record(one) for name, one in found.items()}))
        return
    if not found:
        console().print("no engine with experts has joined")
    for name, one in found.items():
        layout = layout_of(one)
        console().print(f"{name}: epoch {one.now.epoch}, {counted(one.now.layers, 'MoE layer')}, {layout}")
        table(
            ("layout", "can be set"),
            [(choice.name, f"no: {choice.refusal}" if choice.refusal else "yes") for choice in offered(one)],
        )


def layout_of(one: Placements) -> Layout | None:
    """Return the layout of the served epoch; None: the engine does not state its attention."""
    return None if one.joined.attention is None else one.now.layout


def offered(one: Placements) -> tuple[LayoutChoice, ...]:
    """Return the layouts, and why they cannot be set; none for an engine that states no experts."""
    joined = one.joined
    if joined.shape is None or joined.attention is None:
        return ()
    return choices(joined.shape, one.now.layout, one.now.ranks, joined.unshardable, joined.tp_refusal)


def as_record(one: Placements) -> dict[str, Any]:
    """Return a record for programs."""
    layout = layout_of(one)
    return {
        "epoch": one.now.epoch,
        "attention": None if layout is None else layout.attention,
        "layers": one.now.layers,
        "sharded": list(one.now.sharded),
        "refused": {choice.name: choice.refusal or None for choice in offered(one)},
    }
