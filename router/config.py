"""The router's settings: one frozen value, made at the composition root."""

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
    """The URL that `/v1/...` is appended to."""
    return url.rstrip("/").removesuffix("/v1")


_TAKEN = ("authorization", "traceparent", "tracestate", "x-request-id")
"""Headers that mean something else."""
MOST_PROCESSES = 256
_PATH = re.compile(r"/[A-Za-z0-9_./-]{1,255}")
_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """`[backends.NAME]`: one OpenAI-compatible server before which the router stands. ValueError names the setting, the value and what is allowed."""

    name: str = field(default="", metadata={"section": True})
    """NAME, as decisions and `roost status` call the server"""
    url: str = ""
    """its base URL, with or without /v1"""
    key_file: FilePath | None = None
    """file whose first line is sent to it as `Authorization: Bearer`; unset: [router] backend_key_file"""
    max_requests: int | None = None
    """requests it is given at once, for all its models together; unset: [router] max_requests_per_rank"""
    prompt_tokens_per_second: float | None = None
    """uncached prompt tokens it computes per second. This and output_tokens_per_second state its speed; unset: it is learnt from streams"""
    output_tokens_per_second: float | None = None
    """tokens per second of one stream alone"""
    token_ids: bool | None = None
    """it returns token ids when asked (`return_token_ids`) and takes them as a prompt, so that its streams can be continued; unset: if its list of
    models says that it is a vLLM"""
    sequence_ms: float | None = None
    """milliseconds that each further stream adds to a step; unset: a hundredth of a step"""
    isolates_tenants: bool = False
    """it takes `cache_salt` and reuses KV only among requests of the same one, as vLLM does: it gets each request's salt"""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: {without_secrets(self.url)!r} must start with http:// or https://")
        if without_secrets(self.url) != self.url:
            raise ValueError(f"url: {without_secrets(self.url)!r} names a user, which is not sent; put the server's key into a key_file")
        for name in ("max_requests", "prompt_tokens_per_second", "output_tokens_per_second", "sequence_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, not {value}")
        if (self.prompt_tokens_per_second is None) != (self.output_tokens_per_second is None):
            raise ValueError("prompt_tokens_per_second and output_tokens_per_second state a speed together; set both, or neither")
        if self.sequence_ms is not None and self.output_tokens_per_second is None:
            raise ValueError("sequence_ms needs prompt_tokens_per_second and output_tokens_per_second")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Every setting has a default; ValueError names the setting, the value and what is allowed."""

    host: str = "127.0.0.1"
    """address to listen on; one that other machines reach needs api_key_file and TLS"""
    port: int = 8600
    tls_cert: FilePath | None = None
    """PEM file of the certificate that clients see, with those that lead to its authority; read again at a reload"""
    tls_key: FilePath | None = None
    """PEM file of its key, not encrypted"""
    tls_terminated: bool = False
    """a proxy in front speaks TLS with clients: plain HTTP is no risk"""
    insecure: bool = False
    """listen for other machines without keys or TLS all the same"""
    api_key_file: FilePath | None = None
    """file of the keys that clients may present as `Authorization: Bearer`, as `roost key new` writes it; unset: no key is asked for"""
    backends: tuple[str, ...] = ()
    """base URLs of plain OpenAI-compatible servers; they need neither a bus nor agents"""
    named_backends: tuple[BackendConfig, ...] = field(default=(), metadata={"sections": "backends"})
    """from the sections [backends.NAME]: the same with a name, and with what is known of the server"""
    backend_key_file: FilePath | None = None
    """file whose first line is sent to plain backends as `Authorization: Bearer`"""
    backend_block_tokens: int = 32
    """blocks, each of four bytes of text per token, by which the prompts sent to backends are remembered; a shorter shared prefix is not seen.
    Blocks of half the size take twice the time when a prompt is noted (benchmarks/backends.py)"""
    fleet_secret_file: FilePath | None = None
    """file of the secret that Roost's own ranks want to see, the same for all routers and ranks; two lines while it is changed: the first is sent"""
    upstream_ca: FilePath | None = None
    """PEM file of authorities that vouch for https:// ranks and backends, beside the system's; read again at a reload"""
    passthrough_admin: tuple[str, ...] = ()
    """paths of servers' administration that pass for callers with the right admin, such as /v1/load_lora_adapter; the header x-roost-server names
    the server"""
    probe_seconds: float = 2.0
    """pause between two probes of a backend, its /v1/models"""
    probe_timeout_seconds: float = 10.0
    """a probe without an answer for so long is a miss. Three misses in a row take a backend away, unless it served a token meanwhile; a
    refused connection does so at once"""

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

    policy: Policy = "cost"
    """cost: predicted added milliseconds; classic: a weighted sum of dimensionless terms; kv: cached prefix, then load; least_loaded; round_robin"""
    prefill_weight: float = 1.0
    queue_weight: float = 1.0
    decode_weight: float = 1.0
    experts_weight: float = 1.0
    """of dispatch traffic to other ranks and nodes"""
    distinct_weight: float = 1.0
    """of distinct experts that a step must read"""
    lockstep_weight: float = 1.0
    """of waiting for, and being, an engine's slowest rank"""
    handover_weight: float = 1.0
    """of a migration or layout switch in progress"""
    classic_alpha: float = 1.0
    """policy classic: weight of the share of the prompt that is not cached"""
    classic_beta: float = 1.0
    """policy classic: weight of the share of expert traffic that leaves the rank"""
    classic_gamma: float = 1.0
    """policy classic: weight of the rank's load, relative to the most loaded one"""
    temperature_ms: float = 0.0
    """0: the cheapest rank; above: a rank that costs so much more is chosen with 1/e of the cheapest one's probability"""
    session_affinity_seconds: float = 0.0
    """a conversation stays with its rank until it has been silent for so long; 0: the cost alone decides"""
    session_affinity_ms: float = 1000.0
    """a conversation leaves its rank when another one is cheaper by more than this"""
    home_confidence: float = 0.2
    """a request goes home, where the planner has given homes, if it is foretold with this confidence at least; 1: none does"""
    correction_limit: float = 4.0
    """measured speeds correct each term of the time model at most by this factor, either way; 1: not at all"""
    expected_output_tokens: int = 128
    """a request's output for pricing and booking, unless its max_tokens is less"""

    max_requests_per_rank: int = 512
    """a rank with so many running, waiting and booked requests is saturated"""
    max_queue_seconds: float = 60.0
    """a rank whose promised prefill would take longer is saturated"""
    max_kv_share: float = 1.0
    """a rank of whose KV blocks more than this share is held by running requests is saturated; 1: never for this reason"""
    queue_requests: int = 1024
    """requests that may wait while every rank is saturated; 0: they are refused at once"""
    queue_bytes: int = 256 * 1024 * 1024
    """memory that waiting requests may hold"""
    queue_wait_seconds: float = 10.0
    """a request that has waited so long is refused, unless it names an earlier deadline (header x-request-timeout-ms)"""
    no_engine_wait_seconds: float = 2.0
    """a request for a model of which no engine lives at present waits at most so long for one to come back; 0: it is refused at once"""
    priority_header: str = "x-priority"
    """request header that names a class; without it, the body's priority. An integer counts from the default class, lower being more urgent"""
    classes: tuple[str, ...] = ("high", "normal", "low")
    """classes of requests, most urgent first; when the queue is full the least urgent ones are refused first"""
    default_class: str = "normal"
    max_attempts: int = 5
    """ranks tried for one answer, the first included, not counting those that brought tokens before they failed; where a tenth of all
    attempts fail, one request in 100,000 is lost"""
    retry_share: float = 0.2
    """retries may be so many of the requests of the last ten seconds; beyond, failures are passed on"""
    least_retries: int = 100
    """retries in ten seconds that are always allowed: ten a second, Finagle's default. A lower floor passes on failures that come in clumps"""
    breaker_failures: int = 5
    """failures in a row after which a rank is left alone for a while"""
    breaker_seconds: float = 1.0
    """for how long, the first time; twice as long each time it fails again, up to 32 times as long"""
    outlier_factor: float = 4.0
    """a rank whose first tokens take so many times as long as predicted, compared with the others of its model, or of which far more
    requests fail, is left alone for a while; 0: none is"""
    max_ejected_share: float = 0.5
    """at most so many of a model's ranks are left alone at once"""
    reservation_seconds: float = 120.0
    """a reservation made for another data plane ends by itself after so long without a word"""
    replicas: bool = True
    """tell other routers what is booked here, and count what they book"""
    coalesce_seconds: float = 0.005
    """bookings are told together, so often at most"""
    processes: int = 1
    """router processes that share the port"""
    private_port: int = 0
    """of several processes each also listens alone, the first on this port, the next on the next: for /metrics, /health and /ready; 0: any free ones"""
    max_choices: int = 128
    """choices of one request: prompts times n"""

    max_head_bytes: int = 64 * 1024
    """a request's line and header fields; a client that sends more is answered 431 and cut"""
    max_head_fields: int = 100
    max_url_bytes: int = 8 * 1024
    head_seconds: float = 30.0
    """a client that has not sent the head of a request by then is cut; also one that says nothing on a new connection"""
    body_seconds: float = 60.0
    """from a head's end to the end of its body; a client that takes longer is answered 408 and cut"""
    idle_seconds: float = 75.0
    """a connection on which no further request comes is kept so long"""
    write_seconds: float = 60.0
    """a client that does not read its answer for so long is cut, and its request ends at the rank"""
    drain_seconds: float = 60.0
    """how long answers may go on when the router is asked to stop; then streams end with an error event"""
    pre_stop_seconds: float = 0.0
    """when asked to stop, requests are still taken for so long while /ready says 503, until load balancers have noticed"""
    max_body_bytes: int = 8 * 1024 * 1024
    bodies_bytes: int = 512 * 1024 * 1024
    """memory that the bodies of all open requests may take; what exceeds it is refused. One client may have at most as much as is left to others"""
    large_body_bytes: int = 128 * 1024
    """longer bodies are decoded, rendered and tokenised in other processes"""
    large_body_processes: int = 2
    """such processes, each started when it is needed; bodies of more than 1 MiB have at most all but one of them"""
    large_body_process_bytes: int = 4 * 1024 * 1024 * 1024
    """address space of one of them; a body that needs more is refused"""
    large_bodies_waiting: int = 64
    """large bodies that may wait for such a process; more are refused"""
    large_bodies_per_client: int = 16
    """of which one tenant may have so many, or one address where keys name no tenants"""
    max_event_bytes: int = 4 * 1024 * 1024
    """one server-sent event of a rank; a plain backend's whole answer may have 16 times as much"""
    connect_seconds: float = 2.0
    first_token_seconds: float = 120.0
    """until a stream's first token; answers that are not streamed have no such limit"""
    between_tokens_seconds: float = 60.0
    answer_seconds: float = 3600.0
    """until the end of a foreign server's answer that is not streamed; 0: no limit. A server that dies ends the wait at once"""
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

    segment_cache_bytes: int = 32 * 1024 * 1024
    """memory for token ids of message texts and words that were seen before; 0: none"""
    long_prompt_characters: int = 8_000
    """longer prompts are tokenised off the event loop"""
    kept_decisions: int = 10_000
    """booked decisions that can be read back"""
    kept_bytes: int = 256 * 1024 * 1024
    """memory that they may take"""
    prefix_blocks_per_rank: int = 65_536
    """blocks remembered for a rank without KV events"""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._check(name, 0, above=not name.endswith("_weight") and name not in ZERO_ALLOWED)
        self._check("correction_limit", 1, above=False)
        for name in ("max_kv_share", "max_ejected_share", "retry_share", "home_confidence"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be 0..1, not {getattr(self, name)}")
        if not self.classes or len(set(self.classes)) != len(self.classes) or self.default_class not in self.classes:
            raise ValueError(f"classes must be distinct names, default_class {self.default_class!r} among them; not {', '.join(self.classes) or 'none'}")
        if not 1 <= self.processes <= MOST_PROCESSES:
            raise ValueError(f"processes must be 1..{MOST_PROCESSES}, not {self.processes}")
        if not 0 <= self.private_port <= 65_536 - self.processes:
            raise ValueError(f"private_port must be 0 (any free ports) or such that {self.processes} ports from it on exist, not {self.private_port}")
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port must be 0..65535 (0: any free one), not {self.port}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together; set both or neither")
        for name in ("session_header", "tenant_header", "priority_header"):
            value = getattr(self, name)
            if not _HEADER.fullmatch(value) or value in _TAKEN:
                raise ValueError(f"{name} must be a header's name in lower case, and none of {', '.join(_TAKEN)}; not {value!r}")
        urls = [base_url(url) for url in (*self.backends, *(backend.url for backend in self.named_backends))]
        for url in sorted({url for url in urls if urls.count(url) > 1} & {base_url(backend.url) for backend in self.named_backends}):
            raise ValueError(f"backends: {url} is named twice; leave one")
        for path in self.passthrough_admin:
            if not _PATH.fullmatch(path) or ".." in path:
                raise ValueError(f"passthrough_admin: {path!r} must be a path such as /v1/load_lora_adapter")
        for url in self.backends:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"backends: {without_secrets(url)!r} must start with http:// or https://")
            if without_secrets(url) != url:
                raise ValueError(f"backends: {without_secrets(url)!r} names a user, which is not sent; put the servers' key into backend_key_file")

    def _check(self, name: str, least: float, *, above: bool) -> None:
        value = getattr(self, name)
        if not math.isfinite(value) or value < least or (above and value == least):
            raise ValueError(f"{name} must be {'above' if above else 'at least'} {least}, not {value}")
