"""Soak report (`make soak`) as a page of Markdown and a picture."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.rig.live.plots import save

WIDE, HIGH = 9.0, 8.0
MINUTE = 60.0
MIB = 2**20
_LAYOUTS = {"ep": "tab:blue", "experts-tp": "tab:green", "tp": "tab:orange", "mixed": "0.6"}
_COLOURS = (
    "tab:blue",
    "tab:orange",
    "tab:green",
    "tab:red",
    "tab:purple",
    "tab:brown",
    "tab:pink",
    "tab:gray",
    "tab:olive",
    "tab:cyan",
)
_REQUESTS = (
    ("came", "requests"),
    ("answered", "of these answered, each whole"),
    ("lost", "of these lost"),
    ("answered_at_once", "answered at once"),
    ("turned_away", "users who found too many others, and never asked"),
    ("compared", "answers compared, token by token, with what they must be"),
    ("close_choices", "of these that went the other way at a close choice of a token"),
    ("wrong", "of these wrong"),
    ("tokens", "tokens answered"),
)
"""request counters of the report, in display order"""
_CAUSES = {
    "broken": (
        "answered when asked again: the router behind it was killed, or closed the connection before it had"
        " read the request"
    ),
    "not connected": "answered when asked again: no connection could be made",
    "refused": "answered when asked again: refused with a status that says so",
}
_FORMS = "; at the bottom, open requests and the layout of each engine"
Json = dict[str, Any]


def soak_page(report: Json) -> str:
    """Return Markdown: the setup, failures, the picture, counts of requests, epochs, plans and faults, and
    memory growth. report: with its hardware and date."""
    fleet, failures = report["fleet"], report["failures"]
    ran = f"{report['so_far_seconds'] / MINUTE:.0f} of " if "so_far_seconds" in report else ""
    first = (
        f"{ran}{report['seconds'] / MINUTE:.0f} minutes, seed {report['seed']}, {report['hardware']},"
        f" {report['date']}"
    )
    lines = [
        "# The soak, measured",
        "",
        (
            'Written by `make soak`, then `make evidence ARGS="--soak soak.json"`, which keeps the report'
            " beside it: virtual users who change their subject, the"
        ),
        "automatic loop, operators' orders, and faults at random.",
        "",
        (
            f"{first}; {fleet['engines']} {'simulated ' * bool(fleet.get('simulated'))}engines of"
            f" {fleet['ranks']} ranks, {fleet['routers']} routers."
        ),
        "",
        *(
            [f"Settings: {', '.join(f'`{name}={value}`' for name, value in fleet['settings'].items())}.", ""]
            if fleet.get("settings")
            else []
        ),
        *(
            [f"**{len(failures)} failures:**", "", *(f"- {failure}" for failure in failures)]
            if failures
            else ["Nothing failed that should not have."]
        ),
        "",
        f"![Memory of every process, requests, mishaps]({_picture(report)})",
        "",
        (
            "*Resident memory of every process, of several lives where it was killed; requests by the minute;"
            f" below, each mishap{_FORMS if 'forms' in report else ''}.*"
        ),
        "",
        *_table(("", "count"), ((name, f"{count:,}") for name, count in _counts(report))),
        "",
        *_gentle(report.get("gentle_stops", [])),
        *_table(("mishap", "times", "whole again after, longest"), _mishaps(report["mishaps"])),
        "",
        *_superseded(report),
        *_kinds_of_processes(report.get("growth_by_kind", {})),
        *_table(
            ("process", "minutes", "MiB, third quarter", "last quarter", "per hour"),
            _growths(report["growth"]),
        ),
    ]
    return "\n".join(lines) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def _counts(report: Json) -> list[tuple[str, int]]:
    requests, epochs, plans = report["requests"], report["epochs"], dict(report["plans"])
    handovers, moved, evaluated = plans.pop("handovers"), plans.pop("bytes"), plans.pop("judged")
    causes, lengths = requests.get("asked_again_by_cause", {}), requests.get("streams_by_length", {})
    return [
        *((words, requests[key]) for key, words in _REQUESTS if key in requests),
        *((words, causes.get(cause, 0)) for cause, words in _CAUSES.items()),
        *((f"streams answered, {length}", count) for length, count in lengths.items()),
        ("placements stored", epochs["stored"]),
        ("epochs that went back", epochs["went_back"]),
        *((f"plans of the {origin}", count) for origin, count in sorted(plans.items())),
        ("handovers committed", handovers),
        ("bytes planned to be copied", moved),
        *(
            (f"switches of layout of {name}, {whose}", count)
            for name, switches in report.get("layouts", {}).items()
            for whose, count in (("chosen", len(switches["chosen"])), ("by hand", switches["by_hand"]))
        ),
        *((f"plans judged {verdict}", count) for verdict, count in sorted(evaluated.items())),
    ]


def _gentle(stops: list[Json]) -> list[str]:
    """Return for each gracefully stopped router the outcome of its open streams."""
    if not stops:
        return []
    rows = (
        (
            f"{stop['at']:.0f} s",
            stop["router"],
            str(stop["streams_open"]),
            str(stop["finished"]),
            str(stop["broken"]),
            "-" if stop["gone_after"] is None else f"{stop['gone_after']:.0f} s",
        )
        for stop in stops
    )
    return [
        *_table(
            ("router stopped gently at", "which", "streams open then", "finished", "broken", "gone after"),
            rows,
        ),
        "",
    ]


def _superseded(report: Json) -> list[str]:
    """Return the memory findings of an earlier criterion."""
    if not report.get("superseded"):
        return []
    minutes = report["fill_seconds"] / MINUTE
    return [
        f"Memory is evaluated from {minutes:.0f} minutes of each process run on, when caches are full.",
        "A leak is memory that is higher at the end than ever before, and still rising.",
        "The run itself applied an earlier criterion, and reported:",
        "",
        *(f"- {line}" for line in report["superseded"]),
        "",
        *report.get("notes", []),
        "",
    ]


def _kinds_of_processes(kinds: Json) -> list[str]:
    """Return rows by kind of process, over the process runs long enough to be judged."""
    if not kinds:
        return []
    rows = (
        (
            name,
            str(one["lives"]),
            f"{one['end'] / MIB:.1f}",
            f"{one['slope'] / MIB:+.1f} MiB",
            f"{one['worst_slope'] / MIB:+.1f} MiB",
        )
        for name, one in kinds.items()
    )
    return [
        *_table(
            ("kind of process", "lives judged", "MiB at the end, median", "per hour, median", "worst"), rows
        ),
        "",
    ]


def _mishaps(mishaps: list[Json]) -> list[tuple[str, str, str]]:
    """Return rows by kind, the most frequent first."""
    waited = {
        name: [
            one["whole_after"] for one in mishaps if one["what"] == name and one["whole_after"] is not None
        ]
        for name in _kinds(mishaps)
    }
    times = Counter(one["what"] for one in mishaps)
    return [
        (name, str(times[name]), f"{max(seconds):.1f} s" if seconds else "-")
        for name, seconds in waited.items()
    ]


def _kinds(mishaps: list[Json]) -> list[str]:
    return [name for name, _ in Counter(one["what"] for one in mishaps).most_common()]


def _growths(growths: list[Json]) -> list[tuple[str, ...]]:
    """Return a row for each process run long enough to be judged."""
    return [
        (
            f"{one['name']} (pid {one['pid']})",
            f"{one['seconds'] / MINUTE:.0f}",
            f"{one['middle'] / MIB:.1f}",
            f"{one['end'] / MIB:.1f}",
            f"{one['slope'] / MIB:+.1f} MiB",
        )
        for one in sorted(growths, key=lambda one: (one["name"], one["pid"]))
    ]


def draw_soak(report: Json, folder: Path) -> Path:
    """Write the picture; return its file. Raises OSError if it cannot be written."""
    figure = Figure(figsize=(WIDE, HIGH), layout="constrained")
    forms = report.get("forms")
    heights = (4, 1.5, 2) if forms is None else (4, 1.5, 2, 2)
    memory, requests, mishaps, *rest = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for axes in rest:
        _draw_forms(axes, forms)
    _draw_memory(memory, report["memory"], report["mishaps"])
    _draw_requests(requests, report["progress"])
    _draw_mishaps(mishaps, report["mishaps"])
    for axes in (memory, requests, mishaps, *rest):
        axes.tick_params(labelsize=8)
        axes.set_xlim(
            0, max(report["seconds"] / MINUTE, *(life["at"][-1] / MINUTE for life in report["memory"]))
        )
    figure.legend(*memory.get_legend_handles_labels(), fontsize=7, ncols=5, loc="outside upper center")
    figure.axes[-1].set_xlabel("minutes", fontsize=8)
    return save(figure, folder / _picture(report))


def _picture(report: Json) -> str:
    return f"{report.get('name', 'soak')}.svg"


def _draw_forms(axes: Any, forms: Json) -> None:
    """Draw open requests as a line, and the layout of each engine as a row of colours below it."""
    minutes = [seconds / MINUTE for seconds in forms["at"]]
    most = max(forms["open"], default=1) or 1
    axes.plot(minutes, [count / most for count in forms["open"]], color="k", linewidth=0.8)
    names = list(forms["engines"])
    for row, name in enumerate(names):
        for layout, colour in _LAYOUTS.items():
            served = [one == layout for one in forms["engines"][name]]
            axes.fill_between(
                minutes, -0.3 * row - 0.3, -0.3 * row - 0.05, where=served, step="post", color=colour, lw=0
            )
    for layout, colour in _LAYOUTS.items():
        axes.plot([], [], color=colour, label=layout, linewidth=4)
    axes.set_yticks(
        [1.0, *(-0.3 * row - 0.17 for row in range(len(names)))],
        [f"{most} open requests", *names],
        fontsize=7,
    )
    axes.legend(fontsize=7, ncols=4, loc="upper right")


def _draw_memory(axes: Any, lives: list[Json], mishaps: list[Json]) -> None:
    """Draw memory: a colour for each process; a line for each of its runs."""
    names = sorted({life["name"] for life in lives})
    for life in lives:
        at = names.index(life["name"])
        minutes = [seconds / MINUTE for seconds in life["at"]]
        axes.plot(
            minutes,
            life["mib"],
            color=_COLOURS[at % len(_COLOURS)],
            linewidth=1.2,
            marker="." if len(minutes) == 1 else "",
        )
    for at, name in enumerate(names):
        axes.plot([], [], color=_COLOURS[at % len(_COLOURS)], label=name)
    for one in mishaps:
        axes.axvline(one["at"] / MINUTE, color="0.8", linewidth=0.5, zorder=0)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB resident", fontsize=8)


def _draw_requests(axes: Any, progress: Json) -> None:
    """Draw requests per minute between samples: received and answered."""
    edges = [0.0, *progress["at"]]
    for name, colour in (("came", "0.6"), ("answered", "tab:green")):
        counts = [0, *progress[name]]
        rates = [
            MINUTE * (counts[at] - counts[at - 1]) / (edges[at] - edges[at - 1])
            for at in range(1, len(edges))
        ]
        axes.stairs(
            rates, [edge / MINUTE for edge in edges], color=colour, label=name, linewidth=1.3, baseline=None
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("requests a minute", fontsize=8)
    axes.legend(fontsize=7, ncols=2, loc="lower right")


def _draw_mishaps(axes: Any, mishaps: list[Json]) -> None:
    """Draw a row for each kind of fault."""
    names = _kinds(mishaps)
    for at, name in enumerate(names):
        minutes = [one["at"] / MINUTE for one in mishaps if one["what"] == name]
        axes.plot(minutes, [at] * len(minutes), "k|", markersize=7)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
