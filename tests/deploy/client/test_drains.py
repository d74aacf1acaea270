"""Draining by the bus: what there is to drain, what is told, and when a place is idle."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bus import Message
from bus.memory import MemoryBus
from bus.protocol.subjects import Subjects
from deploy.client.drains import NoSuchTarget, drain, find, undrain, until_idle
from deploy.client.fleet_status import members
from fleet.facts.bookings import BookedLoad, ReservationsChanged
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import Capabilities, EngineJoined, EngineLeft, RankDrained
from fleet.layout import AttentionLayout, Layout, tp
from fleet.requests.routing import ReservationsDescribed

SUBJECTS = Subjects()


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    """Two engines, of two ranks and of one target, and one that has left."""
    bus = MemoryBus()
    await join(bus, "e0", 10, 2)
    await join(bus, "tp", 20, 2, tp(2))
    await join(bus, "gone", 30, 1)
    await bus.record(SUBJECTS.membership("gone"), EngineLeft(engine="gone", worker_id=30, reason="stopped"))
    yield bus
    await bus.close()


async def join(
    bus: MemoryBus, name: str, worker_id: int, ranks: int, layout: Layout | None = None, rank_header: str = ""
) -> None:
    urls = tuple("http://h:1" if rank_header else f"http://h:{rank + 1}" for rank in range(ranks))
    joined = EngineJoined(
        engine=name,
        worker_id=worker_id,
        model="m",
        node="here",
        urls=urls,
        rank_header=rank_header,
        block_size=16,
        kv_blocks=10,
        max_context=100,
        max_batch_tokens=10,
        attention=None if layout is None else AttentionLayout(kind=layout.attention),
        capabilities=Capabilities(),
    )
    await bus.record(SUBJECTS.membership(name), joined)


async def drains(bus: MemoryBus) -> dict[str, dict[int | None, str]]:
    return {engine.joined.engine: engine.drains for engine in await members(bus, SUBJECTS) if engine.drains}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("e1", "no engine 'e1' is a member of the fleet; engines: e0 (ranks 0 to 1), tp"),
        ("gone", "no engine 'gone'"),
        ("e0/2", "engine e0 has no rank '2'; ranks: 0, 1"),
        ("e0/", "engine e0 has no rank ''"),
        ("e0/-1", "engine e0 has no rank '-1'"),
        (
            "tp/1",
            (
                "engine tp has no rank '1' (it is one target: its ranks work on every request together);"
                " ranks: 0"
            ),
        ),
    ],
)
async def test_an_unknown_place_is_refused_with_what_there_is(bus: MemoryBus, text: str, says: str) -> None:
    with pytest.raises(NoSuchTarget) as refusal:
        await find(bus, SUBJECTS, text)
    assert says in str(refusal.value)


async def test_ranks_behind_one_url_are_drained_singly_if_a_header_names_them(bus: MemoryBus) -> None:
    await join(bus, "vllm", 40, 2, rank_header="X-data-parallel-rank")
    await drain(bus, SUBJECTS, await find(bus, SUBJECTS, "vllm/1"), "")
    assert await drains(bus) == {"vllm": {1: ""}}


async def test_a_drain_is_stored_for_the_present_incarnation_and_undone(bus: MemoryBus) -> None:
    await drain(bus, SUBJECTS, await find(bus, SUBJECTS, "e0/1"), "new fan")
    await drain(bus, SUBJECTS, await find(bus, SUBJECTS, "tp"), "")
    assert await drains(bus) == {"e0": {1: "new fan"}, "tp": {None: ""}}
    assert await undrain(bus, SUBJECTS, await find(bus, SUBJECTS, "e0/1"))
    assert not await undrain(bus, SUBJECTS, await find(bus, SUBJECTS, "e0/0"))
    assert await drains(bus) == {"tp": {None: ""}}
    await join(bus, "tp", 21, 2)  # it started again: the word was about the incarnation before
    assert await drains(bus) == {}


async def test_undoing_an_engine_undoes_its_ranks_but_not_the_other_way_round(bus: MemoryBus) -> None:
    await drain(bus, SUBJECTS, await find(bus, SUBJECTS, "e0/1"), "")
    await drain(bus, SUBJECTS, await find(bus, SUBJECTS, "e0"), "")
    with pytest.raises(NoSuchTarget, match="drained as a whole; undo that with: roost drain e0 --undo"):
        await undrain(bus, SUBJECTS, await find(bus, SUBJECTS, "e0/1"))
    assert await undrain(bus, SUBJECTS, await find(bus, SUBJECTS, "e0"))
    assert await drains(bus) == {}


async def test_a_drain_is_a_stored_event(bus: MemoryBus) -> None:
    await drain(bus, SUBJECTS, await find(bus, SUBJECTS, "e0"), "why")
    output = [received.message async for received in bus.replay(SUBJECTS.drains("e0", None), follow=False)]
    assert output == [RankDrained(engine="e0", worker_id=10, rank=None, draining=True, reason="why")]


# Until nothing runs


@asynccontextmanager
async def saying(bus: MemoryBus, *messages: tuple[str, Message]) -> AsyncIterator[None]:
    """These things, over and over, as load reports and routers' words come."""

    async def say() -> None:
        while True:
            for subject, message in messages:
                await bus.publisher(subject).publish(message)
            await asyncio.sleep(0.2)

    task = asyncio.create_task(say(), name="says things")
    try:
        yield
    finally:
        task.cancel()


