"""Assignment of requests to ranks under caps of pages and of requests. Pages that several requests of a rank
share count once. Longest first (LPT: R. L. Graham, Bounds on multiprocessing timing anomalies, 1969)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class PageDemand(NamedTuple):
    """Pages of one request."""

    pages: frozenset[int]
    rank: int
    """Preferred where ranks are equal: the one that accepted it."""
    home: int | None = None
    """Preferred if it has room, because pages were copied there."""


@dataclass(slots=True)
class _RankLoad:
    pages: set[int] = field(default_factory=set)
    requests: int = 0


def assign(
    demands: Sequence[PageDemand], *, ranks: int, max_pages: int, max_running: int
) -> list[int] | None:
    """Return the rank of each request, or None if no assignment was found under the caps.

    First try to balance: each request goes to the rank that has the fewest pages with it, so a rank that gets
    the request's prefix anyway is preferred by as much as it saves. If that fails, pack tightly: it goes to
    the rank that has most of its pages, then to the fullest one. To find an assignment whenever there is one
    is bin packing, and NP-hard.
    """
    for preference in (_balance, _tighten):
        found = _pack(demands, ranks, max_pages, max_running, preference)
        if found is not None:
            return found
    return None


_Preference = Callable[[int, int, int], tuple[int, ...]]


def _balance(pages: int, missing: int, requests: int) -> tuple[int, ...]:
    return pages + missing, requests


def _tighten(pages: int, missing: int, requests: int) -> tuple[int, ...]:
    return missing, -pages, requests


def _pack(
    demands: Sequence[PageDemand], ranks: int, max_pages: int, max_running: int, preference: _Preference
) -> list[int] | None:
    loads = [_RankLoad() for _ in range(ranks)]
    found = [0] * len(demands)
    order = sorted(
        range(len(demands)), key=lambda at: (demands[at].home is None, -len(demands[at].pages), at)
    )
    for at in order:
        pages, preferred, home = demands[at]
        options: list[tuple[tuple[int, ...], bool, int]] = []
        for rank, load in enumerate(loads):
            missing = len(pages - load.pages)
            if load.requests < max_running and len(load.pages) + missing <= max_pages:
                options.append((preference(len(load.pages), missing, load.requests), rank != preferred, rank))
        if not options:
            return None
        options = [one for one in options if one[-1] == home] or options
        found[at] = min(options)[-1]
        loads[found[at]].pages |= pages
        loads[found[at]].requests += 1
    return found
