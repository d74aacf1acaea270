"""Leader election among migration services, by a lease whose fencing token excludes previous leaders."""

import asyncio
import logging
import platform
import secrets
from collections.abc import Callable

from bus import Bus, BusError
from bus.claims import LOOK_SECONDS, ClaimLease, LeaseTaken

logger = logging.getLogger(__name__)

REFRESHES = 3
"""renewals per lease period"""
_FAREWELL_SECONDS = 1.0


class LeaderLease:
    """Lease of one service. Used on one event loop. seconds: lease duration; clock: monotonic seconds."""

    def __init__(self, bus: Bus, key: str, seconds: float, clock: Callable[[], float]) -> None:
        self._lease = ClaimLease(
            bus,
            key,
            worker_id=secrets.randbits(64),
            node=platform.node() or "an unnamed machine",
            lease=seconds,
        )
        self._seconds = seconds
        self._clock = clock
        self._changing = asyncio.Lock()
        self._until = float("-inf")
        """time until which no other service can have become the leader"""
        self._fresh = asyncio.Event()

    @property
    def token(self) -> int:
        return self._lease.token

    @property
    def leads(self) -> bool:
        """True if no other service can be the leader at this moment."""
        return self._lease.held and self._clock() < self._until

    async def take(self, standing_by: Callable[[], None], *, patient: bool) -> None:
        """Wait for the lead and take it.

        standing_by: called while another service is the leader. patient: wait for a bus that fails. Otherwise
        raises BusError if it fails at the first attempt.
        """
        first = True
        while True:
            began = self._clock()
            try:
                await self._lease.take()
            except LeaseTaken as taken:
                if first:
                    logger.info("standing by: %s", taken)
                standing_by()
            except BusError as error:
                if first and not patient:
                    raise
                if first:
                    logger.warning("the lead cannot be taken at present: %s", error)
            else:
                self._renewed(began)
                logger.info("leading, with token %d", self.token)
                return
            first = False
            await asyncio.sleep(LOOK_SECONDS)

    async def hold(self) -> None:
        """Renew the lease until cancelled. Raises LeaseTaken if another service is the leader.

        While the bus is unavailable the leader is unknown; `until_leading` then waits.
        """
        while True:
            await asyncio.sleep(self._seconds / REFRESHES)
            try:
                await self._renew()
            except BusError as error:
                logger.warning("the lease cannot be renewed: %s", error)

    async def until_leading(self) -> None:
        """Wait until no other service can be the leader. Usually returns at once."""
        while not self.leads:
            self._fresh.clear()
            await self._fresh.wait()

    async def outbid(self, token: int) -> int:
        """Get a fencing token above one that a rank has seen.

        Raises LeaseTaken if that token belongs to the current leader, and BusError if the bus fails.
        """
        async with self._changing:
            began = self._clock()
            await self._lease.outbid(token)
            self._renewed(began)
        return self.token

    async def give_up(self) -> None:
        """Release the lease, so that another service can lead at once."""
        self._until = float("-inf")
        try:
            async with asyncio.timeout(_FAREWELL_SECONDS):
                await self._lease.release()
        except (BusError, TimeoutError) as error:
            logger.warning("the lease could not be released, and will expire: %s", error)

    async def _renew(self) -> None:
        async with self._changing:
            began = self._clock()
            await self._lease.refresh()
            self._renewed(began)

    def _renewed(self, began: float) -> None:
        self._until = began + self._seconds
        self._fresh.set()
