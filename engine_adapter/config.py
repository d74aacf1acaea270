"""Settings of the embedded engine, the agent and transfers. Read once, by the composition root."""

from dataclasses import dataclass

from fleet.blocks import BLOCK_SIZE
from fleet.dispatch import DISPATCHES, SPLIT
from fleet.settings import FilePath
from fleet.timing import MAX_SECONDS

DTYPES = ("float32", "bfloat16")
"""Data types that the embedded engine can compute in."""
_MOST_LINK_SECONDS = 0.01
_MOST_THREADS = 4
"""With more threads, waiting for each other's Python code outweighs the shared computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig:
    """Settings of an engine's ranks, the same on every rank. The constructor raises a ValueError that names
    the key and the remedy."""

    checkpoint: FilePath | None = None
    """Checkpoint folder in Hugging Face's layout: config.json, *.safetensors, tokenizer.json. None: the
    composition root supplies one."""
    model: str | None = None
    """Model name in requests. None: the name of the folder."""
    ranks: int = 1
    slots_per_rank: int | None = None
    """Expert slots of a rank in one layer. None: as many as needed. Extra slots hold replicas of the experts
    in highest demand."""
    placement: FilePath | None = None
    """File with the initial placement, as written by `roost plan --profile`. None: experts in order."""
    kv_blocks: int = 2048
    """KV blocks per rank."""
    block_size: int = BLOCK_SIZE
    """Tokens per KV block."""
    max_context: int | None = None
    """Longest sequence in tokens, prompt and completion together. None: the model's limit, or the capacity of
    kv_blocks if that is lower."""
    max_batch_tokens: int = 512
    """Tokens that a rank computes in one step."""
    threads: int | None = None
    """Threads that share the large steps of an engine with one rank. The results are bit-identical. None: one
    per core, at most 4. Set 1 where several engines share a machine: threads that wait for a core lengthen
    the step."""
    max_running: int = 64
    """Sequences that a rank runs concurrently."""
    max_waiting: int = 256
    """Requests that a rank queues. Further requests are rejected as overload."""
    dtype: str = "float32"
    ballast_bytes: int = 0
    """Padding bytes added to every expert and never computed with. They make the experts of a small model as
    expensive to move as those of a large one."""
    dispatch: str = SPLIT
    """Replica selection. split: for each expert of a token separately, by the placement's shares. cover: for
    all experts of a token together, so that the token is sent to few ranks. cover pays off where links
    between ranks are slow and experts have replicas."""
    dispatch_seconds: float | None = None
    """Assumed cost of sending a token to the experts of another rank and back, per layer and rank. None:
    measured at the start. Set it where that measurement does not represent the links that matter, for example
    when processes of one machine stand for ranks on several."""
    link_seconds: float = 0.0
    """Artificial delay added to sending a token to the experts of another rank and back, per layer and rank.
    Ranks of one machine then wait for each other as over a network, which shows the value of locality there.
    Routing costs include it."""
    step_timeout_seconds: float = 10.0
    """Step timeout. A longer step means that a rank is lost, and the engine fails."""
    join_timeout_seconds: float = 120.0
    """Time that a starting rank waits for the others."""
    stop_timeout_seconds: float = 5.0
    """Time that stopping waits for the step in progress."""
    seed: int | None = None
    """Generator seed for requests that set none. None: from the system's entropy."""

    def __post_init__(self) -> None:
        for key in ("ranks", "kv_blocks", "block_size", "max_running", "max_waiting"):
            _need(getattr(self, key) >= 1, key, getattr(self, key), "use 1 or more")
        _need(
            self.block_size == BLOCK_SIZE,
            "block_size",
            self.block_size,
            f"the engine's pages hold {BLOCK_SIZE} tokens; leave it at {BLOCK_SIZE}",
        )
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
        least = 2 * self.block_size
        _need(
            self.kv_blocks * self.block_size >= least,
            "kv_blocks",
            self.kv_blocks,
            f"hold at least {least} tokens",
        )
        _need(self.dtype in DTYPES, "dtype", self.dtype, f"use one of {', '.join(DTYPES)}")
        _need(self.dispatch in DISPATCHES, "dispatch", self.dispatch, f"use one of {', '.join(DISPATCHES)}")
        _need(
            self.threads is None or self.threads >= 1,
            "threads",
            self.threads,
            "use 1 or more, or leave it out",
        )
        for key in ("step_timeout_seconds", "join_timeout_seconds", "stop_timeout_seconds"):
            _need(
                0 < getattr(self, key) < float("inf"),
                key,
                getattr(self, key),
                "use a positive number of seconds",
            )
        _need(
            self.dispatch_seconds is None or 0 <= self.dispatch_seconds <= MAX_SECONDS,
            "dispatch_seconds",
            self.dispatch_seconds,
            "use seconds >= 0, or leave it out",
        )
        _need(
            0 <= self.link_seconds <= _MOST_LINK_SECONDS,
            "link_seconds",
            self.link_seconds,
            f"use 0 (the links that there are) to {_MOST_LINK_SECONDS:g}",
        )
        _need(self.ballast_bytes >= 0, "ballast_bytes", self.ballast_bytes, "use 0 or more")
        _need(
            self.slots_per_rank is None or self.slots_per_rank >= 1,
            "slots_per_rank",
            self.slots_per_rank,
            "use 1 or more, or leave it out",
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
        return 1 if self.ranks > 1 else self.threads or min(cores, _MOST_THREADS)

    @property
    def served_model(self) -> str:
        """Model name in requests."""
        return self.model or str(self.folder).rstrip("/").rpartition("/")[2]


def _need(holds: bool, key: str, value: object, remedy: str) -> None:
    if not holds:
        raise ValueError(f"embedded engine: {key} = {value!r}: {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Reporting intervals of an agent, in seconds. ValueError names the setting that is out of range."""

    heartbeat_seconds: float = 1.0
    """Interval of heartbeats and of refreshes of the name claim."""
    lease_seconds: float = 3.0
    """Lease duration of the engine name. A new holder waits this long for a silent one."""
    facts_seconds: float = 0.05
    """Shortest interval between two polls of the engine. Limits load reports and batches of KV events to
    about 20 a second."""
    load_seconds: float = 1.0
    """Longest interval between load reports. Changes are reported earlier."""
    experts_seconds: float = 1.0
    """Interval of expert reports. Intervals without tokens are not reported."""
    farewell_seconds: float = 2.0
    """Time limit for leaving."""
    samples_per_second: float = 2.0
    """Rate of finished requests that a rank reports with their complete counts. The tracker learns clusters
    from them."""
    samples_burst: float = 32.0
    """Burst limit of these samples after a quiet period."""
    profile_blocks: int = 1024
    """KV blocks of a request whose signatures are reported, counted from the end of the reused prefix."""
    profile_queue_bytes: int = 64 * 1024 * 1024
    """Memory for traces of finished requests that wait to be profiled. Beyond it, the oldest are dropped."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name, least, most in (
            ("samples_burst", 1, 4096),
            ("profile_blocks", 1, 1 << 14),
            ("profile_queue_bytes", 1 << 20, 1 << 36),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be {least} to {most}, not {getattr(self, name)}")


TRANSFERS = ("auto", "shared", "nixl")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Settings for reading experts from other ranks. ValueError names the setting that is out of range."""

    way: str = "auto"
    """Transfer backend. auto: shared memory between ranks of one machine, NIXL between machines. shared or
    nixl: only that one."""
    bytes_per_second: int | None = None
    """Rate limit of a rank's reads, so that they leave memory bandwidth to its steps. None: unlimited."""
    piece_bytes: int = 16 * 1024 * 1024
    """Largest single read. A larger one would block other work of the transfer thread."""
    least_seconds: float = 1.0
    """Minimum time limit of a read, whatever its size. The first read has to connect."""
    retries: int = 2
    """Retries of an expert after a wrong checksum or a failed source. A retry uses another replica if there
    is one."""
    lease_seconds: float = 5.0
    """Lease duration on a source's cells. The source keeps them unchanged this long without a message from
    the reader."""
    quarantine_cells: int = 2
    """Quarantined cells above which new handovers are refused until the cells settle."""
    niceness: int = 10
    """Nice value of the reading thread relative to the computing threads, 0 to 19."""
    audit_seconds: float = 600.0
    """Audit period: each expert that a rank serves is compared with its checksums once in this time. The
    engine ends when the memory of an expert has changed. 0: no audit."""

    def __post_init__(self) -> None:
        if self.way not in TRANSFERS:
            raise ValueError(f"way must be one of {', '.join(TRANSFERS)}, not {self.way!r}")
        for name, least, most in (
            ("piece_bytes", 4096, 1 << 30),
            ("retries", 0, 16),
            ("quarantine_cells", 0, 1 << 20),
            ("niceness", 0, 19),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be {least} to {most}, not {getattr(self, name)}")
        if not 0 <= self.audit_seconds < float("inf"):
            raise ValueError(f"audit_seconds must be 0 (never) or more, not {self.audit_seconds}")
        for name in ("least_seconds", "lease_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.bytes_per_second is not None and self.bytes_per_second < 1:
            raise ValueError(f"bytes_per_second must be 1 or more, or left out, not {self.bytes_per_second}")
