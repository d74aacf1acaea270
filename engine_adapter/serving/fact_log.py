"""Bounded log of a rank's events since the agent's last poll. The step thread writes, and the event loop
takes."""

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
"""Memory for finished requests that wait to be taken. The last one stays, however large it is."""
MAX_ENDED = 4096
FACT_BLOCKS_PER_PAGE = 4
"""Limit of a log of KV changes, as a multiple of the pages of the rank's cache."""
STEPS_KEPT = 32
RECENT_SECONDS = 10.0


class DecodeSteps:
    """Durations of recent decode-only steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS_KEPT)
        """(end, duration) in seconds."""
        self._median: float | None = None
        """Cached median duration. None: not computed yet."""

    def note(self, end: float, seconds: float) -> None:
        """Record a decode-only step. All times must be of one clock."""
        self._steps.append((end, seconds))
        self._median = None

    def median(self, now: float) -> float | None:
        """Median duration in seconds. None when there were no recent steps."""
        while self._steps and now - self._steps[0][0] > RECENT_SECONDS:
            self._steps.popleft()
            self._median = None
        if self._median is None and self._steps:
            self._median = statistics.median(seconds for _, seconds in self._steps)
        return self._median


class FactLog:
    """Collection of facts between two calls of `take`.

    At most `limit` block hashes are kept. When they are not taken in time, the KV changes are replaced by a
    snapshot of the cache ("cleared", then its contents). The cache bounds its size, and the reader ends up
    with the same state. Of the finished requests, the oldest are dropped and counted.
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
        """Append changes of the cache. restated: returns the complete contents, called when there are too
        many changes."""
        if not changes:
            return
        with self._lock:
            self._kv += changes
            self._blocks += sum(map(_size, changes))
            if self._blocks > self._limit:
                self._kv = restated()
                self._blocks = 0

    def add_activations(self, counts: NDArray[Any], tokens: int) -> None:
        """Add expert counts. counts: [layers, experts] (token, k) pairs of `tokens` computed tokens."""
        with self._lock:
            self._counts += counts
            self._tokens += tokens

    def add_cached(self, tokens: int) -> None:
        """Add prompt tokens that were found in the cache."""
        with self._lock:
            self._cached_tokens += tokens

    def add_ended(self, ended: EndedRequest) -> None:
        """Add a finished request. Drop the oldest ones beyond the limits."""
        with self._lock:
            self._ended.append(ended)
            self._ended_bytes += ended.nbytes
            while len(self._ended) > MAX_ENDED or (
                self._ended_bytes > self._ended_limit and len(self._ended) > 1
            ):
                self._ended_bytes -= self._ended.popleft().nbytes
                self._ended_lost += 1

    def set_load(self, load: RankLoad) -> bool:
        """Set the current load. Return True if it changed."""
        with self._lock:
            changed = load != self._load
            self._load = load
        return changed

    def take(self) -> RankFacts:
        """Return everything since the last call, with the latest load."""
        with self._lock:
            kv, self._kv, self._blocks = tuple(self._kv), [], 0
            activations = (
                Activations(self._counts, self._tokens, self._cached_tokens)
                if self._tokens or self._cached_tokens
                else None
            )
            if activations is not None:
                self._counts, self._tokens, self._cached_tokens = np.zeros_like(self._counts), 0, 0
            ended, lost = tuple(self._ended), self._ended_lost
            self._ended.clear()
            self._ended_bytes = self._ended_lost = 0
            return RankFacts(kv, self._load, activations, ended, lost)


def _size(change: Change) -> int:
    if change == "cleared":
        return 1
    return (
        len(change.stored.blocks)
        if change.stored is not None
        else len(change.removed.block_hashes)
        if change.removed is not None
        else 0
    )
