"""One attempt of a request at one rank: it is admitted, and its booking and its span end in every case."""

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType, coroutine

from router.fleet_state.reservations import Booking
from router.scheduling.decision import Decision
from router.scheduling.routing_request import Attempt, RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog
from router.telemetry.tracing import AttemptTrace
from router.upstream.rank_client import UpstreamFailed

Work = Callable[[Decision, Booking, AttemptTrace | None], Awaitable[None]]
"""Serves the request at the chosen rank. UpstreamFailed when that rank fails."""


class RankAttempt:
    """An async context manager: waits for a rank, and within it the rank serves the request.

    A failure of the rank (UpstreamFailed) ends the context and is kept in `failed`. ApiError on entering, as
    in `WaitQueue.admit`.
    """

    __slots__ = (
        "_attempt",
        "_begun",
        "_need",
        "_request_log",
        "_service",
        "_suffix",
        "booking",
        "decision",
        "failed",
        "span",
    )
    decision: Decision
    booking: Booking
    span: AttemptTrace | None
    failed: UpstreamFailed | None

    def __init__(
        self,
        service: RouterService,
        request_log: RequestLog,
        need: RoutingRequest,
        attempt: Attempt,
        *,
        suffix: str = "",
        begun: bool,
    ) -> None:
        """suffix: of the decision's id. begun: the client already has part of the answer."""
        self._service = service
        self._request_log = request_log
        self._need = need
        self._attempt = attempt
        self._suffix = f"{suffix}-a{attempt.number}" if attempt.number > 1 else suffix
        self._begun = begun
        self.failed = None
        self.span = None

    async def __aenter__(self) -> "RankAttempt":
        self.decision, self.booking = await self._service.wait_queue.admit(
            self._request_log, self._need, self._suffix, self._attempt, begun=self._begun
        )
        trace = self._request_log.trace
        if trace is not None:
            try:
                self.span = trace.attempt(self.decision)
            except BaseException:
                self._service.release(self.booking)
                raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> bool:
        ended = None if error is None else "abandoned"
        try:
            if isinstance(error, UpstreamFailed):
                self.failed, ended = error, error.how.value
                self._service.attempt_failed(
                    self._request_log, self.decision, self.booking, error.how, str(error)
                )
        finally:
            self._service.release(self.booking)
            if self.span is not None:
                self.span.end(ended)
        return self.failed is not None


@coroutine
def _the_others() -> Generator[None, None, None]:
    """Let the other tasks of this turn of the event loop come as far."""
    yield


async def make_attempt(
    service: RouterService,
    request_log: RequestLog,
    need: RoutingRequest,
    attempt: Attempt,
    work: Work,
    *,
    suffix: str = "",
    begun: bool,
) -> tuple[Decision, UpstreamFailed | None]:
    """Wait for a rank and let it serve the request. Return the decision, and the failure of its rank.

    Requests that arrive in one turn of the event loop are read, then decided, then forwarded: each step finds
    its code in the processor's caches, which saves 3 percent of the cost of a short request.

    Arguments and errors as of `RankAttempt`.
    """
    await _the_others()
    async with RankAttempt(service, request_log, need, attempt, suffix=suffix, begun=begun) as here:
        await _the_others()
        await work(here.decision, here.booking, here.span)
    return here.decision, here.failed
