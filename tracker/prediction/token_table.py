"""Evidence of single tokens about clusters: token counts by the signatures of their requests, and their
log-ratios. Pure.

Naive Bayes: a token b of a request with signature w counts w[k] for every cluster k. Its row is log(P(b | k)
/ P(b)) = log(P(k | b) / P(k)), with P(k | b) = (count[b, k] + PRIOR * P(k)) / (count[b] + PRIOR): towards 0
for rare tokens. Ids share buckets (id modulo buckets) if the budget is less than the vocabulary. Counts decay
by giving new ones more weight (and rescaling all at intervals), so that the passing of time costs nothing.
"""

from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array

PRIOR = 4.0
"""Counts of the prior, the mix of the clusters."""
MIN_CHANGE = 0.05
"""A row is published again when one of its log-ratios changed by this much."""
MIN_RATIO = 1e-4
"""Lower bound of P(b | k) / P(b)."""
REVISITED = 4096
"""Buckets that are checked again with every change: the mix in the denominator changes as well."""
_MAX_SCALE = 1e6
_CHUNK = 4096


class TokenTable:
    """Table for K clusters of at most `budget` bytes. seconds: time constant of the decay.

    ValueError if the budget is less than one bucket.
    """

    def __init__(self, budget: int, clusters: int, seconds: float) -> None:
        self.buckets = min(budget // (6 * clusters + 5), 1 << 24)
        if self.buckets < 1:
            raise ValueError(
                f"a budget of {budget} bytes holds no row of {clusters} clusters; allow at least"
                f" {6 * clusters + 5}"
            )
        self.clusters = clusters
        self._counts = np.zeros((self.buckets, clusters), np.float32)
        self._totals = np.zeros(self.buckets, np.float32)
        self._published = np.zeros((self.buckets, clusters), np.float16)
        self._dirty = np.zeros(self.buckets, bool)
        self._mass = np.zeros(clusters)
        self._seconds = seconds
        self._at: float | None = None
        self._scale = 1.0
        self._top = 0
        self._revisit = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        return sum(int(array.nbytes) for array in (self._counts, self._totals, self._published, self._dirty))

    @property
    def filled_bytes(self) -> int:
        """Bytes of the buckets up to the highest one used."""
        return self.nbytes // self.buckets * self._top

    def learn(
        self,
        buckets: NDArray[np.int64],
        repeats: NDArray[np.int64],
        weights: NDArray[np.float32],
        weight: float,
        now: float,
    ) -> None:
        """Add a request with signature weights [K]. weight: of each token.

        buckets: [n], ascending and different. repeats: [n], tokens in each.
        """
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
        if self._scale > _MAX_SCALE:
            for array in (self._counts[: self._top], self._totals[: self._top], self._mass):
                np.divide(array, self._scale, out=array, casting="same_kind")
            self._scale = 1.0

    def ratios(self, buckets: NDArray[np.int64]) -> Float32Array:
        """Return the present log-ratios of buckets [n]: float32 [n, K]."""
        everything = self._mass.sum()
        if not everything:
            return np.zeros((len(buckets), self.clusters), np.float32)
        mix = (self._mass / everything).astype(np.float32)
        seen = mix > 1e-6
        prior = np.float32(PRIOR * self._scale)
        likely = (self._counts[buckets] + prior * mix) / (self._totals[buckets] + prior)[:, None]
        likely /= np.where(seen, mix, 1.0)
        likely[:, ~seen] = 1.0
        np.log(np.maximum(likely, MIN_RATIO, out=likely), out=likely)
        return np.asarray(likely, np.float32)

    # Publishing

    def change(self, most: int) -> tuple[NDArray[np.uint32], NDArray[np.float16]]:
        """Return changed buckets [n] and their log-ratios [n, K]: at most `most`, by change since publication
        and frequency.
        """
        self._revisit = 0 if self._revisit >= self._top else self._revisit
        self._dirty[self._revisit : min(self._revisit + REVISITED, self._top)] = True
        self._revisit += REVISITED
        dirty = np.flatnonzero(self._dirty[: self._top])
        moved = np.concatenate(
            [self._moved(dirty[start : start + _CHUNK]) for start in range(0, len(dirty), _CHUNK)]
            or [np.zeros(0, np.float32)]
        )
        self._dirty[dirty[moved < MIN_CHANGE]] = False
        dirty, moved = dirty[moved >= MIN_CHANGE], moved[moved >= MIN_CHANGE]
        seen = self._totals[dirty]  # a rare token matters less: few prompts contain it
        order = np.argsort(-moved * seen / (seen + PRIOR * self._scale), kind="stable")
        chosen = np.sort(dirty[order[:most]])
        self._publish(chosen)
        return chosen.astype(np.uint32), self._published[chosen]

    def _moved(self, buckets: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the distance of rows from their published values: float32 [n]."""
        return np.asarray(np.abs(self.ratios(buckets) - self._published[buckets]).max(axis=1), np.float32)

    def _publish(self, buckets: NDArray[np.int64]) -> None:
        self._published[buckets] = self.ratios(buckets)
        self._dirty[buckets] = False

    def publish_all(self) -> None:
        """Mark all rows as published at their present values."""
        for start in range(0, self._top, _CHUNK):
            self._publish(np.arange(start, min(start + _CHUNK, self._top)))

    def published(self) -> tuple[NDArray[np.uint32], NDArray[np.float16]]:
        """Return the buckets [n] with published log-ratios [n, K], without those that are all zero."""
        buckets = np.flatnonzero(self._published[: self._top].any(axis=1))
        return buckets.astype(np.uint32), self._published[buckets]

    # Splits and merges of clusters

    def move(self, source: int, target: int, share: float) -> None:
        """Move this share of a cluster's counts to another one."""
        for counts in (self._counts[: self._top].T, self._mass):
            counts[target] += counts[source] * share
            counts[source] *= 1.0 - share

    # Saving and restoring

    def state(self) -> dict[str, Any]:
        """Return the complete state, for msgpack."""
        used = np.flatnonzero(self._totals[: self._top])
        return {
            "clusters": self.clusters,
            "buckets": self.buckets,
            "used": used.astype("<u4").tobytes(),
            "counts": self._counts[used].tobytes(),
            "totals": self._totals[used].tobytes(),
            "told": self._published[used].tobytes(),
            "dirty": self._dirty[used].tobytes(),
            "mass": self._mass.tobytes(),
            "scale": self._scale,
            "at": self._at,
            "top": self._top,
            "revisit": self._revisit,
        }

    def take_over(self, state: dict[str, Any], later: float = 0.0) -> None:
        """Restore a state on a clock that is ahead by `later` seconds. ValueError if it does not fit, without
        any change.
        """
        if (state["clusters"], state["buckets"]) != (self.clusters, self.buckets):
            raise ValueError(
                f"token table: [{state['buckets']}, {state['clusters']}]; this one is [{self.buckets},"
                f" {self.clusters}]"
            )
        used, top = np.frombuffer(state["used"], "<u4").astype(np.int64), int(state["top"])
        counts = np.frombuffer(state["counts"], "<f4").reshape(len(used), self.clusters)
        totals, dirty = np.frombuffer(state["totals"], "<f4"), np.frombuffer(state["dirty"], bool)
        published = np.frombuffer(state["told"], "<f2").reshape(len(used), self.clusters)
        mass, scale = np.frombuffer(state["mass"], "<f8"), float(state["scale"])
        if (
            len(totals) != len(used)
            or len(dirty) != len(used)
            or len(mass) != self.clusters
            or (len(used) and not used.max() < top <= self.buckets)
        ):
            raise ValueError(
                f"token table: {len(used)} buckets up to {top} do not go with {len(totals)} totals and"
                f" {len(mass)} clusters"
            )
        if not (
            np.isfinite(counts).all()
            and (counts >= 0).all()
            and np.isfinite(mass).all()
            and 0 < scale < float("inf")
        ):
            raise ValueError("token table: counts must be finite and not negative")
        for target, values in (
            (self._counts, counts),
            (self._totals, totals),
            (self._published, published),
            (self._dirty, dirty),
        ):
            target[used] = values
        self._mass[:], self._scale, self._top, self._revisit = mass, scale, top, int(state["revisit"])
        self._at = None if state["at"] is None else state["at"] + later
