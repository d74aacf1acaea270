"""Router, rank and tracker around recorded requests, in one process from the real parts: the router predicts,
the rank reports, and the tracker learns from both, in the order of a real fleet."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.rig.alignment import aligned
from benchmarks.rig.traffic import Request
from engine_adapter.batching.profile_signatures import request_profiles
from engine_adapter.batching.routed_experts import RoutedTrace
from engine_adapter.engine import EndedRequest
from fleet.arrays import Float32Array
from fleet.blocks import BLOCK_SIZE
from fleet.facts.activity import RequestOutcome, RequestProfile
from fleet.facts.dynamo_kv import KvBlock
from fleet.prediction import Prediction, Query, Tables, predict
from fleet.signatures import ClusterModel, pack, unpack
from fleet.timing import expected_local_share
from router.prediction.table_replica import SLICE, TableReplica, read
from tracker.clustering.online_clusters import OnlineClusters
from tracker.config import TrackerConfig
from tracker.prediction.model_learner import ModelLearner

RANKS = 4
REPLICA_BYTES = 96 << 20
CONFIG = TrackerConfig(prefix_bytes=4 << 20, session_bytes=1 << 20)
"""default settings, with smaller tables for kinds of rows that are not used here"""
MODEL = "recorded"
Table = NDArray[np.float64]
SECONDS = 1.0
"""between two requests"""
PLANNED = 25
"""Requests between two placements."""


@dataclass
class Said:
    """Prediction of a request before it ran, and its true activations: data to fit the weight of a single
    source."""

    shares: Float32Array
    ratios: NDArray[np.float32]
    observed: Float32Array


@dataclass
class Fleet:
    """One model on one engine of RANKS ranks. `random` decides if a request is routed by prediction, or to
    any rank."""

    layers: int
    experts: int
    prompt: int
    random: np.random.Generator
    config: TrackerConfig = CONFIG
    now: float = 0.0
    served: int = 0
    said: list[Said] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clusters = OnlineClusters(self.config, self.layers, self.experts)
        self.learning = ModelLearner(self.config)
        self.learning.adopt(self.clusters.model, [])
        self.replica = TableReplica(REPLICA_BYTES).prepare(read(self.learning.snapshot(MODEL)))
        self.placement = aligned(self.clusters.model, RANKS)

    @property
    def model(self) -> ClusterModel:
        return self.clusters.model

    @property
    def tables(self) -> Tables:
        if self.replica.tables is None:
            raise RuntimeError("the replica has no tables although they were told")
        return self.replica.tables

    def ask(self, request: Request, *, tokens: bool = True) -> Prediction:
        return predict(self.tables, query(request, tokens=tokens))

    def copy(self) -> "Fleet":
        """Return a fleet with a restarted tracker that continues from this one's state."""
        other = Fleet(
            self.layers,
            self.experts,
            self.prompt,
            np.random.default_rng(0),
            self.config,
            self.now,
            self.served,
            list(self.said),
        )
        other.clusters = OnlineClusters.restore(self.config, self.clusters.state())
        other.learning = ModelLearner.restore(self.config, self.learning.state(), self.learning.version + 1)
        other.learning.adopt(other.clusters.model, [])
        other.placement = self.placement
        other.replica = TableReplica(REPLICA_BYTES).prepare(read(other.learning.snapshot(MODEL)))
        return other

    def leave_prefix(self, request: Request) -> None:
        """Pass a request of another client: the tracker learns its blocks, no router reports its end."""
        self.learning.profiled(self._profile(request, "", 0), self.model.version, self._tick())
        self._tell()

    def serve(self, request: Request, happens: Request | None = None) -> None:
        """Predict, choose a rank, run, learn. happens: activations that the ranks report instead of the
        request's own, under its name."""
        self.served += 1
        decision, prediction = f"{self.served}", self.ask(request)
        local, prior = (self._local(weights) for weights in (prediction.weights, self.tables.shares))
        rank = int(local.argmax()) if self.random.random() < 0.5 else int(self.random.integers(RANKS))
        profile = self._profile(request if happens is None else happens, decision, rank)
        self.said.append(
            Said(self.tables.shares, prediction.known.ratios, unpack(profile.signature, self.model.shares))
        )
        now = self._tick()
        self._learn(profile, now)
        self.learning.finished(_outcome(request, prediction, decision, rank, local, prior), now)
        self._refine(now)
        self._tell()

    def _tick(self) -> float:
        self.now += SECONDS
        return self.now

    def _local(self, weights: Float32Array) -> NDArray[np.float64]:
        """Return float64 [RANKS]: expected share of pairs that each rank serves itself."""
        return expected_local_share(
            self.model.expected(weights), self.placement, np.zeros(self.placement.ranks, np.intp)
        )

    def _profile(self, request: Request, decision: str, rank: int) -> RequestProfile:
        blocks = [KvBlock(block_hash=each, tokens_hash=each) for each in request.blocks]
        ended = EndedRequest(
            decision=decision,
            prompt_tokens=min(self.prompt, len(request.ids)),
            trace=RoutedTrace.of(request.computed),
            blocks=blocks,
        )
        sampled = [bool(decision)]
        return request_profiles(
            [ended],
            self.model,
            self.placement,
            rank,
            np.zeros(self.placement.ranks, np.intp),
            block_size=BLOCK_SIZE,
            max_blocks=4096,
            sampled=sampled,
        )[0]

    def _learn(self, profile: RequestProfile, now: float) -> None:
        if profile.sample is not None:
            self.clusters.learn(profile.sample.prompt.array(), profile.sample.completion.array(), now)
        self.learning.profiled(profile, self.model.version, now)
        self.clusters.mixed(unpack(profile.signature, self.model.shares), profile.tokens, now)

    def _refine(self, now: float) -> None:
        before, changes = self.model, self.clusters.refine(now)
        if self.model is not before:
            self.learning.adopt(self.model, changes)
        if self.served % PLANNED == 0:
            self.placement = aligned(self.model, RANKS, self.placement.epoch + 1)

    def _tell(self) -> None:
        published = self.learning.change(MODEL)
        if published is None:
            return
        change = read(published)
        if change.base is None:
            self.replica = self.replica.prepare(change)
            return
        for at in range(0, max(change.rows, 1), SLICE):
            self.replica.take(change, at)


def query(request: Request, *, tokens: bool = True) -> Query:
    return Query(request.hashes, request.ids if tokens else (), BLOCK_SIZE, request.session, request.tenant)


def _outcome(
    request: Request, prediction: Prediction, decision: str, rank: int, local: Table, prior: Table
) -> RequestOutcome:
    beside = local - prior
    return RequestOutcome(
        decision=decision,
        worker_id=1,
        rank=rank,
        prefix=prediction.known.hash,
        tokens=np.asarray(request.ids[prediction.known.looked_up], "<u4").tobytes(),
        session=request.session,
        tenant=request.tenant,
        predicted=pack(prediction.weights).tobytes(),
        predicted_local=float(local[rank]),
        prior_local=float(prior[rank]),
        spread=float(beside.max() - beside.mean()),
    )
