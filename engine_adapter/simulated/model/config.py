"""Settings of the simulated engine. Read once, by the composition root."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from engine_adapter.simulated.model.presets import SHAPES, speed_of
from fleet.blocks import BLOCK_SIZE
from fleet.dispatch import COVER, DispatchRule
from fleet.experts import ModelShape
from fleet.layout import sharding_refusal
from fleet.settings import NonNegative, NonNegativeInt, Positive, PositiveInt, Share, check_bounds
from fleet.timing import EngineSpeed

PLACEMENTS = ("linear", "aligned")
MAX_DOMAINS = 64
MAX_CONTEXT = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """Settings of one simulated engine. The constructor raises a ValueError that names the key and the
    remedy.

    The speeds (prefill_token ... gather_byte) are those of `fleet.timing.EngineSpeed`. Unset ones are the
    shape's on H100s (`presets`).
    """

    shape: str = "demo"
    """Model shape: deepseek-v3, qwen3-235b, or demo (the demo model's)."""
    model: str | None = None
    """Model name in requests. None: the name of the shape."""
    weights: str | None = None
    """Weights digest to announce, for trying a rolling update (responses do not depend on it). None: no
    digest is announced."""
    ranks: PositiveInt = 2
    node_ranks: PositiveInt = 8
    """Ranks per machine. Dispatch between machines uses the slower link."""
    kv_blocks: PositiveInt = 8192
    """KV blocks per rank."""
    max_context: Annotated[int, Meta(ge=2)] | None = None
    """Longest sequence in tokens, prompt and completion together. None: 32768, or the capacity of kv_blocks
    if that is lower."""
    max_batch_tokens: PositiveInt = 2048
    """Tokens that a rank computes in one step."""
    max_running: PositiveInt = 128
    """Sequences that a rank runs concurrently."""
    max_waiting: PositiveInt = 256
    """Requests that a rank queues. Further requests are rejected as overload."""
    time_scale: Positive = 1.0
    """Real seconds per simulated second. 0.1: ten times faster than simulated."""
    output_tokens: NonNegativeInt = 0
    """Mean length of answers that end before max_tokens, drawn per prompt. 0: all answers run to their
    max_tokens."""
    prefill_token: NonNegative | None = None
    prefill_pair: NonNegative | None = None
    step: NonNegative | None = None
    decode_sequence: NonNegative | None = None
    decode_block: NonNegative | None = None
    dispatch: NonNegative | None = None
    dispatch_node: NonNegative | None = None
    expert_read: NonNegative | None = None
    expert_pair: NonNegative | None = None
    gather_byte: NonNegative | None = None
    rank_bytes_per_second: Positive = 50e9
    """Bandwidth of expert reads between ranks of one machine, in bytes per simulated second."""
    node_bytes_per_second: Positive = 12.5e9
    """Bandwidth of expert reads between machines, in bytes per simulated second."""
    domains: Annotated[int, Meta(ge=1, le=MAX_DOMAINS)] = 8
    """Traffic domains, each with its own expert preferences. The hash of a prompt's first blocks selects its
    domain."""
    domain_blocks: PositiveInt = 1
    """Number of leading prompt blocks that select the domain. Raise it where many prompts share a prefix."""
    popularity_skew: Annotated[float, Meta(ge=0, le=10)] = 0.5
    """Sigma of the log-normal popularity of a layer's experts, common to all traffic."""
    domain_skew: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """Sigma of a domain's deviation from the common popularity. 0: all domains have the same preferences."""
    placement: str = "linear"
    """Initial placement. linear: experts in order. aligned: each expert on the rank whose domain demands it
    most, with balanced ranks. Any other value: a file, as written by `roost plan --profile`."""
    slots_per_rank: PositiveInt | None = None
    """Expert slots of a rank in one layer. None: as many as needed. Extra slots hold replicas of the experts
    in highest demand."""
    spare_layers: PositiveInt = 1
    """Room of a rank for incoming experts, in layers: as many layers can turn over at once."""
    dispatch_rule: DispatchRule = "split"
    """Replica selection, like dispatch in [engine]: split or cover. The load and the expert reads of ranks
    are computed from the shares in both cases."""
    profiled_tokens_per_second: PositiveInt = 4_000
    """Rate limit, in tokens of finished requests, for the requests that a rank reports with their experts.
    Requests beyond it are not reported."""
    activity_seconds: Positive = 0.5
    """Shortest interval between two counts of a busy rank's activated experts."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of the experts' popularity. Engines of one model must use the same seed."""
    refuse_share: Share = 0.0
    """Share of requests rejected as overload, for soak tests."""
    error_share: Share = 0.0
    """Share of requests that fail before the first token."""
    break_share: Share = 0.0
    """Share of requests whose connection breaks in the middle of the response."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, not {self.shape!r}")
        if self.placement not in PLACEMENTS and not {".", "/"} & set(self.placement):
            raise ValueError(
                f"placement must be one of {', '.join(PLACEMENTS)}, or a file with a dot or a slash in its"
                f" name, not {self.placement!r}"
            )
        experts = SHAPES[self.shape].experts
        if self.ranks > experts:
            raise ValueError(f"ranks must be 1 to {experts}, the experts of a layer, not {self.ranks}")
        enough = -(-experts // self.ranks)
        if self.slots_per_rank is not None and self.slots_per_rank < enough:
            raise ValueError(f"slots_per_rank must be {enough} or more or unset, not {self.slots_per_rank}")
        if self.max_batch_tokens <= self.max_running:
            raise ValueError(
                f"max_batch_tokens = {self.max_batch_tokens} must exceed max_running ({self.max_running})"
            )

    @property
    def parts(self) -> int:
        """Parts of an expert in the ranks' memory: one per rank, or 1 if experts cannot be cut."""
        return 1 if self.unshardable else self.ranks

    @property
    def model_shape(self) -> ModelShape:
        return SHAPES[self.shape]

    @property
    def unshardable(self) -> str:
        """Why experts cannot be cut into parts for the ranks; empty: they can."""
        return sharding_refusal(self.model_shape, self.ranks)

    @property
    def context(self) -> int:
        """Longest sequence in tokens, prompt and completion together."""
        return min(MAX_CONTEXT if self.max_context is None else self.max_context, self.kv_blocks * BLOCK_SIZE)

    @property
    def served_model(self) -> str:
        """Model name in requests."""
        return self.model or self.shape

    @property
    def speed(self) -> EngineSpeed:
        """Speeds of a rank in simulated seconds."""
        default = speed_of(self.shape, BLOCK_SIZE, several_machines=self.ranks > self.node_ranks)
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
