"""Read-only replica of the tracker's prediction tables of one model, bounded in bytes. Pure.

A message of the tracker is decoded and validated (`read`) before any part of it is applied, so decoding may
run in a thread. Applying is synchronous and changes the tables in place. A prediction between two steps
therefore sees one consistent state.
"""

from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import ByteArray, Float32Array, KeyArray
from fleet.facts.demand import KeyedRows, TablesPublished
from fleet.prediction import PATTERNS, ROW, SOURCES, Tables
from fleet.signatures import MAX_CLUSTERS
from router.prediction.row_table import RowTable

MAX_WEIGHT = 64.0
"""A larger trust is an error."""
SLICE = 2048
"""Rows applied in one step, about a millisecond."""
SESSIONS_SHARE, TENANTS_SHARE = 0.1, 0.02
"""Shares of the budget. The token table may take half; blocks get the remainder."""


class KeyedChange(NamedTuple):
    """keys: u64 [n]; rows: u8 [n, ROW]."""

    keys: KeyArray
    rows: ByteArray


class TableChange(NamedTuple):
    """A `TablesPublished`, decoded and validated. tokens: int64 [n] rows of the token table, and their
    ratios, float32 [n, K].
    """

    version: int
    base: int | None
    clusters: int
    shares: Float32Array
    trust: NDArray[np.float32]
    """as `Tables.source_weights`"""
    reliability: NDArray[np.float32]
    gain: float
    gains: NDArray[np.float32] | None
    """as `Tables.gains`"""
    buckets: int
    token_rows: NDArray[np.int64]
    token_ratios: NDArray[np.float32]
    blocks: KeyedChange
    sessions: KeyedChange
    tenants: KeyedChange

    @property
    def rows(self) -> int:
        return len(self.blocks.keys) + len(self.sessions.keys) + len(self.tenants.keys)


def read(published: TablesPublished) -> TableChange:
    """Decode a message. ValueError for invalid tables: wrong lengths, values that are not finite or out of
    range.
    """
    shares = _floats("shares", published.shares, "<f4").astype(np.float64)
    if not 1 <= len(shares) <= MAX_CLUSTERS or (shares < 0).any() or shares.sum() <= 0:
        raise ValueError(
            f"tables: {len(shares)} shares that are no probabilities; 1 to {MAX_CLUSTERS} are allowed"
        )
    if not 0.0 <= published.gain <= 1.0:
        raise ValueError(f"tables: a gain of {published.gain}; it must be in [0, 1]")
    if published.version < 0 or published.buckets < 0:
        raise ValueError(
            f"tables: version {published.version} and {published.buckets} buckets must not be negative"
        )
    rows, ratios = _token_rows(published, len(shares))
    return TableChange(
        version=published.version,
        base=published.base,
        clusters=published.clusters,
        shares=np.asarray(shares / shares.sum(), np.float32),
        trust=_source_weights(published),
        reliability=_by_source("reliability", published.reliability, 1.0),
        gain=float(published.gain),
        gains=_gains(published, len(shares)),
        buckets=published.buckets,
        token_rows=rows,
        token_ratios=ratios,
        blocks=_keyed("blocks", published.blocks),
        sessions=_keyed("sessions", published.sessions),
        tenants=_keyed("tenants", published.tenants),
    )


def _floats(name: str, raw: bytes, kind: str) -> NDArray[np.float32]:
    width = np.dtype(kind).itemsize
    if len(raw) % width:
        raise ValueError(f"tables: {len(raw)} bytes of {name} are not a multiple of {kind}")
    values = np.frombuffer(raw, kind).astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"tables: {name} must be finite")
    return values


def _by_source(name: str, given: dict[str, float], limit: float) -> NDArray[np.float32]:
    """Return values by source, float32 [SOURCES]; 0 where none is given. Unknown sources are ignored."""
    values = [float(given.get(source, 0.0)) for source in SOURCES]
    for source, value in zip(SOURCES, values, strict=True):
        if not 0.0 <= value <= limit:
            raise ValueError(f"tables: {name} {value} of source {source!r}; it must be in [0, {limit:g}]")
    return np.array(values, np.float32)


def _source_weights(published: TablesPublished) -> NDArray[np.float32]:
    """Return the trust, float32 [PATTERNS, sources], or [sources] if it does not depend on the other
    sources."""
    trust = _by_source("trust", published.trust, MAX_WEIGHT)
    if not published.trusts:
        return trust
    trusts = _floats("trusts", published.trusts, "<f4")
    if len(trusts) != PATTERNS * len(SOURCES) or (trusts < 0).any() or (trusts > MAX_WEIGHT).any():
        raise ValueError(
            f"tables: {len(trusts)} trusts; {PATTERNS} x {len(SOURCES)} in [0, {MAX_WEIGHT:g}] are allowed"
        )
    return trusts.reshape(PATTERNS, len(SOURCES))


def _gains(published: TablesPublished, clusters: int) -> NDArray[np.float32] | None:
    if not published.gains:
        return None
    gains = _floats("gains", published.gains, "<f4")
    if len(gains) != clusters or (gains < 0).any() or (gains > 1).any():
        raise ValueError(
            f"tables: {len(gains)} gains of {clusters} clusters; one in [0, 1] of each, or none, are allowed"
        )
    return gains


