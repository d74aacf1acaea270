"""Copies of KV pages ahead of a switch of attention, while the engine serves: one rank's part in a pre-copy.

A pre-copy begins in the step in which all ranks wish for the same layout, and ends when one of them no longer
does, or with the switch. All but `wish` belongs to the step thread.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine_adapter.embedded.rank_requests import RankRequests
from engine_adapter.embedded.step_notes import AheadNote
from engine_adapter.embedded.switching.peer_pools import UnitReader
from engine_adapter.kv_switch.pre_copy import MergePreCopy, ReaderOnly, SplitPreCopy
from engine_adapter.kv_switch.pre_copy_notes import PreCopyNote
from engine_adapter.kv_switch.scheduler_state import AheadCopies
from engine_adapter.kv_switch.splitting import RankLayout
from fleet.layout import KV_ROUND_PAGES, AttentionKind

_STEPS_BETWEEN = 8
"""Steps from one search for pages to announce to the next, once all have been announced. A search looks at
every page."""
_HEADROOM = 16
"""Pages that stay obtainable for requests."""

_Part = MergePreCopy | SplitPreCopy | ReaderOnly


class CopyingAhead:
    """One rank's part in a pre-copy, or in none."""

    def __init__(self, rank: int, layout: RankLayout, reader: UnitReader) -> None:
        self.wish: AttentionKind | None = None
        """Layout that pages are to be copied for. Thread-safe."""
        self.caught_up = False
        """True once every page has been copied that was there in the meantime."""
        self._rank = rank
        self._layout = layout
        self._reader = reader
        self._part: _Part | None = None
        """Part of this rank in the layout that is served. None: not made yet."""
        self._quarantined: Sequence[Sequence[int]] = ()
        """Units that late reads before the last switch may still write (`KvState.quarantined`)."""
        self._wishes: list[AttentionKind | None] = [None] * layout.ranks
        """By rank, as told."""
        self._all_announced = False
        self._steps = 0
        """Steps since the last search."""

    @property
    def bytes(self) -> int:
        """KV that this rank has read ahead of the switch to come, in bytes."""
        return self._reader.bytes

    @property
    def settled(self) -> bool:
        """True if no copy is under way that this rank knows of."""
        part = self._part
        if part is None:
            return True
        return part.reader.quiet and (isinstance(part, ReaderOnly) or part.settled)

    def note(self, requests: RankRequests, units: NDArray[np.int32], *, last: bool) -> AheadNote | None:
        """Return what the other ranks have to know. requests, units: as in `AttentionSwitch`. last: the
        switch is decided, so nothing more is announced."""
        self._part = part = self._part or self._new_part(requests, units)
        wish = self.wish
        told = None if wish == self._wishes[self._rank] else wish or "none"
        for number in self._reader.ended():
            part.reader.done(number)
        if last:
            self._reader.hurry()
        copies = self._copies_note(part, requests, last=last)
        return None if told is None and copies is None else AheadNote(told, copies)

    def hear(self, notes: Sequence[AheadNote | None], requests: RankRequests) -> None:
        """Take the notes of all ranks."""
        part = self._part
        if part is None:
            raise RuntimeError("copying ahead: notes were heard before one was sent")
        part.hear([(note and note.copies) or PreCopyNote() for note in notes])
        for started in part.reader.take_starts():
            self._reader.start(started.number, started.read)
        for rank, note in enumerate(notes):
            if note is not None and note.wish is not None:
                self._wishes[rank] = None if note.wish == "none" else note.wish
        agreed = self._wishes[0] if len(set(self._wishes)) == 1 else None
        if agreed in (None, requests.attention):
            self._stop(part)
        elif not isinstance(part, ReaderOnly):
            part.start()

    def copies(self) -> AheadCopies | None:
        """Return the copies of pages that this rank owns, for the state of its scheduler. None: there are
        none."""
        return None if self._part is None or isinstance(self._part, ReaderOnly) else self._part.copies()

    def switched(self, quarantined: Sequence[Sequence[int]]) -> None:
        """Begin anew in the next layout. Every rank calls it in the same step. quarantined: as in the state
        of that layout."""
        self._reader.close()
        self._part, self._quarantined = None, quarantined
        self.wish = None
        self._wishes = [None] * self._layout.ranks
        self._reset()

    def _copies_note(self, part: _Part, requests: RankRequests, *, last: bool) -> PreCopyNote | None:
        if isinstance(part, ReaderOnly):
            note = part.note()
            self.caught_up = self._wishes[0] is not None and part.reader.quiet
        else:
            allowed = 0 if last else self._allowance()
            # Once the switch is decided, waiting requests are admitted after it.
            lacking = 0 if last else requests.scheduler.lacking_pages
            note = part.note(allowed, lacking)
            if part.started:
                self._all_announced |= len(note.announced) < allowed
                self.caught_up |= self._all_announced and self.settled and not note.announced
        return note if note.announced or note.withdrawn or note.settled else None

    def _allowance(self) -> int:
        """Return how many pages may be announced now."""
        self._steps += 1
        if not self.settled or (self._all_announced and self._steps < _STEPS_BETWEEN):
            return 0
        self._steps = 0
        return KV_ROUND_PAGES

    def _new_part(self, requests: RankRequests, units: NDArray[np.int32]) -> _Part:
        ranks, groups = self._layout.ranks, self._layout.groups
        if requests.attention == "dp":
            return MergePreCopy(
                self._rank,
                requests.cache,
                units,
                ranks=ranks,
                groups=groups,
                headroom=_HEADROOM,
                quarantined=self._quarantined[0] if self._quarantined else (),
            )
        if self._rank:
            return ReaderOnly(self._rank)
        return SplitPreCopy(
            requests.cache,
            units,
            lambda copies: requests.pages_state(units, copies),
            self._layout,
            headroom=_HEADROOM,
            quarantined=self._quarantined,
        )

    def _stop(self, part: _Part) -> None:
        if not isinstance(part, ReaderOnly) and part.started:
            part.stop()
            self._reset()

    def _reset(self) -> None:
        self.caught_up, self._all_announced, self._steps = False, False, 0
