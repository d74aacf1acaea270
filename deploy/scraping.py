"""GET /metrics (Prometheus) and GET /health of a part that has no other HTTP face."""

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack
from typing import Any

from deploy.doors import CannotListen, listen
from deploy.process import alongside
from deploy.serving import HttpFace

Message = MutableMapping[str, Any]
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


class MetricsApp:
    """A raw ASGI application over what a registry says of itself."""

    def __init__(self, exposition: Callable[[], bytes]) -> None:
        self._exposition = exposition

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        status, body = self._page(scope["path"])
        headers = [(b"content-type", _TEXT), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _page(self, path: str) -> tuple[int, bytes]:
        match path:
            case "/metrics":
                return 200, self._exposition()
            case "/health":
                return 200, b"well\n"
            case _:
                return 404, b"nothing here; see /metrics and /health\n"


async def _lifespan(receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def offer_metrics(stack: AsyncExitStack, address: str, exposition: Callable[[], bytes]) -> None:
    """Serve on HOST:PORT until the stack closes. CannotListen when that is no address, or it cannot be bound."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise CannotListen(f"metrics_address {address!r} is no HOST:PORT; give e.g. 127.0.0.1:9464")
    door = listen(host.strip("[]") or "127.0.0.1", int(port))
    face = await stack.enter_async_context(HttpFace(MetricsApp(exposition), door, drain_seconds=1.0))
    await stack.enter_async_context(alongside(face.failed(), "serves metrics"))
