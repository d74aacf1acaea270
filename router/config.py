"""The router's settings: one frozen value, made at the composition root."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

_TAKEN = ("authorization", "traceparent", "tracestate", "x-request-id")
"""Headers that mean something else."""
_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Every setting has a default; ValueError names the setting, the value and what is allowed."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    """file of keys that clients may present as `Authorization: Bearer`, one per line; unset: no key is asked for"""
    backends: tuple[str, ...] = ()
    """base URLs of plain OpenAI-compatible servers; they need neither a bus nor agents"""
    backend_key_file: Path | None = None
    """file whose first line is sent to plain backends as `Authorization: Bearer`"""
    probe_seconds: float = 2.0
    """how often a plain backend's /v1/models is asked"""

    session_header: str = "x-session-id"
    """request header that names a conversation; without it, the body's prompt_cache_key"""
    tenant_header: str = "x-tenant-id"
    """request header that names who asks; without it, the body's user or safety_identifier"""
    prediction_bytes: int = 96 * 1024 * 1024
    """memory that the copy of one model's prediction tables may take; enough for all that a tracker keeps by default"""
    outcome_seconds: float = 0.5
    """finished requests are told to the tracker so often, or sooner when many wait"""
    most_outcomes_waiting: int = 4096
    """finished requests that wait to be told; more are dropped and counted"""

    prefill_weight: float = 1.0
    queue_weight: float = 1.0
    decode_weight: float = 1.0
    experts_weight: float = 1.0
    expected_output_tokens: int = 128
    """a request's output for pricing and booking, unless its max_tokens is less"""

    max_requests_per_rank: int = 512
    """a rank with so many running, waiting and booked requests is saturated"""
    max_queue_seconds: float = 60.0
    """a rank whose promised prefill would take longer is saturated"""
    max_attempts: int = 3
    """ranks tried for one answer, the first included"""
    max_choices: int = 16
    """choices of one request: prompts times n"""

    max_body_bytes: int = 8 * 1024 * 1024
    max_event_bytes: int = 4 * 1024 * 1024
    """one server-sent event of a rank; a plain backend's whole answer may have 16 times as much"""
    connect_seconds: float = 2.0
    first_token_seconds: float = 120.0
    between_tokens_seconds: float = 60.0
    keepalive_seconds: float = 4.0
    """idle connections to ranks are kept so long; less than servers' usual 5 s, so that none is closed under a request"""

    dead_after_seconds: float = 3.0
    """silence of an engine that means death"""
    forget_after_seconds: float = 600.0
    """a dead engine is kept that long for its return"""
    stale_load_seconds: float = 5.0
    """an older load report no longer counts: the router's own bookings speak alone"""
    settle_seconds: float = 0.1
    """a load report that arrives so long after a booking contains it"""

    long_prompt_characters: int = 8_000
    """longer prompts are tokenised off the event loop"""
    kept_decisions: int = 10_000
    prefix_blocks_per_rank: int = 65_536
    """blocks remembered for a rank without KV events"""

    def __post_init__(self) -> None:
        for name in ("prefill_weight", "queue_weight", "decode_weight", "experts_weight", "settle_seconds"):
            self._check(name, 0, above=False)
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not name.endswith("_weight") and name not in ("port", "settle_seconds"):
                self._check(name, 0, above=True)
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port must be 0..65535 (0: any free one), not {self.port}")
        for name in ("session_header", "tenant_header"):
            value = getattr(self, name)
            if not _HEADER.fullmatch(value) or value in _TAKEN:
                raise ValueError(f"{name} must be a header's name in lower case, and none of {', '.join(_TAKEN)}; not {value!r}")
        for url in self.backends:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"backends: {url!r} must start with http:// or https://")

    def _check(self, name: str, least: float, *, above: bool) -> None:
        value = getattr(self, name)
        if not math.isfinite(value) or value < least or (above and value == least):
            raise ValueError(f"{name} must be {'above' if above else 'at least'} {least}, not {value}")
