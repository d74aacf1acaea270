"""Facts that the tracker learns from traffic: clusters, prediction tables, expert demand and its shifts."""

import msgspec

from fleet.event import Event
from fleet.popularity import ExpertTable
from fleet.signatures import ClusterRecord


class ClustersPublished(Event, frozen=True, kw_only=True):
    """The tracker's cluster model for a model. Not stored; `DescribeClusters` requests it."""

    model: str
    record: ClusterRecord


class KeyedRows(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a table: `keys` u64 little endian [n], `rows` [n, fleet.prediction.ROW] bytes. A later row
    replaces an earlier row of the same key. A row with zero tokens of evidence deletes its key.
    """

    keys: bytes = b""
    rows: bytes = b""


class TablesPublished(Event, frozen=True, kw_only=True):
    """Prediction tables of a model: a snapshot, or a delta to version `base`. Not stored; `DescribeTables`
    requests a snapshot.
    """

    model: str
    version: int
    base: int | None = None
    """version to which this is a delta; None: a snapshot. A reader at another version requests a snapshot. So
    does every reader of a delta to itself (base = version): it announces a snapshot too large to publish
    """
    clusters: int
    """version of the cluster model"""
    shares: bytes
    """float32 [clusters]: current traffic mix"""
    trust: dict[str, float]
    """weight per source, independent of which sources have evidence"""
    trusts: bytes = b""
    """float32 little endian [fleet.prediction.PATTERNS, sources]: weight of each source, by the set of
    sources with evidence. More accurate than `trust`. Empty: use `trust` for every set
    """
    reliability: dict[str, float]
    """by source: accuracy in [0, 1]; 0 is as good as the traffic mix, 1 as good as the observed activations
    """
    gain: float
    """in [0, 1]: current calibration factor of the predicted gain of expert locality, over all requests"""
    gains: bytes = b""
    """float32 little endian [clusters], in [0, 1]: the calibration factor per cluster. A request's factor is
    the mean weighted by its cluster weights. Empty: `gain` for all
    """
    buckets: int
    """rows of the token table; a token's row is its id modulo this"""
    token_rows: bytes = b""
    """u32 little endian [n]: row numbers of the token table in this message"""
    token_ratios: bytes = b""
    """float16 little endian [n, clusters]"""
    blocks: KeyedRows = KeyedRows()
    sessions: KeyedRows = KeyedRows()
    tenants: KeyedRows = KeyedRows()


class PopularityShifted(Event, frozen=True, kw_only=True):
    """Expert popularity changed by more than sampling noise (`settled` False), or returned to normal
    (`settled` True). Not stored.
    """

    model: str
    version: int
    settled: bool
    divergence: float
    """Jensen-Shannon divergence of the fast profile from the slow profile, in nats, mean over layers"""
    threshold: float
    """divergence that sampling noise alone would rarely exceed"""
    layers: tuple[int, ...]
    """layers that changed, largest change first"""
    traceparent: str = ""
    """W3C trace context of this shift's span; the reaction to the shift continues the trace"""


class TrackerHeartbeat(Event, frozen=True, kw_only=True):
    """Heartbeat of the tracker, once a second. Not stored."""

    protocol: int
    """`fleet.event.PROTOCOL` of the tracker"""
    reports: int
    """activation reports that this process has learnt from"""


class ProfilePublished(Event, frozen=True, kw_only=True):
    """The tracker's global profile of a model: expert probabilities per layer. Not stored; `DescribeProfile`
    requests it.
    """

    model: str
    version: int
    tokens: float
    """decayed exposure behind the profile"""
    profile: ExpertTable


class DemandPublished(Event, frozen=True, kw_only=True):
    """Tokens per second that one rank's requests send to each expert (fast time constant). Not stored."""

    engine: str
    worker_id: int
    rank: int
    model: str
    version: int
    tokens_per_second: float
    demand: ExpertTable
    """(token, k) pairs per second"""
    pairs: float = 0.0
    """decayed (token, k) pairs behind each layer of `demand`, mean over layers: the amount of evidence; 0: no
    demand, or not reported
    """
    remote: float | None = None
    """share of the demand for experts without a replica on this rank; None: placement unknown, or no demand
    """
