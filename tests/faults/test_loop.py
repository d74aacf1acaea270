"""Tier 1 of the closed loop: the planner plans by itself over real NATS, for ranks in processes of their own,
and is killed at every stage of that.

Whoever takes the lead goes on where it ended: a plan under way is carried out, one that is over is judged,
once; a pause holds; and what was spent of the budget stays spent.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from bus import BusError
from deploy.process import alongside
from fleet.facts.activity import DispatchMeasured
from fleet.facts.demand import DemandPublished
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.migrations import MigrationCommitted, MigrationPlanned, MigrationStaged, PlanEvaluated
from fleet.popularity import ExpertTable
from fleet.requests.control_loop import DescribeLoop, EngineLoop, LoopDescribed, SetLoopState
from migration.handover.rank_progress import REPLACED
from tests.faults.expert_contents import RANKS, SHAPE
from tests.faults.fleet_fixture import Engine, FleetFixture, Process, until
from tests.faults.invariants import judge

BUDGET_EXPERTS = 40
"""that the planner's own plans may copy in all the time that a test takes"""
IMPATIENT = {
    "policy": "replicate",
    "cycle_seconds": 0.5,
    "window_seconds": 2.0,
    "stale_seconds": 2.0,
    "evaluation_seconds": 4.0,
    "settle_seconds": 0.5,
    "cooldown_seconds": 0.5,
    "budget_bytes": BUDGET_EXPERTS * SHAPE.expert_bytes,
    "budget_seconds": 3600.0,
}
PUBLISH_SECONDS = 0.25
END_SECONDS = 30.0
TIMES = 2
"""that the planner is killed at each stage"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]


class Traffic:
    """Says for ever what a tracker and the ranks of an engine would say: few of the experts are wanted, and
    time and again others."""

    def __init__(self, deployment: FleetFixture, engine: Engine) -> None:
        self._deployment = deployment
        self._engine = engine
        self._demand = 0

    def turn(self) -> None:
        """From now on others are wanted."""
        self._demand += 1

    async def speak(self) -> None:
        bus, subjects, random = self._deployment.bus, self._deployment.subjects, np.random.default_rng(5)
        demand, load, sent = (
            bus.publisher(subject)
            for subject in (subjects.demand, subjects.kv_metrics, subjects.dispatched(self._engine.name))
        )
        version = 0
        while True:
            version += 1
            rates = np.ones((SHAPE.layers, SHAPE.experts))
            rates[:, 2 * (self._demand % RANKS) : 2 * (self._demand % RANKS) + 2] = 12.0
            worker_id, epoch = self._engine.worker_id, self._engine.history.latest.epoch
            about: dict[str, Any] = {"engine": self._engine.name, "worker_id": worker_id, "model": "bytes"}
            for rank in range(RANKS):
                table = ExpertTable.of(500.0 * rates)
                await demand.publish(
                    DemandPublished(
                        rank=rank, version=version, tokens_per_second=1.0, demand=table, pairs=2e5, **about
                    )
                )
                await load.publish(
                    KvMetrics(
                        worker_id=worker_id,
                        dp_rank=rank,
                        running=64,
                        waiting=0,
                        active_prefill_tokens=0,
                        active_decode_blocks=4,
                    )
                )
                await sent.publish(
                    DispatchMeasured(
                        rank=rank, epoch=epoch, seconds=PUBLISH_SECONDS, **served(random), **about
                    )
                )
            await asyncio.sleep(PUBLISH_SECONDS)


def served(random: np.random.Generator) -> dict[str, Any]:
    """What a rank measures: the same under every placement, but for noise."""
    steps, tokens, wobble = 100, 1600, 1.0 + 0.01 * float(random.standard_normal())
    layers = SHAPE.layers
    return {
        "steps": steps,
        "step_seconds": 0.2 * wobble,
        "tokens": tokens,
        "pairs": SHAPE.top_k * tokens,
        "remote_ranks": (tokens * wobble,) * layers,
        "local": (0.5 * tokens,) * layers,
        "served": (2.0 * tokens,) * layers,
        "balance": (0.5 * steps * wobble,) * layers,
    }


class Loop:
    """An engine whose planner plans by itself, and a planner that stands by."""

    def __init__(self, deployment: FleetFixture, engine: Engine, traffic: Traffic) -> None:
        self.deployment = deployment
        self.engine = engine
        self.traffic = traffic

    async def described(self) -> LoopDescribed | None:
        """None: nobody answers just now."""
        try:
            answer = await self.deployment.bus.request(self.deployment.subjects.loop, DescribeLoop(), 1.0)
        except BusError:
            return None
        assert isinstance(answer, LoopDescribed), answer
        return answer

    async def loop_status(self) -> EngineLoop:
        """What is said of the engine, by whoever leads."""
        return await until(self._loop_status, "the planner says what it does with the engine", END_SECONDS)

    async def _loop_status(self) -> EngineLoop | None:
        described = await self.described()
        return (
            next((one for one in described.engines if one.engine == self.engine.name), None)
            if described
            else None
        )

    @property
    def own(self) -> list[MigrationPlanned]:
        messages = self.engine.history.migrations
        return list(
            {
                one.plan: one
                for one in messages
                if isinstance(one, MigrationPlanned) and one.origin == "planner"
            }.values()
        )

    @property
    def copied(self) -> int:
        """Bytes, by plans of the planner's own and by what undid them."""
        plans = {
            one.plan
            for one in self.engine.history.migrations
            if isinstance(one, MigrationPlanned) and one.policy
        }
        handovers = {
            (one.plan, one.number): one
            for one in self.engine.history.migrations
            if isinstance(one, MigrationCommitted) and one.plan in plans
        }
        return sum(one.bytes for one in handovers.values())

    def verdicts(self, plan: str) -> list[PlanEvaluated]:
        return [one for one in self.engine.history.of(plan) if isinstance(one, PlanEvaluated)]

    def nothing_between(self, plan: str) -> None:
        """Between the end of a plan and its judgement no other was begun."""
        messages = self.engine.history.migrations
        ended = next(
            at
            for at, one in enumerate(messages)
            if one.plan == plan and isinstance(one, MigrationCommitted) and one.last
        )
        evaluated = next(
            at for at, one in enumerate(messages) if one.plan == plan and isinstance(one, PlanEvaluated)
        )
        assert not any(isinstance(one, MigrationPlanned) for one in messages[ended:evaluated]), messages[
            ended:evaluated
        ]

    async def next_plan(self) -> MigrationPlanned:
        """Of the planner's own; traffic turns until there is one."""
        known = len(self.own)
        self.traffic.turn()
        return (
            await until(
                lambda: self.own[known:],
                lambda: f"a plan of its own:\n{self.deployment.leader.tail}",
                END_SECONDS,
            )
            and self.own[known]
        )

    async def change_of_lead(self) -> Process:
        """The one that leads is killed; who leads then."""
        dead = self.deployment.leader
        await dead.kill()
        await self.deployment.add_coordinator(**IMPATIENT)
        return await until(lambda: self._leads_behind(dead), "another leads", END_SECONDS)

    def _leads_behind(self, dead: Process) -> Process | None:
        living = [one for one in self.deployment.coordinators if one.alive]
        return next((one for one in living if one.token > dead.token), None)

    async def evaluated(self, plan: str) -> PlanEvaluated:
        return (
            await until(
                lambda: self.verdicts(plan),
                lambda: f"{plan} is judged:\n{self.deployment.leader.tail}",
                END_SECONDS,
            )
        )[0]

    async def balanced(self) -> None:
        """What is said to be spent is what was copied; and it is within the budget."""
        budget = int(str(IMPATIENT["budget_bytes"]))

        async def same() -> bool:
            copied = self.copied
            return (await self.loop_status()).spent_bytes == copied == self.copied

        await until(same, lambda: f"what is told as spent is what was copied, {self.copied}", END_SECONDS)
        assert self.copied <= budget


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loop(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Loop]:
    async with FleetFixture(tmp_path_factory.mktemp("loop")).open() as deployment:
        engine = Engine(deployment, "one", transfer={"backend": "shared"})
        await asyncio.gather(deployment.add_coordinator(**IMPATIENT), engine.live())
        await deployment.add_coordinator(**IMPATIENT)
        traffic = Traffic(deployment, engine)
        async with alongside(traffic.speak(), "traffic") as speaking:
            yield Loop(deployment, engine, traffic)
            assert not speaking.done(), speaking
        await engine.leave()


