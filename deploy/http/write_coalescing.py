"""HTTP server protocol that coalesces writes: output of one turn of the event loop is sent together.

An ASGI server writes the head and the body of an answer separately. Each write is a system call and, without
Nagle's algorithm, a packet that wakes the client. Together they cost more than a tenth of the router's time
for a short request.
"""

import asyncio
from collections.abc import Callable
from typing import Any

DRAIN_INPUT_SECONDS = 1.0
"""Time during which the input of a gracefully closed connection is read and dropped."""
MAX_GATHERED_BYTES = 64 * 1024
"""Bytes; more are sent at once, so that the transport's own limits detect a slow reader."""


class WriteCoalescing(asyncio.Transport):
    """Transport that buffers writes until the current turn of the loop ends. All other calls go to the real
    transport."""

    __slots__ = (
        "_bytes",
        "_has_input",
        "_held",
        "_linger_seconds",
        "_loop",
        "_real",
        "is_closing",
        "resume_reading",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        linger_seconds: float = 60.0,
        has_input: Callable[[], bool] = bool,
    ) -> None:
        """Wrap a transport.

        linger_seconds: time limit for a closed connection whose client does not read everything; then it is
        aborted. has_input: returns whether the client may still send input that will not be read; then the
        close is graceful.
        """
        super().__init__()
        self._has_input = has_input
        self._real = transport
        self._linger_seconds = linger_seconds
        self._loop = loop
        self._held: list[bytes] = []
        self._bytes = 0
        # The most frequent calls bypass this object.
        self.is_closing = transport.is_closing  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._real.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._real.set_protocol(protocol)

    def pause_reading(self) -> None:
        self._real.pause_reading()

    def write(self, data: Any) -> None:
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._bytes += len(data)
        if self._bytes > MAX_GATHERED_BYTES:
            self.flush()

    def write_through(self, data: bytes) -> None:
        """Write output at once, together with what is buffered."""
        if self._held:
            self._held.append(data)
            self.flush()
        elif not self.is_closing():
            self._real.write(data)

    @property
    def direct(self) -> Callable[[bytes], object]:
        """The real transport's `write`: for output after `write_through`, until the next `write`."""
        return self._real.write

    def flush(self) -> None:
        """Send the buffered output."""
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
            return  # a TLS transport that is closed twice no longer answers calls
        self.flush()
        unsent = self._real.get_write_buffer_size()
        self._real.close()
        if unsent:
            self._loop.call_later(self._linger_seconds, self._real.abort)

    def close_gently(self) -> None:
        """Send the buffered output and the end of the stream; drop further input for a moment, then close.

        The protocol must drop that input. `is_closing` is true from now on.
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

    def let_go(self) -> None:
        """Forget the protocol, after the connection is lost."""
        self._has_input = bool

    def abort(self) -> None:
        self._held.clear()
        self._real.abort()

    def hold_reading(self) -> None:
        """Pause reading until `let_read`, and record pause and resume calls made meanwhile."""
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
    """Placeholder for an action that must wait."""
