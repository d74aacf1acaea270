"""Output of every benchmark: the machine, a table, and the deciding ratios last; `--json` for programs,
`--check` for CI."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

Quick = typer.Option(False, "--quick", help="under a minute: fewer repeats and smaller cases")
AsJson = typer.Option(False, "--json", help="one JSON object on standard output instead of the table")
Check = typer.Option(False, "--check", help="exit with 1 when a target is missed")


@dataclass(frozen=True)
class Target:
    """Deciding figure: `value` must be at least (or at most) `limit`."""

    name: str
    value: float
    limit: float
    at_least: bool = True
    unit: str = "x"

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return (
            f"{'met   ' if self.met else 'MISSED'} {self.name}: {self.value:.3f}{self.unit} (target {sign}"
            f" {self.limit:g}{self.unit})"
        )


@dataclass
class Report:
    """Rows and targets of one benchmark."""

    title: str
    columns: Sequence[str]
    rows: list[list[str | float | int]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: str | float | int) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{self.title}: {len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(list(cells))

    def finish(self, *, as_json: bool, check: bool) -> None:
        """Print the report; exit with status 1 if `check` is set and a target is missed."""
        if as_json:
            print(
                json.dumps(
                    {
                        **asdict(self),
                        "hardware": hardware(),
                        "targets": [{**asdict(t), "met": t.met} for t in self.targets],
                    }
                )
            )
        else:
            self._print()
        if check and not all(target.met for target in self.targets):
            sys.exit(1)

    def _print(self) -> None:
        table = Table(title=self.title, caption=hardware())
        for at, name in enumerate(self.columns):
            table.add_column(name, justify="left" if at == 0 else "right")
        for row in self.rows:
            table.add_row(*(f"{cell:,.3f}" if isinstance(cell, float) else str(cell) for cell in row))
        Console(width=140).print(table)
        for line in (*self.notes, *self.targets):
            print(line)


def hardware() -> str:
    """Describe this machine's processor, cores and Python; it is printed beside every number."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return (
        f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}"
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile `share` of the sorted values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


median = statistics.median
