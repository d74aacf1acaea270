"""Control-loop state in a screenful: current figures against the start and the prediction; decisions and
their results."""

import math
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from rich.text import Text

from bus import Bus
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.client.control_loop import NoAnswer, described, set_paused
from deploy.terminal.bus_connection import on_bus
from deploy.terminal.output import console, fail, in_json, note, printable, show
from fleet.facts.migrations import LoopFigures
from fleet.requests.control_loop import EngineLoop, LayerFigures, LoopDescribed, PlanSummary
from fleet.text import byte_size, counted, duration

WIDTH = 80
MAX_PLANS, BRIEF_PLANS = 4, 2
MAX_LINES = 3
"""most lines of one planner message"""
MAX_BARS = 36
"""most bars of a sparkline; further layers are grouped, and the worst of each group is shown"""
_BARS = "▁▂▃▄▅▆▇█"
_DIGITS = "12345678"
"""digits for terminals without block characters"""
_UNDER_WAY = "under way"
_PAUSED = (
    "Until it is resumed the planner starts no plan and undoes none. Commands of operators are carried out, "
    "a running plan is completed and evaluated, and homes of requests are published as before."
)


class Row(NamedTuple):
    """One figure of an engine: its name, its format, the format of its change, and its field in
    `LoopFigures`."""

    name: str
    write: Callable[[float], str]
    change: Callable[[float, float], str]
    field: str


def _percent(before: float, now: float) -> str:
    return f"{100 * (now / before - 1):+.1f}%" if before > 0 else "-"


def _points(before: float, now: float) -> str:
    return f"{100 * (now - before):+.1f} points"


def _difference(before: float, now: float) -> str:
    return f"{now - before:+.3f}"


ROWS = (
    Row("remote ranks per token", "{:.3f}".format, _percent, "remote_ranks"),
    Row("served locally", "{:.1%}".format, _points, "local"),
    Row("balance", "{:.3f}".format, _difference, "balance"),
    Row("step", duration, _percent, "step_seconds"),
)


# Overview


def overview(loop: LoopDescribed, now: float) -> list[Text]:
    """Return the loop's overall state. now: Unix seconds, here as everywhere."""
    budget = f"{byte_size(loop.budget_bytes)} in {age(loop.budget_seconds)}"
    if loop.paused:
        since = (
            "" if loop.paused_at is None or now - loop.paused_at < 1 else f" for {age(now - loop.paused_at)}"
        )
        why = f": {printable(loop.paused_reason)}" if loop.paused_reason else ""
        lines = wrapped(f"loop: PAUSED{since}{why}; roost migration resume resumes it", "bold")
    elif loop.automatic:
        lines = [Text("loop: automatic", "bold")]
    else:
        lines = [Text("loop: acts on request only ([planner] automatic = false)", "bold")]
    about = f", policy {printable(loop.policy)}, plans every {age(loop.cycle_seconds)}, may copy {budget}"
    if len(lines) == 1 and len(lines[0].plain) + len(about) <= WIDTH:
        return [lines[0] + Text(about)]
    return [*lines, *wrapped(about.removeprefix(", "))]


def engine_report(
    loop: LoopDescribed, one: EngineLoop, now: float, live: LoopFigures | None = None, *, brief: bool = False
) -> list[Text]:
    """Return all lines of one engine. live: recent measurements, if known. brief: without layers, and with
    fewer plans."""
    lines = list(figures(one, live))
    lines += sparks(one.layers) if one.layers is not None and not brief else []
    lines += wrapped(_budget(loop, one))
    lines += wrapped(_decided(one, now))
    if one.homes or one.homes_note:
        lines += wrapped(
            f"homes: {counted(one.homes, 'cluster has one', 'clusters have one')}"
            + (f"; {printable(one.homes_note)}" if one.homes_note else "")
        )
    return lines + list(plans(one.plans, now, BRIEF_PLANS if brief else MAX_PLANS))


