"""The planner's proposal for an engine: before and after, step by step, with its cost and payback time; or
the reason for no change."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from bus import Bus, BusTimeout, Declined
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.client.migrations import NoSuchEngine, engine_named
from deploy.terminal.bus_connection import on_bus
from deploy.terminal.output import USAGE, console, fail, note, show, table
from fleet.requests.plans import DescribePlan, PlanDescribed
from fleet.text import byte_size, counted, duration
from migration.model.plan_record import MemoryPoint, PlanRecord, StepRecord

ASK_SECONDS = 60.0
"""Time limit of the query. A joint plan for many ranks takes some seconds, and other plans may be computed
before it."""
MAX_SHOWN = 20
"""Steps that are printed unless all are requested."""


class PlanQuery(NamedTuple):
    """Parameters of a plan request; engine None: the only one with experts. Fields as in `DescribePlan`."""

    engine: str | None = None
    policy: str = ""
    budget_bytes: int | None = None
    memory: bool = False
    dead: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()


def show_plan(
    bus_config: BusConfig,
    query: PlanQuery,
    out: Path | None,
    *,
    everything: bool,
    applied: bool,
    as_json: bool,
) -> PlanDescribed:
    """Ask the planner, print its answer, and write the plan to `out`. Ends the command if writing or applying
    (applied) needs a plan and there is none."""

    async def ask(bus: Bus, subjects: Subjects) -> PlanDescribed:
        return await described(bus, subjects, query)

    answer = on_bus(bus_config, ask)
    record = msgspec.json.decode(answer.record, type=PlanRecord)
    if not as_json:
        print_plan(record, everything=everything, dry=not applied)
    elif not applied or not answer.plan:
        show(answer.record.decode())
    if not answer.plan and (applied or out is not None):
        fail(
            f"there is no plan to {'carry out' if applied else 'write'}:"
            f" {record.refused or record.lost or 'the planner gave none'}"
        )
    if out is not None:
        _write(answer, out)
    return answer


def _write(answer: PlanDescribed, out: Path) -> None:
    try:
        out.write_bytes(answer.plan)
    except OSError as error:
        fail(f"cannot write {out}: {error}", USAGE)
    note(
        f"wrote {out}; carry it out while epoch and placement are the same: roost migrate --plan {out} --to"
        f" {answer.engine}"
    )


async def described(bus: Bus, subjects: Subjects, query: PlanQuery) -> PlanDescribed:
    """Return the planner's answer. Ends the command if the planner has too little data or does not answer."""
    try:
        joined = await engine_named(bus, subjects, query.engine)
    except NoSuchEngine as error:
        fail(str(error), USAGE)
    question = DescribePlan(
        engine=joined.engine,
        policy=query.policy,
        budget_bytes=query.budget_bytes,
        memory=query.memory,
        dead=query.dead,
        layers=query.layers,
    )
    try:
        answer = await bus.request(subjects.describe_plan, question, seconds=ASK_SECONDS)
    except BusTimeout:
        fail(
            f"the planner said nothing for {ASK_SECONDS:g} s: it is not running, or is busy with other plans;"
            " see its log, and roost status"
        )
    except Declined as refused:  # the planner's reason; advice about NATS would not help
        fail(str(refused))
    if not isinstance(answer, PlanDescribed):
        fail(f"the planner answered with {type(answer).__name__}; is it of another version of Roost?")
    return answer


def print_plan(record: PlanRecord, *, everything: bool = False, dry: bool = True) -> None:
    """Print the plan for people. dry: a dry run."""
    out = console()
    window = "the next window" if record.next_window else "the same window"
    discount = (
        f"\npredicted gains are multiplied by {record.plan_discount:.0%}, from the measured gains of"
        " earlier plans"
        if record.plan_discount < 1
        else ""
    )
    out.print(
        f"[bold]{record.engine}[/bold] ({record.model}), epoch {record.epoch}, policy {record.policy}:"
        f" {record.tokens_per_second:,.1f} tokens/s\nmade from {record.pairs:,.0f} (token, expert) pairs per"
        f" layer, evaluated on {window} of {record.judged_pairs:,.0f}{discount}"
    )
    if record.refused is not None:
        out.print(f"[bold]nothing to do[/bold]: {record.refused}")
    elif not record.lost:
        out.print(f"plan [bold]{record.id}[/bold]: {_cost(record)}\n{_worth(record)}")
    else:
        out.print(f"plan [bold]{record.id}[/bold]: {_cost(record)}\n{record.lost}")
    if record.before is not None or record.after is not None:
        table(
            ("", *(["now"] if record.before else []), *(["then"] if record.after else []), "at best"),
            _figures(record),
        )
    for reason in (reason for reason in record.reasons if not (record.lost and record.lost in reason)):
        out.print(f"- {reason}", markup=False)
    if record.single_layers:
        out.print(f"- {record.single_layers}", markup=False)
    if record.steps:
        out.print("")
        _print_steps(record, everything)
    _print_homes(record)
    if record.memory:
        out.print("")
        _print_memory(record.memory)
    moved = "; nothing was moved: this is a dry run, and --apply carries a plan out" if dry else ""
    out.print(f"[dim]found in {1e3 * record.plan_seconds:,.0f} ms{moved}[/dim]")


