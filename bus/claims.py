"""Exclusive keys: taken by compare-and-set, held by changing the value, free when the value stops changing.

A claim is live if its revision changes within the lease. No clocks are compared: a claimant watches the key
for one lease by its own clock. `next_step` decides; `ClaimLease` acts on the decision over the bus. Names of
engines (`NameClaim`) and the leadership of migration services are held this way.
"""

import asyncio
import enum
import logging

import msgspec

from bus import Bus, Claim, ClaimLost

LEASE_SECONDS = 3.0
"""A claim that does not change for this time is free."""
LOOK_SECONDS = 0.25
"""interval at which a claimant polls a held key"""

UNREADABLE = -1
"""worker_id for a claim with an undecodable value; not the id of any engine"""

log = logging.getLogger(__name__)


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Value of a claim: the holder of the key."""

    worker_id: int
    node: str
    beat: int
    """counts refreshes, so that the value changes with the revision"""
    offset: int = 0
    """added to the revision at which the key was taken, so that tokens keep growing after a server lost its
    store
    """


class LeaseTaken(Exception):
    """The key has another holder. The text names it."""


class NameTaken(LeaseTaken):
    """Another engine serves under this name. The text names its location and the remedy."""


class ClaimStep(enum.Enum):
    """Next step of a claimant."""

    CREATE = "create the key: nobody holds it"
    TAKE = "replace the value that was seen: its holder is gone"
    WAIT = "look again: the holder may be gone, the lease is not over"
    REFUSE = "give up: the holder lives"


def next_step(
    seen: Claim | None,
    now: Claim | None,
    watched: float,
    *,
    replaces: int | None = None,
    lease: float = LEASE_SECONDS,
) -> ClaimStep:
    """Return what a claimant does next.

    seen: the claim as this claimant first saw it; None: the key was free until now. now: the claim at
    present; None: the key is free. watched: seconds between the two. replaces: worker_id of an incarnation
    known to be dead (its launcher ended it). Its claim is taken over without a wait.
    """
    if now is None:
        return ClaimStep.CREATE
    if replaces is not None and holder_of(now).worker_id == replaces:
        return ClaimStep.TAKE
    if seen is not None and seen.revision != now.revision:
        return ClaimStep.REFUSE
    return ClaimStep.TAKE if watched >= lease else ClaimStep.WAIT


def holder_of(claim: Claim) -> Holder:
    """Return the holder of a claim. An undecodable value is a nameless holder that can only expire."""
    try:
        return msgspec.json.decode(claim.value, type=Holder)
    except msgspec.DecodeError:
        return Holder(worker_id=UNREADABLE, node="an unknown node", beat=0)


class ClaimLease:
    """One holder's claim of a key. It lasts as long as it is refreshed at least once in `lease` seconds."""

    def __init__(
        self,
        bus: Bus,
        key: str,
        *,
        worker_id: int,
        node: str,
        replaces: int | None = None,
        lease: float = LEASE_SECONDS,
    ) -> None:
        self.restored = False
        """the key had vanished (a server without its store) and was created again at the last refresh"""
        self.token = 0
        """fencing token: the revision at which the key was taken plus the offset in its value. Grows from
        holder to holder. 0: never taken
        """
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
        """Claim the key. Wait at most one lease for a silent holder.

        LeaseTaken if the holder is alive; BusError if the bus fails.
        """
        clock = asyncio.get_running_loop().time
        seen: Claim | None = None
        since = clock()
        while True:
            now = await self._bus.read_claim(self._key)
            if seen is None:
                seen, since = now, clock()
            step = next_step(seen, now, clock() - since, replaces=self._replaces, lease=self._lease)
            if step is ClaimStep.REFUSE and now is not None:
                raise self._taken(now)
            if step is not ClaimStep.WAIT and await self._put(now):
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def refresh(self) -> None:
        """Renew the claim. LeaseTaken if the key has another holder by now; BusError if the bus fails (try
        again).
        """
        self.restored = False
        try:
            self._revision = await self._bus.claim(self._key, self._value(), self._revision)
        except ClaimLost:
            now = await self._bus.read_claim(self._key)
            if now is not None and holder_of(now).worker_id not in (self._holder.worker_id, UNREADABLE):
                self._revision = None
                raise self._taken(now) from None
            # The claim may still be ours: after a lost answer, a key that vanished with its server, or
            # garbage. Any client that may send a server requests can have an answer written to this key
            # (docs/security.md). That must not end an engine.
            self._revision = None if now is None else now.revision
            if now is None:  # revisions start over, tokens must not
                self._holder = msgspec.structs.replace(self._holder, offset=self.token)
            self._revision = await self._bus.claim(self._key, self._value(), self._revision)
            self.restored = now is None

    async def outbid(self, token: int) -> None:
        """Raise the token above the given one, which a holder unknown to the key has used. Raises as
        `refresh`.
        """
        if token < self.token:
            return
        more = token + 1 - self.token
        self._holder = msgspec.structs.replace(self._holder, offset=self._holder.offset + more)
        await self.refresh()  # the next holder starts above this token
        self.token += more

    async def release(self) -> None:
        """Release the key immediately. No effect if it is no longer ours."""
        if self._revision is None:
            return
        try:
            await self._bus.release(self._key, self._revision)
        except ClaimLost:
            log.warning("the claim of %r was already lost when released", self._key)
        self._revision = None

    async def _put(self, now: Claim | None) -> bool:
        """Replace `now` with our claim. False if another claimant was faster."""
        offset = 0 if now is None else holder_of(now).offset
        self._holder = msgspec.structs.replace(self._holder, offset=offset)
        try:
            self._revision = await self._bus.claim(
                self._key, self._value(), None if now is None else now.revision
            )
        except ClaimLost:
            return False
        self.token = self._revision + offset
        return True

    def _value(self) -> bytes:
        self._holder = msgspec.structs.replace(self._holder, beat=self._holder.beat + 1)
        return msgspec.json.encode(self._holder)

    def _taken(self, now: Claim) -> LeaseTaken:
        holder = holder_of(now)
        return LeaseTaken(
            f"{self._key!r} is held by {holder.worker_id} on {holder.node}; it is free {self._lease:g} s"
            " after that holder stops renewing it"
        )


class NameClaim(ClaimLease):
    """One incarnation's claim of its engine's name. Its methods raise NameTaken."""

    def __init__(
        self,
        bus: Bus,
        key: str,
        engine: str,
        *,
        worker_id: int,
        node: str,
        replaces: int | None = None,
        lease: float = LEASE_SECONDS,
    ) -> None:
        super().__init__(bus, key, worker_id=worker_id, node=node, replaces=replaces, lease=lease)
        self._engine = engine

    def _taken(self, now: Claim) -> NameTaken:
        holder = holder_of(now)
        return NameTaken(
            f"the engine name {self._engine!r} is taken: worker {holder.worker_id} on {holder.node} serves"
            " under it. Give this engine another name (--name), or stop that one; its name is free"
            f" {self._lease:.0f} s after that stops renewing its claim"
        )