def figures(one: EngineLoop | None, live: LoopFigures | None = None) -> Iterator[Text]:
    """Return the table of figures: now, at the start, predicted, and the change from the start. None: the
    planner has no figures."""
    measured, start, predicted = (
        (None, None, None) if one is None else (one.measured, one.at_start, predicted_figures(one.plans))
    )
    columns = [
        (head, found)
        for head, found in (
            ("last 10 s", live),
            ("now", measured),
            ("at start", start),
            ("predicted", predicted),
        )
        if found is not None
    ]
    if measured is None and live is None:
        yield from wrapped(
            "no recent measurements: no requests, or an engine that does not report token destinations"
        )
        return
    latest = measured or live
    yield Text(
        f"{'':22}"
        + "".join(f"{head:>11}" for head, _ in columns)
        + (f"{'since start':>14}" if start is not None else ""),
        "bold",
    )
    for row in ROWS:
        cells = "".join(f"{_cell(row, found):>11}" for _, found in columns)
        both = (getattr(start, row.field), getattr(latest, row.field)) if start is not None else ()
        yield Text(f"{row.name:22}{cells}" + (f"{_finite(row.change, *both):>14}" if both else ""))


def _cell(row: Row, found: LoopFigures | None) -> str:
    return "-" if found is None else _finite(row.write, getattr(found, row.field))


def _finite(write: Callable[..., str], *values: float) -> str:
    return write(*values) if all(map(math.isfinite, values)) else "-"


def predicted_figures(plans: Sequence[PlanSummary]) -> LoopFigures | None:
    """Return the predicted figures of the last plan that was carried out and not undone; None: no such plan,
    or no prediction.

    The predicted step time is the step time measured before the plan, reduced by the predicted share:
    absolute times of the model differ from those of the machine.
    """
    for plan in plans:
        if plan.origin == "rollback" and outcome(plan) not in (_UNDER_WAY, "aborted"):
            return None
        if plan.predicted_after is not None and outcome(plan) not in (_UNDER_WAY, "aborted", "harmful"):
            return _as_measured(plan, plan.predicted_after)
    return None


def _as_measured(plan: PlanSummary, after: LoopFigures) -> LoopFigures:
    before, measured = plan.predicted_before, plan.measured_before
    if before is None or measured is None or before.step_seconds <= 0:
        return after
    return msgspec.structs.replace(
        after, step_seconds=measured.step_seconds * after.step_seconds / before.step_seconds
    )


def outcome(plan: PlanSummary) -> str:
    """Return the outcome in one word, without the reason."""
    text = printable(plan.outcome)
    return _UNDER_WAY if text.startswith(_UNDER_WAY) else (text.split() or ["-"])[0].rstrip(",:;")


def sparks(layers: LayerFigures) -> list[Text]:
    """Return balance and remote ranks, layer by layer."""
    worst = (("balance by layer", layers.balance, min), ("remote ranks by layer", layers.remote_ranks, max))
    return [Text(f"{name:22} {sparkline(values, pick)}") for name, values, pick in worst if values]


