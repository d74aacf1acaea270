"""At most so many connections: when another one comes, the one that has been silent longest makes room."""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

LOOK_SECONDS = 0.1
"""All connections are looked through this often, when there are too many; more often when a look finds that many of them are silent."""
WORTH_A_LOOK = 8
"""A look is paid for by shedding one in this many of those looked through."""


class Sheddable(Protocol):
    """A connection, as the gate sees it."""

    def silence(self) -> tuple[int, float] | None:
        """How little would be lost with it, the least first: a kind, and the time when it would be closed anyway. None: it is being served."""
        ...

    def shed(self) -> None:
        """Close it now."""
        ...


class ConnectionGate:
    """Counts nothing itself: `most` is compared with the connections that there are. One for all connections of a server."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._silent: deque[Sheddable] = deque()
        """those that can be shed, as they were when they were looked through"""
        self._look_at = 0.0
        self._found = False
        """the last look found enough to be worth another one"""

    def make_room(self, connections: Iterable[Sheddable], newcomer: Sheddable, now: float) -> bool:
        """Shed the most silent connection but the newcomer. False when each is being served, or none can be found in time."""
        if not self._silent and (self._found or now >= self._look_at):
            self._look_at = now + LOOK_SECONDS
            self._look(connections, newcomer)
        while self._silent:
            victim = self._silent.popleft()
            if victim.silence() is not None:
                victim.shed()
                return True
        return False

    def _look(self, connections: Iterable[Sheddable], newcomer: Sheddable) -> None:
        known = [(one.silence(), number, one) for number, one in enumerate(connections) if one is not newcomer]
        silent = sorted((silence, number, one) for silence, number, one in known if silence is not None)
        self._silent.extend(one for _, _, one in silent)
        self._found = WORTH_A_LOOK * len(silent) >= len(known)
