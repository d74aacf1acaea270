"""View built from the bus: live engines, loads, placements and tokenizers; and ignored messages."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest

from bus import Message
from bus.memory import MemoryBroker, MemoryBus
from fleet.blocks import local_hashes
from fleet.facts.demand import ClustersPublished
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import Capabilities, EngineHeartbeat, EngineJoined, EngineLeft
from fleet.facts.placements import HomesPublished, PlacementCommitted
from fleet.layout import DP_ATTENTION, AttentionLayout
from fleet.placement import Placement, linear, with_attention, with_rows
from fleet.requests.demand import DescribeClusters, DescribeProfile, DescribeTables
from fleet.requests.engines import DescribeEngine, KvSnapshot
from router.config import RouterConfig
from router.prediction.predictor import PredictionKeys
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.decision import Decision
from router.scheduling.routing_request import RoutingRequest
from router.service import RouterService
from tests.name_claims import claim_name
from tests.router.learnt_tables import clusters, halves, published_clusters, tables
from tests.router.router_fixture import engine_joined, metric, running, stored, until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """A router's service on a bus, and publishers for the other parties."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.subjects = self.broker.subjects
        self.service = RouterService(
            MemoryBus(self.broker), self.subjects, RouterConfig(**settings), self.clock
        )

    async def join(self, joined: EngineJoined) -> EngineJoined:
        await self.bus.record(self.subjects.membership(joined.engine), joined)
        return joined

    async def beat(self, joined: EngineJoined, epoch: int = 0) -> None:
        await self.bus.publisher(self.subjects.heartbeats(joined.engine)).publish(
            EngineHeartbeat(engine=joined.engine, worker_id=joined.worker_id, epoch=epoch)
        )

    def excluded(self) -> dict[str, str]:
        return {out.engine: out.reason for out in self.service.view.target_table("demo").excluded}

    def names(self) -> list[str]:
        return [target.name for target in self.service.view.target_table("demo").targets]

    def target(self) -> Any:
        return self.service.view.target_table("demo").targets[0]


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    async with running(fleet.service):
        yield fleet


def text_engine(engine: str, **about: Any) -> EngineJoined:
    """Return an engine that needs no tokenizer."""
    return engine_joined(engine, ["http://h:1", "http://h:2"], None, **about)


async def test_an_engine_is_routed_to_once_its_heart_beats(fleet: Fleet) -> None:
    joined = await fleet.join(text_engine("a"))
    await until(lambda: fleet.excluded())
    assert fleet.excluded() == {"a": "no heartbeat received yet"}
    assert not fleet.service.ready
    await fleet.beat(joined)
    await until(lambda: fleet.names() == ["a/0", "a/1"])
    await until(lambda: fleet.service.ready)


async def test_three_silent_seconds_mean_death_and_a_heartbeat_life(fleet: Fleet) -> None:
    joined = await fleet.join(text_engine("a"))
    await fleet.beat(joined)
    await until(lambda: fleet.names())
    fleet.clock.now += 3.1
    await until(lambda: not fleet.names())
    assert fleet.excluded()["a"].startswith("dead")
    await fleet.beat(joined)
    await until(lambda: fleet.names())


async def test_a_router_that_starts_late_receives_earlier_joins() -> None:
    fleet = Fleet()
    joined = await fleet.join(text_engine("a"))
    gone = await fleet.join(text_engine("b"))
    await fleet.bus.record(
        fleet.subjects.membership("b"), EngineLeft(engine="b", worker_id=gone.worker_id, reason="stopped")
    )
    async with running(fleet.service):
        await until(lambda: fleet.excluded())
        await fleet.beat(joined)
        await until(lambda: fleet.names())
        assert "b" not in fleet.excluded()


