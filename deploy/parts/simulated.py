"""One simulated engine: all of its ranks, their HTTP servers and agents, in one process or in one test."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bus import Bus, BusError
from bus.claims import NameTaken
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.http.limits import RANK_LIMITS
from deploy.http.server import HttpServer
from deploy.launch_spec import RankLaunch, mark_ready
from deploy.parts.engine_process import identity
from deploy.parts.part_tasks import PartTasks
from deploy.parts.resume import last_record
from deploy.process import on_hangup
from deploy.run_directory import home
from deploy.sections import WorkerConfig
from deploy.security.rank_security import RankSecurity
from deploy.security.tls import CertificateError, ServerTls
from engine_adapter.agent.copy_runner import Staging
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.config import AgentConfig, TransferConfig
from engine_adapter.dynamo.card import model_folder
from engine_adapter.dynamo.membership import DynamoFailed
from engine_adapter.engine import EngineFailed, RankFacts
from engine_adapter.serving.authentication import NoSecret, RouterAuthentication
from engine_adapter.simulated.engine import EngineDied, SimulatedEngine
from engine_adapter.simulated.http import SimulatedHttp
from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.simulated.model.faults import FaultOrder
from engine_adapter.simulated.model.text import VOCABULARY
from engine_adapter.tracing import EngineTracing, HandoverTracing
from fleet.placement import Placement, PlacementRecord

if TYPE_CHECKING:
    from deploy.parts.dynamo import DynamoSide

EXPECTED = (BusError, EngineFailed, DynamoFailed)
FINAL = (CertificateError, NameTaken, NoSecret)
TRANSFER = TransferConfig()
OPEN = RouterAuthentication(None)
log = logging.getLogger(__name__)
DynamoOpener = Callable[[SimulatedEngine, Mapping[int, EngineTracing]], Awaitable["DynamoSide"]]
"""Opens the way of an engine's ranks into Dynamo."""


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
    listeners: Sequence[socket.socket],
    config: SimulatedConfig,
    agent_config: AgentConfig,
    *,
    drain_seconds: float,
    placement: Placement | None = None,
    last: PlacementRecord | None = None,
    transfer: TransferConfig = TRANSFER,
    admission: RouterAuthentication = OPEN,
    tls: ServerTls | None = None,
    dynamo: "DynamoOpener | None" = None,
) -> AsyncIterator[SimulatedHost]:
    """Serve a simulated engine on `listeners`, one per rank, and join the fleet, while the context lasts.

    placement, last: see `SimulatedEngine`. dynamo: opens the way into Dynamo, if it has one. Raises
    EngineFailed, NameTaken or BusError (perhaps in a group).
    """
    async with PartTasks() as tasks:
        for listener in listeners:
            tasks.enter_context(listener)
        engine = SimulatedEngine(config, placement, last, who.engine)
        tracings = {
            rank: EngineTracing(engine=who.engine, rank=rank, model=config.served_model)
            for rank in range(config.ranks)
        }
        side = None if dynamo is None else await dynamo(engine, tracings)
        agents = _agents(tasks, engine, bus, subjects, who, agent_config, transfer, side)
        for rank in engine.ranks:
            tasks.push_async_callback(rank.transfer.close)
        serving = [
            await tasks.start(rank.run(), f"steps of {who.engine}/{number}")
            for number, rank in enumerate(engine.ranks)
        ]
        rank_of_port = {listener.getsockname()[1]: rank for rank, listener in enumerate(listeners)}
        app = SimulatedHttp(engine, rank_of_port, tracings, admission)
        server = HttpServer(app, *listeners, drain_seconds=drain_seconds, limits=RANK_LIMITS, tls=tls)
        await tasks.enter_async_context(server)
        serving.append(await tasks.start(server.failed(), f"HTTP servers of {who.engine}"))
        speaking = [
            await tasks.start(agent.run(), f"agent of {who.engine}/{rank}")
            for rank, agent in enumerate(agents)
        ]
        engine.at_death = server.abort
        host = SimulatedHost(engine, agents, who)
        await tasks.until(agents[0].joined)
        if side is not None:
            serving.append(await side.join(tasks, who.engine))
        await tasks.start(host.watch(serving, speaking), f"watch {who.engine}")
        yield host


