"""Reading on with HTTP/1.1 after a head that asks for another protocol, where the parser stops. The body is
still to come.

Java's HttpClient and `curl --http2` send such requests by default. A new parser gets a head with the same
framing and without the upgrade.
"""

from typing import Protocol


class RequestCallbacks(Protocol):
    """Callbacks of a parser."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


def repeated_head(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return a head with the framing of these headers, for the new parser."""
    framing = [
        b"%s: %s\r\n" % field for field in headers if field[0] in (b"content-length", b"transfer-encoding")
    ]
    return b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n"


class ReadOn:
    """Callbacks for the parser after a declined upgrade: ignores the repeated head and forwards the rest to
    the protocol."""

    def __init__(self, protocol: RequestCallbacks) -> None:
        self._protocol = protocol
        self._known = True
        self.on_body, self.on_message_complete = protocol.on_body, protocol.on_message_complete

    def on_message_begin(self) -> None:
        if not self._known:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._known:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._known:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._known:
            self._known = False
        else:
            self._protocol.on_headers_complete()
