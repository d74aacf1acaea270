"""kill -9 of vLLM, of the agent, of the planner, amid a plan: what was promised to clients holds, and the
ledger agrees with vLLM afterwards."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio

from deploy.client.migrations import NotAccepted
from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationPlanned, MigrationStaged
from fleet.placement import Placement
from tests.conftest import free_port
from tests.vllm.roost import NAME, Agent, Fleet, random_map, roost, until, until_served
from tests.vllm.server import SERVED, Options, Vllm, end, vllm
from tests.vllm.traffic import TOKENS, Prompt, Traffic, prompts, streaming, unbroken, unstreamed

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400)]
TIMES = int(os.environ.get("ROOST_VLLM_KILLS", "5"))
OTHER = "other"
WHOLE_TOKENS = 1900
"""of an answer that is not streamed: it takes longer than the router waits for the agent's heartbeats"""
CONTEXT = ("--max-model-len", "2048")
DELAY_SECONDS = 0.08
"""between the begin of a plan and a blow, times the number of the blow; a plan takes about half a second"""
logger = logging.getLogger(__name__)


@dataclass
class World:
    """A vLLM of two expert ranks behind Roost, and a second one with the same weights, which takes over
    streams."""

    fleet: Fleet
    folder: Path
    agent: Agent
    port: int
    kv_port: int
    expected: dict[Prompt, list[int]] = field(default_factory=dict)
    hits: dict[str, list[bool]] = field(default_factory=dict)
    """by whom the blows struck: whether the plan was open then, by the ledger"""
    lives: int = 0
    server: Vllm | None = None
    _stack: AsyncExitStack | None = None

    async def start_vllm(self) -> None:
        """Start the vLLM of two expert ranks again, at the same address."""
        self.lives += 1
        options = Options(
            attention="tp",
            port=self.port,
            agent=f"127.0.0.1:{self.agent.port}",
            secret=self.agent.secret,
            kv_port=self.kv_port,
            arguments=CONTEXT,
        )
        self._stack = AsyncExitStack()
        self.server = await self._stack.enter_async_context(vllm(options, self.folder / str(self.lives)))

    async def end_vllm(self) -> None:
        if self._stack is not None:
            await self._stack.aclose()
            self._stack = None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("kills")
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(roost(folder))
        other_port, port = free_port(), free_port()
        other = Agent(fleet.live, f"http://127.0.0.1:{other_port}", free_port(), folder, OTHER)
        await other.start()
        stack.push_async_callback(other.end)
        agent = Agent(fleet.live, f"http://127.0.0.1:{port}", free_port(), folder)
        await agent.start()
        stack.push_async_callback(agent.end)
        alone = Options(
            attention="alone", port=other_port, nice=15, arguments=CONTEXT
        )  # the one that starts again comes first
        await stack.enter_async_context(vllm(alone, folder / "other"))
        there = World(fleet, folder, agent, port, free_port())
        await there.start_vllm()
        stack.push_async_callback(there.end_vllm)
        await fleet.until_joined()
        await until_served(fleet)
        assert there.server is not None
        there.expected = await unbroken(there.server, prompts(8))
        yield there


Entry = MigrationPlanned | MigrationStaged | MigrationCommitted | MigrationAborted


async def ledger(fleet: Fleet, *, follow: bool = False) -> AsyncGenerator[tuple[float, Entry], None]:
    """Yield the entries about plans in order, and when they were written."""
    async for one in fleet.bus.replay(fleet.subjects.migrations(NAME), follow=follow):
        if isinstance(one.message, Entry):
            yield one.published_at, one.message


async def until_ended(fleet: Fleet) -> None:
    """Wait until every plan that began has ended in the ledger."""

    async def over() -> bool:
        last = {entry.plan: entry async for _, entry in ledger(fleet)}
        return all(isinstance(one, MigrationCommitted | MigrationAborted) for one in last.values())

    await until(over, "plans end")


async def until_planned(fleet: Fleet, known: int) -> None:
    """Wait for one plan more to begin in the ledger than were known."""
    async with aclosing(ledger(fleet, follow=True)) as log:
        async for _, entry in log:
            known -= isinstance(entry, MigrationPlanned)
            if known < 0:
                return


async def count_hit(world: World, whom: str, struck: float) -> None:
    """Note whether a plan was open at a moment: the ledger had its begin, and not its end."""
    before = [entry async for written, entry in ledger(world.fleet) if written < struck]
    is_open = isinstance(before[-1], MigrationPlanned | MigrationStaged)
    logger.info("%s was killed after %s", whom, type(before[-1]).__name__)
    world.hits.setdefault(whom, []).append(is_open)


async def agrees(world: World, before: Placement, other_than: int = 0) -> None:
    """Check that what the ledger says is served is what vLLM serves: the next plan, made for it, is taken by
    every worker, each of which compares digests first."""
    now = (await world.fleet.until_joined(other_than=other_than)).now
    assert now.epoch >= before.epoch
    after: list[str] = []

    async def accepted() -> bool:
        try:
            after.append(await world.fleet.apply(random_map(now, now.epoch)))
        except NotAccepted as refusal:  # whoever was killed is not back yet
            world.fleet.said.append(str(refusal))
        return bool(after)

    await until(accepted, "the next map is accepted")
    assert after == [""]
    assert (await world.fleet.until_joined()).now.epoch == now.epoch + 1


def nothing_wrong(traffic: Traffic) -> None:
    assert traffic.finished >= 3
    assert traffic.differ == [], "streams that finish are equal to unbroken ones"
    assert traffic.unexplained == [], "the others say why"


