"""Topic `layouts`: the layouts of engines, and how the planner chooses them."""

import asyncio

from fleet.requests.layouts import DescribeLayouts, LayoutsDescribed
from router.dashboard.planner_feed import HISTORY_SECONDS, NO_BUS, follow_plans, planner_answer
from router.dashboard.topic import Topic
from router.dashboard.views.layouts import LayoutsPicture, layouts_picture
from router.dashboard.views.plan_timeline import PlanTimeline
from router.service import RouterService


class LayoutsTopic(Topic):
    """The planner's answer, and the layouts in the log of plans."""

    name = "layouts"

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._choices = planner_answer(service, DescribeLayouts(), LayoutsDescribed)
        self._timeline = PlanTimeline()

    def view(self) -> LayoutsPicture:
        described = self._choices.message
        assert described is None or isinstance(described, LayoutsDescribed)
        engines = list(self._service.view.engines())
        return layouts_picture(
            engines,
            described,
            self._choices.silence if self._service.bus is not None else NO_BUS,
            {state.joined.engine: self._timeline.layouts(state.joined.engine) for state in engines},
            HISTORY_SECONDS,
        )

    async def follow(self) -> None:
        if self._service.bus is None:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._choices.follow(), name="asks how layouts are chosen")
            tasks.create_task(
                follow_plans(self._service.bus, self._service.subjects, self._timeline),
                name="reads the log of plans",
            )
