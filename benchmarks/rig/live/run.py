"""One fleet under alternating policies: set up, reset, loaded, measured."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.rig.live.client import Answered, Lengths, Load, asking
from benchmarks.rig.live.document_traffic import Request, Texts
from benchmarks.rig.live.figures import Course, Sent, Watcher, watching
from benchmarks.rig.live.fleet import LiveFleet, Settings, live_fleet, merged
from bus import Bus, ClaimLost
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.client.migrations import carried_out
from deploy.sections import DEMO_MODEL
from fleet.facts.engines import EngineJoined
from fleet.placement import Placement, even_split
from fleet.requests.plans import ApplyPlan, RollBack
from migration.model.plan import Handover, Plan, PlanStep, SplitRecord, planned

RANKS, SLOTS = 4, 10
ENGINE = "engine-0"
LINK_SECONDS = 1e-4
"""added dispatch latency, so that it is a substantial part of a step, as over a network"""
SETTLED_SECONDS = 60.0
"""time limit for a running plan to end"""
MEASURED_SEED = 1_000_003
"""added to the seed for the measured requests"""
DELIVERY_SECONDS = 1.2
"""time after which all measurements have arrived"""


@dataclass(frozen=True)
class Policy:
    """One configuration of the fleet: the settings that differ."""

    name: str
    settings: Settings


STATIC = Policy(
    "static + KV-only", {"router": {"policy": "kv"}, "planner": {"automatic": False, "policy": "roost"}}
)
EPLB = Policy(
    "EPLB + KV-only", {"router": {"policy": "kv"}, "planner": {"automatic": True, "policy": "eplb"}}
)
JOINT = Policy(
    "joint routing, static placement",
    {"router": {"policy": "cost"}, "planner": {"automatic": False, "policy": "roost"}},
)
LOOP = Policy("full loop", {"router": {"policy": "cost"}, "planner": {"automatic": True, "policy": "roost"}})
POLICIES = (STATIC, EPLB, JOINT, LOOP)

CADENCE: dict[str, dict[str, Any]] = {
    "planner": {
        "cycle_seconds": 3.0,
        "window_seconds": 20.0,
        "stale_seconds": 5.0,
        "homes_seconds": 5.0,
        "evaluation_seconds": 15.0,
        "settle_seconds": 4.0,
        "cooldown_seconds": 20.0,
        "budget_bytes": 32_000_000,
        "budget_seconds": 120.0,
    },
    "tracker": {
        "fast_seconds": 10.0,
        "slow_seconds": 120.0,
        "publish_seconds": 1.0,
        "refine_seconds": 3.0,
        "memory_outcomes": 200,
        "shift_warmup_seconds": 20.0,
        "shift_cooldown_seconds": 15.0,
    },
}
"""Fast settings: defaults are for hours, a benchmark lasts minutes."""


def base(link_seconds: float, cadence: Settings) -> dict[str, dict[str, Any]]:
    """Return the settings common to all policies: engine, slots, dispatch rule, links, cadence."""
    engine = {"ranks": RANKS, "slots_per_rank": SLOTS, "link_seconds": link_seconds}
    return merged(
        {"engine": engine, "transfer": {"backend": "nixl", "min_seconds": 5.0}, "worker": {"name": "engine"}},
        cadence,
        STATIC.settings,
    )


class Phase(NamedTuple):
    """Results of one policy on the traffic."""

    policy: str
    seconds: float
    """length of the measured part"""
    sent: Sent
    tokens_per_second: float
    """answer tokens per second"""
    first_p50: float
    first_p99: float
    """seconds to the first token"""
    bytes: int
    """bytes copied since the policy began, warm-up included"""
    late_bytes: int
    """of these, bytes copied during the measured part"""
    handovers: int
    plans: int
    lost: int
    begin: float
    """begin of the measured part, seconds from the policy's beginning"""
    course: Course
    """time series from the policy's beginning on"""


