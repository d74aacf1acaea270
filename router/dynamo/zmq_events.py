"""Events of Dynamo's workers over ZeroMQ: one socket, connected to every publisher. The only module of the
router that imports ZeroMQ.
"""

import asyncio
import logging
from collections import deque

import zmq

from router.dynamo.wire.discovery import KV_EVENTS, KV_METRICS

log = logging.getLogger(__name__)

_WAITING = 100_000
"""Messages that may wait here; further ones are dropped by ZeroMQ, and the gap shows in their numbers."""

_READABLE = int(zmq.POLLIN)
_TOGETHER_SECONDS = 0.002
"""Time for which a message waits for others."""


class ZmqFeed:
    """See `router.dynamo.ports.EventFeed`. An async context manager.

    It reads all messages of a moment in one turn, which costs far less than a turn for each: a request makes
    several. State: messages read, and a timer while others may follow.
    """

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, _WAITING)
        self._socket.setsockopt(zmq.LINGER, 0)
        for topic in (KV_EVENTS, KV_METRICS):
            self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._addresses: set[str] = set()
        self._waiting: deque[list[bytes]] = deque()
        self._arrived = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> "ZmqFeed":
        asyncio.get_running_loop().add_reader(self._socket.FD, self._read_soon)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.FD)
        self._stop_timer()
        self._socket.close(0)
        self._context.term()

    def _read_soon(self) -> None:
        self._readable()  # otherwise the descriptor stays readable
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TOGETHER_SECONDS, self._read)

    def _readable(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read(self) -> None:
        """Read until there is nothing more: the descriptor tells of new messages only after that."""
        self._stop_timer()
        while len(self._waiting) < _WAITING and self._readable():
            self._waiting.append(self._socket.recv_multipart(zmq.NOBLOCK))
        if self._waiting:
            self._arrived.set()

    def follow(self, addresses: set[str]) -> None:
        """Connect to these addresses, and to no others. An invalid one is left out."""
        for address in addresses - self._addresses:
            try:
                self._socket.connect(address)
            except zmq.ZMQError as error:
                log.warning("events of a worker cannot be received from %r: %s", address, error)
        for address in self._addresses - addresses:
            try:
                self._socket.disconnect(address)
            except zmq.ZMQError as error:
                log.debug("%r was not connected: %s", address, error)
        if addresses != self._addresses:
            self._addresses = set(addresses)
            self._read_soon()  # the descriptor is silent about messages that arrived during these calls

    async def receive(self) -> list[bytes]:
        """Return the frames of the next message."""
        while not self._waiting:
            self._arrived.clear()
            self._read()
            if not self._waiting:
                await self._arrived.wait()
        return self._waiting.popleft()
