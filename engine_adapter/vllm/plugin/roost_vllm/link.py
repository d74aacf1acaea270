"""Connection of one worker process to its agent: a daemon thread with a socket of its own, which connects
again for ever. vLLM's threads never wait for it."""

import contextlib
import hmac
import logging
import random
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from roost_vllm.outbox import Outbox
from roost_vllm.settings import Settings
from roost_vllm.wire import (
    PROTOCOL,
    AgentHello,
    AgentWelcome,
    Frames,
    FromAgent,
    FromWorker,
    LinkError,
    WireError,
    WorkerHello,
    decode,
    frame,
    proof,
)

logger = logging.getLogger("vllm.roost")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_IO_SECONDS = 10.0
_WELCOME_SECONDS = 60.0
"""An agent asks the bus for the last epoch before it welcomes a worker."""


class Worker(Protocol):
    """Side of the worker process that a link speaks for. All methods are called from the link's thread. What
    it says goes through `Link.send`, under the lock that guards its state: so it is sent in the order in
    which it became true."""

    def hello(self, *, proof: bytes, nonce: bytes) -> WorkerHello:
        """Return the introduction."""
        ...

    def welcomed(self, welcome: AgentWelcome) -> None:
        """Take the agent's wishes, and send what it must know first."""
        ...

    def receive(self, message: FromAgent) -> None:
        """Take a message, and send the answer."""
        ...


class Refused(Exception):
    """Raised when the other side is no agent of this protocol and secret."""


_EXPECTED = (OSError, WireError, Refused)
"""Ends of a connection that need no trace in the log."""


class Link(threading.Thread):
    """Thread that connects to the agent, answers it, and sends what the worker hands it."""

    def __init__(
        self, settings: Settings, worker: Worker, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(name="roost-link", daemon=True)
        self._settings = settings
        self._worker = worker
        self._clock = clock
        self._outbox = Outbox()
        self._waker: socket.socket | None = None
        """wakes the thread while it waits"""
        self._alone_since: float | None = clock()
        self._stopped = self._is_outdated = False
        self.processor_seconds = 0.0
        """of this thread"""

    def alone_seconds(self) -> float:
        """Return the time since there was an agent; 0 while there is one."""
        since = self._alone_since
        return 0.0 if since is None else self._clock() - since

    def send(self, message: FromWorker) -> None:
        """Send a message soon, or never if there is no agent. Never blocks."""
        if self._outbox.put(message):
            self._wake()

    def introduce_again(self) -> None:
        """Connect anew, because the introduction has changed."""
        self._is_outdated = True
        self._wake()

    def stop(self) -> None:
        """End the thread soon."""
        self._stopped = True
        self._wake()

    def _wake(self) -> None:
        waker = self._waker
        if waker is not None:
            with contextlib.suppress(OSError):  # it is awake already, or has ended
                waker.send(b"x")

    def run(self) -> None:
        """Connect, serve, and connect again, until stopped."""
        pause, told = _FIRST_PAUSE, ""
        woken, self._waker = socket.socketpair()
        with woken, self._waker:
            woken.setblocking(False)
            self._waker.setblocking(False)
            while not self._stopped:
                failure = self._try_one_connection(woken)
                trace = None if isinstance(failure, _EXPECTED) else failure
                self._outbox.close()
                if self._alone_since is None:
                    self._alone_since = self._clock()
                    if trace is None:
                        pause, told = _FIRST_PAUSE, ""
                reason = "stopped" if failure is None else str(failure) or type(failure).__name__
                if reason != told:
                    told = reason
                    logger.warning(
                        "roost: no agent at %s:%d: %s", *self._settings[:2], reason, exc_info=trace
                    )
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _try_one_connection(self, woken: socket.socket) -> Exception | None:
        """Connect and serve; return why that ended. No failure ends the thread: the agent would never see
        this rank again."""
        try:
            self._one_connection(woken)
        except Exception as error:  # noqa: BLE001 - told in the log
            return error
        finally:
            self.processor_seconds = time.thread_time()
        return None

    def _one_connection(self, woken: socket.socket) -> None:
        address = (self._settings.host, self._settings.port)
        with socket.create_connection(address, timeout=_IO_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            frames = Frames()
            self._is_outdated = False
            welcome, early = self._shake_hands(connection, frames)
            self._outbox.open()  # first, so that nothing is lost which changes after the introduction
            self._alone_since = None
            self._worker.welcomed(welcome)
            logger.info("roost: connected to the agent at %s:%d", *address)
            for body in early:
                self._answer(connection, body)
            self._serve(connection, frames, woken)

    def _shake_hands(self, connection: socket.socket, frames: Frames) -> tuple[AgentWelcome, list[bytes]]:
        bodies: list[bytes] = []
        hello = self._next(connection, frames, bodies)
        if not isinstance(hello, AgentHello):
            raise Refused(_why(connection, hello, "hello"))
        if hello.protocol != PROTOCOL:
            versions = f"this plugin speaks protocol {PROTOCOL}, the agent {hello.protocol}"
            raise Refused(_told(connection, f"{versions}; install the same release"))
        nonce = secrets.token_bytes(32)
        mine = proof(self._settings.secret, "worker", hello.nonce)
        connection.sendall(frame(self._worker.hello(proof=mine, nonce=nonce)))
        connection.settimeout(_WELCOME_SECONDS)
        welcome = self._next(connection, frames, bodies)
        if not isinstance(welcome, AgentWelcome):
            raise Refused(_why(connection, welcome, "welcome"))
        if not hmac.compare_digest(welcome.proof, proof(self._settings.secret, "agent", nonce)):
            raise Refused(_told(connection, "the agent does not know the secret of ROOST_SECRET_FILE"))
        connection.settimeout(_IO_SECONDS)
        return welcome, bodies

    def _next(self, connection: socket.socket, frames: Frames, bodies: list[bytes]) -> FromAgent:
        while not bodies:
            bodies += frames.feed(_received(connection))
        return decode(bodies.pop(0))

    def _serve(self, connection: socket.socket, frames: Frames, woken: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while not self._stopped:
                if self._is_outdated:
                    raise Refused("what this worker says of itself has changed")
                readable = [key.fileobj for key, _ in selector.select(0.5)]
                if woken in readable:
                    woken.recv(4096)
                if connection in readable:
                    for body in frames.feed(_received(connection)):
                        self._answer(connection, body)
                while (message := self._outbox.take()) is not None:
                    connection.sendall(frame(message))
                self.processor_seconds = time.thread_time()

    def _answer(self, connection: socket.socket, body: bytes) -> None:
        try:
            message = decode(body)
        except WireError as error:
            connection.sendall(frame(LinkError(reason=str(error))))
            return
        if isinstance(message, LinkError):
            raise Refused(f"the agent says: {message.reason}")
        self._worker.receive(message)


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise ConnectionResetError("the agent closed the connection")
    return data


def _told(connection: socket.socket, reason: str) -> str:
    connection.sendall(frame(LinkError(reason=reason)))
    return reason


def _why(connection: socket.socket, message: FromAgent, wanted: str) -> str:
    if isinstance(message, LinkError):
        return f"the agent says: {message.reason}"
    return _told(connection, f"{type(message).__name__} came instead of {wanted}")
