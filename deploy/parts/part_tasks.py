"""The running pieces of one part: bus connection, endless tasks, HTTP servers; stopped in reverse order."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bus import Bus
from bus.config import BusConfig
from bus.memory import MemoryBroker, MemoryBus
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.launch_spec import mark_ready
from deploy.process import alongside, at_hangup, first_failure, until_ready
from fleet.settings import FilePath

if TYPE_CHECKING:
    from deploy.http.server import HttpServer


class PartTasks(AsyncExitStack):
    """Endless tasks of a part, and what they need, while the context lasts."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self, config: BusConfig | None, name: str) -> tuple[Bus, Subjects]:
        """Connect to NATS under this name. None: to a bus of this process alone. Raises BusError if NATS
        cannot be reached."""
        if config is None:
            return self._private_bus()
        subjects = Subjects(config.namespace)
        bus: Bus = await NatsBus.connect(config.servers, subjects, config, name=name)
        self.push_async_callback(bus.close)
        return bus, subjects

    def _private_bus(self) -> tuple[Bus, Subjects]:
        broker = MemoryBroker()
        bus = MemoryBus(broker)
        self.push_async_callback(bus.close)
        return bus, broker.subjects

    async def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start an endless task."""
        self._tasks.append(await self.enter_async_context(alongside(work, name)))
        return self._tasks[-1]

    async def serve_http(self, server: "HttpServer", name: str) -> None:
        """Start an HTTP server."""
        await self.enter_async_context(server)
        await self.start(server.failed(), name)

    async def reload_at_hangup(self, reload: Callable[[], Awaitable[object]]) -> None:
        """Reload the settings at every SIGHUP."""
        self._tasks.append(await self.enter_async_context(at_hangup(reload, "read the settings again")))

    async def offer_metrics(
        self, address: str | None, exposition: Callable[[], bytes], key_file: FilePath | None
    ) -> None:
        """Serve /metrics and /health on an address, if there is one. Raises CannotListen."""
        if address is not None:
            # loads an HTTP server, so it is imported only on demand
            from deploy.http.metrics_server import offer_metrics

            await offer_metrics(self, address, exposition, key_file)

    async def until(self, ready: asyncio.Event) -> None:
        """Return when the event is set; if one of the tasks ends before, raise its error."""
        await until_ready(ready, *self._tasks)

    async def serve(self, ready: Path | None) -> None:
        """Create the file `ready`, then wait until one of the tasks ends, and raise its error."""
        mark_ready(ready)
        await first_failure(self._tasks)
