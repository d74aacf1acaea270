"""What is learnt of every model: its clusters and its prediction tables, from requests that ranks profiled and routers saw to their end. Pure.

Owned by one thread: nothing here is called from another one while a call lasts. What is given out never changes afterwards.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fleet.events import ClusterPopularity, ClustersPublished, RequestProfile, RequestsFinished, RequestsProfiled, SourceQuality, TablesPublished
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
"""Why something was not learnt from: nobody follows its model, or the named part of it cannot be true."""


class LearntTables(NamedTuple):
    """What is known of one model, for people."""

    clusters: tuple[ClusterPopularity, ...]
    sources: tuple[SourceQuality, ...]
    gain: float
    outcomes: int
    recall: float | None
    prior_recall: float | None
    stored_blocks: int
    stored_bytes: int


@dataclass(slots=True)
class _Lesson:
    clusters: OnlineClusters
    learning: ModelLearner
    told: int = -1
    """version of the cluster model last told"""
    seen: ClusterModel | None = None
    popularity: tuple[ClusterPopularity, ...] = ()
    """of the model last seen"""


class Learners:
    """Clusters and tables of all models. `now` is seconds of one clock that never goes back.

    first_version: what is published counts from here; a restarted tracker must not repeat a version. meaning_from: signatures over cluster
    models older than this version mean something else.
    """

    def __init__(self, config: TrackerConfig, first_version: int = 1, meaning_from: int | None = None) -> None:
        self.meaning_from = first_version if meaning_from is None else meaning_from
        self._config = config
        self._first_version = first_version
        self._lessons: dict[str, _Lesson] = {}
        self._shapes: dict[str, tuple[int, int]] = {}

    def follow(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """These models are followed, (layers, experts) each; another shape than before is another model, which is learnt anew."""
        for name in [name for name in self._lessons if shapes.get(name) != self._shapes[name]]:
            del self._lessons[name], self._shapes[name]
        for name, (layers, experts) in shapes.items():
            if name not in self._lessons:
                clusters = OnlineClusters(self._config, layers, experts, self._first_version)
                self._add(name, (layers, experts), _Lesson(clusters, ModelLearner(self._config, self._first_version)))

    def _add(self, name: str, shape: tuple[int, int], lesson: _Lesson) -> None:
        lesson.learning.adopt(lesson.clusters.model, [])
        self._lessons[name], self._shapes[name] = lesson, shape

    # Learning

    def profiled(self, said: RequestsProfiled, now: float) -> Counter[str]:
        """Learn from what a rank said; how much of it could not be used, by reason."""
        lesson, refused = self._lessons.get(said.model), Counter[str]()
        if lesson is None:
            return Counter({MODEL: len(said.requests)})
        for profile in said.requests:
            self._sampled(lesson, profile, now, refused)
            if said.clusters >= self.meaning_from:
                self._mixed(lesson, said.clusters, profile, now, refused)
        return refused

    def _sampled(self, lesson: _Lesson, profile: RequestProfile, now: float, refused: Counter[str]) -> None:
        if profile.sample is not None:
            try:
                lesson.clusters.learn(profile.sample.prompt.array(), profile.sample.completion.array(), now)
            except ValueError:
                refused[SAMPLE] += 1

    def _mixed(self, lesson: _Lesson, version: int, profile: RequestProfile, now: float, refused: Counter[str]) -> None:
        try:
            lesson.learning.profiled(profile, version, now)
            lesson.clusters.mixed(unpack(profile.signature, lesson.clusters.model.shares), profile.tokens, now)
        except ValueError:
            refused[SIGNATURE] += 1

    def finished(self, said: RequestsFinished, now: float) -> Counter[str]:
        """Learn from what a router said; how much of it could not be used, by reason."""
        lesson, refused = self._lessons.get(said.model), Counter[str]()
        if lesson is None:
            return Counter({MODEL: len(said.requests)})
        for outcome in said.requests:
            try:
                lesson.learning.finished(outcome, now)
            except ValueError:
                refused[OUTCOME] += 1
        return refused

    # Fitting: a job is made here, run anywhere, and its result brought back

    def due(self, now: float) -> list[tuple[str, OnlineClusters, Refit | None]]:
        """For each model its refinement, if one is due. The job never changes; the clusters are for `adopt` alone."""
        return [(name, lesson.clusters, lesson.clusters.due(now)) for name, lesson in self._lessons.items()]

    def adopt(self, name: str, clusters: OnlineClusters, fitted: RefitResult | None, now: float) -> None:
        """Take over a refinement (None: none was due) of clusters that may be gone meanwhile."""
        lesson = self._lessons.get(name)
        if lesson is None or lesson.clusters is not clusters:
            return
        before, changes = clusters.model, clusters.adopt(fitted, now)
        if changes or clusters.model is not before:
            lesson.learning.adopt(clusters.model, changes)

    # Telling

    def news(self) -> list[ClustersPublished | TablesPublished]:
        """What changed since the last call."""
        said: list[ClustersPublished | TablesPublished] = []
        for name, lesson in self._lessons.items():
            if lesson.told != lesson.clusters.model.version:
                lesson.told = lesson.clusters.model.version
                said.append(ClustersPublished(model=name, record=lesson.clusters.model.record()))
            if (change := lesson.learning.change(name)) is not None:
                said.append(change)
        return said

    def clusters(self, name: str) -> ClustersPublished | None:
        """A model's clusters; None for a model nobody follows."""
        lesson = self._lessons.get(name)
        return None if lesson is None else ClustersPublished(model=name, record=lesson.clusters.model.record())

    def tables(self, name: str) -> TablesPublished | None:
        """A model's whole tables; None for a model nobody follows."""
        lesson = self._lessons.get(name)
        return None if lesson is None else lesson.learning.whole(name)

    def learnt(self, name: str) -> LearntTables | None:
        """What is known of a model; None for a model nobody follows."""
        lesson = self._lessons.get(name)
        if lesson is None:
            return None
        learning = lesson.learning
        if lesson.seen is not lesson.clusters.model:
            lesson.seen, lesson.popularity = lesson.clusters.model, popularity(lesson.clusters.model)
        return LearntTables(
            clusters=lesson.popularity,
            sources=learning.sources(),
            gain=learning.gain,
            outcomes=learning.outcomes,
            recall=learning.recall,
            prior_recall=learning.prior_recall,
            stored_blocks=learning.stored_blocks,
            stored_bytes=learning.stored_bytes + lesson.clusters.stored_bytes,
        )

    def all_learnt(self) -> dict[str, LearntTables]:
        """What is known of each model."""
        return {name: learnt for name in self._lessons if (learnt := self.learnt(name)) is not None}

    # Keeping it

    def state(self) -> dict[str, Any]:
        """Everything by model, in what msgpack can say."""
        return {name: {"clusters": lesson.clusters.state(), "learning": lesson.learning.state()} for name, lesson in self._lessons.items()}

    def restore(self, name: str, shape: tuple[int, int], state: dict[str, Any]) -> None:
        """Go on with one model as `state` has it. ValueError when that cannot be; then the model is learnt anew."""
        try:
            # A version above all that were given: those after the state was taken are not known any more.
            clusters = OnlineClusters.restore(self._config, {**state["clusters"], "version": self._first_version})
            learning = ModelLearner.restore(self._config, state["learning"], self._first_version)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no state of what was learnt: {error}") from error
        if clusters.model.profiles.shape[1:] != shape:
            raise ValueError(f"clusters of shape {clusters.model.profiles.shape[1:]} for a model of {shape}")
        self._add(name, shape, _Lesson(clusters, learning))


def popularity(model: ClusterModel) -> tuple[ClusterPopularity, ...]:
    """The clusters in use, most traffic first."""
    used = np.argsort(-model.shares, kind="stable")
    return tuple(
        ClusterPopularity(
            cluster=int(slot),
            share=float(model.shares[slot]),
            distance=float(divergence_by_layer(model.profiles[slot].astype(np.float64), model.mean.astype(np.float64)).mean()),
        )
        for slot in used
        if model.shares[slot] > 0
    )
