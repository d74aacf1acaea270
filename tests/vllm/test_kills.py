"""kill -9 of vLLM, of the agent, of the planner, amid a plan: what was promised to clients holds, and the
ledger agrees with vLLM afterwards."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from deploy.client.migrations import NotAccepted
from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationPlanned, MigrationStaged
from fleet.placement import Placement
from tests.conftest import free_port
from tests.vllm.roost import NAME, Agent, Fleet, random_map, roost, until, until_served
from tests.vllm.server import Options, Vllm, end, vllm
from tests.vllm.traffic import Prompt, Traffic, prompts, streaming, unbroken

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400)]
TIMES = int(os.environ.get("ROOST_VLLM_KILLS", "5"))
OTHER = "other"


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
        )
        self._stack = AsyncExitStack()
        self.server = await self._stack.enter_async_context(vllm(options, self.folder / str(self.lives)))

    async def kill_vllm(self) -> None:
        """Kill all of its processes at once."""
        assert self.server is not None
        for process in self.server.processes():
            process.kill()
        await self.end_vllm()

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
        alone = Options(attention="alone", port=other_port, nice=15)  # the one that starts again comes first
        await stack.enter_async_context(vllm(alone, folder / "other"))
        there = World(fleet, folder, agent, port, free_port())
        await there.start_vllm()
        stack.push_async_callback(there.end_vllm)
        await fleet.until_joined()
        await until_served(fleet)
        assert there.server is not None
        there.expected = await unbroken(there.server, prompts(8))
        yield there


async def until_ended(fleet: Fleet) -> None:
    """Wait until every plan that began has ended in the ledger."""
    entries = (MigrationPlanned, MigrationStaged, MigrationCommitted, MigrationAborted)

    async def over() -> bool:
        log = fleet.bus.replay(fleet.subjects.migrations(NAME), follow=False)
        last = {one.message.plan: one.message async for one in log if isinstance(one.message, entries)}
        return all(isinstance(one, MigrationCommitted | MigrationAborted) for one in last.values())

    await until(over, "plans end")


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
    for why in traffic.failed:  # the others say why
        assert "Error" in why, why


async def amid_a_plan(world: World, number: int, blow: Callable[[], Awaitable[None]]) -> None:
    """Begin a plan, and strike after a while that differs each time."""
    before = (await world.fleet.until_joined()).now
    applying = asyncio.create_task(world.fleet.apply(random_map(before, 1000 + number)))
    await asyncio.sleep(0.05 + 0.12 * number)
    await blow()
    applying.cancel()
    await asyncio.gather(applying, return_exceptions=True)


@pytest.mark.parametrize("number", range(TIMES))
async def test_the_agent_is_killed(world: World, number: int) -> None:
    before = (await world.fleet.until_joined()).now

    async def blow() -> None:
        await world.agent.end(signal.SIGKILL)
        await world.agent.start()

    async with streaming(world.fleet, world.expected) as traffic:
        await amid_a_plan(world, number, blow)
        await until_ended(world.fleet)
        await agrees(world, before)
    nothing_wrong(traffic)
    assert traffic.failed == [], "vLLM serves on without its agent"


@pytest.mark.parametrize("number", range(TIMES))
async def test_the_planner_is_killed(world: World, number: int) -> None:
    before = (await world.fleet.until_joined()).now

    async def blow() -> None:
        await world.fleet.live.restart("planner")

    async with streaming(world.fleet, world.expected) as traffic:
        await amid_a_plan(world, number, blow)
        await asyncio.sleep(5)
        await until_ended(world.fleet)
        await agrees(world, before)
    nothing_wrong(traffic)
    assert traffic.failed == []


@pytest.mark.parametrize("number", range(TIMES))
async def test_vllm_is_killed(world: World, number: int) -> None:
    there = await world.fleet.until_joined()
    async with streaming(world.fleet, world.expected) as traffic:
        await asyncio.sleep(2)
        await amid_a_plan(world, number, world.kill_vllm)
        finished = traffic.finished
        await until(lambda: traffic.finished > finished + 4, "the other vLLM serves on")
        await world.start_vllm()
        await agrees(world, there.now, other_than=there.joined.worker_id)
    nothing_wrong(traffic)


async def test_nothing_is_left_draining(world: World) -> None:
    assert world.server is not None
    async with httpx.AsyncClient(timeout=10) as client:
        assert (await client.get(f"{world.server.url}/health")).status_code == 200
    assert "draining" not in await world.fleet.command("status")
    await asyncio.to_thread(end, world.server)
