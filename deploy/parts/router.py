"""The router as a process, in front of engines on the bus, static backends, or both."""

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from fastapi import FastAPI

from bus import BusError
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.http.limits import HttpLimits
from deploy.http.server import HttpServer
from deploy.http.sockets import url_of
from deploy.launch_spec import take_back, tell
from deploy.process import alongside, dropped_lines, first_failure, on_hangup, until_ready
from deploy.security.exposure import missing_at_router
from deploy.security.tls import ServerTls
from router.api.app import create_app
from router.api.bus_api import BusApi
from router.api.library import Decider
from router.config import RouterConfig
from router.service import RouterService

EXPECTED = (BusError, OSError, ValueError)
_COLLECTED_AFTER = 10_000
"""New containers that trigger a garbage collection. A request creates hundreds, and few of them are cyclic
garbage. A few concurrent requests would reach Python's default of 700 several times."""
log = logging.getLogger(__name__)


async def serve(
    door: socket.socket,
    bus_config: BusConfig | None,
    config: RouterConfig,
    ready: Path | None,
    private: socket.socket | None = None,
    read: Callable[[], RouterConfig] | None = None,
) -> None:
    """Serve until cancelled; create the file `ready` once the router has its initial state. Without a bus
    (None), serve static backends only.

    read: reads the settings at SIGHUP; raises ValueError or OSError if they are invalid. None: SIGHUP ends
    the process. private: socket for health probes and metrics of this process alone. With it, `door` is one
    of several on one port, and accepts no connection before the router is ready: its siblings serve
    meanwhile. Raises BusError if NATS cannot be reached at start.
    """
    subjects = Subjects("roost" if bus_config is None else bus_config.namespace)
    # the tokenizer gets one text at a time, and a thread pool would cost microseconds for each
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    async with AsyncExitStack() as stack:
        for opened in (door, private):
            if opened is not None:
                stack.enter_context(opened)
        bus = None
        if bus_config is not None:
            bus = await NatsBus.connect(bus_config.servers, subjects, bus_config, name="router")
            stack.push_async_callback(bus.close)
        service = RouterService(bus, subjects, config)
        service.metrics.dropped_lines = dropped_lines
        running = await stack.enter_async_context(alongside(service.run(), "keep the router's view fresh"))
        app = create_app(service)
        tls = ServerTls.of(config.tls_cert, config.tls_key)
        # only with `insecure`: otherwise the command refuses to start
        if (lacks := missing_at_router(config)) is not None:
            log.warning("insecure: %s", lacks)
        tasks = [running]
        if read is not None:
            hangup = asyncio.Event()
            stack.enter_context(on_hangup(hangup.set))
            tasks.append(
                await stack.enter_async_context(
                    alongside(_reload(service, read, hangup, tls), "read the settings again")
                )
            )
        if bus is not None:
            inquiries = BusApi(bus, subjects, Decider(service))
            tasks.append(
                await stack.enter_async_context(alongside(inquiries.run(), "answer questions on the bus"))
            )
        if private is not None:
            tasks.append(await _face(stack, app, private, service, tls))
            await until_ready(service.readiness.done, *tasks)
        tasks.append(await _face(stack, app, door, service, tls))
        stack.push_async_callback(_begin_to_stop, service)
        log.info("the router listens on %s", url_of(door, tls=tls is not None))
        await until_ready(service.readiness.done, *tasks)
        gc.collect()
        # objects created at start live as long as the process; a collection need not scan them again during a
        # request
        gc.freeze()
        gc.set_threshold(_COLLECTED_AFTER, *gc.get_threshold()[1:])
        tell(ready)
        # runs before the HTTP servers stop, which health probes cannot reach from then on
        stack.callback(take_back, ready)
        await first_failure(tasks)


async def _reload(
    service: RouterService, read: Callable[[], RouterConfig], hangup: asyncio.Event, tls: ServerTls | None
) -> None:
    """Reload the settings at every SIGHUP; signals during a reload are merged into one."""

    def settings() -> RouterConfig:
        if tls is not None:
            tls.check()
        return read()

    while True:
        await hangup.wait()
        hangup.clear()
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
    service.refusing = True
    log.info("the router stops: running requests have %g s", service.config.drain_seconds)


async def _face(
    stack: AsyncExitStack, app: FastAPI, door: socket.socket, service: RouterService, tls: ServerTls | None
) -> "asyncio.Task[None]":
    config = service.config
    count = service.metrics.connection_cut
    face = HttpServer(
        app, door, drain_seconds=config.drain_seconds, limits=http_limits(config), count=count, tls=tls
    )
    await stack.enter_async_context(face)
    return await stack.enter_async_context(
        alongside(face.failed(), f"the router's HTTP server on {url_of(door)}")
    )


def http_limits(config: RouterConfig) -> HttpLimits:
    """Return the limits of the router's HTTP server from its settings."""
    return HttpLimits(
        head_bytes=config.max_head_bytes,
        head_fields=config.max_head_fields,
        url_bytes=config.max_url_bytes,
        head_seconds=config.head_seconds,
        body_seconds=config.body_seconds,
        idle_seconds=config.idle_seconds,
        write_seconds=config.write_seconds,
    )
