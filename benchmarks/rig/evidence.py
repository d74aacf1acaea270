"""Writer of docs/evidence: the results of `benchmarks.closed_loop` as a page with tables, plots beside it,
and their data; and a soak report.

    make evidence                                         # measures everything: about an hour make evidence
    ARGS="--only policies"                  # some parts; the others stay as they are make evidence
    ARGS="--from docs/evidence/closed-loop.json"   # only redraws and rewrites make evidence ARGS="--soak
    soak.json"                 # only reports the soak that `make soak` wrote to this file
"""

import json
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from benchmarks.rig.live.plots import draw_all
from benchmarks.rig.processes import ROOT
from benchmarks.rig.report import hardware
from benchmarks.rig.soak_evidence import draw_soak, soak_page

FOLDER = ROOT / "docs" / "evidence"
FIGURES, PAGE = "closed-loop.json", "closed-loop.md"
PARTS = ("policies", "flip", "homogeneous", "alternating")
CAPTIONS = {
    "policies": "Medians as bars, rounds as dots.",
    "policies-course": "The first round of each policy, from its reset on.",
    "flip": "All domains of the traffic change at once for others.",
    "homogeneous": "Nothing to gain by sending requests here or there: nothing moves.",
    "alternating": "Two kinds of traffic by turns (dotted lines).",
    "placement": (
        "Which rank holds what, behind the full loop and at the start: `roost placement --before --plot`."
    ),
    "popularity": "Which experts are wanted, behind the full loop: `roost popularity --plot`.",
    "popularity-engine-0": (
        "Which rank's requests want what, and what is near them before and now: `roost popularity --plot`."
    ),
}
HEAT_MAPS = ("placement", "popularity", "popularity-engine-0")
Json = dict[str, Any]
Folder = typer.Option(FOLDER, help="output folder")
From = typer.Option(None, "--from", help="data measured before; nothing is measured")
Soak = typer.Option(
    None, help="a report written by `make soak`; only this is drawn and described, and nothing is measured"
)


def measured(part: str, folder: Path, arguments: list[str]) -> Json:
    """Run one part and return its result. Raises RuntimeError with the end of its error output."""
    command = [sys.executable, "-m", "benchmarks.closed_loop", "--only", part, "--json", *arguments]
    done = subprocess.run(
        [*command, "--plot", str(folder.absolute())], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command[1:])} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: Json = json.loads(done.stdout.splitlines()[-1])
    shown = shlex.join(["python", *command[1:]])
    return {**found, "command": shown, "date": datetime.now(UTC).date().isoformat()}


def page(runs: dict[str, Json], pictures: list[Path]) -> str:
    """Return Markdown: per part its command, hardware, conditions, table, targets and plots."""
    lines = [
        "# The closed loop, measured",
        "",
        (
            "Written by `make evidence` out of `closed-loop.json`, which lies beside it; every number comes"
            " from a live fleet: four rank processes of the embedded"
        ),
        "engine with the demo model, NATS, router, tracker, planner, experts over NIXL.",
    ]
    for part in (name for name in PARTS if name in runs):
        run = runs[part]
        lines += [
            "",
            f"## {part.capitalize()}",
            "",
            f"`{run['command']}`, {run['hardware']}, {run['date']}",
            "",
            *_table(run),
        ]
        lines += [f"- {'met' if one['met'] else '**missed**'}: {_target(one)}" for one in run["targets"]]
        lines += [""] + [
            f"![{CAPTIONS[one.stem]}]({one.name})\n\n*{CAPTIONS[one.stem]}*\n"
            for one in pictures
            if _part(one) == part
        ]
        lines += [note + "\n" for note in run["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _keep(runs: dict[str, Json], folder: Path) -> None:
    """Save the results so far, so that a failure of the next part loses nothing."""
    (folder / FIGURES).write_text(json.dumps(runs) + "\n")


def _part(picture: Path) -> str:
    """Return the benchmark part that a picture belongs to."""
    return "policies" if picture.stem in HEAT_MAPS else picture.stem.split("-")[0]


def _table(run: Json) -> list[str]:
    if not run["rows"]:
        return []
    head = "| " + " | ".join(run["columns"]) + " |"
    rows = [
        "| " + " | ".join(f"{cell:,.3f}" if isinstance(cell, float) else str(cell) for cell in row) + " |"
        for row in run["rows"]
    ]
    return [head, "|" + "---|" * len(run["columns"]), *rows, ""]


def _target(target: Json) -> str:
    sign = "at least" if target["at_least"] else "at most"
    return (
        f"{target['name']}: {target['value']:.3f}{target['unit']} ({sign}"
        f" {target['limit']:g}{target['unit']})"
    )


def tell_soak(file: Path, folder: Path) -> None:
    """Keep a soak's report, draw it, and write its page. The first time, the machine and the date are added
    to the kept report."""
    report: Json = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(),
        **json.loads(file.read_text()),
    }
    name = report.get("name", "soak")
    (folder / f"{name}.json").write_text(json.dumps(report, separators=(",", ":")) + "\n")
    picture = draw_soak(report, folder)
    (folder / f"{name}.md").write_text(soak_page(report))
    typer.echo(f"written: {name}.json, {name}.md, {picture.name} in {folder}")


def main(
    folder: Path = Folder,
    from_: Path = From,
    soak: Path | None = Soak,
    only: str = typer.Option(",".join(PARTS), help="parts to measure"),
    more: str = typer.Option("", help="further options of the benchmark, e.g. '--rounds 1'"),
    quick: bool = typer.Option(
        False, "--quick", help="quick mode of the benchmark: a functional check without decisive figures"
    ),
) -> None:
    """Measure, draw and write."""
    folder.mkdir(parents=True, exist_ok=True)
    if soak is not None:
        tell_soak(soak, folder)
        return
    kept = from_ or folder / FIGURES
    runs: dict[str, Json] = json.loads(kept.read_text()) if kept.exists() else {}
    for part in [] if from_ else only.split(","):
        typer.echo(f"measuring: {part}")
        runs[part] = measured(part, folder, ["--quick"] if quick else shlex.split(more))
        _keep(runs, folder)
    _keep(runs, folder)
    courses = {name: course for run in runs.values() for name, course in run["courses"].items()}
    pictures = draw_all(courses, folder) + [
        path for path in (folder / f"{name}.png" for name in HEAT_MAPS) if path.exists()
    ]
    (folder / PAGE).write_text(page(runs, pictures))
    typer.echo(f"written: {', '.join(str(path.name) for path in (folder / PAGE, *pictures))} in {folder}")


if __name__ == "__main__":
    typer.run(main)
