"""Common code of both implementations before sending and after receiving: identity and sequence, bounded
queues, answers.

Storage and transport are passed in as functions: `Keep` stores content and returns its digest, `Fetch`
returns it.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec

from bus import BlobLost, BusError, Declined, Message, Received, StoreFull
from bus.large_answers import Exchange, PartedAnswers, fetch_parts, read_part_request
from bus.protocol.codec import (
    BLOB_TOPIC,
    LARGE,
    NO_PART_TOPIC,
    PART_REQUEST_TOPIC,
    PART_TOPIC,
    PARTS_TOPIC,
    PAYLOAD_BYTES,
    Envelope,
    PartRequest,
    RejectionReason,
    Rejections,
    Undeliverable,
    decode,
    encode,
    parts_offered,
    reference,
    referred,
    seal,
    topic_of,
    unseal,
)
from bus.protocol.subjects import check_subject, engine_of, matches
from bus.stores import StoreRefusals
from fleet.messages import STORED
from fleet.requests.refusal import RequestRefused

logger = logging.getLogger(__name__)

Keep = Callable[[bytes], Awaitable[str]]
Fetch = Callable[[str], Awaitable[bytes]]
Send = Callable[[str, bytes], Awaitable[None]]
Answer = Callable[[Message], Awaitable[Message]]

PAUSE_EVERY = 64
"""Messages that a subscription returns before it yields to the event loop: a full queue must not starve other
tasks.
"""
ANSWERING = 64
"""Requests answered concurrently per served subject."""
QUEUED_REQUESTS = 1024
"""Requests waiting per served subject. Further ones get no answer and time out at their sender."""

REASON_LENGTH = 2000
"""Length limit of a refusal's reason, in characters."""
STOP_SECONDS = 5.0
"""Time for answers in progress to finish when serving ends."""


def sendable(subject: str) -> str:
    """Return a subject without wildcards. BusError otherwise."""
    try:
        return check_subject(subject)
    except ValueError as error:
        raise BusError(str(error)) from error


def listenable(subject: str) -> str:
    """Return a subject that may have wildcards. BusError otherwise."""
    try:
        return check_subject(subject, wildcards=True)
    except ValueError as error:
        raise BusError(str(error)) from error


def check_stored(subject: str, message: Message, patterns: tuple[str, ...]) -> None:
    """Raise BusError unless messages of this kind are stored, on this subject."""
    if not isinstance(message, STORED):
        raise BusError(
            f"a {type(message).__name__} is not stored; only {', '.join(kind.__name__ for kind in STORED)}"
            " can be recorded"
        )
    if not any(matches(pattern, subject) for pattern in patterns):
        raise BusError(f"subject {subject!r} is not stored; only {', '.join(patterns)} are")


class SequencedPublisher:
    """An identity with its own sequence, and the envelopes sent under it."""

    def __init__(self, keep: Keep, wall_clock: Callable[[], float] = time.time) -> None:
        self.publisher_id = secrets.randbits(64)
        self.sequence = 0
        self._keep = keep
        self._wall_clock = wall_clock

    def number(self) -> int:
        """Take the next sequence number, even if its message is never sent."""
        self.sequence += 1
        return self.sequence - 1

    async def sealed(self, subject: str, message: Message) -> bytes:
        """Return the next envelope; a large payload is moved to the blob store. BusError if it cannot be
        encoded or stored.
        """
        topic = topic_of(subject)
        return await self.enveloped(topic, encode(topic, message), self.number())

    async def enveloped(self, topic: str, payload: bytes, number: int) -> bytes:
        if len(payload) > LARGE:
            payload, topic = reference(topic, await self._keep(payload), payload), BLOB_TOPIC
        return seal(self.publisher_id, number, self._wall_clock(), topic, payload)

    def plain(self, topic: str, payload: bytes) -> bytes:
        """Return the next envelope around a payload that fits."""
        return seal(self.publisher_id, self.number(), self._wall_clock(), topic, payload)

    def part_request(self, request: PartRequest) -> bytes:
        """Return a request for a part of an answer."""
        return self.plain(PART_REQUEST_TOPIC, msgspec.msgpack.encode(request))


