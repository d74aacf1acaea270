"""`roost worker --engine vllm`: a vLLM deployment as an engine that joins while the server is up and leaves
while it is down. One process for all of its data-parallel ranks; it outlives the server."""

import asyncio
import hashlib
import logging
import socket
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bus import Bus, BusError
from bus.claims import NameTaken
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.parts.absence import Absence
from deploy.parts.part_tasks import PartTasks
from deploy.parts.resume import next_epoch
from deploy.process import alongside, first_failure, first_of, until_ready
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.config import AgentConfig
from engine_adapter.engine import EngineFailed
from engine_adapter.vllm.config import VllmConfig
from engine_adapter.vllm.deployment import ServerGone, VllmDeployment
from engine_adapter.vllm.discovery import Deployment, discover
from engine_adapter.vllm.server import VllmServer
from engine_adapter.vllm.worker_maps import WorkerMaps
from engine_adapter.vllm.worker_server import WorkerServer
from fleet.facts.engines import EngineJoined, EngineLeft, RankDrained
from fleet.text import counted

EXPECTED = (BusError, EngineFailed, NameTaken)
_MAX_LEAVES = 10_000
"""Leaves of one start of vLLM that are told apart."""
_NEVER_SECONDS = 1e9
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
    workers: WorkerServer
    starts: dict[str, float | None] = field(default_factory=dict)
    """By the workers' instance, the start time of the server that they belong to."""


async def serve(
    name: str,
    config: VllmConfig,
    api_key: str | None,
    secret: bytes,
    bus_config: BusConfig,
    agent_config: AgentConfig,
) -> None:
    """Represent the deployment until cancelled. Raises NameTaken if another engine has the name; BusError if
    NATS cannot be reached at start; EngineFailed if the workers' address cannot be listened on."""
    async with PartTasks() as tasks:
        bus, subjects = await tasks.connect(bus_config, name)
        await represent(bus, subjects, name, config, api_key, secret, agent_config)


async def represent(
    bus: Bus,
    subjects: Subjects,
    name: str,
    config: VllmConfig,
    api_key: str | None,
    secret: bytes,
    agent_config: AgentConfig,
) -> None:
    """Run an incarnation of the engine for every period in which vLLM is up, until cancelled. Raises
    NameTaken and EngineFailed as `serve` does."""
    servers = tuple(VllmServer(base, api_key, config.answer_seconds) for base in config.bases)
    workers = WorkerServer(config, secret, partial(_next_epoch, bus, subjects, name))
    async with alongside(workers.serve(), "workers of vLLM") as serving:
        await until_ready(workers.listening, serving)
        log.info("the plugin connects with ROOST_AGENT=%s:%d", *workers.address)
        # each reading is reported when it is made, and never again
        reporting = replace(agent_config, load_seconds=_NEVER_SECONDS)
        about = _Represented(bus, subjects, name, config, reporting, servers, workers)
        replaces: int | None = None
        absence = Absence(name)
        while True:
            try:
                replaces = await _incarnation(about, replaces)
            except (BusError, EngineFailed, ExceptionGroup) as error:
                failure = first_of(error, (BusError, EngineFailed))
                if failure is None:
                    raise
                absence.explain(str(failure))
            if serving.done():
                serving.result()
            await asyncio.sleep(config.load_seconds)


async def _next_epoch(bus: Bus, subjects: Subjects, name: str) -> int:
    """Return the epoch of a map that has none yet. EngineFailed if the bus cannot tell."""
    try:
        return await next_epoch(bus, subjects, name)
    except (BusError, TimeoutError) as error:
        reason = str(error) or "the bus did not answer"
        raise EngineFailed(f"the last epoch of {name} cannot be read: {reason}") from error


async def _incarnation(about: _Represented, replaces: int | None) -> int:
    """Represent one start of vLLM until it is gone, and return the worker_id that it had. EngineFailed,
    perhaps in a group, when it is not there."""
    found = await discover(about.config, about.servers)
    maps = await _workers_of(about, found)
    if maps is None:
        log.warning("%s joins without its experts: no plugin of its workers has connected", about.name)
    deployment = VllmDeployment(found, about.config, maps)
    who = await _identity(about, deployment, replaces)
    try:
        await _while_up(about, deployment, who, maps)
    except (EngineFailed, ExceptionGroup) as error:
        failure = first_of(error, (EngineFailed,))
        if failure is None:
            raise
        log.warning("%s leaves: %s", about.name, failure)
    return who.worker_id


