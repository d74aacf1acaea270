"""`GET /v1/events`: what programs read of the fleet's events, and how they resume."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from bus import Received
from bus.config import BusConfig
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from deploy.http.server import HttpServer
from deploy.http.sockets import listen, url_of
from fleet.event import PROTOCOL
from fleet.facts.demand import TrackerHeartbeat
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineLeft, RankDrained
from router.access.api_keys import key_line
from router.api import event_routes
from router.api.app import create_app
from router.http.server_sent_events import EventSplitter, written
from router.sync.fleet_events import (
    MAX_READERS,
    EventReader,
    FeedEnd,
    FeedEvent,
    FeedSelection,
    FeedStart,
    FleetEvents,
    Gap,
)
from tests.router.router_fixture import House, OpenHouse, metric, until

EVENTS = "/v1/events"


class Stream:
    """An open answer of the route, read event by event."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.last_id: str | None = None

    async def block(self) -> dict[str, str]:
        """The fields of the next block; a comment is the field ""."""
        fields: dict[str, str] = {}
        while True:
            line = (await self.response.content.readline()).decode()
            if not line:
                raise EOFError
            if line == "\n":
                return fields
            name, _, value = line.rstrip("\n").partition(":")
            fields[name] = value.strip()
            if name == "id":
                self.last_id = value.strip()

    async def event(self) -> dict[str, str]:
        """The next event: a block with a name."""
        while "event" not in (fields := await self.block()):
            pass
        return fields

    async def worker_ids(self, count: int) -> list[int]:
        """Of the next messages."""
        return [int(json.loads((await self.event())["data"])["message"]["worker_id"]) for _ in range(count)]


