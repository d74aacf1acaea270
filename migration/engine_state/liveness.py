"""Detection of engines that stopped sending heartbeats. Pure; time is an argument.

A heartbeat proves that an engine is alive. A missing heartbeat proves its death only while it could have been
received: the bus was connected and this process was running.
"""


class Liveness:
    """Heartbeats by incarnation. seconds: silence after which an engine counts as dead."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last_beat: dict[int, float] = {}
        self._listening = float("inf")
        """start of the current uninterrupted period of listening"""
        self._looked_at = float("-inf")

    def heard(self, worker_id: int, now: float) -> None:
        """Record a heartbeat."""
        self._last_beat[worker_id] = now

    def look(self, now: float, *, connected: bool) -> None:
        """Record that this process is running. Call it often: a long gap or a lost connection restarts all
        silences."""
        if not connected or now - self._looked_at > self._seconds / 2:
            self._listening = now
        self._looked_at = now

    def silent(self, worker_id: int, now: float) -> float:
        """Return the seconds for which an engine has been silent; 0: it is alive, or its state is unknown."""
        silence = now - max(self._last_beat.get(worker_id, self._listening), self._listening)
        return silence if silence > self._seconds else 0.0

    def keep_only(self, worker_ids: set[int]) -> None:
        """Forget the engines that are gone."""
        self._last_beat = {
            worker_id: at for worker_id, at in self._last_beat.items() if worker_id in worker_ids
        }
