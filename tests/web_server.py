"""An aiohttp application served to tests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

_BACKLOG = 1024
"""Connections that may come at one moment; the system drops further ones, which are tried again a second later"""
_ACCEPT_TURNS = 3
"""Turns of the event loop from a connection's acceptance until its protocol knows of it."""


@contextlib.asynccontextmanager
async def served_web(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    """Serve on 127.0.0.1 while the context lasts. Yields the URL. Handlers are cancelled when their client
    leaves."""
    async with listening(app, port) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def listening(app: web.Application, port: int = 0) -> AsyncIterator[asyncio.Server]:
    """Serve as `served_web` does. Yields what listens: closed by a test, it refuses connections, and open ones
    stay."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    assert runner.server is not None
    listener = await asyncio.get_running_loop().create_server(
        runner.server, "127.0.0.1", port, backlog=_BACKLOG
    )
    try:
        yield listener
    finally:
        for accepting in listener.sockets:
            asyncio.get_running_loop().remove_reader(accepting)
        for _ in range(_ACCEPT_TURNS):  # a server that closes meanwhile loses what it accepted
            await asyncio.sleep(0)
        listener.close()
        await runner.cleanup()
