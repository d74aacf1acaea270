"""The planner as a process."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from bus import BusError
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.http.sockets import CannotListen
from deploy.launch_spec import tell
from deploy.process import alongside, first_failure, on_hangup, until_ready
from migration.config import MigrationConfig
from migration.service import MigrationService

EXPECTED = (BusError, CannotListen)


async def serve(
    bus_config: BusConfig,
    config: MigrationConfig,
    ready: Path | None,
    read: Callable[[], MigrationConfig] | None = None,
) -> None:
    """Serve until cancelled; create the file `ready` once serving.

    read: reads the settings at SIGHUP; raises ValueError or OSError if they are invalid. None: SIGHUP ends
    the process. Raises BusError if NATS cannot be reached at start.
    """
    subjects = Subjects(bus_config.namespace)
    async with AsyncExitStack() as stack:
        bus = await NatsBus.connect(bus_config.servers, subjects, bus_config, name="planner")
        stack.push_async_callback(bus.close)
        service = MigrationService(bus, subjects, config)
        tasks = [await stack.enter_async_context(alongside(service.run(), "planner"))]
        if read is not None:
            hangup = asyncio.Event()
            stack.enter_context(on_hangup(hangup.set))
            tasks.append(
                await stack.enter_async_context(
                    alongside(_reload(service, read, hangup), "read the settings again")
                )
            )
        await until_ready(service.ready, *tasks)
        if config.metrics_address is not None:
            # loads an HTTP server, so it is imported only on demand
            from deploy.http.metrics_server import offer_metrics

            await offer_metrics(
                stack, config.metrics_address, service.metrics.exposition, config.metrics_key_file
            )
        tell(ready)
        await first_failure(tasks)


async def _reload(
    service: MigrationService, read: Callable[[], MigrationConfig], hangup: asyncio.Event
) -> None:
    """Reload the settings at every request; requests during a reload are merged into one."""
    while True:
        await hangup.wait()
        hangup.clear()
        await service.reload(read)