@dataclass
class Live:
    """Fleet and the messages received from it."""

    fleet: LiveFleet
    bus: Bus
    subjects: Subjects
    watcher: Watcher
    first: Placement
    """first placement, restored at every reset"""
    joined: EngineJoined
    settings: Settings
    notes: list[str] = field(default_factory=list)
    ended: dict[str, list[Placement]] = field(default_factory=dict)
    """placement at the end of each phase, by policy"""
    _offsets: Iterator[int] = field(default_factory=lambda: cycle(range(16)))

    @property
    def placement(self) -> Placement:
        return self.watcher.placements[-1][1] if self.watcher.placements else self.first

    @property
    def offset(self) -> int:
        """Return the next phase's prompt offset, so that no cache knows its prompts."""
        return next(self._offsets)

    async def use(self, policy: Policy) -> None:
        """Apply the policy."""
        await self.fleet.reload(merged(self.settings, policy.settings))

    async def reset(self) -> None:
        """Restore the first placement, and clear the state of tracker and planner."""
        await self.use(STATIC)
        await self._go_back()
        await self.fleet.forget_traffic()
        await self._forget_plans()

    async def settled(self) -> None:
        """Return once no plan is running."""
        async with asyncio.timeout(SETTLED_SECONDS):
            while self._is_moving:  # noqa: ASYNC110 a watcher tells nobody
                await asyncio.sleep(0.1)

    @property
    def _is_moving(self) -> bool:
        if not self.watcher.planned:
            return False
        last = self.watcher.planned[-1][1].plan
        over = any(one.plan == last and one.last for _, one in self.watcher.moved) or any(
            one.plan == last for _, one in self.watcher.aborted
        )
        return not over

    async def _go_back(self) -> None:
        """Roll back to the first placement by ordinary handovers."""
        begun = self.first.epoch + 1
        for _ in range(3):  # a plan may have been about to begin
            await self.settled()
            if held_alike(self.placement, self.first):
                break
            await self._carry_out(
                RollBack(
                    engine=ENGINE, plan=next(one.plan for _, one in self.watcher.moved if one.epoch == begun)
                )
            )
        if not held_alike(self.placement, self.first):
            raise RuntimeError(
                f"epoch {self.placement.epoch} is not what everything began with:"
                f" {difference(self.placement, self.first)}"
            )
        self.first = self.placement

    async def _carry_out(self, order: RollBack | ApplyPlan) -> None:
        """Carry out a request. Raises RuntimeError if it is aborted, NotAccepted if it is refused."""
        course = await carried_out(
            self.bus, self.subjects, order, wait=True, began=lambda _: None, say=lambda _: None
        )
        if course.aborted is not None:
            raise RuntimeError(f"plan {course.accepted.plan} was aborted: {course.aborted.reason}")
        async with asyncio.timeout(SETTLED_SECONDS):
            while self.placement.epoch != course.epoch:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _forget_plans(self) -> None:
        """Clear the planner's durable state of its plans and restart it."""
        claim = await self.bus.read_claim(self.subjects.loop_key)
        if claim is not None:
            try:
                await self.bus.release(self.subjects.loop_key, claim.revision)
            except ClaimLost:
                return await self._forget_plans()
        await self.fleet.restart("planner")

    async def apply(self, plan: Plan) -> None:
        """Carry out a plan."""
        await self._carry_out(ApplyPlan(engine=ENGINE, plan=msgspec.json.encode(plan)))

    async def draw(self, folder: Path) -> None:
        """Draw heat maps of demand and placement, and of the changes since the beginning. folder: an existing
        absolute path."""
        for what, *more in (("placement", "--before"), ("popularity",)):
            await self.fleet.command(
                what, *more, "--plot", str(folder / f"{what}.png"), "--nats", self.fleet.nats
            )

    @asynccontextmanager
    async def loaded(
        self, requests: Iterator[Request], concurrency: int, output: Lengths
    ) -> AsyncIterator[Load]:
        """Apply this load while the context lasts."""
        async with asking(self.fleet.router, DEMO_MODEL, requests, concurrency, output) as load:
            yield load


def held_alike(one: Placement, other: Placement) -> bool:
    """Return whether every rank holds the same experts in both, in any slots; a rollback does not restore
    slots."""
    return np.array_equal(one.replicas_on_rank, other.replicas_on_rank)


def difference(one: Placement, other: Placement) -> str:
    """Describe the difference of two placements."""
    return f"ranks hold {int((one.replicas_on_rank != other.replicas_on_rank).sum())} other experts"


def evenly(placement: Placement) -> Plan:
    """Return the plan that makes replicas share evenly, as engines do that choose one by a hash of the token;
    it copies no bytes."""
    split = even_split(placement.expert_of_slot, placement.experts)
    split = split._replace(keep=np.zeros_like(split.keep))
    steps = tuple(
        PlanStep(kind="reweight", layer=layer, why="replicas share evenly, wherever a token lives")
        for layer in range(placement.layers)
    )
    record = SplitRecord.of(split, np.arange(placement.layers))
    return planned(
        placement,
        [Handover(epoch=placement.epoch + 1, steps=steps, split=record)],
        reason="replicas are chosen as by a hash",
    )


