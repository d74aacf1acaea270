"""Engines that beat though no join of theirs is known: what was stored of it was pushed out of the log by what was stored since. Pure; bounded."""

from collections import OrderedDict
from dataclasses import dataclass

FIRST_SECONDS = 1.0
"""A join that was stored just now is given so long to arrive."""
MOST_SECONDS = 3600.0


@dataclass(slots=True)
class _Stranger:
    next: float
    """not to be asked before"""
    pause: float


class UnknownEngines:
    """Says when to ask one who it is: a moment after it was first heard, and then after pauses that double up to an hour, while it is heard."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._heard: OrderedDict[int, _Stranger] = OrderedDict()

    def heard(self, worker_id: int, now: float) -> bool:
        """Whether to ask now; then it counts as asked. Of more than `most` the one heard first is forgotten."""
        stranger = self._heard.get(worker_id)
        if stranger is None:
            self._heard[worker_id] = _Stranger(now + FIRST_SECONDS, FIRST_SECONDS)
            if len(self._heard) > self._most:
                self._heard.popitem(last=False)
            return False
        if now < stranger.next:
            return False
        stranger.pause = min(2 * stranger.pause, MOST_SECONDS)
        stranger.next = now + stranger.pause
        return True
