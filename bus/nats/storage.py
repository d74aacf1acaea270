"""Durable data in JetStream: the log, claims, blobs and parcels of one namespace.

Stream `<ns>-stored` (messages of `record`), key-value bucket `<ns>-claims`, object buckets `<ns>-blobs`
(kept) and `<ns>-parcels` (contents of large telemetry messages, which expire).

nats-py's own ordered consumer is not used for reading. It loses "last per subject" when it restarts, gives up
silently if the server is away at that moment, and loses messages that its queue rejects. `Storage.section`
restarts by sequence.
"""

import asyncio
import base64
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from nats import errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js import errors as js_errors
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

from bus import BlobLost, BusError, Claim, ClaimLost, StoreFull, StoreUse
from bus.config import PARCELS_SECONDS
from bus.nats.link import GONE, Link, await_cancellably, because, is_full
from bus.protocol.names import StoreNames
from bus.protocol.subjects import Subjects, check_key
from bus.stores import StoreRefusals

logger = logging.getLogger(__name__)
T = TypeVar("T")

HEARTBEAT_SECONDS = 1.0
"""Interval of the server's heartbeats to an idle reader. Three missed heartbeats end a run."""
RUN_QUEUE = 65536
"""Messages that wait for the reader of a run. Flow control stays far below."""
EVERYTHING = 1 << 62
"""A sequence that is never reached: read everything."""

WRONG_REVISION = (10071, 10164)
EXISTS_OTHERWISE = 10058
TOO_FEW_SERVERS = (10005, 10074)
"""JetStream's error codes."""


class ReplayRun:
    """Messages of one short-lived consumer, in order. Iteration ends when continuity is lost: reconnect,
    silence, a gap.
    """

    def __init__(self, queue: "asyncio.Queue[Msg | None]", link: Link, pending: int) -> None:
        self.pending = pending
        """messages stored when the run began"""
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
        """Answer flow control and check heartbeats. The queue is first in, first out: everything before this
        has been read.
        """
        if headers[api.Header.STATUS] != api.StatusCode.CONTROL_MESSAGE:
            raise StopAsyncIteration
        for address in (message.reply, headers.get(api.Header.CONSUMER_STALLED)):
            if address:
                await self._link.send(address, b"")
        if int(headers.get(api.Header.LAST_CONSUMER, self._expected - 1)) != self._expected - 1:
            raise StopAsyncIteration


