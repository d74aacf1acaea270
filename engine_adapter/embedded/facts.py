"""What happened on a rank since the agent last asked: written by the step thread, taken by the event loop, bounded."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_adapter.embedded.kv_cache import Change
from engine_adapter.engine import Activations, Facts, Load

NO_LOAD = Load(running=0, waiting=0, prefill_tokens=0, decode_blocks=0, used_blocks=0)


class FactLog:
    """Collects facts between two takes.

    At most `limit` block identities are kept: when nobody takes them in time, the KV changes are replaced by the whole cache
    restated ("cleared", then what is there), which is bounded by the cache and leaves a reader with the same knowledge.
    """

    def __init__(self, layers: int, experts: int, limit: int) -> None:
        self._lock = threading.Lock()
        self._limit = limit
        self._kv: list[Change] = []
        self._blocks = 0
        self._load = NO_LOAD
        self._counts = np.zeros((layers, experts), np.int64)
        self._tokens = 0
        self._cached_tokens = 0

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

    def set_load(self, load: Load) -> bool:
        """The load now; returns whether it changed."""
        with self._lock:
            changed = load != self._load
            self._load = load
        return changed

    def take(self) -> Facts:
        """Everything since the last call. The load is the latest."""
        with self._lock:
            kv, self._kv, self._blocks = tuple(self._kv), [], 0
            activations = Activations(self._counts, self._tokens, self._cached_tokens) if self._tokens or self._cached_tokens else None
            if activations is not None:
                self._counts, self._tokens, self._cached_tokens = np.zeros_like(self._counts), 0, 0
            return Facts(kv, self._load, activations)


def _size(change: Change) -> int:
    if change == "cleared":
        return 1
    return len(change.stored.blocks) if change.stored is not None else len(change.removed.block_hashes) if change.removed is not None else 0
