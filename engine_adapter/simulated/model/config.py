"""What can be set about the simulated engine; read once, by the composition root."""

from dataclasses import dataclass

from engine_adapter.simulated.model.presets import SHAPES, speed_of
from fleet.blocks import BLOCK_SIZE
from fleet.dispatch import COVER, DISPATCHES, SPLIT
from fleet.experts import ModelShape
from fleet.timing import EngineSpeed

PLACEMENTS = ("linear", "aligned")
MOST_DOMAINS = 64
MOST_CONTEXT = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """One engine's settings. ValueError at birth names the key and what to do.

    The speeds (prefill_token ... expert_pair) are `fleet.timing.EngineSpeed`'s; unset ones are the shape's on H100s (`presets`).
    """

    shape: str = "demo"
    """deepseek-v3, qwen3-235b, or demo: the demo model's"""
    model: str | None = None
    """name that requests use; None: the shape's"""
    weights: str | None = None
    """identity of the weights that it claims to serve, for trying a rolling update (answers do not depend on it); None: it says nothing of them"""
    ranks: int = 2
    node_ranks: int = 8
    """ranks of one machine; the dispatch between machines takes the slower link"""
    kv_blocks: int = 8192
    """KV blocks per rank"""
    block_size: int = BLOCK_SIZE
    """tokens per KV block"""
    max_context: int | None = None
    """tokens, prompt and completion together; None: 32768, or what fits into kv_blocks if that is less"""
    max_batch_tokens: int = 2048
    """tokens a rank computes in one step"""
    max_running: int = 128
    """sequences a rank runs at once"""
    max_waiting: int = 256
    """requests a rank lets wait; more are refused as overload"""
    time_scale: float = 1.0
    """simulated seconds take so many real ones; 0.1: everything ten times as fast"""
    output_tokens: int = 0
    """mean length of an answer that ends by itself, drawn per prompt; 0: answers go on to their max_tokens"""
    prefill_token: float | None = None
    prefill_pair: float | None = None
    step: float | None = None
    decode_sequence: float | None = None
    decode_block: float | None = None
    dispatch: float | None = None
    dispatch_node: float | None = None
    expert_read: float | None = None
    expert_pair: float | None = None
    rank_bytes_per_second: float = 50e9
    """what a rank reads of experts from another of its machine; simulated seconds, like the speeds above"""
    node_bytes_per_second: float = 12.5e9
    """what it reads from a rank of another machine"""
    domains: int = 8
    """kinds of traffic, each with a taste of its own in experts; a prompt's first blocks choose one by their hash"""
    domain_blocks: int = 1
    """how many first blocks of a prompt choose its domain; more where many prompts begin alike"""
    popularity_skew: float = 0.5
    """sigma of the log-normal popularity of a layer's experts, equal for all traffic"""
    domain_skew: float = 1.0
    """sigma by which a domain's taste differs from it; 0: all traffic wants the same"""
    token_skew: float = 0.5
    """sigma by which a token's taste differs from its domain's"""
    placement: str = "linear"
    """linear: experts in order; aligned: each where a domain wants it most, ranks kept balanced; else a file, as `roost plan --profile` writes it"""
    slots_per_rank: int | None = None
    """experts of one layer that a rank has room for; None: as many as needed. What exceeds that is room for replicas of what is wanted most"""
    dispatch_rule: str = SPLIT
    """how replicas are chosen, as dispatch in [engine]: split or cover. What ranks serve and read is reckoned by the shares either way"""
    profiled_tokens_per_second: int = 4_000
    """of ended requests whose experts a rank reports one by one; what exceeds it is left out"""
    activity_seconds: float = 0.5
    """least time between two counts of a rank's activated experts while it is busy"""
    seed: int = 0
    """chooses the popularity of experts; engines of one model must agree on it"""
    refuse_share: float = 0.0
    """share of the requests that is refused as overload, for soaks"""
    error_share: float = 0.0
    """share of the requests that fails before the first token"""
    break_share: float = 0.0
    """share of the requests whose connection breaks in the middle of the answer"""
    lose_kv_share: float = 0.0
    """share of the KV events that is never reported"""

    def __post_init__(self) -> None:
        _need(self.shape in SHAPES, "shape", self.shape, f"use one of {', '.join(SHAPES)}")
        named = self.placement in PLACEMENTS or "." in self.placement or "/" in self.placement
        _need(named, "placement", self.placement, f"use one of {', '.join(PLACEMENTS)}, or name a file, with a dot or a slash in its name")
        least = -(-SHAPES[self.shape].experts // self.ranks) if self.ranks > 0 else 1
        _need(self.slots_per_rank is None or self.slots_per_rank >= least, "slots_per_rank", self.slots_per_rank, f"use {least} or more, or leave it out")
        _need(self.dispatch_rule in DISPATCHES, "dispatch_rule", self.dispatch_rule, f"use one of {', '.join(DISPATCHES)}")
        for key in ("kv_blocks", "block_size", "max_running", "max_waiting", "domain_blocks", "node_ranks", "profiled_tokens_per_second"):
            _need(getattr(self, key) >= 1, key, getattr(self, key), "use 1 or more")
        _need(1 <= self.ranks <= SHAPES[self.shape].experts, "ranks", self.ranks, f"use 1 to {SHAPES[self.shape].experts}, the experts of a layer")
        _need(1 <= self.domains <= MOST_DOMAINS, "domains", self.domains, f"use 1 to {MOST_DOMAINS}")
        _need(self.max_batch_tokens > self.max_running, "max_batch_tokens", self.max_batch_tokens, f"must exceed max_running ({self.max_running})")
        _need(self.max_context is None or self.max_context >= 2, "max_context", self.max_context, "use 2 or more, or leave it out")
        _need(self.kv_blocks * self.block_size >= 2, "kv_blocks", self.kv_blocks, "hold at least 2 tokens")
        _need(self.output_tokens >= 0, "output_tokens", self.output_tokens, "use 0 or more")
        for key in ("time_scale", "activity_seconds", "rank_bytes_per_second", "node_bytes_per_second"):
            _need(0 < getattr(self, key) < float("inf"), key, getattr(self, key), "use a positive number")
        for key in ("popularity_skew", "domain_skew", "token_skew"):
            _need(0 <= getattr(self, key) <= 10, key, getattr(self, key), "use 0 to 10")
        for key in ("refuse_share", "error_share", "break_share", "lose_kv_share"):
            _need(0 <= getattr(self, key) <= 1, key, getattr(self, key), "use 0 to 1")
        _need(0 <= self.seed < 1 << 63, "seed", self.seed, "use 0 or more")
        for key in EngineSpeed.__struct_fields__:
            value = getattr(self, key)
            _need(value is None or 0 <= value < float("inf"), key, value, "use seconds >= 0")

    @property
    def model_shape(self) -> ModelShape:
        return SHAPES[self.shape]

    @property
    def context(self) -> int:
        """Tokens that a request may have, prompt and completion together."""
        return min(MOST_CONTEXT if self.max_context is None else self.max_context, self.kv_blocks * self.block_size)

    @property
    def served_model(self) -> str:
        """The name that requests use."""
        return self.model or self.shape

    @property
    def speed(self) -> EngineSpeed:
        """Speeds of a rank in simulated seconds."""
        default = speed_of(self.shape, self.block_size)
        chosen = {key: getattr(self, key) for key in EngineSpeed.__struct_fields__}
        return EngineSpeed(**{key: getattr(default, key) if value is None else value for key, value in chosen.items()})

    @property
    def real_speed(self) -> EngineSpeed:
        """Speeds of a rank as a clock shows them."""
        speed = self.speed
        return EngineSpeed(**{key: self.time_scale * getattr(speed, key) for key in EngineSpeed.__struct_fields__})

    @property
    def covers(self) -> bool:
        """Whether replicas are chosen such that a token is sent to few ranks."""
        return self.dispatch_rule == COVER

    @property
    def node_of_rank(self) -> tuple[int, ...]:
        """The machine of each rank, numbered from 0."""
        return tuple(rank // self.node_ranks for rank in range(self.ranks))


def _need(holds: bool, key: str, value: object, remedy: str) -> None:
    if not holds:
        raise ValueError(f"simulated engine: {key} = {value!r}: {remedy}")
