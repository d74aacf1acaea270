"""Token frames of ranks (`fleet.completions.token_frames`): one connection per rank, over which it sends the
tokens of all answers to this router, once a step.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from typing import Protocol

from fleet.completions.token_frames import HEADER, PATH, FrameReader, TokenPiece, decode
from router.upstream.http_client import HttpClient, request_bytes
from router.upstream.server_connection import Connection, ConnectionLost, Heard

_CHUNK_SIZE = 10
"""Longest line of a chunk's size."""
_LINES = 3
"""Line ends of a chunk of one frame."""
_AGAIN_SECONDS = 1.0
"""Least time between two tries to open a connection."""
log = logging.getLogger(__name__)


class Receiver(Protocol):
    """An answer that arrives in frames."""

    def piece(self, piece: TokenPiece) -> None: ...

    def frames_lost(self, why: str) -> None:
        """The connection is lost, and with it the rest of the answer."""
        ...


class PieceRelay(Heard, Protocol):
    """Passes pieces of an answer on, without its task."""

    def take(self, piece: TokenPiece, now: float) -> bool:
        """Pass a piece on. False, with nothing done: its receiver must."""
        ...


class RankFrames:
    """The frames of one rank. Their connection is opened at the first request, which does not wait for it.
    Until it is open, and while the rank refuses it, answers come as events.
    """

    def __init__(self, client: HttpClient, url: str, connect_seconds: float, max_bytes: int) -> None:
        """max_bytes: of a frame."""
        self._client = client
        self._url = url
        self._connect_seconds = connect_seconds
        self._max_bytes = max_bytes
        self.name = ""
        """of the open connection; empty: there is none"""
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._tried_at = -inf
        self._numbers = count(1)
        self._receivers: dict[int, Receiver] = {}
        self._relays: dict[int, Callable[[TokenPiece, float], bool]] = {}
        """`PieceRelay.take` of answers, which get their pieces first"""
        self.used_at = self.heard_at = client.loop.time()

    def join(self, receiver: Receiver, headers: Sequence[tuple[bytes, bytes]]) -> tuple[int, bytes] | None:
        """Give a request a number, and its answer's pieces to `receiver` until `leave`. Return the number and
        the value of the request's header; None: no connection is open. headers: of the request that opens
        one.
        """
        self.used_at = self._client.loop.time()
        if not self.name:
            self._open(headers)
            return None
        number = next(self._numbers)
        self._receivers[number] = receiver
        return number, f"{self.name}/{number}".encode()

    def relay(self, number: int, relay: PieceRelay | None) -> None:
        """Give an answer's pieces to a relay first; None: no longer."""
        if relay is None:
            self._relays.pop(number, None)
        else:
            self._relays[number] = relay.take

    def leave(self, number: int) -> None:
        self.used_at = self._client.loop.time()
        self._receivers.pop(number, None)
        self._relays.pop(number, None)

    @property
    def busy(self) -> bool:
        """True while answers arrive."""
        return bool(self._receivers)

    def close(self) -> None:
        """Close the connection. Its answers are lost."""
        if self._connection is not None:
            self._connection.cut("the router closes its token frames")
        if self._task is not None:
            self._task.cancel()

    def _open(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        now = self._client.loop.time()
        if self._task is None and now - self._tried_at >= _AGAIN_SECONDS:
            self._tried_at = now
            self._task = asyncio.create_task(self._run(headers), name=f"reads token frames of {self._url}")

    async def _run(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Open the connection and read frames until it is lost."""
        why = "the rank ended its token frames"
        try:
            await self._read(headers)
        except (ConnectionLost, OSError, TimeoutError, ValueError) as error:
            why = f"{self._url}{PATH}: {error or type(error).__name__}"
            log.info("no token frames: %s", why)
        finally:
            self.name, self._task = "", None
            if self._connection is not None:
                self._connection.cut("not kept")
                self._connection = None
            lost, self._receivers, self._relays = self._receivers, {}, {}
            for receiver in lost.values():
                receiver.frames_lost(why)

    def take(self, data: bytes, now: float) -> bool:
        """Deliver a frame that came as one chunk: most do, and need no parser."""
        start = data.find(b"\r\n", 1, _CHUNK_SIZE) + 2
        size = len(data) - start - 2
        if (
            start == 1
            or not 0 < size <= self._max_bytes
            or not data.endswith(b"\n\r\n")
            or not data.startswith(b"%x\r\n" % size)
            or data.count(b"\n") > _LINES
        ):
            return False
        try:
            frame = decode(data[start:-3])
        except ValueError:
            return False  # read once more, it ends the connection
        self._deliver(frame, now)
        return True

    async def _read(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Read frames to their end. ConnectionLost, OSError, TimeoutError or ValueError if they break off."""
        origin = self._client.origin(self._url)
        connection = self._connection = await self._client.connect(origin, self._connect_seconds)
        connection.send(request_bytes("GET", origin, PATH, headers, b""))
        async with asyncio.timeout(self._connect_seconds):
            await connection.head()
        name = connection.headers.get(HEADER.encode(), b"").decode("latin-1")
        if connection.status != 200 or not name:
            raise ConnectionLost(f"HTTP {connection.status}")
        self.name, reader = name, FrameReader(self._max_bytes)

        def take(data: bytes) -> bool | None:
            for frame in reader.feed(data):
                self._deliver(frame, self._client.loop.time())
            if not data:
                return True
            connection.relay = self if reader.between_frames else None
            return None

        while True:
            while (data := connection.take()) is not None:
                if take(data):
                    return
            await connection.more(take=take)

    def _deliver(self, frame: list[TokenPiece], now: float) -> None:
        self.heard_at, relays = now, self._relays
        for piece in frame:
            take = relays.get(piece.number)
            if take is not None and take(piece, now):
                continue
            receiver = self._receivers.get(piece.number)
            if receiver is not None:  # otherwise its client left, or another rank continues it
                receiver.piece(piece)
