"""Settings of the migration service; read once at the composition root."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from fleet.settings import FilePath

Policy = Literal["roost", "replicate", "reweight", "uniform", "full", "eplb", "eplb_hierarchical"]
"""roost: the whole loop: new shares first, then few copies, then experts and the homes of requests together; a full re-placement only when it pays.
replicate: new shares, few copies and swaps, for balance alone. reweight: new shares alone; no weights are moved.
uniform: few copies, replicas share evenly, for engines that cannot share otherwise. full: Roost's own placement from scratch, moved as little as
possible. eplb, eplb_hierarchical: the published algorithm, without and with groups of experts kept on nodes, as the comparison."""
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """ValueError names the field that is out of range."""

    retry_seconds: float = 1.0
    """pause before recording is tried again when the bus could not do it"""
    most_incarnations: int = 1024
    """incarnations of engines whose placement is remembered; those longest gone are forgotten first"""

    automatic: bool = True
    """plans that pay are carried out without being asked for; false: only what an operator asks for"""
    policy: Policy = "roost"
    """roost, replicate, reweight, uniform, full, eplb or eplb_hierarchical"""
    cycle_seconds: float = 30.0
    """what to do is thought over so often, and homes are published"""
    homes_seconds: float = 120.0
    """homes stay for so long at least while experts stay where they are, unless they save nothing any more"""
    window_seconds: float = 60.0
    """demand is averaged over windows of this length; a plan is made from one and judged on the next"""
    stale_seconds: float = 15.0
    """demand of a rank that is older says nothing any more, unless the rank is known to be idle"""
    least_pairs: float = 16.0
    """(token, k) pairs per expert of a layer, on average, that must be behind a window before anything is planned from it"""

    budget_bytes: int = 32_000_000_000
    """weights that one plan may copy, and that the planner's own plans for one engine may copy together within budget_seconds"""
    budget_seconds: float = 900.0
    """length of the interval that budget_bytes is for"""
    most_steps: int = 256
    """handovers that one plan may take"""
    most_replicas: int | None = None
    """ranks that may hold one expert of a layer, the first included; unset: no limit"""
    critical_experts: float = 0.0
    """share of a layer's experts, the most wanted first, that must survive the loss of any one rank: they have two replicas, on two nodes
    where there are several"""
    cooldown_seconds: float = 300.0
    """an expert that was moved stays where it is for so long"""
    layer_cooldown_seconds: float = 0.0
    """so do all experts of a layer of which any was moved; 0: only the expert itself rests, so that a plan that its budget cut short can go on"""
    judge_seconds: float = 60.0
    """a plan of the planner's own is measured for so long before it, and for so long after its end, and then judged by that"""
    settle_seconds: float = 10.0
    """what is measured so soon after a plan's end does not count: requests that came before are still running"""
    lifetime_seconds: float = 900.0
    """how long a demand is expected to stay as it is: what a plan gains in this time must be worth what it costs"""
    least_gain: float = 0.002
    """share of the step time that a plan must save at least"""
    target: float = 0.95
    """copying stops at this share of what a full re-placement would gain"""

    rank_bytes_per_second: float = 50e9
    """what one rank can take from another of its node"""
    node_bytes_per_second: float = 12.5e9
    """what one rank can take from another node"""
    contention: float = 0.3
    """share of a copy's time by which the steps meanwhile take longer"""

    stage_seconds: float = 10.0
    """ranks get so long to bring in what a handover needs, and the time of its bytes on top; then it is given up"""
    stage_bytes_per_second: float = 250e6
    """the slowest that a rank may take bytes in"""
    commit_seconds: float = 5.0
    """a handover that is decided, and is not served by every rank after so long, is worth a warning"""
    repeat_seconds: float = 0.5
    """a command that a rank does not answer is sent again after so long"""
    silent_seconds: float = 3.0
    """an engine whose heartbeat is not heard for so long counts as dead"""
    lease_seconds: float = 3.0
    """a migration service that is not heard of for so long leads no more; another takes over"""

    most_cells: int = 1 << 24
    """ranks x layers x experts of all engines together whose demand is kept: up to 44 bytes each"""
    most_questions: int = 8
    """plans that may be asked for and wait at a time; more are refused"""
    metrics_address: str | None = None
    """HOST:PORT of GET /metrics and /health; None: no HTTP"""
    metrics_key_file: FilePath | None = None
    """file of the key that /metrics asks for as bearer token, two lines while it is changed; unset: none is asked for"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _ANY or (value is None and field.name == "most_replicas"):
                continue
            if field.name in _FROM_ZERO:
                if not 0 <= value < float("inf"):
                    raise ValueError(f"planner.{field.name} must be finite and not negative, not {value}")
            elif not 0 < value < float("inf"):
                raise ValueError(f"planner.{field.name} must be finite and above 0, not {value}")
        if self.policy not in POLICIES:
            raise ValueError(f"planner.policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        for name in ("target", "critical_experts", "contention", "least_gain"):
            if getattr(self, name) > 1:
                raise ValueError(f"planner.{name} is a share and must be at most 1, not {getattr(self, name)}")
        if self.stale_seconds > self.window_seconds:
            raise ValueError(f"planner.stale_seconds {self.stale_seconds} must not be above planner.window_seconds {self.window_seconds}")


_ANY = ("automatic", "metrics_address", "metrics_key_file", "policy")
_FROM_ZERO = ("budget_bytes", "critical_experts", "cooldown_seconds", "layer_cooldown_seconds", "least_gain", "least_pairs", "contention", "settle_seconds")