async def amid_a_plan(world: World, number: int, victims: Sequence[psutil.Process]) -> float:
    """Begin a plan, and kill processes while it is open, after a while that differs each time. Return the
    time of the blow. A plan that has ended too soon is followed by another."""
    fleet, delay = world.fleet, DELAY_SECONDS * number
    for attempt in range(10):
        before = (await fleet.until_joined()).now
        known = len([1 async for _, entry in ledger(fleet) if isinstance(entry, MigrationPlanned)])
        applying = asyncio.create_task(fleet.apply(random_map(before, 1000 + 10 * number + attempt)))
        planned = asyncio.create_task(until_planned(fleet, known))
        await asyncio.wait((applying, planned), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(delay)
        is_open = not applying.done()
        for process in victims if is_open else ():
            with suppress(psutil.NoSuchProcess):  # it ended with its parent
                process.kill()
        struck = time.time()
        for task in (applying, planned):
            task.cancel()
        ended = await asyncio.gather(applying, planned, return_exceptions=True)
        if is_open:
            return struck
        fleet.said.append(f"too late: {ended[0]!r}")
        delay /= 2
    raise AssertionError(f"no plan was open when it should be struck: {fleet.said[-10:]}")


async def until_missed(fleet: Fleet) -> None:
    """Wait until the router takes the engine for dead, because its agent sends no heartbeats."""
    async with httpx.AsyncClient(timeout=10) as client:

        async def missed() -> bool:
            asked = {"model": SERVED, "prompt": "x", "max_tokens": 1}
            answer = await client.post(f"{fleet.url}/v1/route", json=asked)
            excluded = answer.json().get("excluded", ())
            return any(one["engine"] == NAME and "heartbeats" in one["reason"] for one in excluded)

        await until(missed, "the router misses the heartbeats of the agent")


async def chosen(client: httpx.AsyncClient, fleet: Fleet, decision: str) -> str:
    """Return the rank that a decision chose."""
    return str((await client.get(f"{fleet.url}/v1/decisions/{decision}")).json()["chosen"])


@pytest.mark.parametrize("number", range(TIMES))
async def test_the_agent_is_killed(world: World, number: int) -> None:
    """Every other time it starts again only after the router has missed its heartbeats."""
    fleet, before, pending = world.fleet, (await world.fleet.until_joined()).now, []
    asked = list(world.expected)[:4]
    async with httpx.AsyncClient(timeout=600) as client, streaming(fleet, world.expected) as traffic:
        whole = [asyncio.create_task(unstreamed(client, fleet, prompt, WHOLE_TOKENS)) for prompt in asked]
        struck = await amid_a_plan(world, number, [world.agent.process])
        await world.agent.ended()
        if number % 2 == 0:
            await until_missed(fleet)
            pending = [not one.done() for one in whole]
        await world.agent.start()
        await until_ended(fleet)
        await count_hit(world, "the agent", struck)
        await agrees(world, before)
        answers = await asyncio.gather(*whole)
        at_vllm = [(await chosen(client, fleet, id_)).startswith(f"{NAME}/") for _, id_ in answers]
    nothing_wrong(traffic)
    assert traffic.failed == [], "vLLM serves on without its agent"
    assert [ids[:TOKENS] for ids, _ in answers] == [world.expected[prompt] for prompt in asked]
    assert {len(ids) for ids, _ in answers} == {WHOLE_TOKENS}
    assert not any(id_.endswith("-a2") for _, id_ in answers), "each was computed once"
    if pending:
        both = [there and late for there, late in zip(at_vllm, pending, strict=True)]
        assert any(both), "one was computed by the vLLM whose agent was missed"


@pytest.mark.parametrize("number", range(TIMES))
async def test_the_planner_is_killed(world: World, number: int) -> None:
    fleet, before = world.fleet, (await world.fleet.until_joined()).now
    planner = fleet.live.processes()["planner"]

    def is_back() -> bool:
        return bool(fleet.live.processes().get("planner", planner).pid != planner.pid)

    async with streaming(fleet, world.expected) as traffic:
        struck = await amid_a_plan(world, number, [planner])
        await until(is_back, "the supervisor starts the planner again")
        await until_ended(fleet)
        await count_hit(world, "the planner", struck)
        await agrees(world, before)
    nothing_wrong(traffic)
    assert traffic.failed == []


@pytest.mark.parametrize("number", range(TIMES))
async def test_vllm_is_killed(world: World, number: int) -> None:
    there = await world.fleet.until_joined()
    assert world.server is not None
    async with streaming(world.fleet, world.expected) as traffic:
        await asyncio.sleep(2)
        struck = await amid_a_plan(world, number, world.server.processes())
        await world.end_vllm()
        finished = traffic.finished
        await until(lambda: traffic.finished > finished + 4, "the other vLLM serves on")
        await world.start_vllm()
        await until_ended(world.fleet)
        await count_hit(world, "vLLM", struck)
        await agrees(world, there.now, other_than=there.joined.worker_id)
    nothing_wrong(traffic)
    logger.info("vLLM was killed: %d streams finished, others: %s", traffic.finished, traffic.failed)


async def test_the_blows_struck_open_plans(world: World) -> None:
    """A plan may end between the last look at it and the blow: once of several times that does no harm."""
    for whom, hits in world.hits.items():
        assert sum(hits) >= max(1, len(hits) - 1), f"{whom}: {hits}"


async def test_nothing_is_left_draining(world: World) -> None:
    assert world.server is not None
    async with httpx.AsyncClient(timeout=10) as client:
        assert (await client.get(f"{world.server.url}/health")).status_code == 200
    assert "draining" not in await world.fleet.command("status")
    await asyncio.to_thread(end, world.server)
