"""Settings of the simulated engine. Read once, by the composition root."""

from dataclasses import dataclass

from engine_adapter.simulated.model.presets import SHAPES, speed_of
from fleet.blocks import BLOCK_SIZE
from fleet.dispatch import COVER, DISPATCHES, SPLIT
from fleet.experts import ModelShape
from fleet.timing import EngineSpeed

PLACEMENTS = ("linear", "aligned")
MAX_DOMAINS = 64
MAX_CONTEXT = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """Settings of one simulated engine. The constructor raises a ValueError that names the key and the
    remedy.

    The speeds (prefill_token ... expert_pair) are those of `fleet.timing.EngineSpeed`. Unset ones are the
    shape's on H100s (`presets`).
    """

    shape: str = "demo"
    """Model shape: deepseek-v3, qwen3-235b, or demo (the demo model's)."""
    model: str | None = None
    """Model name in requests. None: the name of the shape."""
    weights: str | None = None
    """Weights digest to announce, for trying a rolling update (responses do not depend on it). None: no
    digest is announced."""
    ranks: int = 2
    node_ranks: int = 8
    """Ranks per machine. Dispatch between machines uses the slower link."""
    kv_blocks: int = 8192
    """KV blocks per rank."""
    block_size: int = BLOCK_SIZE
    """Tokens per KV block."""
    max_context: int | None = None
    """Longest sequence in tokens, prompt and completion together. None: 32768, or the capacity of kv_blocks
    if that is lower."""
    max_batch_tokens: int = 2048
    """Tokens that a rank computes in one step."""
    max_running: int = 128
    """Sequences that a rank runs concurrently."""
    max_waiting: int = 256
    """Requests that a rank queues. Further requests are rejected as overload."""
    time_scale: float = 1.0
    """Real seconds per simulated second. 0.1: ten times faster than simulated."""
    output_tokens: int = 0
    """Mean length of answers that end before max_tokens, drawn per prompt. 0: all answers run to their
    max_tokens."""
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
    """Bandwidth of expert reads between ranks of one machine, in bytes per simulated second."""
    node_bytes_per_second: float = 12.5e9
    """Bandwidth of expert reads between machines, in bytes per simulated second."""
    domains: int = 8
    """Traffic domains, each with its own expert preferences. The hash of a prompt's first blocks selects its
    domain."""
    domain_blocks: int = 1
    """Number of leading prompt blocks that select the domain. Raise it where many prompts share a prefix."""
    popularity_skew: float = 0.5
    """Sigma of the log-normal popularity of a layer's experts, common to all traffic."""
    domain_skew: float = 1.0
    """Sigma of a domain's deviation from the common popularity. 0: all domains have the same preferences."""
    token_skew: float = 0.5
    """Sigma of a token's deviation from its domain's preferences."""
    placement: str = "linear"
    """Initial placement. linear: experts in order. aligned: each expert on the rank whose domain demands it
    most, with balanced ranks. Any other value: a file, as written by `roost plan --profile`."""
    slots_per_rank: int | None = None
    """Expert slots of a rank in one layer. None: as many as needed. Extra slots hold replicas of the experts
    in highest demand."""
    dispatch_rule: str = SPLIT
    """Replica selection, like dispatch in [engine]: split or cover. The load and the expert reads of ranks
    are computed from the shares in both cases."""
    profiled_tokens_per_second: int = 4_000
    """Rate limit, in tokens of finished requests, for the requests that a rank reports with their experts.
    Requests beyond it are not reported."""
    activity_seconds: float = 0.5
    """Shortest interval between two counts of a busy rank's activated experts."""
    seed: int = 0
    """Seed of the experts' popularity. Engines of one model must use the same seed."""
    refuse_share: float = 0.0
    """Share of requests rejected as overload, for soak tests."""
    error_share: float = 0.0
    """Share of requests that fail before the first token."""
    break_share: float = 0.0
    """Share of requests whose connection breaks in the middle of the response."""
    lose_kv_share: float = 0.0
    """Share of KV events that are never reported."""

    def __post_init__(self) -> None:
        _need(self.shape in SHAPES, "shape", self.shape, f"use one of {', '.join(SHAPES)}")
        named = self.placement in PLACEMENTS or "." in self.placement or "/" in self.placement
        _need(
            named,
            "placement",
            self.placement,
            f"use one of {', '.join(PLACEMENTS)}, or name a file, with a dot or a slash in its name",
        )
        min_slots = -(-SHAPES[self.shape].experts // self.ranks) if self.ranks > 0 else 1
        _need(
            self.slots_per_rank is None or self.slots_per_rank >= min_slots,
            "slots_per_rank",
            self.slots_per_rank,
            f"use {min_slots} or more, or leave it out",
        )
        _need(
            self.dispatch_rule in DISPATCHES,
            "dispatch_rule",
            self.dispatch_rule,
            f"use one of {', '.join(DISPATCHES)}",
        )
        for key in (
            "kv_blocks",
            "block_size",
            "max_running",
            "max_waiting",
            "domain_blocks",
            "node_ranks",
            "profiled_tokens_per_second",
        ):
            _need(getattr(self, key) >= 1, key, getattr(self, key), "use 1 or more")
        _need(
            1 <= self.ranks <= SHAPES[self.shape].experts,
            "ranks",
            self.ranks,
            f"use 1 to {SHAPES[self.shape].experts}, the experts of a layer",
        )
        _need(1 <= self.domains <= MAX_DOMAINS, "domains", self.domains, f"use 1 to {MAX_DOMAINS}")
        _need(
            self.max_batch_tokens > self.max_running,
            "max_batch_tokens",
            self.max_batch_tokens,
            f"must exceed max_running ({self.max_running})",
        )
        _need(
            self.max_context is None or self.max_context >= 2,
            "max_context",
            self.max_context,
            "use 2 or more, or leave it out",
        )
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
        """Longest sequence in tokens, prompt and completion together."""
        return min(
            MAX_CONTEXT if self.max_context is None else self.max_context, self.kv_blocks * self.block_size
        )

    @property
    def served_model(self) -> str:
        """Model name in requests."""
        return self.model or self.shape

    @property
    def speed(self) -> EngineSpeed:
        """Speeds of a rank in simulated seconds."""
        default = speed_of(self.shape, self.block_size)
        chosen = {key: getattr(self, key) for key in EngineSpeed.__struct_fields__}
        return EngineSpeed(
            **{key: getattr(default, key) if value is None else value for key, value in chosen.items()}
        )

    @property
    def real_speed(self) -> EngineSpeed:
        """Speeds of a rank in real seconds."""
        speed = self.speed
        return EngineSpeed(
            **{key: self.time_scale * getattr(speed, key) for key in EngineSpeed.__struct_fields__}
        )

    @property
    def covers(self) -> bool:
        """True if replicas are chosen so that a token is sent to few ranks."""
        return self.dispatch_rule == COVER

    @property
    def node_of_rank(self) -> tuple[int, ...]:
        """Machine of each rank, numbered from 0."""
        return tuple(rank // self.node_ranks for rank in range(self.ranks))


def _need(holds: bool, key: str, value: object, remedy: str) -> None:
    if not holds:
        raise ValueError(f"simulated engine: {key} = {value!r}: {remedy}")
