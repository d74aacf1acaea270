"""One attempt of a request at one rank: it is admitted, and its booking and its span end in every case."""

from collections.abc import Awaitable, Callable

from router.fleet_state.reservations import Booking
from router.scheduling.decision import Decision
from router.scheduling.scheduler import Attempt, RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog
from router.telemetry.tracing import AttemptTrace
from router.upstream.rank_client import UpstreamFailed

Work = Callable[[Decision, Booking, AttemptTrace | None], Awaitable[None]]
"""Serves the request at the chosen rank. UpstreamFailed when that rank fails."""


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

    suffix: of the decision's id. begun: the client already has part of the answer. ApiError as in
    `WaitQueue.admit`.
    """
    suffix += f"-a{attempt.number}" if attempt.number > 1 else ""
    decision, booking = await service.wait_queue.admit(request_log, need, suffix, attempt, begun=begun)
    span: AttemptTrace | None = None
    ended: str | None = "abandoned"
    try:
        span = None if request_log.trace is None else request_log.trace.attempt(decision)
        await work(decision, booking, span)
        ended = None
    except UpstreamFailed as failed:
        ended = failed.how.value
        service.attempt_failed(request_log, decision, booking, failed.how, str(failed))
        return decision, failed
    else:
        return decision, None
    finally:
        service.release(booking)
        if span is not None:
            span.end(ended)
