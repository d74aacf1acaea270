"""`roost layout`: show and change the layout of an engine: which layers are sharded, and its attention.

Implementations are imported when the command runs, because not every command needs the NATS client.
"""

from enum import StrEnum
from typing import Annotated

import typer

from deploy.cli.considered import (
    ContextOption,
    HardwareOption,
    KernelsOption,
    ModelOption,
    PlotOption,
    RanksOption,
    compare,
)
from deploy.cli.migrate import NoWaitOption
from deploy.terminal.command_settings import bus_from, refuse
from deploy.terminal.options import ConfigOption, EngineArgument, JsonOption, NatsOption


class AutoLayout(StrEnum):
    """Choice of layouts by the planner, or by hand."""

    ON = "on"
    OFF = "off"


SetOption = Annotated[
    str | None,
    typer.Option(
        "--set",
        metavar="LAYOUT",
        help="Turn layers over until these are sharded: ep (none), experts-tp (all), or numbers, e.g. 0-3,7."
        " tp: all, and attention is tensor-parallel too.",
    ),
]
NowOption = Annotated[
    bool,
    typer.Option(
        "--now",
        help="Turn the layers over one after another without a pause, outside the planner's byte budget.",
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show bytes by link, seconds, cells and KV. Nothing is moved.")
]
AutoOption = Annotated[
    AutoLayout | None,
    typer.Option(
        "--auto",
        help="Have the planner choose the layout of the engine (default: of every engine), or leave it as it"
        " is. Survives restarts.",
    ),
]
MemoryOption = Annotated[
    bool,
    typer.Option(
        "--memory", help="Show the memory that each rank uses now, itemised, beside its resident size."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("layout")(layout)


def layout(
    engine: EngineArgument = None,
    wanted: SetOption = None,
    now: NowOption = False,
    dry_run: DryRunOption = False,
    memory: MemoryOption = False,
    auto: AutoOption = None,
    no_wait: NoWaitOption = False,
    nats: NatsOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    model: ModelOption = None,
    hardware: HardwareOption = None,
    ranks: RanksOption = None,
    context: ContextOption = None,
    kernels: KernelsOption = None,
    plot: PlotOption = None,
) -> None:
    """Show the layout of each engine: which MoE layers are sharded, its attention, which layouts it can
    change to, and how the planner chooses: measured steps by load, the time lost so far by staying (regret),
    and why it stays.

    With --auto: have the planner choose, or not. It switches once the regret exceeds the cost of the switch,
    and shards single hot layers where that gains more than moving experts.

    With --set: change it while the engine serves, by a plan of handovers like a migration. Each turns over as
    many layers as the ranks have spare cells for, within the planner's byte budget. Layers that become whole
    get an even share of their experts on each rank. `roost rollback` undoes it. A switch that waits for the
    byte budget is replaced, or ended by --set with the layout that is served. Ctrl-C ends this command; the
    switch continues.

    The attention changes in a handover of its own, while all layers are sharded: to tensor-parallel as the
    last one, to data-parallel as the first one. Requests keep their KV, which ranks read from each other in
    the step that changes it.

    With --memory: expert cells in service (by the form of their layer), spare and in staging, other weights,
    the KV pool, and communicators: connections to other ranks and agents of transfers, measured as what the
    process grew by while they were opened.

    Streams do not stop. Their texts may differ between layouts, unlike under migrations: a sharded layer adds
    the same products in another order.

    With --model: compare the layouts of a model on hardware that is only considered. Sizes, memory, KV
    capacity and switch times follow from the model's dimensions and the links' rates; decode steps and the
    crossing of the layouts from prices fitted to published kernel timings, or to your own (--kernels FILE).
    Without timings it says unknown.

    Exit status 1: the switch was refused or aborted; the layers turned over before stay as they are. With
    --memory: a rank does not state its memory.
    """
    live = {
        "ENGINE": engine,
        "--set": wanted,
        "--now": now,
        "--dry-run": dry_run,
        "--memory": memory,
        "--auto": auto,
    }
    changing = {"--set": wanted, "--now": now, "--dry-run": dry_run, "--no-wait": no_wait}
    considering = {
        "--hardware": hardware,
        "--ranks": ranks,
        "--context": context,
        "--kernels": kernels,
        "--plot": plot,
    }
    if model is not None:
        refuse(
            {**live, "--no-wait": no_wait, "--nats": nats, "--config": config},
            "does not go with --model, which asks no engine",
        )
        compare(model, hardware, ranks, context, kernels, plot, as_json=as_json)
        return
    refuse(considering, "belongs to --model NAME|FILE")
    bus = bus_from(config, nats)
    if auto is not None:
        refuse({**changing, "--memory": memory}, "does not go with --auto, which changes no layout itself")
        from deploy.views.layout import show_choice

        show_choice(bus, engine, automatic=auto is AutoLayout.ON, as_json=as_json)
    elif memory:
        refuse(changing, "does not go with --memory, which changes nothing")
        from deploy.views.memory import show_memory

        show_memory(bus, engine, as_json=as_json)
    elif wanted is None:
        refuse(changing, "belongs to --set LAYOUT")
        from deploy.views.layout import show_layouts

        show_layouts(bus, engine, as_json=as_json)
    else:
        from deploy.views.migration import OutputForm, show_switch

        form = OutputForm(wait=not no_wait, as_json=as_json)
        show_switch(bus, engine, wanted, form, now=now, dry_run=dry_run)
