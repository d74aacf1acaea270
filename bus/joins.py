"""Validation of joins: a join counts only if the claim `engine.<name>` holds the worker_id that has joined.

The right to write a claim thereby defines which process may be the engine of that name (on a server with
users: only that engine's own user). An engine claims its name before it announces itself. But log and claims
are two stores, and a claim may become visible later than the join. Readers therefore wait for it.

A join also counts only if its protocol is at most one version apart from ours.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress

from bus import Bus, BusError, Received
from bus.claims import LOOK_SECONDS, holder_of
from bus.protocol.subjects import Subjects
from fleet.event import PROTOCOL, understands
from fleet.facts.engines import EngineJoined, EngineLeft

CLAIM_SECONDS = 5.0
"""A join is ignored if its claim does not appear within this time."""

log = logging.getLogger(__name__)


def refusal_of(joined: EngineJoined) -> str | None:
    """Return why an engine's protocol is not understood; None: it is."""
    if understands(joined.protocol):
        return None
    older, newer = ("it", "this part") if joined.protocol < PROTOCOL else ("this part", "it")
    return (
        f"engine {joined.engine} speaks protocol {joined.protocol} and this part {PROTOCOL}; parts may be one"
        f" apart: update {older}, or go back one version with {newer}"
    )


async def holds_its_name(bus: Bus, subjects: Subjects, joined: EngineJoined) -> bool:
    """Return True if the name's claim holds this worker_id now. BusError if it cannot be read."""
    try:
        key = subjects.claim(joined.engine)
    except ValueError:  # not a valid engine name
        return False
    claim = await bus.read_claim(key)
    return claim is not None and holder_of(claim).worker_id == joined.worker_id


async def verified_members(
    bus: Bus, subjects: Subjects, replay: AsyncIterator[Received], seconds: float = CLAIM_SECONDS
) -> AsyncIterator[Received]:
    """Filter a replay of memberships: pass joins only after their claim is seen, and everything else
    immediately.

    A join waits at most `seconds`, not counting the time in which claims cannot be read. A newer event of its
    engine or the end of the replay ends the wait. Ignored joins are logged.
    """
    check = _Check(bus, subjects, seconds)
    reading: asyncio.Future[Received] | None = None
    try:
        while True:
            if check.waiting:  # the replay continues meanwhile
                reading = reading or asyncio.ensure_future(anext(replay))
                await asyncio.wait([reading], timeout=LOOK_SECONDS)
                for late in await check.late():
                    yield late
                if not reading.done():
                    continue
            try:
                received = await (anext(replay) if reading is None else reading)
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
        if (close := getattr(replay, "aclose", None)) is not None:
            await close()


class _Check:
    """Joins that wait for their claims."""

    def __init__(self, bus: Bus, subjects: Subjects, seconds: float) -> None:
        self.waiting: dict[str, tuple[Received, float]] = {}
        """by engine: the join and its deadline"""
        self._bus = bus
        self._subjects = subjects
        self._seconds = seconds

    async def passes(self, received: Received) -> bool:
        """Return True if the message may pass now."""
        match received.message:
            case EngineJoined() as joined:
                self.waiting.pop(joined.engine, None)
                if (refusal := refusal_of(joined)) is not None:
                    log.warning("ignored the join of worker %d: %s", joined.worker_id, refusal)
                    return False
                if await self._held(joined):
                    return True
                self.waiting[joined.engine] = received, self._now() + self._seconds
                return False
            case EngineLeft() as left:
                self.waiting.pop(left.engine, None)
        return True

    async def late(self, *, last: bool = False) -> list[Received]:
        """Return joins whose claim appeared, and drop those past their deadline (last: all others)."""
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
                    log.warning(
                        "ignored the join of worker %d as engine %s: it does not hold the claim to that name",
                        joined.worker_id,
                        engine,
                    )
        return found

    async def _held(self, joined: EngineJoined) -> bool | None:
        """Return True if the claim names this worker; None if it cannot be read at present."""
        try:
            return await holds_its_name(self._bus, self._subjects, joined)
        except BusError as error:
            log.debug("the claim of engine %s cannot be read: %s", joined.engine, error)
            return None

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
