"""From requests to a plan: a simulated engine with room for replicas, the tracker and the planner, in real
time on one bus."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import pytest

from bus import BusError
from bus.memory import MemoryBroker, MemoryBus
from deploy.process import alongside
from fleet.requests.plans import DescribePlan, PlanDescribed
from migration.config import MigrationConfig
from migration.model.plan_record import PlanRecord
from migration.service import MigrationService
from tests.simulated_engines import simulated_engine
from tracker.config import TrackerConfig
from tracker.service import TrackerService

RANKS, SLOTS = 4, 10
ENGINE: dict[str, Any] = {
    "ranks": RANKS,
    "slots_per_rank": SLOTS,
    "popularity_skew": 1.5,
    "domain_skew": 0.0,
    "expert_pair": 1e-5,
    "dispatch": 0.0,
    "max_running": 64,
}
# Windows and staleness hold on a loaded machine, where the publisher, the event loop and the planner's thread
# may each be seconds late. Not automatic: the plan would be carried out, and nothing would be left to plan.
PLANNER = MigrationConfig(automatic=False, window_seconds=4.0, stale_seconds=4.0, min_gain=0.0)
TRACKER = TrackerConfig(publish_seconds=0.1, fast_seconds=1.0)


async def ask(bus: MemoryBus, broker: MemoryBroker, **question: Any) -> PlanRecord:
    answer = await bus.request(
        broker.subjects.describe_plan, DescribePlan(engine="sim-0", **question), seconds=60
    )
    assert isinstance(answer, PlanDescribed)
    return msgspec.json.decode(answer.record, type=PlanRecord)


async def until_evaluated(bus: MemoryBus, broker: MemoryBroker) -> PlanRecord:
    """Wait for a plan with copies that is made from one window of demand and evaluated on the next."""
    async with asyncio.timeout(120):
        while True:
            await asyncio.sleep(0.5)
            try:
                record = await ask(bus, broker)
            except BusError:  # too little is known yet
                continue
            if record.next_window and record.copies:
                return record


async def keep_asking(http: aiohttp.ClientSession, url: str, number: int) -> None:
    """One client: sends the next prompt as soon as the last one is answered."""
    for turn in range(10_000):
        body = {
            "prompt": [(17 * number + 5 * turn + at) % 200 + 1 for at in range(32)],
            "max_tokens": 60,
            "temperature": 0,
        }
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            await answer.read()


# Seconds of real time. test_planning_service checks the service with a tracker's messages instead of a tracker.
@pytest.mark.slow
@pytest.mark.timeout(300)  # also imports and starts three services, slowly on a loaded machine
async def test_what_requests_want_becomes_a_plan_that_makes_their_steps_shorter() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with AsyncExitStack() as stack:
        tracker = TrackerService(MemoryBus(broker), broker.subjects, TRACKER)
        planner = MigrationService(MemoryBus(broker), broker.subjects, PLANNER)
        for part, name in ((tracker, "tracker"), (planner, "planner")):
            await stack.enter_async_context(alongside(part.run(), name))
        host = await stack.enter_async_context(simulated_engine(MemoryBus(broker), broker.subjects, **ENGINE))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        for number in range(4 * RANKS):
            asking = keep_asking(http, host.identity.urls[number % RANKS], number)
            await stack.enter_async_context(alongside(asking, f"client {number}"))
        record = await until_evaluated(bus, broker)
        assert (record.engine, record.epoch) == ("sim-0", 0)
        assert record.before is not None
        assert record.after is not None
        assert record.after.balance_mean > record.before.balance_mean + 0.05
        assert record.copied_share < 0.3, "empty slots are filled where that helps, and no more"
        assert record.net_seconds > 0
        memory = (await ask(bus, broker, memory=True)).memory
        assert [point.slots_per_rank for point in memory if point.present] == [SLOTS]
        lost = await ask(bus, broker, dead=(1,))
        assert "no live holder" in lost.lost
