"""Settings of the tracker, read once at the composition root."""

from dataclasses import dataclass, fields

from fleet.settings import FilePath
from fleet.signatures import MAX_CLUSTERS


@dataclass(frozen=True, slots=True)
class TrackerConfig:
    """Time constants, publishing intervals and storage limits. ValueError names the field that is out of
    range.
    """

    fast_seconds: float = 20.0
    """short time constant: demand of this age counts 1/e in a rank's demand"""
    slow_seconds: float = 900.0
    """long time constant: of a model's profile and of everything learnt"""
    publish_seconds: float = 2.0
    """interval at which changes are published"""
    shift_floor: float = 0.002
    """nats; a divergence of the fast from the slow profile below this is never a shift, however significant
    """
    shift_sigmas: float = 4.5
    """significance of a shift, in standard deviations of sampling noise; 4.5: three false alarms in a million
    looks
    """
    shift_settle: float = 0.5
    """a shift has settled when the divergence stays below this share of the threshold"""
    shift_warmup_seconds: float = 180.0
    """seconds of traffic before the first shift can be detected"""
    shift_cooldown_seconds: float = 120.0
    """seconds of traffic between two shifts, and before a shift can settle"""
    prior_pairs: float = 64.0
    """(token, k) pairs per layer of the uniform prior profile"""
    clusters: int = 32
    """number of cluster slots"""
    cluster_bytes: int = 16 << 20
    """memory for the sampled profiles of one model"""
    cluster_samples: int = 1024
    """sampled profiles kept per model at most, even if they are small"""
    cluster_prior_pairs: float = 128.0
    """(token, k) pairs per layer of the prior (the traffic's profile) in the profile of a request or cluster
    """
    refine_seconds: float = 5.0
    """minimum interval between two fits of the clusters"""
    prefix_bytes: int = 64 << 20
    """memory for the prefix rows of one model: 27 bytes per row"""
    session_bytes: int = 16 << 20
    tenant_bytes: int = 1 << 20
    """memory for session rows and for tenant rows"""
    token_bytes: int = 32 << 20
    """memory for the token table of one model: 6 bytes per bucket and cluster; token ids beyond it share
    buckets
    """
    row_seconds: float = 7200.0
    """an unused prefix, session or tenant row expires after this time"""
    token_seconds: float = 14400.0
    """time constant of the token table"""
    most_changes: int = 32768
    """limit of changed rows in a delta; with more, a snapshot is published"""
    most_token_changes: int = 1024
    """limit of token-table rows in a delta; the rest follow in later ones"""
    memory_outcomes: int = 1000
    """memory of the calibration of predictions: an outcome this many finished requests ago counts 1/e"""
    most_waiting: int = 8192
    waiting_bytes: int = 8 << 20
    waiting_seconds: float = 120.0
    """limits for reports of rank or router that wait for the other side's report of the same request: number,
    bytes and time
    """
    state_file: FilePath | None = None
    """file that keeps the learnt state across restarts; unset: none, and a restarted tracker learns from
    scratch. `roost up` keeps the file while it runs
    """
    state_seconds: float = 30.0
    """interval at which the state file is written; it is also written at shutdown"""
    change: float = 0.1
    """the demand of a rank without reports is published again when it has fallen by this share"""
    least_tokens_per_second: float = 0.01
    """a rank with less demand counts as having none"""
    shortest_interval_seconds: float = 1e-3
    longest_interval_seconds: float = 3600.0
    """reports over a shorter or longer interval are rejected"""
    forget_seconds: float = 30.0
    """a worker without reports and heartbeats for this time is forgotten"""
    most_ranks: int = 1024
    most_models: int = 16
    """models tracked at most; each takes up to the sum of the `*_bytes` budgets"""
    most_cells: int = 65536
    """layers x experts of one table at most"""
    metrics_address: str | None = None
    """HOST:PORT of GET /metrics and /health; None: no HTTP server"""
    metrics_key_file: FilePath | None = None
    """file with the bearer token that /metrics requires, two lines during a rotation; unset: no token is
    required
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in (
                "state_file",
                "metrics_address",
                "metrics_key_file",
            ) and not 0 < value < float("inf"):
                raise ValueError(f"tracker.{field.name} must be finite and above 0, not {value}")
        if self.shortest_interval_seconds > self.longest_interval_seconds:
            raise ValueError(
                f"tracker.shortest_interval_seconds {self.shortest_interval_seconds} is above the longest"
                f" {self.longest_interval_seconds}"
            )
        if self.fast_seconds >= self.slow_seconds:
            raise ValueError(
                f"tracker.fast_seconds {self.fast_seconds} must be below tracker.slow_seconds"
                f" {self.slow_seconds}"
            )
        if self.shift_settle >= 1:
            raise ValueError(f"tracker.shift_settle is a share and must be below 1, not {self.shift_settle}")
        if self.clusters > MAX_CLUSTERS:
            raise ValueError(f"tracker.clusters must be at most {MAX_CLUSTERS}, not {self.clusters}")
        if self.change >= 1:
            raise ValueError(f"tracker.change is a share and must be below 1, not {self.change}")
