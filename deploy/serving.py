"""HTTP serving of one ASGI application on sockets that were bound before, stopped within a bound."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from deploy.doors import BACKLOG, url_of
from deploy.gathering import GatheringProtocol


class _Server(uvicorn.Server):
    """Leaves signals to the process's own handlers, and sleeps until it is to stop instead of looking ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpFace:
    """Serves an application while its context lasts; leaving waits for open requests at most `drain_seconds`."""

    def __init__(self, app: Any, *doors: socket.socket, drain_seconds: float) -> None:
        self._doors = doors
        self._drain_seconds = drain_seconds
        self._server = _Server(
            uvicorn.Config(
                app,
                http=GatheringProtocol,
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, round(drain_seconds)),
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "HttpFace":
        self._task = asyncio.create_task(self._serve(), name=f"serve HTTP on {', '.join(map(url_of, self._doors))}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is None:
            return
        self._server.should_exit = True
        self._server.stopping.set()
        await asyncio.wait([self._task], timeout=self._drain_seconds + 2.0)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        for door in self._doors:
            door.close()

    async def _serve(self) -> None:
        try:
            await self._server.serve(sockets=list(self._doors))
        except SystemExit as error:  # how uvicorn says that the application would not start
            raise RuntimeError("the application did not start; the log says why") from error

    def abort(self) -> None:
        """As if the process were killed: nothing is taken any more, and every connection breaks."""
        for listener in self._server.servers:
            listener.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def failed(self) -> None:
        """Return never while it serves; raise what ended it."""
        if self._task is None:
            raise RuntimeError("not serving")
        await asyncio.shield(self._task)
        raise RuntimeError("the HTTP server ended by itself")
