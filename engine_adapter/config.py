"""What can be set about the embedded engine; read once, by the composition root."""

from dataclasses import dataclass
from pathlib import Path

from fleet.blocks import BLOCK_SIZE
from fleet.experts import BYTES_PER_VALUE


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig:
    """One rank group's settings, the same on every rank. ValueError at birth names the key and what to do."""

    checkpoint: Path
    """folder in Hugging Face's layout: config.json, *.safetensors, tokenizer.json"""
    model: str | None = None
    """name that requests use; None: the folder's name"""
    ranks: int = 1
    rendezvous: str = "127.0.0.1:29400"
    """host:port where the ranks of this engine meet; rank 0 listens there. Not used by one rank alone"""
    kv_blocks: int = 2048
    """KV blocks per rank"""
    block_size: int = BLOCK_SIZE
    """tokens per KV block"""
    max_context: int | None = None
    """tokens, prompt and completion together; None: the model's, or what fits into kv_blocks if that is less"""
    max_batch_tokens: int = 512
    """tokens a rank computes in one step"""
    max_running: int = 64
    """sequences a rank runs at once"""
    max_waiting: int = 256
    """requests a rank lets wait; more are refused as overload"""
    dtype: str = "float32"
    step_timeout_seconds: float = 10.0
    """a step that takes longer means that a rank is lost, and the engine fails"""
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
        _need(self.dtype in BYTES_PER_VALUE, "dtype", self.dtype, f"use one of {', '.join(BYTES_PER_VALUE)}")
        for key in ("step_timeout_seconds", "stop_timeout_seconds"):
            _need(0 < getattr(self, key) < float("inf"), key, getattr(self, key), "use a positive number of seconds")
        host, colon, port = self.rendezvous.rpartition(":")
        _need(bool(host and colon) and port.isdecimal() and int(port) < 65536, "rendezvous", self.rendezvous, "use host:port")
        _need(self.checkpoint.is_dir(), "checkpoint", str(self.checkpoint), "name an existing folder with config.json and *.safetensors")

    @property
    def served_model(self) -> str:
        """The name that requests use."""
        return self.model or self.checkpoint.resolve().name


def _need(holds: bool, key: str, value: object, remedy: str) -> None:
    if not holds:
        raise ValueError(f"embedded engine: {key} = {value!r}: {remedy}")
