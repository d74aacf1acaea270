"""Settings of the tracker; read once at the composition root."""

from dataclasses import dataclass, fields


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
    shift_sigmas: float = 4.75
    """how far out in sampling noise a divergence must be to be a shift; 4.75: one look in a million"""
    shift_settle: float = 0.5
    """a shift is settled when the divergence stays below this share of the threshold"""
    shift_warmup_seconds: float = 180.0
    """seconds of traffic before the first shift can be told"""
    shift_cooldown_seconds: float = 120.0
    """seconds of traffic between two shifts, and before one is settled"""
    prior_pairs: float = 64.0
    """(token, k) pairs per layer that speak for the uniform profile before anything was observed"""
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
    most_models: int = 64
    most_cells: int = 65536
    """layers x experts of one table"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ValueError(f"tracker.{field.name} must be finite and above 0, not {value}")
        if self.shortest_interval_seconds > self.longest_interval_seconds:
            raise ValueError(f"tracker.shortest_interval_seconds {self.shortest_interval_seconds} is above the longest {self.longest_interval_seconds}")
        if self.fast_seconds >= self.slow_seconds:
            raise ValueError(f"tracker.fast_seconds {self.fast_seconds} must be below tracker.slow_seconds {self.slow_seconds}")
        if self.shift_settle >= 1:
            raise ValueError(f"tracker.shift_settle is a share and must be below 1, not {self.shift_settle}")
        if self.change >= 1:
            raise ValueError(f"tracker.change is a share and must be below 1, not {self.change}")
