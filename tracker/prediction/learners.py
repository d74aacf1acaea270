"""Learnt state of every model: clusters and prediction tables, from request profiles of ranks and outcomes of
routers. Pure.

One thread owns this state: calls must not overlap. Returned values are immutable.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fleet.facts.activity import RequestProfile, RequestsFinished, RequestsProfiled
from fleet.facts.demand import ClustersPublished, TablesPublished
from fleet.requests.demand import ClusterPopularity, SourceQuality
from fleet.signatures import ClusterModel, unpack
from tracker.clustering.online_clusters import OnlineClusters
from tracker.clustering.refit import Refit, RefitResult
from tracker.config import TrackerConfig
from tracker.drift.sampling_noise import divergence_by_layer
from tracker.prediction.model_learner import ModelLearner

MODEL = "model"
SAMPLE = "sample"
SIGNATURE = "signature"
OUTCOME = "outcome"
"""Reason for not learning from a report: its model is not tracked, or the named part is invalid."""


class LearntTables(NamedTuple):
    """Summary of one model's learnt state, for display."""

    clusters: tuple[ClusterPopularity, ...]
    sources: tuple[SourceQuality, ...]
    gain: float
    outcomes: int
    recall: float | None
    prior_recall: float | None
    stored_blocks: int
    stored_bytes: int


@dataclass(slots=True)
class _Learner:
    clusters: OnlineClusters
    learning: ModelLearner
    published: int = -1
    """version of the cluster model last published"""
    seen: ClusterModel | None = None
    popularity: tuple[ClusterPopularity, ...] = ()
    """of the model last seen"""


