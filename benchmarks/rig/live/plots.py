"""Plots of `benchmarks.closed_loop` results. No window is opened."""

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

WIDE, HIGH = 9.0, 3.4
GREY, MOVED = "0.55", "tab:orange"
COLOURS = ("tab:gray", "tab:blue", "tab:green", "tab:red", "tab:purple", "tab:brown")
REMOTE = "distinct remote ranks per token"
Course = Mapping[str, Any]


def draw_all(courses: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write a picture of each measured part; return the files. Raises OSError if one cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[Path] = []
    pictures: dict[str, tuple[str, Callable[[Figure, Any], None]]] = {
        "policies": ("policies", _policies),
        "policies-course": ("policies", _policies_course),
        "flip": ("flip", _flip),
        "homogeneous": ("homogeneous", _homogeneous),
        "alternating": ("alternating", _alternating),
    }
    for name, (part, draw) in pictures.items():
        if part in courses:
            figure = Figure(figsize=(WIDE, HIGH), layout="constrained")
            draw(figure, courses[part])
            drawn.append(save(figure, folder / f"{name}.svg"))
    return drawn


def save(figure: Figure, file: Path) -> Path:
    """Save as SVG: the same figures always give the same file. Raises OSError if it cannot be written."""
    with rc_context({"svg.hashsalt": "roost"}):
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
    return file


def _policies(figure: Figure, policies: Mapping[str, Any]) -> None:
    """Draw medians as bars, rounds as dots."""
    shown: tuple[tuple[str, Callable[[Any], float]], ...] = (
        (REMOTE, lambda one: float(one["sent"]["remote_ranks"])),
        ("balance of steps", lambda one: float(one["sent"]["step_balance"])),
        ("tokens/s", lambda one: float(one["tokens_per_second"])),
    )
    names = list(policies)
    for axes, (title, value) in zip(figure.subplots(1, len(shown), sharey=True), shown, strict=True):
        for at, name in enumerate(names):
            values = [value(one) for one in policies[name]]
            axes.barh(at, statistics.median(values), color=COLOURS[at % len(COLOURS)], alpha=0.75)
            axes.plot(values, [at] * len(values), "k.", markersize=4)
            axes.text(
                statistics.median(values) / 2,
                at,
                f"{statistics.median(values):.3g}",
                ha="center",
                va="center",
                color="white",
                fontsize=8,
            )
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
    figure.axes[0].invert_yaxis()


def _policies_course(figure: Figure, policies: Mapping[str, Any]) -> None:
    """Draw the first round of each policy, from its reset on."""
    axes = figure.subplots()
    for at, (name, rounds) in enumerate(policies.items()):
        axes.plot(
            rounds[0]["course"]["seconds"],
            _floats(rounds[0]["course"]["remote_ranks"]),
            color=COLOURS[at % len(COLOURS)],
            label=name,
            linewidth=1.3,
        )
    axes.axvline(next(iter(policies.values()))[0]["begin"], color=GREY, linestyle=":", linewidth=1)
    _label(axes, "seconds after the reset (dotted: measured from here on)", REMOTE)
    axes.legend(fontsize=7, ncols=2)


def _flip(figure: Figure, part: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    _line_and_bytes(axes, part["course"])
    before, after = part["plain"]
    end = part["course"]["seconds"][-1]
    axes.hlines(
        [before, after],
        [0, part["flipped"]],
        [part["flipped"], end],
        colors=GREY,
        linestyles="--",
        linewidth=1,
        label="static + KV-only",
    )
    axes.axvline(part["flipped"], color="tab:red", linestyle=":", linewidth=1, label="all domains change")
    axes.legend(fontsize=7)


def _alternating(figure: Figure, part: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    _line_and_bytes(axes, part["course"])
    end, at = part["course"]["seconds"][-1], part["every"]
    while at < end:
        axes.axvline(at, color=GREY, linestyle=":", linewidth=0.7)
        at += part["every"]


def _homogeneous(figure: Figure, part: Mapping[str, Course]) -> None:
    for axes, (name, course) in zip(
        figure.subplots(1, len(part), squeeze=False)[0], part.items(), strict=True
    ):
        _line_and_bytes(axes, course)
        axes.set_title(name, fontsize=9)


def _line_and_bytes(axes: Any, course: Course) -> None:
    """Draw remote ranks as a line, and copied bytes as bars on a second axis."""
    axes.plot(course["seconds"], _floats(course["remote_ranks"]), color="tab:blue", linewidth=1.3)
    _label(axes, "seconds", REMOTE)
    axes.set_ylim(bottom=0)
    beside = axes.twinx()
    beside.bar(
        course["seconds"], [count / 1e6 for count in course["bytes"]], width=4.0, color=MOVED, alpha=0.6
    )
    beside.set_ylabel("MB moved in 5 s", fontsize=8, color=MOVED)
    beside.set_ylim(0, max(1.0, 3 * max(course["bytes"], default=0) / 1e6))
    beside.tick_params(labelsize=7, colors=MOVED)


def _label(axes: Any, below: str, beside: str) -> None:
    axes.set_xlabel(below, fontsize=8)
    axes.set_ylabel(beside, fontsize=8)
    axes.tick_params(labelsize=8)


def _floats(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
