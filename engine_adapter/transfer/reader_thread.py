"""Reader thread: one per transfer backend and rank. Only this thread uses the backend's resources.

The thread serves all reads round-robin, one request of each per round, so that no read blocks another.
Between rounds it sleeps until the most urgent read is due. An abandoned read posts no further requests, and
the thread tracks it until its last request has settled. No request can be cancelled, and one that is released
early still lands. A failed peer is disconnected once all requests to it have settled. It is reconnected at
the next read.
"""

import asyncio
import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from engine_adapter.config import TransferConfig
from engine_adapter.transfer.address_validation import OpenRead
from engine_adapter.transfer.port import Landed, PeerGone, Pull, Pulled, TransferError
from engine_adapter.transfer.rate_limit import RateLimit, lower_priority
from fleet.requests.handovers import MemoryAddress

_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 1e-3
"""Pause between polls of a request. Starts at the first value and grows by half each time, up to the
second."""
_QUARANTINE_PAUSE = 5e-3
"""Pause between polls of an abandoned request."""
_HELPING_PAUSE = 0.5e-3
"""Pause between progress calls while peers read from us."""
_PROGRESS_BYTES = 8 * 1024 * 1024
"""Bytes between two reports of progress. Few enough to be compared while they are in the processor's caches,
and enough that waking the event loop costs next to nothing."""
_GRACE_SECONDS = 0.05
"""Delay after a failed request. NIXL gives no guarantee that nothing lands after an error, although none was
observed."""
_CLOSE_SECONDS, _LEAVE_SECONDS = 2.0, 0.5
_MAX_PEERS = 256
_UNSETTLED: list[object] = []
"""Reads that had not settled when their thread ended. Python releases unreferenced objects, and these must
not be released."""
_log = logging.getLogger(__name__)


class PeerMemory(Protocol):
    """A peer's memory."""

    def greet(self) -> object | None:
        """Establish the connection with a cheap request. Returns and raises as `post`."""
        ...

    def post(self, address: MemoryAddress, parts: Sequence[Pull]) -> object | None:
        """Start a read. Returns None if it is done, else a request for `check`. TransferError: it failed, and
        settles after a grace period."""
        ...

    def check(self, request: object) -> bool:
        """True once the request is done. Raises as `post`."""
        ...


class ReadBackend(Protocol):
    """Transfer backend as the reader thread uses it. All methods are called on the reader thread only."""

    @property
    def name(self) -> str: ...

    @property
    def idle_seconds(self) -> float | None:
        """Interval between progress calls while no rank reads from us. None: peers need no help."""
        ...

    def open(self) -> None:
        """Open the backend. TransferError when it is impossible here."""
        ...

    def key(self, address: MemoryAddress) -> Hashable:
        """Key that identifies a peer."""
        ...

    def incarnation(self, address: MemoryAddress) -> Hashable:
        """Value that changes when a peer of the same key has been replaced."""
        ...

    def connect(self, address: MemoryAddress) -> PeerMemory:
        """Connect to a peer. TransferError when that is impossible."""
        ...

    def disconnect(self, address: MemoryAddress) -> None:
        """Disconnect from a peer and drop its state. Nothing is in flight from it."""
        ...

    def help(self) -> None:
        """Drive the progress that peers depend on."""
        ...


def requests(pulls: Sequence[Pull], piece_bytes: Callable[[], int]) -> Iterator[tuple[Pull, ...]]:
    """Split ranges, in order, into requests. Large ranges are split, and small ones share a request.
    piece_bytes: called for each request, returns its largest size."""
    parts: list[Pull] = []
    most = room = piece_bytes()
    for source, source_offset, cell, offset, total in pulls:
        at = 0
        while at < total:
            size = min(most, total - at)
            if size > room:
                yield tuple(parts)
                parts, room = [], (most := piece_bytes())
                continue
            parts.append(Pull(source, source_offset + at, cell, offset + at, size))
            room -= size
            at += size
    if parts:
        yield tuple(parts)


@dataclass(slots=True, eq=False)
class _Peer:
    address: MemoryAddress
    connection: PeerMemory
    jobs: int = 0
    """Reads that have not settled."""
    failed: str = ""
    """Reason why this connection accepts no new reads. Empty while it is healthy."""


@dataclass(slots=True, eq=False)
class _Job:
    address: MemoryAddress
    reading: OpenRead
    requests: Iterator[tuple[Pull, ...]]
    bytes: int
    landed: Landed | None = None
    """Told of progress."""
    posted: int = 0
    """Bytes of all requests so far."""
    told: int = 0
    """Bytes in the last report of progress."""
    peer: _Peer | None = None
    request: object | None = None
    pause: float = _SHORTEST_PAUSE
    began: float = 0.0
    failure: TransferError | None = None
    settles: float = 0.0

    def longer_pause(self) -> float:
        if self.reading.abandoned:
            return _QUARANTINE_PAUSE
        pause, self.pause = self.pause, min(1.5 * self.pause, _LONGEST_PAUSE)
        return pause