def _cost(record: PlanRecord) -> str:
    if not record.copies:
        return f"no bytes, {counted(record.handovers, 'handover')}"
    copied = (
        f"{counted(record.copies, 'copy', 'copies')} ({record.copied_share:.1%} of the slots,"
        f" {byte_size(record.copied_bytes)})"
    )
    return f"{copied} in {counted(record.handovers, 'handover')} of {record.transfer_seconds:.2f} s together"


def _worth(record: PlanRecord) -> str:
    paid = "at once" if not record.payback_seconds else f"after {record.payback_seconds:,.1f} s"
    gain = (
        f"steps get {duration(record.gain_seconds)} shorter, which is {1e3 * record.gain_per_second:.2f} ms"
        " in each second of serving"
    )
    return f"{gain}\npaid back {paid}, {record.net_seconds:,.2f} s ahead by the time that demand changes"


def _figures(record: PlanRecord) -> Iterator[tuple[str, ...]]:
    """Return the rows of the table: before, after, and the upper bound over all placements."""
    both = [one for one in (record.before, record.after) if one is not None]

    def row(name: str, text: str, measure: str, factor: float = 1.0, best: str = "") -> tuple[str, ...]:
        return (name, *(text.format(factor * float(getattr(one, measure))) for one in both), best)

    yield row(
        "balance, mean of layers",
        "{:.3f}",
        "balance_mean",
        best="" if record.balance_bound is None else f"{record.balance_bound:.3f} with even shares",
    )
    yield row("balance, worst layer", "{:.3f}", "balance_min")
    if record.step_ceiling is not None:
        yield (
            "balance of a single step",
            *[""] * len(both),
            f"{record.step_ceiling:.3f}, by the chance of so few tokens",
        )
    yield row("served where requests live", "{:.1%}", "local_share")
    if record.saved is not None and record.saved_bound is not None:
        yield (
            "dispatch saved",
            *[""] * (len(both) - 1),
            f"{record.saved:.1%}",
            f"{record.saved_bound:.1%}, whatever the balance",
        )
    yield row("other ranks per token and layer", "{:.2f}", "remote_ranks")
    yield row("other nodes per token and layer", "{:.2f}", "remote_nodes")
    yield row("step, ms", "{:.3f}", "step_seconds", 1e3)
    for name in _PARTS:
        yield row(f"  {_PARTS[name]}, ms", "{:.3f}", name, 1e3)


_PARTS = {
    "expert_seconds": "of it in the fullest rank's experts",
    "dispatch_seconds": "of it in sending tokens",
    "memory_seconds": "of it in waiting for KV blocks that replicas took",
}
"""Components of the step time."""


def _print_steps(record: PlanRecord, everything: bool) -> None:
    chosen = (
        list(record.steps)
        if everything
        else sorted(record.steps, key=lambda step: -step.gain_seconds)[:MAX_SHOWN]
    )
    table(("handover", "layer", "step", "what", "bytes", "gain", "why"), map(_step, chosen))
    if len(record.steps) > len(chosen):
        console().print(
            f"and {len(record.steps) - len(chosen):,} {'more' if record.lost else 'that gain less'}; --all"
            " prints them"
        )


def _step(step: StepRecord) -> tuple[str, ...]:
    size, gain = (
        byte_size(step.bytes) if step.bytes else "-",
        duration(step.gain_seconds) if step.gain_seconds else "-",
    )
    layer = "-" if step.layer < 0 else str(step.layer)
    return (str(step.number), layer, step.kind, step.what, size, gain, step.why)


def _print_homes(record: PlanRecord) -> None:
    if record.homes:
        homes = ", ".join(f"{cluster}: {' '.join(map(str, ranks))}" for cluster, ranks in record.homes)
        console().print(f"homes of clusters (ranks){', once the plan is done' if record.id else ''}: {homes}")
    if record.homes_note:
        console().print(f"homes: {record.homes_note}", markup=False)


def _print_memory(points: tuple[MemoryPoint, ...]) -> None:
    head = (
        "",
        "slots per rank",
        "redundant",
        "weights per rank",
        "KV blocks left",
        "balance",
        "local",
        "step ms",
        "waiting for KV ms",
        "together ms",
    )
    table(head, map(_point, points))


def _point(point: MemoryPoint) -> tuple[str, ...]:
    mark = ", ".join(word for word, holds in (("now", point.present), ("best", point.best)) if holds)
    waits, total = (
        f"{1e3 * seconds:.3f}" if seconds is not None else "for ever"
        for seconds in (point.waiting_seconds, point.total_seconds)
    )
    sizes = (
        str(point.slots_per_rank),
        str(point.redundant_slots),
        byte_size(point.bytes_per_rank),
        f"{point.kv_blocks:,}",
    )
    return (
        mark,
        *sizes,
        f"{point.balance:.3f}",
        f"{point.local_share:.1%}",
        f"{1e3 * point.step_seconds:.3f}",
        waits,
        total,
    )
