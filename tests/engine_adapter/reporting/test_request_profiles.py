"""What a rank says of its ended requests, over the memory bus, beside a tracker that publishes what a test
says."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from bus import Message, Subscription
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from engine_adapter.batching.kv_cache import identify
from engine_adapter.batching.profile_signatures import request_profiles
from engine_adapter.batching.routed_experts import RoutedTrace
from engine_adapter.config import AgentConfig
from engine_adapter.engine import EndedRequest, EngineDescription
from engine_adapter.reporting import request_profiles as profile_reports
from engine_adapter.reporting.cluster_subscriber import ClusterSubscriber
from engine_adapter.reporting.rank_context import RankContext
from engine_adapter.reporting.request_profiles import PROFILE_BLOCKS, Allowance, RequestProfiler
from fleet.experts import ModelShape
from fleet.facts.activity import RequestProfile, RequestsProfiled, TokensSampled
from fleet.facts.demand import ClustersPublished
from fleet.facts.engines import Capabilities
from fleet.placement import Placement, linear
from fleet.requests.demand import DescribeClusters
from fleet.routings import SAMPLED_TOKENS, sampled_tokens
from fleet.signatures import ClusterModel

SUBJECTS = Subjects()
CONFIG = AgentConfig(heartbeat_seconds=0.02, experts_seconds=0.05)
SHAPE = ModelShape(layers=2, experts=4, top_k=2, hidden=8, expert_intermediate=4)
ABOUT = EngineDescription(
    model="m",
    rank=1,
    ranks=2,
    block_size=16,
    kv_blocks=64,
    max_context=512,
    max_batch_tokens=128,
    capabilities=Capabilities(),
    shape=SHAPE,
)
HERE = linear(layers=2, experts=4, ranks=2)


def clusters(version: int = 1, layers: int = 2) -> ClusterModel:
    profiles = np.random.default_rng(version).dirichlet(np.ones(4), size=(3, layers))
    model = ClusterModel(version, np.float32(profiles), np.float32([0.5, 0.3, 0.2]), 0.2)
    return ClusterModel.from_record(model.record())  # as a reader has it, rounded


def ended(decision: str = "", tokens: int = 40) -> EndedRequest:
    routed = np.random.default_rng(tokens).integers(0, 4, (tokens, 2, 2)).astype(np.int16)
    return EndedRequest(
        decision,
        tokens - 10,
        RoutedTrace.of(routed),
        [block.identity for block in identify(range(tokens), 16)],
    )


def published(model: ClusterModel, name: str = "m") -> ClustersPublished:
    return ClustersPublished(model=name, record=model.record())


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker(SUBJECTS)


@asynccontextmanager
async def running(
    broker: MemoryBroker, config: AgentConfig = CONFIG, about: EngineDescription = ABOUT
) -> AsyncIterator[RequestProfiler]:
    profiles = RequestProfiler(RankContext(MemoryBus(broker), SUBJECTS, "a", 7, about), SHAPE, config)
    task = asyncio.create_task(profiles.run())
    try:
        yield profiles
    finally:
        assert not task.done(), task
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()


class PuppetTracker:
    """Answers with `model` when asked, as long as it is open."""

    def __init__(self, model: ClusterModel) -> None:
        self.model = model
        self.requests_seen = 0

    async def answer(self, request: Message) -> Message:
        assert request == DescribeClusters(model="m")
        self.requests_seen += 1
        return published(self.model)


@asynccontextmanager
async def tracking(broker: MemoryBroker, model: ClusterModel) -> AsyncIterator[PuppetTracker]:
    tracker = PuppetTracker(model)
    async with MemoryBus(broker).serve(SUBJECTS.describe_profile, tracker.answer):
        yield tracker


async def published_profiles(subscription: Subscription) -> RequestsProfiled:
    async with asyncio.timeout(5):
        async for received in subscription:
            assert isinstance(received.message, RequestsProfiled)
            return received.message
    raise AssertionError("the subscription ended")


async def known(
    profiles: RequestProfiler, subscription: Subscription, placement: Placement = HERE
) -> RequestsProfiled:
    """Let a request end again and again until one is said: the clusters are known then."""
    async with asyncio.timeout(5):
        while True:
            profiles.take([ended("first")], 0, placement)
            try:
                async with asyncio.timeout(0.05):
                    return await published_profiles(subscription)
            except TimeoutError:
                continue


async def profiles_until(subscription: Subscription, decision: str) -> list[RequestsProfiled]:
    """Messages up to the one that holds the decision; what `known` let end is left out."""
    messages: list[RequestsProfiled] = []
    while not messages or decision not in decisions(messages[-1:]):
        message = await published_profiles(subscription)
        messages.append(
            msgspec.structs.replace(
                message, requests=tuple(one for one in message.requests if one.decision != "first")
            )
        )
    return [message for message in messages if message.requests]


def decisions(messages: Sequence[RequestsProfiled]) -> list[str]:
    return [one.decision for message in messages for one in message.requests]


def expected(
    one: EndedRequest, model: ClusterModel, placement: Placement = HERE, *, sampled: bool = True
) -> RequestProfile:
    (profile,) = request_profiles(
        [one],
        model,
        placement,
        1,
        np.zeros(placement.ranks, np.intp),
        block_size=16,
        max_blocks=PROFILE_BLOCKS,
        sampled=[sampled],
    )
    return profile


async def test_an_ended_request_is_said_with_all_that_a_reader_needs_to_place_it(
    broker: MemoryBroker,
) -> None:
    async with (
        tracking(broker, clusters(5)),
        MemoryBus(broker).subscribe(SUBJECTS.requests_profiled()) as subscription,
        running(broker) as profiles,
    ):
        message = await known(profiles, subscription)
    assert (
        message.engine,
        message.worker_id,
        message.rank,
        message.model,
        message.epoch,
        message.clusters,
    ) == ("a", 7, 1, "m", 0, 5)
    assert message.requests[0] == expected(ended("first"), clusters(5))


async def test_what_ends_in_an_interval_is_said_together_and_each_once(broker: MemoryBroker) -> None:
    config = replace(CONFIG, experts_seconds=0.2)
    async with (
        tracking(broker, clusters()),
        MemoryBus(broker).subscribe(SUBJECTS.requests_profiled()) as subscription,
        running(broker, config) as profiles,
    ):
        await known(profiles, subscription)
        began = asyncio.get_running_loop().time()
        for at in range(20):
            profiles.take([ended(str(at), 20 + at)], 0, HERE)
            await asyncio.sleep(0.001)
        messages = await profiles_until(subscription, "19")
        intervals = (asyncio.get_running_loop().time() - began) / config.experts_seconds
    assert decisions(messages) == [str(at) for at in range(20)]
    assert len(messages) <= intervals + 1


async def test_a_tracker_that_comes_later_is_heard_or_asked(broker: MemoryBroker) -> None:
    bus = MemoryBus(broker)
    async with bus.subscribe(SUBJECTS.requests_profiled()) as subscription, running(broker) as profiles:
        profiles.take([ended()] * 3, 9, HERE)
        await asyncio.sleep(3 * CONFIG.heartbeat_seconds)
        assert (profiles.lost, profiles.waiting_bytes) == (0, 0), "without clusters nothing is kept"
        async with tracking(broker, clusters(2)):
            assert (await known(profiles, subscription)).clusters == 2
        publisher = bus.publisher(SUBJECTS.clusters)
        await publisher.publish(published(clusters(3)))
        async with asyncio.timeout(5):
            while (await known(profiles, subscription)).clusters != 3:
                pass
        await publisher.publish(published(clusters(1), name="another model"))
        await publisher.publish(published(clusters(2)))
        await asyncio.sleep(0.02)
        assert (await known(profiles, subscription)).clusters == 3, (
            "an older version of the same tracker is late, not news"
        )
        await bus.publisher(SUBJECTS.clusters).publish(published(clusters(1)))
        async with asyncio.timeout(5):
            while (await known(profiles, subscription)).clusters != 1:
                pass


async def test_clusters_that_cannot_be_used_are_refused_with_one_line_and_the_ones_before_stay(
    broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    bus = MemoryBus(broker)
    publisher = bus.publisher(SUBJECTS.clusters)
    async with (
        tracking(broker, clusters(1)),
        bus.subscribe(SUBJECTS.requests_profiled()) as subscription,
        running(broker) as profiles,
    ):
        await known(profiles, subscription)
        for version in (2, 3, 4):
            await publisher.publish(published(clusters(version, layers=3)))
        broken = msgspec.structs.replace(clusters(5).record(), sharpness=float("nan"))
        await publisher.publish(ClustersPublished(model="m", record=broken))
        await asyncio.sleep(0.05)
        assert (await known(profiles, subscription)).clusters == 1
        await publisher.publish(published(clusters(6)))
        async with asyncio.timeout(5):
            while (await known(profiles, subscription)).clusters != 6:
                pass
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 2
    assert "3 layers of 4 experts, this engine 2 of 4" in lines[0]
    assert "sharpness" in lines[1]


async def test_after_the_bus_was_away_the_tracker_is_asked_again_and_never_without_need(
    broker: MemoryBroker,
) -> None:
    requests = MemoryBus(broker).subscribe(SUBJECTS.requests_profiled())
    async with tracking(broker, clusters()) as tracker, requests as subscription, running(broker) as profiles:
        await known(profiles, subscription)
        await asyncio.sleep(5 * CONFIG.heartbeat_seconds)
        assert tracker.requests_seen == 1
        broker.reachable = False
        await asyncio.sleep(5 * CONFIG.heartbeat_seconds)
        tracker.model = clusters(2)
        broker.reachable = True
        async with asyncio.timeout(5):
            while (await known(profiles, subscription)).clusters != 2:
                pass
        assert tracker.requests_seen == 2


@pytest.mark.looptime
async def test_a_tracker_that_never_answers_is_asked_ever_more_seldom(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[float] = []
    bus, clock = MemoryBus(broker), asyncio.get_running_loop().time
    feed = ClusterSubscriber(bus, SUBJECTS, "m", SHAPE, 1.0)
    request = bus.request

    async def recorded(subject: str, message: Message) -> Message:
        requested.append(clock())
        return await request(subject, message)

    monkeypatch.setattr(bus, "request", recorded)
    task = asyncio.create_task(feed.run())
    await asyncio.sleep(600)
    assert len(requested) < 600 / 30 + 8
    assert max(later - one for one, later in pairwise(requested)) < 40
    task.cancel()
    await asyncio.wait([task])


async def test_requests_of_another_epoch_or_cluster_version_are_another_message(broker: MemoryBroker) -> None:
    later = Placement(HERE.expert_of_slot[:, ::-1], experts=4, ranks=2, epoch=4)
    async with (
        tracking(broker, clusters()),
        MemoryBus(broker).subscribe(SUBJECTS.requests_profiled()) as subscription,
        running(broker) as profiles,
    ):
        await known(profiles, subscription)
        profiles.take([ended("x")], 0, HERE)
        profiles.take([ended("y"), ended("z")], 0, later)
        messages = await profiles_until(subscription, "z")
    by_epoch = {message.epoch: message.requests for message in messages}
    assert [one.decision for one in by_epoch[0]] == ["x"]
    assert by_epoch[4] == (expected(ended("y"), clusters(), later), expected(ended("z"), clusters(), later))


async def test_only_some_requests_carry_their_counts(broker: MemoryBroker) -> None:
    config = replace(CONFIG, samples_per_second=1e-6, samples_burst=3.0)
    async with (
        tracking(broker, clusters()),
        MemoryBus(broker).subscribe(SUBJECTS.requests_profiled()) as subscription,
        running(broker, config) as profiles,
    ):
        await known(profiles, subscription)
        profiles.take([ended(str(at)) for at in range(5)], 0, HERE)
        (message,) = await profiles_until(subscription, "4")
    sampled = [one.sample is not None for one in message.requests]
    assert sampled == sorted(sampled, reverse=True)
    assert sum(sampled) <= 2


async def test_the_experts_of_sampled_tokens_are_said_of_the_requests_that_carry_their_counts(
    broker: MemoryBroker,
) -> None:
    config = replace(CONFIG, samples_per_second=1e-9, samples_burst=3.0)
    bus = MemoryBus(broker)
    async with (
        tracking(broker, clusters()),
        bus.subscribe(SUBJECTS.tokens_sampled()) as tokens,
        bus.subscribe(SUBJECTS.requests_profiled()) as subscription,
        running(broker, config) as profiles,
    ):
        await known(profiles, subscription)
        many, short = ended("many", 60), ended("short", SAMPLED_TOKENS - 1)
        profiles.take([short, many, ended("unsampled", 50)], 0, HERE)
        await profiles_until(subscription, "unsampled")
        found: list[bytes] = []
        async with asyncio.timeout(5):
            async for received in tokens:
                assert isinstance(received.message, TokensSampled)
                assert (received.message.engine, received.message.rank) == ("a", 1)
                found += received.message.requests
                if len(found) == 2:
                    break
    expected_tokens = [sampled_tokens(one.routed) for one in (ended("first"), many)]
    assert found == [one.astype("<u2").tobytes() for one in expected_tokens if one is not None]


async def test_large_batches_are_several_messages_in_order(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_reports, "MESSAGE_BYTES", 1000)
    async with (
        tracking(broker, clusters()),
        MemoryBus(broker).subscribe(SUBJECTS.requests_profiled()) as subscription,
        running(broker) as profiles,
    ):
        await known(profiles, subscription)
        profiles.take([ended(str(at)) for at in range(40)], 0, HERE)
        messages = await profiles_until(subscription, "39")
    assert decisions(messages) == [str(at) for at in range(40)]
    assert all(len(message.requests) <= 6 for message in messages)


async def test_when_too_much_waits_the_oldest_are_left_out_and_counted(
    broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(CONFIG, profile_queue_bytes=1 << 20)
    async with (
        tracking(broker, clusters()),
        MemoryBus(broker).subscribe(SUBJECTS.requests_profiled()) as subscription,
        running(broker, config) as profiles,
    ):
        await known(profiles, subscription)
        large = [ended(str(at), 40_000) for at in range(9)]  # 320 kB, and 160 kB of blocks
        profiles.take(large, 3, HERE)
        messages = await profiles_until(subscription, "8")
    assert decisions(messages) == ["7", "8"]
    assert [len(one.blocks) // 8 for message in messages for one in message.requests] == [PROFILE_BLOCKS] * 2
    assert profiles.lost >= 3 + 7, "and, on a busy machine, what was still waiting of what `known` let end"
    assert sum("faster than they can be profiled" in record.getMessage() for record in caplog.records) == 1


def test_a_token_bucket_gives_a_burst_and_then_its_rate() -> None:
    bucket = Allowance(2.0, 4.0)
    assert [bucket.take(0.0) for _ in range(6)] == [True] * 4 + [False] * 2
    assert [bucket.take(0.4), bucket.take(0.5), bucket.take(0.6)] == [False, True, False]
    assert sum(bucket.take(at / 10) for at in range(10, 1010)) == pytest.approx(200, abs=2)


@pytest.mark.parametrize(("setting", "value"), [("samples_burst", 0.5), ("profile_queue_bytes", 1000)])
def test_settings_out_of_range_are_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=setting):
        AgentConfig(**{setting: value})


async def test_an_engine_that_moves_its_experts_itself_tells_no_local_share(broker: MemoryBroker) -> None:
    """Its replicas share by the rows of a step; its tokens, and so the blocks of a request, are unknown, too."""
    about = msgspec.structs.replace(ABOUT, rearranges=True)
    routed = np.random.default_rng(1).integers(0, 4, (40, 2, 2)).astype(np.int16)
    trace = RoutedTrace(2, 2)
    trace.note(16, routed)
    async with (
        running(broker, about=about) as profiles,
        tracking(broker, clusters()),
        MemoryBus(broker).subscribe(SUBJECTS.requests_profiled("a")) as subscription,
        MemoryBus(broker).subscribe(SUBJECTS.tokens_sampled()) as tokens,
    ):
        await known(profiles, subscription)
        profiles.take([EndedRequest("d", 30, trace, ())], 0, HERE)
        messages = await profiles_until(subscription, "d")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await anext(aiter(tokens))
    (one,) = [one for message in messages for one in message.requests if one.decision == "d"]
    assert (one.local, one.blocks, one.block_signatures) == (None, b"", b"")
    assert (one.tokens, one.cached_tokens) == (40, 16)
