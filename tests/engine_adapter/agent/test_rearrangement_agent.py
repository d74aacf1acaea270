"""Handovers of an engine that moves its experts itself, over the memory bus: the agent between a coordinator
and workers that vote."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from bus import Declined, Message
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from engine_adapter.agent.rearrangement_agent import RearrangementAgent
from fleet.handover import RankState
from fleet.placement import Placement
from fleet.requests.engines import DescribeMemory
from fleet.requests.handovers import (
    AbortHandover,
    CommitHandover,
    DescribeHandover,
    EndLease,
    HandoverDescribed,
    ProposeHandover,
)
from tests.voting_workers import Links, Voters

SUBJECTS = Subjects()
WORKER = 7
FIRST = Placement(np.array([[0, 1, 2, 2, 3, 0]]), experts=4, ranks=2, epoch=1)
NEXT = Placement(np.array([[0, 1, 3, 2, 3, 1]]), experts=4, ranks=2, epoch=2)


@dataclass(eq=False)
class Deployment:
    """Workers, the agent that speaks for them, and the coordinator's side of the bus."""

    voters: Voters
    links: Links
    broker: MemoryBroker
    heard: list[HandoverDescribed] = field(default_factory=list)

    async def tell(self, rank: int, command: Message) -> HandoverDescribed:
        answer = await MemoryBus(self.broker).request(SUBJECTS.handover("a", WORKER, rank), command)
        assert isinstance(answer, HandoverDescribed)
        return answer

    async def propose(self, placement: Placement = NEXT, handover: int = 5) -> None:
        for rank in range(placement.ranks):
            await self.tell(
                rank,
                ProposeHandover(
                    engine="a",
                    worker_id=WORKER,
                    rank=rank,
                    token=1,
                    handover=handover,
                    plan="p",
                    placement=placement.record(),
                    deadline_seconds=10.0,
                ),
            )

    async def commit(self, handover: int = 5) -> None:
        for rank in range(2):
            await self.tell(rank, CommitHandover(worker_id=WORKER, rank=rank, token=1, handover=handover))

    async def described(self, rank: int) -> HandoverDescribed:
        return await self.tell(rank, DescribeHandover(worker_id=WORKER, rank=rank))

    async def until(self, expected: Callable[[HandoverDescribed], bool], seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            for rank in range(2):
                while True:
                    if expected(await self.described(rank)):
                        break
                    await asyncio.sleep(0.01)


@asynccontextmanager
async def deployment(
    voters: Voters | None = None, broker: MemoryBroker | None = None
) -> AsyncIterator[Deployment]:
    voters = voters or Voters(FIRST)
    broker = broker or MemoryBroker(SUBJECTS)
    there = Deployment(voters, Links(voters), broker)
    agent = RearrangementAgent(MemoryBus(broker), SUBJECTS, "a", WORKER, there.links)

    async def listen() -> None:
        async with MemoryBus(broker).subscribe(SUBJECTS.handovers()) as reports:
            async for received in reports:
                assert isinstance(received.message, HandoverDescribed)
                there.heard.append(received.message)

    tasks = [asyncio.create_task(agent.run(), name="agent"), asyncio.create_task(listen(), name="listener")]
    try:
        await asyncio.sleep(0.01)
        yield there
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


@pytest.mark.looptime
async def test_a_map_comes_into_force_on_all_ranks_and_every_change_is_published() -> None:
    async with deployment() as there:
        await there.propose()
        await there.until(lambda said: said.state == RankState.STAGED)
        assert not there.voters.step(), "nobody may vote before the commit"
        await there.commit()
        await there.until(lambda said: said.state == RankState.READY)
        assert there.voters.step()
        await there.until(lambda said: (said.served, said.flipped) == (2, 5))
        assert there.links.placement == NEXT
        for rank in range(2):
            states = [said.state for said in there.heard if said.rank == rank]
            assert states[-3:] == ["staged", "ready", "serving"]


@pytest.mark.looptime
async def test_the_memory_of_its_workers_is_not_stated() -> None:
    async with deployment() as there:
        with pytest.raises(Declined, match="a moves its experts itself, and does not state the memory"):
            await there.tell(1, DescribeMemory(worker_id=WORKER, rank=1))


@pytest.mark.looptime
async def test_one_rank_that_is_permitted_alone_moves_nothing() -> None:
    async with deployment() as there:
        await there.propose()
        await there.tell(0, CommitHandover(worker_id=WORKER, rank=0, token=1, handover=5))
        assert not any(there.voters.step() for _ in range(5))
        await there.tell(1, CommitHandover(worker_id=WORKER, rank=1, token=1, handover=5))
        assert there.voters.step()


@pytest.mark.looptime
async def test_messages_that_get_lost_are_sent_again_and_those_that_come_twice_change_nothing() -> None:
    async with deployment() as there:
        there.links.lost = {1}
        await there.propose()
        await asyncio.sleep(1.2)
        assert [(await there.described(rank)).state for rank in (0, 1)] == ["staged", "staging"]
        there.links.lost = set()
        await there.until(lambda said: said.state == RankState.STAGED, 1.0)
        await there.propose()
        await there.commit()
        await there.commit()
        assert there.voters.step()
        await there.commit()
        await there.until(lambda said: said.served == 2)
        assert len(there.voters.maps) == 2


@pytest.mark.looptime
async def test_a_worker_that_drops_its_map_makes_the_others_drop_theirs() -> None:
    async with deployment() as there:
        await there.propose()
        await there.commit()
        there.voters.workers[0].drop(5, "its operator asked for it")
        there.links.report(0)
        await there.until(lambda said: said.concluded == 5, 2.0)
        said = await there.described(1)
        assert (said.flipped, said.fault) == (0, "refused")
        assert "its operator asked for it" in said.failure
        assert not there.voters.step()


@pytest.mark.looptime
async def test_an_abort_is_over_when_the_worker_says_so() -> None:
    async with deployment() as there:
        await there.propose()
        there.links.mute = {1}
        for rank in range(2):
            await there.tell(
                rank, AbortHandover(worker_id=WORKER, rank=rank, token=1, handover=5, reason="enough")
            )
        await asyncio.sleep(0.1)
        assert [(await there.described(rank)).concluded for rank in (0, 1)] == [5, 4]
        there.links.mute = set()
        there.links.report(1)
        await there.until(lambda said: said.concluded == 5, 1.0)


@pytest.mark.looptime
async def test_an_idle_engine_is_nudged() -> None:
    async with deployment() as there:
        there.links.steps_when_nudged = False
        await there.propose()
        await there.commit()
        await asyncio.sleep(6)
        assert there.links.nudges == 1
        assert [(await there.described(rank)).pending for rank in (0, 1)] == ["idle", "idle"]
        assert there.heard[-1].pending == "idle"
        there.links.steps_when_nudged = True
        await there.until(lambda said: (said.served, said.pending) == (2, ""), 6.0)
        assert there.links.nudges == 2


@pytest.mark.looptime
async def test_another_agent_goes_on_where_the_first_one_stopped() -> None:
    voters, broker = Voters(FIRST), MemoryBroker(SUBJECTS)
    async with deployment(voters, broker) as there:
        await there.propose()
        await there.tell(0, CommitHandover(worker_id=WORKER, rank=0, token=1, handover=5))
    async with deployment(voters, broker) as there:
        assert [(await there.described(rank)).state for rank in (0, 1)] == ["ready", "staged"]
        await there.commit()
        assert voters.step()
        await there.until(lambda said: said.flipped == 5)
    async with deployment(voters, broker) as there:
        assert there.links.placement == NEXT
        assert (await there.described(0)).served == 2


@pytest.mark.looptime
async def test_a_rank_without_a_worker_refuses_commands_until_it_is_back() -> None:
    async with deployment() as there:
        there.links.away = {1}
        with pytest.raises(Declined, match="the worker of expert rank 1 is not connected to the agent"):
            await there.described(1)
        assert (await there.described(0)).state == RankState.SERVING
        there.links.reconnect(1)
        assert (await there.described(1)).state == RankState.SERVING


@pytest.mark.looptime
async def test_a_fault_of_the_engine_refuses_every_map_and_nonsense_is_refused() -> None:
    async with deployment() as there:
        there.links.fault = "slot 3 of layer 0 holds other weights than those of expert 2"
        await there.propose()
        said = await there.described(1)
        assert (said.state, said.fault, said.failure) == ("failed", "engine", there.links.fault)
        assert there.links.sent == []
        with pytest.raises(Declined, match="this is expert rank 0 of worker 7, not rank 1"):
            await there.tell(0, DescribeHandover(worker_id=WORKER, rank=1))
        with pytest.raises(Declined, match="expected a command about handovers, got EndLease"):
            await there.tell(0, EndLease(worker_id=WORKER, rank=0, lease=1))
