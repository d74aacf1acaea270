"""Report of a plan for people and programs: before and after, the steps and the reasons. JSON; pure."""

import msgspec


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of a placement under the demand used for evaluation. Times are seconds of one engine step."""

    balance_mean: float
    """mean over layers of mean / highest rank load"""
    balance_min: float
    local_share: float
    """share of (token, k) pairs served on the rank of their request"""
    remote_ranks: float
    """distinct other ranks that a token reaches per layer"""
    remote_nodes: float
    step_seconds: float
    expert_seconds: float
    """part of step_seconds: the slowest rank's experts, all layers"""
    dispatch_seconds: float
    """part of step_seconds: sending tokens to experts and back"""
    memory_seconds: float
    """part of step_seconds: KV cache space taken by replicas"""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One handover of a plan."""

    number: int
    kind: str
    """reweight, replicate, swap, move, drop, shard, gather or attention"""
    layer: int
    """-1 for attention"""
    copies: int
    bytes: int
    gain_seconds: float
    """per engine step"""
    what: str
    """description: the expert, its source and destination rank, and the replica it replaces"""
    why: str


class MemoryPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Trade-off of one number of slots per rank and layer. Times are seconds of one step."""

    slots_per_rank: int
    redundant_slots: int
    """slots beyond those needed to hold every expert once"""
    bytes_per_rank: int
    """bytes of the redundant slots, all layers"""
    kv_blocks: int
    """KV blocks left per rank"""
    balance: float
    local_share: float
    step_seconds: float
    waiting_seconds: float | None
    """wait for KV blocks; None: the load exceeds the capacity of the cache"""
    total_seconds: float | None
    present: bool
    """True for the current number of slots"""
    best: bool
    """True for the lowest total"""


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `DescribePlan`."""

    engine: str
    worker_id: str
    model: str
    epoch: int
    """placement epoch that the plan changes"""
    policy: str
    plan_discount: float = 1.0
    """discount factor applied to predicted gains, in (0, 1], from the results of earlier plans.
    `gain_seconds` does not include it; figures derived from `gain_seconds` do"""
    id: str = ""
    """plan id; empty: there is no plan"""
    refused: str | None = None
    """reason why nothing is worthwhile; None: there is a plan"""
    reasons: tuple[str, ...] = ()
    """findings in sentences, in the order of the decision"""
    single_layers: str = ""
    """what would be gained by sharding single layers, or by making them whole, and why that is or is not the
    plan; empty: the engine's layout is not chosen automatically"""
    tokens_per_second: float
    pairs: float
    """(token, k) pairs behind each layer of the demand"""
    judged_pairs: float
    """pairs behind the demand used for evaluation"""
    next_window: bool
    """True if the plan was evaluated on a later window than it was made from"""
    before: Measures | None = None
    after: Measures | None = None
    saved: float | None = None
    """share of the dispatch cost without locality that the plan saves (without a plan: the current
    placement), over the layers of the bound"""
    saved_bound: float | None = None
    """upper bound on the saving of any placement into these slots, regardless of balance: the optimum of a
    linear programme, mean over some layers"""
    balance_bound: float | None = None
    """upper bound on the balance of any placement into these slots with even shares"""
    step_ceiling: float | None = None
    """upper bound on the balance of a single step, from sampling noise"""
    specialisation: float | None = None
    """difference in demand between ranks: divergence in nats above the sampling noise; None: not measured"""
    copies: int = 0
    copied_share: float = 0.0
    """share of the slots in the layers that may change"""
    copied_bytes: int = 0
    handovers: int = 0
    gain_seconds: float = 0.0
    """per engine step"""
    gain_per_second: float = 0.0
    """step time saved per second of serving"""
    cost_seconds: float = 0.0
    """cost of the migration in seconds of computing"""
    net_seconds: float = 0.0
    """gain over the expected lifetime, minus the cost"""
    payback_seconds: float | None = None
    """time until the gain covers the cost; None: never, or there is no plan"""
    transfer_seconds: float = 0.0
    steps: tuple[StepRecord, ...] = ()
    """the first steps; `handovers` gives the total"""
    homes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(cluster, home ranks, largest share first) of the clusters that have a home"""
    homes_note: str = ""
    lost: str = ""
    """with dead ranks: the experts that survive, and those that must be loaded from elsewhere"""
    memory: tuple[MemoryPoint, ...] = ()
    plan_seconds: float = 0.0
    """time spent on planning"""
