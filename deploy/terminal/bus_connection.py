"""Bus connection of one command."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import typer

from bus import Bus, BusError
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.process import run as run_process

Found = TypeVar("Found")


def on_bus(config: BusConfig, work: Callable[[Bus, Subjects], Awaitable[Found]]) -> Found:
    """Run a query over the bus; end the command if that is impossible."""
    found: list[Found] = []

    async def query() -> None:
        subjects = Subjects(config.namespace)
        bus = await NatsBus.connect(config.servers, subjects, config, name="roost")
        try:
            found.append(await work(bus, subjects))
        finally:
            await bus.close()

    code = run_process(
        query(), expected=(BusError,), hint="is `roost up` running? Name its NATS server with --nats URL"
    )
    if code or not found:
        raise typer.Exit(code)
    return found[0]
