"""Settings of the embedded engine, the agent and transfers. Read once, by the composition root."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from fleet.dispatch import DispatchRule
from fleet.redaction import without_secrets
from fleet.settings import (
    FilePath,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    check_bounds,
)
from fleet.timing import MAX_SECONDS

_MAX_LINK_SECONDS = 0.01
_MAX_THREADS = 4
"""With more threads, waiting for each other's Python code outweighs the shared computation."""


def checked_url(url: str, whose: str) -> None:
    """Check the URL of a server. whose: begins the text of the ValueError for a URL that is none, or that
    holds a password."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{whose}: the URL {without_secrets(url)!r} must start with http:// or https://")
    # The URL is part of the join event, which every bus client can read.
    if without_secrets(url) != url:
        raise ValueError(
            f"{whose}: the URL {without_secrets(url)!r} names a user; put the server's key into a file"
            " (--api-key-file)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig:
    """Settings of an engine's ranks, the same on every rank. The constructor raises a ValueError that names
    the key and the remedy."""

    checkpoint: FilePath | None = None
    """Checkpoint folder in Hugging Face's layout: config.json, *.safetensors, tokenizer.json. None: the
    composition root supplies one."""
    model: str | None = None
    """Model name in requests. None: the name of the folder."""
    ranks: PositiveInt = 1
    slots_per_rank: PositiveInt | None = None
    """Expert slots of a rank in one layer. None: as many as needed. Extra slots hold replicas of the experts
    in highest demand."""
    spare_layers: PositiveInt = 1
    """Room of a rank for incoming experts, in layers: as many layers can turn over at once."""
    placement: FilePath | None = None
    """File with the initial placement, as written by `roost plan --profile`. None: experts in order."""
    kv_blocks: Annotated[int, Meta(ge=2)] = 2048
    """KV blocks per rank."""
    max_context: Annotated[int, Meta(ge=2)] | None = None
    """Longest sequence in tokens, prompt and completion together. None: the model's limit, or the capacity of
    kv_blocks if that is lower."""
    max_batch_tokens: PositiveInt = 512
    """Tokens that a rank computes in one step."""
    threads: PositiveInt | None = None
    """Threads that share the large steps of an engine with one rank. The results are bit-identical. None: one
    per core, at most 4. Set 1 where several engines share a machine: threads that wait for a core lengthen
    the step."""
    max_running: PositiveInt = 64
    """Sequences that a rank runs concurrently."""
    max_waiting: PositiveInt = 256
    """Requests that a rank queues. Further requests are rejected as overload."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    ballast_bytes: NonNegativeInt = 0
    """Padding bytes added to every expert and never computed with. They make the experts of a small model as
    expensive to move as those of a large one."""
    dispatch: DispatchRule = "split"
    """Replica selection. split: for each expert of a token separately, by the placement's shares. cover: for
    all experts of a token together, so that the token is sent to few ranks. cover pays off where links
    between ranks are slow and experts have replicas."""
    dispatch_seconds: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] | None = None
    """Assumed cost of sending a token to the experts of another rank and back, per layer and rank. None:
    measured at the start. Set it where that measurement does not represent the links that matter, for example
    when processes of one machine stand for ranks on several."""
    link_seconds: Annotated[float, Meta(ge=0, le=_MAX_LINK_SECONDS)] = 0.0
    """Artificial delay added to sending a token to the experts of another rank and back, per layer and rank.
    Ranks of one machine then wait for each other as over a network, which shows the value of locality there.
    Routing costs include it."""
    collective_seconds: Annotated[float, Meta(ge=0, le=_MAX_LINK_SECONDS)] = 0.0
    """Artificial delay added to every exchange between the ranks, whatever their layout. With `link_seconds`
    it emulates a network on one machine, so that layouts can be compared there. Measured step times include
    it."""
    calibration_seconds: NonNegative = 1.5
    """Time for measuring steps of many kinds at the start, in every layout that the engine can serve, beside
    the first step of each kind. 0: only that one, so that figures are less certain."""
    preempt_to_switch: bool = False
    """True: where the KV of open requests does not fit a switch of attention, the latest ones lose theirs and
    are computed again. False: the switch is refused."""
    copy_ahead_seconds: NonNegative = 5.0
    """Longest time for which KV pages are copied ahead of a switch of attention, while the engine serves. The
    step that switches copies the rest. 0: it copies everything."""
    copy_ahead_bytes_per_second: PositiveInt | None = None
    """Limit of a rank's copies ahead of a switch. None: as fast as the lowest priority permits."""
    step_timeout_seconds: Positive = 10.0
    """Step timeout. A longer step means that a rank is lost, and the engine fails."""
    join_timeout_seconds: Positive = 120.0
    """Time that a starting rank waits for the others."""
    stop_timeout_seconds: Positive = 5.0
    """Time that stopping waits for the step in progress."""
    seed: int | None = None
    """Generator seed for requests that set none. None: from the system's entropy."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.max_batch_tokens <= self.max_running:
            raise ValueError(
                f"max_batch_tokens = {self.max_batch_tokens} must exceed max_running ({self.max_running})"
            )

    @property
    def folder(self) -> FilePath:
        """The checkpoint folder. ValueError when it is not set."""
        if self.checkpoint is None:
            raise ValueError(
                "embedded engine: checkpoint is not set: name a folder with config.json, *.safetensors and"
                " tokenizer.json"
            )
        return self.checkpoint

    def threads_of_rank(self, cores: int) -> int:
        """Threads of a rank on a machine with this number of cores. One each when there are several ranks,
        since the ranks already share the cores."""
        return 1 if self.ranks > 1 else self.threads or min(cores, _MAX_THREADS)

    @property
    def served_model(self) -> str:
        """Model name in requests."""
        return self.model or str(self.folder).rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Reporting intervals of an agent, in seconds. ValueError names the setting that is out of range."""

    heartbeat_seconds: Positive = 1.0
    """Interval of heartbeats and of refreshes of the name claim."""
    lease_seconds: Positive = 3.0
    """Lease duration of the engine name. A new holder waits this long for a silent one."""
    facts_seconds: Positive = 0.05
    """Shortest interval between two polls of the engine. Limits load reports and batches of KV events to
    about 20 a second."""
    load_seconds: Positive = 1.0
    """Longest interval between load reports. Changes are reported earlier."""
    experts_seconds: Positive = 1.0
    """Interval of expert reports. Intervals without tokens are not reported."""
    farewell_seconds: Positive = 2.0
    """Time limit for leaving."""
    samples_per_second: Positive = 2.0
    """Rate of finished requests that a rank reports with their complete counts, from which the tracker learns
    clusters, and with the experts of some of their tokens, from which the planner learns which experts one
    token needs together."""
    samples_burst: Annotated[float, Meta(ge=1, le=4096)] = 32.0
    """Burst limit of these samples after a quiet period."""
    profile_queue_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 36)] = 64 * 1024 * 1024
    """Memory for traces of finished requests that wait to be profiled. Beyond it, the oldest are dropped."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Settings for reading experts from other ranks. ValueError names the setting that is out of range."""

    backend: Literal["auto", "shared", "nixl"] = "auto"
    """Transfer backend. auto: shared memory between ranks of one machine, NIXL between machines. shared or
    nixl: only that one."""
    bytes_per_second: PositiveInt | None = None
    """Rate limit of a rank's reads, so that they leave memory bandwidth to its steps. Copies within its own
    memory have the same limit. None: unlimited."""
    max_step_loss: Annotated[float, Meta(gt=0, le=1)] = 0.05
    """Largest part of the time of steps that reads may cost. While the engine serves, reads begin at 250 MB/s
    and become faster as long as steps lose less than half of this, and slower while they lose more than it,
    but not slower than they began. While it is idle, they are not limited. 1: never limited by it."""
    piece_bytes: Annotated[int, Meta(ge=4096, le=1 << 30)] = 16 * 1024 * 1024
    """Largest single read. A larger one would block other work of the transfer thread."""
    min_seconds: Positive = 1.0
    """Minimum time limit of a read, whatever its size. The first read has to connect."""
    retries: Annotated[int, Meta(ge=0, le=16)] = 2
    """Retries of an expert after a wrong checksum or a failed source. A retry uses another replica if there
    is one."""
    lease_seconds: Positive = 5.0
    """Lease duration on a source's cells. The source keeps them unchanged this long without a message from
    the reader."""
    quarantine_cells: Annotated[int, Meta(ge=0, le=1 << 20)] = 2
    """Quarantined cells above which new handovers are refused until the cells settle."""
    niceness: Annotated[int, Meta(ge=0, le=19)] = 10
    """Nice value of the reading thread relative to the computing threads, 0 to 19."""
    audit_seconds: NonNegative = 600.0
    """Audit period: each expert that a rank serves is compared with its checksums once in this time. The
    engine ends when the memory of an expert has changed. 0: no audit."""

    def __post_init__(self) -> None:
        check_bounds(self)
