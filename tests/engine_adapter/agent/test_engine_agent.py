"""The agent of one rank over the memory bus, beside an engine that does what a test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from bus import Declined, Message, Received, Subscription
from bus.claims import NameTaken
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from engine_adapter.agent.copy_runner import Staging
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.batching.routed_experts import RoutedTrace
from engine_adapter.config import AgentConfig, TransferConfig
from engine_adapter.engine import (
    Activations,
    DispatchCounts,
    EndedRequest,
    EngineDescription,
    RankFacts,
    RankLoad,
)
from engine_adapter.transfer.rate_limit import RateLimit
from fleet.blocks import sequence_hashes
from fleet.experts import ModelShape
from fleet.facts.activity import DispatchMeasured, ExpertsActivated, RequestsProfiled
from fleet.facts.demand import ClustersPublished
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvMetrics, KvRemoved, KvStored, RoutedKvEvent
from fleet.facts.engines import Capabilities, EngineHeartbeat, EngineJoined, EngineLeft
from fleet.layout import EP
from fleet.layout_times import LayoutTimes
from fleet.placement import Placement, linear, with_attention
from fleet.requests.demand import DescribeClusters
from fleet.requests.engines import DescribeEngine, DescribeMemory, KvSnapshot, KvSnapshotRequested
from fleet.requests.handovers import DescribeHandover, HandoverDescribed
from fleet.signatures import ClusterModel
from fleet.timing import EngineSpeed
from tests.engine_adapter.rank_fixture import Group, StandingExperts
from tests.voting_workers import Links, Voters

WORKER = 2**63 + 5
SUBJECTS = Subjects()
CONFIG = AgentConfig(
    heartbeat_seconds=0.05,
    facts_seconds=0.01,
    load_seconds=0.1,
    experts_seconds=0.05,
    lease_seconds=0.3,
    farewell_seconds=0.5,
)
IDLE = RankLoad(running=0, waiting=0, prefill_tokens=0, decode_blocks=0, used_blocks=0)
BUSY = RankLoad(running=2, waiting=1, prefill_tokens=40, decode_blocks=6, used_blocks=9)


class PuppetEngine:
    """Behind the Engine port: what `did` is told becomes the next facts."""

    def __init__(self, rank: int = 0, ranks: int = 1, capabilities: Capabilities | None = None) -> None:
        shape = ModelShape(layers=2, experts=4, top_k=2, hidden=8, expert_intermediate=4)
        self.description = EngineDescription(
            model="m", rank=rank, ranks=ranks, block_size=16, kv_blocks=64, max_context=512, max_batch_tokens=128,
            capabilities=capabilities or Capabilities(), shape=shape, tokenizer=b"zip",
        )  # fmt: skip
        self.placement: Placement | None = linear(layers=2, experts=4, ranks=ranks)
        self.handover_seconds = 0.0
        self.experts: StandingExperts | None = None
        self._kv: list[KvChange | str] = []
        self._load = IDLE
        self._activations: Activations | None = None
        self._ended: tuple[EndedRequest, ...] = ()
        self._sent: tuple[DispatchCounts, ...] = ()
        self._new = asyncio.Event()
        self.seen = asyncio.Event()
        """what it did last was looked at"""
        self.looks = 0

    def did(
        self,
        *kv: KvChange | str,
        load: RankLoad | None = None,
        activations: Activations | None = None,
        ended: tuple[EndedRequest, ...] = (),
        sent: tuple[DispatchCounts, ...] = (),
    ) -> None:
        self._kv += kv
        self._sent += sent
        self._ended += ended
        self._load = load or self._load
        self._activations = activations
        self.seen.clear()
        self._new.set()

    async def start(self) -> None: ...

    async def wait_facts(self) -> None:
        await self._new.wait()

    def take_facts(self) -> RankFacts:
        self._new.clear()
        self.seen.set()
        self.looks += 1
        facts = RankFacts(
            kv=tuple(self._kv),
            load=self._load,
            activations=self._activations,
            ended=self._ended,
            sent=self._sent,
        )  # type: ignore[arg-type]
        self._kv, self._activations, self._ended, self._sent = [], None, (), ()
        return facts

    async def run(self) -> None: ...


def stored(*local: int) -> KvChange:
    return KvChange(
        stored=KvStored(
            blocks=tuple(
                KvBlock(block, tokens) for block, tokens in zip(sequence_hashes(local), local, strict=True)
            )
        )
    )


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker(SUBJECTS)


def identity(worker_id: int = WORKER, ranks: int = 1) -> AgentIdentity:
    return AgentIdentity(
        engine="a",
        worker_id=worker_id,
        node="n",
        urls=tuple(f"http://127.0.0.1:{9000 + rank}" for rank in range(ranks)),
    )


@asynccontextmanager
async def running(
    broker: MemoryBroker,
    engine: PuppetEngine,
    who: AgentIdentity | None = None,
    staging: Staging | None = None,
) -> AsyncIterator[Agent]:
    agent = Agent(MemoryBus(broker), SUBJECTS, engine, who or identity(), CONFIG, staging or Staging())
    task = asyncio.create_task(agent.run())
    try:
        async with asyncio.timeout(5):
            await agent.joined.wait()
            yield agent
    finally:
        task.cancel()
        await asyncio.wait([task])


async def next_of(
    feed: Subscription, kind: type, accepted: Callable[[Received], bool] = lambda _: True
) -> Received:
    async with asyncio.timeout(5):
        async for received in feed:
            if isinstance(received.message, kind) and accepted(received):
                return received
    raise AssertionError("the subscription ended")


async def history(broker: MemoryBroker) -> list[object]:
    return [
        received.message async for received in MemoryBus(broker).replay(SUBJECTS.membership(), follow=False)
    ]


async def test_an_engine_joins_beats_describes_itself_and_leaves(broker: MemoryBroker) -> None:
    bus = MemoryBus(broker)
    async with bus.subscribe(SUBJECTS.heartbeats()) as feed:
        async with running(broker, PuppetEngine(), identity()) as agent:
            beats = [await next_of(feed, EngineHeartbeat) for _ in range(3)]
            assert [beat.sequence for beat in beats] == [0, 1, 2]
            assert beats[0].message == EngineHeartbeat(engine="a", worker_id=WORKER, epoch=0)
            described = await bus.request(
                SUBJECTS.describe_engine("a", WORKER), DescribeEngine(worker_id=WORKER)
            )
            assert isinstance(described, EngineJoined)
            assert (described.urls, described.kv_blocks, described.layout) == (
                ("http://127.0.0.1:9000",),
                64,
                EP,
            )
            assert described.tokenizer is not None
            assert await bus.get_blob(described.tokenizer) == b"zip"
            assert described.placement is not None
            assert Placement.from_record(described.placement) == linear(layers=2, experts=4, ranks=1)
            agent.leaving("drained")
    assert await history(broker) == [described, EngineLeft(engine="a", worker_id=WORKER, reason="drained")]
    assert await bus.read_claim(SUBJECTS.claim("a")) is None


async def expire_log(broker: MemoryBroker) -> None:
    """Let everything stored expire, by a record of another engine that comes much later."""
    earlier, later = broker.clock, 2 * broker.config.stream_seconds
    broker.clock = lambda: earlier() + later
    await MemoryBus(broker).record(
        SUBJECTS.membership("b"), EngineLeft(engine="b", worker_id=1, reason="stopped")
    )


async def history_of_a(broker: MemoryBroker) -> list[Message]:
    return [one for one in await history(broker) if getattr(one, "engine", None) == "a"]


@pytest.mark.looptime
async def test_an_engine_whose_join_was_pushed_out_of_the_log_announces_itself_again_and_else_it_does_not(
    broker: MemoryBroker,
) -> None:
    agent = asyncio.create_task(
        Agent(MemoryBus(broker), SUBJECTS, PuppetEngine(), identity(), AgentConfig()).run()
    )
    for _ in range(2):
        await asyncio.sleep(700)
        (first,) = await history_of_a(broker)
        await expire_log(broker)
        assert await history_of_a(broker) == []
        await asyncio.sleep(310)
        assert await history_of_a(broker) == [first]
    agent.cancel()
    await asyncio.wait([agent])


async def test_only_rank_zero_speaks_membership_and_every_rank_its_own_load(broker: MemoryBroker) -> None:
    bus = MemoryBus(broker)
    async with (
        bus.subscribe(SUBJECTS.everything) as feed,
        running(broker, PuppetEngine(rank=1, ranks=2), identity(ranks=2)),
    ):
        kinds = {type((await next_of(feed, object)).message) for _ in range(4)}
    assert kinds == {KvMetrics}
    assert await history(broker) == []


async def test_kv_changes_of_one_look_are_one_message_numbered_from_one(broker: MemoryBroker) -> None:
    engine = PuppetEngine()
    async with MemoryBus(broker).subscribe(SUBJECTS.kv_events) as feed, running(broker, engine):
        first, gone = stored(1, 2), KvChange(removed=KvRemoved(block_hashes=(sequence_hashes([1, 2])[1],)))
        engine.did(first, gone)
        one = await next_of(feed, tuple)
        engine.did("cleared")
        two = await next_of(feed, tuple)
    assert (one.sequence, two.sequence) == (0, 1)
    assert one.publisher_id == two.publisher_id != WORKER
    events = [*one.message, *two.message]  # type: ignore[misc]
    assert all(isinstance(event, RoutedKvEvent) and event.worker_id == WORKER for event in events)
    assert [(event.event.event_id, event.event.data) for event in events] == [
        (1, first),
        (2, gone),
        (3, "cleared"),
    ]


async def test_a_snapshot_of_a_moment_ago_answers_those_who_missed_nothing_later(
    broker: MemoryBroker,
) -> None:
    bus, engine = MemoryBus(broker), PuppetEngine(rank=1, ranks=2)
    subject = SUBJECTS.kv_snapshot("a", WORKER, 1)

    async def sequence_for(after: int | None) -> int:
        answer = await bus.request(subject, KvSnapshotRequested(worker_id=WORKER, rank=1, after=after))
        assert isinstance(answer, KvSnapshot)
        return answer.sequence

    async with bus.subscribe(SUBJECTS.kv_events) as feed, running(broker, engine, identity(ranks=2)):
        assert await sequence_for(-1) == -1
        engine.did(stored(1, 2, 3))
        await next_of(feed, tuple)
        assert await sequence_for(-1) == -1, "of a moment ago"
        assert await sequence_for(0) == 0, "message 0 must be contained"
        assert await sequence_for(-1) == 0
        engine.did(stored(4))
        await next_of(feed, tuple)
        assert await sequence_for(None) == 1


async def test_kv_events_and_snapshots_name_the_epoch_in_which_the_cache_was_last_cleared(
    broker: MemoryBroker,
) -> None:
    bus, engine = MemoryBus(broker), PuppetEngine(rank=1, ranks=2)
    first = linear(layers=2, experts=4, ranks=2)
    engine.placement = with_attention(first, "dp", epoch=3)
    request, subject = KvSnapshotRequested(worker_id=WORKER, rank=1), SUBJECTS.kv_snapshot("a", WORKER, 1)
    async with bus.subscribe(SUBJECTS.kv_events) as feed, running(broker, engine, identity(ranks=2)):
        found = [await bus.request(subject, request)]
        engine.placement = with_attention(first, "dp", epoch=4)
        engine.did(stored(1, 2))
        one = await next_of(feed, tuple)
        assert await bus.request(subject, KvSnapshotRequested(worker_id=WORKER, rank=1, after=0))
        engine.placement = with_attention(first, "tp", epoch=5)
        engine.did(stored(3), "cleared", stored(4))
        two = await next_of(feed, tuple)
        found.append(await bus.request(subject, KvSnapshotRequested(worker_id=WORKER, rank=1, after=0)))
    events = [*one.message, *two.message]  # type: ignore[misc]
    assert [event.epoch for event in events] == [3, 3, 5, 5]
    assert [answer.epoch for answer in found if isinstance(answer, KvSnapshot)] == [3, 5]
    assert isinstance(found[1], KvSnapshot)
    assert [event.data for event in found[1].events] == [stored(4)]


@pytest.mark.parametrize(("tp_refusal", "most"), [("", 128), ("its heads do not divide", 64)])
async def test_rank_0_reports_the_blocks_of_an_engine_that_can_have_tensor_parallel_attention(
    broker: MemoryBroker, tp_refusal: str, most: int
) -> None:
    bus, engine = MemoryBus(broker), PuppetEngine(ranks=2)
    shape = msgspec.structs.replace(engine.description.shape, heads=4, kv_heads=2)
    engine.description = msgspec.structs.replace(engine.description, shape=shape, tp_refusal=tp_refusal)
    blocks = tuple(KvBlock(hash_, hash_) for hash_ in range(1, 200))
    single = tuple(KvChange(stored=KvStored(blocks=(block,))) for block in blocks)
    async with bus.subscribe(SUBJECTS.kv_events) as feed, running(broker, engine, identity(ranks=2)):
        engine.did(*single)
        await next_of(feed, tuple)
        answer = await bus.request(
            SUBJECTS.kv_snapshot("a", WORKER, 0), KvSnapshotRequested(worker_id=WORKER, rank=0)
        )
    assert isinstance(answer, KvSnapshot)
    assert len(answer.events) == most


async def test_a_join_states_the_steps_in_each_layout_and_the_machine_they_were_measured_on(
    broker: MemoryBroker,
) -> None:
    engine, about = PuppetEngine(), {"sequences": (1, 8), "contexts": (64,), "seconds": ((1e-3, 2e-3),)}
    times = tuple(LayoutTimes(layout=name, noise=0.01, prefill_token=1e-4, **about) for name in ("ep", "tp"))
    engine.description = msgspec.structs.replace(engine.description, layout_times=times, hardware="a1b2")
    async with running(broker, engine):
        bus = MemoryBus(broker)
        joined = await bus.request(SUBJECTS.describe_engine("a", WORKER), DescribeEngine(worker_id=WORKER))
    assert isinstance(joined, EngineJoined)
    assert (joined.layout_times, joined.hardware) == (times, "a1b2")


async def test_a_join_states_the_speeds_of_both_attentions(broker: MemoryBroker) -> None:
    engine, speeds = PuppetEngine(), (EngineSpeed(step=1e-3), EngineSpeed(step=2e-3))
    engine.description = msgspec.structs.replace(engine.description, speed=speeds[0], tp_speed=speeds[1])
    async with running(broker, engine):
        bus = MemoryBus(broker)
        joined = await bus.request(SUBJECTS.describe_engine("a", WORKER), DescribeEngine(worker_id=WORKER))
    assert isinstance(joined, EngineJoined)
    assert (joined.speed, joined.tp_speed) == speeds


async def test_a_snapshot_holds_what_the_last_published_message_left(broker: MemoryBroker) -> None:
    bus, engine = MemoryBus(broker), PuppetEngine(rank=1, ranks=2)
    request, subject = KvSnapshotRequested(worker_id=WORKER, rank=1), SUBJECTS.kv_snapshot("a", WORKER, 1)
    async with bus.subscribe(SUBJECTS.kv_events) as feed, running(broker, engine, identity(ranks=2)):
        empty = await bus.request(subject, request)
        assert isinstance(empty, KvSnapshot)
        assert (empty.sequence, empty.events) == (-1, ())
        engine.did(stored(1, 2, 3))
        published = await next_of(feed, tuple)
        full = await bus.request(subject, request)
    assert isinstance(full, KvSnapshot)
    assert (full.publisher_id, full.sequence) == (published.publisher_id, 0)
    assert [event.data for event in full.events] == [stored(1, 2, 3)]
    assert {event.dp_rank for event in full.events} == {1}


async def test_load_is_said_when_it_changes_and_from_time_to_time(broker: MemoryBroker) -> None:
    engine = PuppetEngine()
    async with MemoryBus(broker).subscribe(SUBJECTS.kv_metrics) as feed, running(broker, engine):
        await next_of(feed, KvMetrics)
        engine.did(load=BUSY)
        changed = await next_of(feed, KvMetrics, lambda received: received.message.running == 2)  # type: ignore[union-attr]
        again = await next_of(feed, KvMetrics)
    assert changed.message == again.message
    assert changed.message == KvMetrics(
        worker_id=WORKER,
        active_decode_blocks=6,
        active_prefill_tokens=40,
        kv_used_blocks=9,
        running=2,
        waiting=1,
    )


async def test_a_restless_engine_is_looked_at_a_bounded_number_of_times(broker: MemoryBroker) -> None:
    engine = PuppetEngine()
    async with running(broker, engine):
        looks, until = engine.looks, asyncio.get_running_loop().time() + 0.3
        while asyncio.get_running_loop().time() < until:
            engine.did()
            await asyncio.sleep(0)
    assert engine.looks - looks <= 0.3 / CONFIG.facts_seconds + 2


async def test_activated_experts_of_an_interval_are_summed_and_silence_says_nothing(
    broker: MemoryBroker,
) -> None:
    engine = PuppetEngine()
    async with MemoryBus(broker).subscribe(SUBJECTS.experts()) as feed, running(broker, engine):
        for _ in range(2):
            engine.did(activations=Activations(counts=np.full((2, 4), 3), tokens=6, cached_tokens=16))
        got = tokens = 0
        counts = np.zeros((2, 4))
        while tokens < 6:
            message = (await next_of(feed, ExpertsActivated)).message
            assert isinstance(message, ExpertsActivated)
            got, tokens, counts = got + 1, tokens + message.tokens, counts + message.counts.array()
            assert (message.engine, message.rank, message.model, message.epoch) == ("a", 0, "m", 0)
            assert message.seconds >= CONFIG.experts_seconds
        assert (counts == 3).all()
        engine.did(activations=Activations(counts=np.zeros((2, 4), np.int64), tokens=0, cached_tokens=0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4 * CONFIG.experts_seconds):
                await next_of(feed, ExpertsActivated)


async def test_a_report_of_activated_experts_is_of_one_epoch_and_a_flip_ends_it_early(
    broker: MemoryBroker,
) -> None:
    engine, per_token = PuppetEngine(), np.ones((2, 4), np.int64)
    second = Placement(linear(layers=2, experts=4, ranks=1).expert_of_slot, experts=4, ranks=1, epoch=1)
    async with MemoryBus(broker).subscribe(SUBJECTS.experts()) as feed, running(broker, engine):
        engine.did(activations=Activations(counts=per_token, tokens=1, cached_tokens=0))
        await engine.seen.wait()
        engine.placement = second
        engine.did(activations=Activations(counts=2 * per_token, tokens=2, cached_tokens=0))
        reports = [(await next_of(feed, ExpertsActivated)).message for _ in range(2)]
    assert [(one.epoch, one.tokens) for one in reports] == [(0, 1), (1, 2)]  # type: ignore[union-attr]
    assert all(one.seconds > 0 for one in reports)  # type: ignore[union-attr]


def sent(epoch: int, steps: int) -> DispatchCounts:
    """Of 2 layers and top 2: each step takes 10 ms and has one token here, which goes elsewhere in the second
    layer."""
    zero, one = np.zeros(2), np.full(2, float(steps))
    return DispatchCounts(
        epoch,
        steps,
        0.01 * steps,
        steps,
        2 * steps,
        one * [0, 1],
        2 * one - one * [0, 2],
        one + zero,
        0.5 * one,
    )


async def test_where_tokens_were_sent_is_summed_over_an_interval_and_said_with_who_says_it(
    broker: MemoryBroker,
) -> None:
    engine = PuppetEngine(rank=1, ranks=2)
    async with (
        MemoryBus(broker).subscribe(SUBJECTS.dispatched()) as feed,
        running(broker, engine, identity(ranks=2)),
    ):
        total, reports = 0, 0
        for _ in range(3):
            engine.did(sent=(sent(0, 2),))
            await engine.seen.wait()
        while total < 6:
            message = (await next_of(feed, DispatchMeasured)).message
            assert isinstance(message, DispatchMeasured)
            assert (message.engine, message.worker_id, message.rank, message.model, message.epoch) == (
                "a",
                WORKER,
                1,
                "m",
                0,
            )
            assert message.seconds >= CONFIG.experts_seconds
            steps = message.steps
            assert (message.tokens, message.pairs, message.step_seconds) == (
                steps,
                2 * steps,
                pytest.approx(0.01 * steps),
            )
            assert (message.remote_ranks, message.local, message.served, message.balance) == (
                (0, steps),
                (2 * steps, 0),
                (steps, steps),
                (steps / 2,) * 2,
            )
            total, reports = total + steps, reports + 1
        assert reports <= 3
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4 * CONFIG.experts_seconds):
                await next_of(feed, DispatchMeasured)


async def test_a_report_of_where_tokens_were_sent_is_of_one_epoch_however_many_there_were_between_two_looks(
    broker: MemoryBroker,
) -> None:
    engine = PuppetEngine()
    async with MemoryBus(broker).subscribe(SUBJECTS.dispatched()) as feed, running(broker, engine):
        engine.did(sent=(sent(0, 1),))
        await engine.seen.wait()
        engine.did(sent=(sent(0, 2), sent(1, 4)))
        await engine.seen.wait()
        engine.did(sent=(sent(1, 8), sent(2, 16)))
        steps: dict[int, int] = {}
        while (
            2 not in steps
        ):  # a busy machine may take longer than an interval between two looks: then there is a report more
            message = (await next_of(feed, DispatchMeasured)).message
            assert isinstance(message, DispatchMeasured)
            assert message.epoch >= max(steps, default=0)
            assert message.seconds >= message.step_seconds > 0
            steps[message.epoch] = steps.get(message.epoch, 0) + message.steps
    assert steps == {0: 3, 1: 12, 2: 16}


async def test_reads_of_experts_are_limited_while_the_engine_steps(broker: MemoryBroker) -> None:
    limit, engine, clock = RateLimit.of(TransferConfig()), PuppetEngine(), asyncio.get_running_loop().time
    async with running(broker, engine, staging=Staging(limit=limit)):
        limit.begin(1 << 30, clock())
        assert limit.wait(clock()) == 0.0
        engine.did(sent=(sent(0, 3), sent(1, 1)))
        await engine.seen.wait()
        assert limit.piece_bytes(clock()) < TransferConfig().piece_bytes
        limit.begin(1 << 30, clock())
        assert limit.wait(clock()) > 1.0


@asynccontextmanager
async def tracking(broker: MemoryBroker) -> AsyncIterator[list[Message]]:
    """A tracker that knows clusters of 2 layers x 4 experts; what it was asked."""
    requested: list[Message] = []
    clusters = ClusterModel(3, np.full((2, 2, 4), 0.25, np.float32), np.float32([1, 0]), 0.1)

    async def answer(request: Message) -> Message:
        requested.append(request)
        return ClustersPublished(model="m", record=clusters.record())

    async with MemoryBus(broker).serve(SUBJECTS.describe_profile, answer):
        yield requested


async def test_what_an_ended_request_activated_is_said_beside_the_counts_and_on_any_rank(
    broker: MemoryBroker,
) -> None:
    bus, engine = MemoryBus(broker), PuppetEngine(rank=1, ranks=2)
    routed = np.array([[[0, 1], [2, 3]]] * 20, np.int16)
    requests = bus.subscribe(SUBJECTS.requests_profiled())
    async with (
        tracking(broker) as requested,
        requests as feed,
        running(broker, engine, identity(ranks=2)),
        asyncio.timeout(5),
    ):
        message = None
        while message is None:
            engine.did(ended=(EndedRequest("d-1", 12, RoutedTrace.of(routed), [KvBlock(77, 7)]),))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(4 * CONFIG.experts_seconds):
                    message = (await next_of(feed, RequestsProfiled)).message
    assert isinstance(message, RequestsProfiled)
    assert (
        message.engine,
        message.worker_id,
        message.rank,
        message.model,
        message.epoch,
        message.clusters,
    ) == ("a", WORKER, 1, "m", 0, 3)
    one = message.requests[0]
    assert (one.decision, one.tokens, one.cached_tokens, one.local) == ("d-1", 20, 0, 0.5)
    assert (one.blocks, one.parent, one.block_size) == ((77).to_bytes(8, "little"), None, 16)
    assert one.sample is not None
    assert one.sample.prompt.array().tolist() == [[12, 12, 0, 0], [0, 0, 12, 12]]
    assert requested == [DescribeClusters(model="m")]


async def test_an_engine_that_says_nothing_of_experts_never_asks_for_clusters(broker: MemoryBroker) -> None:
    async with (
        tracking(broker) as requested,
        running(broker, PuppetEngine(capabilities=Capabilities(experts=False))),
    ):
        await asyncio.sleep(4 * CONFIG.heartbeat_seconds)
    assert requested == []


async def test_what_an_engine_cannot_report_is_not_published(broker: MemoryBroker) -> None:
    engine = PuppetEngine(
        capabilities=Capabilities(kv_events=False, load=False, experts=False, token_ids=False)
    )
    async with MemoryBus(broker).subscribe(SUBJECTS.everything) as feed, running(broker, engine):
        engine.did(
            stored(1),
            load=BUSY,
            activations=Activations(counts=np.ones((2, 4)), tokens=1, cached_tokens=0),
            sent=(sent(0, 1), sent(1, 1)),
        )
        kinds = {type((await next_of(feed, object)).message) for _ in range(6)}
    assert kinds <= {EngineJoined, EngineHeartbeat}


async def test_a_second_engine_of_the_same_name_is_refused_and_the_first_serves_on(
    broker: MemoryBroker,
) -> None:
    async with running(broker, PuppetEngine()) as first:
        with pytest.raises(ExceptionGroup) as caught:
            await Agent(MemoryBus(broker), SUBJECTS, PuppetEngine(), identity(7), CONFIG).run()
        assert caught.group_contains(NameTaken, match="'a' is taken")
        assert first.joined.is_set()
    assert [type(message) for message in await history(broker)] == [EngineJoined, EngineLeft]


async def test_a_bus_that_was_away_hears_the_join_again_and_the_name_is_still_ours(
    broker: MemoryBroker,
) -> None:
    bus = MemoryBus(broker)
    async with running(broker, PuppetEngine()):
        broker.reachable = False
        await asyncio.sleep(3 * CONFIG.heartbeat_seconds)
        broker.reachable = True
        async with bus.subscribe(SUBJECTS.heartbeats()) as feed:
            beat = await next_of(feed, EngineHeartbeat)
            assert beat.sequence > 0
        async with asyncio.timeout(5):
            before, after = await first_of(bus.replay(SUBJECTS.membership()), 2)
    assert before.message == after.message
    assert [type(message) for message in await history(broker)] == [EngineJoined, EngineJoined, EngineLeft]


async def test_an_engine_that_announces_itself_again_names_the_placement_that_it_serves_by_then(
    broker: MemoryBroker,
) -> None:
    engine, bus = PuppetEngine(), MemoryBus(broker)
    assert engine.placement is not None
    async with running(broker, engine):
        broker.reachable = False
        await asyncio.sleep(3 * CONFIG.heartbeat_seconds)
        engine.placement = Placement(engine.placement.expert_of_slot[:, ::-1], experts=4, ranks=1, epoch=3)
        broker.reachable = True
        async with asyncio.timeout(5):
            _, again = await first_of(bus.replay(SUBJECTS.membership()), 2)
        async with bus.subscribe(SUBJECTS.heartbeats()) as feed:
            beat = await next_of(feed, EngineHeartbeat)
    assert isinstance(again.message, EngineJoined)
    assert again.message.placement == engine.placement.record()
    assert beat.message.epoch == 3  # type: ignore[union-attr]


async def test_an_engine_whose_experts_stay_where_they_are_refuses_handovers_in_a_sentence(
    broker: MemoryBroker,
) -> None:
    bus = MemoryBus(broker)
    async with running(broker, PuppetEngine()):
        with pytest.raises(Declined, match="a cannot move its experts"):
            await bus.request(SUBJECTS.handover("a", WORKER, 0), DescribeHandover(worker_id=WORKER, rank=0))
        with pytest.raises(Declined, match="a does not state the memory that it uses"):
            await bus.request(SUBJECTS.handover("a", WORKER, 0), DescribeMemory(worker_id=WORKER, rank=0))


async def test_the_agent_of_the_first_target_takes_part_for_all_expert_ranks_of_an_engine_that_rearranges(
    broker: MemoryBroker,
) -> None:
    placement, bus = linear(layers=1, experts=4, ranks=2), MemoryBus(broker)
    engines = [PuppetEngine(rank, 2) for rank in (0, 1)]
    for engine in engines:
        engine.description = msgspec.structs.replace(engine.description, rearranges=True)
        engine.placement = placement
    links = Links(Voters(placement))
    first = Agent(bus, SUBJECTS, engines[0], identity(), CONFIG, rearranger=links)
    second = Agent(bus, SUBJECTS, engines[1], identity(), CONFIG)
    tasks = [asyncio.create_task(agent.run()) for agent in (second, first)]
    async with asyncio.timeout(5):
        await first.joined.wait()
        for rank in (0, 1):
            subject = SUBJECTS.handover("a", WORKER, rank)
            described = await bus.request(subject, DescribeHandover(worker_id=WORKER, rank=rank))
            assert isinstance(described, HandoverDescribed)
            assert (described.rank, described.state, described.free) == (rank, "serving", 0)
        joined = await bus.request(SUBJECTS.describe_engine("a", WORKER), DescribeEngine(worker_id=WORKER))
        assert isinstance(joined, EngineJoined)
        assert joined.rearranges
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_the_agent_of_an_engine_that_hands_experts_over_answers_the_coordinator(
    broker: MemoryBroker,
) -> None:
    engine, bus = PuppetEngine(), MemoryBus(broker)
    assert engine.placement is not None
    engine.experts = StandingExperts(Group(engine.placement, broker), 0)
    async with running(broker, engine) as agent:
        described = await bus.request(
            SUBJECTS.handover("a", WORKER, 0), DescribeHandover(worker_id=WORKER, rank=0)
        )
        assert agent.handovers is not None
    assert isinstance(described, HandoverDescribed)
    assert (described.state, described.served, described.free) == (
        "serving",
        0,
        engine.placement.slots_per_rank,
    )
    engine.experts.memory.close()


async def test_leaving_is_bounded_when_the_bus_is_gone(broker: MemoryBroker) -> None:
    clock = asyncio.get_running_loop().time
    async with running(broker, PuppetEngine()):
        broker.reachable = False
        before = clock()
    assert clock() - before < CONFIG.farewell_seconds + 1


async def first_of(replay: AsyncIterator[Received], limit: int) -> list[Received]:
    """The first few of a replay that never ends."""
    found: list[Received] = []
    async for received in replay:
        found.append(received)
        if len(found) == limit:
            break
    return found


@pytest.mark.parametrize("name", AgentConfig.__slots__)
def test_settings_out_of_range_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        AgentConfig(**{name: 0})