def _token_rows(published: TablesPublished, clusters: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    if len(published.token_rows) % 4:
        raise ValueError(f"tables: {len(published.token_rows)} bytes of token_rows are not a multiple of u32")
    rows = np.frombuffer(published.token_rows, "<u4").astype(np.int64)
    ratios = _floats("token_ratios", published.token_ratios, "<f2")
    if len(ratios) != len(rows) * clusters:
        raise ValueError(f"tables: {len(ratios)} token ratios do not make {len(rows)} rows of {clusters}")
    if len(rows) and rows.max() >= published.buckets:
        raise ValueError(f"tables: token row {rows.max()} is outside the {published.buckets} buckets")
    return rows, ratios.reshape(len(rows), clusters)


def _keyed(name: str, part: KeyedRows) -> KeyedChange:
    if len(part.keys) % 8 or len(part.rows) != len(part.keys) // 8 * ROW:
        raise ValueError(
            f"tables: {len(part.keys)} bytes of keys and {len(part.rows)} of rows in {name} do not belong"
            f" together (8 and {ROW} each)"
        )
    return KeyedChange(np.frombuffer(part.keys, "<u8"), np.frombuffer(part.rows, np.uint8).reshape(-1, ROW))


class ChangeVerdict(Enum):
    """Verdict on a change."""

    TAKEN = auto()
    OLD = auto()
    """it is contained already"""
    GAP = auto()
    """an earlier change was missed: request a snapshot"""


class TableReplica:
    """State: the rows, the token table, and the numbers of one version. `tables` None: no snapshot has
    arrived yet.

    budget: bytes for everything together.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._blocks, self._sessions, self._tenants = RowTable(0), RowTable(0), RowTable(0)
        self._tokens = np.zeros((0, 0), np.float32)
        self.tables: Tables | None = None

    def check(self, change: TableChange) -> ChangeVerdict:
        """Decide if `take` may follow. A snapshot sent in reply to our own request is always accepted,
        regardless of its version.
        """
        version = -1 if self.tables is None else self.tables.version
        if change.version <= version:
            return ChangeVerdict.OLD
        if change.base is None:
            return ChangeVerdict.TAKEN
        same = self._tokens.shape == (change.buckets, len(change.shares))
        return ChangeVerdict.TAKEN if change.base == version and same else ChangeVerdict.GAP

    def prepare(self, change: TableChange) -> "TableReplica":
        """Build a replica that holds exactly a snapshot. May run in a thread. ValueError if its token table
        exceeds half the budget.
        """
        size = 4 * change.buckets * len(change.shares)
        if size > self._budget // 2:
            raise ValueError(
                f"tables: a token table of {size} bytes is more than half of the {self._budget} that a"
                " model's tables may take"
            )
        new = TableReplica(self._budget)
        sessions, tenants = int(SESSIONS_SHARE * self._budget), int(TENANTS_SHARE * self._budget)
        new._sessions, new._tenants = (
            RowTable(sessions, len(change.sessions.keys)),
            RowTable(tenants, len(change.tenants.keys)),
        )
        new._blocks = RowTable(self._budget - size - sessions - tenants, len(change.blocks.keys))
        new._tokens = np.zeros((change.buckets, len(change.shares)), np.float32)
        for at in range(0, max(change.rows, 1), SLICE):
            new.take(change, at)
        return new

    def crowded_by(self, change: TableChange) -> bool:
        """Return True if a change needs larger tables (`grown`)."""
        return any(rows.crowded_by(len(part.keys)) for rows, part in self._parts(change))

    def grown(self, change: TableChange) -> "TableReplica":
        """Return a copy with room for a change. May run in a thread, as long as nothing is applied here."""
        new = TableReplica(self._budget)
        new._blocks, new._sessions, new._tenants = (
            rows.grown(len(part.keys)) if rows.crowded_by(len(part.keys)) else rows
            for rows, part in self._parts(change)
        )
        new._tokens = self._tokens
        if self.tables is not None:
            new.tables = replace(
                self.tables, blocks=new._blocks, sessions=new._sessions, tenants=new._tenants
            )
        return new

    def _parts(self, change: TableChange) -> tuple[tuple[RowTable, KeyedChange], ...]:
        return (
            (self._blocks, change.blocks),
            (self._sessions, change.sessions),
            (self._tenants, change.tenants),
        )

    def take(self, change: TableChange, at: int = 0) -> None:
        """Apply rows `at` to `at + SLICE` of a change; with the last rows, its version too. Call `check`
        first.
        """
        before = 0
        for rows, part in self._parts(change):
            window = slice(max(at - before, 0), max(at + SLICE - before, 0))
            rows.put(part.keys[window], part.rows[window])
            before += len(part.keys)
        if at + SLICE >= change.rows:
            self._tokens[change.token_rows] = change.token_ratios
            self._conclude(change)

    def _conclude(self, change: TableChange) -> None:
        self.tables = Tables(
            version=change.version,
            clusters=change.clusters,
            shares=change.shares,
            blocks=self._blocks,
            sessions=self._sessions,
            tenants=self._tenants,
            tokens=self._tokens,
            source_weights=change.trust,
            reliability=change.reliability,
            gain=change.gain,
            gains=change.gains,
        )

    @property
    def stored_bytes(self) -> int:
        """Used memory."""
        return self._tokens.nbytes + self._blocks.nbytes + self._sessions.nbytes + self._tenants.nbytes
