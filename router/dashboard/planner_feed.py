"""Answers and log of the planner, as the dashboard follows them while a page watches."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from bus import Bus, BusError, Message, NobodyThere
from bus.protocol.subjects import Subjects
from router.dashboard.views.plan_timeline import PlanTimeline
from router.service import RouterService

log = logging.getLogger(__name__)

HISTORY_SECONDS = 3600.0
"""Length of the log that is read when a page begins to watch."""
ANSWER_SECONDS = 3.0
_PAUSE_SECONDS = 2.0
_RETRY_SECONDS = 5.0
NO_BUS = "this router has no bus, and thus no planner"


class PlannerAnswer:
    """Last answer of the planner to a question, asked again every few seconds while `follow` runs."""

    def __init__(self, ask: Callable[[], Awaitable[Message]], answers: type[Message]) -> None:
        self._ask = ask
        self._answers = answers
        self.message: Message | None = None
        """None: it has not answered yet"""
        self.silence = "the planner has not answered yet"
        """why nothing newer is known; empty: it answers"""

    async def follow(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                answer = await self._ask()
            except NobodyThere:
                self.silence = "no planner is running"
            except BusError as error:
                self.silence = f"the planner does not answer: {error}"
            else:
                if isinstance(answer, self._answers):
                    self.message, self.silence = answer, ""
                else:
                    self.silence = f"the planner answered with {type(answer).__name__}: another version?"
            await asyncio.sleep(_PAUSE_SECONDS)


def planner_answer(service: RouterService, question: Message, answers: type[Message]) -> PlannerAnswer:
    """Return the answer to a question about the planner's loop."""
    return PlannerAnswer(lambda: service.ask_planner(question, ANSWER_SECONDS), answers)


async def follow_plans(bus: Bus, subjects: Subjects, timeline: PlanTimeline) -> None:
    """Keep a timeline of the plans of the last while until cancelled; it begins anew."""
    while True:
        timeline.clear()
        try:
            async with aclosing(bus.replay(subjects.migrations(), since=HISTORY_SECONDS)) as entries:  # type: ignore[type-var]
                async for received in entries:
                    timeline.apply(received.message, received.published_at)
                    await asyncio.sleep(0)  # an hour of a large fleet's log must not keep requests waiting
        except BusError as error:
            log.warning("the log of plans cannot be read for the dashboard: %s", error)
        await asyncio.sleep(_RETRY_SECONDS)
