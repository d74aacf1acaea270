"""Which engines have fallen silent. Pure; the time is an argument.

Heartbeats prove life; their absence proves death only while they could have been heard: the bus was there, and so were we.
"""


class Liveness:
    """Heartbeats by incarnation. seconds: of silence, after which an engine counts as dead."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._heard: dict[int, float] = {}
        self._listening = float("inf")
        """since when we have listened without a break"""
        self._looked = float("-inf")

    def heard(self, worker_id: int, now: float) -> None:
        """An engine lives."""
        self._heard[worker_id] = now

    def look(self, now: float, *, connected: bool) -> None:
        """To be called often: what lies long ago, or was spent without a bus, is no silence of others."""
        if not connected or now - self._looked > self._seconds / 2:
            self._listening = now
        self._looked = now

    def silent(self, worker_id: int, now: float) -> float:
        """Seconds that an engine has been silent for; 0: it lives, or nobody can tell."""
        silence = now - max(self._heard.get(worker_id, self._listening), self._listening)
        return silence if silence > self._seconds else 0.0

    def keep_only(self, worker_ids: set[int]) -> None:
        """Forget those that are gone."""
        self._heard = {worker_id: at for worker_id, at in self._heard.items() if worker_id in worker_ids}
