"""The bus over NATS; the only file that speaks nats-py, whose errors end here.

Core NATS carries telemetry and requests. JetStream keeps three things per namespace: the stream `<ns>-stored` (what `record`
stores), the key-value bucket `<ns>-claims`, and the object buckets `<ns>-blobs` (kept) and `<ns>-parcels` (contents of large
telemetry messages, which expire). Checked against nats-py 2.16 and nats-server 2.15.

nats-py's own ordered consumer is not used for `replay`: it forgets "last per subject" when it has to start over, gives up
silently when the server is away at that moment, and loses what its queue refuses. `_section` starts over by stream sequence.
"""

import asyncio
import hashlib
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from nats import errors
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js import JetStreamContext, api
from nats.js import errors as js_errors
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

from bus import BlobLost, BusError, BusTimeout, Claim, ClaimLost, Message, Received
from bus.codec import LARGE, Refused, Rejected
from bus.config import BusConfig
from bus.mailbox import Answer, Desk, Inbox, Outbox, Speaker, answered, audible, check_stored, opened, sendable
from bus.subjects import Subjects, check_key

logger = logging.getLogger(__name__)
T = TypeVar("T")

SMALLEST_MAX_PAYLOAD = LARGE + 64 * 1024
"""Bytes a server must accept in one message: the largest payload that travels in an envelope, and the envelope."""
RETRY_SECONDS = 0.1
HEARTBEAT_SECONDS = 1.0
"""The server speaks so often on a replay that has nothing to say; three times the silence breaks it."""
RUN_QUEUE = 65536
"""Messages of a replay that wait for its reader; flow control keeps far below."""
CLOSE_SECONDS = 2.0
EVERYTHING = 1 << 62
"""A stream sequence that is never reached."""

_WRONG_REVISION = (10071, 10164)
_EXISTS_OTHERWISE = 10058
_TRANSIENT = (
    TimeoutError,
    OSError,
    errors.ConnectionClosedError,
    errors.NoRespondersError,
    errors.OutboundBufferLimitError,
    errors.StaleConnectionError,
    js_errors.NoStreamResponseError,
    js_errors.ServiceUnavailableError,
    js_errors.NotFoundError,
)
_GONE = (errors.NoRespondersError, js_errors.NoStreamResponseError, js_errors.ServiceUnavailableError, js_errors.NotFoundError)
"""What a server says that has no JetStream, or lost its store."""


def _because(error: BaseException | None) -> str:
    """An error of nats-py and what to do about it."""
    if error is None:
        return "no connection; is the NATS server running?"
    remedy = "start the NATS server with JetStream (-js)" if isinstance(error, _GONE) else "is the NATS server well?"
    return f"{str(error) or type(error).__name__}; {remedy}"


@dataclass(eq=False)
class _Feed:
    """One subscription, so that it can be made again on a new connection."""

    subject: str
    hear: Callable[[Msg], Awaitable[None]]
    queue: str = ""
    subscription: NatsSubscription | None = None

    async def attach(self, client: Client) -> None:
        self.subscription = await client.subscribe(self.subject, queue=self.queue, cb=self.hear)


