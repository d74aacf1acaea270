"""What happened on a rank since the agent last asked: written by the step thread, taken by the event loop, bounded."""

import statistics
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.kv_cache import Change
from engine_adapter.engine import Activations, EndedRequest, RankFacts, RankLoad

NO_LOAD = RankLoad(running=0, waiting=0, prefill_tokens=0, decode_blocks=0, used_blocks=0)
ENDED_BYTES = 64 * 1024 * 1024
"""of ended requests that wait to be taken; the last one stays however large it is"""
MOST_ENDED = 4096
STEPS_KEPT = 32
LATELY_SECONDS = 10.0


class DecodeSteps:
    """How long the last steps took in which nothing but decoding was done."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS_KEPT)
        """(end, length), seconds"""
        self._median: float | None = None
        """of them; None: not known yet"""

    def note(self, end: float, seconds: float) -> None:
        """Such a step ended; moments are of any one clock."""
        self._steps.append((end, seconds))
        self._median = None

    def median(self, now: float) -> float | None:
        """Seconds; None when there were none lately."""
        while self._steps and now - self._steps[0][0] > LATELY_SECONDS:
            self._steps.popleft()
            self._median = None
        if self._median is None and self._steps:
            self._median = statistics.median(seconds for _, seconds in self._steps)
        return self._median


class FactLog:
    """Collects facts between two takes.

    At most `limit` block identities are kept: when nobody takes them in time, the KV changes are replaced by the whole cache
    restated ("cleared", then what is there), which is bounded by the cache and leaves a reader with the same knowledge. Of ended
    requests the oldest are let go, and counted.
    """

    def __init__(self, layers: int, experts: int, limit: int, ended_bytes: int = ENDED_BYTES) -> None:
        self._lock = threading.Lock()
        self._limit = limit
        self._kv: list[Change] = []
        self._blocks = 0
        self._load = NO_LOAD
        self._counts = np.zeros((layers, experts), np.int64)
        self._tokens = 0
        self._cached_tokens = 0
        self._ended: deque[EndedRequest] = deque()
        self._ended_limit = ended_bytes
        self._ended_bytes = 0
        self._ended_lost = 0

    def add_kv(self, changes: list[Change], restated: Callable[[], list[Change]]) -> None:
        """Append changes of the cache; `restated` is asked for its whole contents when there are too many."""
        if not changes:
            return
        with self._lock:
            self._kv += changes
            self._blocks += sum(map(_size, changes))
            if self._blocks > self._limit:
                self._kv = restated()
                self._blocks = 0

    def add_activations(self, counts: NDArray[Any], tokens: int) -> None:
        """counts: [layers, experts] (token, k) pairs of `tokens` computed tokens."""
        with self._lock:
            self._counts += counts
            self._tokens += tokens

    def add_cached(self, tokens: int) -> None:
        """So many prompt tokens were found in the cache."""
        with self._lock:
            self._cached_tokens += tokens

    def add_ended(self, ended: EndedRequest) -> None:
        """A request is over."""
        with self._lock:
            self._ended.append(ended)
            self._ended_bytes += ended.nbytes
            while len(self._ended) > MOST_ENDED or (self._ended_bytes > self._ended_limit and len(self._ended) > 1):
                self._ended_bytes -= self._ended.popleft().nbytes
                self._ended_lost += 1

    def set_load(self, load: RankLoad) -> bool:
        """The load now; returns whether it changed."""
        with self._lock:
            changed = load != self._load
            self._load = load
        return changed

    def take(self) -> RankFacts:
        """Everything since the last call. The load is the latest."""
        with self._lock:
            kv, self._kv, self._blocks = tuple(self._kv), [], 0
            activations = Activations(self._counts, self._tokens, self._cached_tokens) if self._tokens or self._cached_tokens else None
            if activations is not None:
                self._counts, self._tokens, self._cached_tokens = np.zeros_like(self._counts), 0, 0
            ended, lost = tuple(self._ended), self._ended_lost
            self._ended.clear()
            self._ended_bytes = self._ended_lost = 0
            return RankFacts(kv, self._load, activations, ended, lost)


def _size(change: Change) -> int:
    if change == "cleared":
        return 1
    return len(change.stored.blocks) if change.stored is not None else len(change.removed.block_hashes) if change.removed is not None else 0
