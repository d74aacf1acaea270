"""Record of one request: the source of its log line, its metrics and the end of its trace."""

import logging
import re
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import Any

import msgspec

from fleet.blocks import salted_seed
from fleet.completions import MAX_DETAIL, MAX_NAME, shortened
from router.access.api_keys import TRUSTED, Caller
from router.health.attempt_failures import AttemptFailure
from router.http.asgi_response import Headers
from router.prediction.predictor import PredictionKeys, keys_of
from router.scheduling.decision import Decision, Owner
from router.telemetry.metrics import RouterMetrics
from router.telemetry.tracing import RequestTrace

access = logging.getLogger("roost.access")
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-")
"""Beginning of a W3C `traceparent`."""


class RequestEnd(StrEnum):
    """Outcome of a request, for logs and metrics."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """4xx: a fault of the client"""
    SATURATED = "saturated"
    UNAVAILABLE = "unavailable"
    """no rank could answer, and nothing had been sent yet"""
    BROKEN = "broken"
    """the answer had begun and could not be finished"""
    CLIENT_GONE = "client_gone"
    CANCELLED = "cancelled"
    """the router is stopping"""
    FAILED = "failed"
    """a fault of the router itself"""


class RequestLog(msgspec.Struct, eq=False):
    """State of a request while it is answered. Times are seconds on the router's clock."""

    request_id: str
    decision_id: str
    """of the first decision; later ones add a suffix"""
    path: str
    started: float
    client_headers: Headers = []
    """headers of the request, unchanged"""
    failures: list[AttemptFailure] = []
    finish_reasons: list[str] = []
    pass_on: dict[str, str] = {}
    """headers to forward unchanged: the client's trace context, while this router does not trace"""
    address: str = ""
    """remote address of the client; "" for this process itself, or the bus"""
    session: str | None = None
    tenant: str | None = None
    """conversation and tenant. The tenant comes from the key, or without keys from the header or the body.
    Both leave the router as hashes only
    """
    caller: Caller = TRUSTED
    """the sender, from its key"""
    salt: str = ""
    """KV blocks are shared only among requests with this salt (`router.access.tenancy`); "": among all
    requests without one
    """
    priority_header: str | None = None
    timeout_header: str | None = None
    """priority and timeout headers, not parsed yet"""
    priority: str = ""
    """name of its priority class"""
    urgency: int = 0
    """index of that class, 0 being the most urgent"""
    give_up_at: float = inf
    """deadline for a rank to take the request"""
    query: bytes = b""
    body_bytes: int = 0
    queued_seconds: float = 0.0
    """longest wait in the queue; 0: admitted at once"""
    model: str = ""
    stream: bool = False
    answer_id: str | None = None
    """id in the answer, if the router assigns one"""
    first_token_at: float | None = None
    whole: bool = False
    """the answer was not streamed: the time of its first token is unknown"""
    decision: Decision | None = None
    """last decision for the first choice"""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    status: int = 0
    detail: str | None = None
    """message of an error"""
    trace: RequestTrace | None = None

    @property
    def block_seed(self) -> int:
        """Seed of the local hashes of its blocks."""
        return salted_seed(self.salt)

    @property
    def owner(self) -> Owner:
        """The tenant that owns the request's decisions."""
        return Owner(self.caller.tenant, self.salt)

    @property
    def trace_id(self) -> str:
        """Trace that the request belongs to, 32 hexadecimal digits; "": none is known."""
        if self.trace is not None:
            return self.trace.id
        named = _TRACE_PARENT.match(self.pass_on.get("traceparent", ""))
        return "" if named is None else named[1]

    @property
    def client(self) -> str:
        """Identity for fair queueing: the tenant, or the address if keys name no tenants."""
        return self.caller.tenant or self.address

    def keys(self, path: str | None = None) -> PredictionKeys:
        """Return the keys for prediction. path: of the request itself, if the present call only asks where to
        send it.
        """
        return keys_of(self.session, self.tenant, self.model, path or self.path)

    def arrived_whole(self, now: float) -> None:
        """Record a complete answer, whose first token came earlier and unseen."""
        self.whole = True
        self.first_token(now)

    def first_token(self, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now

    def time_per_output_token(self, now: float) -> float | None:
        """Return the mean seconds between the tokens of a choice after its first, at the end of the answer.

        None when the time of the first token is unknown, or no choice has a second token.
        """
        choices = max(len(self.finish_reasons), 1)
        later = self.output_tokens - choices
        if self.first_token_at is None or self.whole or later < 1:
            return None
        return (now - self.first_token_at) * choices / later

    def finish(self, outcome: RequestEnd, now: float, posix_ns: int, metrics: RouterMetrics) -> None:
        """Write the log line, update metrics, and end the trace. Called once, perhaps some milliseconds after
        the request's end.

        now, posix_ns: the end, on the router's clock in seconds and in nanoseconds since 1970.
        """
        answered, ended = self.first_token_at is not None, outcome.value
        ttft = None if self.first_token_at is None or self.whole else self.first_token_at - self.started
        tpot = self.time_per_output_token(now)
        if answered:
            metrics.answered(
                self.model, self.output_tokens, now - self.started, ttft, tpot, self.cached_tokens
            )
        metrics.finished(self.model, ended)
        metrics.finished_for(
            self.caller.tenant, ended, self.prompt_tokens, self.cached_tokens, self.output_tokens
        )
        if access.isEnabledFor(logging.INFO):
            line = msgspec.json.encode(self._line(ended, now, posix_ns, ttft, tpot)).decode()
            access.handle(
                logging.LogRecord(access.name, logging.INFO, "", 0, line, (), None)
            )  # info() would search the stack for its caller
        if self.trace is not None:
            self.trace.end(
                posix_ns,
                self.status,
                ended,
                {
                    "roost.request.id": self.request_id,
                    "roost.decision.id": None if self.decision is None else self.decision.id,
                    "roost.retries": len(self.failures),
                    "roost.cached_tokens": self.cached_tokens,
                    "roost.priority": self.priority or None,
                    "roost.queued_ms": _ms(self.queued_seconds),
                    "roost.time_to_first_token_ms": None if ttft is None else 1000.0 * ttft,
                    "roost.time_per_output_token_ms": _ms(tpot),
                    "gen_ai.response.model": shortened(self.model, MAX_NAME) or None,
                    "gen_ai.response.id": self.answer_id,
                    "gen_ai.response.finish_reasons": self.finish_reasons or None,
                    "gen_ai.usage.input_tokens": self.prompt_tokens or None,
                    "gen_ai.usage.output_tokens": self.output_tokens or None,
                },
            )

    def _line(
        self, outcome: str, now: float, posix_ns: int, ttft: float | None, tpot: float | None
    ) -> dict[str, Any]:
        target = None if self.decision is None else self.decision.target
        return {
            "time": _timestamp(posix_ns),
            "request_id": self.request_id,
            "decision_id": None if self.decision is None else self.decision.id,
            "path": self.path,
            "model": shortened(self.model, MAX_NAME),
            "stream": self.stream,
            "worker": None if target is None else target.engine.engine,
            "rank": None if target is None else target.rank,
            "status": self.status,
            "outcome": outcome,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "priority": self.priority or None,
            "queued_ms": _ms(self.queued_seconds),
            "ttft_ms": _ms(ttft),
            "tpot_ms": _ms(tpot),
            "total_ms": _ms(now - self.started),
            "retries": len(self.failures),
            "failures": [failure.value for failure in self.failures],
            "error": None if self.detail is None else shortened(self.detail, MAX_DETAIL),
        }


def _timestamp(posix_ns: int) -> str:
    """Format nanoseconds since 1970 as RFC 3339: UTC, to the millisecond."""
    seconds, milliseconds = divmod(posix_ns // 1_000_000, 1000)
    return f"{_second(seconds)}.{milliseconds:03d}+00:00"


@lru_cache(maxsize=2)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else int(1e6 * seconds + 0.5) / 1000