def load(rank: int, running: int, worker_id: int = 10) -> tuple[str, Message]:
    return SUBJECTS.kv_metrics, KvMetrics(
        worker_id=worker_id, dp_rank=rank, running=running, waiting=0, active_prefill_tokens=0
    )


@pytest.mark.looptime
async def test_a_place_is_idle_when_its_ranks_say_so_twice(bus: MemoryBus) -> None:
    output: list[str] = []
    place = await find(bus, SUBJECTS, "e0/1")
    async with saying(bus, load(1, 3), load(0, 7)):
        assert not await until_idle(bus, SUBJECTS, place, 4.0, output.append)
    assert output == ["e0/1: 3 running or waiting, 0 booked by routers"]
    async with saying(bus, load(1, 0), load(0, 7)):
        assert await until_idle(bus, SUBJECTS, place, 4.0, output.append)
    assert output[-1] == "e0/1: idle"


@pytest.mark.looptime
async def test_what_a_router_has_booked_counts_too(bus: MemoryBus) -> None:
    booked = [
        BookedLoad(
            id=f"b{rank}", worker_id=10, rank=rank, prefill_tokens=1, blocks=1, steps=1, age_seconds=0.0
        )
        for rank in (0, 1)
    ]

    async def describe(_: Message) -> Message:
        return ReservationsDescribed(router=5, publisher_id=1, sequence=0, booked=tuple(booked))

    output: list[str] = []
    place = await find(bus, SUBJECTS, "e0/1")
    async with (
        bus.serve(SUBJECTS.describe_reservations(5), describe),
        saying(bus, load(1, 0), (SUBJECTS.reservations, ReservationsChanged(router=5))),
    ):
        waiting = asyncio.create_task(until_idle(bus, SUBJECTS, place, 30.0, output.append))
        await asyncio.sleep(5)
        assert not waiting.done()
        assert output == ["e0/1: 0 running or waiting, 1 booked by routers"]
        booked.pop()
        assert await waiting
    assert output[-1] == "e0/1: idle"


@pytest.mark.looptime
async def test_a_rank_that_says_nothing_is_not_taken_for_idle(bus: MemoryBus) -> None:
    output: list[str] = []
    async with saying(bus, load(0, 0)):
        assert not await until_idle(bus, SUBJECTS, await find(bus, SUBJECTS, "e0"), 3.0, output.append)
    assert output == ["e0: no load report of rank 1 yet"]
