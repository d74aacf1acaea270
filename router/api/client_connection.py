"""The client's side of a request: reading the body, and detecting a disconnect before the answer is
complete."""

import asyncio
from collections.abc import Callable

from fleet.completions import ApiError
from router.http.asgi_response import OnDisconnect, Receive, Scope
from router.http.body_budget import BodyShare


class ClientGone(Exception):
    """The client disconnected before its answer was complete."""


class ClientWatch:
    """Cancels the task that answers when its client disconnects: at most once, and never after `stop`."""

    __slots__ = ("_answering", "_disconnected", "_on_disconnect")

    def __init__(self, on_disconnect: OnDisconnect | None) -> None:
        """on_disconnect: the HTTP server's extension `ON_DISCONNECT`; None: it has none, and nothing is
        noticed.
        """
        self._on_disconnect = on_disconnect or _ignored
        self._answering: asyncio.Task[None] | None = None
        self._disconnected = False

    def start(self) -> None:
        """Begin, in the task that answers, once the request's body is read."""
        self._answering = asyncio.current_task()
        self._on_disconnect(self._cancel)

    def stop(self) -> None:
        self._on_disconnect(None)

    def client_disconnected(self) -> bool:
        """True when the present cancellation comes from this watch alone; it is then taken back."""
        return self._disconnected and self._answering is not None and self._answering.uncancel() == 0

    def _cancel(self) -> None:
        if self._answering is not None:
            self._disconnected = True
            self._answering.cancel()


def _ignored(_: Callable[[], object] | None) -> None:
    """Stand for a server without the extension."""


async def read_body(scope: Scope, receive: Receive, limit: int, share: BodyShare) -> bytes:
    """Read the complete body; `share` accounts for its memory.

    ApiError 413 as soon as it is known to be too long, 503 when there is no memory for it; ClientGone when
    the client disconnects.
    """
    for name, length in scope["headers"]:  # a loop, since a generator costs microseconds a request
        if name == b"content-length":
            if length.isdigit():
                if int(length) > limit:
                    raise _too_large(limit)
                share.announce(int(length))
            break
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        share.add(len(part))
        if not message.get("more_body", False):
            return b"".join((*parts, part)) if parts else part
        parts.append(part)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")
