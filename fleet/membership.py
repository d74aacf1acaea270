"""Membership: the engines that are present, the incarnation of each, and the silence of each. Pure.

An *incarnation* is one run of an engine, identified by its worker_id. A join ends the earlier incarnations of
its name, a leave ends its own. A heartbeat proves that an incarnation is alive. Missing heartbeats prove its
death only while they could have been received: the bus was connected and this process was running.

Parts differ in what they know about an engine (the value of `Membership`), in what they do about one that is
gone, and in the silence that they bear. Time is an argument: seconds of one monotonic clock.
"""

from collections.abc import Collection, Iterator, Mapping
from math import inf
from typing import TypeVar

Known = TypeVar("Known")

SILENT_SECONDS = 3.0
"""Silence after which an engine or a router counts as dead, unless a setting says otherwise."""


class Membership(Mapping[int, Known]):
    """Present incarnations by worker_id, in the order in which they arrived, with what a part knows of each.

    Two incarnations of one name are present together only after `add`.
    """

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self._names: dict[int, str] = {}

    def join(self, engine: str, worker_id: int, known: Known) -> dict[int, Known]:
        """Add an incarnation whose join arrived. Return the earlier ones of its name, which end.

        A repeated join replaces what is known, and nothing else.
        """
        ended = {
            other: self._known[other]
            for other, name in self._names.items()
            if name == engine and other != worker_id
        }
        for other in ended:
            self.end(other)
        self.add(engine, worker_id, known)
        return ended

    def add(self, engine: str, worker_id: int, known: Known) -> None:
        """Add an incarnation whose join has not arrived yet. It ends no other."""
        self._known[worker_id] = known
        self._names[worker_id] = engine

    def end(self, worker_id: int) -> Known | None:
        """End an incarnation, and return what was known of it; None: it was not present."""
        self._names.pop(worker_id, None)
        return self._known.pop(worker_id, None)

    def engine_of(self, worker_id: int) -> str | None:
        """Return the name of a present incarnation's engine."""
        return self._names.get(worker_id)

    def __getitem__(self, worker_id: int) -> Known:
        return self._known[worker_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class Heartbeats:
    """Last sign of life of each incarnation.

    gap_seconds: `listen` is called more often than this while the process runs. listening: time from which
    heartbeats could be received; infinity: from the first call of `listen`.
    """

    def __init__(self, gap_seconds: float = inf, listening: float = -inf) -> None:
        self._gap_seconds = gap_seconds
        self._listening = listening
        """start of the current uninterrupted period of listening"""
        self._listened_at = -inf
        self._last: dict[int, float] = {}

    def beat(self, worker_id: int, now: float) -> None:
        """Record a sign of life."""
        self._last[worker_id] = now

    def last(self, worker_id: int) -> float | None:
        """Return the time of the last sign of life."""
        return self._last.get(worker_id)

    def listen(self, now: float, *, audible: bool) -> None:
        """Record that this process is running. A long gap, or a bus that delivers nothing, restarts all
        silences.
        """
        if not audible or now - self._listened_at > self._gap_seconds:
            self._listening = now
        self._listened_at = now

    def silence(self, worker_id: int, now: float) -> float:
        """Return the seconds for which an incarnation has been silent, although it could have been heard."""
        return max(0.0, now - max(self._last.get(worker_id, -inf), self._listening))

    def keep_only(self, worker_ids: Collection[int]) -> None:
        """Forget the incarnations that are gone."""
        self._last = {worker: at for worker, at in self._last.items() if worker in worker_ids}
