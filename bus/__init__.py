"""Message bus: publish, subscribe, request and reply, durable replay, claims and blobs.

Parts depend on each other only through this package and `fleet`. Admission rule: everything needed to carry
messages. The meaning of messages belongs in `fleet.facts` and `fleet.requests`, reactions to them in the
parts. Two implementations share one contract: `bus.memory` (one process) and `bus.nats`. Only the composition
root chooses between them.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from fleet.facts.dynamo_kv import KvMetrics, RoutedKvEvent
from fleet.messages import AnyEvent

Message = AnyEvent | KvMetrics | tuple[RoutedKvEvent, ...]
"""Content of one envelope. A batch of KV events is Dynamo's array; every other message is a single value."""


ALARMING = 0.9
"""Fill level that raises an alarm, as a share of a store that rejects new content when full."""


class BusError(Exception):
    """The bus could not complete an operation. The text gives cause and remedy."""


class BusTimeout(BusError):
    """No answer to a request in time."""


class NobodyThere(BusTimeout):
    """No server receives requests on this subject; no answer will follow later."""


class Declined(BusError):
    """The server refused the request (`RequestRefused`). The text is its reason."""


class ClaimLost(BusError):
    """A key is held by another holder, or has changed since it was read."""


class StoreFull(BusError):
    """The store has no room; nothing was stored."""


class BlobLost(BusError):
    """The blob store does not have this content, or holds it damaged."""


@dataclass(frozen=True, slots=True)
class Received:
    """One received message."""

    subject: str
    publisher_id: int
    sequence: int
    """counts this publisher's messages from 0; a jump is a loss, a new publisher_id a restart"""
    published_at: float
    """sender's wall clock, seconds; for display only"""
    message: Message
    position: int = 0
    """number of a stored message in the log, from 1; 0: it was not read from the log"""


@dataclass(frozen=True, slots=True)
class StoreUse:
    """Fill level of one of the server's stores, in bytes."""

    store: str
    """one of `bus.stores.STORES`"""
    used: int
    capacity: int
    """-1: unlimited"""
    refuses: bool
    """True: a full store rejects new content; False: it evicts the oldest"""

    @property
    def alarming(self) -> bool:
        return self.refuses and 0 < self.capacity <= self.used / ALARMING


@dataclass(frozen=True, slots=True)
class Claim:
    """Value of a claimed key, and the revision that a change must name."""

    value: bytes
    revision: int


class Publisher(Protocol):
    """Publishes on one subject, with its own identity and sequence."""

    publisher_id: int
    sequence: int
    """number of the next message; 0 before the first"""

    async def publish(self, message: Message) -> None:
        """Send without storing. Never blocks on a broken connection: unsendable messages are dropped, which
        leaves a gap in the sequence.
        """
        ...


class Subscription(Protocol):
    """Async iterator of received messages. The queue is bounded: if the reader is too slow, the oldest
    messages are dropped and counted.
    """

    dropped: int

    def __aiter__(self) -> AsyncIterator[Received]: ...


class Bus(Protocol):
    """The port. All methods may raise BusError. Subjects come from `bus.protocol.subjects`."""

    def publisher(self, subject: str) -> Publisher:
        """Return a new publisher with a random u64 identity."""
        ...

    def subscribe(self, *subjects: str, limit: int = 65536) -> AbstractAsyncContextManager[Subscription]:
        """Subscribe to telemetry. The subscription is live when the context is entered.

        `*` matches one token of a subject, `>` the rest. Undecodable and unknown messages are counted
        (`bus.protocol.codec.Rejections`) and never reach the reader.
        """
        ...

    async def request(self, subject: str, message: Message, seconds: float = 2.0) -> Message:
        """Send a request and await one answer.

        BusTimeout without an answer in time. NobodyThere if no server receives the request. Declined carries
        the reason of a `RequestRefused`.
        """
        ...

    def serve(
        self, subject: str, answer: Callable[[Message], Awaitable[Message]]
    ) -> AbstractAsyncContextManager[None]:
        """Answer requests on a subject while the context lasts. An exception of `answer` becomes
        `RequestRefused` and is logged.
        """
        ...

    async def record(self, subject: str, message: Message) -> None:
        """Store a message durably (kinds of `fleet.messages.STORED`). Return once it is stored.

        Subscribers to the subject receive it too. Waits for a broken connection for a bounded time. After a
        BusError the message may or may not be stored.
        """
        ...

    async def last_position(self) -> int:
        """Return the position of the newest message of the log; 0 before the first."""
        ...

    def replay(
        self,
        subject: str,
        *,
        since: float | None = None,
        after: int = 0,
        latest: bool = False,
        follow: bool = True,
    ) -> AsyncIterator[Received]:
        """Yield stored messages in order, then (with `follow`) new ones indefinitely, across reconnects, each
        exactly once.

        since: only messages stored in the last `since` seconds. after: only messages behind this position; a
        position that the log has not reached belongs to a log that was lost, and the whole log is read.
        latest: of the stored messages, only the last of each subject; takes no `after`. With `follow`, a
        broken connection raises nothing, however long it lasts. Without it, BusError after a bounded wait.
        Leave the iteration through `contextlib.aclosing` to release its resources at once.
        """
        ...

    async def read_claim(self, key: str) -> Claim | None: ...

    async def claim(self, key: str, value: bytes, revision: int | None = None) -> int:
        """Compare-and-set: create the key (revision None) or replace exactly that revision.

        Returns the new revision. ClaimLost if the revision differs.
        """
        ...

    async def release(self, key: str, revision: int) -> None:
        """Release a claim. ClaimLost if the revision is no longer ours."""
        ...

    async def put_blob(self, content: bytes) -> str:
        """Store content under its sha256 (hex) and return the digest. Idempotent. StoreFull if there is no
        room.
        """
        ...

    async def get_blob(self, digest: str) -> bytes:
        """Return content, verified against its digest. BlobLost if it is unknown or damaged."""
        ...

    async def drop_blob(self, digest: str) -> None:
        """Delete a content and free its room. Unknown digests are ignored.

        Only for contents that no other part stores: equal contents are one blob.
        """
        ...

    @property
    def connected(self) -> bool: ...

    @property
    def rejected(self) -> Mapping[str, int]:
        """Number of incoming messages rejected since the start, by reason
        (`bus.protocol.codec.RejectionReason`).
        """
        ...

    @property
    def refusals(self) -> Mapping[str, int]:
        """Number of writes rejected for lack of room since the start, by store (`bus.stores.STORES`)."""
        ...

    async def stores(self) -> tuple[StoreUse, ...]:
        """Return the fill level of the server's stores."""
        ...

    async def close(self) -> None:
        """Close the connection and with it every subscription and replay. Idempotent."""
        ...
