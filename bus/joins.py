"""A join counts only with its name's claim: the key `engine.<name>` must hold the worker_id that has joined.

Who may write a claim decides who may be an engine of that name (on a server with users: that engine's own). An engine claims its name before it
announces itself, but log and claims are two stores, and a claim may be seen later than the join: it is waited for.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress

from bus import Bus, BusError, Received
from bus.claims import LOOK_SECONDS, holder_of
from bus.protocol.subjects import Subjects
from fleet.events import EngineJoined, EngineLeft

CLAIM_SECONDS = 5.0
"""A join whose claim has not been seen for this time does not count."""

log = logging.getLogger(__name__)


async def holds_its_name(bus: Bus, subjects: Subjects, joined: EngineJoined) -> bool:
    """Whether the name's claim holds this worker_id now. BusError when it cannot be read."""
    try:
        key = subjects.claim(joined.engine)
    except ValueError:  # no engine can have this name
        return False
    claim = await bus.read_claim(key)
    return claim is not None and holder_of(claim).worker_id == joined.worker_id


async def vouched(bus: Bus, subjects: Subjects, said: AsyncIterator[Received], seconds: float = CLAIM_SECONDS) -> AsyncIterator[Received]:
    """What a replay of memberships says, joins only once their claim is seen. Everything else passes at once.

    A join waits at most `seconds`, not counting the time in which claims cannot be read; a newer word about its engine ends the wait, and so does the
    end of the replay. Joins that do not count are logged.
    """
    check = _Check(bus, subjects, seconds)
    reading: asyncio.Future[Received] | None = None
    try:
        while True:
            if check.waiting:  # meanwhile the replay goes on
                reading = reading or asyncio.ensure_future(anext(said))
                await asyncio.wait([reading], timeout=LOOK_SECONDS)
                for late in await check.late():
                    yield late
                if not reading.done():
                    continue
            try:
                received = await (anext(said) if reading is None else reading)
            except StopAsyncIteration:
                break
            reading = None
            if await check.passes(received):
                yield received
        for late in await check.late(last=True):
            yield late
    finally:
        if reading is not None:
            reading.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, BusError):
                await reading
        if (close := getattr(said, "aclose", None)) is not None:
            await close()


class _Check:
    """Joins that wait for their claims."""

    def __init__(self, bus: Bus, subjects: Subjects, seconds: float) -> None:
        self.waiting: dict[str, tuple[Received, float]] = {}
        """by engine: the join, and until when it waits"""
        self._bus = bus
        self._subjects = subjects
        self._seconds = seconds

    async def passes(self, received: Received) -> bool:
        """Whether this counts already."""
        match received.message:
            case EngineJoined() as joined:
                self.waiting.pop(joined.engine, None)
                if await self._held(joined):
                    return True
                self.waiting[joined.engine] = received, self._now() + self._seconds
                return False
            case EngineLeft() as left:
                self.waiting.pop(left.engine, None)
        return True

    async def late(self, *, last: bool = False) -> list[Received]:
        """Joins that count now; those that have waited long enough (last: all others) are given up."""
        found = []
        for engine, (received, until) in list(self.waiting.items()):
            joined = received.message
            assert isinstance(joined, EngineJoined)
            held = await self._held(joined)
            if held is None:
                self.waiting[engine] = received, self._now() + self._seconds
            if held:
                found.append(received)
            if held or last or (held is False and self._now() >= until):
                self.waiting.pop(engine, None)
                if not held:
                    log.warning("worker %d says it is engine %s, whose name it does not hold; its join does not count", joined.worker_id, engine)
        return found

    async def _held(self, joined: EngineJoined) -> bool | None:
        """None: it cannot be told at present."""
        try:
            return await holds_its_name(self._bus, self._subjects, joined)
        except BusError as error:
            log.debug("the claim of engine %s cannot be read: %s", joined.engine, error)
            return None

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
