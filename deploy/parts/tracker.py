"""The tracker as a process."""

from pathlib import Path

from bus import BusError
from bus.config import BusConfig
from deploy.http.sockets import CannotListen
from deploy.parts.part_tasks import PartTasks
from tracker.config import TrackerConfig
from tracker.service import TrackerService

EXPECTED = (BusError, CannotListen)


async def serve(bus_config: BusConfig, config: TrackerConfig, ready: Path | None) -> None:
    """Serve until cancelled; create the file `ready` once serving. Raises BusError if NATS cannot be reached
    at start."""
    async with PartTasks() as tasks:
        service = TrackerService(*await tasks.connect(bus_config, "tracker"), config)
        await tasks.start(service.run(), "tracker")
        await tasks.until(service.ready)
        await tasks.offer_metrics(config.metrics_address, service.metrics.exposition, config.metrics_key_file)
        await tasks.serve(ready)
