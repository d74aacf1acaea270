"""The examples, run before a live fleet: a simulated engine, the planner and a router."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing

import pytest

from bus.memory import MemoryBroker, MemoryBus
from client.examples.explain_decision import explain
from client.examples.follow_migrations import follow
from client.examples.forward_requests import forward
from client.examples.watch_fleet import overview
from deploy.process import alongside
from fleet.requests.plans import MigrateExpert, MigrationAccepted
from migration.config import MigrationConfig
from migration.service import MigrationService
from router.api.app import create_app
from router.config import RouterConfig
from router.service import RouterService
from tests.router.router_fixture import running, served_app, until
from tests.simulated_engines import simulated_engine

MODEL = "demo"


@pytest.fixture
async def fleet() -> AsyncIterator[tuple[str, MemoryBus]]:
    """The URL of the router, and the bus."""
    broker = MemoryBroker()
    async with AsyncExitStack() as stack:
        bus = MemoryBus(broker)
        planner = MigrationService(MemoryBus(broker), broker.subjects, MigrationConfig(automatic=False))
        await stack.enter_async_context(alongside(planner.run(), "planner"))
        await stack.enter_async_context(
            simulated_engine(MemoryBus(broker), broker.subjects, ranks=2, slots_per_rank=18)
        )
        service = RouterService(MemoryBus(broker), broker.subjects, RouterConfig())
        await stack.enter_async_context(running(service))
        url = await stack.enter_async_context(served_app(create_app(service)))
        await until(lambda: service.ready, 20.0)
        yield url, bus


async def test_the_examples_do_what_they_say(fleet: tuple[str, MemoryBus]) -> None:
    url, bus = fleet
    said = await explain(url, MODEL)
    assert said.startswith("sim-0/")
    assert "without it sim-0/" in said
    chosen, pieces = await forward(url, MODEL)
    assert chosen.startswith("sim-0/")
    assert pieces > 1
    (line,) = await overview(url)
    assert line.startswith("sim-0: live, epoch 0, ")  # then the reason for no plan
    async with aclosing(follow(url)) as lines:
        answer = await bus.request(
            bus.broker.subjects.migrate, MigrateExpert(engine="sim-0", layer=0, expert=0, rank=1), 20.0
        )
        assert isinstance(answer, MigrationAccepted)
        begun = await anext(lines)
        assert " of sim-0 begins, 1 copies" in begun
        done = await anext(lines)
        assert done.endswith("is done, epoch 1")
