"""What each token says of the clusters: counts of tokens by their requests' signatures, and the log-ratios they stand for. Pure.

Naive Bayes: a token b of a request with signature w counts w[k] for every cluster k. Its row is
log(P(b | k) / P(b)) = log(P(k | b) / P(k)), with P(k | b) = (count[b, k] + PRIOR * P(k)) / (count[b] + PRIOR): towards 0 for rare
tokens. Ids share buckets (id modulo buckets) where the budget is less than the vocabulary. Counts fade by weighing what is new
more (and all less, now and then), so that time costs nothing.
"""

from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

PRIOR = 4.0
"""Counts that speak for the mix of the clusters."""
LEAST_CHANGE = 0.05
"""A row is told again when one of its log-ratios moved by so much."""
LEAST_RATIO = 1e-4
"""P(b | k) / P(b) is taken for no less."""
REVISITED = 4096
"""Buckets that are looked at again whenever changes are taken: the mix they are measured against moves as well."""
_MOST_SCALE = 1e6
_CHUNK = 4096
Ratios = NDArray[np.float32]
"""float32 [n, K]"""


class TokenTable:
    """At most `budget` bytes for K clusters. seconds: time constant of the fading. ValueError when the budget holds no bucket."""

    def __init__(self, budget: int, clusters: int, seconds: float) -> None:
        self.buckets = min(budget // (6 * clusters + 5), 1 << 24)
        if self.buckets < 1:
            raise ValueError(f"a budget of {budget} bytes holds no row of {clusters} clusters; allow at least {6 * clusters + 5}")
        self.clusters = clusters
        self._counts = np.zeros((self.buckets, clusters), np.float32)
        self._totals = np.zeros(self.buckets, np.float32)
        self._told = np.zeros((self.buckets, clusters), np.float16)
        self._dirty = np.zeros(self.buckets, bool)
        self._mass = np.zeros(clusters)
        self._seconds = seconds
        self._at: float | None = None
        self._scale = 1.0
        self._top = 0
        self._revisit = 0

    @property
    def nbytes(self) -> int:
        """Bytes taken, filled or not."""
        return sum(int(array.nbytes) for array in (self._counts, self._totals, self._told, self._dirty))

    @property
    def filled_bytes(self) -> int:
        """Bytes of the buckets that were counted in, and of those below them."""
        return self.nbytes // self.buckets * self._top

    def learn(self, buckets: NDArray[np.int64], repeats: NDArray[np.int64], weights: NDArray[np.float32], weight: float, now: float) -> None:
        """A request of signature weights [K] had tokens of different buckets [n], in rising order, so many each; weight: what a token counts."""
        self._fade(now)
        if not len(buckets):
            return
        counted = (np.sqrt(repeats) * (weight * self._scale)).astype(np.float32)
        self._counts[buckets] += counted[:, None] * weights
        self._totals[buckets] += counted
        self._dirty[buckets] = True
        self._mass += float(counted.sum()) * weights.astype(np.float64)
        self._top = max(self._top, int(buckets[-1]) + 1)

    def _fade(self, now: float) -> None:
        if self._at is not None and now > self._at:
            self._scale *= exp(min((now - self._at) / self._seconds, 80.0))
        self._at = now if self._at is None else max(self._at, now)
        if self._scale > _MOST_SCALE:
            for array in (self._counts[: self._top], self._totals[: self._top], self._mass):
                np.divide(array, self._scale, out=array, casting="same_kind")
            self._scale = 1.0

    def ratios(self, buckets: NDArray[np.int64]) -> Ratios:
        """float32 [n, K] of buckets [n], as they stand."""
        everything = self._mass.sum()
        if not everything:
            return np.zeros((len(buckets), self.clusters), np.float32)
        mix = (self._mass / everything).astype(np.float32)
        seen = mix > 1e-6
        prior = np.float32(PRIOR * self._scale)
        likely = (self._counts[buckets] + prior * mix) / (self._totals[buckets] + prior)[:, None]
        likely /= np.where(seen, mix, 1.0)
        likely[:, ~seen] = 1.0
        np.log(np.maximum(likely, LEAST_RATIO, out=likely), out=likely)
        return np.asarray(likely, np.float32)

    # Telling

    def change(self, most: int) -> tuple[NDArray[np.uint32], NDArray[np.float16]]:
        """Buckets [n] and their log-ratios [n, K]: those that moved most since they were told, common ones first, at most `most`."""
        self._revisit = 0 if self._revisit >= self._top else self._revisit
        self._dirty[self._revisit : min(self._revisit + REVISITED, self._top)] = True
        self._revisit += REVISITED
        dirty = np.flatnonzero(self._dirty[: self._top])
        moved = np.concatenate([self._moved(dirty[start : start + _CHUNK]) for start in range(0, len(dirty), _CHUNK)] or [np.zeros(0, np.float32)])
        self._dirty[dirty[moved < LEAST_CHANGE]] = False
        dirty, moved = dirty[moved >= LEAST_CHANGE], moved[moved >= LEAST_CHANGE]
        seen = self._totals[dirty]  # a rare token matters less: few prompts have it
        order = np.argsort(-moved * seen / (seen + PRIOR * self._scale), kind="stable")
        chosen = np.sort(dirty[order[:most]])
        self._tell(chosen)
        return chosen.astype(np.uint32), self._told[chosen]

    def _moved(self, buckets: NDArray[np.int64]) -> NDArray[np.float32]:
        """float32 [n]: how far rows are from what was told of them."""
        return np.asarray(np.abs(self.ratios(buckets) - self._told[buckets]).max(axis=1), np.float32)

    def _tell(self, buckets: NDArray[np.int64]) -> None:
        self._told[buckets] = self.ratios(buckets)
        self._dirty[buckets] = False

    def settle(self) -> None:
        """All is told as it stands."""
        for start in range(0, self._top, _CHUNK):
            self._tell(np.arange(start, min(start + _CHUNK, self._top)))

    def told(self) -> tuple[NDArray[np.uint32], NDArray[np.float16]]:
        """Buckets [n] and their log-ratios [n, K] as they were told, without those that say nothing."""
        buckets = np.flatnonzero(self._told[: self._top].any(axis=1))
        return buckets.astype(np.uint32), self._told[buckets]

    # Clusters that split and merge

    def move(self, source: int, target: int, share: float) -> None:
        """This share of what was counted for one cluster is another's."""
        for counts in (self._counts[: self._top].T, self._mass):
            counts[target] += counts[source] * share
            counts[source] *= 1.0 - share

    # Surviving

    def state(self) -> dict[str, Any]:
        """Everything, as msgpack takes it."""
        used = np.flatnonzero(self._totals[: self._top])
        return {
            "clusters": self.clusters,
            "buckets": self.buckets,
            "used": used.astype("<u4").tobytes(),
            "counts": self._counts[used].tobytes(),
            "totals": self._totals[used].tobytes(),
            "told": self._told[used].tobytes(),
            "dirty": self._dirty[used].tobytes(),
            "mass": self._mass.tobytes(),
            "scale": self._scale,
            "at": self._at,
            "top": self._top,
            "revisit": self._revisit,
        }

    def take_over(self, state: dict[str, Any], later: float = 0.0) -> None:
        """Become what `state` was, on a clock that is `later` by so many seconds. ValueError when it does not fit; then nothing changed."""
        if (state["clusters"], state["buckets"]) != (self.clusters, self.buckets):
            raise ValueError(f"token table: [{state['buckets']}, {state['clusters']}]; this one is [{self.buckets}, {self.clusters}]")
        used, top = np.frombuffer(state["used"], "<u4").astype(np.int64), int(state["top"])
        counts = np.frombuffer(state["counts"], "<f4").reshape(len(used), self.clusters)
        totals, dirty = np.frombuffer(state["totals"], "<f4"), np.frombuffer(state["dirty"], bool)
        told = np.frombuffer(state["told"], "<f2").reshape(len(used), self.clusters)
        mass, scale = np.frombuffer(state["mass"], "<f8"), float(state["scale"])
        if len(totals) != len(used) or len(dirty) != len(used) or len(mass) != self.clusters or (len(used) and not used.max() < top <= self.buckets):
            raise ValueError(f"token table: {len(used)} buckets up to {top} do not go with {len(totals)} totals and {len(mass)} clusters")
        if not (np.isfinite(counts).all() and (counts >= 0).all() and np.isfinite(mass).all() and 0 < scale < float("inf")):
            raise ValueError("token table: counts must be finite and not negative")
        for target, values in ((self._counts, counts), (self._totals, totals), (self._told, told), (self._dirty, dirty)):
            target[used] = values
        self._mass[:], self._scale, self._top, self._revisit = mass, scale, top, int(state["revisit"])
        self._at = None if state["at"] is None else state["at"] + later
