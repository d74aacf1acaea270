"""Figures of switches of attention: pauses of streams, bytes of KV beside the least, first tokens. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.rig.engine_ranks import Diaries, Seconds, Window, within
from fleet.layout import AttentionKind

NEAR_SECONDS = 0.1
"""Around a switch: gaps and requests in it are felt as its own."""
AROUND_SECONDS = 0.3
"""Around a switch: in it, throughput is counted."""
_BEGAN, _SECONDS, _READING, _BYTES, _AHEAD, _PAGES, _EVICTED = range(7)
"""Columns of `flip_rank.Diary.rounds`."""


class Flip(NamedTuple):
    """A switch of attention of all ranks."""

    to: AttentionKind
    window: Window
    """From the first rank's begin to the last one's end."""
    reading_seconds: float
    """Of the rank that read longest."""
    bytes: int
    """Read by all ranks in its step."""
    ahead_bytes: int
    """Read by all ranks ahead of it."""
    pages: int
    """In use after it, of all ranks: to tp, a page is one unit on every rank."""
    evicted: int

    @property
    def pages_before(self) -> int:
        """In use before it. Exact where no page is on several ranks."""
        return self.pages + self.evicted


def flips_of(diaries: Diaries) -> list[Flip]:
    """Return the switches of attention of an engine that began with data-parallel attention."""
    found = []
    for number, rows in enumerate(zip(*(diary["rounds"] for diary in diaries), strict=True)):
        ranks = np.stack(rows)
        to: AttentionKind = "dp" if number % 2 else "tp"
        pages = ranks[0, _PAGES] if to == "tp" else ranks[:, _PAGES].sum()
        window = Window(float(ranks[:, _BEGAN].min()), float((ranks[:, _BEGAN] + ranks[:, _SECONDS]).max()))
        reading = float(ranks[:, _READING].max())
        copied, ahead = (int(ranks[:, column].sum()) for column in (_BYTES, _AHEAD))
        found.append(Flip(to, window, reading, copied, ahead, int(pages), int(ranks[0, _EVICTED])))
    return found


def least_bytes(flip: Flip, ranks: int, groups: int, unit_bytes: int) -> int:
    """Return the KV that a switch must move if no page is on several ranks.

    To tp, every rank needs its head group of every page, and one has it: ranks - 1 units of each page. To dp,
    the owner of a page needs all groups, and has one: groups - 1 units of each.
    """
    return flip.pages * ((ranks if flip.to == "tp" else groups) - 1) * unit_bytes


def pauses(diaries: Diaries, window: Window) -> list[float]:
    """Return, of each answer that streams as a window begins, its longest gap that touches the window or
    NEAR_SECONDS around it, minus its median gap."""
    found = []
    for diary in diaries:
        begin = diary["token"] - diary["gap"]
        near = (diary["token"] >= window.begin - NEAR_SECONDS) & (begin <= window.end + NEAR_SECONDS)
        streaming = (diary["token"] >= window.begin) & (begin <= window.begin)
        for answer in np.unique(diary["answer"][streaming]):
            mine = diary["answer"] == answer
            gaps = diary["gap"]
            found.append(float(gaps[mine & near].max() - np.median(gaps[mine])))
    return found


def first_tokens(diaries: Diaries, windows: Sequence[Window], margin: float) -> Seconds:
    """Return the seconds until the first token of short requests that came in one of the windows, or a margin
    of seconds around it."""
    wider = [Window(one.begin - margin, one.end + margin) for one in windows]
    return np.concatenate(
        [diary["first"][within(diary["asked"], one)] for diary in diaries for one in wider] or [np.zeros(0)]
    )


def tokens_per_second(diaries: Diaries, windows: Sequence[Window], margin: float) -> list[float]:
    """Return, for each window and a margin of seconds around it, the tokens of all long answers in a
    second."""
    wider = [Window(one.begin - margin, one.end + margin) for one in windows]
    return [
        sum(int(within(diary["token"], one).sum()) for diary in diaries) / (one.end - one.begin)
        for one in wider
    ]


def quiet_moments(windows: Sequence[Window], seconds: float) -> list[Window]:
    """Return windows of no length in longer ones, so many seconds from each other and from their ends."""
    return [
        Window(at, at)
        for one in windows
        for at in np.arange(one.begin + seconds, one.end - seconds, seconds).tolist()
    ]
