"""`roost migrate`, `rollback`: experts moved between the ranks of an engine that serves.

What does the work is imported when its command runs: the NATS client is not for every command.
"""

from pathlib import Path
from typing import Annotated

import typer

from deploy.terminal.options import CONFIG, JSON, NATS, USAGE, ConfigOption, JsonOption, NatsOption, bus_from, fail
from fleet.experts import ExpertId

NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="Return once the planner has accepted it; it goes on.")]
NO_WAIT = False


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (migrate, rollback):
        app.command(command.__name__)(command)


def migrate(
    expert: Annotated[str | None, typer.Option("--expert", metavar="LAYER/EXPERT", help="Which expert, e.g. 3/17.")] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="ENGINE/RANK", help="Where it shall be, e.g. engine-0/1, or e0/1 for short. With --plan: which ENGINE.", show_default=False
        ),
    ] = None,
    source: Annotated[int | None, typer.Option("--from", metavar="RANK", min=0, help="Read it there.  [default: the nearest]", show_default=False)] = None,
    move: Annotated[bool, typer.Option("--move", help="It leaves the rank that it is read from; else it is copied.")] = False,
    swap: Annotated[int | None, typer.Option("--swap", metavar="EXPERT", min=0, help="This expert of the layer goes the other way.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Carry out a plan, as `roost plan --out FILE` writes it.")] = None,
    no_wait: NoWaitOption = NO_WAIT,
    nats: NatsOption = NATS,
    as_json: JsonOption = JSON,
    config: ConfigOption = CONFIG,
) -> None:
    """Copy an expert to another rank of an engine, or carry out a plan, while the engine serves; not one token changes.

    Where the rank has no free slot, a spare replica gives way, or the planner chooses an expert to swap. Ctrl-C leaves it going on.

    Status 1: it was refused, or given up, and the engine serves what it served before.
    """
    from deploy.views.migration import OutputForm, show_migration, show_plan_file

    manner, bus = OutputForm(wait=not no_wait, as_json=as_json), bus_from(config, nats)
    if plan is not None:
        for name, value in (("--expert", expert), ("--from", source), ("--move", move or None), ("--swap", swap)):
            if value is not None:
                fail(f"{name} is about one expert; --plan FILE says itself what to do", USAGE)
        show_plan_file(bus, plan, to, manner)
        return
    if expert is None or to is None:
        fail("say what to do: roost migrate --expert LAYER/EXPERT --to ENGINE/RANK, or roost migrate --plan FILE", USAGE)
    if move and swap is not None:
        fail("with --swap both experts move already; use one of --move and --swap", USAGE)
    engine, rank = _place(to)
    show_migration(bus, _expert(expert), engine, rank, manner, source=source, move=move, swap=swap)


def rollback(
    engine: Annotated[str | None, typer.Argument(help="Which engine.  [default: the one with experts]", show_default=False)] = None,
    before: Annotated[
        str | None, typer.Option("--to-before", metavar="PLAN", help="Undo this plan and what came after it.  [default: the last one]", show_default=False)
    ] = None,
    no_wait: NoWaitOption = NO_WAIT,
    nats: NatsOption = NATS,
    as_json: JsonOption = JSON,
    config: ConfigOption = CONFIG,
) -> None:
    """Bring an engine back to the placement before a plan, by handovers like any other, while it serves.

    That is a plan too, so a second rollback undoes the first; to go further back, name a plan: roost events --kind migration --since 1d lists them.
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