async def test_an_engine_that_leaves_is_not_routed_to_any_more(fleet: Fleet) -> None:
    joined = await fleet.join(text_engine("a"))
    await fleet.beat(joined)
    await until(lambda: fleet.names())
    await fleet.bus.record(
        fleet.subjects.membership("a"), EngineLeft(engine="a", worker_id=joined.worker_id, reason="stopped")
    )
    await until(lambda: not fleet.names())
    await fleet.beat(joined)
    await asyncio.sleep(0.01)
    assert fleet.excluded()["a"].startswith("left")


async def test_an_unknown_engine_with_a_heartbeat_is_asked_to_describe_itself(fleet: Fleet) -> None:
    joined = text_engine("stranger")

    async def describe(request: Message) -> Message:
        assert request == DescribeEngine(worker_id=joined.worker_id)
        return joined

    await claim_name(fleet.bus, joined)
    async with fleet.bus.serve(fleet.subjects.describe_engine(joined.engine, joined.worker_id), describe):
        await fleet.beat(joined)
        await until(lambda: fleet.names() == ["stranger/0", "stranger/1"])


async def test_a_stranger_that_bears_a_living_engines_name_is_not_used(fleet: Fleet) -> None:
    honest = await fleet.join(text_engine("a", worker_id=1))
    await fleet.beat(honest)
    await until(lambda: fleet.names())
    impostor, described = text_engine("a", worker_id=2), asyncio.Event()

    async def describe(_: Message) -> Message:
        described.set()
        return impostor

    async with fleet.bus.serve(fleet.subjects.describe_engine("a", 2), describe):
        await fleet.beat(impostor)
        await described.wait()
        await asyncio.sleep(0.01)
    assert fleet.target().key == (1, 0)


async def test_a_restarted_engine_replaces_its_former_self(fleet: Fleet) -> None:
    for worker_id in (1, 2):
        joined = await fleet.join(text_engine("a", worker_id=worker_id))
        await fleet.beat(joined)
        await until(lambda worker_id=worker_id: fleet.names() and fleet.target().key[0] == worker_id)
    assert len(fleet.names()) == 2
    assert fleet.service.view.engine(1) is None


async def test_load_reports_enter_the_next_decision(fleet: Fleet) -> None:
    joined = await fleet.join(text_engine("a"))
    await fleet.beat(joined)
    await until(lambda: fleet.names())
    report = KvMetrics(
        worker_id=joined.worker_id,
        dp_rank=1,
        active_decode_blocks=30,
        active_prefill_tokens=200,
        running=2,
        waiting=1,
    )
    await fleet.bus.publisher(fleet.subjects.kv_metrics).publish(report)
    target_table = fleet.service.view.target_table("demo")
    reservations = fleet.service.scheduler.reservations
    await until(
        lambda: (
            reservations.load(target_table.rows, fleet.clock()).tolist()
            == [[0, 200], [0, 3], [0, 30], [0, 3 * 64]]
        )
    )


async def test_a_handover_in_progress_costs_what_heartbeats_say_until_they_say_it_is_over(
    fleet: Fleet,
) -> None:
    joined = await fleet.join(text_engine("a"))
    await fleet.beat(joined)
    await until(lambda: fleet.names() and "no clusters" in str(fleet.target().note))  # its prices are made
    view, target_table = fleet.service.view, fleet.service.view.target_table("demo")
    heartbeats = fleet.bus.publisher(fleet.subjects.heartbeats("a"))
    for seconds, expected in ((0.75, [0.75, 0.75]), (float("nan"), [0.75, 0.75]), (0.0, None)):
        await heartbeats.publish(
            EngineHeartbeat(engine="a", worker_id=joined.worker_id, epoch=0, handover_seconds=seconds)
        )
        await until(
            lambda expected=expected: (
                (None if (found := view.handovers(target_table)) is None else found.tolist()) == expected
            )
        )
    await until(
        lambda: "roost_router_bus_messages_refused_total 1.0" in fleet.service.metrics.exposition().decode()
    )
    assert view.target_table("demo") is target_table, "nothing is built anew every second"


