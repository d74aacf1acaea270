"""A key belongs to one holder at a time: claimed by compare-and-set, held by changing it, free when it rests.

A live claim is one whose revision changes within the lease. No clocks are compared: a claimant watches the key for one lease
by its own clock. `judge` decides; `ClaimLease` does what it says over the bus. An engine's name is held so (`NameClaim`), and the lead among
migration services.
"""

import asyncio
import enum
import logging

import msgspec

from bus import Bus, Claim, ClaimLost

LEASE_SECONDS = 3.0
"""A claim that does not change for so long is free."""
LOOK_SECONDS = 0.25
"""how often a claimant looks at a held key"""

UNREADABLE = -1
"""worker_id of the holder that a value without sense names; no engine's"""

log = logging.getLogger(__name__)


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a claim: who holds the key."""

    worker_id: int
    node: str
    beat: int
    """counts refreshes, so that the value changes with the revision"""
    offset: int = 0
    """added to the revision at which the key was taken, so that tokens grow though a server lost its store"""


class LeaseTaken(Exception):
    """Somebody else holds the key; the text says who."""


class NameTaken(LeaseTaken):
    """Another engine serves under this name; the text says where, and what to do."""


class ClaimStep(enum.Enum):
    """What a claimant does next."""

    CREATE = "create the key: nobody holds it"
    TAKE = "replace the value that was seen: its holder is gone"
    WAIT = "look again: the holder may be gone, the lease is not over"
    REFUSE = "give up: the holder lives"


def judge(seen: Claim | None, now: Claim | None, watched: float, *, replaces: int | None = None, lease: float = LEASE_SECONDS) -> ClaimStep:
    """Decide from the key as first seen held, the key now, and the seconds between.

    replaces: worker_id of an incarnation that is known to be dead (the launcher ended it): its claim is not waited for.
    """
    if now is None:
        return ClaimStep.CREATE
    if replaces is not None and holder_of(now).worker_id == replaces:
        return ClaimStep.TAKE
    if seen is not None and seen.revision != now.revision:
        return ClaimStep.REFUSE
    return ClaimStep.TAKE if watched >= lease else ClaimStep.WAIT


def holder_of(claim: Claim) -> Holder:
    """Who a claim names; an unreadable value is a holder without a name, so that it can only go stale."""
    try:
        return msgspec.json.decode(claim.value, type=Holder)
    except msgspec.DecodeError:
        return Holder(worker_id=UNREADABLE, node="an unknown node", beat=0)


class ClaimLease:
    """One holder's claim of a key. It lasts as long as it is refreshed, at least once in `lease` seconds."""

    def __init__(self, bus: Bus, key: str, *, worker_id: int, node: str, replaces: int | None = None, lease: float = LEASE_SECONDS) -> None:
        self.restored = False
        """the key had vanished (a server without its store) and was made anew at the last refresh"""
        self.token = 0
        """fencing token: the revision at which the key was taken, and the offset that its value tells; grows from holder to holder. 0: never taken"""
        self._bus = bus
        self._key = key
        self._holder = Holder(worker_id=worker_id, node=node, beat=0)
        self._replaces = replaces
        self._lease = lease
        self._revision: int | None = None

    @property
    def held(self) -> bool:
        return self._revision is not None

    async def take(self) -> None:
        """Claim the key, waiting at most a lease for a silent holder. LeaseTaken when it lives; BusError when the bus fails."""
        clock = asyncio.get_running_loop().time
        seen: Claim | None = None
        since = clock()
        while True:
            now = await self._bus.read_claim(self._key)
            if seen is None:
                seen, since = now, clock()
            verdict = judge(seen, now, clock() - since, replaces=self._replaces, lease=self._lease)
            if verdict is ClaimStep.REFUSE and now is not None:
                raise self._taken(now)
            if verdict is not ClaimStep.WAIT and await self._put(now):
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def refresh(self) -> None:
        """Show that we live. LeaseTaken when somebody else holds the key by now; BusError when the bus fails (try again)."""
        self.restored = False
        try:
            self._revision = await self._bus.claim(self._key, self._value(), self._revision)
        except ClaimLost:
            now = await self._bus.read_claim(self._key)
            if now is not None and holder_of(now).worker_id not in (self._holder.worker_id, UNREADABLE):
                self._revision = None
                raise self._taken(now) from None
            # ours after all: an answer that was lost, a key that vanished with its server, or nonsense: whoever may ask a server anything can
            # have the answer written here (docs/security.md), and must not end an engine by that
            self._revision = None if now is None else now.revision
            if now is None:  # revisions begin anew, tokens must not
                self._holder = msgspec.structs.replace(self._holder, offset=self.token)
            self._revision = await self._bus.claim(self._key, self._value(), self._revision)
            self.restored = now is None

    async def outbid(self, token: int) -> None:
        """Have a token above this one, which somebody has heard from a holder that the key knows nothing of. LeaseTaken, BusError as `refresh`."""
        if token < self.token:
            return
        more = token + 1 - self.token
        self._holder = msgspec.structs.replace(self._holder, offset=self._holder.offset + more)
        await self.refresh()  # whoever takes the key after us begins above it
        self.token += more

    async def release(self) -> None:
        """Give the key up at once; nothing happens when it is not ours any more."""
        if self._revision is None:
            return
        try:
            await self._bus.release(self._key, self._revision)
        except ClaimLost:
            log.warning("the claim of %r was no longer ours to give up", self._key)
        self._revision = None

    async def _put(self, now: Claim | None) -> bool:
        """Write our claim in the place of `now`; False when somebody else was faster."""
        offset = 0 if now is None else holder_of(now).offset
        self._holder = msgspec.structs.replace(self._holder, offset=offset)
        try:
            self._revision = await self._bus.claim(self._key, self._value(), None if now is None else now.revision)
        except ClaimLost:
            return False
        self.token = self._revision + offset
        return True

    def _value(self) -> bytes:
        self._holder = msgspec.structs.replace(self._holder, beat=self._holder.beat + 1)
        return msgspec.json.encode(self._holder)

    def _taken(self, now: Claim) -> LeaseTaken:
        holder = holder_of(now)
        return LeaseTaken(f"{self._key!r} is held by {holder.worker_id} on {holder.node}; it is free {self._lease:g} s after that falls silent")


class NameClaim(ClaimLease):
    """One incarnation's claim of its engine's name. NameTaken is what its methods raise."""

    def __init__(self, bus: Bus, key: str, engine: str, *, worker_id: int, node: str, replaces: int | None = None, lease: float = LEASE_SECONDS) -> None:
        super().__init__(bus, key, worker_id=worker_id, node=node, replaces=replaces, lease=lease)
        self._engine = engine

    def _taken(self, now: Claim) -> NameTaken:
        holder = holder_of(now)
        return NameTaken(
            f"the engine name {self._engine!r} is taken: worker {holder.worker_id} on {holder.node} serves under it. "
            f"Give this engine another name (--name), or stop that one; its name is free {self._lease:.0f} s after it falls silent"
        )
