"""Settings of the migration service, read once at the composition root."""

from dataclasses import dataclass
from typing import Literal, get_args

from fleet.settings import (
    FilePath,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    PositiveShare,
    Share,
    check_bounds,
)

Policy = Literal["roost", "replicate", "reweight", "uniform", "full", "eplb", "eplb_hierarchical"]
"""Planning policies.

- roost: the full policy: new shares first, then few copies, then experts and request homes together; a full
  re-placement only if it pays.
- replicate: new shares, few copies and swaps, for balance only.
- reweight: new shares only; no weights are moved.
- uniform: few copies, for engines whose replicas always share evenly (the even split).
- full: Roost's own placement from scratch, with as few moves as possible.
- eplb, eplb_hierarchical: the published EPLB algorithm, without and with expert groups kept on nodes, for
  comparison.

Engines that move their experts themselves (vLLM with its expert-parallel load balancer, EPLB) take whole maps
with even shares under every policy (`migration.planning.planner.REARRANGING`).
"""
POLICIES: tuple[Policy, ...] = get_args(Policy)
LayoutPolicyName = Literal["regret", "threshold", "rollout", "static"]
"""Policies that choose the layout of an engine.

- regret: switch once the time lost by staying, queue included, exceeds the cost of going.
- threshold: the published rule of two thresholds on the number of requests, between ep and tp.
- rollout: the same with one threshold, for batches that only shrink.
- static: never switch.
"""


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """Settings of the migration service. Raises ValueError naming the field that is out of range."""

    retry_seconds: Positive = 1.0
    """pause before recording is retried after a bus error"""

    automatic: bool = True
    """carry out plans that pay automatically; false: only on request of an operator"""
    policy: Policy = "roost"
    """roost, replicate, reweight, uniform, full, eplb or eplb_hierarchical"""
    layout_policy: LayoutPolicyName = "static"
    """regret, threshold, rollout or static: what chooses the layout of engines that measured their layouts;
    regret also shards single hot layers.
    roost layout --auto on turns regret on for one engine"""
    layout_threshold: Positive = 256.0
    """requests of an engine from which the policies threshold and rollout turn to ep"""
    cycle_seconds: Positive = 30.0
    """interval at which each engine is re-evaluated and its homes are published"""
    homes_seconds: Positive = 120.0
    """minimum time for which homes stay unchanged while experts do not move, unless they no longer save
    anything"""
    window_seconds: Positive = 60.0
    """demand is averaged over windows of this length; a plan is made from one window and evaluated on the
    next"""
    stale_seconds: Positive = 15.0
    """demand reports of a rank expire after this time, unless the rank is known to be idle"""
    min_pairs: NonNegative = 16.0
    """minimum (token, k) pairs per expert of a layer, on average, in a window used for planning"""

    budget_bytes: NonNegativeInt = 32_000_000_000
    """byte budget of one plan, and of all automatic plans of one engine within budget_seconds"""
    budget_seconds: Positive = 900.0
    """length of the interval that budget_bytes applies to"""
    max_steps: PositiveInt = 256
    """limit on the handovers of one plan"""
    max_replicas: PositiveInt | None = None
    """limit on the ranks that hold one expert of a layer, including the first; unset: no limit"""
    critical_experts: Share = 0.0
    """share of a layer's experts, those with the highest demand first, that must survive the loss of any one
    rank. They have two replicas, on two nodes if there are several. Not for engines that move their experts
    themselves (vLLM), which end with any of their ranks"""
    cooldown_seconds: NonNegative = 300.0
    """cooldown of a moved expert"""
    layer_cooldown_seconds: NonNegative = 0.0
    """cooldown of all experts of a layer after any of them was moved; 0: only the moved expert cools down, so
    that a plan cut short by its budget can continue"""
    evaluation_seconds: Positive = 60.0
    """length of the measurement before an automatic plan, and of the one after its end; the plan is then
    evaluated"""
    settle_seconds: NonNegative = 10.0
    """measurements within this time after a plan's end are ignored, because older requests are still running
    """
    lifetime_seconds: Positive = 900.0
    """expected lifetime of a demand; within this time the gain of a plan must exceed its cost"""
    min_gain: Share = 0.002
    """minimum share of the step time that a plan must save"""
    target: PositiveShare = 0.95
    """copying stops at this share of the gain of a full re-placement"""

    rank_bytes_per_second: Positive = 50e9
    """transfer rate between ranks of one node, per rank"""
    node_bytes_per_second: Positive = 12.5e9
    """transfer rate between ranks of different nodes, per rank"""
    contention: Share = 0.3
    """fraction of the transfer time by which concurrent steps are slowed down"""

    stage_seconds: Positive = 10.0
    """time limit for staging a handover, plus the transfer time of its bytes; after that it is aborted"""
    stage_bytes_per_second: Positive = 250e6
    """lowest transfer rate of a rank, for the staging time limit"""
    commit_seconds: Positive = 5.0
    """a decided handover that some rank does not serve after this time causes a warning"""
    repeat_seconds: Positive = 0.5
    """interval for resending a command that a rank has not answered"""
    silent_seconds: Positive = 3.0
    """an engine without a heartbeat for this time counts as dead"""
    lease_seconds: Positive = 3.0
    """lease of the leading migration service; without renewal for this time another service takes over"""

    max_cells: PositiveInt = 1 << 24
    """limit on ranks x layers x experts of stored demand, over all engines; up to 44 bytes each"""
    max_questions: PositiveInt = 8
    """limit on plan requests that wait at a time; more are refused"""
    metrics_address: str | None = None
    """HOST:PORT of GET /metrics and /health; None: no HTTP"""
    metrics_key_file: FilePath | None = None
    """file with the bearer token that /metrics requires, two lines during rotation; unset: no token is
    required"""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.stale_seconds > self.window_seconds:
            raise ValueError(
                f"stale_seconds {self.stale_seconds} must not be above window_seconds {self.window_seconds}"
            )
