"""`roost worker --engine openai`: a static backend as an engine that joins while the server is up and leaves
while it is down."""

import asyncio
import logging
import secrets
import socket

from bus import Bus, BusError
from bus.claims import NameTaken
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.parts.engine_process import run_engine
from deploy.parts.part_tasks import PartTasks
from deploy.process import alongside, first_failure, first_of
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.config import AgentConfig
from engine_adapter.engine import EngineFailed
from engine_adapter.openai_backend import BackendAgent, BackendAgentConfig

EXPECTED = (BusError, NameTaken)
log = logging.getLogger(__name__)


async def serve(
    name: str, backend: BackendAgentConfig, bus_config: BusConfig, agent_config: AgentConfig
) -> None:
    """Represent the server until cancelled. Raises NameTaken if another engine has the name; BusError if NATS
    cannot be reached at start."""
    async with PartTasks() as tasks:
        bus, subjects = await tasks.connect(bus_config, name)
        await represent(bus, subjects, name, backend, agent_config)


async def represent(
    bus: Bus, subjects: Subjects, name: str, backend: BackendAgentConfig, agent_config: AgentConfig
) -> None:
    """Run an incarnation of the engine for every period in which the server is up, until cancelled. Raises
    NameTaken as `serve` does."""
    replaces: int | None = None
    while True:
        who = AgentIdentity(
            engine=name,
            worker_id=secrets.randbits(64),
            node=socket.gethostname(),
            urls=(backend.base,),
            replaces=replaces,
        )
        try:
            await _while_up(bus, subjects, who, backend, agent_config)
        except (EngineFailed, ExceptionGroup) as error:
            failure = first_of(error, (EngineFailed,))
            if failure is None:
                raise
            log.warning("%s is not there, looking again every %g s: %s", name, backend.probe_seconds, failure)
        replaces = who.worker_id
        await asyncio.sleep(backend.probe_seconds)


async def _while_up(
    bus: Bus, subjects: Subjects, who: AgentIdentity, backend: BackendAgentConfig, config: AgentConfig
) -> None:
    """Represent the server from its first answer until it stays away (EngineFailed)."""
    engine = BackendAgent(backend)
    await engine.start()
    agent = Agent(bus, subjects, engine, who, config)
    async with (
        alongside(agent.run(), f"agent of {who.engine}") as speaking,
        alongside(run_engine(engine, agent), f"watch {backend.base}") as watching,
    ):
        log.info("%s serves %s at %s", who.engine, engine.description.model, backend.base)
        await first_failure([speaking, watching])