async def test_a_planner_that_dies_as_its_own_plan_begins_is_followed_by_one_that_ends_it(loop: Loop) -> None:
    random = np.random.default_rng(1)
    for _ in range(TIMES):
        planned = await loop.next_plan()
        await asyncio.sleep(float(random.uniform(0, 0.4)))
        await loop.change_of_lead()
        end = await until(
            lambda plan=planned.plan: loop.engine.history.end_of(plan), "the plan ends", END_SECONDS
        )
        carried_out = isinstance(
            end, MigrationCommitted
        )  # or nothing of it: its only handover had just been proposed
        if carried_out:
            await loop.evaluated(planned.plan)
        await loop.balanced()
        assert len(loop.verdicts(planned.plan)) == carried_out
    await judge(loop.engine)


async def test_a_planner_that_dies_when_its_own_plan_is_staged_is_followed_by_one_that_carries_it_out_and_judges_it_once(
    loop: Loop,
) -> None:
    for _ in range(2 * TIMES):
        planned = await loop.next_plan()
        await until(
            lambda plan=planned.plan: any(
                isinstance(one, MigrationStaged) for one in loop.engine.history.of(plan)
            ),
            "it is staged",
            END_SECONDS,
        )
        await loop.change_of_lead()
        end = await until(
            lambda plan=planned.plan: loop.engine.history.end_of(plan), "the plan ends", END_SECONDS
        )
        if isinstance(end, MigrationCommitted):
            break
        # The decision follows the record at once; the planner died in between.
        assert end.fault == REPLACED, end
        await loop.balanced()
    assert isinstance(end, MigrationCommitted), end
    await loop.evaluated(planned.plan)
    await loop.balanced()
    assert len(loop.verdicts(planned.plan)) == 1
    assert (await judge(loop.engine)).epoch > 0


