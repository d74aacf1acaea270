"""Settings of the tracker; read once at the composition root."""

from dataclasses import dataclass, fields

from fleet.settings import FilePath
from fleet.signatures import MOST_CLUSTERS


@dataclass(frozen=True, slots=True)
class TrackerConfig:
    """Time constants, publishing, and the limits of what is kept. ValueError names the field that is out of range."""

    fast_seconds: float = 20.0
    """the short time constant: what was asked this long ago counts 1/e in the demand of a rank"""
    slow_seconds: float = 900.0
    """the long time constant: that of a model's profile, and of everything learnt"""
    publish_seconds: float = 2.0
    """what changed is published so often"""
    shift_floor: float = 0.002
    """nats; a divergence of the fast from the slow profile below this is no shift, however certain"""
    shift_sigmas: float = 4.5
    """how far out in sampling noise a divergence must be, and stay, to be a shift; 4.5: three looks in a million"""
    shift_settle: float = 0.5
    """a shift is settled when the divergence stays below this share of the threshold"""
    shift_warmup_seconds: float = 180.0
    """seconds of traffic before the first shift can be told"""
    shift_cooldown_seconds: float = 120.0
    """seconds of traffic between two shifts, and before one is settled"""
    prior_pairs: float = 64.0
    """(token, k) pairs per layer that speak for the uniform profile before anything was observed"""
    clusters: int = 32
    """slots for kinds of requests"""
    cluster_bytes: int = 16 << 20
    """what the sampled profiles of one model may take"""
    cluster_samples: int = 1024
    """sampled profiles kept of one model, however small they are"""
    cluster_prior_pairs: float = 128.0
    """(token, k) pairs per layer that speak for the traffic's profile in that of a request or a cluster"""
    refine_seconds: float = 5.0
    """clusters are fitted anew no oftener than this"""
    prefix_bytes: int = 64 << 20
    """what the rows of prefixes of one model may take: 27 bytes each"""
    session_bytes: int = 16 << 20
    tenant_bytes: int = 1 << 20
    """the same for sessions, and for tenants"""
    token_bytes: int = 32 << 20
    """what the token table of one model may take: 6 bytes for each bucket and cluster; token ids beyond share buckets"""
    row_seconds: float = 7200.0
    """a prefix, session or tenant that nobody came back to for so long is forgotten"""
    token_seconds: float = 14400.0
    """time constant of the token table"""
    most_changes: int = 32768
    """rows that are told as a change; when more changed, all are told"""
    most_token_changes: int = 1024
    """rows of the token table that are told as a change; the others with the next ones"""
    memory_outcomes: int = 1000
    """finished requests ago that count 1/e in what predictions are worth"""
    most_waiting: int = 8192
    waiting_bytes: int = 8 << 20
    waiting_seconds: float = 120.0
    """what rank and router report of a request waits for the other's report, so many, so many bytes and so long"""
    state_file: FilePath | None = None
    """where what is known is kept across restarts; unset: nowhere, and a restarted tracker learns anew. `roost up` keeps it while it runs"""
    state_seconds: float = 30.0
    """it is written so often, and at the end"""
    change: float = 0.1
    """a silent rank's demand is published again when it has fallen by this share"""
    least_tokens_per_second: float = 0.01
    """a rank that asks for less counts as asking for nothing"""
    shortest_interval_seconds: float = 1e-3
    longest_interval_seconds: float = 3600.0
    """a report over a shorter or longer interval is refused"""
    forget_seconds: float = 30.0
    """a worker that neither reports nor beats for so long is forgotten"""
    most_ranks: int = 1024
    most_models: int = 16
    """each takes up to the sum of the `*_bytes` budgets"""
    most_cells: int = 65536
    """layers x experts of one table"""
    metrics_address: str | None = None
    """HOST:PORT of GET /metrics and /health; None: no HTTP"""
    metrics_key_file: FilePath | None = None
    """file of the key that /metrics asks for as bearer token, two lines while it is changed; unset: none is asked for"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("state_file", "metrics_address", "metrics_key_file") and not 0 < value < float("inf"):
                raise ValueError(f"tracker.{field.name} must be finite and above 0, not {value}")
        if self.shortest_interval_seconds > self.longest_interval_seconds:
            raise ValueError(f"tracker.shortest_interval_seconds {self.shortest_interval_seconds} is above the longest {self.longest_interval_seconds}")
        if self.fast_seconds >= self.slow_seconds:
            raise ValueError(f"tracker.fast_seconds {self.fast_seconds} must be below tracker.slow_seconds {self.slow_seconds}")
        if self.shift_settle >= 1:
            raise ValueError(f"tracker.shift_settle is a share and must be below 1, not {self.shift_settle}")
        if self.clusters > MOST_CLUSTERS:
            raise ValueError(f"tracker.clusters must be at most {MOST_CLUSTERS}, not {self.clusters}")
        if self.change >= 1:
            raise ValueError(f"tracker.change is a share and must be below 1, not {self.change}")
