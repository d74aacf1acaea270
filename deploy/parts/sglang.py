"""`roost worker --engine sglang`: an SGLang server as an engine that joins while the server is up and leaves
while it is down. One process for all of its data-parallel ranks: it serves them to routers by token ids, and
carries the requests to SGLang's native API. It outlives the server. Never run with SGLang."""

import asyncio
import logging
import secrets
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bus import Bus, BusError
from bus.claims import NameTaken
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.http.limits import RANK_LIMITS
from deploy.http.server import HttpServer
from deploy.http.sockets import CannotListen, listen, url_of
from deploy.parts.absence import Absence
from deploy.parts.part_tasks import PartTasks
from deploy.process import alongside, first_failure, first_of, on_hangup
from deploy.sections import WorkerConfig
from deploy.security.rank_security import RankSecurity
from deploy.security.tls import CertificateError
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.config import AgentConfig
from engine_adapter.engine import EngineFailed
from engine_adapter.serving.authentication import NoSecret
from engine_adapter.sglang.config import SglangConfig
from engine_adapter.sglang.deployment import SglangDeployment
from engine_adapter.sglang.discovery import discover
from engine_adapter.sglang.http import SglangHttp
from engine_adapter.sglang.server import SglangServer
from engine_adapter.tracing import EngineTracing
from fleet.text import counted
from tracker.importers.load_files import read_load

EXPECTED = (BusError, EngineFailed, NameTaken)
FINAL = (CannotListen, CertificateError, NoSecret)
_NEVER_SECONDS = 1e9
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _RepresentedSglang:
    """Inputs that stay the same from one start of SGLang to the next."""

    bus: Bus
    subjects: Subjects
    name: str
    config: SglangConfig
    api_key: str | None
    worker: WorkerConfig
    security: RankSecurity
    agent_config: AgentConfig


async def serve(
    name: str,
    config: SglangConfig,
    api_key: str | None,
    worker: WorkerConfig,
    bus_config: BusConfig,
    agent_config: AgentConfig,
) -> None:
    """Represent the server until cancelled. Raises NameTaken if another engine has the name; BusError if NATS
    cannot be reached at start; NoSecret or CertificateError if a file cannot be used."""
    async with PartTasks() as tasks:
        bus, subjects = await tasks.connect(bus_config, name)
        await represent(bus, subjects, name, config, api_key, worker, agent_config)


async def represent(
    bus: Bus,
    subjects: Subjects,
    name: str,
    config: SglangConfig,
    api_key: str | None,
    worker: WorkerConfig,
    agent_config: AgentConfig,
) -> None:
    """Run an incarnation of the engine for every period in which SGLang is up, until cancelled. Raises as
    `serve` does."""
    security = RankSecurity(worker)
    # each reading of the load is reported when it is made, and never again
    reporting = replace(agent_config, load_seconds=_NEVER_SECONDS)
    about = _RepresentedSglang(bus, subjects, name, config, api_key, worker, security, reporting)
    replaces: int | None = None
    absence = Absence(name)
    with on_hangup(security.reload):
        while True:
            worker_id = secrets.randbits(64)
            try:
                await _incarnation(about, worker_id, replaces)
            except (BusError, EngineFailed, ExceptionGroup) as error:
                failure = first_of(error, (BusError, EngineFailed))
                if failure is None:
                    raise
                absence.explain(str(failure))
            replaces = worker_id
            await asyncio.sleep(config.load_seconds)


async def _incarnation(about: _RepresentedSglang, worker_id: int, replaces: int | None) -> None:
    """Represent one start of SGLang until it is gone (EngineFailed, perhaps in a group)."""
    server = SglangServer(about.config.base, about.api_key, about.config.answer_seconds)
    found = await discover(about.config, server)
    deployment = SglangDeployment(found, about.config, server, about.api_key, read_counts)
    worker, tls = about.worker, about.security.tls
    async with AsyncExitStack() as stack:
        listeners = [stack.enter_context(listen(worker.host, 0)) for _ in deployment.ranks]
        named = worker.host if tls is not None else None
        who = AgentIdentity(
            engine=about.name,
            worker_id=worker_id,
            node=socket.gethostname(),
            urls=tuple(url_of(one, tls=tls is not None, host=named) for one in listeners),
            replaces=replaces,
        )
        agents = [
            Agent(about.bus, about.subjects, rank, who, about.agent_config) for rank in deployment.ranks
        ]
        ranks = {
            one.getsockname()[1]: (rank, EngineTracing(engine=about.name, rank=number, model=found.model))
            for number, (one, rank) in enumerate(zip(listeners, deployment.ranks, strict=True))
        }
        http = HttpServer(
            SglangHttp(ranks, about.security.admission),
            *listeners,
            drain_seconds=worker.drain_seconds,
            limits=RANK_LIMITS,
            tls=tls,
        )
        tasks = [
            await stack.enter_async_context(alongside(_follow(deployment, agents), f"follow {about.name}"))
        ]
        await stack.enter_async_context(http)
        tasks.append(await stack.enter_async_context(alongside(http.failed(), f"HTTP of {about.name}")))
        for number, agent in enumerate(agents):
            running = alongside(agent.run(), f"agent of {about.name}/{number}")
            tasks.append(await stack.enter_async_context(running))
        log.info("%s serves %s with %s", about.name, found.model, counted(len(agents), "rank"))
        await first_failure(tasks)


async def _follow(deployment: SglangDeployment, agents: list[Agent]) -> None:
    """Follow SGLang; when it is gone, the agents leave with the reason."""
    try:
        await deployment.run()
    except (EngineFailed, ExceptionGroup) as error:
        failure = first_of(error, (EngineFailed,))
        if failure is not None:
            for agent in agents:
                agent.leaving(str(failure))
        raise


def read_counts(content: bytes) -> NDArray[np.float64]:
    """Read a file of SGLang's expert distribution recorder. ValueError for a file that is none."""
    loads = read_load("recorder.pt", content)
    if not loads.is_counts:
        raise ValueError(f"{loads.form} holds proportions, not counts")
    return loads.counts
