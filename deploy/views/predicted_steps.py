"""Predicted decode steps of a considered model, and where the faster layout changes, as text and as JSON."""

from collections.abc import Iterator
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from deploy.terminal.line_plot import line_plot
from deploy.terminal.output import USAGE, console, fail, table
from deploy.views.considered import LAYOUTS, UNKNOWN, Considered, refusal_of, tokens_that_fit
from fleet.layout_times import LayoutName
from fleet.text import duration
from migration.hardware.crossings import (
    INDIFFERENT,
    BatchStretch,
    PredictedCrossing,
    counts,
    crossings,
    stretches,
)
from migration.hardware.prices import OwnSteps, OwnTimings, PublishedPrices, StepPrediction

LETTERS = {"ep": "E", "experts-tp": "X", "tp": "T"}
SHOWN = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)
RANDOM = "tokens spread over experts at random"
SKEWED = "tokens follow a power law of exponent 1.2"


class Predicted(NamedTuple):
    """Steps by one kernel stack under one routing."""

    routing: str
    steps: StepPrediction


def published_prices() -> PublishedPrices:
    """Return the bundled prices."""
    return PublishedPrices.decode(files("migration.hardware").joinpath("published_prices.json").read_bytes())


def predicted(one: Considered, kernels: str | None) -> tuple[list[Predicted], str]:
    """Return the steps, and why there are none. kernels: a published stack, a file of own timings, or None
    for all published stacks. Ends the command if it is none of these."""
    published = published_prices()
    if kernels is not None and kernels not in published.kernels:
        return [Predicted("as measured", _own(one, Path(kernels), published))], ""
    found = []
    for name in published.kernels if kernels is None else (kernels,):
        for routing in (RANDOM, SKEWED):
            steps = published.find(one.model, one.machine.name, one.ranks, name, skewed=routing is SKEWED)
            if steps is not None and steps.contexts[0] <= one.context <= steps.contexts[1]:
                found.append(Predicted(routing, steps))
    first, last = published.contexts
    why = (
        f"{UNKNOWN}: no published kernel timings for {one.model.name}, {one.ranks} ranks of"
        f" {one.machine.name} and context {one.context:,} ({first:,} to {last:,} were timed); time steps of"
        " both layouts and give them as --kernels FILE"
    )
    return found, "" if found else why


def _own(one: Considered, path: Path, published: PublishedPrices) -> OwnSteps:
    if not path.is_file():
        fail(
            f"--kernels {str(path)!r} is neither a file of timings nor one of {', '.join(published.kernels)}",
            USAGE,
        )
    try:
        steps = OwnSteps(str(path), one.model, one.ranks, OwnTimings.decode(path.read_bytes()))
    except (OSError, ValueError) as error:
        fail(f"{path}: {error}", USAGE)
    first, last = steps.contexts
    if not first <= one.context <= last:
        fail(
            f"{path}: context {one.context:,} was not timed, only {first:,} to {last:,}; choose one with"
            " --context",
            USAGE,
        )
    return steps


def compared(one: Considered, steps: StepPrediction) -> list[int]:
    """Return the sequences at which layouts are compared: those that were timed, and whose KV fits in EP; all
    that were timed, if the model does not fit."""
    fewest, most = steps.sequences
    fitting = tokens_that_fit(one, "ep") // one.context
    return counts(fewest, max(fewest, min(most, fitting)) if fitting else most)


def versus(
    one: Considered, steps: StepPrediction, other: LayoutName, band: float = INDIFFERENT
) -> tuple[BatchStretch, ...]:
    """Return the stretches in which TP or another layout is faster."""
    return stretches(
        "tp",
        other,
        lambda layout, count: steps.seconds(layout, count, one.context),
        compared(one, steps),
        band,
    )


def crossing_line(found: tuple[BatchStretch, ...]) -> str:
    """Say where the faster layout changes."""
    changes = list(crossings(found))
    if changes:
        return "; ".join(map(_change, changes))
    faster = {one.faster for one in found} - {None}
    if not faster:
        return (
            f"none: they differ by less than {INDIFFERENT:.0%} from {found[0].first:,} to {found[-1].last:,}"
        )
    alike = [_span(one) for one in found if one.faster is None]
    always = f"{faster.pop()} is {'' if alike else 'always '}faster"
    rest = f", or they are less than {INDIFFERENT:.0%} apart ({', '.join(alike)})" if alike else ""
    return f"none from {found[0].first:,} to {found[-1].last:,}: {always}{rest}"


def _change(one: PredictedCrossing) -> str:
    return f"{one.first:,} to {one.last:,} sequences, from {one.below} to {one.above}"


def _span(one: BatchStretch) -> str:
    return f"{one.first:,} to {one.last:,}"


