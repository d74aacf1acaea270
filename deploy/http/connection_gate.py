"""Connection limit: when a new connection exceeds the limit, the connection that has been idle longest is
closed."""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

LOOK_SECONDS = 0.1
"""Shortest interval between two scans of all connections. A scan that finds many idle ones shortens it."""
WORTH_A_LOOK = 8
"""Connections scanned per connection shed; this many make a scan worthwhile."""


class Sheddable(Protocol):
    """Connection interface that the gate needs."""

    def shed_order(self) -> tuple[int, float] | None:
        """Return the place of this connection in the order of shedding, smallest first: a kind, and the time
        of its own deadline. None: a request is running."""
        ...

    def shed(self) -> None:
        """Close it now."""
        ...


class ConnectionGate:
    """Connection limit of one server. `limit` is compared with the number of open connections; the gate keeps
    no count."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.closed = False
        """True once the server stops: a connection that the system accepted just before is cut when it is
        made"""
        self._silent: deque[Sheddable] = deque()
        """candidates for shedding, as of the last scan"""
        self._look_at = 0.0
        self._found = False
        """True if the last scan found enough candidates to justify another"""

    def make_room(self, connections: Iterable[Sheddable], newcomer: Sheddable, now: float) -> bool:
        """Shed the connection that has been idle longest, except the newcomer. Returns False if all are busy,
        or none is found in time."""
        if not self._silent and (self._found or now >= self._look_at):
            self._look_at = now + LOOK_SECONDS
            self._look(connections, newcomer)
        while self._silent:
            victim = self._silent.popleft()
            if victim.shed_order() is not None:
                victim.shed()
                return True
        return False

    def _look(self, connections: Iterable[Sheddable], newcomer: Sheddable) -> None:
        known = [
            (one.shed_order(), number, one) for number, one in enumerate(connections) if one is not newcomer
        ]
        silent = sorted((order, number, one) for order, number, one in known if order is not None)
        self._silent.extend(one for _, _, one in silent)
        self._found = WORTH_A_LOOK * len(silent) >= len(known)
