"""Time covered by a publisher's missing reports: between two reports whose sequence numbers are not
consecutive. Pure.

The missing spans depend only on the set of received reports, not on their order. A late report withdraws its
gap and leaves the parts still missing on either side.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_OPEN = 64
"""Gaps that a late report can still narrow. Older gaps are final."""


class SilentSpan(NamedTuple):
    """Time from start to end (seconds) that no report covers. recovered: a late report now covers it."""

    start: float
    end: float
    recovered: bool = False


class ReportGaps:
    """One publisher's reports, each received once."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        """sequence and start of the earliest report"""
        self._last = (-1, 0.0)
        """sequence and end of the latest report"""
        self._open: OrderedDict[int, tuple[int, float, float]] = OrderedDict()
        """by the sequence before the gap: the sequence after it, start and end"""

    @property
    def last(self) -> int:
        """Highest sequence received; -1: none."""
        return self._last[0]

    def observe(self, sequence: int, start: float, end: float) -> Iterator[SilentSpan]:
        """Record a report that covers start..end (seconds). Yield the spans now missing, and those no longer
        missing.
        """
        if self._first is None:
            self._first, self._last = (sequence, start), (sequence, end)
        elif sequence > self._last[0]:
            before, self._last = self._last, (sequence, end)
            yield from self._missing(before, (sequence, start))
        elif sequence < self._first[0]:
            after, self._first = self._first, (sequence, start)
            yield from self._missing((sequence, end), after)
        else:
            yield from self._fill(sequence, start, end)

    def _missing(self, before: tuple[int, float], after: tuple[int, float]) -> Iterator[SilentSpan]:
        if after[0] > before[0] + 1:
            self._open[before[0]] = (after[0], before[1], after[1])
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
            yield SilentSpan(before[1], after[1])

    def _fill(self, sequence: int, start: float, end: float) -> Iterator[SilentSpan]:
        for low, (high, since, until) in self._open.items():
            if low < sequence < high:
                del self._open[low]
                yield SilentSpan(since, until, recovered=True)
                yield from self._missing((low, since), (sequence, start))
                yield from self._missing((sequence, end), (high, until))
                return

    def state(self) -> list[Any]:
        """Return the complete state, for msgpack."""
        return [
            self._first and list(self._first),
            list(self._last),
            [[low, *gap] for low, gap in self._open.items()],
        ]

    @classmethod
    def restore(cls, state: list[Any]) -> "ReportGaps":
        """Restore gaps. ValueError if this is not the state of them."""
        gaps = cls()
        try:
            first, last, spans = state
            gaps._first = None if first is None else (int(first[0]), float(first[1]))
            gaps._last = (int(last[0]), float(last[1]))
            gaps._open = OrderedDict(
                (int(low), (int(high), float(since), float(until)))
                for low, high, since, until in spans[-MAX_OPEN:]
            )
        except (IndexError, TypeError, ValueError) as error:
            raise ValueError(f"no state of gaps: {error}") from error
        return gaps
