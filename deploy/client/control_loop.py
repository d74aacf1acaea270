"""What the migration service does by itself: asked over the bus, and told to rest or to go on."""

import asyncio
from collections.abc import Callable

from bus import Bus, BusTimeout, Declined, NobodyThere
from bus.protocol.subjects import Subjects
from fleet.events import DescribeLoop, LoopDescribed, SteerLoop

ASK_SECONDS = 3.0
TAKEOVER_SECONDS = 8.0
"""in which a planner that died is started again, or another one leads"""
LOOKS = 4
"""times that it is asked again meanwhile"""
UNKNOWN = "it is not known whether that holds: a planner was asked that did not answer in time, and may do it yet; roost migration status tells"
SILENCE = "no planner says what it does by itself: it is not running (roost events --kind migration, and its log, tell), or it is of an older version of Roost"


class NoAnswer(Exception):
    """Nobody says what the migration service does by itself; the text says why, as far as that is known."""


async def described(bus: Bus, subjects: Subjects) -> LoopDescribed:
    """The planner's own words, asked for once. NotTold when there is none, or one that knows no such question; BusError without a bus."""
    return await _asked(bus, subjects, DescribeLoop())


async def steered(bus: Bus, subjects: Subjects, paused: bool, reason: str, say: Callable[[str], None]) -> LoopDescribed:
    """Have the planner make no plans by itself, or make them again. Where none is there, one that may take over is waited for; then NotTold,
    which says whether one may do it yet."""
    perhaps = False
    for look in range(LOOKS):
        try:
            return await _asked(bus, subjects, SteerLoop(paused=paused, reason=reason))
        except NoAnswer as error:
            if not isinstance(error.__cause__, BusTimeout):
                if perhaps:
                    raise NoAnswer(f"{error}; {UNKNOWN}") from error
                raise
            hangs = not isinstance(error.__cause__, NobodyThere)
            if not look or hangs > perhaps:
                say("the planner does not answer; it is asked again" if hangs else "no planner is there; one may be about to take over")
            perhaps = perhaps or hangs
            await asyncio.sleep(TAKEOVER_SECONDS / LOOKS)
    raise NoAnswer(UNKNOWN if perhaps else f"{SILENCE}; nothing was changed")


async def _asked(bus: Bus, subjects: Subjects, question: DescribeLoop | SteerLoop) -> LoopDescribed:
    try:
        answer = await bus.request(subjects.loop, question, ASK_SECONDS)
    except BusTimeout as error:
        raise NoAnswer(SILENCE) from error
    except Declined as refusal:
        raise NoAnswer(str(refusal)) from refusal
    if not isinstance(answer, LoopDescribed):
        raise NoAnswer(f"the planner answered with {type(answer).__name__}; is it of another version of Roost?")
    return answer
