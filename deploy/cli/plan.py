"""`roost plan`: show or apply the planner's proposal, or compute a first placement from a recorded
profile."""

import re
from pathlib import Path
from typing import Annotated, get_args

import msgspec
import typer

from deploy.terminal.command_settings import bus_from, refuse
from deploy.terminal.options import ConfigOption, EngineArgument, JsonOption, NatsOption
from deploy.terminal.output import USAGE, fail
from deploy.views.map_files import MapFormat
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


PolicyOption = Annotated[
    str | None,
    typer.Option("--policy", metavar="NAME", help=f"{', '.join(POLICIES)}.  \\[default: as configured]"),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="BYTES",
        help="Limit of bytes to copy, e.g. 2GB or 500MiB.  \\[default: as configured]",
    ),
]
MemoryOption = Annotated[
    bool,
    typer.Option("--memory", help="Also compare further redundant slots with the KV blocks that they take."),
]
DeadOption = Annotated[
    str | None,
    typer.Option("--dead", metavar="RANKS", help="Plan as if these ranks were lost, e.g. 3,5."),
]
LayerOption = Annotated[
    list[int] | None, typer.Option("--layer", min=0, help="Change this MoE layer only; repeat for more.")
]
ApplyOption = Annotated[
    bool,
    typer.Option(
        "--apply",
        help="Carry the plan out and report its progress; exit with status 1 if there is no plan, or it is"
        " aborted.",
    ),
]
AllOption = Annotated[
    bool, typer.Option("--all", help="Print every step instead of those with the largest gains.")
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Without a fleet: compute a first placement for this recorded load (any file that `roost"
        " popularity --from` reads).",
    ),
]
RanksOption = Annotated[
    int | None, typer.Option("--ranks", min=1, help="With --profile: number of ranks of the engine.")
]
SlotsOption = Annotated[
    int | None,
    typer.Option("--slots-per-rank", min=1, help="With --profile: expert slots per layer and rank."),
]
NodesOption = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        min=1,
        help="With --profile: number of machines, each with the same number of ranks.  \\[default: 1]",
    ),
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="vllm|sglang",
        help="With --profile: a whole map without empty slots. sglang: a file for SGLang's"
        " `--init-expert-location`. vllm: a file for `roost migrate --map`, which the plugin brings into"
        " force in a running vLLM; vLLM has no released flag for initial maps.  \\[default: a placement for"
        " Roost's own engines]",
    ),
]
DenseOption = Annotated[
    int | None,
    typer.Option(
        "--dense-layers",
        min=0,
        help="With --format sglang: layers without experts before the first MoE layer, which SGLang's map"
        " counts too.  \\[default: 0]",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write the plan to this file, for `roost migrate --plan`. With --profile: write the"
        " placement, for the engine setting `placement`.",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("plan")(plan)


def plan(
    engine: EngineArgument = None,
    policy: PolicyOption = None,
    budget: BudgetOption = None,
    memory: MemoryOption = False,
    dead: DeadOption = None,
    layer: LayerOption = None,
    apply: ApplyOption = False,
    everything: AllOption = False,
    profile: ProfileOption = None,
    ranks: RanksOption = None,
    slots_per_rank: SlotsOption = None,
    nodes: NodesOption = None,
    form: FormatOption = None,
    dense_layers: DenseOption = None,
    out: OutOption = None,
    nats: NatsOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Show the planner's proposal: its changes, gain and cost, and the reason for them or for no change.
    Nothing moves without --apply.

    `roost migrate` moves a single expert, or carries out a plan from a file; `roost rollback` undoes a plan.
    """
    if profile is not None:
        proposal = {
            "ENGINE": engine,
            "--policy": policy,
            "--budget": budget,
            "--dead": dead,
            "--layer": layer,
        }
        refuse(
            {**proposal, "--memory": memory, "--apply": apply},
            "is about a running engine; with --profile there is none",
        )
        _plan_first_placement(profile, ranks, slots_per_rank, nodes, out, form, dense_layers, as_json=as_json)
        return
    first = {"--ranks": ranks, "--slots-per-rank": slots_per_rank, "--nodes": nodes}
    refuse({**first, "--format": form, "--dense-layers": dense_layers}, "belongs to --profile FILE")
    if policy is not None and policy not in POLICIES:
        fail(f"no policy {policy!r}; there are: {', '.join(POLICIES)}", USAGE)
    if apply and dead is not None:
        fail(
            "--dead only answers a what-if question; a plan needs live ranks: leave out --dead, or --apply",
            USAGE,
        )
    from deploy.views.plan import PlanQuery, show_plan

    query = PlanQuery(
        engine,
        policy or "",
        None if budget is None else in_bytes(budget),
        memory,
        _numbers(dead),
        tuple(layer or ()),
    )
    bus = bus_from(config, nats)
    answer = show_plan(bus, query, out, everything=everything, applied=apply, as_json=as_json)
    if apply:
        from deploy.views.migration import OutputForm, show_applied

        further = {"asked": msgspec.json.decode(answer.record)} if as_json else {}
        show_applied(bus, answer.engine, answer.plan, OutputForm(as_json=as_json, steps=False), further)


def _plan_first_placement(
    profile: Path,
    ranks: int | None,
    slots_per_rank: int | None,
    nodes: int | None,
    out: Path | None,
    form: str | None,
    dense_layers: int | None,
    *,
    as_json: bool,
) -> None:
    if ranks is None:
        fail("--profile needs --ranks: how many ranks will the engine have?", USAGE)
    known = next((one for one in get_args(MapFormat) if one == form), None)
    if form is not None and known is None:
        fail(f"no format {form!r}; there are: {', '.join(get_args(MapFormat))}", USAGE)
    if dense_layers is not None and known != "sglang":
        fail("--dense-layers belongs to --format sglang", USAGE)
    from deploy.views.first_placement import show_first_placement

    show_first_placement(
        profile,
        ranks,
        slots_per_rank,
        nodes or 1,
        out,
        as_json=as_json,
        form=known,
        dense_layers=dense_layers or 0,
    )


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
