"""The bus within one process: the same contract as `bus.nats`, for tests, simulation and single-process runs.

Messages pass as bytes through the same codec, queues and limits. Only transport and storage are dictionaries.
Several clients share one broker, as several processes share one NATS server.
"""

import asyncio
import hashlib
import time
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from bus import (
    BlobLost,
    BusError,
    BusTimeout,
    Claim,
    ClaimLost,
    NobodyThere,
    Received,
    StoreFull,
    StoreUse,
)
from bus.client import BusClient
from bus.config import PARCELS_SECONDS, BusConfig
from bus.mailbox import BoundedSubscription, RequestServer, listenable, opened
from bus.protocol.codec import Undeliverable
from bus.protocol.subjects import Subjects, check_key, matches
from bus.stores import StoreRefusals


@dataclass(frozen=True, slots=True)
class Stored:
    """One message of the durable log."""

    number: int
    """position in the log, from 1"""
    stored_at: float
    subject: str
    raw: bytes


class MemoryBroker:
    """In-process NATS server: delivers, stores, arbitrates claims. Share one among the MemoryBus clients of a
    process.

    Set `reachable` to False to simulate a broken connection of all clients, and back to True. `loses` selects
    answers that are lost in transit. `deliver` publishes raw bytes on a subject, like a foreign client.
    """

    def __init__(
        self,
        subjects: Subjects | None = None,
        config: BusConfig | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.subjects = subjects or Subjects()
        self.config = config or BusConfig()
        self.clock = clock
        self.loses: Callable[[bytes], bool] = lambda _: False
        self.blobs: dict[str, bytes] = {}
        self.parcels: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._log: list[Stored] = []
        self._last = 0
        self._inboxes: dict[BoundedSubscription, tuple[str, ...]] = {}
        self._servers: dict[str, list[RequestServer]] = {}
        self._followers: set[asyncio.Event] = set()
        self._claims: dict[str, Claim] = {}
        self._revision = 0
        self._reachable = True
        self._waiting: set[asyncio.Event] = set()

    # Connections

    @property
    def reachable(self) -> bool:
        return self._reachable

    @reachable.setter
    def reachable(self, reachable: bool) -> None:
        self._reachable = reachable
        for event in self._waiting:
            event.set()

    @contextmanager
    def waiting(self, event: asyncio.Event) -> Iterator[None]:
        """Set the event whenever `reachable` is assigned, while the context lasts."""
        self._waiting.add(event)
        try:
            yield
        finally:
            self._waiting.discard(event)

    # Delivery and storage

    def deliver(self, subject: str, raw: bytes) -> None:
        """Deliver bytes to all subscribers, and to the log if the subject is stored."""
        if any(matches(pattern, subject) for pattern in self.subjects.stored):
            self._append(subject, raw)
        for inbox, patterns in self._inboxes.items():
            if any(matches(pattern, subject) for pattern in patterns):
                inbox.put(subject, raw)
        for server in self._servers.get(subject, [])[:1]:
            server.submit(raw, _discard)

    def _append(self, subject: str, raw: bytes) -> None:
        self._last += 1
        self._log.append(Stored(self._last, self.clock(), subject, raw))
        self._prune()
        for event in self._followers:
            event.set()

    def _prune(self) -> None:
        """Apply the stream's limits (age, bytes, messages per subject), oldest first."""
        oldest = self.clock() - self.config.stream_seconds
        counts: Counter[str] = Counter()
        size = 0
        kept: list[Stored] = []
        for entry in reversed(self._log):
            counts[entry.subject] += 1
            size += len(entry.raw)
            if entry.stored_at < oldest or size > self.config.stream_bytes:
                break
            if counts[entry.subject] <= self.config.stream_messages_per_subject:
                kept.append(entry)
        self._log = kept[::-1]

    @property
    def last(self) -> int:
        """Number of the newest stored message; 0 before the first."""
        return self._last

    def after(self, number: int, pattern: str) -> list[Stored]:
        """Return stored messages after a number, in order."""
        at = bisect_right(self._log, number, key=lambda entry: entry.number)
        return [entry for entry in self._log[at:] if matches(pattern, entry.subject)]

    @contextmanager
    def listening(self, inbox: BoundedSubscription, patterns: tuple[str, ...]) -> Iterator[None]:
        self._inboxes[inbox] = patterns
        try:
            yield
        finally:
            del self._inboxes[inbox]

    @contextmanager
    def serving(self, server: RequestServer) -> Iterator[None]:
        servers = self._servers.setdefault(server.subject, [])
        servers.append(server)
        try:
            yield
        finally:
            servers.remove(server)
            if not servers:
                del self._servers[server.subject]

    @contextmanager
    def following(self, event: asyncio.Event) -> Iterator[None]:
        self._followers.add(event)
        try:
            yield
        finally:
            self._followers.discard(event)

    def next_server(self, subject: str) -> RequestServer | None:
        """Return the next server of a subject, in turn."""
        servers = self._servers.get(subject)
        if not servers:
            return None
        servers.append(servers.pop(0))
        return servers[-1]

    def stores(self) -> tuple[StoreUse, ...]:
        config, claims = self.config, sum(len(claim.value) for claim in self._claims.values())
        return (
            StoreUse("log", sum(len(entry.raw) for entry in self._log), config.stream_bytes, refuses=False),
            StoreUse("claims", claims, config.claims_bytes, refuses=True),
            StoreUse("blobs", sum(map(len, self.blobs.values())), config.blobs_bytes, refuses=True),
            StoreUse(
                "parcels",
                sum(len(held) for _, held in self.parcels.values()),
                config.parcels_bytes,
                refuses=False,
            ),
        )

    # Claims

    def claimed(self, key: str) -> Claim | None:
        return self._claims.get(key)

    def set_claim(self, key: str, value: bytes | None, revision: int | None) -> int:
        """Compare-and-set; value None deletes."""
        present = self._claims.get(key)
        if (present.revision if present else None) != revision:
            raise ClaimLost(
                f"{key!r} is {f'held at revision {present.revision}' if present else 'not held'}, not"
                f" {'free' if revision is None else revision}"
            )
        self._revision += 1
        if value is None:
            del self._claims[key]
        else:
            self._claims[key] = Claim(value, self._revision)
        return self._revision


async def _discard(_: bytes) -> None:
    """Discard the answer to a request without a reply subject."""


class MemoryBus(BusClient):
    """Client of a MemoryBroker. Without one, it creates its own."""

    def __init__(self, broker: MemoryBroker | None = None) -> None:
        self.broker = broker or MemoryBroker()
        super().__init__(self.broker.config, self.broker.subjects.stored, StoreRefusals())
        self._waiting: set[asyncio.Event] = set()
        """events to set when the bus is closed"""
        self._closed = False

    @property
    def connected(self) -> bool:
        return not self._closed and self.broker.reachable

    async def stores(self) -> tuple[StoreUse, ...]:
        await self._wait_connected(self._config.request_seconds)
        return self.broker.stores()

    async def _send(self, subject: str, raw: bytes) -> None:
        if self.connected:
            self.broker.deliver(subject, raw)

    @asynccontextmanager
    async def _listening(self, inbox: BoundedSubscription, patterns: tuple[str, ...]) -> AsyncIterator[None]:
        await self._wait_connected(self._config.request_seconds)
        with self.broker.listening(inbox, patterns):
            yield

    async def _exchange(self, subject: str, raw: bytes, seconds: float) -> bytes:
        """Return the first answer to a request."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def reply(sealed: bytes) -> None:
            if not answer.done() and not self.broker.loses(sealed):
                answer.set_result(sealed)

        try:
            async with asyncio.timeout(seconds):
                await self._wait_connected(seconds)
                server = self.broker.next_server(subject)
                if server is None:
                    raise NobodyThere(f"no server for requests on {subject!r}")
                server.submit(raw, reply)
                return await answer
        except TimeoutError as error:
            raise BusTimeout(f"no answer on {subject!r} within {seconds} s") from error

    @asynccontextmanager
    async def _serving(self, server: RequestServer) -> AsyncIterator[None]:
        await self._wait_connected(self._config.request_seconds)
        with self.broker.serving(server):
            yield

    async def _append(self, subject: str, raw: bytes, identity: str) -> None:
        await self._wait_connected(self._config.record_seconds)
        self.broker.deliver(subject, raw)

    async def last_position(self) -> int:
        await self._wait_connected(self._config.record_seconds)
        return self.broker.last

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
        await self._wait_connected(None if follow else self._config.record_seconds)
        cursor = self.broker.last
        past = self.broker.after(after if after <= cursor else 0, subject)
        if latest:
            newest = {entry.subject: entry for entry in past}
            past = sorted(newest.values(), key=lambda entry: entry.number)
        if since is not None:
            cutoff = self.broker.clock() - since
            past = [entry for entry in past if entry.stored_at >= cutoff]
        for entry in past:
            if received := await self._opened(entry):
                yield received
        if not follow:
            return
        new = asyncio.Event()
        self._waiting.add(new)
        try:
            with self.broker.following(new):
                while not self._closed:
                    new.clear()
                    for entry in self.broker.after(cursor, subject):
                        cursor = entry.number
                        if received := await self._opened(entry):
                            yield received
                    await new.wait()
        finally:
            self._waiting.discard(new)

    async def _opened(self, entry: Stored) -> Received | None:
        try:
            received = await opened(entry.subject, entry.raw, self._content)
        except Undeliverable as refusal:
            self.rejected.count(refusal.reason)
            return None
        return replace(received, position=entry.number)

    async def read_claim(self, key: str) -> Claim | None:
        await self._claiming(key)
        return self.broker.claimed(key)

    async def claim(self, key: str, value: bytes, revision: int | None = None) -> int:
        await self._claiming(key)
        return self.broker.set_claim(key, value, revision)

    async def release(self, key: str, revision: int) -> None:
        await self._claiming(key)
        self.broker.set_claim(key, None, revision)

    async def _claiming(self, key: str) -> None:
        try:
            check_key(key)
        except ValueError as error:
            raise BusError(str(error)) from error
        await self._wait_connected(self._config.request_seconds)

    async def put_blob(self, content: bytes) -> str:
        await self._wait_connected(self._config.record_seconds)
        digest = hashlib.sha256(content).hexdigest()
        blobs = self.broker.blobs
        if digest not in blobs and sum(map(len, blobs.values())) + len(content) > self._config.blobs_bytes:
            full = StoreFull(
                f"the blob store is full ({self._config.blobs_bytes} bytes); raise bus.blobs_bytes"
            )
            self.refusals.count("blobs", full)
            raise full
        blobs[digest] = content
        return digest

    async def get_blob(self, digest: str) -> bytes:
        await self._wait_connected(self._config.record_seconds)
        if digest not in self.broker.blobs:
            raise BlobLost(f"the blob store has no {digest!r}")
        return _verified(digest, self.broker.blobs[digest])

    async def drop_blob(self, digest: str) -> None:
        await self._wait_connected(self._config.record_seconds)
        self.broker.blobs.pop(digest, None)

    async def _put_parcel(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        parcels = self.broker.parcels
        parcels[digest] = (self.broker.clock(), content)
        parcels.move_to_end(digest)
        oldest = self.broker.clock() - PARCELS_SECONDS
        while parcels and (
            next(iter(parcels.values()))[0] < oldest
            or sum(len(held) for _, held in parcels.values()) > self._config.parcels_bytes
        ):
            parcels.popitem(last=False)
        return digest

    async def _content(self, digest: str) -> bytes:
        if digest in self.broker.parcels:
            return _verified(digest, self.broker.parcels[digest][1])
        return await self.get_blob(digest)

    async def _wait_connected(self, seconds: float | None) -> None:
        """Wait until the broker is reachable (None: without limit). BusError if that takes longer or the bus
        is closed.
        """
        changed = asyncio.Event()
        self._waiting.add(changed)
        try:
            async with asyncio.timeout(seconds):
                with self.broker.waiting(changed):
                    while not self._closed and not self.broker.reachable:
                        changed.clear()
                        await changed.wait()
        except TimeoutError as error:
            raise BusError(f"the broker was not reachable for {seconds} s") from error
        finally:
            self._waiting.discard(changed)
        if self._closed:
            raise BusError("this bus is closed")

    async def close(self) -> None:
        self._closed = True
        await super().close()
        for event in self._waiting:
            event.set()


def _verified(digest: str, content: bytes) -> bytes:
    if hashlib.sha256(content).hexdigest() != digest:
        raise BlobLost(f"blob {digest} is damaged; put it again")
    return content
