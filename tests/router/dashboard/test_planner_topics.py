"""The topics Experts, Loop and Layouts: what the router asks and reads for them, and when."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
import pytest

from bus import BusError, Message
from fleet.facts.migrations import MigrationStaged
from fleet.facts.placements import PlacementCommitted
from fleet.layout import DP_ATTENTION
from fleet.placement import linear, with_rows
from fleet.popularity import ExpertTable
from fleet.requests.control_loop import DescribeLoop, EngineLoop, LoopDescribed
from fleet.requests.demand import DescribePopularity, PopularityDescribed, RankPopularity
from fleet.requests.layouts import DescribeLayouts, EngineLayout, LayoutsDescribed
from router.dashboard import experts_topic, planner_feed, routes
from router.dashboard.feed import DashboardFeed
from tests.router.dashboard.test_plan_timeline import committed, planned, staged
from tests.router.router_fixture import SHAPE, House, OpenHouse

URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "DashboardFeed", partial(DashboardFeed, period=0.02))
    monkeypatch.setattr(planner_feed, "_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(experts_topic, "_PAUSE_SECONDS", 0.02)


async def views(house: House, topic: str) -> AsyncIterator[Any]:
    """Views of a topic, as a page gets them."""
    async with house.http.get(f"{house.url}/dashboard/feed?topics={topic}") as answer:
        async for line in answer.content:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


async def view_that(house: House, topic: str, holds: Callable[[Any], Any]) -> Any:
    """The first view for which something holds."""
    async with asyncio.timeout(10), aclosing(views(house, topic)) as seen:  # type: ignore[type-var]
        async for view in seen:
            if holds(view):
                return view
    raise AssertionError


class Planner:
    """Answers about its loop and its layouts, and counts the questions."""

    def __init__(self) -> None:
        self.questions: list[Message] = []

    async def answer(self, question: Message) -> Message:
        self.questions.append(question)
        if isinstance(question, DescribeLayouts):
            one = EngineLayout(
                engine="a", worker_id=1, layout="ep", policy="regret", automatic=True, running=5
            )
            return LayoutsDescribed(engines=(one,))
        return LoopDescribed(
            policy="weighted",
            automatic=True,
            paused=False,
            budget_bytes=100,
            budget_seconds=60.0,
            cycle_seconds=5.0,
            engines=(EngineLoop(engine="a", worker_id=1, epoch=0, plan_discount=0.5, spent_bytes=20),),
        )


async def record_plan(house: House, *entries: Any) -> None:
    for entry in entries:
        await house.bus.record(house.subjects.migrations("a"), entry)


async def test_the_loop_has_the_planners_state_and_the_plans_of_the_log_past_and_coming(house: House) -> None:
    await record_plan(house, planned("p"), staged(0))
    planner = Planner()
    async with house.bus.serve(house.subjects.loop, planner.answer):
        view = await view_that(house, "loop", lambda view: view["loop"] and view["plans"])
        assert (view["silence"], view["loop"]["budget_bytes"]) == ("", 100)
        assert view["engines"][0]["spent_bytes"] == 20
        assert [(plan["plan"], plan["state"]) for plan in view["plans"]] == [("p", "under way")]
        await record_plan(house, committed(0, last=True))
        view = await view_that(house, "loop", lambda view: view["plans"] and view["plans"][0]["done"])
    assert (view["plans"][0]["state"], view["plans"][0]["moved_bytes"]) == ("committed", 10)
    assert set(planner.questions) == {DescribeLoop()}


async def test_without_a_planner_the_pages_say_so(open_house: OpenHouse) -> None:
    with_bus, without = await open_house(), await open_house(bus=False)
    for topic in ("loop", "layouts"):
        found = await view_that(with_bus, topic, lambda view: "answered" not in view["silence"])
        assert found["silence"] == "no planner is running"
        assert "no bus" in (await view_that(without, topic, lambda _: True))["silence"]


async def test_a_planner_that_falls_silent_leaves_its_last_state(house: House) -> None:
    planner, broken = Planner(), asyncio.Event()

    async def answer(question: Message) -> Message:
        if broken.is_set():
            raise BusError("not the leader")
        return await planner.answer(question)

    async with house.bus.serve(house.subjects.loop, answer):
        async with asyncio.timeout(10), aclosing(views(house, "loop")) as seen:  # type: ignore[type-var]
            async for view in seen:
                if view["loop"] is None:
                    continue
                broken.set()
                if view["silence"]:
                    assert "not the leader" in view["silence"]
                    assert view["loop"]["budget_bytes"] == 100
                    break


async def test_layouts_have_the_served_form_the_choice_and_the_past(house: House) -> None:
    joined = await house.join("a", URLS, None)
    sharded = with_rows(linear(layers=2, experts=4, ranks=2), {1: None}, epoch=1)
    stage: MigrationStaged = staged(0, sharded)
    await record_plan(house, planned("p", to_sharded=(1,)), stage, committed(0, last=True))
    fact = PlacementCommitted(
        engine="a", worker_id=joined.worker_id, attention=DP_ATTENTION, placement=sharded.record()
    )
    await house.bus.record(house.subjects.placements("a"), fact)
    async with house.bus.serve(house.subjects.loop, Planner().answer):
        view = await view_that(
            house,
            "layouts",
            lambda view: (
                view["engines"]
                and view["engines"][0]["choice"]
                and len(view["engines"][0]["spans"]) == 2
                and view["engines"][0]["epoch"] == 1
            ),
        )
    (engine,) = view["engines"]
    assert (engine["engine"], engine["sharded_layers"], engine["layers"]) == ("a", "1", 2)
    assert [span["sharded"] for span in engine["spans"]] == [0, 1]
    assert engine["choice"]["running"] == 5


FAST = np.array([[0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])


def popularity(model: str) -> PopularityDescribed:
    table = ExpertTable.of(FAST)
    return PopularityDescribed(
        model=model,
        tokens=100.0,
        tokens_per_second=10.0,
        fast=table,
        slow=table,
        ranks=(RankPopularity(engine="a", rank=0, tokens_per_second=10.0, remote=0.3),),
        clusters=(),
        shifted=False,
        divergence=0.0,
        threshold=0.01,
        sources=(),
        gain=0.5,
        outcomes=1,
        recall=None,
        prior_recall=None,
        stored_blocks=0,
        stored_bytes=0,
    )


async def test_experts_have_the_trackers_demand_and_maps_of_an_engine(house: House) -> None:
    await house.join("a", URLS, None)
    questions: list[Message] = []

    async def tracker(question: Message) -> Message:
        questions.append(question)
        return popularity("demo")

    async with house.bus.serve(house.subjects.describe_profile, tracker):
        async with asyncio.timeout(10), aclosing(views(house, "experts")) as seen:  # type: ignore[type-var]
            async for view in seen:
                if view["models"] and not view["models"][0]["silence"]:
                    break
            maps = (await house.get("/dashboard/experts/a")).json
    assert set(questions) >= {DescribePopularity(model="demo")}
    assert (view["models"][0]["model"], view["models"][0]["skew"]) == ("demo", pytest.approx((2.8 + 1) / 2))
    (engine,) = view["engines"]
    assert (engine["engine"], engine["remote"], engine["layers"]) == ("a", 0.3, SHAPE.layers)
    assert maps["maps"] == engine["maps"]
    assert (maps["known"], maps["layers"][0]["hottest"][0]["demand"]) == (True, 2.8)


async def test_maps_of_an_unknown_engine_are_not_found(house: House) -> None:
    answer = await house.get("/dashboard/experts/nothing")
    assert (answer.status, answer.json["error"]["code"]) == (404, "engine_not_found")


async def test_nothing_is_asked_while_no_page_watches(house: House) -> None:
    planner = Planner()
    async with house.bus.serve(house.subjects.loop, planner.answer):
        await view_that(house, "loop", lambda view: view["loop"])
        asked = 0
        while asked != len(planner.questions):  # until the router has noticed that the page is gone
            asked = len(planner.questions)
            await asyncio.sleep(0.2)
        assert asked >= 1
