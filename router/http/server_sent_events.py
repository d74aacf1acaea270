"""Server-sent events, as ranks and other servers send them, and as programs read them. Pure."""

_DATA = b"data:"
_LEAN = b"data: "


def event_data(block: bytes) -> bytes:
    """Return the data of an event, which may have several lines; b"" without any."""
    return b"\n".join(line[5:].lstrip() for line in block.splitlines() if line.startswith(_DATA))


def written(name: str, data: bytes, position: int | None = None) -> bytes:
    """Return a named event. data: a single line. position: its id, which a client repeats when it resumes."""
    known = b"" if position is None else b"id: %d\n" % position
    return b"%bevent: %b\ndata: %b\n\n" % (known, name.encode(), data)


class EventSplitter:
    """Splits arriving bytes into server-sent events: the data of each, without line ends. ValueError for an
    event that is too long.
    """

    def __init__(self, max_bytes: int) -> None:
        self._rest = b""
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of every event that is now complete. Comments and other fields are left out."""
        if (
            not self._rest
            and data.startswith(_LEAN)
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n\n")
        ):
            return [data[len(_LEAN) : -2]]  # one complete event, as ranks write it
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *blocks, self._rest = data.split(b"\n\n")
        if len(self._rest) > self._max_bytes:
            raise ValueError(f"a server-sent event exceeds {self._max_bytes} bytes")
        return [
            block[5:].lstrip() if block.startswith(_DATA) and b"\n" not in block else event_data(block)
            for block in blocks
            if _DATA in block
        ]
