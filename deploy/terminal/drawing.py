"""Pictures for commands. matplotlib comes with the extra `plot` and is imported only for them."""

from collections.abc import Callable
from pathlib import Path

from deploy.terminal.output import USAGE, fail
from deploy.terminal.panels import Rows

Draw = Callable[[Path, Rows, str], None]


def drawer() -> Draw:
    """Return a function that writes one picture of rows of panels under a title.

    Ends the command if matplotlib is missing. The returned function ends the command if the file cannot be
    written.
    """
    try:
        from deploy.terminal.heatmaps import draw
    except ImportError as error:
        fail(
            f"--plot needs matplotlib, which is not installed ({error}); install it with: pip install"
            " 'roost[plot]'",
            USAGE,
        )

    def draw_or_fail(path: Path, rows: Rows, title: str) -> None:
        try:
            draw(path, rows, title)
        except (OSError, ValueError) as error:
            fail(f"cannot draw {path}: {error}", USAGE)

    return draw_or_fail


def named(file: Path, engine: str, several: bool) -> Path:
    """Return the file of one engine's picture: one file per engine if there are several."""
    return file.with_stem(f"{file.stem}-{engine}") if several else file
