"""One rank process of the embedded engine: engine, HTTP server and agent. The stop order breaks no stream."""

import gc
import logging
import os
import socket
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bus import BusError
from bus.claims import NameTaken
from bus.config import BusConfig
from deploy.http.limits import RANK_LIMITS
from deploy.http.server import HttpServer
from deploy.launch_spec import RankLaunch
from deploy.parts.engine_process import identity, run_engine
from deploy.parts.part_tasks import PartTasks
from deploy.parts.resume import agree
from deploy.process import on_hangup
from deploy.sections import WorkerConfig
from deploy.security.rank_security import RankSecurity
from deploy.security.tls import CertificateError
from engine_adapter.agent.copy_runner import Staging
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.config import AgentConfig, EmbeddedConfig, TransferConfig
from engine_adapter.dynamo.membership import DynamoFailed
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.engine import EngineFailed
from engine_adapter.serving.authentication import NoSecret
from engine_adapter.serving.http import RankApp
from engine_adapter.tracing import EngineTracing, HandoverTracing
from engine_adapter.transfer.nixl_loader import agent_name
from engine_adapter.transfer.port import TransferError
from engine_adapter.transfer.rate_limit import RateLimit
from engine_adapter.transfer.selection import open_transfers

if TYPE_CHECKING:
    from deploy.parts.dynamo import DynamoSide

EXPECTED = (BusError, EngineFailed, DynamoFailed)
FINAL = (CertificateError, NameTaken, NoSecret, TransferError)
log = logging.getLogger(__name__)


async def serve(
    listener: socket.socket,
    launch: RankLaunch,
    bus_config: BusConfig | None,
    config: EmbeddedConfig,
    agent_config: AgentConfig,
    transfer: TransferConfig,
    worker: WorkerConfig,
    ready: Path,
) -> None:
    """Serve until cancelled. Raises EngineFailed, BusError, NameTaken, TransferError or DynamoFailed (perhaps
    in a group).

    bus_config: None for an engine in Dynamo that joins no fleet of Roost.
    """
    name, who, meeting = f"{launch.engine}/{launch.rank}", identity(launch), Path(launch.meet)
    async with PartTasks() as tasks:
        tasks.enter_context(listener)
        bus, subjects = await tasks.connect(bus_config, name)
        if worker.resume:
            seconds = config.join_timeout_seconds
            await agree(bus, subjects, launch.engine, launch.rank, meeting, seconds)
        engine = EmbeddedEngine(config, launch.rank, meeting)
        await engine.start()
        staging = await _staging(tasks, engine, who, launch.rank, transfer)
        tracing = EngineTracing(engine=launch.engine, rank=launch.rank, model=config.served_model)
        dynamo = await _dynamo(engine, tracing, launch, config, worker)
        report = None if dynamo is None else dynamo.report(launch.rank)
        agent = Agent(bus, subjects, engine, who, agent_config, staging, report=report)
        await tasks.start(run_engine(engine, agent), f"steps of {name}")
        security = RankSecurity(worker)
        tasks.enter_context(on_hangup(security.reload))
        server = HttpServer(
            RankApp(engine, tracing, security.admission),
            listener,
            drain_seconds=worker.drain_seconds,
            limits=RANK_LIMITS,
            tls=security.tls,
        )
        await tasks.serve_http(server, f"HTTP server of {name}")
        await tasks.start(agent.run(), f"agent of {name}")
        await tasks.until(agent.joined)
        if dynamo is not None:
            await dynamo.join(tasks, name)
        log.info("%s serves on %s", name, launch.urls[launch.rank])
        gc.collect()
        # a collection over all loaded objects would delay a step, and thus every rank, by tens of
        # milliseconds
        gc.freeze()
        await tasks.serve(ready)


async def _dynamo(
    engine: EmbeddedEngine,
    tracing: EngineTracing,
    launch: RankLaunch,
    config: EmbeddedConfig,
    worker: WorkerConfig,
) -> "DynamoSide | None":
    """Return the rank's way into Dynamo, if it has one: a worker of its own for each rank."""
    if worker.dynamo is None:
        return None
    # needs Dynamo's runtime
    from deploy.parts.dynamo import idle_together, open_dynamo

    return await open_dynamo(
        worker.dynamo,
        os.environ,
        [engine],
        {launch.rank: tracing},
        launch,
        folder=Path(config.folder).absolute(),  # noqa: ASYNC240 reads no file
        max_running=config.max_running,
        drain_seconds=worker.drain_seconds,
        mode=worker.disaggregation_mode,
        all_idle=partial(idle_together, Path(launch.meet), launch.rank, config.ranks),
    )


async def _staging(
    stack: AsyncExitStack, engine: EmbeddedEngine, who: AgentIdentity, rank: int, config: TransferConfig
) -> Staging:
    """Return the rank's expert reader, which is closed after its agent has ended."""
    if engine.experts is None:
        return Staging(config=config)
    limit = RateLimit.of(config)
    transfers = await open_transfers(
        config, engine.experts.memory, agent_name(who.engine, rank), one_machine=not who.nodes, limit=limit
    )
    for way in transfers:
        stack.push_async_callback(way.close)
    tracing = HandoverTracing(engine=who.engine, rank=rank)
    return Staging(transfers=transfers, config=config, tracing=tracing, limit=limit)
