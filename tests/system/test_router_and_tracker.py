"""The closed loop of prediction in one process: a router and a tracker on a memory bus, before an engine that
is played.

Requests are of two kinds that write with different words and want different experts; each kind's experts live
on one rank.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from bus.memory import MemoryBroker, MemoryBus
from fleet.blocks import local_hashes, sequence_hashes
from fleet.experts import ModelShape
from fleet.facts.activity import RequestProfile, RequestsProfiled, SampledProfile
from fleet.facts.demand import ClustersPublished
from fleet.facts.engines import Capabilities, EngineHeartbeat, EngineJoined
from fleet.layout import DP_ATTENTION
from fleet.placement import linear
from fleet.popularity import ExpertCounts
from fleet.signatures import ClusterModel, pack
from fleet.timing import EngineSpeed
from router.config import RouterConfig
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.decision import Decision
from router.scheduling.routing_request import Attempt, RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog
from tests.router.metric_values import value_of
from tests.router.router_fixture import until
from tracker.config import TrackerConfig
from tracker.service import TrackerService

SHAPE = ModelShape(layers=4, experts=8, top_k=2, hidden=8, expert_intermediate=8)
PLACEMENT = linear(layers=4, experts=8, ranks=2)
ENGINE = EngineJoined(
    engine="e",
    worker_id=2**64 - 5,
    model="demo",
    node="here",
    urls=("http://h:1", "http://h:2"),
    block_size=16,
    kv_blocks=1000,
    max_context=4096,
    max_batch_tokens=512,
    attention=DP_ATTENTION,
    shape=SHAPE,
    placement=PLACEMENT.record(),
    speed=EngineSpeed(dispatch=1e-3),
    capabilities=Capabilities(kv_events=False, token_ids=False),
)
BATCH = 20


@dataclass
class Loop:
    """Requests, and the ranks that would serve them."""

    router: RouterService
    bus: MemoryBus
    chance: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    clusters: ClusterModel | None = None
    requests: int = 0

    async def follow_clusters(self) -> None:
        async with self.bus.subscribe(self.bus.broker.subjects.clusters) as report:
            async for received in report:
                assert isinstance(received.message, ClustersPublished)
                self.clusters = ClusterModel.from_record(received.message.record)

    def prompt(self, kind: int) -> list[int]:
        """64 words, a third of which both kinds use."""
        own = self.chance.integers(0, 60, 64) + 1000 * (kind + 1)
        shared = self.chance.integers(0, 60, 64)
        return [int(word) for word in np.where(self.chance.random(64) < 1 / 3, shared, own)]

    async def serve(self, count: int) -> float:
        """Decide, run and report so many new requests; the share of them that went where their experts
        live."""
        at_home = 0
        for start in range(0, count, BATCH):
            profiles: dict[int, list[RequestProfile]] = {0: [], 1: []}
            for _ in range(min(BATCH, count - start)):
                kind = int(self.chance.integers(2))
                decision, profile = self._one(kind)
                at_home += decision.target.rank == kind
                profiles[decision.target.rank].append(profile)
            for rank, found in profiles.items():
                version = 0 if self.clusters is None else self.clusters.version
                report = RequestsProfiled(
                    engine="e",
                    worker_id=ENGINE.worker_id,
                    rank=rank,
                    model="demo",
                    epoch=0,
                    clusters=version,
                    requests=tuple(found),
                )
                await self.bus.publisher(self.bus.broker.subjects.requests_profiled("e")).publish(report)
            await asyncio.sleep(0.02)
        return at_home / count

    def _one(self, kind: int) -> tuple[Decision, RequestProfile]:
        self.requests += 1
        ids = self.prompt(kind)
        prompt, request_log = (
            TokenPrompt(ids),
            RequestLog(f"r{self.requests}", f"d{self.requests}", "/v1/completions", 0.0),
        )
        request_log.model = "demo"
        decision, booking = self.router.book(
            request_log, RoutingRequest("demo", prompt, 100, 32, None, keys=request_log.keys()), "", Attempt()
        )
        profile = self._run(kind, decision, ids)
        self.router.finished(decision, booking, prompt)
        self.router.release(booking)
        return decision, profile

    def _run(self, kind: int, decision: Decision, ids: list[int]) -> RequestProfile:
        """What the rank would report: 64 prompt and 32 further tokens, four fifths of their pairs on the
        kind's own half of the experts."""
        probabilities = np.full(8, 0.05)
        probabilities[4 * kind : 4 * kind + 4] = 0.2
        prompt, completion = (
            self.chance.multinomial(2 * tokens, probabilities, size=4) for tokens in (64, 32)
        )
        counts = prompt + completion
        held = slice(4 * decision.target.rank, 4 * decision.target.rank + 4)
        hashes = sequence_hashes(local_hashes(ids))
        uniform = np.full(2, 0.5)
        model = self.clusters
        return RequestProfile(
            decision=decision.id,
            tokens=96,
            cached_tokens=0,
            signature=pack(uniform if model is None else model.signature(counts)).tobytes(),
            local=float(counts[:, held].sum() / counts.sum()),
            blocks=np.array(hashes, "<u8").tobytes(),
            block_signatures=b"".join(
                pack(uniform if model is None else model.signature(prompt // 4)).tobytes() for _ in hashes
            ),
            block_size=16,
            sample=SampledProfile(prompt=ExpertCounts.of(prompt), completion=ExpertCounts.of(completion)),
        )

    @property
    def gain(self) -> float:
        replica = self.router.scheduler.predictor.replica("demo")
        return 0.0 if replica is None or replica.tables is None else replica.tables.gain

    @property
    def refused(self) -> float:
        return value_of(self.router.metrics.bus_refused)


@asynccontextmanager
async def closed_loop(kind: type[Loop] = Loop) -> AsyncIterator[tuple[Loop, TrackerService]]:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    router = RouterService(
        MemoryBus(broker), broker.subjects, RouterConfig(outcome_seconds=0.02, dead_after_seconds=60.0)
    )
    tracker = TrackerService(
        MemoryBus(broker),
        broker.subjects,
        TrackerConfig(clusters=4, publish_seconds=0.05, refine_seconds=0.1),
    )
    loop = kind(router, bus)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(tracker.run()),
            tasks.create_task(router.run()),
            tasks.create_task(loop.follow_clusters()),
        ]
        await bus.record(broker.subjects.membership("e"), ENGINE)
        async with asyncio.timeout(10):
            while not router.ready or not router.view.prices("demo").priced.all():
                await bus.publisher(broker.subjects.heartbeats("e")).publish(
                    EngineHeartbeat(engine="e", worker_id=ENGINE.worker_id, epoch=0)
                )
                await asyncio.sleep(0.02)
        yield loop, tracker
        for task in running:
            task.cancel()


@pytest.mark.timeout(60)
async def test_requests_find_the_rank_where_their_experts_live_once_the_tracker_has_seen_enough() -> None:
    async with closed_loop() as (loop, tracker):
        before = await loop.serve(100)
        async with asyncio.timeout(30):
            while loop.gain < 0.3:
                await loop.serve(100)
        after = await loop.serve(200)
        assert before < 0.75
        assert after > 0.9, "cold requests, told apart by their words"
        assert loop.refused == 0
        assert value_of(tracker.metrics.finished) > 0


class Blind(Loop):
    """What a request wants has nothing to do with anything that a router can know."""

    def _run(self, kind: int, decision: Decision, ids: list[int]) -> RequestProfile:
        return super()._run(int(self.chance.integers(2)), decision, ids)


@pytest.mark.slow
@pytest.mark.timeout(60)
async def test_where_nothing_can_be_known_prediction_switches_itself_off() -> None:
    async with closed_loop(Blind) as (loop, tracker):
        gains = []
        for _ in range(8):
            await loop.serve(100)
            await until(lambda: value_of(tracker.metrics.finished) >= loop.requests, 20)
            gains.append(loop.gain)
        assert max(gains[4:]) < 0.1
