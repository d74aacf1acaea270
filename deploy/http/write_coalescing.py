"""An HTTP server protocol whose answers leave in as few packets as they can: what is written in one turn of the event loop is sent together.

An ASGI server writes an answer's head and its body apart. Each write is a system call and, without Nagle's algorithm, a packet that wakes
the client: together more than a tenth of what the router spends on a short request.
"""

import asyncio
from collections.abc import Callable
from typing import Any

DRAIN_INPUT_SECONDS = 1.0
"""How long the input of a connection that is closed gently is read and dropped."""
MOST_GATHERED = 64 * 1024
"""Bytes; more are sent at once, so that the transport's own limits say when a client reads too slowly."""


class WriteCoalescing(asyncio.Transport):
    """A transport that holds what is written until the present turn of the loop is over. Everything else goes straight to the real one."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        linger_seconds: float = 60.0,
        has_input: Callable[[], bool] = bool,
    ) -> None:
        """linger_seconds: a connection that was closed before its client read everything is aborted after this time.
        has_input: at a close, tells that the client may be sending something which will not be read: it is closed gently."""
        super().__init__()
        self._has_input = has_input
        self._real = transport
        self._linger_seconds = linger_seconds
        self._loop = loop
        self._held: list[bytes] = []
        self._bytes = 0
        # What is asked most often goes past this object.
        self.is_closing = transport.is_closing  # type: ignore[method-assign]
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]
        self.set_protocol = transport.set_protocol  # type: ignore[method-assign]

    def write(self, data: Any) -> None:
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._bytes += len(data)
        if self._bytes > MOST_GATHERED:
            self.flush()

    def flush(self) -> None:
        """Send what is held."""
        if self._held:
            data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            self._held.clear()
            self._bytes = 0
            if not self.is_closing():  # the client may have gone since
                self._real.write(data)

    def close(self) -> None:
        if self._has_input():
            self.close_gently()
            return
        if self._real.is_closing():
            return  # a TLS transport that is closed twice can be asked nothing more
        self.flush()
        unsent = self._real.get_write_buffer_size()
        self._real.close()
        if unsent:
            self._loop.call_later(self._linger_seconds, self._real.abort)

    def close_gently(self) -> None:
        """Send what is held and the end of the stream; drop what the client still sends for a moment, then close.

        The protocol must drop it. `is_closing` is true from now on.
        """
        if self.is_closing():
            return
        self.flush()
        if not self._real.can_write_eof():  # TLS
            self._real.close()
            return
        self._real.write_eof()
        self.is_closing = lambda: True  # type: ignore[method-assign]
        self.let_read(paused=False)
        self._loop.call_later(DRAIN_INPUT_SECONDS, self._close_real)

    def _close_real(self) -> None:
        if not self._real.is_closing():
            self._real.close()
            self._loop.call_later(self._linger_seconds, self._real.abort)

    def abort(self) -> None:
        self._held.clear()
        self._real.abort()

    def hold_reading(self) -> None:
        """Read nothing until `let_read`, whatever is asked for meanwhile."""
        self.resume_reading = _nothing  # type: ignore[method-assign]
        self._real.pause_reading()

    def let_read(self, *, paused: bool) -> None:
        """Read again, unless `paused`."""
        self.resume_reading = self._real.resume_reading  # type: ignore[method-assign]
        if not paused and not self._real.is_closing():
            self._real.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._bytes + self._real.get_write_buffer_size()


def _nothing() -> None:
    """In the place of an action that must wait."""
