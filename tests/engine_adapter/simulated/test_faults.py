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


class SimulatedFixture:
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
async def sim() -> AsyncIterator[SimulatedFixture]:
    async with AsyncExitStack() as stack:
        broker = MemoryBroker()
        host = await stack.enter_async_context(simulated_engine(MemoryBus(broker), broker.subjects))
        yield SimulatedFixture(broker, host, await stack.enter_async_context(aiohttp.ClientSession()))


def test_loading_it_loads_no_torch():
    code = "import sys, deploy.parts.simulated; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_refused_and_a_failed_request_touch_nothing_else(sim):
    assert (await sim.simulate(fault="refuse", rank=1))[0] == 200
    status, text = await sim.ask(1)
    assert status == 503
    assert "overloaded" in text
    assert (await sim.ask(0))[0] == 200
    await sim.simulate(fault="heal")
    await sim.simulate(fault="error", rank=0)
    assert (await sim.ask(0))[0] == 500
    assert (await sim.ask(1))[0] == 200


async def test_a_share_of_the_requests_is_a_share(sim):
    await sim.simulate(fault="refuse", share=0.5)
    found = [(await sim.ask(0, max_tokens=1))[0] for _ in range(60)]
    assert 10 < found.count(503) < 50


async def test_shares_that_are_set_hit_without_being_told():
    broker = MemoryBroker()
    async with (
        simulated_engine(
            MemoryBus(broker), broker.subjects, refuse_share=0.4, error_share=0.4, ranks=1
        ) as host,
        aiohttp.ClientSession() as http,
    ):
        sim = SimulatedFixture(broker, host, http)
        found = [(await sim.ask(0, max_tokens=1))[0] for _ in range(60)]
    assert min(found.count(status) for status in (200, 500, 503)) > 5


async def test_a_broken_stream_ends_in_the_middle_and_its_request_is_cancelled(sim):
    await sim.simulate(fault="break_stream", rank=0)
    with pytest.raises(aiohttp.ClientPayloadError):
        await sim.ask(0)
    with pytest.raises(aiohttp.ClientError):
        await sim.ask(0, stream=False)
    assert (await sim.ask(1))[0] == 200
    assert sim.host.engine.ranks[0].take_facts().load.running == 0


async def test_a_stalled_engine_takes_requests_and_goes_on_where_it_was(sim):
    await sim.simulate(fault="stall")
    requested = asyncio.create_task(sim.ask(0))
    steps = sim.host.engine.steps
    await asyncio.sleep(0.1)
    assert sim.host.engine.steps == steps
    assert not requested.done()
    await sim.simulate(fault="heal")
    assert (await requested)[0] == 200


async def test_a_killed_engine_breaks_its_connections_and_says_no_word(sim):
    async with sim.http.post(
        f"{sim.host.identity.urls[0]}/v1/completions", json=ASK | {"max_tokens": 2000}
    ) as answer:
        await answer.content.readline()
        await sim.host.kill()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    with pytest.raises(aiohttp.ClientConnectorError):
        await sim.ask(1)
    with pytest.raises(EngineFailed, match="ordered to die"):
        await sim.host.failed()
    messages = [one.message async for one in sim.bus.replay(sim.subjects.membership("sim-0"), follow=False)]
    assert [type(one) for one in messages] == [EngineJoined]


async def test_a_slow_rank_makes_the_others_wait(sim):
    await sim.ask(0)
    usual = sim.host.engine.step_seconds
    await sim.simulate(fault="slow", rank=1, factor=20)
    await sim.ask(0)
    async with sim.bus.subscribe(sim.subjects.kv_metrics) as messages:
        load = await anext(
            one.message
            async for one in messages
            if isinstance(one.message, KvMetrics) and one.message.step_seconds is not None
        )
    assert load.step_seconds > 2 * usual


async def test_load_is_a_lie_as_long_as_it_is_told_to_be(sim):
    await sim.simulate(fault="lie_load", rank=0)
    requested = asyncio.create_task(sim.ask(0, max_tokens=300))
    ranks = sim.host.engine.ranks
    async with sim.bus.subscribe(sim.subjects.kv_events) as messages:
        await anext(messages)
    assert ranks[0].take_facts().load.running == 0
    await sim.simulate(fault="heal")
    assert ranks[0].take_facts().load.running == 1
    requested.cancel()


async def test_kv_events_are_lost_without_a_trace(sim):
    await sim.simulate(fault="lose_kv_events", rank=0)
    async with sim.bus.subscribe(sim.subjects.kv_events) as messages:
        await sim.ask(0)
        await sim.ask(1)
        first = await anext(messages)
    assert {event.event.dp_rank for event in first.message} == {1}


async def test_a_handover_is_announced_and_holds_the_steps(sim):
    async with sim.bus.subscribe(sim.subjects.heartbeats()) as beats:
        await sim.simulate(fault="handover", seconds=1.0)
        requested = asyncio.create_task(sim.ask(0, max_tokens=2))
        beat = await anext(
            one.message
            async for one in beats
            if isinstance(one.message, EngineHeartbeat) and one.message.handover_seconds
        )
        assert 0 < beat.handover_seconds <= 1.0
        assert not requested.done()
        assert (await requested)[0] == 200


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


async def test_the_door_says_what_is_wrong_with_an_order(sim):
    for order, complaint in (
        ({"fault": "explode"}, "use one of die, stall"),
        ({"fault": "slow", "ranks": 1}, "unknown field `ranks`"),
    ):
        status, reported_load = await sim.simulate(**order)
        assert status == 400
        assert complaint in reported_load["error"]["message"]


async def test_the_door_tells_what_lasts(sim):
    await sim.simulate(fault="refuse", rank=1, seconds=60, share=0.25)
    async with sim.http.get(f"{sim.host.identity.urls[0]}/simulate") as answer:
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
