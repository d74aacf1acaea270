"""Predictor of the experts that a request will activate: synchronous, before routing, from the replicas of
the tracker's tables. Pure.

Keys. Sessions and tenants are known only by hashes: xxh3_64 of a text whose parts are tagged by kind and
ended by a zero byte. session = "session", tenant, session: one name under two tenants is two sessions. tenant
= "tenant", tenant, "lora", requested model, "route", path: the requests of a tenant to one model (or LoRA
adapter) on one route; a request without a tenant has the key of its model and route alone. 0 means none, and
is never the hash of anything.
"""

from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from fleet.arrays import Float32Array
from fleet.prediction import (
    MAX_TOKENS,
    SOURCES,
    TOKEN_WEIGHTS,
    Query,
    Tables,
    confidence,
    confidences,
    longest_known,
    predict,
)
from fleet.signatures import ClusterModel
from router import kernels
from router.prediction.row_table import RowTable
from router.prediction.table_replica import TableChange, TableReplica
from router.prefix_index.block_hash_chain import BlockHashChain

NAMED_CLUSTERS = 4
"""Clusters that a decision's record names, heaviest first."""
PREFILL = "prefill"
"""Source of what a prefill worker reported: no prediction, but activations of the request's own prompt."""
NAMED_EXPERTS = 4
"""Experts of each layer that a decision's record names, most likely first."""
UNKNOWN_MODEL = "no prediction tables of this model yet: experts are not priced"
NO_GAIN = "the gain is 0: prediction has not proved itself, and experts are not priced"


class PredictionKeys(msgspec.Struct, frozen=True):
    """Hashes of the sender's identity; 0: unknown."""

    session: int = 0
    tenant: int = 0


NO_KEYS = PredictionKeys()


def keys_of(session: str | None, tenant: str | None, model: str, path: str) -> PredictionKeys:
    """Compute the keys; see the module docstring. Empty names count as none."""
    owner = tenant or ""
    return PredictionKeys(
        _hash("session", owner, session) if session else 0,
        _tenant_key(owner, model, path),
    )


@lru_cache(maxsize=1024)
def _tenant_key(tenant: str, model: str, path: str) -> int:
    return _hash("tenant", tenant, "lora", model, "route", path)


def _hash(*parts: str) -> int:
    return xxhash.xxh3_64_intdigest("\0".join((*parts, "")).encode("utf-8", "surrogatepass")) or 1


class KnownPrompt(NamedTuple):
    """Report of a prefill worker on the prompt: the share of its tokens, and their number. predicted: float32
    [K], weights predicted before.
    """

    share: float
    tokens: int
    predicted: Float32Array


class RequestPrediction(msgspec.Struct, frozen=True, eq=False):
    """A prediction as stored in a decision: without references to its tables, so that old ones can be freed.

    weights, shares: float32 [K]; gain: calibrated value of the expert term for this request; evidence
    (tokens) by source, in the order of `SOURCES`.
    """

    weights: Float32Array
    shares: Float32Array
    gain: float
    tables: int
    clusters: int
    blocks: int
    """known leading blocks"""
    prefix: int
    """sequence hash of the last of them; 0: none"""
    looked_up: slice
    """prompt tokens looked up in the token table"""
    evidence: tuple[float, ...]
    reliabilities: list[float]
    """by source"""
    prompt: KnownPrompt | None = None
    """None: no prefill worker reported what the prompt activated"""

    def with_prompt(self, signature: Float32Array, share: float, tokens: int) -> "RequestPrediction":
        """Return the prediction given the signature, float32 [K], of `tokens` tokens, a share of the prompt.

        Signatures are additive: the rest of the prompt counts as predicted. What was activated needs no
        calibration, so the gain and the confidence of that share are 1.
        """
        weights = np.float32(share) * signature + np.float32(1.0 - share) * self.weights
        gain = share + (1.0 - share) * self.gain
        return msgspec.structs.replace(
            self, weights=weights, gain=gain, prompt=KnownPrompt(share, tokens, self.weights)
        )

    @property
    def confidences(self) -> tuple[float, ...]:
        return confidences(self.reliabilities, self.evidence)

    @property
    def confidence(self) -> float:
        """In [0, 1], of all sources together."""
        predicted = confidence(self.reliabilities, self.evidence)
        share = 0.0 if self.prompt is None else self.prompt.share
        return share + (1.0 - share) * predicted

    @property
    def best(self) -> str:
        """Source with the most confidence (before any is earned, the first with evidence), or "mix"."""
        sure = self.confidences
        if self.prompt is not None and self.prompt.share >= max(sure):
            return PREFILL
        best = max(range(len(SOURCES)), key=lambda at: (sure[at], self.evidence[at] > 0, -at))
        return SOURCES[best] if self.evidence[best] > 0 else "mix"

    def record(self, clusters: ClusterModel | None) -> "PredictionRecord":
        """Return the form for readers. clusters: those used for the prediction, if they are still in
        memory."""
        heaviest = np.argsort(-self.weights, kind="stable")[:NAMED_CLUSTERS].tolist()
        sources = zip(SOURCES, self.evidence, self.confidences, strict=True)
        return PredictionRecord(
            clusters=[
                ClusterWeight(cluster=at, weight=float(self.weights[at]))
                for at in heaviest
                if self.weights[at] > 0
            ],
            known_blocks=self.blocks,
            prefix=str(self.prefix) if self.prefix else None,
            sources=[
                SourceRecord(source=name, evidence_tokens=seen, confidence=sure)
                for name, seen, sure in sources
                if seen > 0
            ]
            + self._prompt_source(),
            best=self.best,
            confidence=self.confidence,
            gain=self.gain,
            experts=[] if clusters is None else likely_experts(clusters, self.weights),
        )

    def _prompt_source(self) -> "list[SourceRecord]":
        known = self.prompt
        if known is None:
            return []
        return [SourceRecord(source=PREFILL, evidence_tokens=known.tokens, confidence=known.share)]