def sparkline(values: Sequence[float], worst: Callable[[Sequence[float]], float] = max) -> str:
    """Return one bar per value, with the minimum and the maximum. Many values are grouped; each group shows
    its worst."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "-"
    group = -(-len(values) // MAX_BARS)
    shown = [
        worst([one if math.isfinite(one) else known[0] for one in values[at : at + group]])
        for at in range(0, len(values), group)
    ]
    low, high = min(known), max(known)
    bars = _BARS if (console().encoding or "").lower().startswith("utf") else _DIGITS
    wide = high - low if math.isfinite(high - low) else 0.0
    drawn = "".join(
        bars[min(int((value - low) / wide * len(bars)), len(bars) - 1)] if wide else bars[0]
        for value in shown
    )
    return f"{drawn}  {low:.3f}" + (f" to {high:.3f}" if high > low else "")


def _budget(loop: LoopDescribed, one: EngineLoop) -> str:
    left = max(loop.budget_bytes - one.spent_bytes, 0)
    parts = [
        f"discount {one.plan_discount:.2f}",
        f"{byte_size(one.spent_bytes)} of the budget spent, {byte_size(left)} left",
        f"{byte_size(one.moved_bytes)} moved in all",
    ]
    if one.resting:
        parts.append(counted(one.resting, "expert rests", "experts rest"))
    return "; ".join(parts)


def _decided(one: EngineLoop, now: float) -> str:
    further = (
        "the engine is planned on request only"
        if one.next_seconds is None
        else f"planned again in {max(one.next_seconds, 0):.0f} s"
    )
    if one.decided_at is None:
        return f"no decision yet; {further}"
    return f"decided {age(now - one.decided_at)} ago ({further}): {printable(one.decided) or '-'}"


def plans(summaries: Sequence[PlanSummary], now: float, limit: int = MAX_PLANS) -> Iterator[Text]:
    """Return the last plans, with predicted and measured results."""
    if not summaries:
        yield Text("no plan was carried out yet")
        return
    yield Text(
        f"{'plan':16} {'begun':6} {'outcome':9} {'moved':7} {'remote ranks':21} step (measured)", "bold"
    )
    for plan in summaries[:limit]:
        who = "" if plan.origin == "planner" else f" by {plan.origin}"
        moved = byte_size(plan.bytes) if plan.bytes else "-"
        remote, step = _promise(plan, _from_to), _promise(plan, _by)
        yield Text(
            f"{printable(plan.plan):16} {age(now - plan.at):6} {outcome(plan):9} {moved:7} {remote:21}"
            f" {step}{who}".rstrip()
        )
        if plan is summaries[0] and len(plan.outcome) > len(outcome(plan)) + 1:
            yield from wrapped(f"  {printable(plan.outcome)}")


def _promise(plan: PlanSummary, word: Callable[[LoopFigures, LoopFigures], str]) -> str:
    """Return the predicted gain of a plan, with the measured one in brackets."""
    predicted = (
        "-"
        if plan.predicted_before is None or plan.predicted_after is None
        else word(plan.predicted_before, plan.predicted_after)
    )
    if plan.measured_before is None or plan.measured_after is None:
        return predicted
    return f"{predicted} ({word(plan.measured_before, plan.measured_after)})"


def _from_to(before: LoopFigures, after: LoopFigures) -> str:
    return _finite("{:.2f}>{:.2f}".format, before.remote_ranks, after.remote_ranks)


def _by(before: LoopFigures, after: LoopFigures) -> str:
    """Return the relative change: a model predicts step times, and only their ratio carries over."""
    return _finite(_percent, before.step_seconds, after.step_seconds)


def in_rows(loop: LoopDescribed, now: float) -> list[Text]:
    """Return one line per engine, if there are too many for a screen."""
    lines = [
        Text(
            f"{'engine':12} {'epoch':>5} {'remote ranks':>13} {'served locally':>14} {'balance':>12}"
            f" {'discount':>8}  decided",
            "bold",
        )
    ]
    for one in loop.engines:
        cells = [_beside(row, one) for row in ROWS[:3]]
        when = "-" if one.decided_at is None else f"{age(now - one.decided_at)} ago"
        lines.append(
            Text(
                f"{printable(one.engine):12} {one.epoch:5} {cells[0]:>13} {cells[1]:>14} {cells[2]:>12}"
                f" {one.plan_discount:8.2f}  {when}"
            )
        )
    return [*lines, Text("start>now; all of one engine: roost status ENGINE", "dim")]


def _beside(row: Row, one: EngineLoop) -> str:
    return f"{_cell(row, one.at_start)}>{_cell(row, one.measured)}"


# Text


def age(seconds: float) -> str:
    """Return a length of time in two words."""
    if not math.isfinite(seconds):
        return "-"
    for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"


def wrapped(text: str, style: str = "", width: int = WIDTH) -> list[Text]:
    """Wrap text to lines of at most this width; the end of a long text is cut."""
    return [
        Text(line, style)
        for line in textwrap.wrap(
            text, width, subsequent_indent="  ", max_lines=MAX_LINES, placeholder=" ..."
        )
    ]


def say(lines: Iterable[Text]) -> None:
    for line in lines:
        console().print(line)


# Pausing


def show_loop_state(bus_config: BusConfig, paused: bool | None, reason: str, *, as_json: bool) -> None:
    """Pause the loop, resume it, or (None) print its state. Ends the command with status 1 if no planner
    answers."""

    async def ask(bus: Bus, subjects: Subjects) -> LoopDescribed:
        return (
            await described(bus, subjects)
            if paused is None
            else await set_paused(bus, subjects, paused, reason, note)
        )

    try:
        loop = on_bus(bus_config, ask)
    except NoAnswer as error:
        fail(str(error))
    if paused is not None and loop.paused != paused:
        fail(
            f"the planner answered that it {'is' if loop.paused else 'is not'} paused, contrary to the"
            " request; is another operator active?"
        )
    if as_json:
        show(in_json(loop))
        return
    say(overview(loop, time.time()))
    if loop.paused:
        say(wrapped(_PAUSED))
    elif paused is False and not loop.automatic:
        say(
            wrapped(
                "It was resumed, but the planner makes plans on request only: [planner] automatic is false."
            )
        )
