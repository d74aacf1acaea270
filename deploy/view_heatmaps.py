"""Draws tables of experts as heat maps, layers down and experts across. The only file that knows matplotlib (extra `plot`)."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

MOST = 10
"""Pictures on one page; what comes after is left out."""
WIDE = 9.0
INCHES_PER_LAYER = 0.09
FEWEST_INCHES = 1.4
DOTS_PER_INCH = 110


def draw(path: Path, panels: Iterable[tuple[str, NDArray[np.floating[Any]], bool]], title: str) -> None:
    """Write one picture with a panel for each (title, [layers, experts], signed); the format is the path's ending.

    OSError when the file cannot be written, ValueError for an unknown format. No window is opened and no global state is used.
    """
    shown = list(panels)[:MOST]
    heights = [FEWEST_INCHES + INCHES_PER_LAYER * len(values) for _, values, _ in shown]
    figure = Figure(figsize=(WIDE, sum(heights) + 0.5), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, panel in zip(figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0], shown, strict=True):
        _draw_panel(figure, axes, *panel)
    figure.savefig(path)


def _draw_panel(figure: Figure, axes: Any, title: str, values: NDArray[np.floating[Any]], signed: bool) -> None:
    most = max(float(np.abs(values).max()), 1e-12)
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="RdBu_r" if signed else "viridis", vmin=-most if signed else 0.0, vmax=most)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("expert", fontsize=8)
    axes.set_ylabel("layer", fontsize=8)
    axes.tick_params(labelsize=7)
    figure.colorbar(image, ax=axes, pad=0.01).ax.tick_params(labelsize=7)
