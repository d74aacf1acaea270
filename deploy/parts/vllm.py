"""`roost worker --engine vllm`: a vLLM deployment as an engine that joins while the server is up and leaves
while it is down. One process for all of its data-parallel ranks; it outlives the server."""

import asyncio
import hashlib
import logging
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bus import Bus, BusError
from bus.claims import NameTaken
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.parts.part_tasks import PartTasks
from deploy.process import alongside, first_failure, first_of
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.config import AgentConfig
from engine_adapter.engine import EngineFailed
from engine_adapter.vllm.config import VllmConfig
from engine_adapter.vllm.deployment import VllmDeployment
from engine_adapter.vllm.discovery import discover
from engine_adapter.vllm.server import VllmServer
from fleet.facts.engines import EngineJoined, EngineLeft
from fleet.text import counted

EXPECTED = (BusError, NameTaken)
_MAX_LEAVES = 10_000
"""Leaves of one start of vLLM that are told apart."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Represented:
    """Inputs that stay the same from one start of vLLM to the next."""

    bus: Bus
    subjects: Subjects
    name: str
    config: VllmConfig
    agent_config: AgentConfig
    servers: tuple[VllmServer, ...]


async def serve(
    name: str, config: VllmConfig, api_key: str | None, bus_config: BusConfig, agent_config: AgentConfig
) -> None:
    """Represent the deployment until cancelled. Raises NameTaken if another engine has the name; BusError if
    NATS cannot be reached at start."""
    async with PartTasks() as tasks:
        bus, subjects = await tasks.connect(bus_config, name)
        await represent(bus, subjects, name, config, api_key, agent_config)


async def represent(
    bus: Bus,
    subjects: Subjects,
    name: str,
    config: VllmConfig,
    api_key: str | None,
    agent_config: AgentConfig,
) -> None:
    """Run an incarnation of the engine for every period in which vLLM is up, until cancelled. Raises
    NameTaken as `serve` does."""
    servers = tuple(VllmServer(base, api_key, config.answer_seconds) for base in config.bases)
    about = _Represented(bus, subjects, name, config, agent_config, servers)
    replaces: int | None = None
    while True:
        try:
            deployment = VllmDeployment(await discover(config, servers), config)
            who = await _identity(about, deployment, replaces)
            replaces = who.worker_id
            await _while_up(about, deployment, who)
        except (EngineFailed, ExceptionGroup) as error:
            failure = first_of(error, (EngineFailed,))
            if failure is None:
                raise
            log.warning("%s is not there, looking again every %g s: %s", name, config.load_seconds, failure)
        await asyncio.sleep(config.load_seconds)


async def _identity(about: _Represented, deployment: VllmDeployment, replaces: int | None) -> AgentIdentity:
    """Return the identity of this incarnation: that of an agent that ended while this vLLM went on, else a
    new one."""
    left = None
    log_of_engine = about.subjects.membership(about.name)
    async for received in about.bus.replay(log_of_engine, latest=True, follow=False):
        left = received.message
    return AgentIdentity(
        engine=about.name,
        worker_id=next_worker_id(about.name, deployment.instance, left),
        node=socket.gethostname(),
        urls=deployment.urls,
        replaces=replaces,
    )


def next_worker_id(name: str, instance: str, last: object) -> int:
    """Return the worker_id of an incarnation, a u64: the same for an agent that ends and starts again while
    vLLM continues, and another one after each leave.

    instance: identity of the start of vLLM. last: the last record of the engine's membership."""
    for leaves in range(_MAX_LEAVES):
        worker_id = _worker_id(name, instance, leaves)
        if isinstance(last, EngineLeft) and last.worker_id == worker_id:
            return _worker_id(name, instance, leaves + 1)
        if isinstance(last, EngineJoined) and last.worker_id == worker_id:
            return worker_id
    return _worker_id(name, instance, 0)


def _worker_id(name: str, instance: str, leaves: int) -> int:
    text = f"{name}\n{instance}\n{leaves}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


async def _while_up(about: _Represented, deployment: VllmDeployment, who: AgentIdentity) -> None:
    """Represent one start of vLLM until it is gone (EngineFailed, perhaps in a group)."""
    agents = [
        Agent(about.bus, about.subjects, target, who, about.agent_config) for target in deployment.targets
    ]
    async with AsyncExitStack() as stack:
        tasks = [
            await stack.enter_async_context(alongside(agent.run(), f"agent of {who.engine}/{rank}"))
            for rank, agent in enumerate(agents)
        ]
        watch = _follow(deployment, agents, who.engine)
        tasks.append(await stack.enter_async_context(alongside(watch, f"follow {who.engine}")))
        log.info(
            "%s serves %s with %s at %s",
            who.engine,
            deployment.targets[0].description.model,
            counted(len(agents), "rank"),
            " ".join(dict.fromkeys(who.urls)),
        )
        await first_failure(tasks)


async def _follow(deployment: VllmDeployment, agents: Sequence[Agent], name: str) -> None:
    """Follow vLLM; when it is gone, the agents leave with the reason."""
    try:
        await deployment.run()
    except (EngineFailed, ExceptionGroup) as error:
        failure = first_of(error, (EngineFailed,))
        if failure is None:
            raise
        for agent in agents:
            agent.leaving(str(failure))
        survivors = await deployment.survivors()
        if survivors:
            log.warning(
                "the HTTP server of %s is gone, but parts of this vLLM still run: %s. Another vLLM would fail"
                ' with "Address already in use": end the old processes (EngineCore) first',
                name,
                "; ".join(survivors),
            )
        raise
