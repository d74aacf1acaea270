"""Brings experts from another rank's memory into ours. The port; `shared` and `nixl` are two ways with one contract, `memory` a third for tests.

The receiver reads ("pulls"): so the process that owns the destination also owns the transfer, and alone knows when its cell is safe again.
No transfer can be called back: one that is given up goes on until it has *settled*, and its cell must not be used before.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fleet.events import MemoryAddress


class Pull(NamedTuple):
    """One cell to read."""

    source: int
    """cell over there"""
    cell: int
    """cell here; it is ours alone"""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What reading took."""

    bytes: int
    seconds: float


class TransferError(Exception):
    """A transfer failed; the text says whose fault it is and what to do. Nothing is under way any more."""


class PeerGone(TransferError):
    """The other process is dead, or closed its connections."""


class AddressRefused(TransferError):
    """The address cannot be used: of another layout, out of range, or unreachable by this way. Nothing was read."""


class Overdue(Exception):
    """The deadline passed while bytes were landing. `settled` is done once none can land any more: until then the cells are in quarantine."""

    def __init__(self, detail: str, settled: "asyncio.Future[None]") -> None:
        super().__init__(detail)
        self.settled = settled


class Transfer(Protocol):
    """One way of a rank to read other ranks' expert memory. All methods are for one event loop and never block it."""

    name: str
    """shared, nixl"""

    def address(self, address: MemoryAddress) -> MemoryAddress:
        """Our own address, with what this way needs to be reached by added to it."""
        ...

    def reaches(self, address: MemoryAddress) -> bool:
        """Whether this way can read there, as far as the address tells."""
        ...

    async def pull(self, address: MemoryAddress, pulls: Sequence[Pull], seconds: float) -> Pulled:
        """Read whole cells, in order. TransferError: nothing is under way. Overdue: after `seconds`, or when cancelled (then it is raised in place
        of CancelledError's silence only where bytes are still landing). What was read before an error is there, and is worth nothing."""
        ...

    def forget(self, address: MemoryAddress) -> None:
        """The rank there is gone; whatever was kept for it is let go of. What is under way from it settles."""
        ...

    def busy(self, active: bool) -> None:
        """Whether others are reading from us, or soon will be: a way that needs our help to be read (NIXL over tcp) then gives it often."""
        ...

    async def close(self) -> None:
        """End, within a bound. What is under way is waited for, or left to the end of the process with its memory."""
        ...
