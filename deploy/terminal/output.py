"""Output of commands: text, tables, JSON, and user-facing errors."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import typer
from rich.console import Console

from deploy.process import FAILURE, print_error
from fleet.text import exact_json

USAGE = 2
"""Exit status of a command with invalid arguments or configuration."""


def show(text: str) -> None:
    """Print plain text to standard output and flush: a pipe may wait for each line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a remark to standard error."""
    sys.stderr.write(f"roost: {text}\n")


def in_json(value: Any) -> str:
    """Return JSON for programs; integers that a double cannot represent (64-bit ids) become text."""
    return exact_json(value).decode()


def console() -> Console:
    """Return the console for coloured text on standard output, if that is a terminal. Lines are never cut."""
    return Console(highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """Remove terminal control sequences from text of other sources."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print aligned columns; nothing is wrapped or cut, whatever the width of the terminal."""
    out = console()
    for number, line in enumerate(aligned([head, *rows])):
        out.print(line, markup=False, style="" if number else "bold")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per row, in columns of the width of their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def fail(text: str, status: int = FAILURE) -> NoReturn:
    """End the command with a user-facing error."""
    print_error(text)
    raise typer.Exit(status)
