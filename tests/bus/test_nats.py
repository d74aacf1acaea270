"""Behaviour that needs a real server: failures, limits and retention."""

import asyncio
import gc
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import api

from bus import BusError, Message, Received
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from fleet.facts.engines import EngineHeartbeat, EngineLeft

CONFIG = BusConfig(
    connect_seconds=2.0,
    request_seconds=1.0,
    record_seconds=5.0,
    reconnect_max_seconds=0.2,
    stream_bytes=32_000_000,
    claims_bytes=100_000,
    blobs_bytes=8_000_000,
    parcels_bytes=8_000_000,
)


def left(number: int, reason: str = "", engine: str = "e") -> EngineLeft:
    return EngineLeft(engine=engine, worker_id=number, reason=reason)


async def numbers(replay: AsyncIterator[Received], count: int | None = None) -> list[int]:
    """Return the worker_id of each EngineLeft, up to a number of them."""
    found: list[int] = []
    async with asyncio.timeout(30), aclosing(replay):  # type: ignore[type-var]
        async for received in replay:
            assert isinstance(received.message, EngineLeft)
            found.append(received.message.worker_id)
            if len(found) == count:
                break
    return found


@asynccontextmanager
async def connected(url: str, subjects: Subjects, config: BusConfig = CONFIG) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(url, subjects, config)
    try:
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def stranger(url: str) -> AsyncIterator[nats.NATS]:
    connection = await nats.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def until(condition: Any, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 what is waited for has no event
            await asyncio.sleep(0.01)


async def test_without_a_server_connecting_ends_in_time_and_says_where_it_looked(nats_server: Any) -> None:
    nats_server.stop()
    with pytest.raises(BusError, match=nats_server.url):
        await asyncio.wait_for(
            NatsBus.connect(nats_server.url, Subjects(), replace(CONFIG, connect_seconds=0.3)), 3
        )


@pytest.mark.parametrize("url", ["nats://", "nats://host:port", "http//nowhere"])
async def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(BusError):
        await asyncio.wait_for(NatsBus.connect(url, Subjects(), replace(CONFIG, connect_seconds=0.3)), 3)


@pytest.fixture
def server_with(tmp_path: Path, nats_server: Any) -> Any:
    """Start one more server, with a configuration file."""
    started: list[Any] = []

    def start(text: str) -> Any:
        file = tmp_path / "nats.conf"
        file.write_text(text)
        server = type(nats_server)(tmp_path / "other", "-c", str(file))
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


async def test_a_server_without_jetstream_is_refused_with_the_remedy(server_with: Any) -> None:
    server = server_with("max_payload: 2MB")
    with pytest.raises(BusError, match="-js"):
        await NatsBus.connect(server.url, Subjects(), replace(CONFIG, connect_seconds=0.5))


async def test_a_server_that_takes_only_small_messages_is_refused_with_the_remedy(server_with: Any) -> None:
    server = server_with("max_payload: 100KB\njetstream: enabled")
    with pytest.raises(BusError, match="max_payload"):
        await NatsBus.connect(server.url, Subjects(), CONFIG)


async def test_rights_that_are_missing_are_named(server_with: Any) -> None:
    server = server_with("authorization: {user: a, password: b}")
    with pytest.raises(BusError, match=r"(?i)authorization"):
        await NatsBus.connect(server.url, Subjects(), replace(CONFIG, connect_seconds=2.5))


async def test_what_exists_with_other_limits_is_used_and_gets_the_subjects_it_lacks(nats_url: str) -> None:
    subjects = Subjects("older")
    async with stranger(nats_url) as connection:
        js = connection.jetstream()
        await js.add_stream(
            api.StreamConfig(
                name="older-stored",
                subjects=[subjects.membership(), "older.extra"],
                max_msgs=50,
                storage=api.StorageType.MEMORY,
            )
        )
        await js.create_key_value(bucket="older-claims", history=3)
        async with connected(nats_url, subjects) as bus:
            await bus.record(subjects.membership("e"), left(1))
            await bus.claim("engine.e", b"x")
            assert await numbers(bus.replay(subjects.membership(), follow=False)) == [1]
        config = (await js.stream_info("older-stored")).config
        assert config.max_msgs == 50
        assert set(config.subjects or []) == {*subjects.stored, "older.extra"}


async def test_everything_recorded_is_there_once_and_in_order_however_often_the_server_is_killed(
    nats_server: Any,
) -> None:
    subjects = Subjects()
    async with connected(nats_server.url, subjects) as writer, connected(nats_server.url, subjects) as reader:
        following = asyncio.create_task(numbers(reader.replay(subjects.membership()), 300))
        recorded = 0

        async def record() -> None:
            nonlocal recorded
            for number in range(300):
                await writer.record(subjects.membership("e"), left(number))
                recorded += 1

        recording = asyncio.create_task(record())
        for at in (60, 150, 240):
            await until(lambda at=at: recorded >= at)
            nats_server.stop(signal.SIGKILL)
            await asyncio.to_thread(nats_server.start)
        await recording
        assert await following == list(range(300))
        assert await numbers(reader.replay(subjects.membership(), follow=False)) == list(range(300))


async def test_a_server_that_lost_its_store_gets_a_new_one_and_followers_go_on(nats_server: Any) -> None:
    subjects = Subjects()
    async with connected(nats_server.url, subjects) as bus:
        for number in range(5):
            await bus.record(subjects.membership("e"), left(number))
        replay = bus.replay(subjects.membership())
        heard = [(await anext(replay)).message.worker_id for _ in range(5)]
        following = asyncio.create_task(numbers(replay, 2))
        nats_server.stop(signal.SIGKILL)
        shutil.rmtree(nats_server.store)
        await asyncio.to_thread(nats_server.start)
        await bus.record(subjects.membership("e"), left(10))
        await bus.record(subjects.membership("e"), left(11))
        assert heard + await following == [0, 1, 2, 3, 4, 10, 11]
        assert await bus.claim("engine.e", b"x") > 0
        assert await bus.get_blob(await bus.put_blob(b"x")) == b"x"


async def test_a_slow_reader_of_a_long_log_gets_all_of_it(nats_url: str) -> None:
    subjects = Subjects("long")
    async with connected(nats_url, subjects, replace(CONFIG, stream_messages_per_subject=5000)) as bus:
        for start in range(0, 1500, 50):
            said = [left(number, "x" * 8000, f"e{number}") for number in range(start, start + 50)]
            await asyncio.gather(*(bus.record(subjects.membership(one.engine), one) for one in said))
        found: set[int] = set()
        async with aclosing(bus.replay(subjects.membership(), follow=False)) as replay:  # type: ignore[type-var]
            async for received in replay:
                found.add(received.message.worker_id)
                if len(found) % 100 == 0:
                    await asyncio.sleep(0.01)
        assert found == set(range(1500))
        assert not bus.link.runs
        assert not bus.link.subscriptions


class Proxy:
    """Proxy between a client and the server; can send in the server's name."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers.append(writer)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass  # either side may end first
        finally:
            sink.close()

    def say(self, line: bytes) -> None:
        self._writers[-1].write(line)


async def test_a_connection_that_the_server_ends_for_good_is_replaced_with_all_its_subscriptions(
    nats_server: Any,
) -> None:
    subjects, proxy = Subjects(), Proxy(nats_server.port)

    async def echo(message: Any) -> Any:
        return message

    async with (
        proxy.open() as url,
        connected(url, subjects) as bus,
        connected(nats_server.url, subjects) as other,
    ):
        async with (
            bus.subscribe(subjects.heartbeats()) as subscription,
            bus.serve(subjects.describe_profile, echo),
        ):
            following = asyncio.create_task(numbers(bus.replay(subjects.membership()), 2))
            await bus.record(subjects.membership("e"), left(1))
            before = bus.link.client
            proxy.say(b"-ERR 'User Authentication Revoked'\r\n")
            await until(lambda: bus.link.client is not before and bus.connected)
            await other.publisher(subjects.heartbeats("e")).publish(
                EngineHeartbeat(engine="e", worker_id=1, epoch=3)
            )
            async with asyncio.timeout(5):
                assert (await anext(aiter(subscription))).message.epoch == 3
            assert await other.request(subjects.describe_profile, left(5)) == left(5)
            await bus.record(subjects.membership("e"), left(2))
            assert await following == [1, 2]


async def test_nonsense_in_the_servers_name_does_not_end_the_bus(nats_server: Any) -> None:
    subjects, proxy = Subjects(), Proxy(nats_server.port)
    async with proxy.open() as url, connected(url, subjects, replace(CONFIG, ping_seconds=0.2)) as bus:
        proxy.say(b"\x00\xff nonsense \r\n\r\n")
        await bus.record(subjects.membership("e"), left(1))
        assert await numbers(bus.replay(subjects.membership(), follow=False)) == [1]


async def test_a_server_that_stands_still_is_noticed_and_blocks_neither_publishing_nor_closing(
    nats_server: Any,
) -> None:
    subjects = Subjects()
    async with connected(
        nats_server.url, subjects, replace(CONFIG, ping_seconds=0.1, unsent_bytes=2_000_000)
    ) as bus:
        publisher = bus.publisher(subjects.heartbeats("e"))
        nats_server.send(signal.SIGSTOP)
        async with asyncio.timeout(2):
            for epoch in range(100):
                await publisher.publish(EngineHeartbeat(engine="x" * 200_000, worker_id=1, epoch=epoch))
        await until(lambda: not bus.connected)
        assert publisher.sequence == 100
        with pytest.raises(BusError):
            await bus.request(subjects.describe_profile, left(1), seconds=0.2)
        nats_server.send(signal.SIGCONT)
        await until(lambda: bus.connected)
        await bus.record(subjects.membership("e"), left(1))
        nats_server.send(signal.SIGSTOP)
        for epoch in range(20):
            await publisher.publish(EngineHeartbeat(engine="x" * 200_000, worker_id=1, epoch=epoch))
        async with asyncio.timeout(5):
            await bus.close()
        nats_server.send(signal.SIGCONT)
    gc.collect()  # a socket left open would now be an error


async def test_a_cancellation_that_arrives_together_with_an_answer_still_ends_the_reader(
    nats_url: str,
) -> None:
    """nats-py waits with asyncio.wait_for. Before Python 3.12 that loses a cancellation which arrives with
    the answer.
    """
    async with connected(nats_url, Subjects("cancelled")) as bus:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asking = asyncio.create_task(
            bus.link.until_done("asking", 5.0, lambda: asyncio.wait_for(answer, 4.0))
        )
        await asyncio.sleep(0.05)
        answer.set_result(1)
        asking.cancel()
        await asyncio.wait([asking], timeout=5)
        assert asking.cancelled()


async def test_followers_end_at_once_whenever_they_are_cancelled(nats_url: str) -> None:
    subjects = Subjects("ended")
    async with connected(nats_url, subjects) as bus:
        for attempt in range(60):
            following = asyncio.create_task(numbers(bus.replay(subjects.membership(), latest=True)))
            await asyncio.sleep(attempt * 0.0002)
            following.cancel()
            await asyncio.wait([following], timeout=5)
            assert following.cancelled(), attempt


async def test_a_full_bucket_for_passing_messages_is_an_alarm_and_large_answers_flow_all_the_same(
    nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    subjects = Subjects("fullparcels")

    async def large(_: Message) -> Message:
        return left(1, "x" * 3_000_000)

    async with (
        connected(nats_url, subjects) as speaker,
        connected(nats_url, subjects) as asker,
        speaker.serve(subjects.loop, large),
    ):
        publisher = speaker.publisher(subjects.heartbeats("e"))
        for number in range(6):  # 12 MB into 8 MB
            await publisher.publish(EngineHeartbeat(engine=f"{number}" * 2_000_000, worker_id=1, epoch=0))
        assert speaker.refusals["parcels"] >= 1
        assert [record.levelname for record in caplog.records if "ALARM" in record.message] == ["ERROR"], (
            "once a minute"
        )
        parcels = next(use for use in await asker.stores() if use.store == "parcels")
        assert parcels.refuses
        assert parcels.used > 0.7 * parcels.capacity
        assert await asker.request(subjects.loop, left(0), 10.0) == left(1, "x" * 3_000_000)
