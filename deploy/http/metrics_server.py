"""GET /metrics (Prometheus) and GET /health for a part without another HTTP server."""

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from deploy.http.server import HttpServer
from deploy.http.sockets import CannotListen, listen
from deploy.process import alongside
from deploy.security.exposure import is_loopback
from fleet.settings import FilePath
from fleet.shared_secret import SharedSecret

log = logging.getLogger(__name__)
Message = MutableMapping[str, Any]
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


class MetricsApp:
    """Raw ASGI application that serves a metrics registry. With a key, /metrics requires it as bearer
    token."""

    def __init__(self, exposition: Callable[[], bytes], key: SharedSecret | None = None) -> None:
        self._exposition = exposition
        self._key = key

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        presented = next(
            (value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"), None
        )
        status, body = self._page(scope["path"], presented)
        headers = [(b"content-type", _TEXT), (b"content-length", str(len(body)).encode())]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _page(self, path: str, presented: str | None) -> tuple[int, bytes]:
        match path:
            case "/metrics" if self._key is not None and not self._key.admits(presented):
                return 401, b"Authorization: Bearer <the key in metrics_key_file>\n"
            case "/metrics":
                return 200, self._exposition()
            case "/health":
                return 200, b"well\n"
            case _:
                return 404, b"nothing here; see /metrics and /health\n"


async def _lifespan(
    receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _read_key(file: Path) -> SharedSecret:
    try:
        return SharedSecret.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CannotListen(f"metrics_key_file {file}: {error}") from error


async def offer_metrics(
    stack: AsyncExitStack, address: str, exposition: Callable[[], bytes], key_file: FilePath | None = None
) -> None:
    """Serve on HOST:PORT until the stack closes. Raises CannotListen for an invalid or unavailable address,
    or an unreadable key."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise CannotListen(f"metrics_address {address!r} is no HOST:PORT; give e.g. 127.0.0.1:9464")
    host = host.strip("[]") or "127.0.0.1"
    key = None if key_file is None else _read_key(Path(key_file))
    if key is None and not is_loopback(host):
        log.warning(
            "insecure: other machines may read /metrics on %s without a key; metrics_key_file names one",
            address,
        )
    app = MetricsApp(exposition, key)
    server = await stack.enter_async_context(HttpServer(app, listen(host, int(port)), drain_seconds=1.0))
    await stack.enter_async_context(alongside(server.failed(), "serves metrics"))
