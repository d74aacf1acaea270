"""Curves as a picture. Imports matplotlib (extra `plot`), so this module is imported only for pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]


def draw_curves(
    path: Path, panels: Mapping[str, Mapping[str, Points]], *, horizontal: str, vertical: str
) -> None:
    """Write one picture: a panel for each title, with named curves on logarithmic axes; the format is the
    path's ending.

    OSError when the file cannot be written, ValueError for an unknown format.
    """
    figure = Figure(figsize=(5.5 * len(panels), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    for at, (title, curves) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), at + 1)
        for name, points in curves.items():
            axes.plot([x for x, _ in points], [y for _, y in points], label=name)
        axes.set(title=title, xlabel=horizontal, ylabel=vertical, xscale="log", yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    figure.savefig(path)
