"""Somebody on a NATS server who answers, in a thread, for commands that run in a test as they do in a
shell."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

from bus import Bus
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects


@contextmanager
def on_nats(
    url: str, namespace: str, serving: Callable[[Bus, Subjects], AbstractAsyncContextManager[None]]
) -> Iterator[None]:
    """While the context lasts that of `serving` does, on a bus and a loop of its own."""
    ready, over, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()

    async def work() -> None:
        subjects = Subjects(namespace)
        bus = await NatsBus.connect(url, subjects, BusConfig(url=url, namespace=namespace))
        async with serving(bus, subjects):
            ready.set()
            await over.wait()
        await bus.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(work()), name="somebody who answers")
    thread.start()
    try:
        assert ready.wait(10)
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()
