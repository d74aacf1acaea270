"""Bounded sample of request profiles with exponential decay. Pure.

Every sample gets the key t / tau + G with a standard Gumbel draw G, and those with the highest keys are kept:
an exponentially decayed sample without replacement (Efraimidis & Spirakis 2006 with weights exp(t / tau); the
Gumbel form is that of Vieira 2014). Let kappa be the highest evicted key. A kept sample had the probability 1
- exp(-exp(t / tau - kappa)) of being kept, and counts exp((t - now) / tau) divided by it (bottom-k
estimation, Cohen & Kaplan 2007): unbiased for decayed sums, full or not.

The draws are hashes of sample and time: the same samples give the same reservoir, in any order within a
batch.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from heapq import heapify, heappush, heapreplace
from math import exp, expm1, inf, isfinite, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

OVERHEAD = 512
"""Approximate bytes of a sample besides its counts."""
FULL = 255
"""Largest stored root."""


class Sample(NamedTuple):
    """One sampled request, ordered by its key.

    `roots`: uint8 [2, cells], square roots of the counts of prompt and completion, each in units of 1 /
    `FULL` of the largest, so that a cell's error stays below counting noise. `pairs`: sums of the counts.
    """

    key: float
    number: int
    time: float
    roots: bytes
    pairs: tuple[float, float]


class Reservoir:
    """At most `capacity` samples of `cells` counts each, with time constant `seconds`.

    Time follows the clock, but one sample advances it by at most 1 / `steps` of the time constant. Idle
    periods therefore lose nothing, and samples are replaced only by newer ones.
    """

    def __init__(self, capacity: int, cells: int, seconds: float, steps: int = 64) -> None:
        self.capacity, self.cells = capacity, cells
        self._seconds, self._step = seconds, seconds / steps
        self._samples: list[Sample] = []
        self._threshold = -inf
        self._time = 0.0
        self._last_at: float | None = None
        self._number = 0

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def stored_bytes(self) -> int:
        """Approximate memory of the samples."""
        return len(self._samples) * (2 * self.cells + OVERHEAD)

    @property
    def received(self) -> int:
        """Samples offered so far."""
        return self._number

    def samples(self) -> tuple[Sample, ...]:
        """Return the samples in descending order of their keys. They are immutable, so another thread may
        read them.
        """
        return tuple(sorted(self._samples, reverse=True))

    def weights(self, samples: Sequence[Sample]) -> NDArray[np.float64]:
        """Return the number of current requests that each sample represents: float64 [n]."""
        return np.array([self._weight(sample.time) for sample in samples])

    def _weight(self, time: float) -> float:
        age = (time - self._time) / self._seconds
        above = time / self._seconds - self._threshold
        if above == inf or above > 5.0:
            return exp(age)
        return exp(age) / -expm1(-exp(above)) if above > -30.0 else exp(age - above)

    def learn(self, prompt: NDArray[Any], completion: NDArray[Any], now: float) -> None:
        """Offer counts [layers, experts] of (token, k) pairs. ValueError if they are not counts of this
        shape.
        """
        halves = np.stack([np.asarray(half, np.float64).ravel() for half in (prompt, completion)])
        if halves.shape[1] != self.cells or not np.isfinite(halves).all() or halves.min(initial=0.0) < 0:
            raise ValueError(
                f"sampled profile: expected {self.cells} finite counts >= 0 in each half, got"
                f" {halves.shape[1]}"
            )
        self._advance(now)
        if not halves.any():
            return
        roots = np.sqrt(halves)
        units = np.maximum(roots.max(axis=1, keepdims=True), 1e-30) / FULL
        packed = np.rint(roots / units).astype(np.uint8).tobytes()
        self._keep(packed, (float(halves[0].sum()), float(halves[1].sum())))

    def _advance(self, now: float) -> None:
        if self._last_at is not None:
            self._time += min(max(now - self._last_at, 0.0), self._step)
        self._last_at = now

    def _keep(self, roots: bytes, pairs: tuple[float, float]) -> None:
        self._number += 1
        sample = Sample(
            self._time / self._seconds + self._gumbel(roots, pairs), self._number, self._time, roots, pairs
        )
        if len(self._samples) < self.capacity:
            heappush(self._samples, sample)
        elif sample > self._samples[0]:
            self._threshold = max(self._threshold, heapreplace(self._samples, sample).key)
        else:
            self._threshold = max(self._threshold, sample.key)

    def _gumbel(self, roots: bytes, pairs: tuple[float, float]) -> float:
        digest = blake2b(
            roots,
            digest_size=8,
            salt=b"reservoir",
            person=np.array([pairs[0] + self._time, pairs[1]]).tobytes(),
        ).digest()
        return -log(-log((int.from_bytes(digest, "little") + 0.5) / 2.0**64))

    def state(self) -> dict[str, Any]:
        return {
            "cells": self.cells,
            "threshold": self._threshold if isfinite(self._threshold) else None,
            "time": self._time,
            "heard": self._last_at,
            "number": self._number,
            "samples": [list(sample) for sample in self._samples],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state. If it exceeds the capacity, the highest keys are kept. ValueError for an invalid
        state.
        """
        if state["cells"] != self.cells:
            raise ValueError(f"reservoir: samples of {state['cells']} cells; the model has {self.cells}")
        samples = sorted(
            Sample(float(key), int(number), float(time), roots, (float(prompt), float(completion)))
            for key, number, time, roots, (prompt, completion) in state["samples"]
        )
        if any(
            not isinstance(sample.roots, bytes)
            or len(sample.roots) != 2 * self.cells
            or min(sample.pairs) < 0
            or not isfinite(sum(sample.pairs) + sample.key + sample.time)
            for sample in samples
        ):
            raise ValueError(f"reservoir: a sample must be {2 * self.cells} bytes and finite sums >= 0")
        threshold = -inf if state["threshold"] is None else float(state["threshold"])
        gone = samples[: -self.capacity]
        self._samples = samples[-self.capacity :]
        heapify(self._samples)
        self._threshold = max([threshold, *(sample.key for sample in gone)])
        self._time, self._number = float(state["time"]), int(state["number"])
        self._last_at = None if state["heard"] is None else float(state["heard"])


def counts(samples: Sequence[Sample]) -> NDArray[np.float32]:
    """Return the counts of prompts and of completions: float32 [2, n, cells]."""
    roots = np.frombuffer(b"".join(sample.roots for sample in samples), np.uint8).reshape(len(samples), 2, -1)
    halves = np.square(roots.transpose(1, 0, 2), dtype=np.float32)
    pairs = np.array([sample.pairs for sample in samples], np.float32).T
    halves *= (pairs / np.maximum(halves.sum(axis=2), 1.0))[:, :, None]
    return halves
