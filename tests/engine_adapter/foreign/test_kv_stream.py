"""KV events over real sockets: recorded events, lost ones, lost connections, and a publisher that starts anew."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import zmq
import zmq.asyncio

from deploy.process import alongside, first_of
from engine_adapter.engine import EngineFailed
from engine_adapter.foreign import kv_stream
from engine_adapter.foreign.kv_blocks import Change, KvBlocks
from engine_adapter.foreign.kv_frames import events_of
from engine_adapter.foreign.kv_source import KvSource
from engine_adapter.foreign.kv_stream import KvStream
from tests.conftest import free_port
from tests.engine_adapter.foreign.test_kv_blocks import Mirror
from tests.engine_adapter.vllm.recorded_server import FRAMES, Publisher, recorded_vllm

EVENTS = FRAMES[1][:40]


def expected(payloads: list[bytes]) -> set[int]:
    """Blocks that are cached after these events, without any stream."""
    blocks, mirror = KvBlocks(32), Mirror()
    for payload in payloads:
        for event in events_of(payload):
            mirror.apply(blocks.apply(event))
    return set(mirror.blocks)


@dataclass
class Followed:
    publisher: Publisher
    stream: KvStream
    task: "asyncio.Task[None]"
    mirror: Mirror
    cleared: int = 0

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached() and not self.task.done():  # noqa: ASYNC110 what it waits for has no event
            await asyncio.sleep(0.01)
        if self.task.done():
            self.task.result()

    async def publish(self, payloads: list[bytes], *, lost: bool = False) -> None:
        for payload in payloads:
            await self.publisher.publish(payload, lost=lost)


@asynccontextmanager
async def followed(
    *,
    replay: bool = True,
    buffer_steps: int = 10_000,
    check_seconds: float = 0.2,
    before: list[bytes] | None = None,
) -> AsyncIterator[Followed]:
    """A stream that is connected. before: events published before it was."""
    async with asyncio.timeout(30), recorded_vllm(replay=replay, buffer_steps=buffer_steps) as server:
        publisher = server.publishers[1]
        for payload in before or []:
            await publisher.publish(payload)
        mirror = Mirror()
        replayed = publisher.replay_port and f"tcp://127.0.0.1:{publisher.replay_port}"

        def report(changes: list[Change]) -> None:
            mirror.apply(changes)
            found.cleared += changes.count("cleared")

        stream = KvStream(
            "rank 1",
            KvSource(f"tcp://127.0.0.1:{publisher.port}", replayed),
            KvBlocks(32),
            report,
            check_seconds=check_seconds,
        )
        async with alongside(stream.run(), "stream") as task:
            found = Followed(publisher, stream, task, mirror)
            await found.until(lambda: stream.connected)
            await asyncio.sleep(0.05)  # the publisher learns of the subscription a moment later
            yield found


async def test_events_arrive_as_they_are_published() -> None:
    async with followed(check_seconds=30) as found:
        await found.publish(EVENTS)
        await found.until(lambda: set(found.mirror.blocks) == expected(EVENTS))
        assert found.cleared == 0


async def test_events_from_before_the_start_are_replayed() -> None:
    async with followed(before=EVENTS[:20], check_seconds=30) as found:
        await found.until(lambda: set(found.mirror.blocks) == expected(EVENTS[:20]))
        await found.publish(EVENTS[20:])
        await found.until(lambda: set(found.mirror.blocks) == expected(EVENTS))


async def test_a_gap_is_closed_by_the_replay() -> None:
    async with followed(check_seconds=30) as found:
        await found.publish(EVENTS[:5])
        await found.publish(EVENTS[5:9], lost=True)
        await found.publish(EVENTS[9:12])
        await found.until(lambda: set(found.mirror.blocks) == expected(EVENTS[:12]))
        assert (found.stream.lost_batches, found.cleared) == (0, 0)


async def test_the_last_events_are_missed_although_none_follows() -> None:
    async with followed() as found:
        await found.publish(EVENTS[:5])
        await found.publish(EVENTS[5:9], lost=True)
        await found.until(lambda: set(found.mirror.blocks) == expected(EVENTS[:9]))


async def test_a_gap_that_the_buffer_does_not_hold_empties_the_cache() -> None:
    async with followed(buffer_steps=2, check_seconds=30) as found:
        await found.publish(EVENTS[:5])
        await found.until(lambda: bool(found.mirror.blocks))
        await found.publish(EVENTS[5:9], lost=True)
        await found.publish(EVENTS[9:10])
        await found.until(lambda: found.cleared == 1)
        await found.until(lambda: found.stream.lost_batches == 3)
        assert set(found.mirror.blocks) <= expected(EVENTS[:10])


async def test_without_a_replay_endpoint_a_gap_empties_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    async with followed(replay=False) as found:
        await found.publish(EVENTS[:5])
        await found.until(lambda: bool(found.mirror.blocks))
        await found.publish(EVENTS[5:7], lost=True)
        await found.publish(EVENTS[7:8])
        await found.until(lambda: found.cleared == 1)
        assert found.stream.lost_batches == 2
    assert "without a replay endpoint" in caplog.text


async def test_a_lost_connection_is_told_and_nothing_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with followed() as found:
        await found.publish(EVENTS[:5])
        await found.publisher.lose_connections()
        await found.until(lambda: "stream of KV events is lost" in caplog.text)
        await found.publish(EVENTS[5:20])
        await found.until(lambda: found.stream.connected)
        await found.until(lambda: set(found.mirror.blocks) == expected(EVENTS[:20]))


@pytest.mark.parametrize("replay", [True, False])
async def test_a_publisher_that_starts_anew_ends_the_stream(*, replay: bool) -> None:
    async with followed(replay=replay, check_seconds=30) as found:
        await found.publish(EVENTS[:5])
        await found.until(lambda: set(found.mirror.blocks) == expected(EVENTS[:5]))
        found.publisher.start_anew()
        await found.publish(EVENTS[10:12])
        with pytest.raises(ExceptionGroup) as caught:
            await found.until(lambda: False)
    failure = first_of(caught.value, (EngineFailed,))
    assert "started anew" in str(failure)


async def test_a_quiet_publisher_that_starts_anew_is_noticed_too() -> None:
    async with followed() as found:
        await found.publish(EVENTS[:5])
        await found.until(lambda: set(found.mirror.blocks) == expected(EVENTS[:5]))
        found.publisher.start_anew()
        await found.publish(EVENTS[10:15], lost=True)  # as many events as before, and others
        with pytest.raises(ExceptionGroup) as caught:
            await found.until(lambda: False)
    assert first_of(caught.value, (EngineFailed,)) is not None


async def test_garbage_is_told_and_empties_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    async with followed(check_seconds=30) as found:
        await found.publish(EVENTS[:5])
        await found.publish([b"\xc1garbage"])
        await found.until(lambda: found.cleared == 1)
        await found.publish(EVENTS[5:6])
        assert "unreadable KV events (1 so far)" in caplog.text


async def test_a_publisher_is_alive_while_it_answers() -> None:
    async with recorded_vllm() as server:
        publisher = server.publishers[0]
        source = KvSource(f"tcp://127.0.0.1:{publisher.port}", f"tcp://127.0.0.1:{publisher.replay_port}")
        stream = KvStream("rank 0", source, KvBlocks(32), lambda changes: None)
        assert await stream.alive()
        alone = KvStream("rank 0", KvSource(source.endpoint), KvBlocks(32), lambda changes: None)
        assert not await alone.alive()


async def test_a_publisher_that_connects_is_listened_to(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM with an endpoint without "*": its publisher connects, and so nobody would be bound."""
    caplog.set_level(logging.INFO)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    mirror, context = Mirror(), zmq.asyncio.Context()
    publisher: Any = context.socket(zmq.PUB)
    publisher.connect(endpoint)
    stream = KvStream("rank 0", KvSource(endpoint, may_connect=True), KvBlocks(32), mirror.apply)
    try:
        async with asyncio.timeout(30), alongside(stream.run(), "stream"):
            while not stream.connected:  # noqa: ASYNC110 no event
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            await publisher.send_multipart([b"", (0).to_bytes(8, "big"), EVENTS[0]])
            while set(mirror.blocks) != expected(EVENTS[:1]):  # noqa: ASYNC110 no event
                await asyncio.sleep(0.01)
    finally:
        context.destroy(linger=0)
    assert "the server connects to" in caplog.text


async def test_a_publisher_that_connects_elsewhere_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_stream, "BIND_SECONDS", 0.05)
    stream = KvStream(
        "rank 0", KvSource("tcp://192.0.2.1:5557", may_connect=True), KvBlocks(32), lambda _: None
    )
    async with asyncio.timeout(30), alongside(stream.run(), "stream"):
        while 'use "tcp://*:PORT"' not in caplog.text:  # noqa: ASYNC110 no event
            await asyncio.sleep(0.01)
