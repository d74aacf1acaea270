"""`roost worker --engine openai`: a server behind the plain door, as an engine that joins while it is there and leaves while not."""

import asyncio
import logging
import secrets
import socket
from contextlib import AsyncExitStack

from bus import Bus, BusError
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.subjects import Subjects
from deploy.process import alongside, first_failure, first_of
from engine_adapter.agent import Agent, Identity
from engine_adapter.claims import NameTaken
from engine_adapter.config import AgentConfig
from engine_adapter.engine import EngineFailed
from engine_adapter.openai import PlainConfig, PlainEngine

EXPECTED = (BusError, EngineFailed, NameTaken)
AGAIN_SECONDS = 2.0
log = logging.getLogger(__name__)


async def serve(name: str, plain: PlainConfig, bus_config: BusConfig, agent_config: AgentConfig) -> None:
    """Represent the server until cancelled. NameTaken when another engine has the name; BusError when NATS cannot be reached at start."""
    subjects = Subjects(bus_config.namespace)
    async with AsyncExitStack() as stack:
        bus = await NatsBus.connect(bus_config.url, subjects, bus_config, name=name)
        stack.push_async_callback(bus.close)
        replaces: int | None = None
        while True:
            worker_id = secrets.randbits(64)
            try:
                await _one_life(bus, subjects, name, worker_id, replaces, plain, agent_config)
            except (EngineFailed, ExceptionGroup) as error:
                failure = first_of(error, (EngineFailed,))
                if failure is None:
                    raise
                log.warning("%s is not there: %s; looking again every %.0f s", name, failure, AGAIN_SECONDS)
            replaces = worker_id
            await asyncio.sleep(AGAIN_SECONDS)


async def _one_life(bus: Bus, subjects: Subjects, name: str, worker_id: int, replaces: int | None, plain: PlainConfig, config: AgentConfig) -> None:
    """From the moment the server answers until it stays away (EngineFailed)."""
    engine = PlainEngine(plain)
    await engine.start()
    who = Identity(engine=name, worker_id=worker_id, node=socket.gethostname(), urls=(plain.base,), replaces=replaces)
    agent = Agent(bus, subjects, engine, who, config)
    async with alongside(agent.run(), f"agent of {name}") as speaking, alongside(_watch(engine, agent), f"watch {plain.base}") as watching:
        log.info("%s serves %s at %s", name, engine.description.model, plain.base)
        await first_failure([speaking, watching])


async def _watch(engine: PlainEngine, agent: Agent) -> None:
    try:
        await engine.run()
    except EngineFailed as error:
        agent.leaving(str(error))
        raise