async def _workers_of(about: _Represented, found: Deployment) -> WorkerMaps | None:
    """Return the workers of this start of vLLM, once all are connected. None: they are not in time.

    Those that serve a map of vLLM's own choice introduce themselves anew, and get an epoch for it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(about.config.plugin_seconds):
            while (maps := await _next_workers(about, found, None)).replaced:
                about.workers.forget(maps)
            about.starts[maps.instance] = found.started
            return maps
    return None


async def _next_workers(about: _Represented, found: Deployment, than: str | None) -> WorkerMaps:
    """Wait until all workers of another start of vLLM are connected. than: the instance of the present ones.

    Workers of an earlier start may still be there, as an engine core outlives an API server that is killed.
    """
    maps = await about.workers.another(than)
    while about.starts.get(maps.instance, found.started) != found.started:
        maps = await about.workers.another(maps.instance)
    return maps


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


async def _while_up(
    about: _Represented, deployment: VllmDeployment, who: AgentIdentity, maps: WorkerMaps | None
) -> None:
    """Represent one start of vLLM until it is gone (EngineFailed, perhaps in a group)."""
    moving = deployment.maps
    agents = [
        Agent(
            about.bus,
            about.subjects,
            target,
            who,
            about.agent_config,
            rearranger=moving if rank == 0 else None,
        )
        for rank, target in enumerate(deployment.targets)
    ]
    if moving is not None:
        # A vLLM whose agent ends may still carry out a decided handover: only its own end is a leave.
        agents[0].leaving(None)
    async with AsyncExitStack() as stack:

        async def start(work: Coroutine[Any, Any, None], task_name: str) -> asyncio.Task[None]:
            return await stack.enter_async_context(alongside(work, task_name))

        tasks = [
            await start(agent.run(), f"agent of {who.engine}/{rank}") for rank, agent in enumerate(agents)
        ]
        tasks.append(await start(_follow(about, deployment, agents, maps), f"follow {who.engine}"))
        if maps is not None:
            tasks.append(await start(_drain_at_fault(about, maps, who), f"digests of {who.engine}"))
        log.info(
            "%s serves %s with %s at %s",
            who.engine,
            deployment.targets[0].description.model,
            counted(len(agents), "rank"),
            " ".join(dict.fromkeys(who.urls)),
        )
        await first_failure(tasks)


async def _follow(
    about: _Represented, deployment: VllmDeployment, agents: Sequence[Agent], maps: WorkerMaps | None
) -> None:
    """Follow vLLM; when it is gone, or another start of it has come, the agents leave with the reason."""
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(deployment.run(), name=f"follow {about.name}")
            tasks.create_task(
                _another(about, deployment.found, maps), name=f"further workers of {about.name}"
            )
    except ExceptionGroup as error:
        failure = first_of(error, (EngineFailed,))
        if failure is None:
            raise
        for agent in agents:
            agent.leaving(str(failure))
        if isinstance(failure, ServerGone):
            await _name_survivors(about.name, deployment)
        raise


async def _another(about: _Represented, found: Deployment, maps: WorkerMaps | None) -> None:
    """Wait until the workers of another start of vLLM are connected (EngineFailed)."""
    than = None if maps is None else maps.instance
    await _next_workers(about, found, than)
    none = "the plugin of its workers has connected"
    raise EngineFailed(none if maps is None else "another start of vLLM has taken its place")


async def _name_survivors(name: str, deployment: VllmDeployment) -> None:
    survivors = await deployment.survivors()
    if survivors:
        log.warning(
            "the HTTP server of %s is gone, but parts of this vLLM still run: %s. Another vLLM would fail"
            ' with "Address already in use": end the old processes (EngineCore) first',
            name,
            "; ".join(survivors),
        )


async def _drain_at_fault(about: _Represented, maps: WorkerMaps, who: AgentIdentity) -> None:
    """Drain the engine once the weights of an expert are found to be wrong: no request gets another answer
    than the model's. It is never answered by a move."""
    while not maps.fault:
        await maps.changed()
    drained = RankDrained(
        engine=who.engine, worker_id=who.worker_id, rank=None, draining=True, reason=maps.fault
    )
    while True:
        try:
            await about.bus.record(about.subjects.drains(who.engine, None), drained)
            break
        except BusError as error:
            log.warning("%s cannot be drained yet, trying again: %s", who.engine, error)
            await asyncio.sleep(about.agent_config.heartbeat_seconds)
    log.error("%s is drained: %s", who.engine, maps.fault)
    await asyncio.Event().wait()
