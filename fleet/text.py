"""Quantities and lists in sentences for people, and values as JSON for programs. Pure."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

LARGEST_EXACT = 2**53
"""Largest magnitude below which every integer is exact as a double."""

_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def byte_size(count: float) -> str:
    """Format bytes; kB, MB and GB are powers of 1000."""
    return next((f"{count / unit:.3g} {name}" for unit, name in _BYTES if count >= unit), f"{count:.0f} B")


def duration(seconds: float) -> str:
    """Format a time of the order of a model step, in seconds, milliseconds or microseconds."""
    if abs(seconds) >= 1.0:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if abs(seconds) >= 1e-3 else f"{1e6 * seconds:.3g} us"


def read_duration(text: str) -> float:
    """Return the seconds of a number and s, m, h or d, e.g. 15m; without a unit, seconds. ValueError for
    another text.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:64]!r}: use a number and s, m, h or d, e.g. 15m")
    return float(match[1]) * _UNITS[match[2]]


def counted(count: int, one: str, several: str | None = None) -> str:
    """Return a number with its noun. several: the plural, if it is not `one` with an s."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def listed(items: Iterable[object], limit: int = 8) -> str:
    """Name the first items of a list, and the number of the others."""
    names = [str(item) for item in items]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def exact_json(value: Any) -> bytes:
    """Encode as JSON; integers that a double cannot represent (64-bit ids) become text."""
    return msgspec.json.encode(_exact(msgspec.to_builtins(value)))


def _exact(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _exact(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(inner) for inner in value]
    return str(value) if isinstance(value, int) and abs(value) > LARGEST_EXACT else value
