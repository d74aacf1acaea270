"""Migrations for people and programs: acceptance, progress and result."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bus import Bus
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.client.migrations import (
    NoSuchEngine,
    NotAccepted,
    Order,
    PlanProgress,
    carried_out,
    engine_named,
    preview,
)
from deploy.process import FAILURE, print_error
from deploy.terminal.bus_connection import on_bus
from deploy.terminal.output import USAGE, console, fail, in_json, note, show
from deploy.views import map_files
from fleet.experts import ExpertId
from fleet.layout import layout_named
from fleet.requests.plans import (
    ApplyMap,
    ApplyPlan,
    MigrateExpert,
    MigrationAccepted,
    RollBack,
    SetLayout,
    SwitchEstimate,
)
from fleet.text import byte_size, counted, duration
from migration.model.plan import Plan

LOOK_SECONDS = 0.1
"""interval between two progress updates"""
WHERE_TO_LOOK = "see roost events --kind migration --since 10m, or roost status"
MAX_PLAN_BYTES = 64 << 20
"""largest plan file that is read"""
INTERRUPTED = 128 + signal.SIGINT
"""exit status after an interrupt, as shells define it"""


class OutputForm(NamedTuple):
    """Form of the output."""

    wait: bool = True
    as_json: bool = False
    steps: bool = True
    """print the steps before the migration starts"""


def show_migration(
    bus_config: BusConfig,
    expert: ExpertId,
    engine: str,
    rank: int,
    form: OutputForm,
    *,
    source: int | None,
    move: bool,
    swap: int | None,
    dry_run: bool = False,
) -> None:
    """Move one expert to a rank and report the progress. What gives way is shown before anything moves;
    dry_run: and nothing moves. Like the other functions here, ends the command with status 1 if the migration
    is refused or aborted."""

    async def ask(bus: Bus, subjects: Subjects) -> MigrateExpert:
        found = await engine_named(bus, subjects, engine)
        order = MigrateExpert(
            engine=found.engine,
            layer=expert.layer,
            expert=expert.expert,
            rank=rank,
            source=source,
            move=move,
            swap=swap,
        )
        _show_preview(await preview(bus, subjects, order, note), form, dry_run=dry_run)
        return order

    _show(bus_config, ask, form._replace(steps=False))


def _show_preview(accepted: MigrationAccepted, form: OutputForm, *, dry_run: bool) -> None:
    """Show what a request would move. dry_run: end the command with it."""
    if form.as_json and dry_run:
        names = ("engine", "plan", "what", "handovers", "copies", "bytes")
        record = {name: getattr(accepted, name) for name in names}
        if accepted.switch is not None:
            record["switch"] = msgspec.to_builtins(accepted.switch)
        show(in_json(record))
    elif not form.as_json:
        for step in accepted.what:
            console().print(f"- {step}", markup=False)
        for line in () if accepted.switch is None else switch_lines(accepted.switch):
            console().print(line, markup=False)
    if dry_run:
        note("dry run: nothing was moved")
        raise typer.Exit


def show_map(
    bus_config: BusConfig, file: Path, engine: str | None, form: OutputForm, *, dry_run: bool
) -> None:
    """Bring the map in a file into force, on an engine or (None) the only one with experts."""
    try:
        placement = map_files.read(file)
    except ValueError as error:
        fail(str(error), USAGE)

    async def ask(bus: Bus, subjects: Subjects) -> ApplyMap:
        found = await engine_named(bus, subjects, engine)
        order = ApplyMap(engine=found.engine, placement=placement.record())
        _show_preview(await preview(bus, subjects, order, note), form, dry_run=dry_run)
        return order

    _show(bus_config, ask, form._replace(steps=False))


def show_switch(
    bus_config: BusConfig, engine: str | None, wanted: str, form: OutputForm, *, now: bool, dry_run: bool
) -> None:
    """Change the layout of an engine, or (None) of the only one with experts, until it is `wanted`
    (`fleet.layout.layout_named`). now: without waiting for the byte budget."""

    async def ask(bus: Bus, subjects: Subjects) -> SetLayout:
        found = await engine_named(bus, subjects, engine)
        if found.shape is None:
            raise NoSuchEngine(f"engine {found.engine!r} states no experts")
        try:
            layout = layout_named(wanted, found.shape.layers)
        except ValueError as error:
            fail(f"--set: {error}", USAGE)
        order = SetLayout(engine=found.engine, sharded=layout.sharded, attention=layout.attention, now=now)
        _show_preview(await preview(bus, subjects, order, note), form, dry_run=dry_run)
        return order

    _show(bus_config, ask, form._replace(steps=False))


def switch_lines(switch: SwitchEstimate) -> Iterator[str]:
    """Describe the cost of a switch of layout."""
    ways = ", ".join(f"{byte_size(size)} {link}" for link, size in switch.bytes_by_link.items() if size)
    yield f"bytes: {ways or 'none'}"
    speed = "measured" if switch.measured else "configured"
    yield f"time: {switch.seconds:.2f} s at the {speed} speed of links"
    if switch.budget_seconds is None:
        yield "byte budget: it is 0 (planner.budget_bytes), and permits nothing without --now"
    elif switch.budget_seconds:
        yield f"byte budget: it takes at least {switch.budget_seconds:.0f} s within it; --now ignores it"
    if switch.cells:
        yield (
            f"cells: a rank fills up to {switch.cells} in a handover, of at least {switch.free} that are free"
        )
    if switch.kv is not None:
        yield (
            f"KV: with {counted(switch.kv.pages, 'page')} in use, as now, ranks read"
            f" {byte_size(switch.kv.bytes)} from each other in {counted(switch.kv.rounds, 'round')}, all but"
            f" the last while they serve; the last pauses for about {duration(switch.kv.pause_seconds)} at"
            f" the {speed} speed of links"
        )


def show_plan_file(bus_config: BusConfig, file: Path, engine: str | None, form: OutputForm) -> None:
    """Carry out the plan in a file, on an engine or (None) the only one with experts."""
    try:
        plan = msgspec.json.decode(_content(file), type=Plan)
    except (OSError, ValueError) as error:
        fail(f"{file}: no plan can be read from it: {error}", USAGE)
    if plan.refused:
        fail(f"{file}: this plan does nothing: {plan.refused}")

    async def ask(bus: Bus, subjects: Subjects) -> ApplyPlan:
        found = await engine_named(bus, subjects, engine)
        return ApplyPlan(engine=found.engine, plan=msgspec.json.encode(plan))

    _show(bus_config, ask, form)


def show_applied(
    bus_config: BusConfig, engine: str, plan: bytes, form: OutputForm, further: dict[str, Any]
) -> None:
    """Carry out a plan that was just made. further: more fields for the JSON."""

    async def ask(bus: Bus, subjects: Subjects) -> ApplyPlan:
        return ApplyPlan(engine=engine, plan=plan)

    _show(bus_config, ask, form, further)


def show_rollback(bus_config: BusConfig, engine: str | None, plan: str, form: OutputForm) -> None:
    """Return an engine to the placement before a plan; empty: the last plan with a committed handover."""

    async def ask(bus: Bus, subjects: Subjects) -> RollBack:
        return RollBack(engine=(await engine_named(bus, subjects, engine)).engine, plan=plan)

    _show(bus_config, ask, form)


def _content(file: Path) -> bytes:
    with file.open("rb") as source:
        content = source.read(MAX_PLAN_BYTES + 1)
    if len(content) > MAX_PLAN_BYTES:
        raise ValueError(f"more than {MAX_PLAN_BYTES} bytes")
    return content


def _show(
    bus_config: BusConfig,
    ask: Callable[[Bus, Subjects], Awaitable[Order]],
    form: OutputForm,
    further: dict[str, Any] | None = None,
) -> None:
    shown = _ProgressDisplay(form)

    async def work(bus: Bus, subjects: Subjects) -> None:
        order = await ask(bus, subjects)
        try:
            await carried_out(bus, subjects, order, wait=form.wait, began=shown.begin, say=shown.say)
        except asyncio.CancelledError:
            shown.left = True
        finally:
            await shown.end()

    try:
        on_bus(bus_config, work)
    except (NoSuchEngine, NotAccepted) as error:
        fail(str(error))
    if shown.progress is None:
        note(f"interrupted before the planner answered; it may still carry out the request: {WHERE_TO_LOOK}")
        raise typer.Exit(INTERRUPTED)
    _print_result(shown.progress, form, left=shown.left, further=further or {})


class _ProgressDisplay:
    """State of the progress display."""

    def __init__(self, form: OutputForm) -> None:
        self.progress: PlanProgress | None = None
        self.left = False
        self._form = form
        self._bar: Progress | None = None
        self._moving: asyncio.Task[None] | None = None

    def begin(self, progress: PlanProgress) -> None:
        self.progress = progress
        if self._form.as_json:
            return
        accepted = progress.accepted
        copied = (
            f"{counted(accepted.copies, 'copy', 'copies')} ({byte_size(accepted.bytes)})"
            if accepted.copies
            else "no bytes"
        )
        console().print(
            f"plan [bold]{accepted.plan}[/bold] of {accepted.engine}: {copied} in"
            f" {counted(accepted.handovers, 'handover')}"
        )
        for step in accepted.what if self._form.steps else ():
            console().print(f"- {step}", markup=False)
        if self._form.wait and console().is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[moved]}"),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=console(), transient=True)
            self._moving = asyncio.create_task(self._move(self._bar, progress), name="show the progress")

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False)
        elif not self._form.as_json:
            show(text)

    async def end(self) -> None:
        if self._moving is not None:
            self._moving.cancel()
            await asyncio.gather(self._moving, return_exceptions=True)

    async def _move(self, bar: Progress, progress: PlanProgress) -> None:
        with bar:
            row = bar.add_task("", total=progress.accepted.handovers, moved="")
            while True:
                moved = f"{byte_size(progress.pulled)} of {byte_size(progress.accepted.bytes)}"
                bar.update(row, description=progress.present, completed=progress.next, moved=moved)
                await asyncio.sleep(LOOK_SECONDS)


def outcome(progress: PlanProgress) -> str:
    """Return the outcome: done, given up, or under way. A request that only ended a waiting plan is done."""
    if progress.aborted is not None:
        return "given up"
    return "done" if progress.committed or not progress.accepted.handovers else "under way"


def _print_result(progress: PlanProgress, form: OutputForm, *, left: bool, further: dict[str, Any]) -> None:
    accepted, failed = progress.accepted, progress.aborted
    if form.as_json:
        show(in_json({**further, **as_record(progress)}))
    elif not accepted.handovers:
        console().print(f"[bold]done[/bold]: {accepted.engine} keeps what it serves")
    elif progress.committed:
        ways = (
            " and ".join(
                f"{byte_size(size)} by {name}" for name, size in sorted(progress.by_transfer.items())
            )
            or "no bytes"
        )
        console().print(
            f"[bold]done[/bold]: {accepted.engine} serves epoch {progress.epoch};"
            f" {counted(progress.copies, 'copy', 'copies')}, {ways}, {progress.seconds:.2f} s"
        )
    if failed is not None:
        before = (
            f"; {counted(progress.next, 'handover')} of {accepted.handovers} had been done"
            if progress.next
            else ""
        )
        place = "" if failed.rank is None else f" (rank {failed.rank})"
        print_error(
            f"given up{place}: {failed.reason}; {accepted.engine} stays at epoch {failed.epoch - 1}{before}"
        )
        raise typer.Exit(FAILURE)
    if (left or not form.wait) and accepted.handovers:
        note(f"plan {accepted.plan} continues without this command: {WHERE_TO_LOOK}")
    if left:
        raise typer.Exit(INTERRUPTED)


def as_record(progress: PlanProgress) -> dict[str, Any]:
    """Return the result as a record for programs."""
    failed = progress.aborted
    return {
        "engine": progress.accepted.engine,
        "worker_id": str(progress.accepted.worker_id),
        "plan": progress.accepted.plan,
        "what": progress.accepted.what,
        "outcome": outcome(progress),
        "handovers": progress.accepted.handovers,
        "handovers_done": progress.next,
        "epoch": progress.epoch or None,
        "copies": progress.copies,
        "bytes": progress.copied_bytes,
        "seconds": progress.seconds,
        "bytes_by_transfer": dict(progress.by_transfer),
        "reason": None if failed is None else failed.reason,
        "fault": None if failed is None else failed.fault,
        "rank": None if failed is None else failed.rank,
    }
