"""The tracker on the memory bus, in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from bus import BusError, Received, Subscription
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from fleet.event import PROTOCOL
from fleet.experts import ModelShape
from fleet.facts.activity import ExpertsActivated
from fleet.facts.demand import DemandPublished, ProfilePublished, TrackerHeartbeat
from fleet.facts.engines import EngineHeartbeat, EngineJoined, EngineLeft
from fleet.popularity import ExpertCounts
from fleet.requests.demand import DescribeProfile
from fleet.requests.engines import DescribeEngine
from tracker.config import TrackerConfig
from tracker.service import TrackerService

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]
SUBJECTS = Subjects()
SHAPE = ModelShape(layers=2, experts=4, top_k=2, hidden=4, expert_intermediate=8)


def joined(worker_id: int = 1, engine: str = "a") -> EngineJoined:
    return EngineJoined(
        engine=engine,
        worker_id=worker_id,
        model="m",
        node="n",
        urls=("http://x", "http://y"),
        block_size=16,
        kv_blocks=8,
        max_context=512,
        max_batch_tokens=256,
        shape=SHAPE,
    )


def report(worker_id: int = 1, rank: int = 0, expert: int = 0, **fields: Any) -> ExpertsActivated:
    counts = np.zeros((2, 4))
    counts[:, expert] = 20
    plain = {
        "engine": "a",
        "model": "m",
        "epoch": 0,
        "seconds": 1.0,
        "tokens": 10,
        "cached_tokens": 0,
        "counts": ExpertCounts.of(np.asarray(counts, np.int64)),
    }
    return ExpertsActivated(worker_id=worker_id, rank=rank, **{**plain, **fields})


class Inline(Executor):
    """Executor that runs work immediately: virtual time knows no threads."""

    def submit(self, work: Any, /, *arguments: Any, **named: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments, **named))
        except Exception as error:  # noqa: BLE001, an executor passes on whatever it was
            done.set_exception(error)
        return done


@asynccontextmanager
async def serving(bus: MemoryBus, **settings: Any) -> AsyncIterator[TrackerService]:
    time = asyncio.get_running_loop().time
    service = TrackerService(
        bus, SUBJECTS, TrackerConfig(**settings), time, lambda: time() + 1e9, Inline(), Inline()
    )
    running = asyncio.create_task(service.run())
    try:
        async with asyncio.timeout(5):
            await service.ready.wait()
        yield service
    finally:
        assert not running.done(), running
        running.cancel()
        await asyncio.wait([running], timeout=5)
        assert running.cancelled()


async def test_reports_become_profiles_and_demands_on_the_bus() -> None:
    bus = MemoryBus()
    await bus.record(SUBJECTS.membership("a"), joined())
    async with (
        serving(bus, prior_pairs=1e-6),
        bus.subscribe(SUBJECTS.profiles) as profiles,
        bus.subscribe(SUBJECTS.demand) as demands,
    ):
        reports = bus.publisher(SUBJECTS.experts("a"))
        for second in range(4):
            await reports.publish(report(expert=second % 2))
            await asyncio.sleep(1)
        profile = (await anext(aiter(profiles))).message
        demand = (await anext(aiter(demands))).message
    assert isinstance(profile, ProfilePublished)
    np.testing.assert_allclose(profile.profile.array()[:, :2], 0.5, atol=0.01)
    assert isinstance(demand, DemandPublished)
    assert (demand.worker_id, demand.rank) == (1, 0)
    assert demand.tokens_per_second == pytest.approx(10.0, rel=0.1)


async def test_a_heartbeat_each_second_says_how_many_reports_were_learnt_from() -> None:
    bus = MemoryBus()
    await bus.record(SUBJECTS.membership("a"), joined())
    async with serving(bus), bus.subscribe(SUBJECTS.tracker_heartbeat) as beats:
        await bus.publisher(SUBJECTS.experts("a")).publish(report(expert=0))
        await asyncio.sleep(2.5)
        said = [received.message async for received in first(beats, 2)]
    assert said == [TrackerHeartbeat(protocol=PROTOCOL, reports=1)] * 2


async def first(subscription: Subscription, count: int) -> AsyncIterator[Received]:
    """The next messages of a subscription."""
    async for received in subscription:
        yield received
        count -= 1
        if not count:
            return


async def test_a_profile_can_be_asked_for_before_and_after_the_first_report() -> None:
    bus = MemoryBus()
    async with serving(bus, prior_pairs=1e-6):
        with pytest.raises(BusError, match="'m'"):
            await bus.request(SUBJECTS.describe_profile, DescribeProfile(model="m"))
        await bus.record(SUBJECTS.membership("a"), joined())
        await asyncio.sleep(0.1)
        empty = await bus.request(SUBJECTS.describe_profile, DescribeProfile(model="m"))
        assert isinstance(empty, ProfilePublished)
        assert empty.tokens == 0.0
        np.testing.assert_allclose(empty.profile.array(), 0.25)
        await bus.publisher(SUBJECTS.experts("a")).publish(report(expert=3))
        await asyncio.sleep(0.1)
        learnt = await bus.request(SUBJECTS.describe_profile, DescribeProfile(model="m"))
        assert isinstance(learnt, ProfilePublished)
        np.testing.assert_allclose(learnt.profile.array()[:, 3], 1.0, atol=0.01)
        with pytest.raises(BusError, match="DescribeProfile"):
            await bus.request(SUBJECTS.describe_profile, DescribeEngine(worker_id=1))


async def test_a_repeated_report_counts_once() -> None:
    broker = MemoryBroker()
    bus, copies = MemoryBus(broker), []
    async with serving(bus) as service, bus.subscribe(SUBJECTS.experts()):
        publisher = bus.publisher(SUBJECTS.experts("a"))
        original = broker.deliver

        def remember(subject: str, raw: bytes) -> None:
            copies.append((subject, raw))
            original(subject, raw)

        broker.deliver = remember  # type: ignore[method-assign]
        await publisher.publish(report())
        broker.deliver = original  # type: ignore[method-assign]
        await asyncio.sleep(0.1)
        before = await bus.request(SUBJECTS.describe_profile, DescribeProfile(model="m"))
        for subject, raw in copies * 3:
            broker.deliver(subject, raw)
        await asyncio.sleep(0)
        after = await bus.request(SUBJECTS.describe_profile, DescribeProfile(model="m"))
        assert isinstance(before, ProfilePublished)
        assert isinstance(after, ProfilePublished)
        assert after.tokens == pytest.approx(before.tokens, rel=1e-3)
        assert b"roost_tracker_duplicates_total 3.0" in service.metrics.exposition()


async def test_lost_reports_are_counted_and_not_taken_for_silence() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with serving(bus) as service, bus.subscribe(SUBJECTS.demand) as demands:
        publisher = bus.publisher(SUBJECTS.experts("a"))
        await publisher.publish(report())
        await asyncio.sleep(1)
        broker.reachable = False
        for _ in range(30):
            await publisher.publish(report())
            await asyncio.sleep(1)
        broker.reachable = True
        await publisher.publish(report())
        await asyncio.sleep(3)
        received = (await anext(aiter(demands))).message
        assert isinstance(received, DemandPublished)
        assert received.tokens_per_second == pytest.approx(10.0, rel=1e-6)
        assert b"roost_tracker_lost_total 30.0" in service.metrics.exposition()


async def test_workers_that_leave_restart_or_fall_silent_are_forgotten() -> None:
    bus = MemoryBus()
    async with serving(bus, forget_seconds=5.0) as service:
        beats = bus.publisher(SUBJECTS.heartbeats("c"))
        for worker_id, engine in ((1, "a"), (2, "b"), (3, "c")):
            await bus.record(SUBJECTS.membership(engine), joined(worker_id, engine))
            await bus.publisher(SUBJECTS.experts(engine)).publish(report(worker_id, engine=engine))
        await asyncio.sleep(2.5)
        assert b"roost_tracker_ranks 3.0" in service.metrics.exposition()
        await bus.record(SUBJECTS.membership("a"), EngineLeft(engine="a", worker_id=1, reason="test"))
        await bus.record(SUBJECTS.membership("b"), joined(22, "b"))
        await asyncio.sleep(2)
        assert b"roost_tracker_ranks 1.0" in service.metrics.exposition()
        for _ in range(10):
            await beats.publish(EngineHeartbeat(engine="c", worker_id=3, epoch=0))
            await asyncio.sleep(1)
        assert b"roost_tracker_ranks 1.0" in service.metrics.exposition()
        await asyncio.sleep(8)
        assert b"roost_tracker_ranks 0.0" in service.metrics.exposition()


async def test_garbage_and_impossible_reports_are_counted_and_the_tracker_lives_on() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    await bus.record(SUBJECTS.membership("a"), joined())
    async with serving(bus) as service:
        reports = bus.publisher(SUBJECTS.experts("a"))
        for subject in (
            SUBJECTS.experts("a"),
            SUBJECTS.heartbeats("a"),
            SUBJECTS.membership("a"),
            SUBJECTS.describe_profile,
        ):
            for raw in (b"", b"\xc1", b"\xff" * 300, msgspec.msgpack.encode({"publisher_id": 1})):
                broker.deliver(subject, raw)
        await reports.publish(report(seconds=float("nan")))
        await reports.publish(report(tokens=-1))
        await reports.publish(report(rank=7))
        await reports.publish(report(counts=ExpertCounts(layers=2, experts=4, width=3, values=b"")))
        await reports.publish(report(counts=ExpertCounts.of(np.ones((3, 4), np.int64))))
        await reports.publish(EngineLeft(engine="a", worker_id=9, reason="not a report"))
        await reports.publish(DescribeEngine(worker_id=1))
        await reports.publish(report())
        await asyncio.sleep(3)
        exposed = service.metrics.exposition()
        for line in (
            b'rejected_total{reason="interval"} 1.0',
            b'rejected_total{reason="counts"} 2.0',
            b'rejected_total{reason="rank"} 1.0',
            b'rejected_total{reason="shape"} 1.0',
            b'rejected_total{reason="kind"} 1.0',
            b"roost_tracker_reports_total 1.0",
            b'bus_rejected{reason="envelope"}',
            b'profile_age_seconds{model="m"}',
        ):
            assert line in exposed, exposed.decode()


async def test_a_restarted_tracker_knows_who_is_there_and_never_repeats_a_version() -> None:
    bus, versions = MemoryBus(), []
    await bus.record(SUBJECTS.membership("a"), joined())
    async with bus.subscribe(SUBJECTS.profiles) as profiles:
        for _ in range(2):
            async with serving(bus):
                await bus.publisher(SUBJECTS.experts("a")).publish(report())
                message = (await anext(aiter(profiles))).message
                assert isinstance(message, ProfilePublished)
                versions.append(message.version)
    assert versions[0] < versions[1]


async def envelopes(count: int) -> list[tuple[str, bytes]]:
    """Return reports of two ranks in wire format."""
    broker, sent = MemoryBroker(), []
    bus = MemoryBus(broker)
    broker.deliver = lambda subject, raw: sent.append((subject, raw))  # type: ignore[method-assign]
    publishers = [bus.publisher(SUBJECTS.experts("a")) for _ in range(2)]
    for number in range(count):
        await publishers[number % 2].publish(
            report(rank=number % 2, expert=number % 4, tokens=10 + number, seconds=0.5 + number % 3)
        )
    return sent


async def believed(sent: list[tuple[str, bytes]]) -> list[Any]:
    """Return profile and demands of a tracker that received all of this at once."""
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    await bus.record(SUBJECTS.membership("a"), joined())
    async with serving(bus), bus.subscribe(SUBJECTS.demand) as demands:
        for subject, raw in sent:
            broker.deliver(subject, raw)
        first = aiter(demands)
        said = [(await anext(first)).message for _ in range(2)]
        said.append(await bus.request(SUBJECTS.describe_profile, DescribeProfile(model="m")))
    return sorted(said, key=lambda message: getattr(message, "rank", -1))


@pytest.mark.parametrize("seed", range(6))
async def test_reports_that_come_in_any_order_and_more_than_once_change_nothing(seed: int) -> None:
    random, sent = np.random.default_rng(seed), await envelopes(24)
    copies = [sent[at] for at in random.integers(0, len(sent), 10)]
    mixed = [(sent + copies)[at] for at in random.permutation(len(sent) + len(copies))]
    plain, other = await believed(sent), await believed(mixed)
    assert isinstance(plain[0], ProfilePublished)
    np.testing.assert_allclose(plain[0].profile.array(), other[0].profile.array(), rtol=1e-5)
    assert plain[0].tokens == pytest.approx(other[0].tokens, rel=1e-6)
    for one, two in zip(plain[1:], other[1:], strict=True):
        assert (one.rank, one.tokens_per_second) == (two.rank, pytest.approx(two.tokens_per_second, rel=1e-6))
        np.testing.assert_allclose(one.demand.array(), two.demand.array(), rtol=1e-5)