@asynccontextmanager
async def live(link_seconds: float = LINK_SECONDS, cadence: Settings = CADENCE) -> AsyncIterator[Live]:
    """Run a fleet and subscribe to its bus."""
    settings = base(link_seconds, cadence)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(live_fleet(settings))
        subjects = Subjects(BusConfig().namespace)
        bus = await NatsBus.connect(
            fleet.nats,
            subjects,
            BusConfig(urls=(fleet.nats,), credentials_file=fleet.credentials),
            name="benchmark",
        )
        stack.push_async_callback(bus.close)
        watcher = await stack.enter_async_context(watching(bus, subjects))
        joined = [
            one.message async for one in bus.replay(subjects.membership(ENGINE), latest=True, follow=False)
        ][-1]
        if not isinstance(joined, EngineJoined) or joined.placement is None:
            raise RuntimeError(f"engine {ENGINE} does not say what it serves: {joined}")
        yield Live(fleet, bus, subjects, watcher, Placement.from_record(joined.placement), joined, settings)


class Tap:
    """Request source that can be switched at run time."""

    def __init__(self, source: Iterator[Request]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        return next(self.source)


@dataclass(frozen=True)
class Plenty:
    """Load of a phase: warm-up seconds, measured requests, concurrency, tokens of each."""

    warm: float
    """seconds, since the loop's cadence is in seconds, at any speed of the machine"""
    count: int
    concurrency: int
    prompt: int
    output: Lengths


async def phase(live: Live, policy: Policy, traffic: Texts, much: Plenty, seed: int) -> Phase:
    """Run from the reset on: warm-up, then the measured requests, the same for every policy."""
    await live.reset()
    await live.use(policy)
    found = await further(live, policy.name, traffic, much, seed)
    live.ended.setdefault(policy.name, []).append(live.placement)
    return found


async def further(live: Live, name: str, traffic: Texts, much: Plenty, seed: int) -> Phase:
    """Run another phase in the current state. The load continues until the last request is sent."""
    offset, began = live.offset, time.monotonic()
    tap = Tap(traffic.requests(much.prompt, seed, offset))
    async with live.loaded(tap, much.concurrency, much.output) as load:
        await asyncio.sleep(much.warm)
        tap.source = islice(traffic.requests(much.prompt, seed + MEASURED_SEED, offset), much.count)
        begin, before = time.monotonic(), load.sent
        await load.until_sent(before + much.count)
        end = time.monotonic()
    await asyncio.sleep(DELIVERY_SECONDS)
    live.fleet.check()
    return measured(live.watcher, name, load, began, begin, end)


async def hashed(live: Live, traffic: Texts, much: Plenty, seed: int) -> Phase:
    """Run with the current placement and replicas chosen evenly, independent of the token's rank. Nothing
    migrates meanwhile."""
    await live.use(STATIC)
    await live.settled()
    await live.apply(evenly(live.placement))
    return await further(live, f"{EPLB.name}, hash dispatch", traffic, much, seed)


def measured(watcher: Watcher, name: str, load: Load, began: float, begin: float, end: float) -> Phase:
    """Return the figures from `begin` to `end`, under a policy that has applied since `began`."""
    within = [one for one in load.answered if begin < one.ended <= end]
    p50, p99 = firsts(load.answered, begin, end)
    return Phase(
        policy=name,
        seconds=end - begin,
        sent=watcher.sent(begin, end),
        tokens_per_second=sum(one.tokens for one in within) / (end - begin),
        first_p50=p50,
        first_p99=p99,
        bytes=watcher.bytes_moved(began, end),
        late_bytes=watcher.bytes_moved(begin, end),
        handovers=watcher.handovers(began, end),
        plans=len(watcher.plans(began, end)),
        lost=len(load.lost),
        begin=begin - began,
        course=watcher.course(began, end),
    )


def firsts(answered: list[Answered], begin: float, end: float) -> tuple[float, float]:
    """Return seconds to the first token of requests sent in the interval: p50 and p99."""
    taken = [one.first - one.sent for one in answered if begin < one.sent <= end]
    return (
        (float(np.percentile(taken, 50)), float(np.percentile(taken, 99)))
        if taken
        else (float("nan"), float("nan"))
    )