class ReaderThread:
    """Execute reads by one transfer backend. The public methods are for one event loop."""

    def __init__(self, backend: ReadBackend, config: TransferConfig, limit: RateLimit | None = None) -> None:
        """limit: of all reads of the rank. None: one of its own."""
        self.busy = False
        """Other ranks read from us, or soon will."""
        self._backend = backend
        self._niceness = config.niceness
        self._limit = RateLimit.of(config) if limit is None else limit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None
        # Shared between the threads: orders are passed by `deque.append`, and the event wakes the thread. All
        # state below belongs to the thread.
        self._orders: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"reads experts by {backend.name}", daemon=True
        )
        self._closing = False
        self._leaving = False
        """The thread ends now, even with reads in flight."""
        self._broken = ""
        """Internal error that ended the thread."""
        self._jobs: list[_Job] = []
        self._peers: dict[Hashable, _Peer] = {}

    async def open(self) -> None:
        """Start the thread unless it runs. TransferError when this backend is impossible here or closed."""
        if self._opened is None:
            self._loop = asyncio.get_running_loop()
            self._opened, self._ended = self._loop.create_future(), self._loop.create_future()
            # If Python ends a thread inside foreign code, the whole process aborts.
            atexit.register(self._leave)
            self._thread.start()
        await asyncio.shield(self._opened)
        if self._closing or self._broken:
            raise TransferError(
                f"reading by {self._backend.name} has ended: {self._broken or 'it was closed'}"
            )

    @property
    def opened(self) -> bool:
        """True once the backend is open and can be read from."""
        return self._opened is not None and self._opened.done() and self._opened.exception() is None

    async def read(
        self, address: MemoryAddress, pulls: Sequence[Pull], seconds: float, landed: Landed | None = None
    ) -> Pulled:
        """Execute `Transfer.pull` with validated numbers."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                await self.open()
        except TimeoutError:
            raise TransferError(
                f"{self._backend.name} could not be opened within {seconds:.3g} s; nothing was read"
            ) from None
        reading, pulls = OpenRead(), tuple(pulls)
        parts = requests(pulls, lambda: self._limit.piece_bytes(time.monotonic()))
        job = _Job(address, reading, parts, sum(pull.bytes for pull in pulls), landed)
        self._order(lambda: self._jobs.append(job))
        left = max(0.0, seconds - (time.monotonic() - began))
        return await reading.wait(left, f"reading {len(pulls)} ranges by {self._backend.name}")

    def forget(self, address: MemoryAddress) -> None:
        """Execute `Transfer.forget`."""
        if self._opened is not None:
            self._order(lambda: self._forget(address))

    def help(self, active: bool) -> None:
        """Execute `Transfer.busy`."""
        self.busy = active
        self._wake.set()

    async def close(self) -> None:
        """Execute `Transfer.close`, in at most _CLOSE_SECONDS."""
        self._closing = True
        if self._ended is None:
            return
        self._wake.set()
        await asyncio.wait((self._ended,), timeout=_CLOSE_SECONDS)
        if not self._ended.done():
            _log.warning(
                "%s: abandoned reads have not settled; they keep their memory until the process ends",
                self._backend.name,
            )
            await asyncio.to_thread(self._leave)
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        """End the thread even with reads in flight. Blocks briefly."""
        self._leaving = True
        self._wake.set()
        self._thread.join(_LEAVE_SECONDS)

    def _order(self, what: Callable[[], None]) -> None:
        self._orders.append(what)
        self._wake.set()

    def _notify_loop(self, what: Callable[[], object]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # The loop is closed, so no caller is waiting.
            _log.debug("%s: a read ended after its event loop had closed", self._backend.name)

    # The thread

    def _run(self) -> None:
        assert self._opened is not None
        assert self._ended is not None
        opened, ended = self._opened, self._ended
        lower_priority(self._niceness)
        try:
            self._backend.open()
        except TransferError as error:
            failure = error  # The name of an except clause is deleted after it.
            self._notify_loop(lambda: opened.set_exception(failure))
        else:
            self._notify_loop(lambda: opened.set_result(None))
            self._serve_guarded()
        self._notify_loop(lambda: ended.set_result(None))

    def _serve_guarded(self) -> None:
        try:
            self._serve_reads()
        except Exception as error:  # noqa: BLE001 an internal error: end the reads whose callers can be notified
            _log.exception("the thread that reads by %s has failed", self._backend.name)
            self._broken = f"its thread failed ({type(error).__name__}: {error})"
            self._take_orders()
            for job in self._jobs:
                if job.request is None:
                    self._notify_loop(partial(job.reading.end, TransferError(self._broken)))

    def _serve_reads(self) -> None:
        while True:
            self._wake.clear()
            if self._leaving:
                _UNSETTLED.extend(self._jobs)
                return
            self._take_orders()
            if self._closing:
                for job in self._jobs:
                    job.reading.abandoned = True
            pause = self._round()
            if self._closing and not self._jobs:
                for peer in tuple(self._peers.values()):
                    self._disconnect(peer)
                return
            if pause != 0:
                self._wake.wait(pause)

    def _take_orders(self) -> None:
        while self._orders:
            self._orders.popleft()()

    def _round(self) -> float | None:
        """Advance all reads once. Return the seconds until the next round. None: wait for an order."""
        pauses = []
        for job in tuple(self._jobs):
            pause = self._advance(job, time.monotonic())
            if pause is None:
                self._jobs.remove(job)
            else:
                pauses.append(pause)
        if self._backend.idle_seconds is not None:
            self._backend.help()
            pauses.append(_HELPING_PAUSE if self.busy else self._backend.idle_seconds)
        return min(pauses, default=None)

    def _advance(self, job: _Job, now: float) -> float | None:
        """Advance one request of a read. Return the seconds until the next poll. None: the read has
        settled."""
        if job.failure is None:
            try:
                return self._work(job, now)
            except TransferError as error:
                self._fail(job, error, now)
        assert job.failure is not None
        if now < job.settles:
            return job.settles - now
        self._end(job, job.failure)
        return None

    def _work(self, job: _Job, now: float) -> float | None:
        if job.request is not None:
            assert job.peer is not None
            if not job.peer.connection.check(job.request):
                return job.longer_pause()
            job.request = None
        if job.reading.abandoned:
            self._end(job, TransferError("it was given up"))
            return None
        if job.peer is None:
            return self._begin(job, now)
        if job.peer.failed:
            raise PeerGone(job.peer.failed)
        if (wait := self._limit.wait(now)) > 0:
            return wait
        parts = next(job.requests, None)
        if parts is None:
            self._end(job, Pulled(job.bytes, now - job.began))
            return None
        self._tell_progress(job)
        size = sum(part.bytes for part in parts)
        job.posted += size
        self._limit.begin(size, now)
        job.pause = _SHORTEST_PAUSE
        self._jobs.remove(job)
        # Rotate, so that the next round starts with the others and they share a limited rate.
        self._jobs.append(job)
        job.request = job.peer.connection.post(job.address, parts)
        return 0.0

    def _tell_progress(self, job: _Job) -> None:
        """Report the bytes that have landed. None is in flight: a job has one request at a time."""
        if job.landed is not None and job.posted - job.told >= _PROGRESS_BYTES:
            job.told = job.posted
            self._notify_loop(partial(job.landed, job.posted))

    def _begin(self, job: _Job, now: float) -> float:
        """Find or create the connection."""
        key = self._backend.key(job.address)
        peer = self._peers.get(key)
        if peer is not None and (
            peer.failed or self._backend.incarnation(peer.address) != self._backend.incarnation(job.address)
        ):
            peer.failed = peer.failed or "the rank has been restarted"
            if peer.jobs:
                return _LONGEST_PAUSE  # Reuse a name only once all reads under it have settled.
            self._disconnect(peer)
            peer = None
        job.began = now
        if known := peer is not None:
            job.peer = peer
        else:
            self._make_room()
            job.peer = self._peers[key] = _Peer(job.address, self._backend.connect(job.address))
        job.peer.jobs += 1
        if not known:
            job.request = job.peer.connection.greet()
        return 0.0

    def _make_room(self) -> None:
        """Limit the number of peers: disconnect the oldest one that has nothing in flight."""
        if len(self._peers) >= _MAX_PEERS:
            resting = next((peer for peer in self._peers.values() if not peer.jobs), None)
            if resting is None:
                raise TransferError(
                    f"{_MAX_PEERS} ranks are being read from already: forget those that are gone"
                )
            self._disconnect(resting)

    def _fail(self, job: _Job, error: TransferError, now: float) -> None:
        job.failure = error
        job.settles = now + _GRACE_SECONDS if isinstance(error, PeerGone) else now
        if isinstance(error, PeerGone) and job.peer is not None:
            job.peer.failed = str(error)

    def _end(self, job: _Job, outcome: Pulled | TransferError) -> None:
        if (peer := job.peer) is not None:
            peer.jobs -= 1
            if peer.failed and not peer.jobs:
                self._disconnect(peer)
        self._notify_loop(partial(job.reading.end, outcome))

    def _forget(self, address: MemoryAddress) -> None:
        peer = self._peers.get(self._backend.key(address))
        if peer is None or self._backend.incarnation(peer.address) != self._backend.incarnation(address):
            return
        peer.failed = peer.failed or "the rank was reported as gone"
        if not peer.jobs:
            self._disconnect(peer)

    def _disconnect(self, peer: _Peer) -> None:
        key = self._backend.key(peer.address)
        if self._peers.get(key) is peer:
            del self._peers[key]
            self._backend.disconnect(peer.address)
