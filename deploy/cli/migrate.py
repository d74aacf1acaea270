"""`roost migrate` and `roost rollback`: move experts between the ranks of a live engine.

Implementations are imported when a command runs, because not every command needs the NATS client.
"""

from pathlib import Path
from typing import Annotated

import typer

from deploy.terminal.command_settings import bus_from, refuse
from deploy.terminal.options import ConfigOption, EngineArgument, JsonOption, NatsOption
from deploy.terminal.output import USAGE, fail
from fleet.experts import ExpertId

NoWaitOption = Annotated[
    bool,
    typer.Option(
        "--no-wait",
        help="Return once the planner has accepted the migration; it continues in the background.",
    ),
]
ExpertOption = Annotated[
    str | None, typer.Option("--expert", metavar="LAYER/EXPERT", help="Expert to migrate, e.g. 3/17.")
]
ToOption = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="ENGINE/RANK",
        help="Destination rank, e.g. engine-0/1, or e0/1 for short. With --plan and --map: the ENGINE.",
    ),
]
FromOption = Annotated[
    int | None,
    typer.Option(
        "--from",
        metavar="RANK",
        min=0,
        help="Rank to read the expert from.  \\[default: the nearest replica]",
    ),
]
MoveOption = Annotated[
    bool, typer.Option("--move", help="Remove the expert from the source rank instead of copying it.")
]
SwapOption = Annotated[
    int | None,
    typer.Option(
        "--swap",
        metavar="EXPERT",
        min=0,
        help="Expert of the same layer to send in the opposite direction.",
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be moved, and what gives way. Nothing is moved.")
]
PlanOption = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="Carry out a plan written by `roost plan --out FILE`."),
]
MapOption = Annotated[
    Path | None,
    typer.Option(
        "--map",
        metavar="FILE",
        help="Bring a whole map into force, on an engine that moves its experts itself (vLLM). `roost plan"
        " --profile FILE --format vllm` writes such maps.",
    ),
]
BeforeOption = Annotated[
    str | None,
    typer.Option(
        "--to-before",
        metavar="PLAN",
        help="Undo this plan and every later one.  \\[default: the last plan]",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    for command in (migrate, rollback):
        app.command(command.__name__)(command)


def migrate(
    expert: ExpertOption = None,
    to: ToOption = None,
    source: FromOption = None,
    move: MoveOption = False,
    swap: SwapOption = None,
    plan: PlanOption = None,
    whole_map: MapOption = None,
    dry_run: DryRunOption = False,
    no_wait: NoWaitOption = False,
    nats: NatsOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Copy an expert to another rank, or carry out a plan, while the engine serves. Generated tokens do not
    change.

    If the rank has no free slot, the planner evicts a redundant replica or chooses an expert to swap; what
    gives way is shown before anything moves. Ctrl-C ends this command; the migration continues.

    Exit status 1: the migration was refused or aborted, and the engine keeps its placement.
    """
    from deploy.views.migration import OutputForm, show_map, show_migration, show_plan_file

    form, bus = OutputForm(wait=not no_wait, as_json=as_json), bus_from(config, nats)
    if whole_map is not None:
        one = {"--expert": expert, "--from": source, "--move": move, "--swap": swap, "--plan": plan}
        refuse(one, "does not go with --map FILE, which places every expert")
        show_map(bus, whole_map, to, form, dry_run=dry_run)
        return
    if plan is not None:
        refuse(
            {"--expert": expert, "--from": source, "--move": move, "--swap": swap, "--dry-run": dry_run},
            "moves one expert; --plan FILE already contains its moves",
        )
        show_plan_file(bus, plan, to, form)
        return
    if expert is None or to is None:
        fail(
            "name a move, a plan or a map: roost migrate --expert LAYER/EXPERT --to ENGINE/RANK, roost"
            " migrate --plan FILE, or roost migrate --map FILE --to ENGINE",
            USAGE,
        )
    if move and swap is not None:
        fail("--swap already moves both experts; use one of --move and --swap", USAGE)
    engine, rank = _place(to)
    show_migration(
        bus,
        _expert(expert),
        engine,
        rank,
        form,
        source=source,
        move=move,
        swap=swap,
        dry_run=dry_run,
    )


def rollback(
    engine: EngineArgument = None,
    before: BeforeOption = None,
    no_wait: NoWaitOption = False,
    nats: NatsOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Return an engine to the placement before a plan, by ordinary handovers, while it serves.

    A rollback is a plan too: a second rollback undoes the first. To go further back, name a plan; list them
    with roost events --kind migration --since 1d.
    """
    from deploy.views.migration import OutputForm, show_rollback

    show_rollback(bus_from(config, nats), engine, before or "", OutputForm(wait=not no_wait, as_json=as_json))


def _expert(text: str) -> ExpertId:
    layer, slash, expert = text.partition("/")
    if not (slash and layer.isdecimal() and expert.isdecimal()):
        fail(f"--expert {text!r}: name it as LAYER/EXPERT, e.g. 3/17", USAGE)
    return ExpertId(int(layer), int(expert))


def _place(text: str) -> tuple[str, int]:
    engine, slash, rank = text.partition("/")
    if not (engine and slash and rank.isdecimal()):
        fail(f"--to {text!r}: name it as ENGINE/RANK, e.g. engine-0/1 (see roost status)", USAGE)
    return engine, int(rank)
