"""Lists in sentences for people. Pure."""

from collections.abc import Iterable


def listed(items: Iterable[object], limit: int = 8) -> str:
    """Name the first items of a list, and the number of the others."""
    names = [str(item) for item in items]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
