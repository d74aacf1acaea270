"""`roost plan`: what the planner would do, and having it done; or a first placement from a recorded profile."""

import re
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from deploy.terminal.options import CONFIG, JSON, NATS, USAGE, ConfigOption, JsonOption, NatsOption, bus_from, fail
from migration.config import POLICIES

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("plan")(plan)


def plan(
    engine: Annotated[str | None, typer.Argument(help="Which engine.  [default: the one with experts]", show_default=False)] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="NAME", help=f"{', '.join(POLICIES)}.  [default: as configured]", show_default=False)
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="BYTES", help="Copy at most so much, e.g. 2GB or 500MiB.  [default: as configured]", show_default=False)
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also what further redundant slots would be worth, against the KV blocks they take.")] = False,
    dead: Annotated[str | None, typer.Option("--dead", metavar="RANKS", help="As if these ranks were lost, e.g. 3,5.")] = None,
    layer: Annotated[list[int] | None, typer.Option("--layer", min=0, help="Change only this MoE layer; repeat for more.")] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Then carry the plan out, and tell how it goes; status 1 where there is none, or it is given up.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Print every step, not only those that gain most.")] = False,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Without a fleet: a first placement for this recorded load (as `roost popularity --from` reads it)."),
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="With --profile: ranks of the engine.")] = None,
    slots_per_rank: Annotated[int | None, typer.Option("--slots-per-rank", min=1, help="With --profile: experts of a layer that a rank has room for.")] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="With --profile: machines, with as many ranks each.  [default: 1]", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write the plan there, for `roost migrate --plan`. With --profile: the placement, for the setting `placement` of engines.",
        ),
    ] = None,
    nats: NatsOption = NATS,
    as_json: JsonOption = JSON,
    config: ConfigOption = CONFIG,
) -> None:
    """Show what the planner would change, what it would gain and cost, and why, or why not. Nothing is moved, except with --apply.

    `roost migrate` moves a single expert, or carries out a plan that was written to a file; `roost rollback` undoes it.
    """
    if profile is not None:
        flags = (("--memory", memory), ("--apply", apply))
        for name, value in (("ENGINE", engine), ("--policy", policy), ("--budget", budget), ("--dead", dead), ("--layer", layer), *flags):
            if value not in (None, False):
                fail(f"{name} is about an engine that runs; with --profile there is none", USAGE)
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
        fail("--dead only asks what if; a plan is carried out on ranks that live: leave out --dead, or --apply", USAGE)
    asked = PlanQuery(engine, policy or "", None if budget is None else in_bytes(budget), memory, _numbers(dead), tuple(layer or ()))
    bus = bus_from(config, nats)
    answer = show_plan(bus, asked, out, everything=everything, applied=apply, as_json=as_json)
    if apply:
        from deploy.views.migration import OutputForm, show_applied

        also = {"asked": msgspec.json.decode(answer.record)} if as_json else {}
        show_applied(bus, answer.engine, answer.plan, OutputForm(as_json=as_json, steps=False), also)


def in_bytes(text: str) -> int:
    """2GB, 1.5 GiB or 100 as bytes; ends the command for anything else. GB are powers of 1000, GiB of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        fail(f"--budget {text!r}: use a number and B, kB, MB, GB, KiB, MiB or GiB, e.g. 2GB", USAGE)
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        fail(f"--dead {text!r}: name ranks by their numbers, e.g. 3,5", USAGE)