class Learners:
    """Clusters and tables of all models. `now` is seconds of one monotonic clock.

    first_version: start of published version numbers; a restarted tracker must not repeat one. meaning_from:
    signatures over older cluster models have a different meaning.
    """

    def __init__(
        self, config: TrackerConfig, first_version: int = 1, meaning_from: int | None = None
    ) -> None:
        self.meaning_from = first_version if meaning_from is None else meaning_from
        self._config = config
        self._first_version = first_version
        self._learners: dict[str, _Learner] = {}
        self._shapes: dict[str, tuple[int, int]] = {}

    def follow(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Track exactly these models, with (layers, experts) each. A different shape is a different model and
        starts from scratch.
        """
        for name in [name for name in self._learners if shapes.get(name) != self._shapes[name]]:
            del self._learners[name], self._shapes[name]
        for name, (layers, experts) in shapes.items():
            if name not in self._learners:
                clusters = OnlineClusters(self._config, layers, experts, self._first_version)
                self._add(
                    name,
                    (layers, experts),
                    _Learner(clusters, ModelLearner(self._config, self._first_version)),
                )

    def _add(self, name: str, shape: tuple[int, int], learner: _Learner) -> None:
        learner.learning.adopt(learner.clusters.model, [])
        self._learners[name], self._shapes[name] = learner, shape

    # Learning

    def profiled(self, report: RequestsProfiled, now: float) -> Counter[str]:
        """Learn from a rank's report. Returns the number of unusable requests by reason."""
        learner, refused = self._learners.get(report.model), Counter[str]()
        if learner is None:
            return Counter({MODEL: len(report.requests)})
        for profile in report.requests:
            self._sampled(learner, profile, now, refused)
            if report.clusters >= self.meaning_from:
                self._mixed(learner, report.clusters, profile, now, refused)
        return refused

    def _sampled(self, learner: _Learner, profile: RequestProfile, now: float, refused: Counter[str]) -> None:
        if profile.sample is not None:
            try:
                learner.clusters.learn(profile.sample.prompt.array(), profile.sample.completion.array(), now)
            except ValueError:
                refused[SAMPLE] += 1

    def _mixed(
        self, learner: _Learner, version: int, profile: RequestProfile, now: float, refused: Counter[str]
    ) -> None:
        try:
            learner.learning.profiled(profile, version, now)
            learner.clusters.mixed(
                unpack(profile.signature, learner.clusters.model.shares), profile.tokens, now
            )
        except ValueError:
            refused[SIGNATURE] += 1

    def finished(self, report: RequestsFinished, now: float) -> Counter[str]:
        """Learn from a router's report. Returns the number of unusable requests by reason."""
        learner, refused = self._learners.get(report.model), Counter[str]()
        if learner is None:
            return Counter({MODEL: len(report.requests)})
        for outcome in report.requests:
            try:
                learner.learning.finished(outcome, now)
            except ValueError:
                refused[OUTCOME] += 1
        return refused

    # Fitting: a job is created here, run in any thread, and its result returned

    def due(self, now: float) -> list[tuple[str, OnlineClusters, Refit | None]]:
        """Return each model's refit, if one is due. The job is immutable; the clusters are only for
        `adopt`."""
        return [
            (name, learner.clusters, learner.clusters.due(now)) for name, learner in self._learners.items()
        ]

    def adopt(self, name: str, clusters: OnlineClusters, fitted: RefitResult | None, now: float) -> None:
        """Adopt a refit (None: none was due), unless its clusters have been dropped meanwhile."""
        learner = self._learners.get(name)
        if learner is None or learner.clusters is not clusters:
            return
        before, changes = clusters.model, clusters.adopt(fitted, now)
        if changes or clusters.model is not before:
            learner.learning.adopt(clusters.model, changes)

    # Publishing

    def changes(self) -> list[ClustersPublished | TablesPublished]:
        """Return the changes since the last call."""
        changes: list[ClustersPublished | TablesPublished] = []
        for name, learner in self._learners.items():
            if learner.published != learner.clusters.model.version:
                learner.published = learner.clusters.model.version
                changes.append(ClustersPublished(model=name, record=learner.clusters.model.record()))
            if (change := learner.learning.change(name)) is not None:
                changes.append(change)
        return changes

    def clusters(self, name: str) -> ClustersPublished | None:
        """Return a model's clusters; None for an untracked model."""
        learner = self._learners.get(name)
        return (
            None if learner is None else ClustersPublished(model=name, record=learner.clusters.model.record())
        )

    def tables(self, name: str) -> TablesPublished | None:
        """Return a model's snapshot of tables; None for an untracked model."""
        learner = self._learners.get(name)
        return None if learner is None else learner.learning.snapshot(name)

    def learnt(self, name: str) -> LearntTables | None:
        """Return the summary of a model; None for an untracked model."""
        learner = self._learners.get(name)
        if learner is None:
            return None
        learning = learner.learning
        if learner.seen is not learner.clusters.model:
            learner.seen, learner.popularity = learner.clusters.model, popularity(learner.clusters.model)
        return LearntTables(
            clusters=learner.popularity,
            sources=learning.sources(),
            gain=learning.gain,
            outcomes=learning.outcomes,
            recall=learning.recall,
            prior_recall=learning.prior_recall,
            stored_blocks=learning.stored_blocks,
            stored_bytes=learning.stored_bytes + learner.clusters.stored_bytes,
        )

    def all_learnt(self) -> dict[str, LearntTables]:
        """Return the summary of each model."""
        return {name: learnt for name in self._learners if (learnt := self.learnt(name)) is not None}

    # Saving and restoring

    def state(self) -> dict[str, Any]:
        """Return the complete state by model, for msgpack."""
        return {
            name: {"clusters": learner.clusters.state(), "learning": learner.learning.state()}
            for name, learner in self._learners.items()
        }

    def restore(self, name: str, shape: tuple[int, int], state: dict[str, Any]) -> None:
        """Restore one model from `state`. ValueError if that fails; the model is then learnt from scratch."""
        try:
            # A version above all published ones: versions published after the state was saved are not known
            # any more.
            clusters = OnlineClusters.restore(
                self._config, {**state["clusters"], "version": self._first_version}
            )
            learning = ModelLearner.restore(self._config, state["learning"], self._first_version)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no state of what was learnt: {error}") from error
        if clusters.model.profiles.shape[1:] != shape:
            raise ValueError(f"clusters of shape {clusters.model.profiles.shape[1:]} for a model of {shape}")
        self._add(name, shape, _Learner(clusters, learning))


def popularity(model: ClusterModel) -> tuple[ClusterPopularity, ...]:
    """Return the clusters in use, highest traffic first."""
    used = np.argsort(-model.shares, kind="stable")
    return tuple(
        ClusterPopularity(
            cluster=int(slot),
            share=float(model.shares[slot]),
            distance=float(
                divergence_by_layer(
                    model.profiles[slot].astype(np.float64), model.mean.astype(np.float64)
                ).mean()
            ),
        )
        for slot in used
        if model.shares[slot] > 0
    )