async def test_a_committed_placement_changes_the_expert_prices(fleet: Fleet) -> None:
    joined = await fleet.join(text_engine("a"))
    await fleet.beat(joined)
    await until(lambda: fleet.names() and "no clusters" in str(fleet.target().note))
    await fleet.bus.publisher(fleet.subjects.clusters).publish(published_clusters(halves()))
    await until(lambda: fleet.target().note is None)
    before = fleet.service.view.prices("demo").flat
    everywhere = Placement(np.tile(np.arange(4, dtype=np.int16), (2, 2)), experts=4, ranks=2, epoch=1)
    committed = PlacementCommitted(
        engine="a", worker_id=joined.worker_id, attention=DP_ATTENTION, placement=everywhere.record()
    )
    await fleet.bus.record(fleet.subjects.placements("a"), committed)
    await until(lambda: fleet.target().epoch == 1 and fleet.target().note is None)
    assert before[:2].min() > 0
    assert fleet.service.view.prices("demo").flat == pytest.approx(
        np.array([[0, 0]] * 4 + [[1, 1]] * 2 + [[0, 0]])
    )


async def test_homes_of_the_next_placement_wait_on_the_bus_for_it_and_come_with_its_prices(
    fleet: Fleet,
) -> None:
    joined = await fleet.join(text_engine("a"))
    await fleet.beat(joined)
    await fleet.bus.publisher(fleet.subjects.clusters).publish(published_clusters(halves()))
    await until(lambda: fleet.names() and fleet.target().note is None)
    share = np.eye(2, dtype="<f4").tobytes()
    homes = HomesPublished(
        engine="a",
        worker_id=joined.worker_id,
        model="demo",
        version=3,
        epoch=1,
        clusters=1,
        count=2,
        ranks=2,
        homes=share,
    )
    await fleet.bus.publisher(fleet.subjects.homes).publish(homes)
    await until(lambda: fleet.service.view.prices("demo").versions.coming == {"a": (3, 1)})
    assert fleet.service.view.prices("demo").homes is None
    everywhere = Placement(np.tile(np.arange(4, dtype=np.int16), (2, 2)), experts=4, ranks=2, epoch=1)
    committed = PlacementCommitted(
        engine="a", worker_id=joined.worker_id, attention=DP_ATTENTION, placement=everywhere.record()
    )
    await fleet.bus.record(fleet.subjects.placements("a"), committed)
    await until(lambda: fleet.target().epoch == 1 and fleet.target().note is None)
    found = fleet.service.view.prices("demo")
    assert found.versions == ({"a": 1}, {"a": (3, 1)}, {})
    assert found.homes is not None
    assert found.homes.tolist() == [[2, 0], [0, 2]]


async def test_a_heartbeat_of_another_epoch_makes_the_router_ask(fleet: Fleet) -> None:
    joined = await fleet.join(text_engine("a"))
    await fleet.beat(joined)
    await until(lambda: fleet.names())
    newer = linear(layers=2, experts=4, ranks=2, slots_per_rank=3)
    newer.epoch = 4
    moved = text_engine("a", placement=newer.record())

    async def describe(_: Message) -> Message:
        return moved

    async with fleet.bus.serve(fleet.subjects.describe_engine(joined.engine, joined.worker_id), describe):
        await fleet.beat(joined, epoch=4)
        await until(lambda: fleet.target().epoch == 4)


async def test_clusters_are_requested_at_the_start_and_followed_from_then_on() -> None:
    fleet = Fleet()

    async def describe(request: Message) -> Message:
        assert request in (DescribeClusters(model="demo"), DescribeTables(model="demo"))
        return published_clusters(halves(3)) if isinstance(request, DescribeClusters) else tables()

    async with fleet.bus.serve(fleet.subjects.describe_profile, describe), running(fleet.service):
        await fleet.beat(await fleet.join(text_engine("a")))
        await until(lambda: fleet.names() and fleet.target().note is None)
        near, far = fleet.service.view.prices("demo").flat[0]
        assert near < far
        mirrored = clusters([[[1, 1, 9, 9]] * 2, [[9, 9, 1, 1]] * 2], version=4)
        await fleet.bus.publisher(fleet.subjects.clusters).publish(published_clusters(mirrored))
        await until(lambda: fleet.service.view.prices("demo").flat[0] == pytest.approx([far, near]))