class Encoder(SequencedPublisher):
    """Publisher on one subject. Messages that cannot be sent now are dropped, which leaves a gap in the
    sequence.
    """

    def __init__(
        self,
        subject: str,
        send: Send,
        keep: Keep,
        connected: Callable[[], bool],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(keep, wall_clock)
        self.subject = sendable(subject)
        self._topic = topic_of(subject)
        self._send = send
        self._connected = connected

    async def publish(self, message: Message) -> None:
        """Publish a message. BusError only if it can never be sent; a broken connection drops the message
        without an error.
        """
        payload = encode(self._topic, message)
        number = self.number()
        if not self._connected():
            return
        try:
            raw = await self.enveloped(self._topic, payload, number)
        except BusError as error:
            logger.warning("dropped a message of %d bytes on %s: %s", len(payload), self.subject, error)
            return
        await self._send(self.subject, raw)


async def opened(subject: str, raw: bytes, fetch: Fetch) -> Received:
    """Decode a received message. Undeliverable if it is malformed; BusError if its content cannot be fetched
    at present.
    """
    return await _opened(subject, unseal(raw), fetch)


async def _opened(subject: str, envelope: Envelope, fetch: Fetch) -> Received:
    found = referred(envelope)
    if found is None:
        return _received(subject, envelope, decode(envelope.topic, envelope.payload))
    try:
        content = await fetch(found.digest)
    except BlobLost as error:
        raise Undeliverable(RejectionReason.BLOB, str(error)) from error
    if len(content) != found.size:
        raise Undeliverable(
            RejectionReason.BLOB,
            f"content {found.digest} has {len(content)} bytes, announced were {found.size}",
        )
    return _received(subject, envelope, decode(found.topic, content))


def _received(subject: str, envelope: Envelope, message: Message) -> Received:
    named, sender = getattr(message, "engine", None), engine_of(subject)
    # a server's permissions are by subject
    if named is not None and sender is not None and named != sender:
        raise Undeliverable(
            RejectionReason.SPEAKER, f"{type(message).__name__} of engine {named!r} on {subject}"
        )
    return Received(subject, envelope.publisher_id, envelope.sequence, envelope.published_at / 1000, message)


async def await_answer(
    subject: str, raw: bytes, exchange: Exchange, outbox: SequencedPublisher, fetch: Fetch, seconds: float
) -> Message:
    """Return the answer to a request, in one message or in parts.

    Declined with the reason of a RequestRefused; BusError if the answer cannot be read. seconds: timeout of
    the first message, and again of each part.
    """
    try:
        envelope = unseal(await exchange(raw, seconds))
        offer = parts_offered(envelope)
        if offer is None:
            message = (await _opened(subject, envelope, fetch)).message
        else:
            content = await fetch_parts(offer, envelope.publisher_id, exchange, outbox.part_request, seconds)
            message = _received(subject, envelope, decode(offer.topic, content)).message
    except Undeliverable as refusal:
        raise BusError(
            f"the answer to {subject!r} cannot be read ({refusal}); do both sides run the same version?"
        ) from refusal
    if isinstance(message, RequestRefused):
        raise Declined(message.reason)
    return message


class BoundedSubscription:
    """Received messages that are not read yet. Bounded in number and bytes; the oldest are dropped first.

    Messages are decoded when they are read. One reader at a time. Iteration ends when the subscription is
    closed.
    """

    def __init__(self, limit: int, limit_bytes: int, fetch: Fetch, rejected: Rejections) -> None:
        if limit < 1:
            raise BusError(f"a subscription needs room for at least one message, not {limit}")
        self.dropped = 0
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._fetch = fetch
        self._rejected = rejected
        self._queue: deque[tuple[str, bytes]] = deque()
        self._bytes = 0
        self._held: tuple[str, bytes] | None = None
        """taken from the queue and being decoded; kept across a cancelled read, so that none is lost"""
        self._changed = asyncio.Event()
        self._closed = False
        self._given = 0

    def put(self, subject: str, raw: bytes) -> None:
        """Enqueue without blocking; drop the oldest if there is no room."""
        self._queue.append((subject, raw))
        self._bytes += len(raw)
        while len(self._queue) > self._limit or self._bytes > self._limit_bytes:
            self._bytes -= len(self._queue.popleft()[1])
            self.dropped += 1
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def __aiter__(self) -> AsyncIterator[Received]:
        return self

    async def __anext__(self) -> Received:
        while True:
            subject, raw = await self._next()
            try:
                received = await opened(subject, raw, self._fetch)
            except Undeliverable as refusal:
                self._refuse(subject, refusal.reason, refusal)
            except BusError as error:
                self._refuse(subject, RejectionReason.BLOB, error)
            else:
                self._held = None
                return received

    async def _next(self) -> tuple[str, bytes]:
        self._given += 1
        if self._given % PAUSE_EVERY == 0:
            await asyncio.sleep(0)
        while self._held is None:
            if self._closed:
                raise StopAsyncIteration
            if self._queue:
                self._held = self._queue.popleft()
                self._bytes -= len(self._held[1])
            else:
                self._changed.clear()
                await self._changed.wait()
        return self._held

    def _refuse(self, subject: str, reason: RejectionReason, why: Exception) -> None:
        self._held = None
        self._rejected.count(reason)
        logger.debug("refused a message on %s: %s", subject, why)


class RequestServer:
    """Answers the requests on one subject, several at a time, while `run` runs."""

    def __init__(
        self,
        subject: str,
        answer: Answer,
        outbox: SequencedPublisher,
        answers: PartedAnswers,
        fetch: Fetch,
        rejected: Rejections,
        refusals: StoreRefusals,
    ) -> None:
        self.subject = sendable(subject)
        self._topic = topic_of(subject)
        self._answer = answer
        self._outbox = outbox
        self._answers = answers
        self._fetch = fetch
        self._rejected = rejected
        self._refusals = refusals
        self._requests: asyncio.Queue[tuple[bytes, Callable[[bytes], Awaitable[None]]]] = asyncio.Queue(
            QUEUED_REQUESTS
        )

    def submit(self, raw: bytes, reply: Callable[[bytes], Awaitable[None]]) -> None:
        """Enqueue without blocking. A request beyond the queue's limit times out at its sender."""
        try:
            self._requests.put_nowait((raw, reply))
        except asyncio.QueueFull:
            logger.warning("%s: %d requests are waiting, another was dropped", self.subject, QUEUED_REQUESTS)

    async def run(self) -> None:
        """Answer requests until cancelled."""
        places = asyncio.Semaphore(ANSWERING)
        async with asyncio.TaskGroup() as answering:
            while True:
                raw, reply = await self._requests.get()
                await places.acquire()
                task = answering.create_task(
                    self._respond(raw, reply), name=f"answers a request on {self.subject}"
                )
                task.add_done_callback(lambda _: places.release())

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Answer requests while the context lasts."""
        task = asyncio.create_task(self.run(), name=f"answers requests on {self.subject}")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=STOP_SECONDS)

    async def _respond(self, raw: bytes, reply: Callable[[bytes], Awaitable[None]]) -> None:
        try:
            envelope = unseal(raw)
            if envelope.topic == PART_REQUEST_TOPIC:
                sealed = self._part(read_part_request(envelope))
            else:
                sealed = self._enclosed(await self._considered(envelope))
        except Undeliverable as refusal:
            self._rejected.count(refusal.reason)
            sealed = self._refusal(f"the request cannot be read: {refusal}")
        except StoreFull as error:
            self._refusals.count("answers", error)
            sealed = self._refusal(str(error))
        except BusError as error:
            logger.warning("%s: an answer cannot be sent: %s", self.subject, error)
            sealed = self._refusal(f"the answer cannot be sent: {error}")
        await reply(sealed)

    def _part(self, request: PartRequest) -> bytes:
        part = self._answers.part(request) if request.publisher_id == self._outbox.publisher_id else None
        return (
            self._outbox.plain(NO_PART_TOPIC, b"") if part is None else self._outbox.plain(PART_TOPIC, part)
        )

    def _enclosed(self, answer: Message) -> bytes:
        """Return the answer, or for a large one the offer of its parts. BusError if it cannot be encoded or
        stored.
        """
        offer = self._answers.offered(answer)
        if offer is None:
            payload = encode(self._topic, answer)
            if len(payload) <= LARGE:
                return self._outbox.plain(self._topic, payload)
            if len(payload) > PAYLOAD_BYTES:
                raise BusError(f"an answer of {len(payload)} bytes: at most {PAYLOAD_BYTES} can be sent")
            offer = self._answers.keep(answer, self._topic, payload)
        return self._outbox.plain(PARTS_TOPIC, msgspec.msgpack.encode(offer))

    def _refusal(self, reason: str) -> bytes:
        return self._outbox.plain(
            self._topic, encode(self._topic, RequestRefused(reason=reason[:REASON_LENGTH]))
        )

    async def _considered(self, envelope: Envelope) -> Message:
        """Return the answer to a request. Undeliverable if the request cannot be read."""
        try:
            request = await _opened(self.subject, envelope, self._fetch)
        except BusError as error:
            self._rejected.count(RejectionReason.BLOB)
            return RequestRefused(reason=f"the request's content cannot be fetched: {error}")
        try:
            return await self._answer(request.message)
        except Exception as error:  # the requester must get an answer, whatever the error
            logger.warning(
                "%s: refused a request: %s",
                self.subject,
                error,
                exc_info=not isinstance(error, BusError | ValueError),
            )
            return RequestRefused(reason=str(error)[:REASON_LENGTH] or type(error).__name__)
