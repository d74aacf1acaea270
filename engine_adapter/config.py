"""What can be set about the embedded engine; read once, by the composition root."""

from dataclasses import dataclass

from fleet.blocks import BLOCK_SIZE
from fleet.dispatch import DISPATCHES, SPLIT
from fleet.settings import FilePath
from fleet.timing import MOST_SECONDS

DTYPES = ("float32", "bfloat16")
"""What the embedded engine computes in."""
_MOST_LINK_SECONDS = 0.01
_MOST_THREADS = 4
"""Beyond, threads wait for each other's Python more than they compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig:
    """One rank group's settings, the same on every rank. ValueError at birth names the key and what to do."""

    checkpoint: FilePath | None = None
    """folder in Hugging Face's layout: config.json, *.safetensors, tokenizer.json; None: the composition root names one"""
    model: str | None = None
    """name that requests use; None: the folder's name"""
    ranks: int = 1
    slots_per_rank: int | None = None
    """experts of one layer that a rank has room for; None: as many as needed. What exceeds that is room for replicas of what is wanted most"""
    placement: FilePath | None = None
    """file with the placement to begin with, as `roost plan --profile` writes it; None: experts in order"""
    kv_blocks: int = 2048
    """KV blocks per rank"""
    block_size: int = BLOCK_SIZE
    """tokens per KV block"""
    max_context: int | None = None
    """tokens, prompt and completion together; None: the model's, or what fits into kv_blocks if that is less"""
    max_batch_tokens: int = 512
    """tokens a rank computes in one step"""
    threads: int | None = None
    """threads that share the large steps of an engine of one rank, and compute the same bits; None: one per core, up to 4.
    Set 1 where several engines share a machine: threads that wait for a core make a step longer"""
    max_running: int = 64
    """sequences a rank runs at once"""
    max_waiting: int = 256
    """requests a rank lets wait; more are refused as overload"""
    dtype: str = "float32"
    ballast_bytes: int = 0
    """further bytes of every expert, which nothing computes with: they make a small model's experts as heavy to move as a large one's"""
    dispatch: str = SPLIT
    """how replicas are chosen. split: for each expert of a token by the placement's shares alone; cover: for all of them together, such that the
    token is sent to few ranks, which pays where links between ranks are slow and experts have replicas"""
    dispatch_seconds: float | None = None
    """what sending a token to the experts of another rank and back is taken to cost, per layer and rank; None: as measured at the start. State it
    where the measurement says little of the links that matter, such as when ranks are processes of one machine that stand for several"""
    link_seconds: float = 0.0
    """by how much sending a token to the experts of another rank and back is made to take longer, per layer and rank: ranks of one machine then wait for
    each other as over a network, which shows what locality is worth there. Prices contain it"""
    step_timeout_seconds: float = 10.0
    """a step that takes longer means that a rank is lost, and the engine fails"""
    join_timeout_seconds: float = 120.0
    """how long a rank that starts waits for the others to come"""
    stop_timeout_seconds: float = 5.0
    """how long stopping waits for the step in progress"""
    seed: int | None = None
    """draws the seeds of requests that state none; None: from the system's entropy"""

    def __post_init__(self) -> None:
        for key in ("ranks", "kv_blocks", "block_size", "max_running", "max_waiting"):
            _need(getattr(self, key) >= 1, key, getattr(self, key), "use 1 or more")
        _need(self.block_size == BLOCK_SIZE, "block_size", self.block_size, f"the engine's pages hold {BLOCK_SIZE} tokens; leave it at {BLOCK_SIZE}")
        _need(self.max_batch_tokens > self.max_running, "max_batch_tokens", self.max_batch_tokens, f"must exceed max_running ({self.max_running})")
        _need(self.max_context is None or self.max_context >= 2, "max_context", self.max_context, "use 2 or more, or leave it out")
        least = 2 * self.block_size
        _need(self.kv_blocks * self.block_size >= least, "kv_blocks", self.kv_blocks, f"hold at least {least} tokens")
        _need(self.dtype in DTYPES, "dtype", self.dtype, f"use one of {', '.join(DTYPES)}")
        _need(self.dispatch in DISPATCHES, "dispatch", self.dispatch, f"use one of {', '.join(DISPATCHES)}")
        _need(self.threads is None or self.threads >= 1, "threads", self.threads, "use 1 or more, or leave it out")
        for key in ("step_timeout_seconds", "join_timeout_seconds", "stop_timeout_seconds"):
            _need(0 < getattr(self, key) < float("inf"), key, getattr(self, key), "use a positive number of seconds")
        _need(
            self.dispatch_seconds is None or 0 <= self.dispatch_seconds <= MOST_SECONDS,
            "dispatch_seconds",
            self.dispatch_seconds,
            "use seconds >= 0, or leave it out",
        )
        _need(0 <= self.link_seconds <= _MOST_LINK_SECONDS, "link_seconds", self.link_seconds, f"use 0 (the links that there are) to {_MOST_LINK_SECONDS:g}")
        _need(self.ballast_bytes >= 0, "ballast_bytes", self.ballast_bytes, "use 0 or more")
        _need(self.slots_per_rank is None or self.slots_per_rank >= 1, "slots_per_rank", self.slots_per_rank, "use 1 or more, or leave it out")

    @property
    def folder(self) -> FilePath:
        """The checkpoint folder. ValueError when none was named."""
        if self.checkpoint is None:
            raise ValueError("embedded engine: checkpoint is not set: name a folder with config.json, *.safetensors and tokenizer.json")
        return self.checkpoint

    def threads_of_rank(self, cores: int) -> int:
        """Threads of a rank on a machine with so many cores: with several ranks one each, since they share the cores already."""
        return 1 if self.ranks > 1 else self.threads or min(cores, _MOST_THREADS)

    @property
    def served_model(self) -> str:
        """The name that requests use."""
        return self.model or str(self.folder).rstrip("/").rpartition("/")[2]


