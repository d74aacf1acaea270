"""Topic `loop`: the automatic control loop and its plans."""

import asyncio

from fleet.requests.control_loop import DescribeLoop, LoopDescribed
from router.dashboard.planner_feed import HISTORY_SECONDS, NO_BUS, follow_plans, planner_answer
from router.dashboard.topic import Topic
from router.dashboard.views.loop import LoopPicture, loop_picture
from router.dashboard.views.plan_timeline import PlanTimeline
from router.service import RouterService


class LoopTopic(Topic):
    """The planner's state, and the log of plans."""

    name = "loop"

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._state = planner_answer(service, DescribeLoop(), LoopDescribed)
        self._timeline = PlanTimeline()

    def view(self) -> LoopPicture:
        described = self._state.message
        assert described is None or isinstance(described, LoopDescribed)
        silence = self._state.silence if self._service.bus is not None else NO_BUS
        return loop_picture(described, silence, self._timeline.plans, HISTORY_SECONDS)

    async def follow(self) -> None:
        if self._service.bus is None:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._state.follow(), name="asks for the state of the loop")
            tasks.create_task(
                follow_plans(self._service.bus, self._service.subjects, self._timeline),
                name="reads the log of plans",
            )
