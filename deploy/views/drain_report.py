"""Results of `roost drain`, for ranks and engines on the bus and for static backends."""

import typer

from deploy.process import FAILURE
from deploy.terminal.output import note


def drained(name: str, undo_arguments: str, *, undo: bool, idle: bool | None) -> str:
    """Describe the result. undo_arguments: of the command that undoes it. idle: None if that was not waited
    for."""
    if undo:
        return f"{name} takes new requests again"
    state = " and is idle" if idle else ""
    return f"{name} takes no new requests{state}; undo it with: roost drain {undo_arguments}"


def end_unless_idle(name: str, idle: bool | None, seconds: float | None) -> None:
    """End the command with status 1 if the target was not idle in time."""
    if idle is False:
        note(f"{name} is not idle after {seconds:g} s; it continues to drain")
        raise typer.Exit(FAILURE)