async def test_an_engines_tokenizer_is_fetched_before_it_is_used(fleet: Fleet, byte_archive: bytes) -> None:
    digest = "0" * 64
    early = await fleet.join(engine_joined("early", ["http://h:1"], digest))
    await fleet.beat(early)
    await until(lambda: "cannot be fetched" in fleet.excluded().get("early", ""))
    ready = await fleet.join(engine_joined("ready", ["http://h:1"], await fleet.bus.put_blob(byte_archive)))
    await fleet.beat(ready)
    await until(lambda: fleet.names() == ["ready/0"])
    assert fleet.service.tokenizer(ready.tokenizer) is not None


async def test_a_tokenizer_that_is_none_keeps_its_engine_out_and_says_why(fleet: Fleet) -> None:
    joined = await fleet.join(engine_joined("bad", ["http://h:1"], await fleet.bus.put_blob(b"no zip")))
    await fleet.beat(joined)
    await until(lambda: "not a readable zip" in fleet.excluded().get("bad", ""))


async def test_garbage_and_contradictions_stop_nothing(fleet: Fleet) -> None:
    subjects = fleet.subjects
    for subject in (
        subjects.heartbeats("x"),
        subjects.kv_events,
        subjects.kv_metrics,
        subjects.tables,
        subjects.clusters,
        subjects.membership("x"),
        subjects.placements("x"),
    ):
        for raw in (b"", b"\xff" * 50, b"{}", b"\x81\xa4kind\xa5Never"):
            fleet.broker.deliver(subject, raw)
    joined = text_engine("broken")
    assert joined.placement is not None
    await fleet.join(
        text_engine(
            "broken",
            placement=type(joined.placement)(
                epoch=0, experts=4, layers=2, ranks=2, slots_per_rank=2, slots=b"xx"
            ),
        )
    )
    await fleet.join(msgspec.structs.replace(text_engine("nowhere"), urls=()))
    short = msgspec.structs.replace(halves().record(), profiles=b"short")
    await fleet.bus.publisher(subjects.clusters).publish(ClustersPublished(model="demo", record=short))
    absurd = KvMetrics(worker_id=1, active_prefill_tokens=2**63)
    await fleet.bus.publisher(subjects.kv_metrics).publish(absurd)
    await fleet.bus.publisher(subjects.heartbeats("e")).publish(DescribeProfile(model="demo"))
    await until(lambda: metric(fleet.service.metrics, "bus_messages_refused_total") == 4)
    await fleet.beat(await fleet.join(text_engine("good")))
    await until(lambda: fleet.names() == ["good/0", "good/1"])


async def test_the_cached_prefix_of_a_rank_wins_the_decision(fleet: Fleet) -> None:
    """Follow KV events from the bus to the term of a decision."""
    tokens = list(range(100))
    joined = await fleet.join(text_engine("a", capabilities=Capabilities()))
    await fleet.beat(joined)
    await until(lambda: fleet.names())
    event = stored(local_hashes(tokens, 4)[:20], worker=joined.worker_id, rank=1)

    async def snapshot(request: Any) -> Message:
        events = (event.event,) if request.rank == 1 else ()
        return KvSnapshot(
            worker_id=joined.worker_id, rank=request.rank, publisher_id=5, sequence=0, events=events
        )

    async with contextlib.AsyncExitStack() as stack:
        for rank in (0, 1):
            await stack.enter_async_context(
                fleet.bus.serve(fleet.subjects.kv_snapshot(joined.engine, joined.worker_id, rank), snapshot)
            )
        assert fleet.service.fleet_subscriber is not None
        feeds = fleet.service.fleet_subscriber
        await until(lambda: feeds.kv.in_step((joined.worker_id, 1)))
    decision = fleet.service.decide(RoutingRequest("demo", TokenPrompt(tokens), 120, 10, None), "d")
    assert decision.target.name == "a/1"
    assert decision.record().candidates[0].overlap_blocks == 20
    assert decision.cached_tokens == 80
    fleet.service.forget_worker(joined.worker_id)
    assert fleet.service.scheduler.kv.block_index.overlaps(TokenPrompt(tokens).chained(4)) == {}


