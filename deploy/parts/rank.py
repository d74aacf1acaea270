"""One rank process of the embedded engine: engine, HTTP server and agent. The stop order breaks no stream."""

import gc
import logging
import socket
from contextlib import AsyncExitStack
from pathlib import Path

from bus import BusError
from bus.claims import NameTaken
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.http.limits import RANK_LIMITS
from deploy.http.server import HttpServer
from deploy.launch_spec import RankLaunch, tell
from deploy.parts.resume import agree
from deploy.process import alongside, first_failure, on_hangup, until_ready
from deploy.security.rank_security import RankSecurity
from deploy.security.tls import CertificateError
from deploy.settings import WorkerConfig
from engine_adapter.agent.copy_runner import Staging
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.config import AgentConfig, EmbeddedConfig, TransferConfig
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.engine import EngineFailed
from engine_adapter.serving.admission import NoSecret
from engine_adapter.serving.http import RankApp
from engine_adapter.tracing import EngineTracing, HandoverTracing
from engine_adapter.transfer.nixl_loader import agent_name
from engine_adapter.transfer.port import TransferError
from engine_adapter.transfer.selection import open_transfers

EXPECTED = (BusError, EngineFailed)
FINAL = (CertificateError, NameTaken, NoSecret, TransferError)
log = logging.getLogger(__name__)


async def serve(
    door: socket.socket,
    order: RankLaunch,
    bus_config: BusConfig,
    config: EmbeddedConfig,
    agent_config: AgentConfig,
    transfer: TransferConfig,
    worker: WorkerConfig,
    ready: Path,
) -> None:
    """Serve until cancelled. Raises EngineFailed, BusError, NameTaken or TransferError (perhaps in a
    group)."""
    name, subjects = f"{order.engine}/{order.rank}", Subjects(bus_config.namespace)
    who = AgentIdentity(
        engine=order.engine,
        worker_id=order.worker_id,
        node=socket.gethostname(),
        urls=order.urls,
        replaces=order.replaces,
    )
    async with AsyncExitStack() as stack:
        stack.enter_context(door)
        bus = await NatsBus.connect(bus_config.servers, subjects, bus_config, name=name)
        stack.push_async_callback(bus.close)
        if worker.resume:
            await agree(
                bus, subjects, order.engine, order.rank, Path(order.meet), config.join_timeout_seconds
            )
        engine = EmbeddedEngine(config, order.rank, Path(order.meet))
        await engine.start()
        agent = Agent(
            bus, subjects, engine, who, agent_config, await _staging(stack, engine, who, order.rank, transfer)
        )
        stepping = await stack.enter_async_context(alongside(_run(engine, agent), f"steps of {name}"))
        security = RankSecurity(worker)
        stack.enter_context(on_hangup(security.reload))
        app = RankApp(
            engine,
            EngineTracing(engine=order.engine, rank=order.rank, model=config.served_model),
            security.admission,
        )
        face = await stack.enter_async_context(
            HttpServer(app, door, drain_seconds=worker.drain_seconds, limits=RANK_LIMITS, tls=security.tls)
        )
        serving = await stack.enter_async_context(alongside(face.failed(), f"HTTP server of {name}"))
        speaking = await stack.enter_async_context(alongside(agent.run(), f"agent of {name}"))
        await until_ready(agent.joined, stepping, serving, speaking)
        log.info("%s serves on %s", name, order.urls[order.rank])
        gc.collect()
        # a collection over all loaded objects would delay a step, and thus every rank, by tens of
        # milliseconds
        gc.freeze()
        tell(ready)
        await first_failure([stepping, serving, speaking])


async def _staging(
    stack: AsyncExitStack, engine: EmbeddedEngine, who: AgentIdentity, rank: int, config: TransferConfig
) -> Staging:
    """Return the rank's expert reader, which is closed after its agent has ended."""
    if engine.experts is None:
        return Staging(config=config)
    transfers = await open_transfers(
        config, engine.experts.memory, agent_name(who.engine, rank), one_machine=not who.nodes
    )
    for way in transfers:
        stack.push_async_callback(way.close)
    return Staging(transfers=transfers, config=config, tracing=HandoverTracing(engine=who.engine, rank=rank))


async def _run(engine: EmbeddedEngine, agent: Agent) -> None:
    try:
        await engine.run()
    except EngineFailed as error:
        agent.leaving(str(error))
        raise
