"""Text about the choice of a layout: curves, regret, and why the engine stays."""

from collections.abc import Iterator

from rich.text import Text

from deploy.terminal.output import printable
from fleet.requests.layouts import EngineLayout, LayoutCrossing, LayoutOption, StepTimeCurve
from fleet.text import counted, duration

MOST_POINTS = 8
"""Batches of a curve that are shown."""


def sentences(one: EngineLayout) -> Iterator[Text]:
    """Yield lines about the choice: whether it is automatic, the load, and the last decision."""
    if not one.automatic:
        yield Text(f"choice: by hand; the planner chooses after roost layout {one.engine} --auto on")
    else:
        yield Text(f"choice: automatic, policy {one.policy}")
    load = f"{counted(one.running, 'decoding sequence')}, {one.waiting} waiting"
    yield Text(f"load: {load}, {one.context:.0f} tokens of context")
    if one.decided:
        yield Text(printable(one.decided))
    if one.single_layers:
        yield Text(printable(one.single_layers))


def option_rows(one: EngineLayout) -> Iterator[tuple[str, ...]]:
    """Yield a row for each layout: name, decode step now, regret so far, cost of going."""
    for option in one.options:
        yield (
            option.layout,
            _step(option),
            "" if option.refusal else duration(option.regret_seconds),
            "unknown" if option.cost_seconds is None else duration(option.cost_seconds),
        )


OPTION_COLUMNS = ("layout", "decode step now", "regret so far", "cost of a switch")


def _step(option: LayoutOption) -> str:
    if option.step_seconds is None:
        return "unknown"
    doubt = ", uncertain" if option.uncertain else ""
    return f"{duration(option.step_seconds)} ± {option.deviation:.1%}{doubt}"


def curve_rows(curves: tuple[StepTimeCurve, ...]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each of some batches: sequences, and the decode step in each layout. The fastest one
    is marked."""
    if not curves:
        return
    points = curves[0].sequences
    stride = -(-len(points) // MOST_POINTS)
    for at in sorted({*range(0, len(points), stride), len(points) - 1}):
        best = min(curve.seconds[at] for curve in curves)
        yield (
            str(points[at]),
            *(duration(curve.seconds[at]) + (" *" if curve.seconds[at] == best else "") for curve in curves),
        )


def crossings(found: tuple[LayoutCrossing, ...]) -> str:
    """State where layouts cross. The measurements may show no crossing, or none beyond their noise."""
    if not found:
        return "no crossing: the measurements show none"
    return "; ".join(
        f"at {one.sequences:.0f} sequences {one.below} and {one.above} take equally long, below it"
        f" {one.below} is faster"
        for one in found
    )
