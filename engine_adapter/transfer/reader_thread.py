"""The thread that reads: one per way and rank, and the only one that touches what the way is made of.

It goes round all reads in turn, one request of each, so that none waits for another's end; between two rounds it sleeps as long as the one that is most in a
hurry allows. A read that nobody waits for any more posts nothing new, and is looked after until its last request has settled: nothing can be called back, and
what is released early still lands. A peer that failed is disconnected once every request to it has settled, and connected anew when it is next asked for.
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
from typing import NamedTuple, Protocol

from engine_adapter.config import TransferConfig
from engine_adapter.transfer.port import PeerGone, Pull, Pulled, TransferError
from engine_adapter.transfer.rate_limit import RateLimit, lower_priority
from engine_adapter.transfer.read_validation import OpenRead
from fleet.events import MemoryAddress

_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 1e-3
"""between two looks at a request: begins with the first, and grows by half each time"""
_QUARANTINE_PAUSE = 5e-3
"""the same of a request that nobody waits for"""
_HELPING_PAUSE = 0.5e-3
"""between two looks at what peers want of us, while they read"""
_GRACE_SECONDS = 0.05
"""after a request failed: that nothing at all lands behind an error is what is seen, and promised nowhere"""
_CLOSE_SECONDS, _LEAVE_SECONDS = 2.0, 0.5
_MOST_PEERS = 256
_UNSETTLED: list[object] = []
"""reads that had not settled when their thread was ended: what nobody refers to any more is released, and must not be"""
_log = logging.getLogger(__name__)


class Part(NamedTuple):
    """Bytes of one cell."""

    source: int
    """cell over there"""
    cell: int
    """cell here"""
    offset: int
    size: int


class PeerMemory(Protocol):
    """A peer's memory."""

    def greet(self) -> object | None:
        """Make the first request cheap for those that follow. As `post`."""
        ...

    def post(self, address: MemoryAddress, parts: Sequence[Part]) -> object | None:
        """Begin to read. None: it is done; else what to `check`. TransferError: it failed, and has settled but for a grace."""
        ...

    def check(self, request: object) -> bool:
        """Whether a request is done. TransferError as `post`."""
        ...


class Way(Protocol):
    """What a worker is made to work by. All methods are called on its thread and on no other."""

    @property
    def name(self) -> str: ...

    @property
    def idle_seconds(self) -> float | None:
        """Between two looks at what peers want of us, when nobody reads; None: they need no help."""
        ...

    def open(self) -> None:
        """TransferError when this way is impossible here."""
        ...

    def key(self, address: MemoryAddress) -> Hashable:
        """What peers are told apart by."""
        ...

    def incarnation(self, address: MemoryAddress) -> Hashable:
        """What changes when a peer of the same key is another one than before."""
        ...

    def connect(self, address: MemoryAddress) -> PeerMemory:
        """TransferError when that is impossible."""
        ...

    def disconnect(self, address: MemoryAddress) -> None:
        """Nothing is under way from there. Keeps nothing of it."""
        ...

    def help(self) -> None:
        """Do what peers wait for."""
        ...


def requests(pulls: Sequence[Pull], cell_bytes: int, piece_bytes: int) -> Iterator[tuple[Part, ...]]:
    """Whole cells in order, in requests of at most piece_bytes each: large cells in several, small ones together."""
    parts: list[Part] = []
    room = piece_bytes
    for source, cell in pulls:
        for offset in range(0, cell_bytes, piece_bytes):
            size = min(piece_bytes, cell_bytes - offset)
            if size > room:
                yield tuple(parts)
                parts, room = [], piece_bytes
            parts.append(Part(source, cell, offset, size))
            room -= size
    if parts:
        yield tuple(parts)


@dataclass(slots=True, eq=False)
class _Peer:
    address: MemoryAddress
    connection: PeerMemory
    jobs: int = 0
    """reads that have not settled"""
    failed: str = ""
    """why nothing new may be read over this connection"""


