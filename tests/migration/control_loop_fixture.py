"""Fixture for tests of the closed loop: an engine with its ranks, traffic, measurements and an automatic
planner."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from bus import Bus
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from fleet.experts import ModelShape
from fleet.facts.activity import DispatchMeasured
from fleet.facts.demand import DemandPublished
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import UNSHARDABLE, EngineJoined
from fleet.facts.migrations import MigrationCommitted, MigrationPlanned, PlanEvaluated
from fleet.placement import linear
from fleet.popularity import ExpertTable
from fleet.requests.control_loop import DescribeLoop, EngineLoop, LoopDescribed, SetLoopState
from fleet.timing import EngineSpeed
from migration.config import MigrationConfig
from tests.migration.builders import joined
from tests.migration.fake_ranks import Ranks

SUBJECTS = Subjects()
SHAPE = ModelShape(layers=2, experts=16, top_k=2, hidden=8, expert_intermediate=8)
FIRST = linear(layers=2, experts=16, ranks=4, slots_per_rank=6)
SPEED = EngineSpeed(step=1e-3, decode_sequence=1e-5, expert_pair=1e-5, dispatch=0.0)
CONFIG = MigrationConfig(
    cycle_seconds=6.0,
    window_seconds=10.0,
    stale_seconds=6.0,
    evaluation_seconds=12.0,
    settle_seconds=2.0,
    cooldown_seconds=40.0,
)
SKEWED = np.array([8.0] * 4 + [1.0] * 12)
"""Rank 0 holds the experts with the highest demand."""
EVEN = np.ones(16)


def of_four(worker_id: int, engine: str, **fields: Any) -> EngineJoined:
    """Return the join of an engine of four ranks."""
    plain: dict[str, Any] = {
        "urls": tuple(f"http://{rank}" for rank in range(4)),
        "kv_blocks": 64,
        "shape": SHAPE,
        "placement": FIRST,
        "speed": SPEED,
    }
    return joined(worker_id, engine, **{**plain, **fields})


class Flight:
    """Environment of the service: an engine of four ranks, the demand on it, and its measurements."""

    def __init__(
        self,
        broker: MemoryBroker,
        name: str = "a",
        worker_id: int = 1,
        speed: EngineSpeed = SPEED,
        unshardable: str = UNSHARDABLE,
    ) -> None:
        self.bus = MemoryBus(broker)
        self.ranks = Ranks(self.bus, SUBJECTS, FIRST, engine=name, worker_id=worker_id)
        self.rates = SKEWED
        """[experts] of every layer, or [layers, experts]"""
        self.balance = 0.5
        """measured balance of steps"""
        self.remote_ranks = 1.2
        self.step_seconds = 2e-3
        self.running, self.decode_blocks = 64, 20
        """of each rank"""
        self.noise = np.random.default_rng(7)
        self.name, self.worker_id = name, worker_id
        self._speed = speed
        self._unshardable = unshardable
        self._demand, self._load, self._sent = (
            self.bus.publisher(subject)
            for subject in (SUBJECTS.demand, SUBJECTS.kv_metrics, SUBJECTS.dispatched(name))
        )
        self._version = self._seconds = 0
        self._log: Counter[type[Any]] = Counter()
        self._newest: dict[type[Any], Any] = {}

    async def follow(self) -> None:
        """Collect what is recorded of this engine's plans."""
        async for one in self.bus.replay(SUBJECTS.migrations(self.name)):
            self._log[type(one.message)] += 1
            self._newest[type(one.message)] = one.message

    async def join(self, **fields: Any) -> None:
        about = {"placement": self.ranks.placement, "speed": self._speed, "unshardable": self._unshardable}
        said = of_four(self.worker_id, self.name, **{**about, **fields})
        await self.bus.record(SUBJECTS.membership(self.name), said)

    async def speak(self) -> None:
        """Publish the traffic of one second."""
        about: dict[str, Any] = {"engine": self.name, "worker_id": self.worker_id, "model": "m"}
        table = ExpertTable.of(np.array(np.broadcast_to(500.0 * self.rates, (2, 16))))
        for rank in range(4):
            await self._sent.publish(self.measured(rank))
        self._seconds += 1
        for rank in range(4) if self._seconds % 3 == 1 else ():
            self._version += 1
            await self._demand.publish(
                DemandPublished(
                    rank=rank, version=self._version, tokens_per_second=1.0, demand=table, pairs=2e5, **about
                )
            )
            await self._load.publish(
                KvMetrics(
                    worker_id=self.worker_id,
                    dp_rank=rank,
                    running=self.running,
                    waiting=0,
                    active_prefill_tokens=0,
                    active_decode_blocks=self.decode_blocks,
                )
            )

    def measured(self, rank: int, **fields: Any) -> DispatchMeasured:
        """Return the measurement of one rank for one second."""
        steps, tokens = 100, 6400
        wobble = 1.0 + 0.01 * float(self.noise.standard_normal())
        plain: dict[str, Any] = {
            "epoch": self.ranks.served[-1],
            "seconds": 1.0,
            "steps": steps,
            "step_seconds": steps * self.step_seconds * wobble,
            "tokens": tokens,
            "pairs": 2 * tokens,
            "remote_ranks": (tokens * self.remote_ranks * wobble,) * 2,
            "local": (tokens * 0.5,) * 2,
            "served": (2.0 * tokens,) * 2,
            "balance": (min(steps * self.balance * wobble, steps),) * 2,
        }
        return DispatchMeasured(
            engine=self.name, worker_id=self.worker_id, rank=rank, model="m", **{**plain, **fields}
        )

    async def last(self, seconds: int) -> None:
        for _ in range(seconds):
            await self.speak()
            await asyncio.sleep(1)

    async def until(self, kind: type[Any], seconds: int = 200, after: int = 0) -> Any:
        """Continue until more than `after` entries of a kind are recorded for this engine; return the
        newest."""
        for _ in range(seconds):
            if self._log[kind] > after:
                return self._newest[kind]
            await self.last(1)
        raise AssertionError(f"no {kind.__name__} within {seconds} s; {await loop(self.bus)}")


