"""A read-only copy of the tracker's prediction tables of one model, bounded in bytes. Pure.

What the tracker says is read (`read`) and checked before anything of it is taken, so that reading may happen in a thread. Taking
is synchronous and changes the tables in place: whoever predicts does so between two takings, out of one state.
"""

from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.events import KeyedRows, TablesPublished
from fleet.keyed import Keys
from fleet.prediction import PATTERNS, ROW, SOURCES, Tables
from fleet.signatures import MOST_CLUSTERS, Weights
from router.prediction.row_table import Packed, RowTable

MOST_TRUST = 64.0
"""A larger trust is no trust but a fault."""
SLICE = 2048
"""Rows that are taken in one go: about a millisecond."""
SESSIONS_SHARE, TENANTS_SHARE = 0.1, 0.02
"""Of the budget. The token table may take half; blocks have what is left of all."""


class KeyedChange(NamedTuple):
    """keys: u64 [n]; rows: u8 [n, ROW]."""

    keys: Keys
    rows: Packed


class TableChange(NamedTuple):
    """A `TablesPublished`, read and checked. tokens: int64 [n] rows of the token table and float32 [n, K] their ratios."""

    version: int
    base: int | None
    clusters: int
    shares: Weights
    trust: NDArray[np.float32]
    """as `Tables.trust`"""
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
    """ValueError for what cannot be tables: wrong lengths, values that are not finite or out of range."""
    shares = _floats("shares", published.shares, "<f4").astype(np.float64)
    if not 1 <= len(shares) <= MOST_CLUSTERS or (shares < 0).any() or shares.sum() <= 0:
        raise ValueError(f"tables: {len(shares)} shares that are no probabilities; 1 to {MOST_CLUSTERS} are allowed")
    if not 0.0 <= published.gain <= 1.0:
        raise ValueError(f"tables: a gain of {published.gain}; it must be in [0, 1]")
    if published.version < 0 or published.buckets < 0:
        raise ValueError(f"tables: version {published.version} and {published.buckets} buckets must not be negative")
    rows, ratios = _token_rows(published, len(shares))
    return TableChange(
        version=published.version,
        base=published.base,
        clusters=published.clusters,
        shares=np.asarray(shares / shares.sum(), np.float32),
        trust=_trust(published),
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
        raise ValueError(f"tables: {len(raw)} bytes of {name} are no whole number of {kind}")
    values = np.frombuffer(raw, kind).astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"tables: {name} must be finite")
    return values


def _by_source(name: str, said: dict[str, float], most: float) -> NDArray[np.float32]:
    """float32 [SOURCES]; 0 for a source nothing is said of, and sources this router does not know are left out."""
    values = [float(said.get(source, 0.0)) for source in SOURCES]
    for source, value in zip(SOURCES, values, strict=True):
        if not 0.0 <= value <= most:
            raise ValueError(f"tables: {name} {value} of source {source!r}; it must be in [0, {most:g}]")
    return np.array(values, np.float32)


def _trust(published: TablesPublished) -> NDArray[np.float32]:
    """float32 [PATTERNS, sources], or [sources] where nothing is said of who else speaks."""
    trust = _by_source("trust", published.trust, MOST_TRUST)
    if not published.trusts:
        return trust
    trusts = _floats("trusts", published.trusts, "<f4")
    if len(trusts) != PATTERNS * len(SOURCES) or (trusts < 0).any() or (trusts > MOST_TRUST).any():
        raise ValueError(f"tables: {len(trusts)} trusts; {PATTERNS} x {len(SOURCES)} in [0, {MOST_TRUST:g}] are allowed")
    return trusts.reshape(PATTERNS, len(SOURCES))


def _gains(published: TablesPublished, clusters: int) -> NDArray[np.float32] | None:
    if not published.gains:
        return None
    gains = _floats("gains", published.gains, "<f4")
    if len(gains) != clusters or (gains < 0).any() or (gains > 1).any():
        raise ValueError(f"tables: {len(gains)} gains of {clusters} clusters; one in [0, 1] of each, or none, are allowed")
    return gains


