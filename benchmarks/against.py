"""Other benchmarks, of the working tree and of another commit in one run: time ratios, and equality of plans.

Each benchmark runs `--quick`, as it is in both trees, in alternation, with this environment's libraries. A
figure is the best of a side's rounds, as other processes only ever add time. The deciding ratio is the median
over the figures. `edge` and `peers` compare routers under load and have an `--against` of their own.

    python -m benchmarks.against HEAD~20 decision placement --quick
    python -m benchmarks.against HEAD~20 --rounds 5 --check
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from benchmarks.rig.processes import ROOT
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from benchmarks.rig.revision import TOLERANCE, worktree

Found = dict[str, Any]
"""The JSON object that a benchmark prints."""


def decision_seconds(found: Found) -> Iterator[tuple[str, float]]:
    """Median of every case, scoring, prediction, and the time between decisions."""
    yield from ((row[0], row[1]) for row in found["rows"])
    for at in (-4, -3, -2):
        yield found["targets"][at]["name"], found["targets"][at]["value"]
    yield "between decisions", 1 / found["targets"][-1]["value"]


def tracker_seconds(found: Found) -> Iterator[tuple[str, float]]:
    """Time per report and per prediction, and between reports."""
    for name, value, _ in found["rows"]:
        if name.startswith("reports/s"):
            yield name, 1 / value
        elif name.startswith(("us ", "ms ")):
            yield name, value


def placement_seconds(found: Found) -> Iterator[tuple[str, float]]:
    """Time of every plan; plans of one case have the same column names but for spaces."""
    for number, row in enumerate(found["rows"]):
        yield from (
            (f"{number} {row['case']} {name}", value)
            for name, value in row["figures"].items()
            if is_time(name) and isinstance(value, float)
        )


def plans(found: Found) -> list[list[str]]:
    """Figures of every case but their times, as they are printed."""
    return [
        [
            f"{value:.4g}" if isinstance(value, float) else str(value)
            for name, value in row["figures"].items()
            if not is_time(name)
        ]
        for row in found["rows"]
    ]


def is_time(column: str) -> bool:
    """Return True for columns of `placement` that are durations: "ms", "s", "ms to order"."""
    return column.replace(",", " ").split()[0] in ("ms", "s")


SECONDS: dict[str, Callable[[Found], Iterator[tuple[str, float]]]] = {
    "decision": decision_seconds,
    "tracker_speed": tracker_seconds,
    "placement": placement_seconds,
}
"""durations of a benchmark's figures, in any unit: only ratios of equal figures are taken"""


def run(tree: Path, name: str) -> Found:
    """Run a benchmark of a tree as a process. Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", "--quick"]
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"benchmarks.{name} failed in {tree}: {done.stderr[-2000:]}")
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, before: list[Found], now: list[Found], revision: str, report: Report) -> list[Target]:
    """Add a benchmark to the report. Return its deciding ratio, and for `placement` the number of changed
    cases."""
    best = [
        {
            figure: min(dict(SECONDS[name](one))[figure] for one in side)
            for figure, _ in SECONDS[name](side[0])
        }
        for side in (before, now)
    ]
    ratios = {figure: best[1][figure] / value for figure, value in best[0].items() if figure in best[1]}
    middle = statistics.median(ratios.values())
    worst = max(ratios, key=lambda figure: ratios[figure])
    report.add(name, len(ratios), middle, ratios[worst], worst)
    targets = [
        Target(
            f"{name}: time of the working tree over {revision}'s, median of the figures",
            middle,
            1 + TOLERANCE,
            False,
        )
    ]
    if name == "placement":
        changed = sum(one != two for one, two in zip(plans(before[0]), plans(now[0]), strict=True))
        targets.append(Target("placement: cases whose plans differ", changed, 0, False, unit=""))
    return targets


Revision = typer.Argument(..., metavar="REV", help="commit to compare with")
Names = typer.Argument(None, metavar="[NAME]...", help=f"benchmarks; default: {', '.join(SECONDS)}")
Rounds = typer.Option(3, "--rounds", min=1, help="runs of each side; 1 with --quick")


def main(
    revision: str = Revision,
    names: list[str] = Names,
    rounds: int = Rounds,
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
) -> None:
    """Run benchmarks of the working tree and of another commit, in alternation."""
    unknown = sorted(set(names or ()) - set(SECONDS))
    if unknown:
        raise typer.BadParameter(
            f"{', '.join(unknown)}: choose from {', '.join(SECONDS)}", param_hint="NAMES"
        )
    report = Report(f"The working tree beside {revision}", ["benchmark", "figures", "median", "worst", "of"])
    with worktree(revision) as tree:
        for name in names or SECONDS:
            sides: dict[Path, list[Found]] = {tree: [], ROOT: []}
            for number in range(1 if quick else rounds):
                for side in (tree, ROOT) if number % 2 else (ROOT, tree):
                    print(
                        f"{name}: round {number + 1} of {'before' if side == tree else 'now'}",
                        file=sys.stderr,
                    )
                    sides[side].append(run(side, name))
            report.targets += compare(name, sides[tree], sides[ROOT], revision, report)
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
