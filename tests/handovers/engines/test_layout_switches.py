"""An engine of a DeepSeek-V3 shape changes to EXPERTS_TP and back under load, while experts move in between and
coordinators end at random."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp
import numpy as np
import pytest

from bus import BusError
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from deploy.parts.simulated import SimulatedHost
from deploy.process import alongside
from fleet.facts.migrations import MigrationCommitted, MigrationPlanned
from fleet.facts.placements import HomesPublished
from fleet.placement import Placement
from fleet.requests.plans import MigrateExpert, SetLayout
from fleet.signatures import ClusterModel
from migration.config import MigrationConfig
from migration.service import MigrationService
from router.api.app import create_app
from router.config import RouterConfig
from router.service import RouterService
from tests.migration.executor_fixture import log
from tests.router.router_fixture import running, served_app, until
from tests.simulated_engines import simulated_engine

MODEL, NAME = "deepseek-v3", "sim-0"
LAYERS, EXPERTS, RANKS, SLOTS = 58, 256, 8, 34
EXPERT_BYTES = 3 * 7168 * 2048
TOKEN_BYTES = 7168 * 2
SUBJECTS = Subjects()
CONDUCTING = MigrationConfig(stage_seconds=30.0, automatic=False)


@dataclass
class Trial:
    """The engine, the router before it, and the coordinators, one after another."""

    broker: MemoryBroker
    host: SimulatedHost
    service: RouterService
    http: aiohttp.ClientSession
    url: str
    dice: random.Random
    answers: dict[int, str] = field(default_factory=dict)
    asked: int = 0
    coordinators: int = 0
    prices: list[tuple[int, bool]] = field(default_factory=list)
    """(epoch, whether it was priced) as the router had them"""

    @property
    def placement(self) -> Placement:
        return self.host.engine.placement

    async def keep_asking(self, client: int) -> None:
        """One client: every answer is whole, and the same whatever layout gives it."""
        while True:
            number = (self.asked + client) % 12
            body = {
                "model": MODEL,
                "seed": 1,
                "max_tokens": 12,
                "messages": [{"role": "user", "content": f"{number}: tell me about the river."}],
            }
            async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as answer:
                found = await answer.json()
                assert answer.status == 200, found
            (choice,) = found["choices"]
            assert choice["finish_reason"] == "length"
            text = choice["message"]["content"]
            assert self.answers.setdefault(number, text) == text
            self.asked += 1

    async def coordinate(self) -> None:
        """One coordinator after another: each ends at a moment of chance, whatever it is doing."""
        while True:
            service = MigrationService(MemoryBus(self.broker), SUBJECTS, CONDUCTING)
            async with alongside(service.run(), "the coordinator"):
                self.coordinators += 1
                await asyncio.sleep(self.dice.uniform(0.5, 2.5))

    async def ask(self, request: SetLayout | MigrateExpert, done: Callable[[Placement], bool]) -> None:
        """Request a change until it is there: a coordinator may end before it writes the plan down."""
        bus = MemoryBus(self.broker)
        async with asyncio.timeout(240):
            while not done(self.placement):
                # No coordinator leads at present, or one is at it.
                with suppress(BusError, TimeoutError):
                    await bus.request(SUBJECTS.migrate, request, 5)
                await asyncio.sleep(0.5)

    async def follow(self) -> None:
        """Compare what the router charges for sharded layers with the forms of the epoch that it knows."""
        seen = -1
        while True:
            table = self.service.view.target_table(MODEL)
            (state,) = self.service.view.engines()
            assert state.placement is not None
            sharded = len(state.placement.sharded)
            speed = self.host.engine.config.real_speed.gather_byte
            token = speed * sharded * 2 * TOKEN_BYTES * (RANKS - 1) / RANKS
            assert table.gather_token_s.tolist() == pytest.approx([token] * RANKS)
            prices = self.service.view.prices(MODEL)
            if sharded == LAYERS:
                assert prices.homes is None
                assert not prices.priced.any()
            if state.placement.epoch != seen:
                seen = state.placement.epoch
                self.prices.append((seen, bool(prices.priced.all())))
            await asyncio.sleep(0.02)


def clusters() -> ClusterModel:
    """Two kinds of requests, each with its half of the experts."""
    profiles = np.ones((2, LAYERS, EXPERTS), np.float32)
    profiles[0, :, : EXPERTS // 2] = profiles[1, :, EXPERTS // 2 :] = 9.0
    return ClusterModel(1, profiles / profiles.sum(axis=2, keepdims=True), np.full(2, 0.5, np.float32), 0.1)


@asynccontextmanager
async def trial(seed: int) -> AsyncIterator[Trial]:
    broker = MemoryBroker()
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(
            simulated_engine(
                MemoryBus(broker),
                SUBJECTS,
                NAME,
                shape=MODEL,
                ranks=RANKS,
                slots_per_rank=SLOTS,
                spare_layers=2,
                domains=2,
                time_scale=0.05,
                activity_seconds=1e6,
            )
        )
        service = RouterService(MemoryBus(broker), SUBJECTS, RouterConfig())
        await stack.enter_async_context(running(service))
        url = await stack.enter_async_context(served_app(create_app(service)))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await until(lambda: len(service.view.target_table(MODEL).targets) == RANKS and service.ready)
        assert service.fleet_subscriber is not None
        service.fleet_subscriber.learn_clusters(MODEL, clusters())
        await until(lambda: bool(service.view.prices(MODEL).priced.all()))
        found = Trial(broker, host, service, http, url, random.Random(seed))
        shares = np.tile(np.arange(RANKS) < RANKS // 2, (2, 1)).astype("<f4") / (RANKS // 2)
        await (
            MemoryBus(broker)
            .publisher(SUBJECTS.homes)
            .publish(
                HomesPublished(
                    engine=NAME,
                    worker_id=host.identity.worker_id,
                    model=MODEL,
                    version=1,
                    epoch=0,
                    clusters=1,
                    count=2,
                    ranks=RANKS,
                    homes=shares.tobytes(),
                )
            )
        )
        await until(lambda: service.view.prices(MODEL).homes is not None)
        yield found


def moved_to_shards(placement: Placement, layers: list[int]) -> int:
    """Bytes between ranks when these layers become sharded: a rank has its part of what it holds."""
    replicas = sum(int((placement.expert_of_slot[layer] >= 0).sum()) for layer in layers)
    return (len(layers) * EXPERTS * RANKS - replicas) * (EXPERT_BYTES // RANKS)


def moved_to_experts(layers: int) -> int:
    """Bytes between ranks when layers become whole with each expert once: all parts but the rank's own."""
    return layers * EXPERTS * (RANKS - 1) * (EXPERT_BYTES // RANKS)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_large_engine_changes_to_experts_tp_and_back_under_load_whoever_dies() -> None:
    everything, half = tuple(range(LAYERS)), tuple(range(0, LAYERS, 2))
    async with trial(seed=5) as now, asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(now.keep_asking(client), name=f"client {client}") for client in range(6)]
        others += [tasks.create_task(now.coordinate()), tasks.create_task(now.follow())]
        copy = MigrateExpert(engine=NAME, layer=3, expert=0, rank=7)
        await now.ask(copy, lambda one: one.replicas_on_rank[3, 7, 0] == 1)
        expected = EXPERT_BYTES + moved_to_shards(now.placement, list(half))
        await now.ask(SetLayout(engine=NAME, sharded=half, now=True), lambda one: one.sharded == half)
        # A migration in a layer that is still whole, among sharded ones.
        move = MigrateExpert(engine=NAME, layer=5, expert=9, rank=6, move=True)
        await now.ask(move, lambda one: one.replicas_on_rank[5, 6, 9] == 1)
        expected += EXPERT_BYTES + moved_to_shards(now.placement, [at for at in everything if at % 2])
        await now.ask(
            SetLayout(engine=NAME, sharded=everything, now=True), lambda one: one.sharded == everything
        )
        asked, coordinators = now.asked, now.coordinators
        await now.ask(SetLayout(engine=NAME, sharded=(), now=True), lambda one: not one.sharded)
        expected += moved_to_experts(LAYERS)
        last = MigrateExpert(engine=NAME, layer=57, expert=255, rank=0)
        await now.ask(last, lambda one: one.replicas_on_rank[57, 0, 255] == 1)
        expected += EXPERT_BYTES
        await until(lambda: now.prices[-1][0] == now.placement.epoch)

        assert now.asked > asked > 50, "requests were served throughout"
        assert now.coordinators > coordinators > 3, "coordinators ended throughout"
        for rank in now.host.engine.ranks:
            assert rank.experts.memory.misplaced(now.placement, rank.experts.cells) is None
        entries = await log(MemoryBus(now.broker), NAME)
        done = [one for one in entries if isinstance(one, MigrationCommitted)]
        plans = {one.plan: one for one in entries if isinstance(one, MigrationPlanned)}
        assert len({one.handover for one in done}) == len(done)
        assert {one.plan for one in done} <= plans.keys()
        assert sum(one.bytes for one in done) == expected
        for other in others:
            other.cancel()
