"""The planner as a process."""

import gc
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bus import BusError
from bus.config import BusConfig
from deploy.http.sockets import CannotListen
from deploy.parts.part_tasks import PartTasks
from migration import kernels
from migration.config import MigrationConfig
from migration.service import MigrationService

logger = logging.getLogger(__name__)

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
    if kernels.missing:
        logger.warning("solvers run in Python, several times slower: %s", kernels.missing)
    async with PartTasks() as tasks:
        service = MigrationService(*await tasks.connect(bus_config, "planner"), config)
        await tasks.start(service.run(), "planner")
        if read is not None:
            await tasks.reload_at_hangup(partial(service.reload, read))
        await tasks.until(service.ready)
        await tasks.offer_metrics(config.metrics_address, service.metrics.exposition, config.metrics_key_file)
        gc.collect()
        # A collection over all loaded objects would prolong a decision by 25 milliseconds.
        gc.freeze()
        await tasks.serve(ready)
