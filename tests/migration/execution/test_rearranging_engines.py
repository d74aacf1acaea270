"""Plans for an engine that moves its experts itself, over the memory bus and in virtual time: the migration
service, the agent that speaks for the expert ranks, and workers that vote."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import numpy as np
import pytest

from bus import Declined
from bus.memory import MemoryBroker, MemoryBus
from engine_adapter.agent.rearrangement_agent import RearrangementAgent
from engine_adapter.initial_placement import epoch_above
from fleet.dispatch import ROW_HASH
from fleet.facts.engines import EngineHeartbeat, EngineJoined
from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationStaged
from fleet.facts.placements import PlacementCommitted
from fleet.handover import CoordinatorState
from fleet.layout import TP_EP
from fleet.placement import Placement
from fleet.requests.control_loop import DescribeLoop, LoopDescribed
from fleet.requests.plans import RollBack
from migration.model.plan import Copy, Handover, Plan, PlanStep, planned, replay
from tests.migration.builders import joined
from tests.migration.executor_fixture import SUBJECTS, apply, ask, in_words, key, leading, log
from tests.voting_workers import Links, Voters

ROW = [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
FIRST = Placement(np.array([ROW, ROW]), experts=8, ranks=2, epoch=1, attention="tp")
STEP_SECONDS = 0.05


@dataclass(eq=False)
class Deployment:
    """One engine of two expert ranks behind a single target."""

    broker: MemoryBroker
    voters: Voters
    worker_id: int
    links: Links
    agent: "asyncio.Task[None]"
    stepping: "asyncio.Task[None]"

    async def join(self) -> None:
        await MemoryBus(self.broker).record(SUBJECTS.membership("a"), self.description)

    @property
    def description(self) -> EngineJoined:
        return joined(
            self.worker_id,
            "a",
            self.links.placement,
            urls=("http://x",),
            layout=TP_EP,
            rearranges=True,
            dispatch=ROW_HASH,
        )

    def serve(self) -> None:
        """Put a new agent process in place of the old one."""
        self.links = Links(self.voters)
        agent = RearrangementAgent(MemoryBus(self.broker), SUBJECTS, "a", self.worker_id, self.links)
        self.agent = asyncio.create_task(agent.run(), name="agent")

    async def kill_agent(self) -> None:
        self.agent.cancel()
        with suppress(asyncio.CancelledError):
            await self.agent
        self.voters.links.remove(self.links)

    async def idle(self) -> None:
        self.stepping.cancel()
        with suppress(asyncio.CancelledError):
            await self.stepping

    def busy(self) -> None:
        self.stepping = asyncio.create_task(self.voters.run(STEP_SECONDS), name="steps")

    @property
    def states(self) -> list[str]:
        return [worker.status.state for worker in self.voters.workers]

    async def reaches(self, *states: str) -> None:
        async with asyncio.timeout(30):
            while True:
                if self.states == list(states):
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def deployment(
    broker: MemoryBroker, worker_id: int = 1, first: Placement = FIRST, *, by_layers: bool = False
) -> AsyncIterator[Deployment]:
    """Yield an engine that has joined, makes steps and sends heartbeats."""
    bus, voters = MemoryBus(broker), Voters(first, by_layers=by_layers)
    nothing = asyncio.create_task(asyncio.sleep(0))
    there = Deployment(broker, voters, worker_id, Links(voters), nothing, nothing)
    there.serve()
    there.busy()
    heart = bus.publisher(SUBJECTS.heartbeats("a"))

    async def beat() -> None:
        while True:
            epoch = there.links.placement.epoch
            await heart.publish(EngineHeartbeat(engine="a", worker_id=worker_id, epoch=epoch))
            await asyncio.sleep(1)

    beating = asyncio.create_task(beat(), name="heartbeats")
    await there.join()
    try:
        yield there
    finally:
        tasks = (there.agent, there.stepping, beating)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert not any(isinstance(one, Exception) for one in ended), ended


def plan(base: Placement = FIRST, expert: int = 2) -> Plan:
    """Make a plan of one handover: the second copy of expert 1 makes room for one of another expert."""
    slot = 9
    steps = [
        PlanStep(
            kind="replicate",
            layer=layer,
            slot=slot,
            expert=expert,
            evicted=int(base.expert_of_slot[layer, slot]),
            copies=(Copy(expert=expert, slot=slot, source=expert, link="same-node", bytes=384),),
            why="so",
        )
        for layer in range(base.layers)
    ]
    made = planned(base, [Handover(epoch=base.epoch + 1, steps=tuple(steps))], reason="test")
    replay(base, made)
    return made


@pytest.mark.looptime
async def test_a_plan_is_staged_decided_voted_for_and_in_force_on_all_ranks_behind_one_target() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with deployment(broker) as engine, leading(bus) as service:
        accepted = await apply(bus, plan())
        assert (accepted.handovers, accepted.copies, accepted.bytes) == (1, 2, 2 * 384)
        await asyncio.sleep(3)
        (goal,) = replay(FIRST, plan())
        assert engine.voters.maps == [FIRST, goal]
        assert service.placements.engines()["a"].placement == goal
        entries = await log(bus)
        assert in_words(entries) == ["1@1", "Planned", "Staged", "1@2", "Committed"]
        (staged,) = [entry for entry in entries if isinstance(entry, MigrationStaged)]
        (committed,) = [entry for entry in entries if isinstance(entry, MigrationCommitted)]
        assert (committed.copies, committed.bytes, committed.last) == (2, 768, True)
        assert [(one.layer, one.expert, one.rank) for one in staged.arrivals] == [(0, 2, 1), (1, 2, 1)]
        await ask(bus, RollBack(engine="a"))
        await asyncio.sleep(3)
        assert engine.voters.maps[-1].epoch == 3
        assert (engine.voters.maps[-1].expert_of_slot == FIRST.expert_of_slot).all()


@pytest.mark.looptime
async def test_a_map_that_a_worker_drops_after_the_decision_is_refused_by_all_and_the_plan_is_aborted() -> (
    None
):
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with deployment(broker) as engine, leading(bus):
        await engine.idle()
        await apply(bus, plan())
        await engine.reaches("voting", "voting")
        engine.voters.workers[1].drop(1, "its own policy takes over")
        engine.busy()
        await asyncio.sleep(3)
        assert engine.states == ["refused", "refused"]
        assert engine.voters.maps == [FIRST]
        entries = await log(bus)
        assert in_words(entries) == ["1@1", "Planned", "Staged", "Aborted"]
        assert isinstance(aborted := entries[-1], MigrationAborted)
        assert (aborted.fault, aborted.epoch) == ("refused", 2)
        assert "its own policy takes over" in aborted.reason
        assert (standing := key(broker)) is not None
        assert standing.state is CoordinatorState.IDLE
        await apply(bus, plan(expert=3))
        await asyncio.sleep(3)
        assert [one.epoch for one in engine.voters.maps] == [1, 2]


@pytest.mark.looptime
async def test_a_worker_that_rejects_the_map_aborts_the_plan_before_the_decision() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with deployment(broker) as engine, leading(bus):
        engine.voters.workers[1].map = Placement(
            FIRST.expert_of_slot[::-1, ::-1], experts=8, ranks=2, attention="tp", epoch=1
        )
        await apply(bus, plan())
        await asyncio.sleep(3)
        entries = await log(bus)
        assert in_words(entries) == ["1@1", "Planned", "Aborted"]
        assert "is in force, not" in entries[-1].reason
        assert engine.states == ["idle", "idle"]


@pytest.mark.looptime
async def test_a_worker_that_is_silent_after_the_permission_leaves_the_end_unknown_until_it_answers() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with deployment(broker) as engine, leading(bus):
        await engine.idle()
        await apply(bus, plan())
        await engine.reaches("voting", "voting")
        engine.links.mute = {1}
        engine.busy()
        await asyncio.sleep(120)
        assert engine.voters.maps[-1].epoch == 2, "the vote has passed"
        assert (standing := key(broker)) is not None
        assert standing.state is CoordinatorState.COMMITTING
        assert in_words(await log(bus)) == ["1@1", "Planned", "Staged"]
        engine.links.mute = set()
        await asyncio.sleep(2)
        assert in_words(await log(bus)) == ["1@1", "Planned", "Staged", "1@2", "Committed"]


@pytest.mark.looptime
@pytest.mark.parametrize("moment", ["staged", "voting", "in force"])
async def test_an_agent_that_is_killed_amid_a_plan_is_followed_by_one_that_goes_on(moment: str) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with deployment(broker) as engine, leading(bus):
        await engine.idle()
        if moment == "staged":
            engine.links.mute = {0}
        await apply(bus, plan())
        await engine.reaches(*(["staged"] * 2 if moment == "staged" else ["voting"] * 2))
        await engine.kill_agent()
        if moment == "in force":
            assert engine.voters.step()
        await asyncio.sleep(1)
        engine.serve()
        engine.busy()
        await engine.join()
        await asyncio.sleep(15)
        assert engine.voters.maps[-1].epoch == 2
        assert in_words(await log(bus)) == ["1@1", "Planned", "Staged", "1@2", "Committed"]


@pytest.mark.looptime
@pytest.mark.parametrize("moment", ["staged", "voting"])
async def test_a_coordinator_that_ends_amid_a_plan_is_followed_by_one_that_ends_it(moment: str) -> None:
    broker = MemoryBroker()
    async with deployment(broker) as engine:
        await engine.idle()
        async with leading(MemoryBus(broker)):
            if moment == "staged":
                engine.links.mute = {1}
            await apply(MemoryBus(broker), plan())
            await engine.reaches(*(["staged"] * 2 if moment == "staged" else ["voting"] * 2))
        engine.links.mute = set()
        engine.links.report(1)
        engine.busy()
        async with leading(MemoryBus(broker)):
            await asyncio.sleep(5)
            told = in_words(await log(MemoryBus(broker)))
            if moment == "staged":
                assert told == ["1@1", "Planned", "Aborted"], "it was not decided yet"
                assert engine.states == ["idle", "idle"]
            else:
                assert told == ["1@1", "Planned", "Staged", "1@2", "Committed"]
                assert engine.voters.maps[-1].epoch == 2


@pytest.mark.looptime
async def test_an_engine_that_restarts_amid_a_decided_plan_serves_its_own_map_under_an_epoch_above() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with leading(bus) as service:
        async with deployment(broker) as engine:
            await engine.idle()
            await apply(bus, plan())
            await engine.reaches("voting", "voting")
        left = key(broker)
        assert left is not None
        assert left.state is CoordinatorState.COMMITTING
        recorded = [entry for entry in await log(bus) if isinstance(entry, PlacementCommitted)]
        epoch = epoch_above(max(entry.placement.epoch for entry in recorded), left.epoch)
        again = Placement(FIRST.expert_of_slot, experts=8, ranks=2, epoch=epoch, attention="tp")
        async with deployment(broker, 2, again) as engine:
            await asyncio.sleep(5)
            assert (standing := key(broker)) is not None
            assert standing.state is CoordinatorState.IDLE
            assert service.placements.engines()["a"].placement == again
            await apply(bus, plan(again))
            await asyncio.sleep(3)
            assert [one.epoch for one in engine.voters.maps] == [3, 4]
            epochs = [
                (entry.worker_id, entry.placement.epoch)
                for entry in await log(bus)
                if isinstance(entry, PlacementCommitted)
            ]
            assert sorted(epochs) == [(1, 1), (1, 2), (2, 3), (2, 4)]


@pytest.mark.looptime
async def test_an_idle_engine_makes_a_plan_pending_until_it_makes_steps() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with deployment(broker) as engine, leading(bus) as service:
        engine.links.steps_when_nudged = False
        await engine.idle()
        await apply(bus, plan())
        await asyncio.sleep(20)
        assert engine.links.nudges >= 2
        with pytest.raises(Declined, match=r"carrying out plan .* \(handover 1 of 1, pending: idle\)"):
            await apply(bus, plan())
        shown = await bus.request(SUBJECTS.loop, DescribeLoop())
        assert isinstance(shown, LoopDescribed)
        assert shown.engines[0].plans[0].outcome == "under way, 0 of 1 handovers done, pending: idle"
        engine.links.steps_when_nudged = True
        await asyncio.sleep(6)
        assert [one.epoch for one in engine.voters.maps] == [1, 2]
        assert service.placements.engines()["a"].epoch == 2
        await apply(bus, plan(engine.links.placement, expert=3))


@pytest.mark.looptime
async def test_a_map_that_comes_into_force_layer_by_layer_is_recorded_after_the_last_one() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with deployment(broker, by_layers=True) as engine, leading(bus) as service:
        await engine.idle()
        await apply(bus, plan())
        await engine.reaches("voting", "voting")
        assert engine.voters.step(), "the vote"
        assert not engine.voters.step(), "the first layer"
        engine.voters.workers[0].drop(1, "too late")
        await asyncio.sleep(1)
        with pytest.raises(Declined, match=r"handover 1 of 1, pending: 1 of 2 layers"):
            await apply(bus, plan())
        assert service.placements.engines()["a"].epoch == 1, "the old prices hold"
        assert engine.links.placement == FIRST
        engine.voters.step()
        await asyncio.sleep(1)
        assert engine.voters.maps[-1].epoch == 2
        assert in_words(await log(bus)) == ["1@1", "Planned", "Staged", "1@2", "Committed"]


@pytest.mark.looptime
async def test_weights_that_are_not_those_of_their_expert_end_a_plan_even_after_the_decision() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with deployment(broker) as engine, leading(bus):
        await engine.idle()
        await apply(bus, plan())
        await engine.reaches("voting", "voting")
        engine.links.fault = "slot 3 of layer 0 holds other weights than those of expert 2"
        engine.links.report(0)
        await asyncio.sleep(2)
        engine.busy()
        await asyncio.sleep(2)
        assert engine.voters.maps == [FIRST]
        aborted = (await log(bus))[-1]
        assert isinstance(aborted, MigrationAborted)
        assert engine.links.fault in aborted.reason
        await apply(bus, plan())
        await asyncio.sleep(2)
        assert engine.links.fault in (await log(bus))[-1].reason


@pytest.mark.looptime
async def test_a_rank_without_a_worker_is_named_and_nothing_is_begun() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with deployment(broker) as engine, leading(bus):
        engine.links.away = {1}
        with pytest.raises(Declined, match="the worker of expert rank 1 is not connected to the agent"):
            await apply(bus, plan())
        engine.links.reconnect(1)
        await apply(bus, plan())
        await asyncio.sleep(3)
        assert engine.voters.maps[-1].epoch == 2
