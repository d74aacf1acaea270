"""The router's settings: one frozen value, created at the composition root."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from fleet.redaction import without_secrets
from fleet.settings import (
    FilePath,
    NonNegative,
    NonNegativeInt,
    Port,
    Positive,
    PositiveInt,
    PositiveShare,
    Share,
    check_bounds,
)

Policy = Literal["cost", "classic", "kv", "least_loaded", "round_robin"]


def base_url(url: str) -> str:
    """Return the URL to which `/v1/...` is appended."""
    return url.rstrip("/").removesuffix("/v1")


_TAKEN = ("authorization", "traceparent", "tracestate", "x-request-id")
"""Headers with a fixed meaning, which settings may not claim."""
MOST_PROCESSES = 256
_ADDRESS = re.compile(r"([^:\s]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}")
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
    max_requests: PositiveInt | None = None
    """limit of concurrent requests, over all its models; unset: [router] max_requests_per_rank"""
    prompt_tokens_per_second: Positive | None = None
    """uncached prompt tokens computed per second. Together with output_tokens_per_second this states the
    speed; unset: measured from streams
    """
    output_tokens_per_second: Positive | None = None
    """output tokens per second of a single stream"""
    token_ids: bool | None = None
    """the server returns token ids on request (`return_token_ids`) and accepts them as a prompt, so that its
    streams can be continued; unset: true if its list of models identifies a vLLM
    """
    sequence_ms: Positive | None = None
    """milliseconds that each further stream adds to a decode step; unset: a hundredth of a step"""
    isolates_tenants: bool = False
    """the server accepts `cache_salt` and shares KV blocks only among requests with equal salts, as vLLM
    does; the router then sends each request's salt
    """

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: {without_secrets(self.url)!r} must start with http:// or https://")
        if without_secrets(self.url) != self.url:
            raise ValueError(
                f"url: {without_secrets(self.url)!r} names a user, which is not sent; put the server's key"
                " into a key_file"
            )
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
    port: Port = 8600
    gateway_address: str | None = None
    """HOST:PORT at which gateways find the endpoint picker (Envoy's ext-proc over gRPC); unset: there is none
    """
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
    backend_block_tokens: PositiveInt = 32
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
    dashboard: bool = True
    """serve the dashboard at /dashboard, whose data need the right `admin`"""
    passthrough_admin: tuple[str, ...] = ()
    """administrative paths of servers, such as /v1/load_lora_adapter, that are forwarded for callers with the
    right `admin`; the header x-roost-server names the server
    """
    probe_seconds: Positive = 2.0
    """pause between two probes of a backend (GET /v1/models)"""
    probe_timeout_seconds: Positive = 10.0
    """timeout of a probe. A backend is taken out after three failed probes in a row, unless it served a token
    meanwhile, and at once after a refused connection
    """

    session_header: str = "x-session-id"
    """request header that identifies a conversation; without it, prompt_cache_key of the body"""
    tenant_header: str = "x-tenant-id"
    """request header that identifies the tenant; without it, user or safety_identifier of the body"""
    prediction_bytes: PositiveInt = 96 * 1024 * 1024
    """memory limit for the copy of one model's prediction tables; the default holds all that a tracker keeps
    by default
    """
    outcome_seconds: Positive = 0.5
    """longest interval between reports of finished requests to the tracker; a full batch is sent sooner"""

    policy: Policy = "cost"
    """cost: predicted added milliseconds; classic: weighted sum of dimensionless terms; kv: cached prefix,
    then load; least_loaded; round_robin
    """
    prefill_weight: NonNegative = 1.0
    queue_weight: NonNegative = 1.0
    decode_weight: NonNegative = 1.0
    experts_weight: NonNegative = 1.0
    """weight of dispatch traffic to other ranks and nodes"""
    distinct_weight: NonNegative = 1.0
    """weight of the distinct experts that a step reads"""
    sharded_weight: NonNegative = 1.0
    """weight of sharing tokens with all ranks in sharded layers"""
    lockstep_weight: NonNegative = 1.0
    """weight of waiting for an engine's slowest rank, and of being it"""
    handover_weight: NonNegative = 1.0
    """weight of a migration or layout switch in progress"""
    classic_alpha: NonNegative = 1.0
    """policy classic: weight of the uncached share of the prompt"""
    classic_beta: NonNegative = 1.0
    """policy classic: weight of the share of expert traffic that leaves the rank"""
    classic_gamma: NonNegative = 1.0
    """policy classic: weight of the rank's load relative to the most loaded rank"""
    temperature_ms: NonNegative = 0.0
    """0: always the cheapest rank; above: a rank that costs this much more has 1/e of the cheapest rank's
    probability
    """
    session_affinity_seconds: NonNegative = 0.0
    """a conversation stays with its rank until it has been idle for this long; 0: the cost alone decides"""
    session_affinity_ms: NonNegative = 1000.0
    """a conversation moves to another rank that is cheaper by more than this"""
    home_confidence: Share = 0.1
    """least confidence of a request's predicted cluster for routing to the home that the planner gave the
    cluster; 1: never
    """
    correction_limit: Annotated[float, Meta(ge=1)] = 4.0
    """largest factor, either way, by which measured speeds correct a term of the time model; 1: no correction
    """
    expected_output_tokens: PositiveInt = 128
    """expected output tokens of a request for pricing and booking, unless its max_tokens is less"""

    max_requests_per_rank: PositiveInt = 512
    """a rank with this many running, waiting and booked requests is saturated"""
    max_queue_seconds: Positive = 60.0
    """a rank whose outstanding prefill would take longer is saturated"""
    max_kv_share: PositiveShare = 1.0
    """a rank whose running requests hold more than this share of its KV blocks is saturated; 1: no such limit
    """
    queue_requests: NonNegativeInt = 1024
    """requests that may wait while every rank is saturated; 0: refuse them at once"""
    queue_bytes: PositiveInt = 256 * 1024 * 1024
    """memory limit of waiting requests"""
    queue_wait_seconds: Positive = 10.0
    """longest wait of a request before it is refused; the header x-request-timeout-ms may name an earlier
    deadline
    """
    no_engine_wait_seconds: NonNegative = 8.0
    """longest wait of a request for a model without a live engine; 0: refuse it at once. The embedded engine
    restarts in less unless its machine is busy, and a fleet of one engine then answers what had not begun.
    """
    priority_header: str = "x-priority"
    """request header that names a priority class; without it, priority of the body. An integer counts from
    the default class, lower is more urgent
    """
    classes: tuple[str, ...] = ("high", "normal", "low")
    """priority classes, most urgent first; a full queue refuses the least urgent requests first"""
    default_class: str = "normal"
    max_attempts: PositiveInt = 5
    """ranks tried for one answer, including the first and excluding those that produced tokens before they
    failed. If a tenth of all attempts fail, one request in 100,000 is lost
    """
    retry_share: Share = 0.2
    """retry budget as a share of the requests of the last ten seconds; beyond it, failures are passed on to
    clients
    """
    min_retries: NonNegativeInt = 100
    """retries in ten seconds that are always allowed: ten per second, Finagle's default. A lower floor passes
    on failures that come in bursts
    """
    breaker_failures: PositiveInt = 5
    """consecutive failures that open a rank's circuit breaker"""
    breaker_seconds: Positive = 1.0
    """duration of the first opening of a circuit breaker; doubles with each further failure, up to 32 times
    """
    outlier_factor: NonNegative = 4.0
    """outlier ejection: a rank is excluded if its time to first token is this many times its prediction,
    relative to the other ranks of its model, or if its requests fail far more often; 0: off
    """
    max_ejected_share: Share = 0.5
    """largest share of a model's ranks that may be ejected at once"""
    reservation_seconds: Positive = 120.0
    """a reservation for another data plane expires after this long without an update"""
    replicate_bookings: bool = True
    """replicate bookings to other routers, and count theirs"""
    processes: Annotated[int, Meta(ge=1, le=MOST_PROCESSES)] = 1
    """router processes that share the port"""
    private_port: Port = 0
    """first private port for /metrics, /health and /ready when several processes run: process i listens on
    private_port + i; 0: any free ports
    """
    max_choices: PositiveInt = 128
    """choices of one request: number of prompts times n"""

    max_head_bytes: PositiveInt = 64 * 1024
    """limit of a request's line and header fields; a client that sends more gets 431, and its connection is
    closed
    """
    max_url_bytes: PositiveInt = 8 * 1024
    head_seconds: Positive = 30.0
    """timeout for a request's head, also on a new connection; then the connection is closed"""
    body_seconds: Positive = 60.0
    """timeout from the end of a head to the end of its body; then the client gets 408, and its connection is
    closed
    """
    idle_seconds: Positive = 75.0
    """keep-alive timeout of a client connection without a further request"""
    write_seconds: Positive = 60.0
    """timeout for a client that does not read its response; then the connection is closed, and the request
    ends at the rank
    """
    drain_seconds: Positive = 60.0
    """grace period for responses at shutdown; then streams end with an error event"""
    pre_stop_seconds: NonNegative = 0.0
    """time at shutdown during which requests are still accepted while /ready reports 503, so that load
    balancers notice
    """
    max_body_bytes: PositiveInt = 8 * 1024 * 1024
    bodies_bytes: PositiveInt = 512 * 1024 * 1024
    """memory limit for the bodies of all open requests; more is refused. One client may take at most as much
    as it leaves to the others
    """
    large_body_bytes: PositiveInt = 128 * 1024
    """longer bodies are decoded, rendered and tokenised in worker processes"""
    large_body_processes: PositiveInt = 2
    """number of worker processes, each started on demand; bodies of more than 1 MiB occupy at most all but
    one of them
    """
    large_body_process_bytes: PositiveInt = 4 * 1024 * 1024 * 1024
    """address space of a worker process; a body that needs more is refused"""
    large_bodies_waiting: PositiveInt = 64
    """large bodies that may wait for a worker process; more are refused. At most a quarter are of one client:
    a tenant, or an address where keys name no tenants
    """
    max_event_bytes: PositiveInt = 4 * 1024 * 1024
    """size limit of one server-sent event of a rank; a static backend's complete response may be 16 times as
    long
    """
    connect_seconds: Positive = 2.0
    first_token_seconds: Positive = 120.0
    """timeout for a stream's first token; unstreamed responses have no such limit"""
    between_tokens_seconds: Positive = 60.0
    answer_seconds: NonNegative = 3600.0
    """timeout for an unstreamed response of a static backend; 0: no limit. If the server dies, the wait ends
    at once
    """
    keepalive_seconds: Positive = 4.0
    """keep-alive of idle connections to ranks; below the usual 5 s of servers, so that no connection closes
    under a request
    """

    dead_after_seconds: Positive = 3.0
    """silence after which an engine counts as dead"""
    stale_load_seconds: Positive = 5.0
    """age above which a load report is ignored: then only the router's own bookings count"""
    settle_seconds: NonNegative = 0.1
    """delay after which a load report is assumed to include a booking"""

    segment_cache_bytes: NonNegativeInt = 32 * 1024 * 1024
    """memory for the token ids of message texts and words seen before; 0: no cache"""
    long_prompt_characters: PositiveInt = 8_000
    """longer prompts are tokenised off the event loop"""
    tokenizer_threads: NonNegativeInt = 0
    """threads that tokenise long prompts; 0: one for each core, at most 16"""
    kept_decisions: PositiveInt = 10_000
    """number of booked decisions that stay readable"""
    kept_decisions_bytes: PositiveInt = 256 * 1024 * 1024
    """memory limit of these decisions"""
    prefix_blocks_per_rank: PositiveInt = 65_536
    """blocks in the approximate prefix index of a rank without KV events"""

    def __post_init__(self) -> None:
        check_bounds(self)
        if (
            not self.classes
            or len(set(self.classes)) != len(self.classes)
            or self.default_class not in self.classes
        ):
            raise ValueError(
                f"classes must be distinct names, default_class {self.default_class!r} among them; not"
                f" {', '.join(self.classes) or 'none'}"
            )
        if self.private_port > 65_536 - self.processes:
            raise ValueError(
                f"private_port must be 0 (any free ports) or such that {self.processes} ports from it on"
                f" exist, not {self.private_port}"
            )
        if self.gateway_address is not None and not _ADDRESS.fullmatch(self.gateway_address):
            raise ValueError(
                f"gateway_address = {self.gateway_address!r} must be HOST:PORT, e.g. 127.0.0.1:9002"
            )
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
