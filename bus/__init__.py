"""The voice: publish, subscribe, request and reply, durable replay, claims and blobs. Parts meet here and in `fleet`, nowhere else.

Admission rule: what belongs to carrying messages. What messages mean is in `fleet.events`; what to do about them, in the parts.
Two implementations with one contract: `bus.memory` (one process) and `bus.nats`. Which one is used is decided at the
composition root alone.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from fleet.events import AnyEvent, KvMetrics, RoutedKvEvent

Message = AnyEvent | KvMetrics | tuple[RoutedKvEvent, ...]
"""What one envelope carries. A batch of KV events is Dynamo's array; everything else is one value."""


ALARMING = 0.9
"""Share of a store that refuses what finds no room from which on it is an alarm."""


class BusError(Exception):
    """The bus could not do what was asked; the text says why and what to do."""


class BusTimeout(BusError):
    """Nobody answered a request in time."""


class NobodyThere(BusTimeout):
    """Nobody was there to hear a request; nothing comes of it later either."""


class Declined(BusError):
    """Whoever was asked refuses (`RequestRefused`); the text is its reason."""


class ClaimLost(BusError):
    """A key is held by somebody else, or changed since it was read."""


class StoreFull(BusError):
    """There is no room for what was to be kept; nothing was stored."""


class BlobLost(BusError):
    """The blob store does not hold this content, or what it holds is damaged."""


@dataclass(frozen=True, slots=True)
class Received:
    """One message as it arrived."""

    subject: str
    publisher_id: int
    sequence: int
    """counts this publisher's messages from 0; a jump is a loss, a new publisher_id a restart"""
    published_at: float
    """sender's wall clock, seconds; for display only"""
    message: Message


@dataclass(frozen=True, slots=True)
class StoreUse:
    """How full one of the server's stores is. Bytes."""

    store: str
    """one of `bus.stores.STORES`"""
    used: int
    most: int
    refuses: bool
    """what finds no room is refused; False: the oldest makes room"""

    @property
    def alarming(self) -> bool:
        return self.refuses and 0 < self.most <= self.used / ALARMING


@dataclass(frozen=True, slots=True)
class Claim:
    """The value of a claimed key and the revision to name when changing it."""

    value: bytes
    revision: int


class Publisher(Protocol):
    """Speaks on one subject with an identity and a sequence of its own."""

    publisher_id: int
    sequence: int
    """number of the next message; 0 before the first"""

    async def publish(self, message: Message) -> None:
        """Send; not stored. Never blocks on a broken connection: what cannot be sent is dropped, and the sequence shows it."""
        ...


class Subscription(Protocol):
    """An async iterator of what arrives. The queue is bounded: when its reader is too slow the oldest messages are dropped and counted."""

    dropped: int

    def __aiter__(self) -> AsyncIterator[Received]: ...


class Bus(Protocol):
    """The port. All methods may raise BusError; subjects come from `bus.protocol.subjects`."""

    def publisher(self, subject: str) -> Publisher:
        """A new publisher with a random u64 identity."""
        ...

    def subscribe(self, *subjects: str, limit: int = 65536) -> AbstractAsyncContextManager[Subscription]:
        """Telemetry from now on; `*` matches one token of a subject, `>` the rest. Live before the context is entered.
        Undecodable and unknown messages are counted (`bus.protocol.codec.Rejected`) and never reach the reader."""
        ...

    async def request(self, subject: str, message: Message, seconds: float = 2.0) -> Message:
        """Ask and await one answer. BusTimeout when nobody answers, NobodyThere when nobody heard it; Declined carries the reason of a `RequestRefused`."""
        ...

    def serve(self, subject: str, answer: Callable[[Message], Awaitable[Message]]) -> AbstractAsyncContextManager[None]:
        """Answer requests on a subject while the context lasts; an exception of `answer` becomes `RequestRefused` and is logged."""
        ...

    async def record(self, subject: str, message: Message) -> None:
        """Store durably (kinds of `fleet.events.STORED`); returns once it is stored. Whoever subscribes to the subject hears it too.
        Waits for a broken connection, for a bounded time; after a BusError it may or may not be stored."""
        ...

    def replay(self, subject: str, *, since: float | None = None, latest: bool = False, follow: bool = True) -> AsyncIterator[Received]:
        """Stored messages in order, then (with `follow`) new ones for ever, across reconnects, none lost, none twice.

        since: only those stored in the last so many seconds. latest: of the past, only the last one of each subject.
        With `follow` nothing is raised for a broken connection, however long; without, BusError after a bounded wait.
        Leave the iteration through `contextlib.aclosing` to give its resources back at once.
        """
        ...

    async def read_claim(self, key: str) -> Claim | None: ...

    async def claim(self, key: str, value: bytes, revision: int | None = None) -> int:
        """Compare-and-set: create the key (revision None) or replace exactly that revision. Returns the new revision; ClaimLost otherwise."""
        ...

    async def release(self, key: str, revision: int) -> None:
        """Give a claim up; ClaimLost when the revision is no longer ours."""
        ...

    async def put_blob(self, content: bytes) -> str:
        """Store content under its sha256 (hex), which is returned. Idempotent. StoreFull when there is no room for it."""
        ...

    async def get_blob(self, digest: str) -> bytes:
        """The content, verified against its digest; BlobLost when it is unknown or damaged."""
        ...

    async def drop_blob(self, digest: str) -> None:
        """Forget a content, and give its room back; nothing happens when it is unknown. For contents that nobody else puts: equal ones are one blob."""
        ...

    @property
    def connected(self) -> bool: ...

    @property
    def rejected(self) -> Mapping[str, int]:
        """How many arriving messages were refused since the start, by reason (`bus.protocol.codec.Reason`)."""
        ...

    @property
    def full(self) -> Mapping[str, int]:
        """How often something found no room since the start, by store (`bus.stores.STORES`)."""
        ...

    async def stores(self) -> tuple[StoreUse, ...]:
        """How full the server's stores are."""
        ...

    async def close(self) -> None:
        """End the connection, and with it every subscription and replay. May be repeated."""
        ...
