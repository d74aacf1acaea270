"""The client's side of a request: reading the body, and detecting a disconnect before the answer is
complete."""

import asyncio
from collections import deque

from fleet.completions import ApiError
from router.http.asgi_response import Receive, Scope
from router.http.body_budget import BodyShare

WATCH_AFTER_SECONDS = 0.02
"""delay before a client is watched for a disconnect"""


class ClientGone(Exception):
    """The client disconnected before its answer was complete."""


class ClientWatch:
    """Detect that the client disconnects, and then cancel the task that answers it: at most once, and never
    after `stop`.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive: Receive | None = receive
        """None after `stop`: then the watch keeps nothing of the request alive while it is still in
        `ClientWatches`
        """
        self._request_id = ""
        self._task: asyncio.Task[None] | None = None
        self._answering: asyncio.Task[None] | None = None
        self._disconnected = False

    def stop(self) -> None:
        self._receive = None
        if self._task is not None:
            self._task.remove_done_callback(self._on_disconnect)
            self._task.cancel()
            self._task = None

    def client_disconnected(self) -> bool:
        """True when the present cancellation comes from this watch alone; it is then taken back."""
        return self._disconnected and self._answering is not None and self._answering.uncancel() == 0

    def answered_by(self, task: asyncio.Task[None] | None, request_id: str) -> None:
        """Set the task to cancel."""
        self._answering, self._request_id = task, request_id

    def begin(self) -> None:
        if self._receive is not None:
            self._task = asyncio.create_task(
                _until_disconnected(self._receive), name=f"watches the client of request {self._request_id}"
            )
            self._task.add_done_callback(self._on_disconnect)

    def _on_disconnect(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and self._answering is not None:
            self._disconnected = True
            self._answering.cancel()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientWatches:
    """Start each watch WATCH_AFTER_SECONDS late: most answers of small engines are complete by then, and
    never cost a task.

    One timer serves all watches, because they become due in the order of their start.
    """

    def __init__(self) -> None:
        self._due: deque[tuple[float, ClientWatch]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, watch: ClientWatch, request_id: str) -> None:
        """Schedule a watch. Call it in the task that answers, once the request's body is read."""
        loop = asyncio.get_running_loop()
        watch.answered_by(asyncio.current_task(loop), request_id)
        self._due.append((loop.time() + WATCH_AFTER_SECONDS, watch))
        if self._timer is None:
            self._timer = loop.call_later(WATCH_AFTER_SECONDS, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        while self._due and self._due[0][0] <= now:
            self._due.popleft()[1].begin()
        self._timer = loop.call_at(self._due[0][0], self._look, loop) if self._due else None


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
