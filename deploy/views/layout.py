"""Layouts of engines as text and as JSON: which layers are sharded, and which layouts can be set."""

from typing import Any, NamedTuple

from bus import Bus
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.client.control_loop import NoAnswer
from deploy.client.layouts import layout_choices, set_layout_choice
from deploy.client.migrations import NoSuchEngine
from deploy.client.placements import Placements, placements_of
from deploy.terminal.bus_connection import on_bus
from deploy.terminal.output import console, fail, in_json, note, show, table
from deploy.views.layout_choice import OPTION_COLUMNS, crossings, curve_rows, option_rows, sentences
from fleet.layout import Layout
from fleet.requests.layouts import EngineLayout
from fleet.text import counted
from migration.planning.layout_switch import LayoutChoice, choices


class _Shown(NamedTuple):
    """Layouts as the engines serve them, and how the planner chooses."""

    placements: dict[str, Placements]
    choices: dict[str, EngineLayout]
    silence: str = ""
    """why the planner says nothing"""


async def _shown(bus: Bus, subjects: Subjects, engine: str | None) -> _Shown:
    placements = await placements_of(bus, subjects, engine)
    try:
        chosen = await layout_choices(bus, subjects, next(iter(placements), "") if engine else "")
    except NoAnswer as error:
        return _Shown(placements, {}, str(error))
    return _Shown(placements, chosen)


def show_layouts(bus_config: BusConfig, engine: str | None, *, as_json: bool) -> None:
    """Print the layouts of one engine or (None) of all, why others cannot be set, and how the planner
    chooses. Ends the command with status 1 if there is no such engine."""
    try:
        found = on_bus(bus_config, lambda bus, subjects: _shown(bus, subjects, engine))
    except NoSuchEngine as error:
        fail(str(error))
    _show(found, as_json=as_json)


def show_choice(bus_config: BusConfig, engine: str | None, *, automatic: bool, as_json: bool) -> None:
    """Have the planner choose the layout of one engine or (None) of all, or leave it, and print the result.
    Ends the command with status 1 if there is no such engine or no planner."""

    async def order(bus: Bus, subjects: Subjects) -> _Shown:
        placements = await placements_of(bus, subjects, engine)
        name = next(iter(placements), "") if engine else ""
        return _Shown(placements, await set_layout_choice(bus, subjects, name, automatic=automatic))

    try:
        found = on_bus(bus_config, order)
    except (NoSuchEngine, NoAnswer) as error:
        fail(str(error))
    _show(found, as_json=as_json)


def _show(found: _Shown, *, as_json: bool) -> None:
    if as_json:
        show(
            in_json(
                {
                    name: as_record(one) | {"choice": found.choices.get(name)}
                    for name, one in found.placements.items()
                }
            )
        )
        return
    if not found.placements:
        console().print("no engine with experts has joined")
    for name, one in found.placements.items():
        layout = layout_of(one)
        console().print(f"{name}: epoch {one.now.epoch}, {counted(one.now.layers, 'MoE layer')}, {layout}")
        table(
            ("layout", "can be set"),
            [(choice.name, f"no: {choice.refusal}" if choice.refusal else "yes") for choice in offered(one)],
        )
        if (choice := found.choices.get(name)) is not None:
            _show_choice(choice)
    if found.silence:
        note(f"how layouts are chosen is not known: {found.silence}")


def _show_choice(choice: EngineLayout) -> None:
    for line in sentences(choice):
        console().print(line)
    if choice.options:
        table(OPTION_COLUMNS, option_rows(choice))
    if choice.curves:
        console().print(f"decode steps at {choice.context:.0f} tokens of context; * the fastest")
        table(("sequences", *(curve.layout for curve in choice.curves)), curve_rows(choice.curves))
        console().print(crossings(choice.crossings))


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