@dataclass(slots=True, eq=False)
class _Job:
    address: MemoryAddress
    reading: OpenRead
    requests: Iterator[tuple[Part, ...]]
    bytes: int
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
    """Carries out reads by one way. The methods without underscore are for one event loop."""

    def __init__(self, way: Way, config: TransferConfig, cell_bytes: int) -> None:
        self.busy = False
        """others read from us, or soon will"""
        self._way = way
        self._niceness = config.niceness
        self._cell_bytes = cell_bytes
        self._pace = RateLimit(config.bytes_per_second, config.piece_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None
        # Between the threads: orders go in by `deque.append` and are woken by the event; all else below is the thread's own.
        self._orders: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reads experts by {way.name}", daemon=True)
        self._closing = False
        self._leaving = False
        """the thread ends now, whatever is under way"""
        self._broken = ""
        """the defect that ended the thread"""
        self._jobs: list[_Job] = []
        self._peers: dict[Hashable, _Peer] = {}

    async def open(self) -> None:
        """Start the thread, unless it runs. TransferError when this way is impossible here, or closed."""
        if self._opened is None:
            self._loop = asyncio.get_running_loop()
            self._opened, self._ended = self._loop.create_future(), self._loop.create_future()
            atexit.register(self._leave)  # a thread that Python ends inside of foreign code takes the whole process down
            self._thread.start()
        await asyncio.shield(self._opened)
        if self._closing or self._broken:
            raise TransferError(f"reading by {self._way.name} has ended: {self._broken or 'it was closed'}")

    @property
    def opened(self) -> bool:
        """It is open and can be read from."""
        return self._opened is not None and self._opened.done() and self._opened.exception() is None

    async def read(self, address: MemoryAddress, pulls: Sequence[Pull], seconds: float) -> Pulled:
        """`Transfer.pull` of numbers that were checked."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                await self.open()
        except TimeoutError:
            raise TransferError(f"{self._way.name} could not be opened within {seconds:.3g} s; nothing was read") from None
        reading, pulls = OpenRead(), tuple(pulls)
        parts = requests(pulls, self._cell_bytes, self._pace.piece_bytes)
        job = _Job(address, reading, parts, len(pulls) * self._cell_bytes)
        self._order(lambda: self._jobs.append(job))
        left = max(0.0, seconds - (time.monotonic() - began))
        return await reading.wait(left, f"reading {len(pulls)} cells by {self._way.name}")

    def forget(self, address: MemoryAddress) -> None:
        """`Transfer.forget`."""
        if self._opened is not None:
            self._order(lambda: self._forget(address))

    def help(self, active: bool) -> None:
        """`Transfer.busy`."""
        self.busy = active
        self._wake.set()

    async def close(self) -> None:
        """`Transfer.close`: at most _CLOSE_SECONDS."""
        self._closing = True
        if self._ended is None:
            return
        self._wake.set()
        await asyncio.wait((self._ended,), timeout=_CLOSE_SECONDS)
        if not self._ended.done():
            _log.warning("%s: reads that nobody waits for any more have not settled; they are left to the end of the process", self._way.name)
            await asyncio.to_thread(self._leave)
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        """End the thread, whatever is under way. Blocks for a moment."""
        self._leaving = True
        self._wake.set()
        self._thread.join(_LEAVE_SECONDS)

    def _order(self, what: Callable[[], None]) -> None:
        self._orders.append(what)
        self._wake.set()

    def _tell(self, what: Callable[[], object]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop is closed, and so nobody waits for it
            _log.debug("%s: a read ended after the event loop that asked for it", self._way.name)

    # The thread

    def _run(self) -> None:
        assert self._opened is not None
        assert self._ended is not None
        opened, ended = self._opened, self._ended
        lower_priority(self._niceness)
        try:
            self._way.open()
        except TransferError as error:
            failure = error  # the name of an except clause does not outlive it
            self._tell(lambda: opened.set_exception(failure))
        else:
            self._tell(lambda: opened.set_result(None))
            self._go_round_guarded()
        self._tell(lambda: ended.set_result(None))

    def _go_round_guarded(self) -> None:
        try:
            self._go_round()
        except Exception as error:  # noqa: BLE001 a defect, not a failed read: it must not leave those waiting that can be told
            _log.exception("the thread that reads by %s has failed", self._way.name)
            self._broken = f"its thread failed ({type(error).__name__}: {error})"
            self._take_orders()
            for job in self._jobs:
                if job.request is None:
                    self._tell(partial(job.reading.end, TransferError(self._broken)))

    def _go_round(self) -> None:
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
        """Look after everything once. Seconds until it has to be done again; None: when there is an order."""
        pauses = []
        for job in tuple(self._jobs):
            pause = self._advance(job, time.monotonic())
            if pause is None:
                self._jobs.remove(job)
            else:
                pauses.append(pause)
        if self._way.idle_seconds is not None:
            self._way.help()
            pauses.append(_HELPING_PAUSE if self.busy else self._way.idle_seconds)
        return min(pauses, default=None)

    def _advance(self, job: _Job, now: float) -> float | None:
        """One request of a read further. Seconds until it has to be looked at again; None: it has settled."""
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
        if (wait := self._pace.wait(now)) > 0:
            return wait
        parts = next(job.requests, None)
        if parts is None:
            self._end(job, Pulled(job.bytes, now - job.began))
            return None
        self._pace.begin(sum(part.size for part in parts), now)
        job.pause = _SHORTEST_PAUSE
        self._jobs.remove(job)
        self._jobs.append(job)  # the next round begins with the others: a cap is shared
        job.request = job.peer.connection.post(job.address, parts)
        return 0.0

    def _begin(self, job: _Job, now: float) -> float:
        """Find or make the connection."""
        key = self._way.key(job.address)
        peer = self._peers.get(key)
        if peer is not None and (peer.failed or self._way.incarnation(peer.address) != self._way.incarnation(job.address)):
            peer.failed = peer.failed or "the rank has begun a new life"
            if peer.jobs:
                return _LONGEST_PAUSE  # a name is given anew only when all that was read under it has settled
            self._disconnect(peer)
            peer = None
        job.began = now
        if known := peer is not None:
            job.peer = peer
        else:
            self._make_room()
            job.peer = self._peers[key] = _Peer(job.address, self._way.connect(job.address))
        job.peer.jobs += 1
        if not known:
            job.request = job.peer.connection.greet()
        return 0.0

    def _make_room(self) -> None:
        """Nobody may know more peers than there can be: the oldest with nothing under way goes first."""
        if len(self._peers) >= _MOST_PEERS:
            resting = next((peer for peer in self._peers.values() if not peer.jobs), None)
            if resting is None:
                raise TransferError(f"{_MOST_PEERS} ranks are being read from already: forget those that are gone")
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
        self._tell(partial(job.reading.end, outcome))

    def _forget(self, address: MemoryAddress) -> None:
        peer = self._peers.get(self._way.key(address))
        if peer is None or self._way.incarnation(peer.address) != self._way.incarnation(address):
            return
        peer.failed = peer.failed or "the rank is gone, it was said"
        if not peer.jobs:
            self._disconnect(peer)

    def _disconnect(self, peer: _Peer) -> None:
        key = self._way.key(peer.address)
        if self._peers.get(key) is peer:
            del self._peers[key]
            self._way.disconnect(peer.address)
