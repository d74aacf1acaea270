"""Learnt prediction tables of one model: rows of prefixes, sessions and tenants, token table, source weights
and gain.

Every request is reported twice: by the rank that served it (its activations), and by the router that sent it
(its features and prediction). This module joins the two reports, and returns the tables as snapshots or
deltas. Pure.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import ByteArray, Float32Array
from fleet.facts.activity import RequestOutcome, RequestProfile
from fleet.facts.demand import KeyedRows, TablesPublished
from fleet.prediction import SOURCES, Query, Tables, know
from fleet.requests.demand import SourceQuality
from fleet.signatures import ClusterModel, pack, unpack
from tracker.clustering.refit import ClusterMerge, ClusterSplit
from tracker.config import TrackerConfig
from tracker.prediction.calibration import Calibration
from tracker.prediction.cluster_remap import RemapHistory, SlotChange, carried, carried_weights, dense
from tracker.prediction.report_join import ReportJoin
from tracker.prediction.report_parsing import Blocks, PendingOutcome, PendingProfile, outcome_of, profile_of
from tracker.prediction.row_cache import RowCache, cell
from tracker.prediction.source_weights import SourceWeights
from tracker.prediction.token_table import TokenTable

HALF = 64.0
"""Computed tokens at which an observed signature counts half."""
ROW_SECONDS = 7200.0
"""An unused prefix, session or tenant row expires after this time."""
TOKEN_SECONDS = 14400.0
"""Time constant of the token table."""
WAITING_SECONDS = 120.0
"""A report of rank or router waits this long for the other side's report of the same request."""
SESSION_TOKENS = 1024.0
TENANT_TOKENS = 16384.0
"""Limits of the weight of earlier requests, in tokens, so that a session or a tenant may change."""
HEAD = 0.01
"""Source weights, reliabilities, gain and shares are published again when one changed by this much."""
_ENGINE, _ROUTER = 0, 1
_FORMAT = 2
_NO_WEIGHTS = np.zeros(len(SOURCES), np.float32)
"""Placeholder for source weights, in tables that are used only to collect evidence."""


class _Head(NamedTuple):
    """Content common to all messages."""

    clusters: int
    shares: Float32Array
    weights: NDArray[np.float32]
    reliability: NDArray[np.float32]
    gain: float
    gains: NDArray[np.float32]
    """[K]"""

    def near(self, other: "_Head") -> bool:
        pairs = (
            (self.shares, other.shares),
            (self.weights, other.weights),
            (self.reliability, other.reliability),
            (self.gains, other.gains),
        )
        moved = max(abs(self.gain - other.gain), *(float(np.abs(one - two).max()) for one, two in pairs))
        return self.clusters == other.clusters and moved < HEAD


