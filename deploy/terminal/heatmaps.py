"""Heat-map rendering. Imports matplotlib (extra `plot`)."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from deploy.terminal.panels import Panel, Rows

MAX_ROWS = 40
"""Most rows on one page; the rest is omitted."""
WIDTHS = {1: 9.0, 2: 13.0}
MAX_WIDTH = 16.0
"""largest width of a page in inches, by the number of panels side by side"""
INCHES_PER_ROW = 0.09
MIN_INCHES = 0.95
MAX_INCHES = 8.0
DOTS_PER_INCH = 110
_COLOURS = {"amount": "viridis", "signed": "RdBu_r", "holding": "YlGnBu"}
_DOT = 5.0
"""size of a mark in points^2"""


def draw(path: Path, rows: Rows, title: str) -> None:
    """Write one picture; the format is the path's ending.

    OSError when the file cannot be written, ValueError for an unknown format. No window is opened and no
    global state is used.
    """
    shown = [row for row in rows[:MAX_ROWS] if row]
    heights = [
        min(MIN_INCHES + INCHES_PER_ROW * max(len(panel.values) for panel in row), MAX_INCHES)
        for row in shown
    ]
    width = WIDTHS.get(max(map(len, shown), default=1), MAX_WIDTH)
    figure = Figure(figsize=(width, sum(heights) + 0.5), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.add_gridspec(len(shown), 1, height_ratios=heights)
    for at, row in enumerate(shown):
        part = grid[at].subgridspec(1, len(row))
        for beside, panel in enumerate(row):
            _draw_panel(figure, figure.add_subplot(part[beside]), panel)
    figure.savefig(path)


def _draw_panel(figure: Figure, axes: Any, panel: Panel) -> None:
    maximum = (
        max(float(np.abs(panel.values).max(initial=0.0)), 1e-12) if panel.maximum is None else panel.maximum
    )
    image = axes.imshow(
        panel.values,
        aspect="auto",
        interpolation="nearest",
        cmap=_COLOURS[panel.scale],
        vmin=-maximum if panel.scale == "signed" else 0.0,
        vmax=maximum,
    )
    if panel.marks is not None:
        down, across = np.nonzero(panel.marks)
        axes.scatter(across, down, s=_DOT, c="white", edgecolors="black", linewidths=0.4)
    axes.set_title(panel.title, fontsize=9)
    axes.set_xlabel(panel.across, fontsize=8)
    axes.set_ylabel(panel.down, fontsize=8)
    axes.tick_params(labelsize=7)
    if panel.down == "rank" and len(panel.values) <= MAX_ROWS:
        axes.set_yticks(range(len(panel.values)))
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.ax.tick_params(labelsize=7)
    if panel.scale != "amount" and maximum <= MAX_ROWS:
        bar.set_ticks(range(-int(maximum) if panel.scale == "signed" else 0, int(maximum) + 1))
