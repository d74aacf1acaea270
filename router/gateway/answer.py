"""The answer of a request that a proxy forwarded, as the proxy reports it: it updates the booking, and feeds
what the router learns from answers.
"""

import asyncio

from router.attempt import RankAttempt
from router.foreign_api.routed_experts_parser import TokenUsage
from router.foreign_api.usage import counted
from router.gateway.protocol import AnswerHead
from router.health.attempt_failures import AttemptFailure
from router.prefix_index.prompt import Prompt
from router.service import RouterService
from router.telemetry.request_log import RequestLog
from router.upstream.rank_client import UpstreamFailed

_COUNTED_EVERY = 16
"""events between two updates of a booking's remaining tokens; each event counts as one token"""
_TAIL_BYTES = 4096
"""End of a stream that is kept to read its usage from."""
_BUSY = frozenset({429, 529})


class ReportedAnswer:
    """One answer. Call `end` when it is complete, and `close` in every case.

    State: its head, the bytes from which its usage will be read, and a timer.
    """

    def __init__(
        self, service: RouterService, request_log: RequestLog, attempt: RankAttempt, prompt: Prompt
    ) -> None:
        self.complete = False
        self._service = service
        self._log = request_log
        self._attempt = attempt
        self._prompt = prompt
        self._head: AnswerHead | None = None
        self._kept = b""
        self._events = 0
        self._tap = service.tap(attempt.decision)
        self._prefill: asyncio.TimerHandle | None = None
        if (
            not request_log.stream
        ):  # its first token will not be seen, so its prompt counts as computed in time
            self._prefill = asyncio.get_running_loop().call_later(
                service.expected_prefill_seconds(attempt.decision), service.prompt_computed, attempt.booking
            )

    def close(self) -> None:
        if self._prefill is not None:
            self._prefill.cancel()
            self._prefill = None

    def begin(self, head: AnswerHead) -> None:
        """Record the head. A rank that is busy is not chosen for a moment."""
        self._head, self._log.status = head, head.status

    def feed(self, data: bytes) -> None:
        """Read a piece of the body."""
        head = self._head
        if not data or head is None or head.status >= 400 or head.encoded:
            return
        if self._tap is not None:
            self._tap.feed(data)
        if not head.content_type.startswith("text/event-stream"):
            self._kept += data[: max(0, self._service.config.max_event_bytes - len(self._kept))]
            return
        if not self._kept:
            self._log.first_token(self._service.clock())
            self._service.first_token(self._attempt.booking)
            if self._attempt.span is not None:
                self._attempt.span.first_token()
        self._kept = (self._kept + data)[-_TAIL_BYTES:]
        self._events += data.count(b"\n\n")
        if self._events >= _COUNTED_EVERY:
            self._service.emitted(self._attempt.booking, self._events)
            self._events = 0

    def end(self) -> None:
        """Record the end of the answer. UpstreamFailed when the server has failed."""
        self.complete = True
        head = self._head
        if head is None:
            return
        if head.status in _BUSY or head.status >= 500:
            how = AttemptFailure.BUSY if head.status in _BUSY else AttemptFailure.SERVER_ERROR
            raise UpstreamFailed(how, f"{self._attempt.decision.target.url}: HTTP {head.status}")
        if head.status >= 400:
            return
        self._count(head)
        request_log, decision, tap = self._log, self._attempt.decision, self._tap
        usage = TokenUsage(request_log.prompt_tokens, request_log.output_tokens, request_log.cached_tokens)
        reported = tap is not None and self._service.routed(decision, tap, usage)
        self._service.finished(decision, self._attempt.booking, self._prompt, reported=reported)

    def _count(self, head: AnswerHead) -> None:
        """Record the server's token counts, if any."""
        is_stream = head.content_type.startswith("text/event-stream")
        if not is_stream:
            self._log.arrived_whole(self._service.clock())
        usage = counted(self._kept.split(b"\n\n") if is_stream else [self._kept.lstrip()])
        if usage is not None:
            self._log.prompt_tokens = usage.prompt_tokens
            self._log.output_tokens = usage.completion_tokens
            details = usage.prompt_tokens_details
            self._log.cached_tokens = details.cached_tokens if details else 0
