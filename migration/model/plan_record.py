"""A plan as people and programs read it: before and after, step by step, and why; or why not. JSON; pure."""

import msgspec


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """What a placement is worth under the demand that plans are judged on. Times are seconds of one step of the engine."""

    balance_mean: float
    """mean over layers of mean / highest load of a rank"""
    balance_min: float
    local_share: float
    """of (token, k) pairs served on the rank their request lives on"""
    remote_ranks: float
    """distinct other ranks that a token reaches per layer"""
    remote_nodes: float
    step_seconds: float
    expert_seconds: float
    """of it: the slowest rank's experts, all layers"""
    dispatch_seconds: float
    """of it: sending tokens to experts and back"""
    memory_seconds: float
    """of it: what replicas take from the KV cache"""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One handover of a plan."""

    number: int
    kind: str
    """reweight, replicate, swap, move or drop"""
    layer: int
    copies: int
    bytes: int
    gain_seconds: float
    """per step of the engine"""
    what: str
    """in words: which expert from which rank to which, instead of whom"""
    why: str


class MemoryPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What so many slots per rank and layer would be worth. Times are seconds of one step."""

    slots_per_rank: int
    redundant_slots: int
    """of them, more than are needed to hold every expert once"""
    bytes_per_rank: int
    """of the redundant ones, all layers"""
    kv_blocks: int
    """left per rank"""
    balance: float
    local_share: float
    step_seconds: float
    waiting_seconds: float | None
    """for KV blocks; None: more requests come than the cache can ever serve"""
    total_seconds: float | None
    present: bool
    """as it is now"""
    best: bool
    """the least total"""


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `DescribePlan`."""

    engine: str
    worker_id: str
    model: str
    epoch: int
    """placement epoch that it changes"""
    policy: str
    trust: float = 1.0
    """what was taken of foretold gains, in (0, 1], because of what earlier plans really brought; `gain_seconds` is without it, what follows from it with it"""
    id: str = ""
    """of the plan; empty: there is none"""
    refused: str | None = None
    """why nothing is worth doing; None: there is a plan"""
    reasons: tuple[str, ...] = ()
    """what was found out on the way, in sentences, in the order of deciding"""
    tokens_per_second: float
    pairs: float
    """(token, k) pairs behind each layer of the demand"""
    judged_pairs: float
    """behind that which it was judged on"""
    next_window: bool
    """whether it was judged on a later window than it was made from"""
    before: Measures | None = None
    after: Measures | None = None
    saved: float | None = None
    """part of what dispatch would cost were nothing local that the plan (without one: the present placement) saves, of the layers of the bound"""
    saved_bound: float | None = None
    """the most that any placement into these slots saves, whatever its balance: the optimum of a linear programme, mean over some layers"""
    balance_bound: float | None = None
    """no placement into these slots is better balanced under even shares"""
    step_ceiling: float | None = None
    """balance that a step can reach at most, by chance of so few tokens (sampling noise)"""
    specialisation: float | None = None
    """how far demand differs between ranks: divergence in nats, beyond what chance alone would show; None: not measured"""
    copies: int = 0
    copied_share: float = 0.0
    """of the slots of the layers that may change"""
    copied_bytes: int = 0
    handovers: int = 0
    gain_seconds: float = 0.0
    """per step of the engine"""
    gain_per_second: float = 0.0
    """seconds that steps get shorter by, in a second of serving"""
    cost_seconds: float = 0.0
    """what carrying it out costs, in seconds of computing"""
    net_seconds: float = 0.0
    """gain over the expected lifetime, less the cost"""
    payback_seconds: float | None = None
    """after so long the gain has made up for the cost; None: never, or there is no plan"""
    transfer_seconds: float = 0.0
    steps: tuple[StepRecord, ...] = ()
    """the first of them; `handovers` says how many there are"""
    homes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(cluster, home ranks, the most at home first), of clusters that have a home"""
    homes_note: str = ""
    lost: str = ""
    """with dead ranks: what survives, and what must be loaded from elsewhere"""
    memory: tuple[MemoryPoint, ...] = ()
    plan_seconds: float = 0.0
    """that it took to find it"""