async def test_a_planner_that_dies_while_it_judges_is_followed_by_one_that_does_so_once(loop: Loop) -> None:
    random = np.random.default_rng(2)
    for _ in range(TIMES):
        planned = await loop.next_plan()
        await until(lambda plan=planned.plan: loop.engine.history.end_of(plan), "the plan ends", END_SECONDS)
        await asyncio.sleep(float(random.uniform(0, 3.0)))
        await loop.change_of_lead()
        await loop.evaluated(planned.plan)
        loop.nothing_between(planned.plan)
        await loop.balanced()
        assert len(loop.verdicts(planned.plan)) == 1


async def test_a_pause_holds_though_the_planner_dies_and_ends_when_it_is_told_so(loop: Loop) -> None:
    for time in range(TIMES):
        paused = await steered(loop, paused=True, reason=f"reason {time}")
        assert paused.paused
        await until(lambda: loop.described(), "it answers", END_SECONDS)
        open_plans = {one.plan for one in loop.own if loop.engine.history.end_of(one.plan) is None}
        await until(
            lambda plans=open_plans: all(loop.engine.history.end_of(plan) for plan in plans),
            "what was begun is carried out",
            END_SECONDS,
        )
        known = [one.plan for one in loop.own]
        count = len(known)
        loop.traffic.turn()
        await loop.change_of_lead()
        loop_status = await until(
            lambda: withheld(loop), lambda: f"a plan is withheld:\n{loop.deployment.leader.tail}", END_SECONDS
        )
        assert loop_status.paused
        assert loop_status.paused_reason == f"reason {time}"
        assert [one.plan for one in loop.own] == known
        await steered(loop, paused=False, reason="")
        await until(
            lambda count=count: len(loop.own) > count,
            lambda: f"it plans again:\n{loop.deployment.leader.tail}",
            END_SECONDS,
        )
        await loop.balanced()


async def withheld(loop: Loop) -> LoopDescribed | None:
    """Once it says that a plan would pay, and is not carried out because of the pause."""
    described = await loop.described()
    return (
        described
        if described and any("it is paused" in engine.decided for engine in described.engines)
        else None
    )


async def steered(loop: Loop, *, paused: bool, reason: str) -> LoopDescribed:
    async def tried() -> LoopDescribed | None:
        try:
            answer = await loop.deployment.bus.request(
                loop.deployment.subjects.loop, SetLoopState(paused=paused, reason=reason), 2.0
            )
        except BusError:
            return None
        assert isinstance(answer, LoopDescribed), answer
        return answer

    return await until(tried, f"the loop takes paused = {paused}", END_SECONDS)
