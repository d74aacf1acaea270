"""Events of Dynamo's workers over ZeroMQ: one socket, connected to every publisher. The only module of the
router that imports ZeroMQ.
"""

import logging

import zmq
import zmq.asyncio

log = logging.getLogger(__name__)

_WAITING = 100_000
"""Messages that may wait here; further ones are dropped by ZeroMQ, and the gap shows in their numbers."""


class ZmqFeed:
    """See `router.dynamo.ports.EventFeed`. An async context manager."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, _WAITING)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        self._addresses: set[str] = set()

    async def __aenter__(self) -> "ZmqFeed":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close(0)
        self._context.term()

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
        self._addresses = set(addresses)

    async def receive(self) -> list[bytes]:
        """Return the frames of the next message."""
        return list(await self._socket.recv_multipart())
