"""The router's settings: one frozen value, created at the composition root."""

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from fleet.redaction import without_secrets
from fleet.settings import FilePath

Policy = Literal["cost", "classic", "kv", "least_loaded", "round_robin"]
ZERO_ALLOWED = (
    "port",
    "private_port",
    "settle_seconds",
    "temperature_ms",
    "home_confidence",
    "session_affinity_seconds",
    "session_affinity_ms",
    "queue_requests",
    "no_engine_wait_seconds",
    "segment_cache_bytes",
    "least_retries",
    "retry_share",
    "outlier_factor",
    "max_ejected_share",
    "classic_alpha",
    "classic_beta",
    "classic_gamma",
    "coalesce_seconds",
    "pre_stop_seconds",
    "answer_seconds",
)


def base_url(url: str) -> str:
    """Return the URL to which `/v1/...` is appended."""
    return url.rstrip("/").removesuffix("/v1")


_TAKEN = ("authorization", "traceparent", "tracestate", "x-request-id")
"""Headers with a fixed meaning, which settings may not claim."""
MOST_PROCESSES = 256
_PATH = re.compile(r"/[A-Za-z0-9_./-]{1,255}")
_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """`[backends.NAME]`: one OpenAI-compatible server behind the router. ValueError names the setting, its
    value and the allowed range.
    """

    name: str = field(default="", metadata={"section": True})
    """NAME: identifies the server in decisions and in `roost status`"""
    url: str = ""
    """base URL, with or without /v1"""
    key_file: FilePath | None = None
    """file whose first line is sent to the server as `Authorization: Bearer`; unset: [router]
    backend_key_file
    """
    max_requests: int | None = None
    """limit of concurrent requests, over all its models; unset: [router] max_requests_per_rank"""
    prompt_tokens_per_second: float | None = None
    """uncached prompt tokens computed per second. Together with output_tokens_per_second this states the
    speed; unset: measured from streams
    """
    output_tokens_per_second: float | None = None
    """output tokens per second of a single stream"""
    token_ids: bool | None = None
    """the server returns token ids on request (`return_token_ids`) and accepts them as a prompt, so that its
    streams can be continued; unset: true if its list of models identifies a vLLM
    """
    sequence_ms: float | None = None
    """milliseconds that each further stream adds to a decode step; unset: a hundredth of a step"""
    isolates_tenants: bool = False
    """the server accepts `cache_salt` and shares KV blocks only among requests with equal salts, as vLLM
    does; the router then sends each request's salt
    """

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: {without_secrets(self.url)!r} must start with http:// or https://")
        if without_secrets(self.url) != self.url:
            raise ValueError(
                f"url: {without_secrets(self.url)!r} names a user, which is not sent; put the server's key"
                " into a key_file"
            )
        for name in ("max_requests", "prompt_tokens_per_second", "output_tokens_per_second", "sequence_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, not {value}")
        if (self.prompt_tokens_per_second is None) != (self.output_tokens_per_second is None):
            raise ValueError(
                "prompt_tokens_per_second and output_tokens_per_second state a speed together; set both, or"
                " neither"
            )
        if self.sequence_ms is not None and self.output_tokens_per_second is None:
            raise ValueError("sequence_ms needs prompt_tokens_per_second and output_tokens_per_second")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """All settings of the router, each with a default. ValueError names the setting, its value and the
    allowed range.
    """

    host: str = "127.0.0.1"
    """address to listen on; an address that other machines reach needs api_key_file and TLS"""
    port: int = 8600
    tls_cert: FilePath | None = None
    """PEM file of the server certificate with its intermediate certificates; read again at a reload"""
    tls_key: FilePath | None = None
    """PEM file of the certificate's private key, not encrypted"""
    tls_terminated: bool = False
    """a reverse proxy terminates TLS, so that plain HTTP is safe here"""
    insecure: bool = False
    """listen for other machines even without keys or TLS"""
    api_key_file: FilePath | None = None
    """file of the keys that clients may present as `Authorization: Bearer`, as `roost key new` writes it;
    unset: no key is required
    """
    backends: tuple[str, ...] = ()
    """base URLs of static OpenAI-compatible servers; they need neither a bus nor agents"""
    named_backends: tuple[BackendConfig, ...] = field(default=(), metadata={"sections": "backends"})
    """the sections [backends.NAME]: static servers with a name and known properties"""
    backend_key_file: FilePath | None = None
    """file whose first line is sent to static backends as `Authorization: Bearer`"""
    backend_block_tokens: int = 32
    """block size of the prefix index for static backends, in tokens of four bytes of text; shorter shared
    prefixes are not detected. Halving the size doubles the time to index a prompt (benchmarks/backends.py)
    """
    fleet_secret_file: FilePath | None = None
    """file of the secret that Roost's own ranks require, equal for all routers and ranks; two lines during a
    rotation: the first is sent
    """
    upstream_ca: FilePath | None = None
    """PEM file of certificate authorities for https:// ranks and backends, in addition to the system's; read
    again at a reload
    """
    passthrough_admin: tuple[str, ...] = ()
    """administrative paths of servers, such as /v1/load_lora_adapter, that are forwarded for callers with the
    right `admin`; the header x-roost-server names the server
    """
    probe_seconds: float = 2.0
    """pause between two probes of a backend (GET /v1/models)"""
    probe_timeout_seconds: float = 10.0
    """timeout of a probe. A backend is taken out after three failed probes in a row, unless it served a token
    meanwhile, and at once after a refused connection
    """

    session_header: str = "x-session-id"
    """request header that identifies a conversation; without it, prompt_cache_key of the body"""
    tenant_header: str = "x-tenant-id"
    """request header that identifies the tenant; without it, user or safety_identifier of the body"""
    prediction_bytes: int = 96 * 1024 * 1024
    """memory limit for the copy of one model's prediction tables; the default holds all that a tracker keeps
    by default
    """
    outcome_seconds: float = 0.5
    """longest interval between reports of finished requests to the tracker; a full batch is sent sooner"""
    most_outcomes_waiting: int = 4096
    """finished requests that may wait to be reported; further ones are dropped and counted"""

    policy: Policy = "cost"
    """cost: predicted added milliseconds; classic: weighted sum of dimensionless terms; kv: cached prefix,
    then load; least_loaded; round_robin
    """
    prefill_weight: float = 1.0
    queue_weight: float = 1.0
    decode_weight: float = 1.0
    experts_weight: float = 1.0
    """weight of dispatch traffic to other ranks and nodes"""
    distinct_weight: float = 1.0
    """weight of the distinct experts that a step reads"""
    lockstep_weight: float = 1.0
    """weight of waiting for an engine's slowest rank, and of being it"""
    handover_weight: float = 1.0
    """weight of a migration or layout switch in progress"""
    classic_alpha: float = 1.0
    """policy classic: weight of the uncached share of the prompt"""
    classic_beta: float = 1.0
    """policy classic: weight of the share of expert traffic that leaves the rank"""
    classic_gamma: float = 1.0
    """policy classic: weight of the rank's load relative to the most loaded rank"""
    temperature_ms: float = 0.0
    """0: always the cheapest rank; above: a rank that costs this much more has 1/e of the cheapest rank's
    probability
    """
    session_affinity_seconds: float = 0.0
    """a conversation stays with its rank until it has been idle for this long; 0: the cost alone decides"""
    session_affinity_ms: float = 1000.0
    """a conversation moves to another rank that is cheaper by more than this"""
    home_confidence: float = 0.2
    """least confidence of a request's predicted cluster for routing to the home that the planner gave the
    cluster; 1: never
    """
    correction_limit: float = 4.0
    """largest factor, either way, by which measured speeds correct a term of the time model; 1: no correction
    """
    expected_output_tokens: int = 128
    """expected output tokens of a request for pricing and booking, unless its max_tokens is less"""

    max_requests_per_rank: int = 512
    """a rank with this many running, waiting and booked requests is saturated"""
    max_queue_seconds: float = 60.0
    """a rank whose outstanding prefill would take longer is saturated"""
    max_kv_share: float = 1.0
    """a rank whose running requests hold more than this share of its KV blocks is saturated; 1: no such limit
    """
    queue_requests: int = 1024
    """requests that may wait while every rank is saturated; 0: refuse them at once"""
    queue_bytes: int = 256 * 1024 * 1024
    """memory limit of waiting requests"""
    queue_wait_seconds: float = 10.0
    """longest wait of a request before it is refused; the header x-request-timeout-ms may name an earlier
    deadline
    """
    no_engine_wait_seconds: float = 2.0
    """longest wait of a request for a model without a live engine; 0: refuse it at once"""
    priority_header: str = "x-priority"
    """request header that names a priority class; without it, priority of the body. An integer counts from
    the default class, lower is more urgent
    """
    classes: tuple[str, ...] = ("high", "normal", "low")
    """priority classes, most urgent first; a full queue refuses the least urgent requests first"""
    default_class: str = "normal"
    max_attempts: int = 5
    """ranks tried for one answer, including the first and excluding those that produced tokens before they
    failed. If a tenth of all attempts fail, one request in 100,000 is lost
    """
    retry_share: float = 0.2
    """retry budget as a share of the requests of the last ten seconds; beyond it, failures are passed on to
    clients
    """
    least_retries: int = 100
    """retries in ten seconds that are always allowed: ten per second, Finagle's default. A lower floor passes
    on failures that come in bursts
    """
    breaker_failures: int = 5
    """consecutive failures that open a rank's circuit breaker"""
    breaker_seconds: float = 1.0
    """duration of the first opening of a circuit breaker; doubles with each further failure, up to 32 times
    """
    outlier_factor: float = 4.0
    """outlier ejection: a rank is excluded if its time to first token is this many times its prediction,
    relative to the other ranks of its model, or if its requests fail far more often; 0: off
    """
    max_ejected_share: float = 0.5
    """largest share of a model's ranks that may be ejected at once"""
    reservation_seconds: float = 120.0
    """a reservation for another data plane expires after this long without an update"""
    replicas: bool = True
    """replicate bookings to other routers, and count theirs"""
    coalesce_seconds: float = 0.005
    """least interval between two messages of bookings to other routers"""
    processes: int = 1
    """router processes that share the port"""
    private_port: int = 0
    """first private port for /metrics, /health and /ready when several processes run: process i listens on
    private_port + i; 0: any free ports
    """
    max_choices: int = 128
    """choices of one request: number of prompts times n"""

    max_head_bytes: int = 64 * 1024
    """limit of a request's line and header fields; a client that sends more gets 431, and its connection is
    closed
    """
    max_head_fields: int = 100
    max_url_bytes: int = 8 * 1024
    head_seconds: float = 30.0
    """timeout for a request's head, also on a new connection; then the connection is closed"""
    body_seconds: float = 60.0
    """timeout from the end of a head to the end of its body; then the client gets 408, and its connection is
    closed
    """
    idle_seconds: float = 75.0
    """keep-alive timeout of a client connection without a further request"""
    write_seconds: float = 60.0
    """timeout for a client that does not read its response; then the connection is closed, and the request
    ends at the rank
    """
    drain_seconds: float = 60.0
    """grace period for responses at shutdown; then streams end with an error event"""
    pre_stop_seconds: float = 0.0
    """time at shutdown during which requests are still accepted while /ready reports 503, so that load
    balancers notice
    """
    max_body_bytes: int = 8 * 1024 * 1024
    bodies_bytes: int = 512 * 1024 * 1024
    """memory limit for the bodies of all open requests; more is refused. One client may take at most as much
    as it leaves to the others
    """
    large_body_bytes: int = 128 * 1024
    """longer bodies are decoded, rendered and tokenised in worker processes"""
    large_body_processes: int = 2
    """number of worker processes, each started on demand; bodies of more than 1 MiB occupy at most all but
    one of them
    """
    large_body_process_bytes: int = 4 * 1024 * 1024 * 1024
    """address space of a worker process; a body that needs more is refused"""
    large_bodies_waiting: int = 64
    """large bodies that may wait for a worker process; more are refused"""
    large_bodies_per_client: int = 16
    """limit of waiting large bodies per tenant, or per address where keys name no tenants"""
    max_event_bytes: int = 4 * 1024 * 1024
    """size limit of one server-sent event of a rank; a static backend's complete response may be 16 times as
    long
    """
    connect_seconds: float = 2.0
    first_token_seconds: float = 120.0
    """timeout for a stream's first token; unstreamed responses have no such limit"""
    between_tokens_seconds: float = 60.0
    answer_seconds: float = 3600.0
    """timeout for an unstreamed response of a static backend; 0: no limit. If the server dies, the wait ends
    at once
    """
    keepalive_seconds: float = 4.0
    """keep-alive of idle connections to ranks; below the usual 5 s of servers, so that no connection closes
    under a request
    """

    dead_after_seconds: float = 3.0
    """silence after which an engine counts as dead"""
    forget_after_seconds: float = 600.0
    """time for which a dead engine's state is kept for its return"""
    stale_load_seconds: float = 5.0
    """age above which a load report is ignored: then only the router's own bookings count"""
    settle_seconds: float = 0.1
    """delay after which a load report is assumed to include a booking"""

    segment_cache_bytes: int = 32 * 1024 * 1024
    """memory for the token ids of message texts and words seen before; 0: no cache"""
    long_prompt_characters: int = 8_000
    """longer prompts are tokenised off the event loop"""
    kept_decisions: int = 10_000
    """number of booked decisions that stay readable"""
    kept_bytes: int = 256 * 1024 * 1024
    """memory limit of these decisions"""
    prefix_blocks_per_rank: int = 65_536
    """blocks in the approximate prefix index of a rank without KV events"""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._check(name, 0, above=not name.endswith("_weight") and name not in ZERO_ALLOWED)
        self._check("correction_limit", 1, above=False)
        for name in ("max_kv_share", "max_ejected_share", "retry_share", "home_confidence"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be 0..1, not {getattr(self, name)}")
        if (
            not self.classes
            or len(set(self.classes)) != len(self.classes)
            or self.default_class not in self.classes
        ):
            raise ValueError(
                f"classes must be distinct names, default_class {self.default_class!r} among them; not"
                f" {', '.join(self.classes) or 'none'}"
            )
        if not 1 <= self.processes <= MOST_PROCESSES:
            raise ValueError(f"processes must be 1..{MOST_PROCESSES}, not {self.processes}")
        if not 0 <= self.private_port <= 65_536 - self.processes:
            raise ValueError(
                f"private_port must be 0 (any free ports) or such that {self.processes} ports from it on"
                f" exist, not {self.private_port}"
            )
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port must be 0..65535 (0: any free one), not {self.port}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together; set both or neither")
        for name in ("session_header", "tenant_header", "priority_header"):
            value = getattr(self, name)
            if not _HEADER.fullmatch(value) or value in _TAKEN:
                raise ValueError(
                    f"{name} must be a header's name in lower case, and none of {', '.join(_TAKEN)}; not"
                    f" {value!r}"
                )
        urls = [base_url(url) for url in (*self.backends, *(backend.url for backend in self.named_backends))]
        for url in sorted(
            {url for url in urls if urls.count(url) > 1}
            & {base_url(backend.url) for backend in self.named_backends}
        ):
            raise ValueError(f"backends: {url} is named twice; leave one")
        for path in self.passthrough_admin:
            if not _PATH.fullmatch(path) or ".." in path:
                raise ValueError(f"passthrough_admin: {path!r} must be a path such as /v1/load_lora_adapter")
        for url in self.backends:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"backends: {without_secrets(url)!r} must start with http:// or https://")
            if without_secrets(url) != url:
                raise ValueError(
                    f"backends: {without_secrets(url)!r} names a user, which is not sent; put the servers'"
                    " key into backend_key_file"
                )

    def _check(self, name: str, least: float, *, above: bool) -> None:
        value = getattr(self, name)
        if not math.isfinite(value) or value < least or (above and value == least):
            raise ValueError(f"{name} must be {'above' if above else 'at least'} {least}, not {value}")
