"""Expert placement: balance, copies and time of every kind of plan, compared with EPLB and with upper bounds.

Demand is synthetic (`benchmarks.rig.placements.popularity` states the generators). A plan is made from one
window's sample and scored on the next window's, and on decode steps drawn after it. Times are of one core. A
row combines all seeds.

    python -m benchmarks.placement --quick
    python -m benchmarks.against REV placement    # both commits in one run: ratios of times, equal plans
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby

# Before NumPy is loaded: as `roost` starts a planner, and times are of one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.rig.placements import balance, cover, decisions, drift, few_copies, locality, plans
from benchmarks.rig.placements.cases import Row
from benchmarks.rig.report import AsJson, Check, Quick, Target, hardware

PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "balance": balance.rows,
    "cover": cover.rows,
    "decisions": decisions.rows,
    "drift": drift.rows,
    "least": few_copies.rows,
    "locality": locality.rows,
    "plans": plans.rows,
}
Only = typer.Option("", "--only", help=f"one part: {', '.join(PARTS)}")


def shown(part: str, rows: list[Row]) -> Table:
    """Return a part as a table, with missed targets marked."""
    table = Table(title=part)
    table.add_column("case")
    for name in rows[0].figures:
        table.add_column(name, justify="right")
    for row in rows:
        missed = [target.name for target in row.held if not target.met]
        cells = [f"{cell:,.4g}" if isinstance(cell, float) else cell for cell in row.figures.values()]
        table.add_row(f"{row.case}{' *' if missed else ''}", *cells)
    return table


def decided(rows: list[Row]) -> list[str]:
    """Return for each target the number of rows that meet it, and the worst row."""
    held: dict[str, list[tuple[float, Target, str]]] = {}
    for row in rows:
        for target in row.held:
            margin = (target.value - target.limit) * (1 if target.at_least else -1)
            held.setdefault(target.name, []).append((margin, target, row.case))
    lines = []
    for found in held.values():
        _, worst, case = min(found, key=lambda one: (one[0], one[2]))
        lines.append(
            f"{worst}; {sum(target.met for _, target, _ in found)} of {len(found)} rows; worst: {case}"
        )
    return lines


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check, only: str = Only) -> None:
    """Run every kind of plan, compared with EPLB and with bounds."""
    if only and only not in PARTS:
        raise typer.BadParameter(f"--only {only}: there is no such part; parts are {', '.join(PARTS)}")
    rows = [row for name, part in PARTS.items() if only in ("", name) for row in part(quick)]
    held = [target for row in rows for target in row.held]
    if as_json:
        print(
            json.dumps(
                {
                    "rows": [
                        {**asdict(row), "held": [{**asdict(one), "met": one.met} for one in row.held]}
                        for row in rows
                    ],
                    "hardware": hardware(),
                }
            )
        )
    else:
        console = Console(width=190)
        for part, group in groupby(rows, key=lambda row: row.part):
            console.print(shown(part, list(group)))
        print(f"{hardware()}; * misses a target")
        print("\n".join(decided(rows)))
        print(f"{sum(target.met for target in held)} of {len(held)} targets are met")
    if check and not all(target.met for target in held):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
