"""Where conversations were last: a conversation stays with its rank for a while, so that what it left there is of use. Pure; time comes in.

State: a rank per session, the longest unheard first.
"""

from collections import OrderedDict
from typing import NamedTuple

from router.fleet_state.target_table import RankKey

MOST_SESSIONS = 1 << 17
"""About 30 MB; the session that was silent for longest makes room."""


class _Stay(NamedTuple):
    rank: RankKey
    until: float


class SessionAffinity:
    """`seconds`: a session that was silent for so long is forgotten; 0: none is remembered."""

    def __init__(self, seconds: float, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._stays: OrderedDict[int, _Stay] = OrderedDict()
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._stays)

    def set_seconds(self, seconds: float) -> None:
        """From now on; what is remembered keeps its time, unless nothing is to be."""
        self._seconds = seconds
        if not seconds:
            self._stays.clear()

    def rank(self, session: int, now: float) -> RankKey | None:
        """Where a session was last; None for session 0 (nobody said), and for one that is not known or was silent for too long."""
        stay = self._stays.get(session)
        if stay is None:
            return None
        if stay.until < now:
            del self._stays[session]
            return None
        return stay.rank

    def went(self, session: int, rank: RankKey, now: float) -> None:
        """A request of a session was sent to a rank."""
        if not session or not self._seconds:
            return
        self._stays[session] = _Stay(rank, now + self._seconds)
        self._stays.move_to_end(session)
        self._drop(now)

    def forget_worker(self, worker_id: int) -> None:
        """An incarnation is gone for good."""
        for session in [session for session, stay in self._stays.items() if stay.rank[0] == worker_id]:
            del self._stays[session]

    def _drop(self, now: float) -> None:
        """Those that were silent for too long, and beyond the most the one that was for longest."""
        while self._stays:
            first = next(iter(self._stays))
            if len(self._stays) <= self._most and self._stays[first].until >= now:
                return
            del self._stays[first]
