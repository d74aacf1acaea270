"""`roost plan`: show or apply the planner's proposal, or compute a first placement from a recorded
profile."""

import re
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from deploy.terminal.options import (
    CONFIG,
    JSON,
    NATS,
    USAGE,
    ConfigOption,
    JsonOption,
    NatsOption,
    bus_from,
    fail,
)
from migration.config import POLICIES

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("plan")(plan)


def plan(
    engine: Annotated[
        str | None, typer.Argument(help="Engine.  \\[default: the only one with experts]", show_default=False)
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help=f"{', '.join(POLICIES)}.  \\[default: as configured]",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="BYTES",
            help="Limit of bytes to copy, e.g. 2GB or 500MiB.  \\[default: as configured]",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory", help="Also compare further redundant slots with the KV blocks that they take."
        ),
    ] = False,
    dead: Annotated[
        str | None,
        typer.Option("--dead", metavar="RANKS", help="Plan as if these ranks were lost, e.g. 3,5."),
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option("--layer", min=0, help="Change this MoE layer only; repeat for more.")
    ] = None,
    apply: Annotated[
        bool,
        typer.Option(
            "--apply",
            help=(
                "Carry the plan out and report its progress; exit with status 1 if there is no plan, or it is"
                " aborted."
            ),
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Print every step instead of those with the largest gains.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help=(
                "Without a fleet: compute a first placement for this recorded load (any file that `roost"
                " popularity --from` reads)."
            ),
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="With --profile: number of ranks of the engine.")
    ] = None,
    slots_per_rank: Annotated[
        int | None,
        typer.Option("--slots-per-rank", min=1, help="With --profile: expert slots per layer and rank."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            min=1,
            help="With --profile: number of machines, each with the same number of ranks.  \\[default: 1]",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help=(
                "Write the plan to this file, for `roost migrate --plan`. With --profile: write the"
                " placement, for the engine setting `placement`."
            ),
        ),
    ] = None,
    nats: NatsOption = NATS,
    as_json: JsonOption = JSON,
    config: ConfigOption = CONFIG,
) -> None:
    """Show the planner's proposal: its changes, gain and cost, and the reason for them or for no change.
    Nothing moves without --apply.

    `roost migrate` moves a single expert, or carries out a plan from a file; `roost rollback` undoes a plan.
    """
    if profile is not None:
        flags = (("--memory", memory), ("--apply", apply))
        for name, value in (
            ("ENGINE", engine),
            ("--policy", policy),
            ("--budget", budget),
            ("--dead", dead),
            ("--layer", layer),
            *flags,
        ):
            if value not in (None, False):
                fail(f"{name} is about a running engine; with --profile there is none", USAGE)
        if ranks is None:
            fail("--profile needs --ranks: how many ranks will the engine have?", USAGE)
        from deploy.views.first_placement import show_first_placement

        show_first_placement(profile, ranks, slots_per_rank, nodes or 1, out, as_json=as_json)
        return
    for name, given in (("--ranks", ranks), ("--slots-per-rank", slots_per_rank), ("--nodes", nodes)):
        if given is not None:
            fail(f"{name} belongs to --profile FILE", USAGE)
    from deploy.views.plan import PlanQuery, show_plan

    if policy is not None and policy not in POLICIES:
        fail(f"no policy {policy!r}; there are: {', '.join(POLICIES)}", USAGE)
    if apply and dead is not None:
        fail(
            "--dead only answers a what-if question; a plan needs live ranks: leave out --dead, or --apply",
            USAGE,
        )
    asked = PlanQuery(
        engine,
        policy or "",
        None if budget is None else in_bytes(budget),
        memory,
        _numbers(dead),
        tuple(layer or ()),
    )
    bus = bus_from(config, nats)
    answer = show_plan(bus, asked, out, everything=everything, applied=apply, as_json=as_json)
    if apply:
        from deploy.views.migration import OutputForm, show_applied

        also = {"asked": msgspec.json.decode(answer.record)} if as_json else {}
        show_applied(bus, answer.engine, answer.plan, OutputForm(as_json=as_json, steps=False), also)


def in_bytes(text: str) -> int:
    """Parse 2GB, 1.5 GiB or 100 into bytes; end the command for anything else. GB are powers of 1000, GiB of
    1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        fail(f"--budget {text!r}: use a number and B, kB, MB, GB, KiB, MiB or GiB, e.g. 2GB", USAGE)
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        fail(f"--dead {text!r}: name ranks by their numbers, e.g. 3,5", USAGE)
