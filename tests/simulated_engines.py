"""Simulated engines inside a test, with real sockets: many ranks, told to fail as the test likes.

    async with simulated_engine(bus, subjects, "sim-0", ranks=2) as host:
        host.engine.order(FaultOrder(fault="slow", rank=1, factor=4))
        await host.kill()

The bus may be a MemoryBus or a NatsBus; steps take real time (`time_scale` 0.1 unless said), so not under a
virtual clock.
"""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bus import Bus
from bus.protocol.subjects import Subjects
from deploy.http.sockets import listen, url_of
from deploy.parts.simulated import OPEN, SimulatedHost, hosted, nodes
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.config import AgentConfig
from engine_adapter.serving.authentication import RouterAuthentication
from engine_adapter.simulated.model.config import SimulatedConfig
from fleet.placement import Placement

AGENT = AgentConfig(
    heartbeat_seconds=0.2, facts_seconds=0.02, lease_seconds=0.6, load_seconds=0.2, experts_seconds=0.2
)
_workers = itertools.count(1)


@asynccontextmanager
async def simulated_engine(
    bus: Bus,
    subjects: Subjects,
    name: str = "sim-0",
    *,
    replaces: int | None = None,
    placement: Placement | None = None,
    agent: AgentConfig = AGENT,
    drain_seconds: float = 1.0,
    admission: RouterAuthentication = OPEN,
    **settings: Any,
) -> AsyncIterator[SimulatedHost]:
    """An engine that has joined, until the block ends. settings: of `SimulatedConfig`; replaces: worker_id of
    one of the same name that died."""
    config = SimulatedConfig(**{"shape": "demo", "time_scale": 0.1, "kv_blocks": 2048} | settings)
    listening = [listen("127.0.0.1", 0) for _ in range(config.ranks)]
    urls = tuple(map(url_of, listening))
    who = AgentIdentity(
        engine=name,
        worker_id=next(_workers) << 32,
        node=name,
        urls=urls,
        nodes=nodes(name, config),
        replaces=replaces,
    )
    async with hosted(
        bus,
        subjects,
        who,
        listening,
        config,
        agent,
        drain_seconds=drain_seconds,
        placement=placement,
        admission=admission,
    ) as host:
        yield host
