"""Clusters of requests: expert profiles learnt online from sampled requests, in slots of constant meaning.
Pure.

Samples arrive one at a time and decay (`tracker.clustering.reservoir`). They are refitted at intervals,
starting from the last assignment, so that a slot keeps its meaning. Clusters split and merge if that predicts
better (`tracker.clustering.mixture_fit`), and both are reported. Fitting is separate from learning: it may
take a second or two at 58 x 256 and belongs in a thread:

    job = clusters.due(now)                          # cheap; the job is immutable
    fitted = None if job is None else job.run()      # in a thread; `learn` and `mixed` may continue meanwhile
    changes = clusters.adopt(fitted, now)            # cheap

`refine(now)` combines the three.
"""

from collections.abc import Mapping
from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array
from fleet.popularity import uniform
from fleet.signatures import ClusterModel
from tracker.clustering.mixture_fit import FEWEST, first_sharpness, saturation
from tracker.clustering.refit import ClusterMerge, ClusterSplit, Refit, RefitResult
from tracker.clustering.reservoir import OVERHEAD, Reservoir
from tracker.config import TrackerConfig

FADED = 0.02
"""Samples with less weight than this, relative to the newest, are not fitted."""
MAX_SAMPLES = 1024
"""Limit of the sampled profiles of a model, even if they are small."""
PRIOR_PAIRS = 128.0
"""(token, k) pairs per layer of the prior (the traffic's profile) in the profile of a request or cluster."""
GROWTH = 10
"""Refit after new samples amount to a tenth of those present."""
CHANGED_NATS = 0.003
"""Publish when the profiles differ by this much from the published ones (Kullback-Leibler per pair,
weighted by shares).
"""
CHANGED_SHARES = 0.05
"""Publish when the shares differ by this much (total variation) from the published ones."""
CHANGED_SHARPNESS = 2.0
"""Publish when the sharpness differs by this factor from the published one."""
SHARES_SECONDS = 30.0
"""Minimum interval between publications of changed shares alone."""
ANCHOR_TOKENS = 8192.0
"""Minimum weight of the samples' shares in the traffic mix, in tokens. Signatures are computed with the mix,
and would otherwise confirm themselves.
"""
ANCHOR = 0.25
"""Minimum weight of the samples' shares in the traffic mix, relative to the tokens of signatures. The larger
of `ANCHOR_TOKENS` and this applies.
"""