def _agents(
    tasks: PartTasks,
    engine: SimulatedEngine,
    bus: Bus,
    subjects: Subjects,
    who: AgentIdentity,
    config: AgentConfig,
    transfer: TransferConfig,
    side: "DynamoSide | None",
) -> list[Agent]:
    """Return an agent for each rank. Their checksums are computed in one thread."""
    threads = ThreadPoolExecutor(1, "checksums")
    tasks.callback(threads.shutdown, wait=False, cancel_futures=True)

    def staging(number: int) -> Staging:
        tracing = HandoverTracing(engine=who.engine, rank=number)
        links = engine.ranks[number].transfer
        return Staging(
            transfers=(links,),
            config=transfer,
            tracing=tracing,
            executor=threads,
            real_bytes=links.real_bytes,
        )

    def report(number: int) -> Callable[[RankFacts], None] | None:
        return None if side is None else side.report(number)

    return [
        Agent(bus, subjects, rank, who, config, staging(number), report=report(number))
        for number, rank in enumerate(engine.ranks)
    ]


async def serve(
    listeners: Sequence[socket.socket],
    launch: RankLaunch,
    bus_config: BusConfig | None,
    config: SimulatedConfig,
    agent_config: AgentConfig,
    transfer: TransferConfig,
    worker: WorkerConfig,
    ready: Path,
) -> None:
    """Serve as a separate process until cancelled. Raises EngineFailed, BusError, NameTaken or DynamoFailed
    (perhaps in a group).

    bus_config: None for an engine in Dynamo that joins no fleet of Roost.
    """
    security = RankSecurity(worker)
    async with PartTasks() as tasks:
        bus, subjects = await tasks.connect(bus_config, launch.engine)
        serving = hosted(
            bus,
            subjects,
            identity(launch, nodes(launch.engine, config)),
            listeners,
            config,
            agent_config,
            drain_seconds=worker.drain_seconds,
            last=await last_record(bus, subjects, launch.engine) if worker.resume else None,
            transfer=transfer,
            admission=security.admission,
            tls=security.tls,
            dynamo=None if worker.dynamo is None else partial(_dynamo, worker, config, launch),
        )
        tasks.enter_context(on_hangup(security.reload))
        host = await tasks.enter_async_context(serving)
        host.engine.at_death = _end_this_process
        log.info("%s serves on %s", launch.engine, " ".join(launch.urls))
        mark_ready(ready)
        await host.failed()


async def _dynamo(
    worker: WorkerConfig,
    config: SimulatedConfig,
    launch: RankLaunch,
    engine: SimulatedEngine,
    tracings: Mapping[int, EngineTracing],
) -> "DynamoSide":
    """Open the engine's way into Dynamo: one worker with all of its ranks."""
    # needs Dynamo's runtime
    from deploy.parts.dynamo import open_dynamo

    if worker.dynamo is None:
        raise ValueError("worker.dynamo is not set")
    folder = model_folder(
        home(os.environ) / "models",
        engine.tokenizer.archive,
        end_token=engine.tokenizer.end,
        vocabulary=VOCABULARY,
        max_context=config.context,
    )
    return await open_dynamo(
        worker.dynamo,
        os.environ,
        engine.ranks,
        tracings,
        launch,
        folder=folder,
        max_running=config.max_running,
        drain_seconds=worker.drain_seconds,
        mode=worker.disaggregation_mode,
    )


def nodes(engine: str, config: SimulatedConfig) -> tuple[str, ...]:
    """Return the names of the simulated machines, by rank."""
    return tuple(f"{engine}-node-{number}" for number in config.node_of_rank)


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
