"""HTTP server for one ASGI application on sockets bound earlier. Stopping takes bounded time."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import uvicorn

from deploy.descriptors import are_exhausted, max_connections
from deploy.http.connection_gate import ConnectionGate
from deploy.http.limited_protocol import LimitedProtocol
from deploy.http.limits import LIMITS, Count, CutConnections, HttpLimits
from deploy.http.sockets import BACKLOG, url_of
from deploy.security.tls import ServerTls

STOPPING = "stopping"
"""Key of the event in each request's `state` that is set when the server stops. Responses without an end wait
for it.
"""
SWEEP_SECONDS = 1.0
"""Interval of deadline checks, and thus their precision."""
LAST_WORDS_SECONDS = 2.0
"""Time for aborted requests to report their end during a stop, and again for connections to send their
remaining output."""
_LOOK_SECONDS = 0.01
_ACCEPTING_TURNS = 3
"""Turns of the event loop after which every connection is made that was accepted before."""
log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn server that leaves signals to the process, waits for its stop event, enforces deadlines, and
    stops in stages."""

    def __init__(
        self,
        config: uvicorn.Config,
        gate: ConnectionGate,
        drain_seconds: float,
        count: Count,
        tls: ServerTls | None,
        handshake_seconds: float,
    ) -> None:
        super().__init__(config)
        self._gate = gate
        self._count = count
        self._tls = tls
        self._handshake_seconds = handshake_seconds
        self.stopping = asyncio.Event()
        self._drain_seconds = drain_seconds
        self._sweeping: asyncio.TimerHandle | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, on listening sockets; in addition with a renewable certificate, and with a
        time limit for TLS handshakes, which no protocol sees."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("the application did not start; the log says why")
        self.lifespan.state[STOPPING] = self.stopping
        loop, config = asyncio.get_running_loop(), self.config

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )  # type: ignore[call-arg]

        tls: dict[str, Any] = (
            {}
            if self._tls is None
            else {"ssl": self._tls.context, "ssl_handshake_timeout": self._handshake_seconds}
        )
        self.servers = [
            await loop.create_server(protocol, sock=listener, backlog=config.backlog, **tls)
            for listener in sockets or []
        ]
        self.started = True

    async def main_loop(self) -> None:
        await self.on_tick(0)
        self._sweep(asyncio.get_running_loop())
        await self.stopping.wait()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self.server_state.connections):
            cast("LimitedProtocol", connection).enforce(now)
        if are_exhausted():
            self._count("out_of_descriptors")
        self._sweeping = loop.call_later(SWEEP_SECONDS, self._sweep, loop)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop_accepting(self) -> None:
        """Accept no connection from now on, and cut those that are accepted and not yet made.

        The listening sockets are closed a few turns of the event loop later: asyncio loses a connection that
        is between accepted and made when its server closes (`Server._attach` fails), and its client would
        wait for ever."""
        self._gate.closed = True
        for server in self.servers:
            for listener in server.sockets:
                asyncio.get_running_loop().remove_reader(listener)
        self._close_listeners(_ACCEPTING_TURNS)

    def _close_listeners(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._close_listeners, turns - 1)
            return
        for server in self.servers:
            server.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop in stages: accept no connection; let answers end in time; abort the rest so that it can send
        an error; then cut."""
        self.stop_accepting()
        for _ in range(_ACCEPTING_TURNS + 1):
            await asyncio.sleep(0)
        for listener in sockets or []:
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        await self._until(lambda: not state.tasks, self._drain_seconds)
        if state.tasks:
            log.warning(
                "%d requests are broken off: they were not over after %g s",
                len(state.tasks),
                self._drain_seconds,
            )
        for task in list(state.tasks):
            task.cancel()
        await self._until(lambda: not state.tasks, LAST_WORDS_SECONDS)
        for connection in list(state.connections):
            connection.transport.close()  # its answer is written, or it has no request
        await self._until(lambda: not state.connections, LAST_WORDS_SECONDS)
        for connection in list(state.connections):
            connection.transport.abort()
        await self._until(lambda: not state.tasks, LAST_WORDS_SECONDS)
        if self._sweeping is not None:
            self._sweeping.cancel()
        await self.lifespan.shutdown()

    async def _until(self, fact: Callable[[], bool], seconds: float) -> None:
        """Poll until the condition holds, or the time is over. uvicorn has no event for either of the
        conditions used here."""
        end = asyncio.get_running_loop().time() + seconds
        while not fact() and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)


class HttpServer:
    """Serve an application while the context lasts. Leaving it waits for open requests, at most
    `drain_seconds`.

    count: called with the cause of each connection cut for exceeding `limits`.
    """

    def __init__(
        self,
        app: Any,
        *listeners: socket.socket,
        drain_seconds: float,
        limits: HttpLimits = LIMITS,
        count: Count | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        self._listeners = listeners
        self._drain_seconds = drain_seconds
        self._cut = CutConnections(count)
        gate = ConnectionGate(max_connections() if limits.connections is None else limits.connections)
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", partial(LimitedProtocol, limits, self._cut.count, gate)),
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
        )
        self._server = _Server(config, gate, drain_seconds, self._cut.count, tls, limits.head_seconds)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "HttpServer":
        self._task = asyncio.create_task(
            self._serve(), name=f"serve HTTP on {', '.join(map(url_of, self._listeners))}"
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is None:
            return
        self._server.should_exit = True
        self._server.stopping.set()
        await asyncio.wait([self._task], timeout=self._drain_seconds + 4 * LAST_WORDS_SECONDS)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        for listener in self._listeners:
            listener.close()

    async def _serve(self) -> None:
        await self._server.serve(sockets=list(self._listeners))

    def abort(self) -> None:
        """Stop as if killed: accept nothing and break every connection."""
        self._server.stop_accepting()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def failed(self) -> None:
        """Wait while it serves; raise the error that ended it."""
        if self._task is None:
            raise RuntimeError("not serving")
        await asyncio.shield(self._task)
        raise RuntimeError("the HTTP server ended unexpectedly")