@asynccontextmanager
async def flight(broker: MemoryBroker, **fields: Any) -> AsyncIterator[Flight]:
    """Yield the environment with an engine that has joined."""
    world = Flight(broker, **fields)
    async with world.ranks.serving():
        await world.join()
        following = asyncio.create_task(world.follow())
        yield world
        following.cancel()


async def recorded(bus: Bus, kind: type[Any], name: str = "a") -> list[Any]:
    """Return the entries of a kind in the log of an engine's plans."""
    return [
        one.message
        async for one in bus.replay(SUBJECTS.migrations(name), follow=False)
        if isinstance(one.message, kind)
    ]


async def loop(bus: Bus) -> LoopDescribed:
    answer = await bus.request(SUBJECTS.loop, DescribeLoop(), 20)
    assert isinstance(answer, LoopDescribed)
    return answer


async def engine_of(bus: Bus) -> EngineLoop:
    """Describe the only engine."""
    (engine,) = (await loop(bus)).engines
    return engine


async def steer(bus: Bus, *, paused: bool, reason: str = "") -> LoopDescribed:
    answer = await bus.request(SUBJECTS.loop, SetLoopState(paused=paused, reason=reason), 20)
    assert isinstance(answer, LoopDescribed)
    return answer


async def own(bus: Bus) -> list[MigrationPlanned]:
    """Return the automatic plans."""
    return [planned for planned in await recorded(bus, MigrationPlanned) if planned.origin == "planner"]


async def copied(bus: Bus) -> int:
    return sum(committed.bytes for committed in await recorded(bus, MigrationCommitted))


async def verdicts(bus: Bus) -> list[PlanEvaluated]:
    return await recorded(bus, PlanEvaluated)