class Storage:
    """Durable data of one namespace, over a link that may break."""

    def __init__(self, link: Link, subjects: Subjects) -> None:
        self.stream, self.claims, self.blobs, self.parcels = StoreNames.of(subjects)
        self.refusals = StoreRefusals()
        self._subjects = subjects.stored
        self._link = link
        self._config = link.config
        self._warned: set[str] = set()

    @property
    def _js(self) -> JetStreamContext:
        return self._link.client.jetstream(timeout=self._config.request_seconds)

    async def create_stores(self) -> None:
        """Create missing stores. Existing ones keep their limits, which belong to the operator.

        The stream gets the subjects that it lacks, so that older and newer versions can run side by side.
        """
        config, js = self._config, self._js
        limits = {
            "max_bytes": config.stream_bytes,
            "max_age": config.stream_seconds,
            "max_msgs_per_subject": config.stream_messages_per_subject,
        }
        stored = api.StreamConfig(
            name=self.stream,
            subjects=list(self._subjects),
            storage=api.StorageType.FILE,
            num_replicas=config.replicas,
            **limits,  # type: ignore[arg-type]
        )
        if (present := await self._present(self.stream)) is not None:
            await self._extend(js, present)
        else:
            await self._create(self.stream, lambda: js.add_stream(stored))
        if await self._present(f"KV_{self.claims}") is None:
            claims = api.KeyValueConfig(
                bucket=self.claims,
                max_bytes=config.claims_bytes,
                storage=api.StorageType.FILE,
                direct=False,
                replicas=config.replicas,
            )
            await self._create(self.claims, lambda: js.create_key_value(claims))
        for name, size, seconds in (
            (self.blobs, config.blobs_bytes, None),
            (self.parcels, config.parcels_bytes, PARCELS_SECONDS),
        ):
            if await self._present(f"OBJ_{name}") is None:
                bucket = api.ObjectStoreConfig(
                    max_bytes=size, ttl=seconds, storage=api.StorageType.FILE, replicas=config.replicas
                )
                await self._create(name, partial(js.create_object_store, name, bucket))

    async def _present(self, stream: str) -> api.StreamConfig | None:
        """Return the configuration of a stream; None if it does not exist.

        If more replicas are configured than it has, a warning gives the command that adds them.
        """
        try:
            present = (await self._js.stream_info(stream)).config
        except js_errors.NotFoundError:
            return None
        if (present.num_replicas or 1) < self._config.replicas and stream not in self._warned:
            self._warned.add(stream)
            logger.warning(
                "%s was made with %d replicas and bus.replicas is %d; raise it with: nats stream edit %s"
                " --replicas %d",
                *(stream, present.num_replicas or 1, self._config.replicas, stream, self._config.replicas),
            )
        return present

    async def _create(self, name: str, making: Callable[[], Awaitable[object]]) -> None:
        """Create a store. BusError if the cluster is too small for the replicas.

        A store that another process created meanwhile, even with other settings, is used unchanged.
        """
        try:
            await making()
        except js_errors.APIError as error:
            if error.err_code in TOO_FEW_SERVERS and self._config.replicas > 1:
                raise BusError(
                    f"{name} cannot be kept {self._config.replicas} times ({error.description}): this NATS"
                    " cluster has too few JetStream servers; start more of them, or lower bus.replicas"
                ) from error
            if error.err_code != EXISTS_OTHERWISE:
                raise
            logger.info("%s exists with other settings; using it unchanged", name)

    async def _extend(self, js: JetStreamContext, present: api.StreamConfig) -> None:
        known = present.subjects or []
        lacking = [subject for subject in self._subjects if subject not in known]
        if lacking:
            await js.update_stream(present.evolve(subjects=known + lacking))

    async def done(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run `Link.until_done` for an exchange that needs the stores, and recreate them on a server that
        lost them.
        """

        async def with_stores() -> T:
            try:
                return await attempt()
            except GONE as error:
                if not is_full(error):
                    await self.create_stores()
                raise

        return await self._link.until_done(what, self._config.record_seconds, with_stores)

    async def uses(self) -> tuple[StoreUse, ...]:
        """Return the fill level of each store. Missing stores are left out."""
        streams = {
            "log": self.stream,
            "claims": f"KV_{self.claims}",
            "blobs": f"OBJ_{self.blobs}",
            "parcels": f"OBJ_{self.parcels}",
        }

        async def look() -> tuple[StoreUse, ...]:
            found = [(store, await self._js.stream_info(stream)) for store, stream in streams.items()]
            return tuple(
                StoreUse(
                    store,
                    info.state.bytes,
                    info.config.max_bytes or -1,
                    refuses=info.config.discard == api.DiscardPolicy.NEW,
                )
                for store, info in found
            )

        return await self.done("looking at the stores", look)

    # The log

    async def append(self, subject: str, raw: bytes, identity: str) -> None:
        """Store bytes in the log. The server ignores repetitions of one identity, so a retry after a lost
        answer is safe.
        """
        try:
            await self.done(
                f"recording on {subject}",
                lambda: self._js.publish(
                    subject, raw, stream=self.stream, headers={api.Header.MSG_ID: identity}
                ),
            )
        except StoreFull as error:
            self.refusals.count("log", error)
            raise

    async def last(self) -> int:
        """Return the sequence of the newest message of the log; 0 before the first."""

        async def ask() -> int:
            return int((await self._js.stream_info(self.stream)).state.last_seq)

        return await self.done("reading what is stored", ask)

    async def _created_at(self, stream: str) -> datetime | None:
        """Return the creation time of a stream; a different time means a different stream of the same
        name."""

        async def ask() -> datetime | None:
            return (await self._js.stream_info(stream)).created

        return await self.done(f"looking at {stream}", ask)

    async def section(
        self,
        stream: str,
        subject: str,
        *,
        latest: bool = False,
        start: datetime | None = None,
        after: int = 0,
        until: int | None = None,
        patient: bool = False,
    ) -> AsyncGenerator[Msg, None]:
        """Yield stored messages of a subject in order, after sequence `after`; with `latest` the last one of
        each subject.

        until: last sequence to read; iteration ends there, or at the end of the stream. None: never ends.
        patient: wait without limit while the store is unreachable; otherwise BusError. After any interruption
        it resumes behind the last message.
        """
        cursor = after
        created_at: datetime | None = None
        while not self._link.closing:
            try:
                if until is None:
                    created_at, before = await self._created_at(stream), created_at
                    if before not in (None, created_at):
                        logger.error(
                            "the NATS server lost what was stored in %s; following it from its new beginning",
                            stream,
                        )
                        cursor = 0
                async with self._run(stream, subject, _policy(latest, start, cursor), patient=patient) as run:
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
            except BusError as error:
                self.tolerate(error, subject, patient=patient)

    def tolerate(self, error: BusError, subject: str, *, patient: bool) -> None:
        """Log an error for a patient reader, raise it for others."""
        if not patient:
            raise error
        if not self._link.closing:
            logger.warning("following %s: %s; retrying", subject, error)

    @asynccontextmanager
    async def _run(
        self, stream: str, subject: str, policy: dict[str, Any], *, patient: bool
    ) -> AsyncIterator[ReplayRun]:
        """Open a consumer. patient: wait for a broken connection without limit."""
        queue: asyncio.Queue[Msg | None] = asyncio.Queue()

        async def receive(message: Msg) -> None:
            if queue.qsize() < RUN_QUEUE:  # a message dropped here leaves a gap, which ends the run
                queue.put_nowait(message)

        if patient:
            await self._link.wait_connected()
        inbox = self._link.client.new_inbox()
        config = api.ConsumerConfig(
            deliver_subject=inbox,
            filter_subject=subject,
            ack_policy=api.AckPolicy.NONE,
            max_deliver=1,
            flow_control=True,
            idle_heartbeat=HEARTBEAT_SECONDS,
            inactive_threshold=5 * HEARTBEAT_SECONDS,  # the server then removes the consumer
            mem_storage=True,
            num_replicas=1,
            **policy,
        )
        async with AsyncExitStack() as stack:
            await self._link.listen(stack, inbox, receive)
            self._link.runs.add(queue)
            stack.callback(self._link.runs.discard, queue)
            info = await self.done(f"reading {subject}", lambda: self._js.add_consumer(stream, config))
            yield ReplayRun(queue, self._link, info.num_pending or 0)

    # Claims

    async def _bucket(self, key: str) -> KeyValue:
        try:
            check_key(key)
        except ValueError as error:
            raise BusError(str(error)) from error
        return await self.done("opening the claims", lambda: self._js.key_value(self.claims))

    async def read_claim(self, key: str) -> Claim | None:
        bucket = await self._bucket(key)

        async def read() -> Claim | None:
            try:
                entry = await bucket.get(key)
            except js_errors.KeyNotFoundError:
                return None
            return Claim(entry.value or b"", entry.revision or 0)

        return await self.done(f"reading claim {key!r}", read)

    async def claim(self, key: str, value: bytes, revision: int | None) -> int:
        bucket = await self._bucket(key)
        if revision is None:
            return await self._changed(key, None, bucket.create(key, value))
        return await self._changed(key, revision, bucket.update(key, value, last=_existing(key, revision)))

    async def release(self, key: str, revision: int) -> None:
        bucket = await self._bucket(key)
        await self._changed(key, revision, bucket.delete(key, last=_existing(key, revision)))

    async def _changed(self, key: str, revision: int | None, change: Awaitable[T]) -> T:
        """Change a claim in a single attempt: a retry after a lost answer would conflict with the first
        attempt.
        """
        try:
            return await await_cancellably(change)
        except js_errors.APIError as error:
            if isinstance(error, js_errors.KeyWrongLastSequenceError) or error.err_code in WRONG_REVISION:
                raise _lost(key, revision) from error
            if is_full(error):
                self.refusals.count("claims", error)
            raise BusError(f"claiming {key!r}: {because(error)}") from error
        except (TimeoutError, OSError, errors.Error) as error:
            raise BusError(
                f"claiming {key!r}: no answer, so it may or may not be ours; read it to find out"
                f" ({because(error)})"
            ) from error

    # Blobs and parcels

    async def put(self, bucket: str, content: bytes) -> str:
        """Store content under its sha256 (hex), unless it exists."""
        digest = hashlib.sha256(content).hexdigest()

        async def put() -> None:
            store = await self._js.object_store(bucket)
            try:
                await store.get_info(digest)
            except js_errors.ObjectNotFoundError:
                await store.put(digest, content)

        try:
            await self.done(f"storing {len(content)} bytes in {bucket}", put)
        except StoreFull as error:
            self.refusals.count("blobs" if bucket == self.blobs else "parcels", error)
            raise
        return digest

    async def drop(self, bucket: str, digest: str) -> None:
        """Delete content and its metadata (nats-py's own deletion leaves a marker for every name that ever
        existed).
        """
        name = base64.urlsafe_b64encode(digest.encode()).decode()

        async def drop() -> None:
            js = self._js
            try:
                info = await (await js.object_store(bucket)).get_info(digest)
            except js_errors.ObjectNotFoundError:
                return
            # in this order, so that an interruption leaves no unnamed chunks
            for what in (f"C.{info.nuid}", f"M.{name}"):
                await js.purge_stream(f"OBJ_{bucket}", subject=f"$O.{bucket}.{what}")

        await self.done(f"dropping {digest} from {bucket}", drop)

    async def read(self, bucket: str, digest: str) -> bytes | None:
        """Return content, verified; None if the bucket does not have it. BlobLost if it is damaged."""
        return await self.done(f"fetching {digest} from {bucket}", lambda: self._read(bucket, digest))

    async def _read(self, bucket: str, digest: str) -> bytes | None:
        """Read the chunks of an object as a stream (nats-py's own reader waits without limit for a missing
        chunk).
        """
        store: ObjectStore = await self._js.object_store(bucket)
        try:
            info = await store.get_info(digest)
        except js_errors.ObjectNotFoundError:
            return None
        chunks = [
            message.data
            async for message in self.section(f"OBJ_{bucket}", f"$O.{bucket}.C.{info.nuid}", until=EVERYTHING)
        ]
        content = b"".join(chunks)
        if hashlib.sha256(content).hexdigest() != digest:
            await store.delete(digest)  # so that storing it again replaces it
            raise BlobLost(f"blob {digest} is damaged ({len(content)} bytes of {info.size}); put it again")
        return content


def _policy(latest: bool, start: datetime | None, cursor: int) -> dict[str, Any]:
    """Return the starting point of a consumer: after the last message read. "latest" starts over, in stream
    order.
    """
    if latest:
        return {"deliver_policy": api.DeliverPolicy.LAST_PER_SUBJECT}
    if cursor:
        return {"deliver_policy": api.DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": cursor + 1}
    if start is not None:
        return {"deliver_policy": api.DeliverPolicy.BY_START_TIME, "opt_start_time": start}
    return {"deliver_policy": api.DeliverPolicy.ALL}


def _existing(key: str, revision: int) -> int:
    """Return a revision that can have existed (0 would mean "create" to the server)."""
    if revision < 1:
        raise _lost(key, revision)
    return revision


def _lost(key: str, revision: int | None) -> ClaimLost:
    return ClaimLost(
        f"{key!r} is not {'free' if revision is None else f'at revision {revision}'}; read the claim to see"
        " who holds it"
    )
