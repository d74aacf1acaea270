"""Commands that supervise child processes: `roost up`, several router processes, a worker's ranks."""

import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from deploy.configuration_loader import Configuration
from deploy.http.sockets import CannotListen
from deploy.local.fleet import Fleet
from deploy.local.nats_server import NoNats
from deploy.local.supervise import UnitFailed
from deploy.process import run as run_process
from deploy.run_directory import home, run_directory
from deploy.terminal.output import console


@asynccontextmanager
async def supervised(settings: Configuration) -> AsyncIterator[Fleet]:
    """Yield a fleet without processes, in a run directory of its own; its events are printed."""
    out = console()
    with run_directory(home(os.environ)) as run:
        out.print(f"[dim]starting; logs are in {run.path}[/dim]")
        async with Fleet(
            settings, run, os.environ, lambda text: out.print(f"  {text}", markup=False)
        ) as fleet:
            yield fleet


def supervise(work: Coroutine[Any, Any, None]) -> int:
    """Run a supervisor until it is stopped or a part is given up. Returns the exit status."""
    return run_process(work, expected=(UnitFailed, CannotListen, NoNats, OSError), fast_loop=False)