@contextlib.asynccontextmanager
async def reading(
    house: House, query: str = "", after: str | None = None, key: str | None = None
) -> AsyncIterator[Stream]:
    headers = {} if after is None else {"last-event-id": after}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    async with asyncio.timeout(20), house.http.get(house.url + EVENTS + query, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        stream = Stream(response)
        await stream.block()  # it is subscribed now
        yield stream


async def leave(house: House, worker_id: int, engine: str = "e") -> None:
    await house.bus.record(
        house.subjects.membership(engine), EngineLeft(engine=engine, worker_id=worker_id, reason="test")
    )


async def test_an_event_arrives_with_its_place_in_the_log_and_all_its_fields(house: House) -> None:
    await leave(house, 1)
    async with reading(house) as stream:
        assert stream.last_id == "1"
        await leave(house, 2**64 - 1, "north")
        event = await stream.event()
        assert (event["event"], event["id"]) == ("EngineLeft", "2")
        record = json.loads(event["data"])
        assert (record["kind"], record["engine"]) == ("EngineLeft", "north")
        assert record["subject"] == house.subjects.membership("north")
        assert record["message"] == {
            "kind": "EngineLeft",
            "engine": "north",
            "worker_id": str(2**64 - 1),
            "reason": "test",
        }


async def test_a_reader_that_comes_back_again_and_again_misses_nothing_and_reads_nothing_twice(
    open_house: OpenHouse,
) -> None:
    broker, chance = MemoryBroker(), random.Random(5)
    routers = [await open_house(broker=broker), await open_house(broker=broker)]
    count, read, position = 60, list[int](), "0"

    async def write() -> None:
        for number in range(count):
            await leave(routers[0], number)
            await asyncio.sleep(0)

    writing = asyncio.create_task(write())
    while len(read) < count:
        async with reading(chance.choice(routers), after=position) as stream:
            read += await stream.worker_ids(min(chance.randint(0, 9), count - len(read)))
            assert stream.last_id is not None
            position = stream.last_id
    await writing
    assert read == list(range(count))


async def test_a_reader_that_left_before_its_first_event_resumes_where_it_began(house: House) -> None:
    async with reading(house) as stream:
        begun = stream.last_id
    await leave(house, 7)
    async with reading(house, after=begun) as stream:
        assert await stream.worker_ids(1) == [7]


async def test_only_the_kinds_and_the_engine_that_were_asked_for_arrive(house: House) -> None:
    async with reading(house, "?kind=EngineLeft,RankDrained&engine=a") as stream:
        await leave(house, 1, "b")
        drained = RankDrained(engine="a", worker_id=2, rank=0, draining=True)
        await house.bus.record(house.subjects.drains("a", 0), drained)
        await leave(house, 3, "a")
        assert await stream.worker_ids(2) == [2, 3]
    async with reading(house, "?kind=EngineLeft&since=1h") as stream:
        assert await stream.worker_ids(2) == [1, 3]


async def test_telemetry_arrives_when_asked_for_and_has_no_id(house: House) -> None:
    joined = await house.join("a", ["http://127.0.0.1:1"], None)
    async with reading(house, "?kind=KvMetrics&engine=a") as stream:
        publisher = house.bus.publisher(house.subjects.kv_metrics)
        await publisher.publish(KvMetrics(worker_id=4, running=1))
        await publisher.publish(KvMetrics(worker_id=joined.worker_id, running=3))
        event = await stream.event()
        assert event["event"] == "KvMetrics"
        assert "id" not in event
        record = json.loads(event["data"])
        assert (record["engine"], record["message"]["running"]) == ("a", 3)


async def test_the_tracker_is_heard_as_well(house: House) -> None:
    async with reading(house, "?kind=TrackerHeartbeat") as stream:
        publisher = house.bus.publisher(house.subjects.tracker_heartbeat)
        await publisher.publish(TrackerHeartbeat(protocol=PROTOCOL, reports=12))
        event = await stream.event()
    assert event["event"] == "TrackerHeartbeat"
    assert json.loads(event["data"])["message"] == {
        "kind": "TrackerHeartbeat",
        "protocol": PROTOCOL,
        "reports": 12,
    }


def test_the_kinds_on_offer_are_those_that_hold_nothing_of_requests() -> None:
    assert set(event_routes.EVENT_KINDS) == {
        *("EngineJoined", "EngineLeft", "PlacementCommitted", "MigrationPlanned", "MigrationStaged"),
        *("MigrationCommitted", "MigrationAborted", "PlanEvaluated", "RankDrained", "ConfigChanged"),
        *("EngineHeartbeat", "KvMetrics", "HomesPublished", "TrackerHeartbeat", "PopularityShifted"),
    }


@pytest.mark.parametrize(
    ("query", "after", "named"),
    [
        ("?kind=KvEvents", None, "there is no kind 'KvEvents'"),
        ("?since=yesterday", None, "since 'yesterday': use a number"),
        ("", "seven", "Last-Event-ID must be"),
    ],
)
async def test_a_wrong_query_is_refused_by_name(
    house: House, query: str, after: str | None, named: str
) -> None:
    answer = await house.get(EVENTS + query, {} if after is None else {"last-event-id": after})
    assert answer.status == 400
    assert named in answer.json["error"]["message"]


async def test_events_that_the_log_gave_up_are_counted(open_house: OpenHouse) -> None:
    subjects = Subjects()
    house = await open_house(broker=MemoryBroker(subjects, BusConfig(stream_messages_per_subject=3)))
    for number in range(10):
        await leave(house, number)
    async with reading(house, after="2") as stream:
        gap = await stream.event()
        assert gap["event"] == "gap"
        assert json.loads(gap["data"])["missed"] == 5
        assert await stream.worker_ids(3) == [7, 8, 9]


async def test_a_position_of_a_lost_log_is_reported_and_the_new_log_is_read(house: House) -> None:
    await leave(house, 1)
    async with reading(house, after="500") as stream:
        assert "lost its log" in (await stream.event())["data"]
        assert await stream.worker_ids(1) == [1]


async def test_silence_is_filled_with_comments_that_carry_the_position(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_routes, "HEARTBEAT_SECONDS", 0.02)
    async with reading(house, "?kind=RankDrained") as stream:
        await leave(house, 1)
        while (await stream.block()).get("id") != "1":
            pass


async def test_events_need_the_right_to_administer(open_house: OpenHouse, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    lines = [
        key_line("boss", "ops", None, frozenset({"admin"})),
        key_line("user", "acme", None, frozenset({"infer", "route", "metrics"})),
    ]
    keys.write_text("\n".join(lines))
    house = await open_house(api_key_file=str(keys))
    assert (await house.get(EVENTS)).status == 401
    assert (await house.get(EVENTS, {"authorization": "Bearer user"})).status == 403
    async with reading(house, key="boss") as stream:
        keys.write_text(lines[1])
        house.service.reconfigure(house.service.config)
        await leave(house, 1)
        assert (await stream.event())["event"] == "EngineLeft"  # it was on its way
        assert "lost its right" in (await stream.event())["data"]
        with pytest.raises(EOFError):
            await stream.event()


async def test_a_router_that_stops_ends_the_stream_and_says_so(house: House) -> None:
    async with reading(house) as stream:
        await leave(house, 1)
        assert await stream.worker_ids(1) == [1]
        house.service.refuse_new()
        end = await stream.event()
        assert (end["event"], json.loads(end["data"])) == ("end", {"reason": "the router stops"})
        with pytest.raises(EOFError):
            await stream.block()
    assert (await house.get(EVENTS)).status == 503


async def test_an_open_stream_does_not_hold_up_the_stop_of_the_server(house: House) -> None:
    door = listen("127.0.0.1", 0)
    async with aiohttp.ClientSession() as http, asyncio.timeout(10):
        async with HttpServer(create_app(house.service), door, drain_seconds=60):
            response = await http.get(url_of(door) + EVENTS)
            await response.content.readuntil(b"\n\n")
            house.service.refuse_new()
        assert b"the router stops" in await response.read()


async def test_a_router_without_a_bus_has_no_events(open_house: OpenHouse) -> None:
    answer = await (await open_house(bus=False)).get(EVENTS)
    assert (answer.status, answer.json["error"]["code"]) == (503, "no_bus")


async def test_readers_are_limited_and_make_room_when_they_leave(house: House) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_READERS):
            await stack.enter_async_context(reading(house))
        assert (await house.get(EVENTS)).status == 429
    await until(lambda: not house.service.events.reading_now)  # type: ignore[union-attr]
    async with reading(house):
        pass


async def test_a_slow_reader_gets_all_stored_events_which_wait_in_the_log_meanwhile(house: House) -> None:
    feed = house.service.events
    assert feed is not None
    with feed.reading(FeedSelection(), await feed.start(event_routes.start("0", None))) as reader:
        for number in range(300):
            await leave(house, number)
        assert reader.position is None or reader.position < 300
        found = [await reader.next() for _ in range(300)]
    positions = [event.position for event in found if isinstance(event, FeedEvent)]
    assert positions == list(range(1, 301))


async def test_a_slow_reader_is_told_how_much_telemetry_it_missed() -> None:
    reader = EventReader(FeedSelection(frozenset({"KvMetrics"})), 0)
    count = 10_000
    for number in range(count):
        reader.offer(FeedEvent("KvMetrics", 0, b"%d" % number))
    gap = await reader.next()
    assert isinstance(gap, Gap)
    assert gap.missed is not None
    reader.end("over")
    kept = []
    while isinstance(event := await reader.next(), FeedEvent):
        kept.append(int(event.record))
    assert kept == list(range(gap.missed, count))


async def test_a_client_that_reads_nothing_is_cut_off(open_house: OpenHouse) -> None:
    house = await open_house(write_seconds=0.5)
    reason = "x" * 400_000
    host, port = house.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(f"GET {EVENTS} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    await reader.readuntil(b"\n\n")
    for number in range(30):
        await house.bus.record(
            house.subjects.membership("e"), EngineLeft(engine="e", worker_id=number, reason=reason)
        )
    await until(lambda: metric(house.service.metrics, "connections_cut_total", cause="unread_answer"), 15.0)
    await until(lambda: not house.service.events.reading_now)  # type: ignore[union-attr]
    writer.close()
    await writer.wait_closed()


class BrokenBus(MemoryBus):
    """A bus with a fault that nothing foresaw."""

    async def replay(self, *_patterns: object, **_options: object) -> AsyncIterator[Received]:
        raise ZeroDivisionError
        yield


async def test_a_reader_learns_of_a_fault_of_the_router_itself(caplog: pytest.LogCaptureFixture) -> None:
    bus = BrokenBus()
    async with asyncio.timeout(5):
        events = FleetEvents(bus, Subjects(), lambda _: None)
        with events.reading(FeedSelection(), FeedStart(after=0)) as reader:
            assert await reader.next() == FeedEnd(
                "this router failed to read stored events; its log says why"
            )
    assert "ZeroDivisionError" in caplog.text


def test_a_written_event_is_read_again_by_our_own_reader() -> None:
    splitter = EventSplitter(1000)
    assert splitter.feed(written("Kind", b'{"a": 1}', 5) + b": alive\n\n" + written("gap", b"{}")) == [
        b'{"a": 1}',
        b"{}",
    ]
