"""Settings of the tracker, read once at the composition root."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from fleet.settings import FilePath, PartialShare, Positive, PositiveInt, check_bounds
from fleet.signatures import MAX_CLUSTERS


@dataclass(frozen=True, slots=True)
class TrackerConfig:
    """Time constants, publishing intervals and storage limits. ValueError names the field that is out of
    range.
    """

    fast_seconds: Positive = 20.0
    """short time constant: demand of this age counts 1/e in a rank's demand"""
    slow_seconds: Positive = 900.0
    """long time constant: of a model's profile and of everything learnt"""
    publish_seconds: Positive = 2.0
    """interval at which changes are published"""
    shift_floor: Positive = 0.002
    """nats; a divergence of the fast from the slow profile below this is never a shift, however significant
    """
    shift_sigmas: Positive = 4.5
    """significance of a shift, in standard deviations of sampling noise; 4.5: three false alarms in a million
    looks
    """
    shift_warmup_seconds: Positive = 180.0
    """seconds of traffic before the first shift can be detected"""
    shift_cooldown_seconds: Positive = 120.0
    """seconds of traffic between two shifts, and before a shift can settle"""
    prior_pairs: Positive = 64.0
    """(token, k) pairs per layer of the uniform prior profile"""
    clusters: Annotated[int, Meta(ge=1, le=MAX_CLUSTERS)] = 32
    """number of cluster slots"""
    cluster_bytes: PositiveInt = 16 << 20
    """memory for the sampled profiles of one model"""
    refine_seconds: Positive = 5.0
    """minimum interval between two fits of the clusters"""
    prefix_bytes: PositiveInt = 64 << 20
    """memory for the prefix rows of one model: 27 bytes per row"""
    session_bytes: PositiveInt = 16 << 20
    tenant_bytes: PositiveInt = 1 << 20
    """memory for session rows and for tenant rows"""
    token_bytes: PositiveInt = 32 << 20
    """memory for the token table of one model: 6 bytes per bucket and cluster; token ids beyond it share
    buckets
    """
    max_changes: PositiveInt = 32768
    """limit of changed rows in a delta; with more, a snapshot is published"""
    max_token_changes: PositiveInt = 1024
    """limit of token-table rows in a delta; the rest follow in later ones"""
    memory_outcomes: PositiveInt = 1000
    """memory of the calibration of predictions: an outcome this many finished requests ago counts 1/e"""
    max_waiting: PositiveInt = 8192
    waiting_bytes: PositiveInt = 8 << 20
    """limits for reports of rank or router that wait for the other side's report of the same request: number
    and bytes
    """
    state_file: FilePath | None = None
    """file that keeps the learnt state across restarts; unset: none, and a restarted tracker learns from
    scratch. `roost up` keeps the file while it runs
    """
    state_seconds: Positive = 30.0
    """interval at which the state file is written; it is also written at shutdown"""
    change: PartialShare = 0.1
    """the demand of a rank without reports is published again when it has fallen by this share"""
    forget_seconds: Positive = 30.0
    """a worker without reports and heartbeats for this time is forgotten"""
    max_ranks: PositiveInt = 1024
    max_models: PositiveInt = 16
    """models tracked at most; each takes up to the sum of the `*_bytes` budgets"""
    max_cells: PositiveInt = 65536
    """layers x experts of one table at most"""
    metrics_address: str | None = None
    """HOST:PORT of GET /metrics and /health; None: no HTTP server"""
    metrics_key_file: FilePath | None = None
    """file with the bearer token that /metrics requires, two lines during a rotation; unset: no token is
    required
    """

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.fast_seconds >= self.slow_seconds:
            raise ValueError(
                f"fast_seconds {self.fast_seconds} must be below slow_seconds {self.slow_seconds}"
            )
