"""Client half of the bus that both implementations share: numbering, encoding, answers, bounded queues.

An implementation adds the transport (`_send`, `_exchange`, `_listening`, `_serving`) and the storage.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from bus import Message
from bus.config import ANSWERS_SECONDS, BusConfig
from bus.large_answers import PartedAnswers
from bus.mailbox import (
    Answer,
    BoundedSubscription,
    Encoder,
    RequestServer,
    SequencedPublisher,
    await_answer,
    check_stored,
    listenable,
    sendable,
)
from bus.protocol.codec import Rejections
from bus.stores import StoreRefusals


class BusClient(ABC):
    """Base of `MemoryBus` and `NatsBus`. `bus.Bus` documents the methods."""

    def __init__(self, config: BusConfig, stored: tuple[str, ...], refusals: StoreRefusals) -> None:
        """stored: patterns of the subjects that are recorded."""
        self.rejected = Rejections()
        self.refusals = refusals
        self._config = config
        self._stored = stored
        self._inboxes: set[BoundedSubscription] = set()
        self._publisher = SequencedPublisher(self._put_parcel)
        self._recorder = SequencedPublisher(self.put_blob)
        self._answers = PartedAnswers(config.answers_bytes, ANSWERS_SECONDS)

    def publisher(self, subject: str) -> Encoder:
        return Encoder(subject, self._send, self._put_parcel, lambda: self.connected)

    @asynccontextmanager
    async def subscribe(self, *subjects: str, limit: int = 65536) -> AsyncIterator[BoundedSubscription]:
        patterns = tuple(listenable(subject) for subject in subjects)
        inbox = BoundedSubscription(limit, self._config.queue_bytes, self._content, self.rejected)
        self._inboxes.add(inbox)
        try:
            async with self._listening(inbox, patterns):
                yield inbox
        finally:
            self._inboxes.discard(inbox)
            inbox.close()

    async def request(self, subject: str, message: Message, seconds: float = 2.0) -> Message:
        raw = await self._publisher.sealed(sendable(subject), message)
        return await await_answer(
            subject,
            raw,
            lambda sent, wait: self._exchange(subject, sent, wait),
            self._publisher,
            self._content,
            seconds,
        )

    @asynccontextmanager
    async def serve(self, subject: str, answer: Answer) -> AsyncIterator[None]:
        server = RequestServer(
            subject, answer, self._publisher, self._answers, self._content, self.rejected, self.refusals
        )
        async with server.open(), self._serving(server):
            yield

    async def record(self, subject: str, message: Message) -> None:
        check_stored(sendable(subject), message, self._stored)
        number = self._recorder.sequence
        raw = await self._recorder.sealed(subject, message)
        await self._append(subject, raw, f"{self._recorder.publisher_id:x}-{number}")

    async def close(self) -> None:
        for inbox in self._inboxes:
            inbox.close()
        self._answers.clear()

    # Transport

    @property
    @abstractmethod
    def connected(self) -> bool: ...

    @abstractmethod
    async def _send(self, subject: str, raw: bytes) -> None:
        """Send bytes, or drop them without a connection."""

    @abstractmethod
    async def _exchange(self, subject: str, raw: bytes, seconds: float) -> bytes:
        """Return the first answer to a request. BusTimeout after `seconds`, NobodyThere without a server."""

    @abstractmethod
    def _listening(
        self, inbox: BoundedSubscription, patterns: tuple[str, ...]
    ) -> AbstractAsyncContextManager[None]:
        """Fill an inbox while the context lasts."""

    @abstractmethod
    def _serving(self, server: RequestServer) -> AbstractAsyncContextManager[None]:
        """Pass requests to a server while the context lasts."""

    # Storage

    @abstractmethod
    async def _append(self, subject: str, raw: bytes, identity: str) -> None:
        """Store bytes in the log, once for each identity."""

    @abstractmethod
    async def put_blob(self, content: bytes) -> str: ...

    @abstractmethod
    async def _put_parcel(self, content: bytes) -> str:
        """Store the content of a large telemetry message for a short time, and return its digest."""

    @abstractmethod
    async def _content(self, digest: str) -> bytes:
        """Return the content of a reference: a parcel of a telemetry message, or the blob of a stored one."""
