"""Session affinity: a session stays on its rank for a while, so that its KV cache there is reused. Pure; the
time comes in as an argument.

State: a rank per session, the one idle for longest first.
"""

from collections import OrderedDict
from typing import NamedTuple

from router.fleet_state.target_table import RankKey

MAX_SESSIONS = 1 << 17
"""About 30 MB. The session idle for longest is evicted."""


class _Stay(NamedTuple):
    rank: RankKey
    until: float


class SessionAffinity:
    """`seconds`: a session that is idle for this time is forgotten; 0: no session is remembered."""

    def __init__(self, seconds: float, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._stays: OrderedDict[int, _Stay] = OrderedDict()
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._stays)

    def set_seconds(self, seconds: float) -> None:
        """Apply another time from now on. Remembered sessions keep theirs, unless it is 0."""
        self._seconds = seconds
        if not seconds:
            self._stays.clear()

    def rank(self, session: int, now: float) -> RankKey | None:
        """Return the last rank of a session; None for session 0 (no session), and for one that is unknown or
        expired.
        """
        stay = self._stays.get(session)
        if stay is None:
            return None
        if stay.until < now:
            del self._stays[session]
            return None
        return stay.rank

    def record_route(self, session: int, rank: RankKey, now: float) -> None:
        """Record that a request of a session was sent to a rank."""
        if not session or not self._seconds:
            return
        self._stays[session] = _Stay(rank, now + self._seconds)
        self._stays.move_to_end(session)
        self._drop(now)

    def forget_worker(self, worker_id: int) -> None:
        """Drop an incarnation that has left."""
        for session in [session for session, stay in self._stays.items() if stay.rank[0] == worker_id]:
            del self._stays[session]

    def _drop(self, now: float) -> None:
        """Drop expired sessions, and beyond the limit the one idle for longest."""
        while self._stays:
            first = next(iter(self._stays))
            if len(self._stays) <= self._max_sessions and self._stays[first].until >= now:
                return
            del self._stays[first]
