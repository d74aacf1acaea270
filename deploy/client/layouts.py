"""Choice of layouts by the planner: query it, and switch it on and off, over the bus."""

from bus import Bus
from bus.protocol.subjects import Subjects
from deploy.client.control_loop import answered
from fleet.requests.layouts import DescribeLayouts, EngineLayout, LayoutsDescribed, SetLayoutChoice


async def layout_choices(bus: Bus, subjects: Subjects, engine: str = "") -> dict[str, EngineLayout]:
    """Return how the layout of an engine, or (empty) of each, is chosen, by name.

    Raises NoAnswer without a planner, or with one that does not know the request; BusError without a bus.
    """
    found = await answered(bus, subjects, DescribeLayouts(engine=engine), LayoutsDescribed)
    return {one.engine: one for one in found.engines}


async def set_layout_choice(
    bus: Bus, subjects: Subjects, engine: str, *, automatic: bool
) -> dict[str, EngineLayout]:
    """Have the planner choose the layout of an engine, or (empty) of each, or leave it. Raises as
    `layout_choices`."""
    request = SetLayoutChoice(engine=engine, automatic=automatic)
    found = await answered(bus, subjects, request, LayoutsDescribed)
    return {one.engine: one for one in found.engines}
