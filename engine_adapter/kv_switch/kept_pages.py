"""Ranks for kept pages when the state of an engine is split, and the kept pages that are dropped."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple


class _Option(NamedTuple):
    """A rank for a run of kept pages."""

    fitting: int
    """Pages of the run that fit."""
    copied: int
    """Pages of the run that the rank has copies of."""
    ancestors: list[int]
    """Pages before the run that the rank does not have, nearest first."""
    rank: int


class KeptPlacement:
    """Kept pages go to ranks from the latest to the first in the order of eviction, in runs of consecutive
    blocks of one chain.

    A run goes to the rank with most copies of its pages, then to the one that has most of the pages before
    it, then to the one with the fewest pages. A rank that lacks pages before the run gets copies of them, if
    it is the only one with room. What does not fit of a run is dropped, from its end. A run may take the
    units of all kept pages that come later here: they would be evicted before it.
    """

    def __init__(
        self,
        placed: Sequence[set[int]],
        parents: Mapping[int, int],
        copied: Sequence[set[int]],
        *,
        spare: int,
        groups: int,
        max_pages: int,
    ) -> None:
        """placed: pages of each rank, changed in place. parents: page of the block before a page's block, if
        it has one. copied: pages that each rank has copies of, made ahead. spare: free units of each rank,
        those of kept pages excluded. max_pages: of each rank."""
        self._placed = placed
        self._parents = parents
        self._copied = copied
        self._spare = spare
        self._groups = groups
        self._max_pages = max_pages

    def place(self, kept: Sequence[int]) -> None:
        """Place these pages, given in order of eviction. Dropped ones are on no rank afterwards."""
        obtainable = self._spare + len(kept)  # free units of a rank if no further page is placed
        for run in self._runs(kept):
            if self._lost(run[0]):
                continue
            option = max(
                (self._option(rank, run, obtainable) for rank in range(len(self._placed))),
                key=lambda one: (
                    one.fitting,
                    one.copied,
                    -len(one.ancestors),
                    -len(self._placed[one.rank]),
                    -one.rank,
                ),
            )
            if option.fitting:
                self._placed[option.rank].update(option.ancestors, run[: option.fitting])
                obtainable -= option.fitting

    def _runs(self, kept: Sequence[int]) -> Iterator[list[int]]:
        run: list[int] = []
        for page in reversed(kept):
            if run and self._parents.get(page) != run[-1]:
                yield run
                run = []
            run.append(page)
        if run:
            yield run

    def _lost(self, page: int) -> bool:
        """True if the page's parent was dropped."""
        parent = self._parents.get(page)
        return parent is not None and not any(parent in pages for pages in self._placed)

    def _option(self, rank: int, run: Sequence[int], obtainable: int) -> _Option:
        """Return how many pages of a run fit the rank. Each page takes one unit of the obtainable ones of
        every rank, where it is now, and the other groups' units of its new rank."""
        ancestors: list[int] = []
        parent = self._parents.get(run[0])
        while parent is not None and parent not in self._placed[rank]:
            ancestors.append(parent)
            parent = self._parents.get(parent)
        reads = self._groups - 1
        pages = len(self._placed[rank]) + len(ancestors)
        others = max((len(one) for at, one in enumerate(self._placed) if at != rank), default=0)
        fitting = min(
            len(run),
            self._max_pages - pages,
            obtainable - reads * others,
            (obtainable - reads * pages) // self._groups,
        )
        copied = sum(page in self._copied[rank] for page in run)
        return _Option(max(0, fitting), copied, ancestors, rank)