def certain_line(one: Considered, steps: StepPrediction, other: LayoutName) -> str:
    """Say where the difference exceeds the band and the error of the form together."""
    if other not in steps.errors or "tp" not in steps.errors:
        return UNKNOWN
    found = versus(one, steps, other, INDIFFERENT + steps.errors["tp"] + steps.errors[other])
    sure = [f"{stretch.faster} {_span(stretch)}" for stretch in found if stretch.faster is not None]
    return ", ".join(sure) or "nowhere"


def show_steps(one: Considered, found: list[Predicted], why: str) -> None:
    """Print steps, crossings and curves, or that they are unknown."""
    console().print("Decode steps", style="bold")
    if why:
        console().print(f"crossing of tp and ep: {why}", markup=False)
        return
    if padded := [layout for layout in LAYOUTS if refusal_of(one, layout)]:
        console().print(f"(as if {' and '.join(padded)} could be served: see the first table)", markup=False)
    for routing, steps in found:
        errors = ", ".join(f"{layout} {error:.1%}" for layout, error in steps.errors.items())
        console().print(f"{steps.kernels}, {routing}; error of the form: {errors}", markup=False)
        timed = [layout for layout in LAYOUTS if layout in steps.errors]
        table(
            ("sequences", *timed),
            [
                (f"{count:,}", *(duration(steps.seconds(layout, count, one.context)) for layout in timed))
                for count in SHOWN
                if steps.sequences[0] <= count <= compared(one, steps)[-1]
            ],
        )
        for other in timed[:-1]:
            console().print(
                f"crossing of tp and {other}: {crossing_line(versus(one, steps, other))}", markup=False
            )
            console().print(f"  certain beyond the error: {certain_line(one, steps, other)}", markup=False)
        console().print()
    show_plots(one, found)
    for line in notes(one):
        console().print(line, markup=False)


def notes(one: Considered) -> Iterator[str]:
    """Yield remarks on what the steps leave out."""
    limits = [f"{layout} {tokens_that_fit(one, layout) // one.context:,}" for layout in LAYOUTS]
    yield f"Sequences of {one.context:,} tokens whose KV fits: {', '.join(limits)}."
    yield (
        "Published steps are of kernels alone: the host's work, the same in all layouts, is not in them, nor"
        " is prefill."
    )
    yield f"Source: {published_prices().source}; {published_prices().collectives}."


def curves(one: Considered, steps: StepPrediction) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each layout that was timed: sequences, milliseconds."""
    return {
        layout: [(count, 1e3 * steps.seconds(layout, count, one.context)) for count in compared(one, steps)]
        for layout in LAYOUTS
        if layout in steps.errors
    }


def show_plots(one: Considered, found: list[Predicted]) -> None:
    """Print the curves of each kernel stack, under its first routing."""
    for routing, steps in _first_routings(found):
        points = curves(one, steps)
        letters = ", ".join(f"{LETTERS[layout]} = {layout}" for layout in points)
        lines = line_plot(
            {LETTERS[layout]: some for layout, some in points.items()},
            horizontal="sequences",
            vertical=f"ms per step, {steps.kernels}, {routing}: {letters}, * = several",
        )
        console().print("\n".join(lines) + "\n", markup=False)


def _first_routings(found: list[Predicted]) -> list[Predicted]:
    later = {two.steps.kernels for one, two in pairwise(found) if one.steps.kernels == two.steps.kernels}
    return [one for one in found if one.routing != SKEWED or one.steps.kernels not in later]


def draw_plots(path: Path, one: Considered, found: list[Predicted]) -> None:
    """Write the curves as a picture. Ends the command if matplotlib is missing or the file cannot be
    written."""
    try:
        from deploy.terminal.curve_picture import draw_curves
    except ImportError as error:
        fail(f"--plot needs matplotlib ({error}); install it with: pip install 'roost[plot]'", USAGE)
    title = f"{one.model.name}, {one.ranks} x {one.machine.name}, context {one.context:,}"
    panels = {f"{title}\n{steps.kernels}": curves(one, steps) for _, steps in _first_routings(found)}
    try:
        draw_curves(path, panels, horizontal="sequences", vertical="ms per decode step")
    except (OSError, ValueError) as error:
        fail(f"cannot draw {path}: {error}", USAGE)


def steps_record(one: Considered, found: list[Predicted], why: str) -> dict[str, Any]:
    """Return steps and crossings as a record for programs."""
    return {
        "unknown": why or None,
        "source": published_prices().source,
        "steps": [
            {
                "kernels": steps.kernels,
                "routing": routing,
                "errors": dict(steps.errors),
                "milliseconds": curves(one, steps),
                "faster": {
                    other: [stretch._asdict() for stretch in versus(one, steps, other)]
                    for other in LAYOUTS
                    if other != "tp" and other in steps.errors
                },
                "crossings": {
                    other: [change._asdict() for change in crossings(versus(one, steps, other))]
                    for other in LAYOUTS
                    if other != "tp" and other in steps.errors
                },
            }
            for routing, steps in found
        ],
    }