class ModelLearner:
    """One model's prediction tables. `now` is seconds of one monotonic clock.

    first_version: start of the tables' version numbers; a restarted tracker must not repeat them. An unusable
    report raises ValueError, which names the field, and changes nothing.
    """

    def __init__(self, config: TrackerConfig, first_version: int = 1) -> None:
        clusters, life, changes = config.clusters, ROW_SECONDS, config.max_changes
        self._config = config
        self._version = first_version
        self._history = RemapHistory()
        self._blocks = RowCache(config.prefix_bytes, life, changes)
        self._sessions = RowCache(config.session_bytes, life, changes, 2 * clusters)
        self._tenants = RowCache(config.tenant_bytes, life, changes, 2 * clusters)
        self._tokens = TokenTable(config.token_bytes, clusters, TOKEN_SECONDS)
        fields = (len(PendingProfile._fields), len(PendingOutcome._fields))
        self._pairs = ReportJoin(config.waiting_bytes, config.max_waiting, WAITING_SECONDS, fields)
        self._source_weights = SourceWeights(config.memory_outcomes)
        self._calibration = Calibration(config.memory_outcomes, clusters)
        self._head: _Head | None = None
        self._needs_snapshot = False
        self.repeated = 0
        """duplicate reports, ignored"""
        self.orphans = 0
        """blocks that continue an unknown prefix"""
        self.stale = 0
        """profiles over clusters that are no longer usable"""

    # Quality

    @property
    def source_weights(self) -> NDArray[np.float32]:
        """float32 [sources]"""
        return self._source_weights.values

    @property
    def reliability(self) -> NDArray[np.float32]:
        """float32 [sources]"""
        return self._source_weights.reliability

    @property
    def gain(self) -> float:
        return self._calibration.gain

    @property
    def gains(self) -> NDArray[np.float32]:
        """float32 [K]"""
        return self._calibration.gains

    @property
    def outcomes(self) -> int:
        """Requests whose prediction was compared with the measured activations."""
        return self._calibration.outcomes

    @property
    def recall(self) -> float | None:
        return self._calibration.recall

    @property
    def prior_recall(self) -> float | None:
        return self._calibration.prior_recall

    def sources(self) -> tuple[SourceQuality, ...]:
        """Return for each source: outcomes with evidence, weight, reliability."""
        parts = zip(
            SOURCES,
            self._source_weights.spoken,
            self.source_weights.tolist(),
            self.reliability.tolist(),
            strict=True,
        )
        return tuple(
            SourceQuality(source=source, requests=spoken, trust=weight, reliability=reliability)
            for source, spoken, weight, reliability in parts
        )

    @property
    def version(self) -> int:
        """Version of the tables."""
        return self._version

    @property
    def waiting(self) -> int:
        """Reports that wait for the other side's report."""
        return len(self._pairs)

    @property
    def given_up(self) -> int:
        """Reports without the other side's report in time."""
        return self._pairs.given_up

    @property
    def stored_blocks(self) -> int:
        return len(self._blocks)

    @property
    def stored_bytes(self) -> int:
        """Bytes of learnt data."""
        return sum(table.filled_bytes for table in (*self._keyed, self._tokens)) + self._pairs.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        return sum(table.nbytes for table in (*self._keyed, self._tokens)) + self._pairs.nbytes

    # Clusters

    def adopt(self, model: ClusterModel, changes: Sequence[ClusterSplit | ClusterMerge] = ()) -> None:
        """Adopt another version of the clusters. changes: splits and merges on the way to it, in order.

        ValueError if it is older than the previous one, or has another shape.
        """
        if model.clusters != self._config.clusters:
            raise ValueError(
                f"cluster model: {model.clusters} clusters; tracker.clusters is {self._config.clusters}"
            )
        for change in self._history.adopt(model, changes):
            self._carry(change)

    def _carry(self, change: SlotChange) -> None:
        def packed(cells: NDArray[Any]) -> NDArray[Any]:
            after = cells.copy()
            after["packed"] = carried(cells["packed"], change)
            return after

        def exact(cells: NDArray[Any]) -> NDArray[Any]:
            return _cells(carried_weights(_weights(cells), change), cells["tokens"])

        self._blocks.rewrite(packed)
        self._sessions.rewrite(exact)
        self._tenants.rewrite(exact)
        self._tokens.move(change.source, change.target, change.share)
        self._calibration.move(change.source, change.target, change.share)
        self._needs_snapshot = True

    # Reports

    def profiled(self, profile: RequestProfile, clusters_version: int, now: float) -> None:
        """Add the activations of a request, over the clusters of a version; 0: none, which is unusable."""
        if clusters_version == 0:
            self.stale += 1
            return
        since = self._history.since(clusters_version)
        part, blocks = profile_of(profile, clusters_version, self._config.clusters, self._model.mean.shape)
        if profile.decision and self._pairs.repeated(_ENGINE, profile.decision):
            self.repeated += 1
        elif since is None:
            self.stale += 1
        else:
            self._learn_blocks(blocks, since, now)
            other = self._pairs.offer(_ENGINE, profile.decision, part, now) if profile.decision else None
            if other is not None:
                self._learn(part, PendingOutcome(*other), now)

    def finished(self, outcome: RequestOutcome, now: float) -> None:
        """Add a router's features and prediction of a request."""
        part = outcome_of(outcome, self._config.clusters)
        if self._pairs.repeated(_ROUTER, outcome.decision):
            self.repeated += 1
            return
        other = self._pairs.offer(_ROUTER, outcome.decision, part, now)
        if other is not None:
            self._learn(PendingProfile(*other), part, now)

    # Learning

    def _learn_blocks(self, blocks: Blocks, since: list[SlotChange], now: float) -> None:
        """Add the rows of blocks. A prefix's row is the token-weighted mean over all its blocks."""
        above = None if blocks.parent is None else self._blocks.cell(blocks.parent)
        if above is not None:
            self._blocks.touch(blocks.parent or 0, now)
        if not len(blocks.keys):
            return
        if blocks.parent is not None and above is None:
            self.orphans += len(blocks.keys)
            return
        tokens = 0.0 if above is None else float(above["tokens"])
        before = 0.0 if above is None else unpack(above["packed"].tobytes(), self._shares) * tokens
        # The signature of a prefix is the token-weighted mean over its blocks: running sums, continued from
        # the row of the parent block, divided by the tokens behind each block.
        summed = before + blocks.size * np.cumsum(
            dense(_through(blocks.signatures, since), self._shares), axis=0, dtype=np.float64
        )
        behind = tokens + blocks.size * np.arange(1, len(blocks.keys) + 1)
        cells = np.zeros(len(blocks.keys), cell(0))
        cells["packed"] = pack(summed / behind[:, None])
        cells["tokens"] = np.minimum(behind, 0xFFFFFFFF)
        self._blocks.put(blocks.keys, cells, now, blocks.parent or 0)

    @property
    def _model(self) -> ClusterModel:
        if self._history.model is None:
            raise ValueError("clusters: no model was adopted yet")
        return self._history.model

    @property
    def _shares(self) -> Float32Array:
        return self._model.shares

    def _learn(self, profile: PendingProfile, outcome: PendingOutcome, now: float) -> None:
        """Learn from both sides of a request: judge the tables first, then update them."""
        since = self._history.since(profile.version)
        if since is None or not profile.tokens:
            self.stale += since is None
            return
        observed = unpack(
            _through(np.frombuffer(profile.signature, np.uint8)[None], since).tobytes(), self._shares
        )
        weight = profile.tokens / (profile.tokens + HALF)
        ids = np.frombuffer(outcome.tokens, "<u4").astype(np.int64) % self._tokens.buckets
        # Unpack the token rows of this request once per distinct bucket; `places` maps tokens to these rows.
        buckets, places, repeats = np.unique(ids, return_inverse=True, return_counts=True)
        tables = self._tables(self._tokens.ratios(buckets))
        prefix = (outcome.prefix,) if outcome.prefix else ()
        known = know(tables, Query(prefix, places.tolist(), 0, outcome.session, outcome.tenant))
        self._source_weights.learn(tables.log_shares, known, observed, weight)
        self._evaluate(profile, outcome, weight)
        self._tokens.learn(buckets, repeats, observed, weight, now)
        self._update_rows(
            (
                (self._sessions, outcome.session, SESSION_TOKENS),
                (self._tenants, outcome.tenant, TENANT_TOKENS),
            ),
            observed,
            profile.tokens,
            now,
        )
        self._blocks.touch(outcome.prefix, now)

    def _tables(self, ratios: NDArray[np.float32]) -> Tables:
        """Return the tables before the update. ratios [n, K]: of the token table, only the requested rows."""
        return Tables(
            version=self._version,
            clusters=0,
            shares=self._shares,
            blocks=self._blocks,
            sessions=self._sessions,
            tenants=self._tenants,
            tokens=ratios,
            source_weights=_NO_WEIGHTS,
            reliability=_NO_WEIGHTS,
        )

    def _evaluate(self, profile: PendingProfile, outcome: PendingOutcome, weight: float) -> None:
        """Compare prediction and observation, as far as both exist (under TP all ranks are equally near, and
        nothing is predicted).
        """
        predicted = unpack(outcome.predicted, self._shares)
        if (
            profile.local is not None
            and outcome.predicted_local is not None
            and outcome.prior_local is not None
        ):
            self._calibration.learn(
                outcome.predicted_local, outcome.prior_local, profile.local, weight, outcome.spread, predicted
            )
        if profile.sample:
            counts = np.frombuffer(profile.sample, "<u4").reshape(self._model.mean.shape)
            self._calibration.sampled(counts, self._model.expected(predicted), self._model.mean)

    def _update_rows(
        self, updated: Sequence[tuple[RowCache, int, float]], observed: Float32Array, tokens: int, now: float
    ) -> None:
        """Update the rows of a session and a tenant: means of their requests' signatures, with limited weight
        of the past.
        """
        named = [(table, key, limit, table.cell(key)) for table, key, limit in updated if key]
        weights, behind = np.empty((len(named), len(observed)), np.float32), []
        for line, (_, _, limit, before) in enumerate(named):
            old = 0.0 if before is None else min(float(before["tokens"]), limit)
            new = min(float(tokens), limit)
            weights[line] = (
                observed
                if before is None
                else (_weights(before[None])[0] * old + observed * new) / (old + new)
            )
            behind.append(old + new)
        cells = _cells(weights, np.array(behind))  # packed together: one call costs as much as one row
        for line, (table, key, _, _) in enumerate(named):
            table.put_one(key, cells[line : line + 1], now)

    # Publishing

    def snapshot(self, name: str) -> TablesPublished:
        """Return the tables as last published. ValueError before clusters were adopted."""
        head = self._head = self._head or self._now()
        buckets, ratios = self._tokens.published()
        rows = [
            KeyedRows(keys=keys.tobytes(), rows=rows.tobytes())
            for keys, rows in (table.all() for table in self._keyed)
        ]
        return self._message(name, head, None, buckets, ratios, rows)

    def change(self, name: str) -> TablesPublished | None:
        """Return the changes since the last call, under the next version; a snapshot if too many; None
        without changes.
        """
        head = self._now()
        if self._needs_snapshot or any(table.overflown for table in self._keyed):
            return self._new_snapshot(name, head)
        taken = [table.take() for table in self._keyed]
        buckets, ratios = self._tokens.change(self._config.max_token_changes)
        if (
            self._head is not None
            and self._head.near(head)
            and not len(buckets)
            and not any(len(keys) for keys, _ in taken)
        ):
            return None
        self._head = head
        self._version += 1
        rows = [KeyedRows(keys=keys.tobytes(), rows=rows.tobytes()) for keys, rows in taken]
        return self._message(name, head, self._version - 1, buckets, ratios, rows)

    def _new_snapshot(self, name: str, head: _Head) -> TablesPublished:
        self._head, self._needs_snapshot = head, False
        self._version += 1
        self._tokens.publish_all()
        for table in self._keyed:
            table.take()
        return self.snapshot(name)

    @property
    def _keyed(self) -> tuple[RowCache, RowCache, RowCache]:
        return self._blocks, self._sessions, self._tenants

    def _now(self) -> _Head:
        return _Head(
            self._model.version,
            self._shares,
            self._source_weights.table,
            self.reliability,
            self.gain,
            self.gains,
        )

    def _message(
        self,
        name: str,
        head: _Head,
        base: int | None,
        buckets: NDArray[np.uint32],
        ratios: NDArray[np.float16],
        rows: list[KeyedRows],
    ) -> TablesPublished:
        return TablesPublished(
            model=name,
            version=self._version,
            base=base,
            clusters=head.clusters,
            shares=head.shares.astype("<f4").tobytes(),
            trust=dict(zip(SOURCES, head.weights[0].tolist(), strict=True)),
            trusts=head.weights.astype("<f4").tobytes(),
            reliability=dict(zip(SOURCES, head.reliability.tolist(), strict=True)),
            gain=head.gain,
            gains=head.gains.astype("<f4").tobytes(),
            buckets=self._tokens.buckets,
            token_rows=buckets.astype("<u4").tobytes(),
            token_ratios=ratios.astype("<f2").tobytes(),
            blocks=rows[0],
            sessions=rows[1],
            tenants=rows[2],
        )

    # Saving and restoring

    @property
    def _parts(
        self,
    ) -> dict[str, RowCache | TokenTable | ReportJoin | SourceWeights | Calibration | RemapHistory]:
        return {
            "blocks": self._blocks,
            "sessions": self._sessions,
            "tenants": self._tenants,
            "tokens": self._tokens,
            "pairs": self._pairs,
            "trust": self._source_weights,
            "calibration": self._calibration,
            "history": self._history,
        }

    def state(self) -> dict[str, Any]:
        """Return the complete state without the cluster model, for msgpack."""
        counted = [self.repeated, self.orphans, self.stale]
        return {"format": _FORMAT, "version": self._version, "counted": counted} | {
            name: part.state() for name, part in self._parts.items()
        }

    @classmethod
    def restore(
        cls, config: TrackerConfig, state: dict[str, Any], first_version: int = 0, later: float = 0.0
    ) -> "ModelLearner":
        """Restore a learner. Adopt the cluster model next; then a snapshot is published.

        first_version: of the tables, if above the saved one. later: seconds by which this clock is ahead of
        the clock of the state. ValueError if the state is invalid or does not fit the settings.
        """
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise ValueError(f"learning: not a state of format {_FORMAT}. Start without it")
        learning = cls(config, first_version)
        try:
            learning._version = max(first_version, int(state["version"]))
            for name, part in learning._parts.items():
                if isinstance(part, (RowCache, TokenTable, ReportJoin)):
                    part.take_over(state[name], later)
                else:
                    part.take_over(state[name])
            learning.repeated, learning.orphans, learning.stale = (int(count) for count in state["counted"])
        except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
            raise ValueError(f"learning: the state lacks or garbles {error}. Start without it") from error
        learning._needs_snapshot = True
        return learning


def _through(packed: ByteArray, since: list[SlotChange]) -> ByteArray:
    """Convert packed signatures [n, PACKED] to the present clusters."""
    for change in since:
        packed = carried(packed, change)
    return packed


def _weights(cells: NDArray[Any]) -> NDArray[np.float32]:
    """Return the weights of session or tenant rows, at higher precision than packed: float32 [n, K]."""
    return np.ascontiguousarray(cells["extra"]).view("<f2").astype(np.float32)


def _cells(weights: NDArray[Any], tokens: NDArray[Any]) -> NDArray[Any]:
    """Return rows [n] of sessions or tenants."""
    cells = np.zeros(len(weights), cell(2 * weights.shape[1]))
    cells["packed"], cells["tokens"] = pack(weights), np.maximum(tokens, 1.0)
    cells["extra"] = np.ascontiguousarray(weights, "<f2").view(np.uint8)
    return cells