def _need(holds: bool, key: str, value: object, remedy: str) -> None:
    if not holds:
        raise ValueError(f"embedded engine: {key} = {value!r}: {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How often an agent speaks; seconds. ValueError names the setting that is out of range."""

    heartbeat_seconds: float = 1.0
    """heartbeats, and refreshes of the name's claim"""
    lease_seconds: float = 3.0
    """how long a silent holder of the name is waited for"""
    facts_seconds: float = 0.05
    """least time between two looks at the engine: bounds load reports and batches of KV events to some 20 a second"""
    load_seconds: float = 1.0
    """load is reported at least so often, and else when it changes"""
    experts_seconds: float = 1.0
    """interval of expert reports; intervals without tokens are silent"""
    farewell_seconds: float = 2.0
    """what leaving may take"""
    samples_per_second: float = 2.0
    """how many ended requests a rank reports with their whole counts, from which the tracker learns clusters"""
    samples_burst: float = 32.0
    """how many of them at once, after a quiet time"""
    profile_blocks: int = 1024
    """KV blocks of a request whose signatures are reported, the first ones behind the prefix that was reused"""
    profile_queue_bytes: int = 64 * 1024 * 1024
    """traces of ended requests that may wait to be profiled; beyond, the oldest are left out"""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name, least, most in (("samples_burst", 1, 4096), ("profile_blocks", 1, 1 << 14), ("profile_queue_bytes", 1 << 20, 1 << 36)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be {least} to {most}, not {getattr(self, name)}")


TRANSFERS = ("auto", "shared", "nixl")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How a rank reads experts from other ranks. ValueError names the setting that is out of range."""

    way: str = "auto"
    """auto: shared memory between ranks of one machine, NIXL between machines; shared or nixl: nothing else"""
    bytes_per_second: int | None = None
    """a rank reads at most so fast, so that its steps have the machine to themselves; None: as fast as it goes"""
    piece_bytes: int = 16 * 1024 * 1024
    """largest single read; more would hold up whatever else the transfer's thread does"""
    least_seconds: float = 1.0
    """a read is given so long at least, whatever its size: the first one has to connect"""
    retries: int = 2
    """times that an expert is read again after its checksums were wrong or its source failed, from another replica if there is one"""
    lease_seconds: float = 5.0
    """a source keeps what is being read unchanged for so long without hearing from the reader"""
    quarantine_cells: int = 2
    """cells that may be in quarantine before new handovers are refused until they settle"""
    niceness: int = 10
    """of the thread that reads, against those that compute; 0 to 19"""
    audit_seconds: float = 600.0
    """in which each expert that a rank serves is compared with its checksums once; an engine in whose memory something else lies ends. 0: never"""

    def __post_init__(self) -> None:
        if self.way not in TRANSFERS:
            raise ValueError(f"way must be one of {', '.join(TRANSFERS)}, not {self.way!r}")
        for name, least, most in (("piece_bytes", 4096, 1 << 30), ("retries", 0, 16), ("quarantine_cells", 0, 1 << 20), ("niceness", 0, 19)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be {least} to {most}, not {getattr(self, name)}")
        if not 0 <= self.audit_seconds < float("inf"):
            raise ValueError(f"audit_seconds must be 0 (never) or more, not {self.audit_seconds}")
        for name in ("least_seconds", "lease_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.bytes_per_second is not None and self.bytes_per_second < 1:
            raise ValueError(f"bytes_per_second must be 1 or more, or left out, not {self.bytes_per_second}")