class _Link:
    """The connection: made once, remade for ever, its subscriptions with it."""

    def __init__(self, url: str, config: BusConfig, name: str) -> None:
        self.url = url
        self.config = config
        self.client = Client()
        self.closing = False
        self.runs: set[asyncio.Queue[Msg | None]] = set()
        """queues of running replays; None tells them that the connection was remade"""
        self._name = name
        self._feeds: set[_Feed] = set()
        self._up = asyncio.Event()
        self._trouble: Exception | None = None
        self._reopener: asyncio.Task[None] | None = None

    def _options(self, client: Client) -> dict[str, Any]:
        async def closed() -> None:
            if client is self.client and not self.closing and self._reopener is None:
                logger.error("NATS closed the connection for good (%s); opening a new one", client.last_error)
                self._reopener = asyncio.create_task(self._reopen(), name="opens a new connection to NATS")

        return {
            "name": self._name,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": self.config.reconnect_first_seconds,
            "reconnect_to_server_handler": self._next_server,
            "connect_timeout": self.config.connect_seconds,
            "ping_interval": self.config.ping_seconds,
            "pending_size": 2 * self.config.unsent_bytes,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnect,
            "reconnected_cb": self._on_reconnect,
            "closed_cb": closed,
        }

    def _next_server(self, servers: list[Server], _: dict[str, Any]) -> tuple[Server, float]:
        """The server tried least often, after a pause that doubles with its failures (with jitter: parts come back one by one)."""
        server = min(servers, key=lambda candidate: candidate.reconnects)
        pause = min(self.config.reconnect_most_seconds, self.config.reconnect_first_seconds * 2.0 ** min(server.reconnects, 30))
        return server, pause * random.uniform(0.5, 1.0)

    async def _on_error(self, error: Exception) -> None:
        self._trouble = error
        logger.log(logging.WARNING if isinstance(error, errors.SlowConsumerError) else logging.DEBUG, "NATS: %s", error or type(error).__name__)

    async def _on_disconnect(self) -> None:
        if not self.closing:
            logger.warning("lost the connection to NATS at %s; trying again until it stands", self.url)

    async def _on_reconnect(self) -> None:
        logger.info("connected to NATS at %s again", self.url)
        self._stands()

    def _stands(self) -> None:
        self._up.set()
        for queue in self.runs:
            queue.put_nowait(None)

    async def open(self) -> None:
        """The first connection. BusError when it does not stand in time."""
        try:
            async with asyncio.timeout(self.config.connect_seconds):
                await self.client.connect(self.url, **self._options(self.client))
        except TimeoutError as error:
            await self.close()
            waited = f"within {self.config.connect_seconds} s ({self._trouble or 'no answer'})"
            raise BusError(f"no NATS server at {self.url} {waited}; start one or correct bus.url") from error
        except errors.Error as error:
            raise BusError(f"{self.url!r} is no address of a NATS server ({error}); correct bus.url, e.g. nats://127.0.0.1:4222") from error
        if self.client.max_payload < SMALLEST_MAX_PAYLOAD:
            most = self.client.max_payload
            await self.close()
            raise BusError(f"the NATS server at {self.url} takes messages of {most} bytes; set its max_payload to {SMALLEST_MAX_PAYLOAD} or more")
        self._up.set()

    async def _reopen(self) -> None:
        """nats-py gives up after some errors the server sends (revoked rights, say). We do not."""
        client = Client()
        await client.connect(self.url, **self._options(client) | {"reconnect_time_wait": self.config.reconnect_most_seconds})
        self.client = client
        for feed in self._feeds:
            await feed.attach(client)
        self._reopener = None
        logger.info("a new connection to NATS at %s stands", self.url)
        self._stands()

    @property
    def connected(self) -> bool:
        return bool(self.client.is_connected)

    async def standing(self) -> None:
        """Wait for the connection; BusError when it is closed on purpose."""
        while not self.connected:
            if self.closing:
                raise BusError("this bus is closed")
            self._up.clear()
            await self._up.wait()

    async def until_done(self, what: str, seconds: float, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an exchange that may be repeated until it succeeds. BusError when that takes longer, or cannot succeed."""
        trouble: BaseException | None = None
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await self.standing()
                    try:
                        return await attempt()
                    except _TRANSIENT as error:
                        trouble = error
                    await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError as error:
            raise BusError(f"{what}: not done within {seconds} s: {_because(trouble)}") from error
        except errors.Error as error:
            raise BusError(f"{what}: {_because(error)}") from error

    async def send(self, subject: str, raw: bytes) -> None:
        """Hand bytes to the connection; dropped when it is broken or far behind."""
        client = self.client
        if not client.is_connected or client.pending_data_size + len(raw) > self.config.unsent_bytes:
            return
        try:
            await client.publish(subject, raw)
        except errors.Error as error:
            logger.debug("dropped a message on %s: %s", subject, error)

    @asynccontextmanager
    async def feed(self, subject: str, hear: Callable[[Msg], Awaitable[None]], queue: str = "") -> AsyncIterator[None]:
        """A subscription that survives reconnects."""
        feed = _Feed(subject, hear, queue)
        await self.standing()
        await feed.attach(self.client)
        self._feeds.add(feed)
        try:
            yield
        finally:
            self._feeds.discard(feed)
            if feed.subscription is not None:
                with suppress(errors.Error):  # a closed connection has ended it already
                    await feed.subscription.unsubscribe()

    async def settled(self) -> None:
        """Return when the server has heard everything sent so far, subscriptions included."""

        async def round_trips() -> None:
            # Two: nats-py writes a ping at once, ahead of commands that still wait for its flusher; the second is behind them.
            for _ in range(2):
                await self.client.flush(timeout=max(1, round(self.config.request_seconds)))

        await self.until_done("subscribing", self.config.record_seconds, round_trips)

    async def close(self) -> None:
        self.closing = True
        self._stands()
        if self._reopener is not None:
            self._reopener.cancel()
            await asyncio.wait([self._reopener])
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.client.close()
        except TimeoutError:
            logger.warning("NATS at %s did not take the last messages in %s s; they are dropped", self.url, CLOSE_SECONDS)


class _Run:
    """Messages of one short-lived consumer, in order. Iteration ends when continuity is broken: reconnect, silence, a gap."""

    def __init__(self, queue: "asyncio.Queue[Msg | None]", link: _Link, pending: int) -> None:
        self.pending = pending
        """messages there were when it began"""
        self._queue = queue
        self._link = link
        self._expected = 1

    def __aiter__(self) -> AsyncIterator[Msg]:
        return self

    async def __anext__(self) -> Msg:
        while True:
            try:
                async with asyncio.timeout(3 * HEARTBEAT_SECONDS):
                    message = await self._queue.get()
            except TimeoutError:
                message = None
            if message is None:
                raise StopAsyncIteration
            headers = message.headers or {}
            if api.Header.STATUS in headers and not message.data:
                await self._controlled(message, headers)
            elif message.metadata.sequence.consumer != self._expected:
                raise StopAsyncIteration
            else:
                self._expected += 1
                return message

    async def _controlled(self, message: Msg, headers: dict[str, str]) -> None:
        """Answer flow control (everything before it has been read: the queue is first in, first out) and check heartbeats."""
        if headers[api.Header.STATUS] != api.StatusCode.CONTROL_MESSAGE:
            raise StopAsyncIteration
        for address in (message.reply, headers.get(api.Header.CONSUMER_STALLED)):
            if address:
                await self._link.send(address, b"")
        if int(headers.get(api.Header.LAST_CONSUMER, self._expected - 1)) != self._expected - 1:
            raise StopAsyncIteration


class NatsBus:
    """The port over one NATS server or cluster. Made by `connect`, ended by `close`."""

    def __init__(self, link: _Link, subjects: Subjects) -> None:
        self._link = link
        self._subjects = subjects
        self._config = link.config
        self._rejected = Rejected()
        self._inboxes: set[Inbox] = set()
        self._voice = Outbox(self._keep_parcel)
        self._recorder = Outbox(self.put_blob)
        self._stream = f"{subjects.namespace}-stored"
        self._claims_name, self._blobs_name, self._parcels_name = (f"{subjects.namespace}-{what}" for what in ("claims", "blobs", "parcels"))

    @classmethod
    async def connect(cls, url: str, subjects: Subjects, config: BusConfig | None = None, *, name: str = "roost") -> "NatsBus":
        """Connect, and create the stream and the buckets of the namespace where they are missing.

        config: limits and waits (its url and namespace are not read here). name: shown in the server's own monitoring.
        BusError when there is no server in time, or it has no JetStream.
        """
        link = _Link(url, config or BusConfig(), name)
        await link.open()
        bus = cls(link, subjects)
        try:
            await link.until_done("preparing the stream and the buckets", link.config.record_seconds, bus._furnish)
        except BaseException:
            await bus.close()
            raise
        return bus

    # Storage

    @property
    def _js(self) -> JetStreamContext:
        return self._link.client.jetstream(timeout=self._config.request_seconds)

    async def _furnish(self) -> None:
        """Create what is missing. What exists with other limits is used as it is: limits are the operator's."""
        config, js = self._config, self._js
        stored = api.StreamConfig(
            name=self._stream,
            subjects=list(self._subjects.stored),
            storage=api.StorageType.FILE,
            max_age=config.stream_seconds,
            max_bytes=config.stream_bytes,
            max_msgs_per_subject=config.stream_messages_per_subject,
        )
        await self._made(self._stream, lambda: js.add_stream(stored))
        claims = api.KeyValueConfig(bucket=self._claims_name, max_bytes=config.claims_bytes, storage=api.StorageType.FILE, direct=False)
        await self._made(self._claims_name, lambda: js.create_key_value(claims))
        for name, size, seconds in ((self._blobs_name, config.blobs_bytes, None), (self._parcels_name, config.parcels_bytes, config.parcels_seconds)):
            bucket = api.ObjectStoreConfig(max_bytes=size, ttl=seconds, storage=api.StorageType.FILE)
            await self._made(name, lambda name=name, bucket=bucket: js.create_object_store(name, bucket))  # type: ignore[misc]

    async def _made(self, name: str, make: Callable[[], Awaitable[object]]) -> None:
        try:
            await make()
        except js_errors.BadRequestError as error:
            if error.err_code != _EXISTS_OTHERWISE:
                raise
            logger.info("%s exists with other limits; it is used as it is", name)

    async def _durably(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """until_done, for what needs the store: a server that came back without it gets a new one."""

        async def furnished() -> T:
            try:
                return await attempt()
            except _GONE:
                await self._furnish()
                raise

        return await self._link.until_done(what, self._config.record_seconds, furnished)

    # Telemetry and requests

    @property
    def connected(self) -> bool:
        return self._link.connected

    @property
    def rejected(self) -> Rejected:
        return self._rejected

    def publisher(self, subject: str) -> Speaker:
        return Speaker(subject, self._link.send, self._keep_parcel, lambda: self.connected)

    @asynccontextmanager
    async def subscribe(self, *subjects: str, limit: int = 65536) -> AsyncIterator[Inbox]:
        patterns = [audible(subject) for subject in subjects]
        inbox = Inbox(limit, self._config.queue_bytes, self._content, self._rejected)

        async def hear(message: Msg) -> None:
            inbox.put(message.subject, message.data)

        self._inboxes.add(inbox)
        try:
            async with AsyncExitStack() as stack:
                for pattern in patterns:
                    await self._listening(stack, pattern, hear)
                await self._link.settled()
                yield inbox
        finally:
            self._inboxes.discard(inbox)
            inbox.close()

    async def _listening(self, stack: AsyncExitStack, subject: str, hear: Callable[[Msg], Awaitable[None]], queue: str = "") -> None:
        """Enter a feed, within a bounded wait for the connection."""

        async def enter() -> None:
            await stack.enter_async_context(self._link.feed(subject, hear, queue))

        await self._link.until_done(f"listening on {subject}", self._config.request_seconds, enter)

    async def request(self, subject: str, message: Message, seconds: float = 2.0) -> Message:
        raw = await self._voice.sealed(sendable(subject), message)
        try:
            async with asyncio.timeout(seconds):
                await self._link.standing()
                answer = await self._link.client.request(subject, raw, timeout=seconds)
        except errors.NoRespondersError as error:
            raise BusTimeout(f"nobody serves {subject!r}") from error
        except TimeoutError as error:
            raise BusTimeout(f"no answer on {subject!r} within {seconds} s" + ("" if self.connected else "; not connected to NATS")) from error
        except errors.Error as error:
            raise BusError(f"asking on {subject!r}: {_because(error)}") from error
        return await answered(subject, answer.data, self._content)

    @asynccontextmanager
    async def serve(self, subject: str, answer: Answer) -> AsyncIterator[None]:
        desk = Desk(subject, answer, self._voice, self._content, self._rejected)

        async def hear(message: Msg) -> None:
            async def reply(raw: bytes) -> None:
                if message.reply:
                    await self._link.send(message.reply, raw)

            desk.submit(message.data, reply)

        async with AsyncExitStack() as stack:
            await stack.enter_async_context(desk.open())
            await self._listening(stack, subject, hear, queue="answering")
            await self._link.settled()
            yield

    # The durable log

    async def record(self, subject: str, message: Message) -> None:
        check_stored(sendable(subject), message, self._subjects.stored)
        number = self._recorder.sequence
        raw = await self._recorder.sealed(subject, message)
        identity = f"{self._recorder.publisher_id:x}-{number}"
        # The server forgets repetitions of one message id: asking again after a lost acknowledgement stores nothing twice.
        await self._durably(
            f"recording a {type(message).__name__} on {subject}",
            lambda: self._js.publish(subject, raw, stream=self._stream, headers={api.Header.MSG_ID: identity}),
        )

    async def replay(self, subject: str, *, since: float | None = None, latest: bool = False, follow: bool = True) -> AsyncIterator[Received]:
        audible(subject)
        start = None if since is None else datetime.now(UTC) - timedelta(seconds=since)
        horizon = await self._durably("reading what is stored", self._last_stored)
        sections = []
        if latest:
            sections.append(self._section(self._stream, subject, latest=True, start=start, until=horizon))
            start = None
        if follow or not latest:
            sections.append(self._section(self._stream, subject, start=start, after=horizon if latest else 0, until=None if follow else horizon))
        for section in sections:
            async with aclosing(section):
                async for message in section:
                    if received := await self._opened(message, patient=follow):
                        yield received

    async def _last_stored(self) -> int:
        return int((await self._js.stream_info(self._stream)).state.last_seq)

    async def _opened(self, message: Msg, *, patient: bool) -> Received | None:
        while True:
            try:
                return await opened(message.subject, message.data, self._content)
            except Refused as refusal:
                self._rejected.count(refusal.reason)
                return None
            except BusError:
                if self._link.closing or not patient:
                    raise

    async def _section(
        self, stream: str, subject: str, *, latest: bool = False, start: datetime | None = None, after: int = 0, until: int | None = None
    ) -> AsyncGenerator[Msg, None]:
        """Stored messages in order: those behind stream sequence `after`, up to `until` and no further than there are any (None: for
        ever). Whatever happens to connection and server, it goes on behind the last one given."""
        cursor = after
        while not self._link.closing:
            try:
                async with self._run(stream, subject, _policy(latest, start, cursor), patient=until is None) as run:
                    if until is not None and run.pending == 0:
                        return
                    async for message in run:
                        place = message.metadata
                        if until is not None and place.sequence.stream > until:
                            return
                        if place.sequence.stream > cursor:
                            cursor = place.sequence.stream
                            if start is None or place.timestamp >= start:
                                yield message
                        if until is not None and place.num_pending == 0:
                            return
                if until is None and cursor > await self._durably("reading what is stored", self._last_stored):
                    logger.error("the NATS server lost what was stored in %s; following it from its new beginning", stream)
                    cursor = 0
            except BusError as error:
                if until is not None:
                    raise
                if not self._link.closing:
                    logger.warning("following %s: %s; trying again", subject, error)

    @asynccontextmanager
    async def _run(self, stream: str, subject: str, policy: dict[str, Any], *, patient: bool) -> AsyncIterator[_Run]:
        queue: asyncio.Queue[Msg | None] = asyncio.Queue()

        async def hear(message: Msg) -> None:
            if queue.qsize() < RUN_QUEUE:  # what is refused here leaves a gap, which ends the run
                queue.put_nowait(message)

        inbox = self._link.client.new_inbox()
        config = api.ConsumerConfig(
            deliver_subject=inbox,
            filter_subject=subject,
            ack_policy=api.AckPolicy.NONE,
            max_deliver=1,
            flow_control=True,
            idle_heartbeat=HEARTBEAT_SECONDS,
            inactive_threshold=5 * HEARTBEAT_SECONDS,  # the server clears up behind us
            mem_storage=True,
            num_replicas=1,
            **policy,
        )
        if patient:
            await self._link.standing()
        async with AsyncExitStack() as stack:
            await self._listening(stack, inbox, hear)
            self._link.runs.add(queue)
            stack.callback(self._link.runs.discard, queue)
            info = await self._durably(f"reading {subject}", lambda: self._js.add_consumer(stream, config))
            yield _Run(queue, self._link, info.num_pending or 0)

    # Claims

    async def _store_of_claims(self, key: str) -> KeyValue:
        try:
            check_key(key)
        except ValueError as error:
            raise BusError(str(error)) from error
        return await self._durably("opening the claims", lambda: self._js.key_value(self._claims_name))

    async def read_claim(self, key: str) -> Claim | None:
        store = await self._store_of_claims(key)

        async def read() -> Claim | None:
            try:
                entry = await store.get(key)
            except js_errors.KeyNotFoundError:
                return None
            return Claim(entry.value or b"", entry.revision or 0)

        return await self._durably(f"reading claim {key!r}", read)

    async def claim(self, key: str, value: bytes, revision: int | None = None) -> int:
        store = await self._store_of_claims(key)
        change = store.create(key, value) if revision is None else store.update(key, value, last=_positive(revision))
        return await self._changed(key, revision, change)

    async def release(self, key: str, revision: int) -> None:
        store = await self._store_of_claims(key)
        await self._changed(key, revision, store.delete(key, last=_positive(revision)))

    async def _changed(self, key: str, revision: int | None, change: Awaitable[T]) -> T:
        """One attempt only: repeating a compare-and-set whose answer was lost would fight with itself."""
        try:
            return await change
        except js_errors.KeyWrongLastSequenceError as error:
            raise ClaimLost(f"{key!r} is not {'free' if revision is None else f'at revision {revision}'} any more") from error
        except js_errors.APIError as error:
            if error.err_code in _WRONG_REVISION:
                raise ClaimLost(f"{key!r} is not at revision {revision} any more") from error
            raise BusError(f"claiming {key!r}: {_because(error)}") from error
        except (TimeoutError, OSError, errors.Error) as error:
            raise BusError(f"claiming {key!r}: no answer, so it may or may not be ours; read it to find out ({_because(error)})") from error

    # Blobs

    async def put_blob(self, content: bytes) -> str:
        return await self._kept(self._blobs_name, content)

    async def _keep_parcel(self, content: bytes) -> str:
        return await self._kept(self._parcels_name, content)

    async def _kept(self, bucket: str, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()

        async def keep() -> None:
            store = await self._js.object_store(bucket)
            try:
                await store.get_info(digest)
            except js_errors.ObjectNotFoundError:
                await store.put(digest, content)

        await self._durably(f"storing {len(content)} bytes in {bucket} (is it full?)", keep)
        return digest

    async def get_blob(self, digest: str) -> bytes:
        content = await self._durably(f"fetching blob {digest}", lambda: self._held(self._blobs_name, digest))
        if content is None:
            raise BlobLost(f"the blob store has no {digest!r}")
        return content

    async def _content(self, digest: str) -> bytes:
        """What a reference names: a parcel of a passing message, or the blob of a stored one."""
        parcel = await self._durably(f"fetching content {digest}", lambda: self._held(self._parcels_name, digest))
        return await self.get_blob(digest) if parcel is None else parcel

    async def _held(self, bucket: str, digest: str) -> bytes | None:
        """An object, verified; None when the bucket does not have it. Its chunks are read as any stream is (nats-py's own reading
        waits for ever when one is missing)."""
        store: ObjectStore = await self._js.object_store(bucket)
        try:
            info = await store.get_info(digest)
        except js_errors.ObjectNotFoundError:
            return None
        chunks = [message.data async for message in self._section(f"OBJ_{bucket}", f"$O.{bucket}.C.{info.nuid}", until=EVERYTHING)]
        content = b"".join(chunks)
        if hashlib.sha256(content).hexdigest() != digest:
            await store.delete(digest)  # so that putting it again stores it anew
            raise BlobLost(f"blob {digest} is damaged ({len(content)} bytes of {info.size}); put it again")
        return content

    async def close(self) -> None:
        for inbox in self._inboxes:
            inbox.close()
        await self._link.close()


def _policy(latest: bool, start: datetime | None, cursor: int) -> dict[str, Any]:
    """Where a consumer begins. Behind what was given already; "latest" always anew, since its order is that of the stream."""
    if latest:
        return {"deliver_policy": api.DeliverPolicy.LAST_PER_SUBJECT}
    if cursor:
        return {"deliver_policy": api.DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": cursor + 1}
    if start is not None:
        return {"deliver_policy": api.DeliverPolicy.BY_START_TIME, "opt_start_time": start}
    return {"deliver_policy": api.DeliverPolicy.ALL}


def _positive(revision: int) -> int:
    if revision < 1:
        raise ClaimLost(f"revision {revision} never existed; revisions start at 1")
    return revision
