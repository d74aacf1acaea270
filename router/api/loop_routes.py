"""Operator routes of the automatic control loop: `GET /v1/loop`, and `POST /v1/loop/pause`."""

import msgspec

from bus import BusError, BusTimeout, Declined, NobodyThere
from fleet.completions import ApiError
from fleet.requests.control_loop import DescribeLoop, LoopDescribed, SetLoopState
from router.api.loop_record import LoopRecord, PauseRequest
from router.service import RouterService

ANSWER_SECONDS = 3.0


async def loop_record(service: RouterService) -> LoopRecord:
    """Return the state of the loop. ApiError 409 with the planner's reason if it refuses, 503 without a
    planner.
    """
    return await _asked(service, DescribeLoop())


async def pause_loop(service: RouterService, request: PauseRequest) -> LoopRecord:
    """Pause automatic planning until it is resumed (paused: False), and return the state of the loop.

    The pause survives restarts of the planner. Running plans are completed. ApiError as `loop_record`; after
    a 504 the planner may still apply the request.
    """
    return await _asked(service, SetLoopState(paused=request.paused, reason=request.reason))


async def _asked(service: RouterService, question: DescribeLoop | SetLoopState) -> LoopRecord:
    try:
        answer = await service.ask_planner(question, ANSWER_SECONDS)
    except Declined as refusal:
        raise ApiError(409, f"the planner refuses: {refusal}", code="refused") from refusal
    except NobodyThere as error:
        message = "no planner is running, so that nothing is moved automatically"
        raise ApiError(503, message, code="no_planner", retry_after=5.0) from error
    except BusTimeout as error:
        message = f"the planner did not answer in {ANSWER_SECONDS:g} s; it may still apply the request"
        raise ApiError(504, message, code="planner_silent", retry_after=5.0) from error
    except BusError as error:
        raise ApiError(503, f"the planner cannot be asked: {error}", code="no_planner") from error
    if not isinstance(answer, LoopDescribed):
        message = f"the planner answered with {type(answer).__name__}; is it of another version of Roost?"
        raise ApiError(502, message, code="no_planner")
    return msgspec.convert(msgspec.to_builtins(answer), LoopRecord)
