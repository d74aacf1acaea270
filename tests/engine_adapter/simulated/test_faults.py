"""A simulated engine does what it is told to do wrong, no more, and says what it cannot do."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import pytest

from bus.memory import MemoryBroker, MemoryBus
from deploy.parts.simulated import SimulatedHost
from engine_adapter.engine import EngineFailed
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.simulated.model.faults import KINDS, FaultOrder, Faults
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineHeartbeat, EngineJoined
from tests.simulated_engines import simulated_engine

ASK = {
    "prompt": "tell me about the river and the old bridge",
    "max_tokens": 24,
    "stream": True,
    "return_token_ids": True,
}


class House:
    """An engine of two ranks, and clients of it and of its bus."""

    def __init__(self, broker: MemoryBroker, host: SimulatedHost, http: aiohttp.ClientSession) -> None:
        self.subjects = broker.subjects
        self.bus = MemoryBus(broker)
        self.host = host
        self.http = http

    async def ask(self, rank: int = 0, **changes: object) -> tuple[int, str]:
        async with self.http.post(
            f"{self.host.identity.urls[rank]}/v1/completions", json=ASK | changes
        ) as answer:
            return answer.status, await answer.text()

    async def simulate(self, **order: object) -> tuple[int, dict[str, object]]:
        async with self.http.post(f"{self.host.identity.urls[1]}/simulate", json=order) as answer:
            return answer.status, await answer.json()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        broker = MemoryBroker()
        host = await stack.enter_async_context(simulated_engine(MemoryBus(broker), broker.subjects))
        yield House(broker, host, await stack.enter_async_context(aiohttp.ClientSession()))


def test_loading_it_loads_no_torch():
    code = "import sys, deploy.parts.simulated; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_refused_and_a_failed_request_touch_nothing_else(house):
    assert (await house.simulate(fault="refuse", rank=1))[0] == 200
    status, text = await house.ask(1)
    assert status == 503
    assert "overloaded" in text
    assert (await house.ask(0))[0] == 200
    await house.simulate(fault="heal")
    await house.simulate(fault="error", rank=0)
    assert (await house.ask(0))[0] == 500
    assert (await house.ask(1))[0] == 200


async def test_a_share_of_the_requests_is_a_share(house):
    await house.simulate(fault="refuse", share=0.5)
    found = [(await house.ask(0, max_tokens=1))[0] for _ in range(60)]
    assert 10 < found.count(503) < 50


async def test_shares_that_are_set_hit_without_being_told():
    broker = MemoryBroker()
    async with (
        simulated_engine(
            MemoryBus(broker), broker.subjects, refuse_share=0.4, error_share=0.4, ranks=1
        ) as host,
        aiohttp.ClientSession() as http,
    ):
        house = House(broker, host, http)
        found = [(await house.ask(0, max_tokens=1))[0] for _ in range(60)]
    assert min(found.count(status) for status in (200, 500, 503)) > 5


async def test_a_broken_stream_ends_in_the_middle_and_its_request_is_cancelled(house):
    await house.simulate(fault="break_stream", rank=0)
    with pytest.raises(aiohttp.ClientPayloadError):
        await house.ask(0)
    with pytest.raises(aiohttp.ClientError):
        await house.ask(0, stream=False)
    assert (await house.ask(1))[0] == 200
    assert house.host.engine.ranks[0].take_facts().load.running == 0


async def test_a_stalled_engine_takes_requests_and_goes_on_where_it_was(house):
    await house.simulate(fault="stall")
    asked = asyncio.create_task(house.ask(0))
    steps = house.host.engine.steps
    await asyncio.sleep(0.1)
    assert house.host.engine.steps == steps
    assert not asked.done()
    await house.simulate(fault="heal")
    assert (await asked)[0] == 200


async def test_a_killed_engine_breaks_its_connections_and_says_no_word(house):
    async with house.http.post(
        f"{house.host.identity.urls[0]}/v1/completions", json=ASK | {"max_tokens": 2000}
    ) as answer:
        await answer.content.readline()
        await house.host.kill()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    with pytest.raises(aiohttp.ClientConnectorError):
        await house.ask(1)
    with pytest.raises(EngineFailed, match="ordered to die"):
        await house.host.failed()
    said = [one.message async for one in house.bus.replay(house.subjects.membership("sim-0"), follow=False)]
    assert [type(one) for one in said] == [EngineJoined]


async def test_a_slow_rank_makes_the_others_wait(house):
    await house.ask(0)
    usual = house.host.engine.step_seconds
    await house.simulate(fault="slow", rank=1, factor=20)
    await house.ask(0)
    async with house.bus.subscribe(house.subjects.kv_metrics) as said:
        load = await anext(
            one.message
            async for one in said
            if isinstance(one.message, KvMetrics) and one.message.step_seconds is not None
        )
    assert load.step_seconds > 2 * usual


async def test_load_is_a_lie_as_long_as_it_is_told_to_be(house):
    await house.simulate(fault="lie_load", rank=0)
    asked = asyncio.create_task(house.ask(0, max_tokens=300))
    ranks = house.host.engine.ranks
    async with house.bus.subscribe(house.subjects.kv_events) as said:
        await anext(said)
    assert ranks[0].take_facts().load.running == 0
    await house.simulate(fault="heal")
    assert ranks[0].take_facts().load.running == 1
    asked.cancel()


async def test_kv_events_are_lost_without_a_trace(house):
    await house.simulate(fault="lose_kv_events", rank=0)
    async with house.bus.subscribe(house.subjects.kv_events) as said:
        await house.ask(0)
        await house.ask(1)
        first = await anext(said)
    assert {event.event.dp_rank for event in first.message} == {1}


async def test_a_handover_is_announced_and_holds_the_steps(house):
    async with house.bus.subscribe(house.subjects.heartbeats()) as beats:
        await house.simulate(fault="handover", seconds=1.0)
        asked = asyncio.create_task(house.ask(0, max_tokens=2))
        beat = await anext(
            one.message
            async for one in beats
            if isinstance(one.message, EngineHeartbeat) and one.message.handover_seconds
        )
        assert 0 < beat.handover_seconds <= 1.0
        assert not asked.done()
        assert (await asked)[0] == 200


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        ({"fault": "explode"}, "fault = 'explode': use one of die, stall"),
        ({"fault": "slow", "rank": 2}, "rank = 2: ranks run from 0 to 1"),
        ({"fault": "stall", "rank": 0}, "stall affects the whole engine"),
        ({"fault": "handover"}, "seconds = None: a handover has to announce"),
        ({"fault": "refuse", "share": 1.5}, "share = 1.5: use 0 to 1"),
        ({"fault": "slow", "seconds": 0}, "seconds = 0: use a positive number"),
        ({"fault": "refuse", "factor": 2}, "factor = 2: only slow, lie_load, slow_reads have one"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_in_words(order, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Faults(2).order(FaultOrder(**order), now=0.0)


async def test_the_door_says_what_is_wrong_with_an_order(house):
    for order, complaint in (
        ({"fault": "explode"}, "use one of die, stall"),
        ({"fault": "slow", "ranks": 1}, "unknown field `ranks`"),
    ):
        status, told = await house.simulate(**order)
        assert status == 400
        assert complaint in told["error"]["message"]


async def test_the_door_tells_what_lasts(house):
    await house.simulate(fault="refuse", rank=1, seconds=60, share=0.25)
    async with house.http.get(f"{house.host.identity.urls[0]}/simulate") as answer:
        (one,) = (await answer.json())["faults"]
    assert (one["fault"], one["rank"], one["share"]) == ("refuse", 1, 0.25)
    assert 0 < one["seconds_left"] <= 60


def test_a_fault_ends_by_itself_and_a_new_order_replaces_the_old():
    faults = Faults(2)
    faults.order(FaultOrder(fault="slow", rank=0, seconds=2, factor=3), now=10)
    assert (faults.factor("slow", 0, 11), faults.factor("slow", 1, 11), faults.factor("slow", 0, 12)) == (
        3,
        1,
        1,
    )
    faults.order(FaultOrder(fault="slow", rank=0, factor=5), now=20)
    faults.order(FaultOrder(fault="slow", rank=0, factor=7), now=20)
    assert [one.factor for one in faults.active(1e9)] == [7]
    faults.order(FaultOrder(fault="heal"), now=30)
    assert not faults.active(30)
    assert set(KINDS) > {"die", "heal"}


def test_engines_of_one_seed_do_not_fail_in_step_with_each_other() -> None:
    def hits(name: str) -> list[bool]:
        engine = SimulatedEngine(SimulatedConfig(), name=name)
        return [engine.chance(0.1) for _ in range(2_000)]

    one, other = hits("engine-0"), hits("engine-1")
    assert one == hits("engine-0")
    assert sum(one) > 100
    assert 0 < sum(a and b for a, b in zip(one, other, strict=True)) < 60  # of 20 by chance
