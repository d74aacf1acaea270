"""One contract over both implementations of the bus: every sentence of the port."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pytest

from bus import (
    BlobLost,
    Bus,
    BusError,
    BusTimeout,
    ClaimLost,
    Declined,
    Message,
    NobodyThere,
    Received,
    StoreFull,
)
from bus.protocol.codec import (
    BLOB_TOPIC,
    LARGE,
    PART_REQUEST_TOPIC,
    PART_TOPIC,
    PARTS_TOPIC,
    BlobReference,
    PartRequest,
    seal,
    unseal,
)
from fleet.facts.demand import ProfilePublished
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineHeartbeat, EngineLeft
from fleet.popularity import ExpertTable
from fleet.requests.demand import DescribeProfile
from fleet.requests.refusal import RequestRefused

T = TypeVar("T")
GARBAGE = (
    b"",
    b"\xc1",
    b"\x00" * 100,
    b"not an envelope",
    msgspec.msgpack.encode(
        {"publisher_id": -1, "sequence": 0, "published_at": 0, "topic": "x", "payload": b""}
    ),
    seal(1, 0, 0.0, "heartbeat", b"\xff\xff"),
    seal(1, 1, 0.0, "heartbeat", msgspec.msgpack.encode({"kind": "FromTheFuture", "field": 1})),
    seal(1, 2, 0.0, "heartbeat", msgspec.msgpack.encode({"kind": "EngineHeartbeat", "engine": 7})),
    seal(1, 3, 0.0, "kv-events", msgspec.msgpack.encode([{"worker_id": "x"}])),
    seal(
        1,
        4,
        0.0,
        BLOB_TOPIC,
        msgspec.msgpack.encode(BlobReference(topic="heartbeat", digest="0" * 64, size=10)),
    ),
    seal(
        1,
        5,
        0.0,
        BLOB_TOPIC,
        msgspec.msgpack.encode(BlobReference(topic="heartbeat", digest="../../etc", size=1 << 62)),
    ),
    seal(1, 6, 0.0, "heartbeat", b"\x91" * 100_000),
)
PART_GARBAGE = (
    seal(1, 7, 0.0, PART_REQUEST_TOPIC, b"\xc1"),
    seal(1, 8, 0.0, PART_REQUEST_TOPIC, msgspec.msgpack.encode({"publisher_id": 1, "answer": -1, "part": 0})),
    seal(
        1,
        9,
        0.0,
        PART_REQUEST_TOPIC,
        msgspec.msgpack.encode(PartRequest(publisher_id=1, answer=1 << 63, part=1 << 63)),
    ),
)
"""Raw bytes a stranger may send; each must be refused and counted, none may be fatal."""


def beat(epoch: int = 0, engine: str = "e") -> EngineHeartbeat:
    return EngineHeartbeat(engine=engine, worker_id=(1 << 64) - 1, epoch=epoch)


def left(number: int, engine: str = "e") -> EngineLeft:
    return EngineLeft(engine=engine, worker_id=number, reason="test")


def heavy(model: str = "m") -> ProfilePublished:
    """A message over the limit of an envelope, different for each model."""
    table = ExpertTable(layers=64, experts=4096, values=model.encode().ljust(64 * 4096 * 4, b"\0"))
    return ProfilePublished(model=model, version=1, tokens=1.0, profile=table)


async def soon(awaitable: Any, seconds: float = 10.0) -> Any:
    async with asyncio.timeout(seconds):
        return await awaitable


async def take(iterator: AsyncIterator[T], count: int) -> list[T]:
    return [await soon(anext(iterator)) for _ in range(count)]


async def collected(replay: AsyncIterator[Received]) -> list[int]:
    """worker_id of each EngineLeft of a replay that ends."""
    async with asyncio.timeout(10):
        return [
            received.message.worker_id
            async for received in replay
            if isinstance(received.message, EngineLeft)
        ]


async def nothing_more(iterator: AsyncIterator[Any], bus: Bus, house: Any) -> bool:
    """Whether nothing waits: a last message sent now is the next to be read."""
    await bus.publisher(house.subjects.heartbeats("e")).publish(beat(4242))
    return (await soon(anext(iterator))).message == beat(4242)


# Publishing and subscribing


async def test_a_message_of_one_engine_on_the_subject_of_another_is_refused_and_counted_wherever_it_comes_from(
    house: Any,
) -> None:
    bus = await house.client()
    async with bus.subscribe(house.subjects.heartbeats()) as subscription:
        await bus.publisher(house.subjects.heartbeats("e")).publish(beat(1, "victim"))
        await bus.publisher(house.subjects.heartbeats("e")).publish(beat(2, "e"))
        assert (await soon(anext(aiter(subscription)))).message == beat(2, "e")
    await bus.record(house.subjects.membership("e"), left(1, "victim"))
    await bus.record(house.subjects.membership("e"), left(2, "e"))
    assert await collected(bus.replay(house.subjects.membership(), follow=False)) == [2]
    assert bus.rejected["speaker"] == 2


async def test_a_message_arrives_with_subject_identity_sequence_and_time(house: Any) -> None:
    speaker, listener = await house.client(), await house.client()
    publisher = speaker.publisher(house.subjects.heartbeats("e"))
    assert (publisher.sequence, publisher.publisher_id < 1 << 64) == (0, True)
    async with listener.subscribe(house.subjects.heartbeats()) as subscription:
        for epoch in range(3):
            await publisher.publish(beat(epoch))
        heard = await take(aiter(subscription), 3)
    assert [received.message for received in heard] == [beat(0), beat(1), beat(2)]
    assert [received.sequence for received in heard] == [0, 1, 2]
    assert publisher.sequence == 3
    assert {(received.subject, received.publisher_id) for received in heard} == {
        (house.subjects.heartbeats("e"), publisher.publisher_id)
    }
    assert 0 <= heard[2].published_at - heard[0].published_at < 60


async def test_every_publisher_has_an_identity_of_its_own(house: Any) -> None:
    bus = await house.client()
    assert len({bus.publisher(house.subjects.heartbeats("e")).publisher_id for _ in range(50)}) == 50


async def test_telemetry_is_not_stored_and_every_listener_hears_it_also_the_speaker_itself(
    house: Any,
) -> None:
    speaker, listener = await house.client(), await house.client()
    publisher = speaker.publisher(house.subjects.heartbeats("e"))
    await publisher.publish(beat(1))
    async with (
        speaker.subscribe(house.subjects.heartbeats()) as own,
        listener.subscribe(house.subjects.heartbeats()) as other,
    ):
        await publisher.publish(beat(2))
        assert (await take(aiter(own), 1))[0].message == beat(2)
        assert (await take(aiter(other), 1))[0].message == beat(2)


async def test_a_subscription_is_live_before_its_context_is_entered(house: Any) -> None:
    speaker, listener = await house.client(), await house.client()
    publisher = speaker.publisher(house.subjects.heartbeats("e"))
    for epoch in range(20):
        async with listener.subscribe(house.subjects.heartbeats()) as subscription:
            await publisher.publish(beat(epoch))
            assert (await take(aiter(subscription), 1))[0].message == beat(epoch)


async def test_a_star_matches_one_token_and_an_arrow_the_rest(house: Any) -> None:
    bus = await house.client()
    base = f"namespace.{house.subjects.namespace}.component.x"
    async with bus.subscribe(f"{base}.*.end") as star, bus.subscribe(f"{base}.>") as arrow:
        for tail in ("a.end", "b.end", "a.b.end", "end", "a.other"):
            await bus.publisher(f"{base}.{tail}").publish(beat())
        await bus.publisher(base).publish(beat())
        assert [received.subject for received in await take(aiter(star), 2)] == [
            f"{base}.a.end",
            f"{base}.b.end",
        ]
        assert len(await take(aiter(arrow), 5)) == 5


async def test_the_oldest_messages_are_dropped_and_counted_when_the_reader_is_too_slow(house: Any) -> None:
    speaker, listener = await house.client(), await house.client()
    publisher = speaker.publisher(house.subjects.heartbeats("e"))
    async with (
        listener.subscribe(house.subjects.heartbeats(), limit=10) as slow,
        listener.subscribe(house.subjects.heartbeats()) as quick,
    ):
        for epoch in range(100):
            await publisher.publish(beat(epoch))
        await take(aiter(quick), 100)
        assert [received.message.epoch for received in await take(aiter(slow), 10)] == list(range(90, 100))
        assert slow.dropped == 90
        assert quick.dropped == 0


async def test_a_subscription_holds_no_more_bytes_than_it_may(house: Any) -> None:
    bus = await house.client(replace(house.config, queue_bytes=1_000_000))
    publisher = bus.publisher(house.subjects.membership("e"))
    async with (
        bus.subscribe(house.subjects.membership()) as slow,
        bus.subscribe(house.subjects.kv_metrics) as quick,
    ):
        for number in range(10):
            await publisher.publish(EngineLeft(engine="e", worker_id=number, reason="x" * 300_000))
        await bus.publisher(house.subjects.kv_metrics).publish(KvMetrics(worker_id=1))
        await take(aiter(quick), 1)
        assert [received.message.worker_id for received in await take(aiter(slow), 3)] == [7, 8, 9]
        assert slow.dropped == 7


async def test_a_cancelled_read_loses_nothing(house: Any) -> None:
    bus = await house.client()
    publisher = bus.publisher(house.subjects.heartbeats("e"))
    async with bus.subscribe(house.subjects.heartbeats()) as subscription:
        waiting = asyncio.create_task(anext(aiter(subscription)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await publisher.publish(heavy())
        reading = asyncio.create_task(anext(aiter(subscription)))
        for _ in range(5):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        if reading.cancelled():
            assert (await take(aiter(subscription), 1))[0].message == heavy()
        else:
            assert reading.result().message == heavy()


async def test_leaving_the_context_ends_the_reading(house: Any) -> None:
    bus = await house.client()

    async def read(subscription: Any) -> int:
        return len([received async for received in subscription])

    async with bus.subscribe(house.subjects.heartbeats()) as subscription:
        reader = asyncio.create_task(read(subscription))
        await asyncio.sleep(0)
    assert await soon(reader) == 0


@pytest.mark.parametrize("which", ["heartbeats", "kv_events", "kv_metrics", "experts", "profiles", "demand"])
async def test_garbage_is_refused_and_counted_and_what_is_good_goes_through(house: Any, which: str) -> None:
    member = getattr(house.subjects, which)
    subject = member if isinstance(member, str) else member("e")
    bus = await house.client()
    async with bus.subscribe(house.subjects.everything) as subscription:
        for raw in GARBAGE:
            await house.disturb(subject, raw)
        await bus.publisher(house.subjects.heartbeats("e")).publish(beat(7))
        assert (await take(aiter(subscription), 1))[0].message == beat(7)
    assert sum(bus.rejected.values()) == len(GARBAGE)
    assert bus.rejected["kind"] == 1
    assert bus.rejected["blob"] == 1
    assert bus.rejected["oversize"] == 1
    assert bus.rejected["envelope"] == 5


async def test_a_message_that_can_never_be_sent_is_the_callers_error(house: Any) -> None:
    bus = await house.client()
    with pytest.raises(BusError, match="kv_metrics"):
        await bus.publisher(house.subjects.heartbeats("e")).publish(KvMetrics(worker_id=1))
    with pytest.raises(BusError, match="encoded"):
        await bus.publisher(house.subjects.heartbeats("e")).publish(
            EngineHeartbeat(engine="e", worker_id=1 << 64, epoch=0)
        )
    for subject in ("", "a..b", "a b", "a.*", "a.>", "a\r\nPUB b 0\r\n"):
        with pytest.raises(BusError, match="subject"):
            bus.publisher(subject)


@pytest.mark.parametrize("length", [LARGE - 200, LARGE + 1, 3_000_000])
async def test_a_message_of_any_size_arrives_whole(house: Any, length: int) -> None:
    speaker, listener = await house.client(), await house.client()
    message = EngineLeft(engine="e", worker_id=1, reason="x" * length)
    async with listener.subscribe(house.subjects.membership()) as subscription:
        await speaker.publisher(house.subjects.membership("e")).publish(message)
        assert (await take(aiter(subscription), 1))[0].message == message


async def test_a_large_message_whose_content_was_damaged_is_refused_and_counted(house: Any) -> None:
    bus = await house.client()
    async with bus.subscribe(house.subjects.profiles, house.subjects.heartbeats()) as subscription:
        await bus.publisher(house.subjects.profiles).publish(heavy())
        await house.damage(hashlib.sha256(msgspec.msgpack.encode(heavy())).hexdigest())
        await bus.publisher(house.subjects.heartbeats("e")).publish(beat())
        assert (await take(aiter(subscription), 1))[0].message == beat()
    assert bus.rejected["blob"] == 1


# Requests


async def empty_profile(message: Message) -> Message:
    assert isinstance(message, DescribeProfile)
    return ProfilePublished(
        model=message.model, version=0, tokens=0.0, profile=ExpertTable(layers=0, experts=0, values=b"")
    )


async def test_a_request_is_answered(house: Any) -> None:
    asker, server = await house.client(), await house.client()
    async with server.serve(house.subjects.describe_profile, empty_profile):
        answers = await soon(
            asyncio.gather(
                *(
                    asker.request(house.subjects.describe_profile, DescribeProfile(model=str(n)))
                    for n in range(50)
                )
            )
        )
    assert [answer.model for answer in answers] == [str(n) for n in range(50)]


async def test_serving_is_live_before_its_context_is_entered_and_over_after_it(house: Any) -> None:
    asker, server = await house.client(), await house.client()
    for _ in range(10):
        async with server.serve(house.subjects.describe_profile, empty_profile):
            await asker.request(house.subjects.describe_profile, DescribeProfile(model="m"))
    with pytest.raises(BusTimeout):
        await asker.request(house.subjects.describe_profile, DescribeProfile(model="m"), seconds=0.2)


async def test_a_request_that_nobody_serves_times_out(house: Any) -> None:
    bus = await house.client()
    with pytest.raises(NobodyThere, match="describe"):
        await soon(
            bus.request(house.subjects.describe_profile, DescribeProfile(model="m"), seconds=0.3), seconds=2.0
        )


async def test_a_request_times_out_when_the_answer_takes_too_long(house: Any) -> None:
    bus = await house.client()

    async def never(_: Message) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async with bus.serve(house.subjects.describe_profile, never):
        with pytest.raises(BusTimeout, match=r"0\.2 s") as late:
            await soon(
                bus.request(house.subjects.describe_profile, DescribeProfile(model="m"), seconds=0.2),
                seconds=2.0,
            )
    assert not isinstance(late.value, NobodyThere), "it was heard, and may be done yet"


async def test_a_slow_answer_does_not_hold_up_the_others(house: Any) -> None:
    bus = await house.client()
    gate = asyncio.Event()

    async def first_waits(message: Message) -> Message:
        if message == DescribeProfile(model="slow"):
            await gate.wait()
        return await empty_profile(message)

    async with bus.serve(house.subjects.describe_profile, first_waits):
        slow = asyncio.create_task(
            bus.request(house.subjects.describe_profile, DescribeProfile(model="slow"), seconds=10)
        )
        await bus.request(house.subjects.describe_profile, DescribeProfile(model="quick"))
        assert not slow.done()
        gate.set()
        assert (await soon(slow)).model == "slow"


async def test_a_refusal_and_an_exception_of_the_server_reach_the_asker_with_their_reason(house: Any) -> None:
    bus = await house.client()

    async def difficult(message: Message) -> Message:
        match message:
            case DescribeProfile(model="refused"):
                return RequestRefused(reason="ask for another model")
            case DescribeProfile(model="broken"):
                raise KeyError("no such thing")
            case DescribeProfile(model="unsendable"):
                return EngineHeartbeat(engine="e", worker_id=1 << 64, epoch=0)
        return await empty_profile(message)

    async with bus.serve(house.subjects.describe_profile, difficult):
        for model, reason in (
            ("refused", "ask for another model"),
            ("broken", "no such thing"),
            ("unsendable", "cannot be sent"),
        ):
            with pytest.raises(BusError, match=reason):
                await bus.request(house.subjects.describe_profile, DescribeProfile(model=model))
        await bus.request(house.subjects.describe_profile, DescribeProfile(model="fine"))


def profile_of(length: int, fill: bytes = b"\0") -> ProfilePublished:
    """An answer of some more than `length` bytes."""
    return ProfilePublished(
        model="m",
        version=1,
        tokens=1.0,
        profile=ExpertTable(layers=1, experts=length // 4, values=fill * (length // 4 * 4)),
    )


@pytest.mark.parametrize("length", [10, 2_000_000])
async def test_an_answer_about_another_engine_than_the_subjects_is_refused_whatever_its_size(
    house: Any, length: int
) -> None:
    asker, server = await house.client(), await house.client()

    async def of_another(_: Message) -> Message:
        return EngineLeft(engine="b", worker_id=1, reason="x" * length)

    async with server.serve(house.subjects.describe_engine("a", 1), of_another):
        with pytest.raises(BusError, match="engine 'b'"):
            await soon(asker.request(house.subjects.describe_engine("a", 1), DescribeProfile(model="m")))


@pytest.mark.parametrize("length", [LARGE - 200, LARGE + 4, 3_000_000, 20_000_000])
async def test_an_answer_of_any_size_arrives_whole_and_lies_in_no_bucket(house: Any, length: int) -> None:
    asker, server = await house.client(), await house.client()

    async def large(_: Message) -> Message:
        return profile_of(length, b"\x3f")

    async with server.serve(house.subjects.describe_profile, large):
        assert await soon(
            asker.request(house.subjects.describe_profile, DescribeProfile(model="m"))
        ) == profile_of(length, b"\x3f")
    assert await house.parcels() == 0


async def test_a_part_of_an_answer_that_gets_lost_is_asked_for_again(house: Any) -> None:
    asker, server = await house.client(), await house.client()
    lost: list[int] = []

    def loses(raw: bytes) -> bool:
        """The third part that is sent, once."""
        if unseal(raw).topic == PART_TOPIC:
            lost.append(len(raw))
        return len(lost) == 3

    async def large(_: Message) -> Message:
        return profile_of(3_000_000, b"\x3f")

    house.lose(loses)
    async with server.serve(house.subjects.describe_profile, large):
        assert await soon(
            asker.request(house.subjects.describe_profile, DescribeProfile(model="m"))
        ) == profile_of(3_000_000, b"\x3f")
    assert len(lost) == -(-3_000_000 // LARGE) + 1, "every part once, and the lost one once more"


async def test_an_answer_whose_parts_never_come_ends_in_time(house: Any) -> None:
    bus = await house.client()

    async def large(_: Message) -> Message:
        return profile_of(1_000_000)

    house.lose(lambda raw: unseal(raw).topic == PART_TOPIC)
    async with bus.serve(house.subjects.describe_profile, large):
        with pytest.raises(BusTimeout, match="part"):
            await soon(
                bus.request(house.subjects.describe_profile, DescribeProfile(model="m"), seconds=0.2),
                seconds=3.0,
            )


async def test_parts_come_from_the_server_that_answered_though_others_serve_the_subject(house: Any) -> None:
    asker, servers = await house.client(), [await house.client() for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        for number, server in enumerate(servers):

            async def large(_: Message, fill: bytes = bytes([number])) -> Message:
                return profile_of(2_000_000, fill)

            await stack.enter_async_context(server.serve(house.subjects.describe_profile, large))
        answers = [
            await soon(asker.request(house.subjects.describe_profile, DescribeProfile(model="m")))
            for _ in range(6)
        ]
    assert {bytes(answer.profile.values) for answer in answers} <= {
        bytes([number]) * 2_000_000 for number in range(3)
    }


async def test_one_message_that_answers_many_is_kept_once(house: Any) -> None:
    config = replace(house.config, answers_bytes=2_500_000)
    asker, server = await house.client(config), await house.client(config)
    same = profile_of(2_000_000)

    async def large(_: Message) -> Message:
        return same

    async with server.serve(house.subjects.describe_profile, large):
        ask = [
            asker.request(house.subjects.describe_profile, DescribeProfile(model="m"), seconds=10)
            for _ in range(8)
        ]
        assert await soon(asyncio.gather(*ask), seconds=20) == [same] * 8


async def test_answers_that_find_no_room_are_refused_with_a_word_and_counted(house: Any) -> None:
    config = replace(house.config, answers_bytes=2_500_000)
    asker, server = await house.client(config), await house.client(config)

    async def large(_: Message) -> Message:
        return profile_of(2_000_000)

    async with server.serve(house.subjects.describe_profile, large):
        for _ in range(3):
            await soon(asker.request(house.subjects.describe_profile, DescribeProfile(model="m")))
        house.lose(lambda raw: unseal(raw).topic == PARTS_TOPIC)
        with pytest.raises(BusTimeout):
            await soon(
                asker.request(house.subjects.describe_profile, DescribeProfile(model="m"), seconds=0.2)
            )
        house.lose(lambda raw: False)
        with pytest.raises(Declined, match=r"ask again.*answers_bytes"):
            await soon(asker.request(house.subjects.describe_profile, DescribeProfile(model="m")))
    assert server.refusals["answers"] == 1
    assert asker.refusals["answers"] == 0


async def test_garbage_for_a_server_is_counted_and_it_serves_on(house: Any) -> None:
    bus = await house.client()
    async with bus.serve(house.subjects.describe_profile, empty_profile):
        for raw in (*GARBAGE, *PART_GARBAGE):
            await house.disturb(house.subjects.describe_profile, raw)
        await bus.request(house.subjects.describe_profile, DescribeProfile(model="m"))
        async with asyncio.timeout(5):
            while sum(bus.rejected.values()) < len(GARBAGE) + 2:  # noqa: ASYNC110 counters have no event
                await asyncio.sleep(0.01)


async def test_of_several_servers_one_answers(house: Any) -> None:
    asker = await house.client()
    asked: list[str] = []

    def server(name: str) -> Callable[[Message], Any]:
        async def answer(message: Message) -> Message:
            asked.append(name)
            return await empty_profile(message)

        return answer

    subject, first, second = house.subjects.describe_profile, await house.client(), await house.client()
    async with first.serve(subject, server("a")), second.serve(subject, server("b")):
        for _ in range(20):
            await asker.request(subject, DescribeProfile(model="m"))
    assert len(asked) == 20
    assert set(asked) == {"a", "b"}


async def test_requests_and_answers_may_be_large(house: Any) -> None:
    bus = await house.client()

    async def echo(message: Message) -> Message:
        return message

    async with bus.serve(house.subjects.describe_profile, echo):
        assert await bus.request(house.subjects.describe_profile, heavy()) == heavy()


# The durable log


async def test_what_is_recorded_is_replayed_in_order_and_ends_when_not_followed(house: Any) -> None:
    writer, reader = await house.client(), await house.client()
    assert await collected(reader.replay(house.subjects.membership(), follow=False)) == []
    for number in range(30):
        await writer.record(house.subjects.membership("e"), left(number))
    assert await collected(reader.replay(house.subjects.membership(), follow=False)) == list(range(30))
    assert await collected(reader.replay(house.subjects.placements(), follow=False)) == []


async def test_only_promised_kinds_on_promised_subjects_are_stored(house: Any) -> None:
    bus = await house.client()
    with pytest.raises(BusError, match="EngineHeartbeat is not stored"):
        await bus.record(house.subjects.membership("e"), beat())
    with pytest.raises(BusError, match="heartbeat"):
        await bus.record(house.subjects.heartbeats("e"), left(1))


async def test_a_followed_replay_gives_the_past_and_then_what_is_new(house: Any) -> None:
    writer, reader = await house.client(), await house.client()
    await writer.record(house.subjects.membership("e"), left(0))
    replay = reader.replay(house.subjects.membership())
    assert [received.message for received in await take(replay, 1)] == [left(0)]
    for number in range(1, 6):
        await writer.record(house.subjects.membership("e"), left(number))
    heard = await take(replay, 5)
    assert [received.message for received in heard] == [left(number) for number in range(1, 6)]
    assert heard[0].subject == house.subjects.membership("e")
    await replay.aclose()


async def test_a_replay_of_the_latest_gives_the_last_of_each_subject_and_then_everything_new(
    house: Any,
) -> None:
    bus = await house.client()
    for number, engine in enumerate(["a", "b", "a", "c", "b"]):
        await bus.record(house.subjects.membership(engine), left(number, engine))
    assert await collected(bus.replay(house.subjects.membership(), latest=True, follow=False)) == [2, 3, 4]
    replay = bus.replay(house.subjects.membership(), latest=True)
    assert [received.message.worker_id for received in await take(replay, 3)] == [2, 3, 4]
    await bus.record(house.subjects.membership("a"), left(5, "a"))
    await bus.record(house.subjects.membership("a"), left(6, "a"))
    assert [received.message.worker_id for received in await take(replay, 2)] == [5, 6]
    await replay.aclose()
    assert await collected(bus.replay(house.subjects.membership("a"), latest=True, follow=False)) == [6]


async def test_positions_count_the_log_from_one_over_all_its_subjects(house: Any) -> None:
    bus = await house.client()
    assert await bus.last_position() == 0
    for number, engine in enumerate("abc"):
        await bus.record(house.subjects.membership(engine), left(number, engine))
    assert await bus.last_position() == 3
    found = [received async for received in bus.replay(house.subjects.everything, follow=False)]
    assert [(received.position, received.message.worker_id) for received in found] == [(1, 0), (2, 1), (3, 2)]


async def test_a_replay_after_a_position_continues_behind_it_and_then_with_what_is_new(house: Any) -> None:
    bus = await house.client()
    for number in range(4):
        await bus.record(house.subjects.membership("e"), left(number))
    assert await collected(bus.replay(house.subjects.everything, after=2, follow=False)) == [2, 3]
    assert await collected(bus.replay(house.subjects.everything, after=4, follow=False)) == []
    replay = bus.replay(house.subjects.everything, after=3)
    assert [received.position for received in await take(replay, 1)] == [4]
    await bus.record(house.subjects.membership("e"), left(4))
    assert [received.position for received in await take(replay, 1)] == [5]
    await replay.aclose()


async def test_a_position_that_the_log_never_reached_reads_the_whole_log(house: Any) -> None:
    bus = await house.client()
    await bus.record(house.subjects.membership("e"), left(7))
    assert await collected(bus.replay(house.subjects.everything, after=99, follow=False)) == [7]


async def test_a_replay_since_leaves_out_what_is_older(house: Any) -> None:
    bus = await house.client()
    await bus.record(house.subjects.membership("old"), left(1, "old"))
    await asyncio.sleep(0.6)
    await bus.record(house.subjects.membership("new"), left(2, "new"))
    for latest in (False, True):
        assert await collected(
            bus.replay(house.subjects.membership(), since=0.5, latest=latest, follow=False)
        ) == [2]
        assert await collected(
            bus.replay(house.subjects.membership(), since=60, latest=latest, follow=False)
        ) == [1, 2]


async def test_what_is_recorded_is_also_heard_live(house: Any) -> None:
    bus = await house.client()
    async with bus.subscribe(house.subjects.membership()) as subscription:
        await bus.record(house.subjects.membership("e"), left(1))
        assert (await take(aiter(subscription), 1))[0].message == left(1)


async def test_garbage_in_the_log_is_counted_and_skipped(house: Any) -> None:
    bus = await house.client()
    await bus.record(house.subjects.membership("e"), left(1))
    for raw in GARBAGE:
        await house.disturb(house.subjects.membership("e"), raw)
    await bus.record(house.subjects.membership("e"), left(2))
    assert await collected(bus.replay(house.subjects.membership(), follow=False)) == [1, 2]
    assert sum(bus.rejected.values()) == len(GARBAGE)


async def test_a_large_record_is_stored_whole(house: Any) -> None:
    bus = await house.client()
    big = EngineLeft(engine="e", worker_id=1, reason="x" * 800_000)
    await bus.record(house.subjects.membership("e"), big)
    assert [received.message async for received in bus.replay(house.subjects.membership(), follow=False)] == [
        big
    ]


async def test_the_log_keeps_no_more_of_a_subject_than_it_may(house: Any) -> None:
    bus = await house.client(replace(house.config, stream_messages_per_subject=3))
    for number in range(5):
        await bus.record(house.subjects.membership("busy"), left(number, "busy"))
    await bus.record(house.subjects.membership("calm"), left(9, "calm"))
    assert await collected(bus.replay(house.subjects.membership(), follow=False)) == [2, 3, 4, 9]


# Claims


async def test_a_key_is_claimed_once_and_changed_by_whoever_knows_its_revision(house: Any) -> None:
    first, second = await house.client(), await house.client()
    assert await first.read_claim("engine.a") is None
    revision = await first.claim("engine.a", b"first")
    with pytest.raises(ClaimLost, match=r"engine\.a"):
        await second.claim("engine.a", b"second")
    held = await second.read_claim("engine.a")
    assert held is not None
    assert (held.value, held.revision) == (b"first", revision)
    newer = await second.claim("engine.a", b"second", held.revision)
    assert newer > revision
    with pytest.raises(ClaimLost):
        await first.claim("engine.a", b"first", revision)
    with pytest.raises(ClaimLost):
        await first.release("engine.a", revision)
    held = await first.read_claim("engine.a")
    assert held is not None
    assert held.value == b"second"


async def test_a_released_key_is_free_again(house: Any) -> None:
    bus = await house.client()
    revision = await bus.claim("engine.a", b"")
    held = await bus.read_claim("engine.a")
    assert held is not None
    assert held.value == b""
    await bus.release("engine.a", revision)
    assert await bus.read_claim("engine.a") is None
    with pytest.raises(ClaimLost):
        await bus.claim("engine.a", b"x", revision)
    with pytest.raises(ClaimLost):
        await bus.release("engine.a", revision)
    await bus.claim("engine.a", b"again")


async def test_a_key_that_nobody_holds_cannot_be_replaced(house: Any) -> None:
    bus = await house.client()
    for revision in (0, 1, 77):
        with pytest.raises(ClaimLost):
            await bus.claim("engine.a", b"x", revision)
        with pytest.raises(ClaimLost):
            await bus.release("engine.a", revision)
    assert await bus.read_claim("engine.a") is None


async def test_of_many_who_claim_at_once_exactly_one_wins(house: Any) -> None:
    clients = [await house.client() for _ in range(5)]
    outcomes = await asyncio.gather(
        *(client.claim("engine.a", str(n).encode()) for n, client in enumerate(clients)),
        return_exceptions=True,
    )
    winners = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, int)]
    assert len(winners) == 1
    assert sum(isinstance(outcome, ClaimLost) for outcome in outcomes) == 4
    held = await clients[0].read_claim("engine.a")
    assert held is not None
    assert held.value == str(winners[0]).encode()


async def test_a_key_that_cannot_be_one_is_refused(house: Any) -> None:
    bus = await house.client()
    for key in ("", ".a", "a.", "a b", "a*", "ä", "a..b"):
        with pytest.raises(BusError, match="key"):
            await bus.claim(key, b"x")


# Blobs


@pytest.mark.parametrize("content", [b"", b"small", bytes(range(256)) * 8000], ids=["empty", "small", "2 MB"])
async def test_a_blob_is_kept_under_its_digest_and_putting_it_again_changes_nothing(
    house: Any, content: bytes
) -> None:
    first, second = await house.client(), await house.client()
    digest = await first.put_blob(content)
    assert digest == hashlib.sha256(content).hexdigest()
    assert await second.put_blob(content) == digest
    assert await second.get_blob(digest) == content


async def test_an_unknown_blob_is_an_error(house: Any) -> None:
    bus = await house.client()
    for digest in ("0" * 64, "", "not a digest", "../x"):
        with pytest.raises(BlobLost):
            await bus.get_blob(digest)


async def test_damage_to_a_blob_is_noticed_and_putting_it_again_repairs_it(house: Any) -> None:
    bus = await house.client()
    digest = await bus.put_blob(b"content" * 100)
    await house.damage(digest)
    with pytest.raises(BlobLost, match="damaged"):
        await bus.get_blob(digest)
    await bus.put_blob(b"content" * 100)
    assert await bus.get_blob(digest) == b"content" * 100


async def test_a_full_blob_store_says_so(house: Any) -> None:
    bus = await house.client(replace(house.config, blobs_bytes=1_000_000))
    assert bus.refusals["blobs"] == 0
    with pytest.raises(StoreFull, match="full"):
        await bus.put_blob(b"x" * 2_000_000)
    assert dict(bus.refusals) == {"log": 0, "claims": 0, "blobs": 1, "parcels": 0, "answers": 0}


async def test_how_full_a_store_is_can_be_seen_and_a_nearly_full_one_is_alarming(house: Any) -> None:
    bus = await house.client(replace(house.config, blobs_bytes=1_000_000))
    before = {use.store: use for use in await bus.stores()}
    assert set(before) == {"log", "claims", "blobs", "parcels"}
    assert not any(use.alarming for use in before.values())
    await bus.put_blob(b"x" * 950_000)
    blobs = {use.store: use for use in await bus.stores()}["blobs"]
    assert blobs.alarming
    assert blobs.capacity == 1_000_000
    assert 950_000 <= blobs.used <= 1_000_000


async def test_a_blob_that_was_dropped_is_unknown_gives_its_room_back_and_may_be_put_again(
    house: Any,
) -> None:
    first, second = (
        await house.client(replace(house.config, blobs_bytes=1_000_000)),
        await house.client(replace(house.config, blobs_bytes=1_000_000)),
    )
    kept = await first.put_blob(b"kept")
    for number in range(3):
        digest = await first.put_blob(bytes([number]) * 700_000)
        await second.drop_blob(digest)
        await second.drop_blob(digest)
        with pytest.raises(BlobLost, match="has no"):
            await first.get_blob(digest)
    for digest in ("0" * 64, "", "not a digest", "../x"):
        await first.drop_blob(digest)
    digest = await first.put_blob(bytes([2]) * 700_000)
    assert await second.get_blob(digest) == bytes([2]) * 700_000
    assert await second.get_blob(kept) == b"kept"


# The connection


async def test_publishing_while_disconnected_neither_blocks_nor_raises_and_the_sequence_shows_it(
    shaky_house: Any,
) -> None:
    bus = await shaky_house.client()
    assert bus.connected
    publisher = bus.publisher(shaky_house.subjects.heartbeats("e"))
    async with bus.subscribe(shaky_house.subjects.heartbeats()) as subscription:
        await publisher.publish(beat(0))
        await take(aiter(subscription), 1)
        await shaky_house.fail()
        assert not bus.connected
        async with asyncio.timeout(0.5):
            for epoch in range(1, 4):
                await publisher.publish(beat(epoch))
            await publisher.publish(beat(4, "x" * 2_000_000))
        await shaky_house.recover()
        assert bus.connected
        await publisher.publish(beat(5))
        received = (await take(aiter(subscription), 1))[0]
    assert (received.sequence, received.message) == (5, beat(5))


async def test_a_replay_goes_on_across_an_outage_and_nothing_is_lost_or_given_twice(shaky_house: Any) -> None:
    writer, reader = await shaky_house.client(), await shaky_house.client()
    subjects = shaky_house.subjects
    for number in range(3):
        await writer.record(subjects.membership("e"), left(number))
    replay, latest = reader.replay(subjects.membership()), reader.replay(subjects.membership(), latest=True)
    heard = await take(replay, 2) + [None] + await take(latest, 1)
    assert heard[-1].message == left(2)
    await shaky_house.fail()
    recording = asyncio.create_task(writer.record(subjects.membership("e"), left(3)))
    await asyncio.sleep(0.05)
    assert not recording.done()
    await shaky_house.recover()
    await soon(recording)
    for number in range(4, 8):
        await writer.record(subjects.membership("e"), left(number))
    assert [received.message.worker_id for received in await take(replay, 6)] == [2, 3, 4, 5, 6, 7]
    assert [received.message.worker_id for received in await take(latest, 5)] == [3, 4, 5, 6, 7]
    await replay.aclose()
    await latest.aclose()
    assert await collected(reader.replay(subjects.membership(), follow=False)) == list(range(8))


async def test_recording_gives_up_in_bounded_time_and_says_what_to_do(shaky_house: Any) -> None:
    bus = await shaky_house.client(replace(shaky_house.config, record_seconds=0.3))
    await shaky_house.fail()
    with pytest.raises(BusError, match=r"0\.3 s"):
        await soon(bus.record(shaky_house.subjects.membership("e"), left(1)), seconds=2.0)
    await shaky_house.recover()
    await bus.record(shaky_house.subjects.membership("e"), left(2))


async def test_a_replay_that_begins_in_an_outage_waits_when_it_follows_and_raises_when_it_does_not(
    shaky_house: Any,
) -> None:
    bus = await shaky_house.client(replace(shaky_house.config, record_seconds=0.2))
    subjects = shaky_house.subjects
    await bus.record(subjects.membership("e"), left(1))
    await shaky_house.fail()
    following = [
        asyncio.create_task(take(bus.replay(subjects.membership(), latest=latest), 1))
        for latest in (False, True)
    ]
    with pytest.raises(BusError):
        await collected(bus.replay(subjects.membership(), follow=False))
    await asyncio.sleep(0.3)
    await shaky_house.recover()
    for task in following:
        assert [received.message for received in await soon(task)] == [left(1)]


async def test_requests_while_disconnected_end_in_time_and_serving_goes_on_afterwards(
    shaky_house: Any,
) -> None:
    asker, server = await shaky_house.client(), await shaky_house.client()
    async with server.serve(shaky_house.subjects.describe_profile, empty_profile):
        await shaky_house.fail()
        with pytest.raises(BusError):
            await soon(
                asker.request(shaky_house.subjects.describe_profile, DescribeProfile(model="m"), seconds=0.2),
                seconds=2.0,
            )
        await shaky_house.recover()
        await asker.request(shaky_house.subjects.describe_profile, DescribeProfile(model="m"))


async def test_claims_and_blobs_outlive_an_outage(shaky_house: Any) -> None:
    bus = await shaky_house.client()
    revision = await bus.claim("engine.a", b"mine")
    digest = await bus.put_blob(b"kept")
    await shaky_house.fail()
    await shaky_house.recover()
    assert await bus.claim("engine.a", b"still mine", revision) > revision
    assert await bus.get_blob(digest) == b"kept"


async def test_closing_ends_everything_at_once_and_may_be_repeated(house: Any) -> None:
    bus = await house.client()

    async def read(iterator: AsyncIterator[Received]) -> int:
        return len([received async for received in iterator])

    replaying = asyncio.create_task(read(bus.replay(house.subjects.membership())))
    async with bus.subscribe(house.subjects.heartbeats()) as subscription:
        reading = asyncio.create_task(read(aiter(subscription)))
        await asyncio.sleep(0.05)
        await bus.close()
        assert await soon(asyncio.gather(replaying, reading), seconds=3.0) == [0, 0]
        await bus.publisher(house.subjects.heartbeats("e")).publish(beat())
    await bus.close()
    assert not bus.connected
    with pytest.raises(BusError, match="closed"):
        await bus.record(house.subjects.membership("e"), left(1))
    with pytest.raises(BusError, match="closed"):
        await bus.request(house.subjects.describe_profile, DescribeProfile(model="m"))
    with pytest.raises(BusError, match="closed"):
        await bus.read_claim("a")
    with pytest.raises(BusError, match="closed"):
        await bus.get_blob("0" * 64)
