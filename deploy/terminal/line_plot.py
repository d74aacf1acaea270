"""Curves as text, both axes logarithmic."""

from collections.abc import Mapping, Sequence
from math import log

WIDTH, HEIGHT = 64, 14
SEVERAL = "*"


def line_plot(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, horizontal: str, vertical: str
) -> list[str]:
    """Return lines of text. curves: letter -> points (x, y), all above 0. Where letters meet there is a star.

    horizontal, vertical: names of the axes.
    """
    points = [point for curve in curves.values() for point in curve]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for letter, curve in curves.items():
        for x, y in curve:
            row = HEIGHT - 1 - _cell(y, low, high, HEIGHT)
            column = _cell(x, left, right, WIDTH)
            taken = grid[row][column]
            grid[row][column] = letter if taken in (" ", letter) else SEVERAL
    marks = {0: f"{high:.3g}", HEIGHT - 1: f"{low:.3g}"}
    margin = max(map(len, marks.values()))
    lines = [f"{marks.get(at, ''):>{margin}} |{''.join(row).rstrip()}" for at, row in enumerate(grid)]
    ends = f"{left:.4g}{right:>{WIDTH - len(f'{left:.4g}')}.4g}"
    return [vertical, *lines, " " * margin + " +" + "-" * WIDTH, " " * (margin + 2) + ends, horizontal]


def _cell(value: float, low: float, high: float, cells: int) -> int:
    """Return the cell of a value on a logarithmic axis."""
    if high <= low:
        return 0
    return min(cells - 1, int(log(value / low) / log(high / low) * cells))