def _token_rows(published: TablesPublished, clusters: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    if len(published.token_rows) % 4:
        raise ValueError(f"tables: {len(published.token_rows)} bytes of token_rows are no whole number of u32")
    rows = np.frombuffer(published.token_rows, "<u4").astype(np.int64)
    ratios = _floats("token_ratios", published.token_ratios, "<f2")
    if len(ratios) != len(rows) * clusters:
        raise ValueError(f"tables: {len(ratios)} token ratios do not make {len(rows)} rows of {clusters}")
    if len(rows) and rows.max() >= published.buckets:
        raise ValueError(f"tables: token row {rows.max()} is outside the {published.buckets} buckets")
    return rows, ratios.reshape(len(rows), clusters)


def _keyed(name: str, part: KeyedRows) -> KeyedChange:
    if len(part.keys) % 8 or len(part.rows) != len(part.keys) // 8 * ROW:
        raise ValueError(f"tables: {len(part.keys)} bytes of keys and {len(part.rows)} of rows in {name} do not belong together (8 and {ROW} each)")
    return KeyedChange(np.frombuffer(part.keys, "<u8"), np.frombuffer(part.rows, np.uint8).reshape(-1, ROW))


class ChangeVerdict(Enum):
    """What became of a change."""

    TAKEN = auto()
    OLD = auto()
    """it is contained already"""
    GAP = auto()
    """something before it was missed: ask for the whole"""


class TableReplica:
    """State: the rows, the token table, and the numbers of one version. `tables` None: nothing whole has come yet.

    budget: bytes that all of it may take.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._blocks, self._sessions, self._tenants = RowTable(0), RowTable(0), RowTable(0)
        self._tokens = np.zeros((0, 0), np.float32)
        self.tables: Tables | None = None

    def judge(self, change: TableChange) -> ChangeVerdict:
        """Whether `take` may follow. A whole answer to one's own question is always taken, whatever its version."""
        version = -1 if self.tables is None else self.tables.version
        if change.version <= version:
            return ChangeVerdict.OLD
        if change.base is None:
            return ChangeVerdict.TAKEN
        same = self._tokens.shape == (change.buckets, len(change.shares))
        return ChangeVerdict.TAKEN if change.base == version and same else ChangeVerdict.GAP

    def prepare(self, change: TableChange) -> "TableReplica":
        """A replica that holds what a whole says and nothing else; may be made in a thread. ValueError when its token table exceeds half the budget."""
        size = 4 * change.buckets * len(change.shares)
        if size > self._budget // 2:
            raise ValueError(f"tables: a token table of {size} bytes is more than half of the {self._budget} that a model's tables may take")
        new = TableReplica(self._budget)
        sessions, tenants = int(SESSIONS_SHARE * self._budget), int(TENANTS_SHARE * self._budget)
        new._sessions, new._tenants = RowTable(sessions, len(change.sessions.keys)), RowTable(tenants, len(change.tenants.keys))
        new._blocks = RowTable(self._budget - size - sessions - tenants, len(change.blocks.keys))
        new._tokens = np.zeros((change.buckets, len(change.shares)), np.float32)
        for at in range(0, max(change.rows, 1), SLICE):
            new.take(change, at)
        return new

    def crowded_by(self, change: TableChange) -> bool:
        """Whether a change needs larger tables than these (`grown`)."""
        return any(rows.crowded_by(len(part.keys)) for rows, part in self._parts(change))

    def grown(self, change: TableChange) -> "TableReplica":
        """The same with room for a change; may be made in a thread, while nothing is taken here."""
        new = TableReplica(self._budget)
        new._blocks, new._sessions, new._tenants = (
            rows.grown(len(part.keys)) if rows.crowded_by(len(part.keys)) else rows for rows, part in self._parts(change)
        )
        new._tokens = self._tokens
        if self.tables is not None:
            new.tables = replace(self.tables, blocks=new._blocks, sessions=new._sessions, tenants=new._tenants)
        return new

    def _parts(self, change: TableChange) -> tuple[tuple[RowTable, KeyedChange], ...]:
        return (self._blocks, change.blocks), (self._sessions, change.sessions), (self._tenants, change.tenants)

    def take(self, change: TableChange, at: int = 0) -> None:
        """Rows from `at` to `at + SLICE` of a change; with the last of them, its version. Check with `judge` first."""
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
            trust=change.trust,
            reliability=change.reliability,
            gain=change.gain,
            gains=change.gains,
        )

    @property
    def stored_bytes(self) -> int:
        """Memory taken."""
        return self._tokens.nbytes + self._blocks.nbytes + self._sessions.nbytes + self._tenants.nbytes
