"""Writes docs/evidence: what `benchmarks.closed_loop` measured, as a page with tables, plots beside it, and the figures that they are made of; and what a
soak reported.

make evidence                                         # measures everything: about an hour
make evidence ARGS="--only policies"                  # some parts; the others stay as they are
make evidence ARGS="--from docs/evidence/closed-loop.json"   # only draws and writes anew
make evidence ARGS="--soak soak.json"                 # only tells of the soak that `make soak` reported to this file
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
SOAK_FIGURES, SOAK_PAGE = "soak.json", "soak.md"
PARTS = ("policies", "flip", "homogeneous", "alternating")
CAPTIONS = {
    "policies": "Medians as bars, rounds as dots.",
    "policies-course": "The first round of each policy, from its reset on.",
    "flip": "All domains of the traffic change at once for others.",
    "homogeneous": "Nothing to gain by sending requests here or there: nothing moves.",
    "alternating": "Two kinds of traffic by turns (dotted lines).",
    "placement": "Which rank holds what, behind the full loop and at the start: `roost placement --before --plot`.",
    "popularity": "Which experts are wanted, behind the full loop: `roost popularity --plot`.",
    "popularity-engine-0": "Which rank's requests want what, and what is near them before and now: `roost popularity --plot`.",
}
HEAT_MAPS = ("placement", "popularity", "popularity-engine-0")
Json = dict[str, Any]
Folder = typer.Option(FOLDER, help="where everything is written")
From = typer.Option(None, "--from", help="figures that were measured before; nothing is measured")
Soak = typer.Option(None, help="a report that `make soak` wrote; it alone is drawn and told, and nothing is measured")


def measured(part: str, folder: Path, arguments: list[str]) -> Json:
    """What one part's run says. RuntimeError with the end of its complaint when it fails."""
    command = [sys.executable, "-m", "benchmarks.closed_loop", "--only", part, "--json", *arguments]
    done = subprocess.run([*command, "--plot", str(folder.absolute())], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command[1:])} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: Json = json.loads(done.stdout.splitlines()[-1])
    shown = shlex.join(["python", *command[1:]])
    return {**found, "command": shown, "date": datetime.now(UTC).date().isoformat()}


def page(runs: dict[str, Json], pictures: list[Path]) -> str:
    """Markdown: per part its command, hardware, what it was measured with, its table, its targets, its plots."""
    lines = [
        "# The closed loop, measured",
        "",
        "Written by `make evidence` out of `closed-loop.json`, which lies beside it; every number comes from a live fleet: four rank processes of the embedded",
        "engine with the demo model, NATS, router, tracker, planner, experts over NIXL.",
    ]
    for part in (name for name in PARTS if name in runs):
        run = runs[part]
        lines += ["", f"## {part.capitalize()}", "", f"`{run['command']}`, {run['hardware']}, {run['date']}", "", *_table(run)]
        lines += [f"- {'met' if one['met'] else '**missed**'}: {_target(one)}" for one in run["targets"]]
        lines += [""] + [f"![{CAPTIONS[one.stem]}]({one.name})\n\n*{CAPTIONS[one.stem]}*\n" for one in pictures if _part(one) == part]
        lines += [note + "\n" for note in run["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _keep(runs: dict[str, Json], folder: Path) -> None:
    """What was measured so far: should the next part fail, this is not lost."""
    (folder / FIGURES).write_text(json.dumps(runs) + "\n")


def _part(picture: Path) -> str:
    """Which part of the benchmark a picture is of."""
    return "policies" if picture.stem in HEAT_MAPS else picture.stem.split("-")[0]


def _table(run: Json) -> list[str]:
    if not run["rows"]:
        return []
    head = "| " + " | ".join(run["columns"]) + " |"
    rows = ["| " + " | ".join(f"{cell:,.3f}" if isinstance(cell, float) else str(cell) for cell in row) + " |" for row in run["rows"]]
    return [head, "|" + "---|" * len(run["columns"]), *rows, ""]


def _target(target: Json) -> str:
    sign = "at least" if target["at_least"] else "at most"
    return f"{target['name']}: {target['value']:.3f}{target['unit']} ({sign} {target['limit']:g}{target['unit']})"


def tell_soak(file: Path, folder: Path) -> None:
    """Keep a soak's report, draw it, and write its page. The first time, this machine and the day are written into what is kept."""
    report: Json = {"date": datetime.now(UTC).date().isoformat(), "hardware": hardware(), **json.loads(file.read_text())}
    (folder / SOAK_FIGURES).write_text(json.dumps(report, separators=(",", ":")) + "\n")
    picture = draw_soak(report, folder)
    (folder / SOAK_PAGE).write_text(soak_page(report))
    typer.echo(f"written: {SOAK_FIGURES}, {SOAK_PAGE}, {picture.name} in {folder}")


def main(
    folder: Path = Folder,
    from_: Path = From,
    soak: Path | None = Soak,
    only: str = typer.Option(",".join(PARTS), help="parts that are measured"),
    more: str = typer.Option("", help="further options of the benchmark, e.g. '--rounds 1'"),
    quick: bool = typer.Option(False, "--quick", help="as of the benchmark: shows that it works, and decides nothing"),
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
    pictures = draw_all(courses, folder) + [path for path in (folder / f"{name}.png" for name in HEAT_MAPS) if path.exists()]
    (folder / PAGE).write_text(page(runs, pictures))
    typer.echo(f"written: {', '.join(str(path.name) for path in (folder / PAGE, *pictures))} in {folder}")


if __name__ == "__main__":
    typer.run(main)
