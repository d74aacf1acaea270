"""The port over one NATS server or cluster."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from nats import errors
from nats.aio.msg import Msg

from bus import BlobLost, BusError, BusTimeout, Claim, NobodyThere, Received, StoreUse
from bus.client import BusClient
from bus.config import BusConfig
from bus.mailbox import BoundedSubscription, RequestServer, listenable, opened
from bus.nats.link import Link, await_cancellably, because
from bus.nats.storage import Storage
from bus.protocol.codec import Undeliverable
from bus.protocol.subjects import Subjects


class NatsBus(BusClient):
    """Client of a NATS server: created by `connect`, ended by `close`. `bus.Bus` documents the methods."""

    def __init__(self, link: Link, subjects: Subjects) -> None:
        self.link = link
        self._storage = Storage(link, subjects)
        super().__init__(link.config, subjects.stored, self._storage.refusals)

    @classmethod
    async def connect(
        cls,
        servers: str | Sequence[str],
        subjects: Subjects,
        config: BusConfig | None = None,
        *,
        name: str = "roost",
    ) -> "NatsBus":
        """Connect, and create missing streams and buckets of the namespace.

        servers: URLs of one cluster. config: credentials, limits and timeouts (its urls and namespace are not
        read here). name: shown in the server's own monitoring. BusError if no server answers in time, it
        rejects us, or it has no JetStream.
        """
        urls = (servers,) if isinstance(servers, str) else tuple(servers)
        try:
            link = Link(replace(config or BusConfig(), urls=urls), name)
        except ValueError as error:
            raise BusError(str(error)) from error
        await link.open()
        bus = cls(link, subjects)
        try:
            await link.until_done(
                "preparing the stream and the buckets",
                link.config.connect_seconds,
                bus._storage.create_stores,
            )
        except BaseException:
            await bus.close()
            raise
        return bus

    @property
    def connected(self) -> bool:
        return self.link.connected

    async def stores(self) -> tuple[StoreUse, ...]:
        return await self._storage.uses()

    async def _send(self, subject: str, raw: bytes) -> None:
        await self.link.send(subject, raw)

    @asynccontextmanager
    async def _listening(self, inbox: BoundedSubscription, patterns: tuple[str, ...]) -> AsyncIterator[None]:
        async def receive(message: Msg) -> None:
            inbox.put(message.subject, message.data)

        async with AsyncExitStack() as stack:
            for pattern in patterns:
                await self.link.listen(stack, pattern, receive)
            await self.link.flush()
            yield

    async def _exchange(self, subject: str, raw: bytes, seconds: float) -> bytes:
        """Return the first answer to a request."""
        denied = self.link.denied
        try:
            async with asyncio.timeout(seconds):
                await self.link.wait_connected()
                answer = await await_cancellably(self.link.client.request(subject, raw, timeout=seconds))
        except errors.NoRespondersError as error:
            raise NobodyThere(f"no server for requests on {subject!r}") from error
        except TimeoutError as error:
            if self.link.denied > denied:
                raise BusError(f"asking on {subject!r}: {self.link.denial()}") from error
            raise BusTimeout(
                f"no answer on {subject!r} within {seconds} s"
                + ("" if self.connected else "; not connected to NATS")
            ) from error
        except errors.Error as error:
            raise BusError(f"asking on {subject!r}: {because(error)}") from error
        return answer.data

    @asynccontextmanager
    async def _serving(self, server: RequestServer) -> AsyncIterator[None]:
        async def receive(message: Msg) -> None:
            async def reply(raw: bytes) -> None:
                if message.reply:
                    await self.link.answer(message.reply, raw)

            server.submit(message.data, reply)

        async with AsyncExitStack() as stack:
            await self.link.listen(stack, server.subject, receive, queue="answering")
            await self.link.flush()
            yield

    async def _append(self, subject: str, raw: bytes, identity: str) -> None:
        await self._storage.append(subject, raw, identity)

    async def last_position(self) -> int:
        return await self._storage.last()

    async def replay(
        self,
        subject: str,
        *,
        since: float | None = None,
        after: int = 0,
        latest: bool = False,
        follow: bool = True,
    ) -> AsyncIterator[Received]:
        listenable(subject)
        start = None if since is None else datetime.now(UTC) - timedelta(seconds=since)
        storage, horizon = self._storage, await self._horizon(subject, patient=follow)
        sections = []
        if latest:
            sections.append(
                storage.section(
                    storage.stream, subject, latest=True, start=start, until=horizon, patient=follow
                )
            )
            start = None
        if follow or not latest:
            behind = horizon if latest else after if after <= horizon else 0
            until = None if follow else horizon
            sections.append(
                storage.section(
                    storage.stream, subject, start=start, after=behind, until=until, patient=follow
                )
            )
        for section in sections:
            async with aclosing(section):
                async for message in section:
                    if received := await self._opened(message, patient=follow):
                        yield received

    async def _horizon(self, subject: str, *, patient: bool) -> int:
        """Return the number of the last message stored at present."""
        while True:
            try:
                return await self._storage.last()
            except BusError as error:
                self._storage.tolerate(error, subject, patient=patient and not self.link.closing)

    async def _opened(self, message: Msg, *, patient: bool) -> Received | None:
        """Decode a stored message; None if it is rejected.

        patient: while the store is unreachable, wait for the message's content without limit.
        """
        while True:
            try:
                received = await opened(message.subject, message.data, self._content)
            except Undeliverable as refusal:
                self.rejected.count(refusal.reason)
                return None
            except BusError as error:
                self._storage.tolerate(error, message.subject, patient=patient and not self.link.closing)
            else:
                return replace(received, position=message.metadata.sequence.stream)

    async def read_claim(self, key: str) -> Claim | None:
        return await self._storage.read_claim(key)

    async def claim(self, key: str, value: bytes, revision: int | None = None) -> int:
        return await self._storage.claim(key, value, revision)

    async def release(self, key: str, revision: int) -> None:
        await self._storage.release(key, revision)

    async def put_blob(self, content: bytes) -> str:
        return await self._storage.put(self._storage.blobs, content)

    async def get_blob(self, digest: str) -> bytes:
        content = await self._storage.read(self._storage.blobs, digest)
        if content is None:
            raise BlobLost(f"the blob store has no {digest!r}")
        return content

    async def drop_blob(self, digest: str) -> None:
        await self._storage.drop(self._storage.blobs, digest)

    async def _put_parcel(self, content: bytes) -> str:
        return await self._storage.put(self._storage.parcels, content)

    async def _content(self, digest: str) -> bytes:
        parcel = await self._storage.read(self._storage.parcels, digest)
        return await self.get_blob(digest) if parcel is None else parcel

    async def close(self) -> None:
        await super().close()
        await self.link.close()
