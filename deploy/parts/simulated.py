"""One simulated engine: all of its ranks, their HTTP servers and agents, in one process or in one test."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bus import Bus, BusError
from bus.claims import NameTaken
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.http.limits import RANK_LIMITS
from deploy.http.server import HttpServer
from deploy.launch_spec import RankLaunch, tell
from deploy.parts.resume import last_life
from deploy.process import alongside, on_hangup, until_ready
from deploy.security.rank_security import RankSecurity
from deploy.security.tls import CertificateError, ServerTls
from deploy.settings import WorkerConfig
from engine_adapter.agent.copy_runner import Staging
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.config import AgentConfig, TransferConfig
from engine_adapter.engine import EngineFailed
from engine_adapter.serving.admission import NoSecret, RouterAdmission
from engine_adapter.simulated.engine import EngineDied, SimulatedEngine
from engine_adapter.simulated.http import SimulatedHttp
from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.simulated.model.faults import FaultOrder
from engine_adapter.tracing import EngineTracing, HandoverTracing
from fleet.placement import Placement, PlacementRecord

EXPECTED = (BusError, EngineFailed)
FINAL = (CertificateError, NameTaken, NoSecret)
TRANSFER = TransferConfig()
OPEN = RouterAdmission(None)
log = logging.getLogger(__name__)


class SimulatedHost:
    """Running simulated engine. After `gone` it accepts no request, and has broken every connection if it
    died."""

    def __init__(self, engine: SimulatedEngine, agents: Sequence[Agent], identity: AgentIdentity) -> None:
        self.engine = engine
        self.identity = identity
        self.gone = asyncio.Event()
        self._agents = agents
        self._failure: BaseException | None = None

    async def kill(self) -> None:
        """Stop as if killed with -9; return when that is done."""
        self.engine.order(FaultOrder(fault="die"))
        await self.gone.wait()

    async def failed(self) -> None:
        """Wait while it serves; raise the error that ended it."""
        await self.gone.wait()
        raise (
            RuntimeError("the simulated engine ended unexpectedly")
            if self._failure is None
            else self._failure
        )

    async def watch(
        self, serving: Sequence[asyncio.Task[None]], speaking: Sequence[asyncio.Task[None]]
    ) -> None:
        """Wait for the engine's end, then release everything as that kind of end requires."""
        ended, _ = await asyncio.wait([*serving, *speaking], return_when=asyncio.FIRST_COMPLETED)
        self._failure = next((task.exception() for task in ended if not task.cancelled()), None)
        died = isinstance(self.engine.failure, EngineDied)
        for agent, task in zip(self._agents, speaking, strict=True):
            agent.leaving(None if died else str(self._failure))
            task.cancel()
        self.gone.set()


@asynccontextmanager
async def hosted(
    bus: Bus,
    subjects: Subjects,
    who: AgentIdentity,
    doors: Sequence[socket.socket],
    config: SimulatedConfig,
    agent_config: AgentConfig,
    *,
    drain_seconds: float,
    placement: Placement | None = None,
    last: PlacementRecord | None = None,
    transfer: TransferConfig = TRANSFER,
    admission: RouterAdmission = OPEN,
    tls: ServerTls | None = None,
) -> AsyncIterator[SimulatedHost]:
    """Serve a simulated engine on `doors`, one per rank, and join the fleet, while the context lasts.

    placement, last: see `SimulatedEngine`. Raises EngineFailed, NameTaken or BusError (perhaps in a group).
    """
    async with AsyncExitStack() as stack:
        for door in doors:
            stack.enter_context(door)
        engine = SimulatedEngine(config, placement, last, who.engine)
        threads = ThreadPoolExecutor(1, "checksums")
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        agents = [
            Agent(
                bus,
                subjects,
                rank,
                who,
                agent_config,
                Staging(transfers=(rank.transfer,), config=transfer, tracing=tracing, executor=threads),
            )
            for rank, tracing in zip(
                engine.ranks,
                (HandoverTracing(engine=who.engine, rank=rank) for rank in range(config.ranks)),
                strict=True,
            )
        ]
        for rank in engine.ranks:
            stack.push_async_callback(rank.transfer.close)
        serving = [
            await stack.enter_async_context(alongside(rank.run(), f"steps of {who.engine}/{number}"))
            for number, rank in enumerate(engine.ranks)
        ]
        tracings = {
            rank: EngineTracing(engine=who.engine, rank=rank, model=config.served_model)
            for rank in range(config.ranks)
        }
        app = SimulatedHttp(
            engine, {door.getsockname()[1]: rank for rank, door in enumerate(doors)}, tracings, admission
        )
        face = await stack.enter_async_context(
            HttpServer(app, *doors, drain_seconds=drain_seconds, limits=RANK_LIMITS, tls=tls)
        )
        serving.append(
            await stack.enter_async_context(alongside(face.failed(), f"HTTP servers of {who.engine}"))
        )
        speaking = [
            await stack.enter_async_context(alongside(agent.run(), f"agent of {who.engine}/{rank}"))
            for rank, agent in enumerate(agents)
        ]
        engine.at_death = face.abort
        host = SimulatedHost(engine, agents, who)
        await until_ready(agents[0].joined, *serving, *speaking)
        await stack.enter_async_context(alongside(host.watch(serving, speaking), f"watch {who.engine}"))
        yield host


async def serve(
    doors: Sequence[socket.socket],
    order: RankLaunch,
    bus_config: BusConfig,
    config: SimulatedConfig,
    agent_config: AgentConfig,
    transfer: TransferConfig,
    worker: WorkerConfig,
    ready: Path,
) -> None:
    """Serve as a separate process until cancelled. Raises EngineFailed, BusError or NameTaken (perhaps in a
    group)."""
    subjects = Subjects(bus_config.namespace)
    who = AgentIdentity(
        engine=order.engine,
        worker_id=order.worker_id,
        node=socket.gethostname(),
        urls=order.urls,
        nodes=nodes(order.engine, config),
        replaces=order.replaces,
    )
    security = RankSecurity(worker)
    bus = await NatsBus.connect(bus_config.servers, subjects, bus_config, name=order.engine)
    drain = worker.drain_seconds
    try:
        last = await last_life(bus, subjects, order.engine) if worker.resume else None
        admission, tls = security.admission, security.tls
        serving = hosted(
            bus,
            subjects,
            who,
            doors,
            config,
            agent_config,
            drain_seconds=drain,
            last=last,
            transfer=transfer,
            admission=admission,
            tls=tls,
        )
        with on_hangup(security.reload):
            async with serving as host:
                host.engine.at_death = _end_this_process
                log.info("%s serves on %s", order.engine, " ".join(order.urls))
                tell(ready)
                await host.failed()
    finally:
        await bus.close()


def nodes(engine: str, config: SimulatedConfig) -> tuple[str, ...]:
    """Return the names of the simulated machines, by rank."""
    return tuple(f"{engine}-node-{number}" for number in config.node_of_rank)


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