def likely_experts(clusters: ClusterModel, weights: Float32Array) -> "list[LayerExperts]":
    """Return the NAMED_EXPERTS most likely experts of each layer under weights, float32 [K], most likely
    first.
    """
    expected = clusters.expected(weights)
    named = np.argpartition(-expected, min(NAMED_EXPERTS, expected.shape[1]) - 1, axis=1)[:, :NAMED_EXPERTS]
    chances = np.take_along_axis(expected, named, axis=1)
    order = np.argsort(-chances, axis=1, kind="stable")
    sorted_pair = (
        np.take_along_axis(named, order, axis=1).tolist(),
        np.take_along_axis(chances, order, axis=1).tolist(),
    )
    return [
        LayerExperts(layer=layer, experts=ids, shares=of)
        for layer, (ids, of) in enumerate(zip(*sorted_pair, strict=True))
    ]


class ClusterWeight(msgspec.Struct, frozen=True, kw_only=True):
    cluster: int
    weight: float


class LayerExperts(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of one layer that a request is expected to use most, with the share of its routed pairs for
    each.
    """

    layer: int
    experts: list[int]
    shares: list[float]


class SourceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A source with evidence: tokens of evidence, and its current reliability in [0, 1]."""

    source: str
    evidence_tokens: float
    confidence: float


class PredictionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction for a request, for readers. `prefix` is a u64 and therefore text."""

    clusters: list[ClusterWeight]
    """the heaviest, at most four"""
    known_blocks: int
    prefix: str | None
    sources: list[SourceRecord]
    best: str
    """the source with the most confidence, or "mix": nothing is known about the request"""
    confidence: float
    gain: float
    experts: list[LayerExperts] = []
    """by layer; empty: its clusters have been replaced since and are no longer in memory"""


class Pooled(msgspec.Struct, frozen=True):
    """Weights of the clusters, float32 [K], and the evidence behind them as in `SourceEvidence`."""

    weights: Float32Array
    evidence: tuple[float, ...]
    blocks: int
    hash: int
    looked_up: slice


def pooled(tables: Tables, query: Query) -> Pooled:
    """Return the prediction of a request: `fleet.prediction.predict`, compiled if that is possible."""
    library = kernels.compiled()
    if library is None or not isinstance(query.tokens, list):
        found = predict(tables, query)
        known = found.known
        return Pooled(found.weights, known.evidence, known.blocks, known.hash, known.looked_up)
    blocks, row = (
        tables.blocks.longest_known(query.prefix, query.guess)
        if isinstance(tables.blocks, RowTable) and isinstance(query.prefix, BlockHashChain)
        else longest_known(tables.blocks, query.prefix, query.guess)
    )
    start, tokens = blocks * query.block_size, len(query.tokens)
    first = min(start, tokens)
    last = min(start + MAX_TOKENS, tokens) if len(tables.tokens) else first
    weights = np.empty(len(tables.shares), np.float32)
    evidence = library.pool(
        len(weights),
        query.tokens,
        first,
        last,
        float(TOKEN_WEIGHTS[last - first]),
        len(tables.tokens),
        tables.patterns,
        tables.tokens,
        tables.log_shares,
        tables.shares,
        tables.source_weights,
        row,
        tables.session_row(query),
        tables.tenant_row(query),
        weights,
    )
    return Pooled(
        weights,
        evidence,
        blocks,
        query.prefix[blocks - 1] if blocks else 0,
        slice(start, start + MAX_TOKENS),
    )


class Predictor:
    """State: a replica per model. Models are those of engines that joined; `keep_only` drops the others."""

    def __init__(self, budget: int) -> None:
        """budget: bytes for the tables of one model."""
        self._budget = budget
        self._replicas: dict[str, TableReplica] = {}

    def predict(self, model: str, query: Query) -> RequestPrediction | None:
        """Predict a request. None without tables."""
        replica = self._replicas.get(model)
        if replica is None or replica.tables is None:
            return None
        tables = replica.tables
        found = pooled(tables, query)
        return RequestPrediction(
            found.weights,
            tables.shares,
            tables.gain_of(found.weights),
            tables.version,
            tables.clusters,
            found.blocks,
            found.hash,
            found.looked_up,
            found.evidence,
            tables.reliabilities,
        )

    def replica(self, model: str) -> TableReplica | None:
        return self._replicas.get(model)

    def prepare(self, change: TableChange) -> TableReplica:
        """Build a replica from a snapshot. Pure, and long enough to run in a thread. ValueError as in
        `TableReplica.prepare`.
        """
        return TableReplica(self._budget).prepare(change)

    def replace(self, model: str, replica: TableReplica) -> None:
        self._replicas[model] = replica

    def keep_only(self, models: set[str]) -> None:
        for model in [model for model in self._replicas if model not in models]:
            del self._replicas[model]

    def models(self) -> dict[str, TableReplica]:
        return dict(self._replicas)