async def test_an_engine_that_changes_its_attention_becomes_one_target_and_its_sessions_stay_with_it() -> (
    None
):
    fleet, tokens = Fleet(session_affinity_seconds=60.0), list(range(100))
    about = {"capabilities": Capabilities(), "tp_refusal": "", "unshardable": ""}
    one, other = [await fleet.join(text_engine(name, **about)) for name in ("a", "b")]
    every = with_rows(linear(layers=2, experts=4, ranks=2), {0: None, 1: None}, epoch=1)
    epochs = {one.worker_id: 0, other.worker_id: 0}
    event = stored(local_hashes(tokens, 4)[:20], worker=one.worker_id, rank=1)

    async def snapshot(request: Any) -> Message:
        return KvSnapshot(
            worker_id=request.worker_id,
            rank=request.rank,
            publisher_id=5,
            sequence=0,
            events=(event.event,) if (request.worker_id, request.rank) == (one.worker_id, 1) else (),
            epoch=epochs[request.worker_id],
        )

    def decision(session: int = 0) -> Decision:
        request = RoutingRequest(
            "demo", TokenPrompt(tokens), 120, 10, None, keys=PredictionKeys(session=session)
        )
        return fleet.service.decide(request, "d")

    async def serve(placement: Placement) -> None:
        attention = AttentionLayout(kind=placement.attention)
        committed = PlacementCommitted(
            engine="a", worker_id=one.worker_id, attention=attention, placement=placement.record()
        )
        await fleet.bus.record(fleet.subjects.placements("a"), committed)
        await until(lambda: fleet.target().epoch == placement.epoch)

    async with running(fleet.service), contextlib.AsyncExitStack() as stack:
        for joined in (one, other):
            await fleet.beat(joined)
            for rank in (0, 1):
                subject = fleet.subjects.kv_snapshot(joined.engine, joined.worker_id, rank)
                await stack.enter_async_context(fleet.bus.serve(subject, snapshot))
        assert fleet.service.fleet_subscriber is not None
        feeds = fleet.service.fleet_subscriber.kv
        await until(lambda: len(fleet.names()) == 4 and not feeds.out_of_step())
        first = decision(session=7)
        assert (first.target.name, first.cached_tokens) == ("a/1", 80)
        fleet.service.scheduler.book(first, TokenPrompt(tokens), fleet.clock())
        await serve(every)
        assert decision().cached_tokens == 80, "layers that turn over leave the KV alone"
        await serve(with_attention(every, "tp", epoch=2))
        assert fleet.names() == ["a/0", "b/0", "b/1"]
        assert decision(session=7).cached_tokens == 0, "what was known is of the epoch before"
        assert decision(session=7).record().session_rank == "a/0"
        epochs[one.worker_id] = 2
        await until(lambda: not feeds.out_of_step())
        await serve(with_attention(every, "dp", epoch=3))
        assert fleet.names() == ["a/0", "a/1", "b/0", "b/1"]
        assert decision(session=7).record().session_rank is None, "its KV may be on any rank"


async def test_the_service_leaves_nothing_running(byte_archive: bytes) -> None:
    fleet = Fleet()
    async with running(fleet.service):
        await fleet.beat(
            await fleet.join(engine_joined("a", ["http://h:1"], await fleet.bus.put_blob(byte_archive)))
        )
        await until(lambda: fleet.names())
    assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()
