"""The router as a process, before engines that speak on the bus, before plain servers, or both."""

import logging
import socket
from contextlib import AsyncExitStack
from pathlib import Path

from bus import BusError
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.subjects import Subjects
from deploy.doors import url_of
from deploy.orders import tell
from deploy.process import alongside, first_failure
from deploy.serving import HttpFace
from router.api import create_app
from router.config import RouterConfig
from router.service import RouterService

EXPECTED = (BusError, OSError, ValueError)
DRAIN_SECONDS = 5.0
"""how long open requests may go on when the router is asked to stop"""
log = logging.getLogger(__name__)


async def serve(door: socket.socket, bus_config: BusConfig | None, config: RouterConfig, ready: Path | None) -> None:
    """Serve until cancelled; make the file `ready` once it does. Without a bus (None) plain backends alone. BusError when NATS cannot be reached at start."""
    subjects = Subjects("roost" if bus_config is None else bus_config.namespace)
    async with AsyncExitStack() as stack:
        stack.enter_context(door)
        bus = None
        if bus_config is not None:
            bus = await NatsBus.connect(bus_config.url, subjects, bus_config, name="router")
            stack.push_async_callback(bus.close)
        service = RouterService(bus, subjects, config)
        running = await stack.enter_async_context(alongside(service.run(), "keep the router's view fresh"))
        face = await stack.enter_async_context(HttpFace(create_app(service, config), door, drain_seconds=DRAIN_SECONDS))
        serving = await stack.enter_async_context(alongside(face.failed(), "the router's HTTP face"))
        log.info("the router listens on %s", url_of(door))
        tell(ready)
        await first_failure([running, serving])
