"""The tracker as a process."""

from contextlib import AsyncExitStack
from pathlib import Path

from bus import BusError
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.http.sockets import CannotListen
from deploy.launch_spec import tell
from deploy.process import alongside, first_failure, until_ready
from tracker.config import TrackerConfig
from tracker.service import TrackerService

EXPECTED = (BusError, CannotListen)


async def serve(bus_config: BusConfig, config: TrackerConfig, ready: Path | None) -> None:
    """Serve until cancelled; create the file `ready` once serving. Raises BusError if NATS cannot be reached
    at start."""
    subjects = Subjects(bus_config.namespace)
    async with AsyncExitStack() as stack:
        bus = await NatsBus.connect(bus_config.servers, subjects, bus_config, name="tracker")
        stack.push_async_callback(bus.close)
        service = TrackerService(bus, subjects, config)
        running = await stack.enter_async_context(alongside(service.run(), "tracker"))
        await until_ready(service.ready, running)
        if config.metrics_address is not None:
            # loads an HTTP server, so it is imported only on demand
            from deploy.http.metrics_server import offer_metrics

            await offer_metrics(
                stack, config.metrics_address, service.metrics.exposition, config.metrics_key_file
            )
        tell(ready)
        await first_failure([running])
