"""The router as a process, in front of engines on the bus, static backends, or both."""

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI

from bus import Bus, BusError
from bus.config import BusConfig
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from deploy.http.limits import HttpLimits
from deploy.http.server import HttpServer
from deploy.http.sockets import url_of
from deploy.launch_spec import clear_ready
from deploy.parts.part_tasks import PartTasks
from deploy.process import dropped_lines
from deploy.security.exposure import missing_at_router
from deploy.security.tls import ServerTls
from router import kernels
from router.api.app import create_app
from router.api.bus_api import BusApi
from router.api.library import Decider
from router.config import RouterConfig
from router.dynamo.config import DynamoConfig
from router.service import RouterService

if TYPE_CHECKING:
    from deploy.parts.dynamo_router import RouterInDynamo
    from deploy.parts.gateway import GatewayDoor

EXPECTED = (BusError, OSError, ValueError)
_COLLECTED_AFTER = 10_000
"""New containers that trigger a garbage collection. A request creates hundreds, and few of them are cyclic
garbage. A few concurrent requests would reach Python's default of 700 several times."""
log = logging.getLogger(__name__)


async def serve(
    listener: socket.socket,
    bus_config: BusConfig | None,
    config: RouterConfig,
    ready: Path | None,
    private: socket.socket | None = None,
    read: Callable[[], RouterConfig] | None = None,
    dynamo: DynamoConfig | None = None,
) -> None:
    """Serve until cancelled; create the file `ready` once the router has its initial state. Without a bus
    (None), serve static backends only.

    read: reads the settings at SIGHUP; raises ValueError or OSError if they are invalid. None: SIGHUP ends
    the process. private: socket for health probes and metrics of this process alone. With it, `listener` is
    one of several on one port, and accepts no connection before the router is ready: its siblings serve
    meanwhile. dynamo: also serve Dynamo's frontends; then the router needs no NATS of its own. Raises
    BusError if NATS cannot be reached at start.
    """
    # the tokenizer gets one text at a time, and a thread pool would cost microseconds for each
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    if kernels.missing:
        log.warning("decisions are computed in Python, two to three times slower: %s", kernels.missing)
    async with PartTasks() as tasks:
        for opened in (listener, private):
            if opened is not None:
                tasks.enter_context(opened)
        bus: Bus | None = None
        subjects = Subjects("roost")
        if bus_config is not None:
            bus, subjects = await tasks.connect(bus_config, "router")
        elif dynamo is not None:
            bus = memory = MemoryBus(MemoryBroker(subjects))
            tasks.push_async_callback(memory.close)
        service = RouterService(bus, subjects, config)
        service.metrics.dropped_lines = dropped_lines
        await tasks.start(service.run(), "keep the router's view fresh")
        app, tls = create_app(service), ServerTls.of(config.tls_cert, config.tls_key)
        # only with `insecure`: otherwise the command refuses to start
        if (lacks := missing_at_router(config)) is not None:
            log.warning("insecure: %s", lacks)
        if read is not None:
            await tasks.reload_at_hangup(partial(_reload, service, read, tls))
        if bus is not None:
            await tasks.start(BusApi(bus, subjects, Decider(service)).run(), "answer requests on the bus")
        in_dynamo = None if dynamo is None else await _open_dynamo(tasks, service, dynamo)
        if config.gateway_address is not None:
            gateway = await _open_gateway(tasks, service, config.gateway_address)
        if private is not None:
            await _serve_http(tasks, app, private, service, tls)
            await tasks.until(service.readiness.done)
        await _serve_http(tasks, app, listener, service, tls)
        if config.gateway_address is not None:
            tasks.callback(gateway.begin_to_stop)
        tasks.push_async_callback(_begin_to_stop, service)
        if in_dynamo is not None:
            tasks.push_async_callback(in_dynamo.leave)
            await tasks.start(in_dynamo.serve(), "serve Dynamo's frontends")
        log.info("the router listens on %s", url_of(listener, tls=tls is not None))
        await tasks.until(service.readiness.done)
        _collect_rarely()
        # runs before the HTTP servers stop, which health probes cannot reach from then on
        tasks.callback(clear_ready, ready)
        await tasks.serve(ready)


async def _open_dynamo(tasks: PartTasks, service: RouterService, config: DynamoConfig) -> "RouterInDynamo":
    # imports Dynamo's runtime, which other routers do not need
    from deploy.parts.dynamo_router import RouterInDynamo

    return await RouterInDynamo.open(tasks, service, config, os.environ)


async def _open_gateway(tasks: PartTasks, service: RouterService, address: str) -> "GatewayDoor":
    # imports gRPC, which other routers do not need
    from deploy.parts.gateway import GatewayDoor

    door = await GatewayDoor.open(tasks, service, address)
    log.info("gateways find the endpoint picker at %s", address)
    return door


def _collect_rarely() -> None:
    """Exempt the objects created at start from garbage collection, as they live as long as the process; and
    collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER, *gc.get_threshold()[1:])


async def _reload(service: RouterService, read: Callable[[], RouterConfig], tls: ServerTls | None) -> None:
    """Reload the settings and the certificate."""

    def settings() -> RouterConfig:
        if tls is not None:
            tls.check()
        return read()

    report = await service.reload(settings)
    if tls is not None and report.refused is None:
        tls.load()


async def _begin_to_stop(service: RouterService) -> None:
    """Report not ready, and accept requests for `pre_stop_seconds`; then the HTTP servers stop and refuse
    them."""
    service.draining = True
    seconds = service.config.pre_stop_seconds
    if seconds:
        log.info(
            "the router will stop: it is no longer ready, and accepts requests for another %g s", seconds
        )
        await asyncio.sleep(seconds)
    service.refuse_new()
    log.info("the router stops: running requests have %g s", service.config.drain_seconds)


async def _serve_http(
    tasks: PartTasks,
    app: FastAPI,
    listener: socket.socket,
    service: RouterService,
    tls: ServerTls | None,
) -> None:
    server = HttpServer(
        app,
        listener,
        drain_seconds=service.config.drain_seconds,
        limits=http_limits(service.config),
        count=service.metrics.connection_cut,
        tls=tls,
    )
    await tasks.serve_http(server, f"the router's HTTP server on {url_of(listener)}")


def http_limits(config: RouterConfig) -> HttpLimits:
    """Return the limits of the router's HTTP server from its settings."""
    return HttpLimits(
        head_bytes=config.max_head_bytes,
        url_bytes=config.max_url_bytes,
        head_seconds=config.head_seconds,
        body_seconds=config.body_seconds,
        idle_seconds=config.idle_seconds,
        write_seconds=config.write_seconds,
    )
