"""State of the automatic control loop: query it, pause it, resume it over the bus."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from bus import Bus, BusTimeout, Declined, Message, NobodyThere
from bus.protocol.subjects import Subjects
from fleet.requests.control_loop import DescribeLoop, LoopDescribed, SetLoopState

ASK_SECONDS = 3.0
TAKEOVER_SECONDS = 8.0
"""Time in which a crashed planner restarts or another one becomes leader."""
LOOKS = 4
"""Number of retries in that time."""
UNKNOWN = (
    "the outcome is unknown: a planner received the request and did not answer in time; it may still apply"
    " it; check with roost migration status"
)
SILENCE = (
    "no planner reports its state: it is not running (see roost events --kind migration, and its log), or it"
    " is an older version of Roost"
)

Answer = TypeVar("Answer", bound=Message)


class NoAnswer(Exception):
    """Raised when no planner reports its state; the text gives the reason, if known."""


async def described(bus: Bus, subjects: Subjects) -> LoopDescribed:
    """Request the planner's state once.

    Raises NoAnswer without a planner, or with one that does not know the request; BusError without a bus.
    """
    return await answered(bus, subjects, DescribeLoop(), LoopDescribed)


async def set_paused(
    bus: Bus, subjects: Subjects, paused: bool, reason: str, say: Callable[[str], None]
) -> LoopDescribed:
    """Pause or resume automatic planning. Without a planner, wait for one to take over.

    Raises NoAnswer, whose text says if a planner may still apply the request.
    """
    may_apply = False
    for look in range(LOOKS):
        try:
            request = SetLoopState(paused=paused, reason=reason)
            return await answered(bus, subjects, request, LoopDescribed)
        except NoAnswer as error:
            if not isinstance(error.__cause__, BusTimeout):
                if may_apply:
                    raise NoAnswer(f"{error}; {UNKNOWN}") from error
                raise
            hung = not isinstance(error.__cause__, NobodyThere)
            if not look or hung > may_apply:
                say(
                    "the planner does not answer; asking again"
                    if hung
                    else "no planner is running; waiting for one to take over"
                )
            may_apply = may_apply or hung
            await asyncio.sleep(TAKEOVER_SECONDS / LOOKS)
    raise NoAnswer(UNKNOWN if may_apply else f"{SILENCE}; nothing was changed")


async def answered(bus: Bus, subjects: Subjects, question: Message, answers: type[Answer]) -> Answer:
    """Send a request about the control loop once, and return its answer, of type `answers`.

    Raises NoAnswer without a planner, or with one that does not know the request; BusError without a bus.
    """
    try:
        answer = await bus.request(subjects.loop, question, ASK_SECONDS)
    except BusTimeout as error:
        raise NoAnswer(SILENCE) from error
    except Declined as refusal:
        raise NoAnswer(str(refusal)) from refusal
    if not isinstance(answer, answers):
        raise NoAnswer(
            f"the planner answered with {type(answer).__name__}; is it of another version of Roost?"
        )
    return answer