class OnlineClusters:
    """Clusters of one model. `now` is seconds of one monotonic clock; versions count from `first_version`."""

    def __init__(self, config: TrackerConfig, layers: int, experts: int, first_version: int = 1) -> None:
        self._config = config
        cells = layers * experts
        capacity = min(MAX_SAMPLES, max(2 * FEWEST, config.cluster_bytes // (2 * cells + OVERHEAD)))
        self._reservoir = Reservoir(capacity, cells, config.slow_seconds)
        first = np.zeros(config.clusters)
        first[0] = 1.0
        flat = np.broadcast_to(
            uniform(layers, experts).astype(np.float32), (config.clusters, layers, experts)
        )
        self._model = ClusterModel(
            first_version,
            np.ascontiguousarray(flat),
            first.astype(np.float32),
            first_sharpness(layers),
            saturation(layers),
        )
        self._sampled = first
        self._tokens = np.zeros(config.clusters)
        self._mixed_at: float | None = None
        self._labels: dict[int, int] = {}
        self._fitted_at: float | None = None
        self._fitted_samples = 0
        self._published_at: float | None = None

    @property
    def model(self) -> ClusterModel:
        """Published clusters. The version increases when they have changed enough to be published again."""
        return self._model

    @property
    def stored_bytes(self) -> int:
        """Approximate memory of the samples."""
        return self._reservoir.stored_bytes

    @property
    def shares(self) -> Float32Array:
        """Current traffic mix: float32 [K]. `model.shares` follows it in steps."""
        # Tokens of signatures with slots that the samples do not support would keep an empty slot alive.
        known = np.where(self._sampled > 0, self._tokens, 0.0)
        anchor = max(ANCHOR_TOKENS, ANCHOR * float(known.sum()))
        mass = known + anchor * self._sampled
        return np.asarray(mass / mass.sum(), np.float32)

    def learn(self, prompt: NDArray[Any], completion: NDArray[Any], now: float) -> None:
        """Add one sampled request: (token, k) pairs [layers, experts] of prompt and completion. ValueError
        for another shape.
        """
        shape = self._model.profiles.shape[1:]
        if prompt.shape != shape or completion.shape != shape:
            raise ValueError(
                f"sampled profile: shapes {prompt.shape} and {completion.shape}; the model has {shape}"
            )
        self._reservoir.learn(prompt, completion, now)

    def mixed(self, weights: Float32Array, tokens: float, now: float) -> None:
        """Add the signature [K] of a finished request. ValueError if it is invalid."""
        if (
            weights.shape != self._tokens.shape
            or not np.isfinite(weights).all()
            or weights.min() < 0
            or not 0 <= tokens < 1e12
        ):
            raise ValueError(
                f"signature: expected {len(self._tokens)} weights >= 0 and a number of tokens, got shape"
                f" {weights.shape} and {tokens}"
            )
        if self._mixed_at is not None:
            self._tokens *= exp(-max(now - self._mixed_at, 0.0) / self._config.slow_seconds)
        self._mixed_at = now
        self._tokens += tokens * weights

    def refine(self, now: float) -> list[ClusterSplit | ClusterMerge]:
        """Refit if due, and return the changes. Takes up to a second or two at 58 x 256: not for an event
        loop.
        """
        job = self.due(now)
        return self.adopt(None if job is None else job.run(), now)

    def due(self, now: float) -> Refit | None:
        """Return the refit to run now, if enough samples have arrived since the last one."""
        fresh = self._reservoir.received - self._fitted_samples
        waited = self._fitted_at is None or not 0 <= now - self._fitted_at < self._config.refine_seconds
        if not waited or fresh < max(1, len(self._reservoir) // GROWTH):
            return None
        samples = self._reservoir.samples()
        weights = self._reservoir.weights(samples)
        weights /= weights.max()
        kept = [sample for sample, weight in zip(samples, weights, strict=True) if weight >= FADED]
        used = frozenset(np.flatnonzero(self._sampled > 0).tolist())
        # Set here and not in `adopt`: a job that fails or is dropped must not be due again at once.
        self._fitted_at, self._fitted_samples = now, self._reservoir.received
        return Refit(
            tuple(kept),
            weights[weights >= FADED],
            dict(self._labels),
            self._model,
            used,
            PRIOR_PAIRS,
        )

    def adopt(self, fitted: RefitResult | None, now: float) -> list[ClusterSplit | ClusterMerge]:
        """Adopt a refit's result (None: there was none), update the published model if it has changed enough,
        and return the changes.
        """
        if fitted is None:
            waited = self._published_at is None or not 0 <= now - self._published_at < SHARES_SECONDS
            if waited and self._shares_moved():
                self._update(self._model.profiles, self._model.sharpness, now)
            return []
        self._labels = fitted.labels
        for change, moved in zip(fitted.changes, fitted.moved, strict=True):
            into, out = (
                (change.child, change.parent)
                if isinstance(change, ClusterSplit)
                else (change.kept, change.freed)
            )
            mass = moved * self._tokens[out]
            self._tokens[out] -= mass
            self._tokens[into] += mass
        self._sampled = fitted.shares
        if fitted.changes or self._changed_enough(fitted):
            self._update(fitted.profiles, fitted.sharpness, now)
        return fitted.changes

    def state(self) -> dict[str, Any]:
        """Return the complete state for `restore`, suitable for msgpack."""
        model = self._model
        return {
            "shape": list(model.profiles.shape),
            "version": model.version,
            "sharpness": model.sharpness,
            "profiles": model.profiles.astype("<f4").tobytes(),
            "told": model.shares.astype("<f4").tobytes(),
            "sampled": self._sampled.astype("<f8").tobytes(),
            "tokens": self._tokens.astype("<f8").tobytes(),
            "mixed_at": self._mixed_at,
            "fitted_at": self._fitted_at,
            "told_at": self._published_at,
            "fitted_samples": self._fitted_samples,
            "labels": self._labels,
            "reservoir": self._reservoir.state(),
        }

    @classmethod
    def restore(cls, config: TrackerConfig, state: Mapping[str, Any]) -> "OnlineClusters":
        """Restore from a state. Times may be of another clock.

        ValueError for an invalid state, or another number of clusters.
        """
        try:
            return cls._restored(config, state)
        except (KeyError, TypeError, AttributeError, OverflowError, ValueError) as error:
            raise ValueError(
                f"clusters: this snapshot cannot be restored ({error!r}); remove it to start from scratch"
            ) from error

    @classmethod
    def _restored(cls, config: TrackerConfig, state: Mapping[str, Any]) -> "OnlineClusters":
        slots, layers, experts = state["shape"]
        if slots != config.clusters:
            raise ValueError(f"the snapshot has {slots}, tracker.clusters is {config.clusters}")
        clusters = cls(config, layers, experts)
        clusters._model = _model(state, (slots, layers, experts))
        clusters._sampled, clusters._tokens = (
            np.frombuffer(state[name], "<f8").copy() for name in ("sampled", "tokens")
        )
        for name, masses in (("sampled", clusters._sampled), ("tokens", clusters._tokens)):
            if masses.shape != (slots,) or not np.isfinite(masses).all() or masses.min() < 0:
                raise ValueError(f"{name} must be {slots} finite numbers >= 0")
        if not clusters._sampled.sum() > 0:
            raise ValueError("no slot is used; at least one must be")
        clusters._reservoir.restore(state["reservoir"])
        clusters._labels = {int(number): int(slot) for number, slot in state["labels"].items()}
        if any(not 0 <= slot < slots for slot in clusters._labels.values()):
            raise ValueError(f"a label is no slot; slots are 0 to {slots - 1}")
        clusters._mixed_at, clusters._fitted_at, clusters._published_at = (
            None if state[name] is None else float(state[name])
            for name in ("mixed_at", "fitted_at", "told_at")
        )
        clusters._fitted_samples = int(state["fitted_samples"])
        return clusters

    def _update(self, profiles: NDArray[np.float32], sharpness: float, now: float) -> None:
        self._published_at = now
        shares = self.shares
        padded = profiles.copy()
        # An unused slot gets the traffic's mean profile: a signature that names it predicts nothing special.
        padded[shares == 0] = np.tensordot(shares, profiles, 1)
        self._model = ClusterModel(self._model.version + 1, padded, shares, sharpness, self._model.saturation)

    def _changed_enough(self, fitted: RefitResult) -> bool:
        ratio = fitted.sharpness / self._model.sharpness
        if self._shares_moved() or not 1 / CHANGED_SHARPNESS < ratio < CHANGED_SHARPNESS:
            return True
        return fitted.divergence > CHANGED_NATS

    def _shares_moved(self) -> bool:
        return float(np.abs(self.shares - self._model.shares).sum()) / 2 > CHANGED_SHARES


def _model(state: Mapping[str, Any], shape: tuple[int, int, int]) -> ClusterModel:
    profiles, shares = (
        np.frombuffer(state["profiles"], "<f4").reshape(shape),
        np.frombuffer(state["told"], "<f4"),
    )
    if shares.shape != shape[:1] or not (
        np.isfinite(shares).all() and shares.min() >= 0 and abs(shares.sum() - 1) < 1e-3
    ):
        raise ValueError(f"shares must be {shape[0]} probabilities")
    if not (
        np.isfinite(profiles).all() and profiles.min() >= 0 and np.abs(profiles.sum(axis=2) - 1).max() < 1e-3
    ):
        raise ValueError("profiles must be probabilities")
    if not 0 < state["sharpness"] < float("inf"):
        raise ValueError(f"sharpness must be finite and above 0, not {state['sharpness']}")
    return ClusterModel(
        int(state["version"]), profiles.copy(), shares.copy(), float(state["sharpness"]), saturation(shape[1])
    )
