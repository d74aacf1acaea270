"""The endpoint picker of a router process (`roost router --gateway`)."""

import asyncio
from pathlib import Path

from deploy.parts.part_tasks import PartTasks
from router.config import RouterConfig
from router.gateway.picker import EndpointPicker
from router.gateway.server import GatewayServer
from router.service import RouterService


class GatewayDoor:
    """The picker's server. It stops together with the HTTP servers, each within `drain_seconds`."""

    def __init__(self, server: GatewayServer, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        self._stopping: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, tasks: PartTasks, service: RouterService, address: str) -> "GatewayDoor":
        """Listen for gateways. Call it before the HTTP servers start, and `begin_to_stop` before they stop.
        OSError when the address or the certificate cannot be used.
        """
        config = service.config
        server = await GatewayServer.open(
            EndpointPicker(service),
            address,
            max_body_bytes=config.max_body_bytes,
            certificate=None if config.tls_cert is None else lambda: _certificate(config),
            shared=config.processes > 1,
        )
        door = cls(server, config.drain_seconds)
        tasks.push_async_callback(door.stopped)
        return door

    def begin_to_stop(self) -> None:
        """Take no further streams; open ones have the drain's time."""
        self._stopping = asyncio.ensure_future(self._server.close(self._seconds))

    async def stopped(self) -> None:
        """Wait until all streams have ended."""
        if self._stopping is None:
            self.begin_to_stop()
        assert self._stopping is not None
        await self._stopping


def _certificate(config: RouterConfig) -> tuple[bytes, bytes]:
    assert config.tls_cert is not None
    assert config.tls_key is not None
    return Path(config.tls_cert).read_bytes(), Path(config.tls_key).read_bytes()
