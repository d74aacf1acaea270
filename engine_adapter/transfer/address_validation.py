"""Common parts of all transfer backends: validation before a byte is read, and the settling of abandoned
reads."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

from engine_adapter.engine import ExpertMemory
from engine_adapter.transfer.checksums import layout_hash
from engine_adapter.transfer.parts import CellFormat
from engine_adapter.transfer.port import AddressRefused, Overdue, Pull, Pulled
from fleet.requests.handovers import MemoryAddress

_MAX_ADDRESS = 1 << 48
"""Upper limit of user-space addresses on known machines. Anything beyond is not an address."""


def own_address(memory: ExpertMemory) -> MemoryAddress:
    """Describe this rank's memory for other ranks. Each backend adds what it needs (`Transfer.address`)."""
    return MemoryAddress(
        cells=memory.cells,
        cell_bytes=memory.cell_bytes,
        layout=layout_hash(CellFormat.of(memory)),
        parts=memory.parts,
        base=memory.base,
    )


def check_read(address: MemoryAddress, pulls: Sequence[Pull], own: MemoryAddress) -> None:
    """Raise AddressRefused unless these ranges of remote cells can be read into our own memory. Every number
    that becomes an address is checked."""
    # Ranges are copied byte by byte, so both sides must agree on every offset in a cell.
    if (address.layout, address.cell_bytes, address.parts) != (own.layout, own.cell_bytes, own.parts):
        theirs = f"{address.cell_bytes} bytes, {address.parts} parts, layout {address.layout[:64]!r}"
        ours = f"{own.cell_bytes} bytes, {own.parts} parts, layout {own.layout!r}"
        raise AddressRefused(
            f"the source's cells ({theirs}) differ from ours ({ours}): run one version and one dtype on all"
            " ranks"
        )
    # The address came over the bus, and NIXL checks none of it.
    if not (
        0 < address.base
        and 0 < address.cells
        and address.base + address.cells * address.cell_bytes <= _MAX_ADDRESS
    ):
        raise AddressRefused(
            f"{address.cells} cells of {address.cell_bytes} bytes at {address.base:#x} is no valid range: the"
            " sending rank is at fault"
        )
    for pull in pulls:
        if not 0 <= pull.source < address.cells:
            raise AddressRefused(
                f"cell {pull.source} cannot be read, since the source has {address.cells}: the rank that"
                " leased it is at fault"
            )
        if not 0 <= pull.cell < own.cells:
            raise AddressRefused(
                f"cell {pull.cell} is to be written, and there are {own.cells} here: the caller is at fault"
            )
        for offset in (pull.source_offset, pull.offset):
            if pull.bytes < 1 or offset < 0 or offset + pull.bytes > own.cell_bytes:
                raise AddressRefused(
                    f"{pull.bytes} bytes from byte {offset} on are no range of a cell of {own.cell_bytes}:"
                    " the caller is at fault"
                )
    # Two reads into the same bytes would mix two experts, and each alone would look complete.
    for first, second in pairwise(sorted(pulls, key=lambda pull: (pull.cell, pull.offset))):
        if first.cell == second.cell and second.offset < first.offset + first.bytes:
            raise AddressRefused(
                f"two reads write byte {second.offset} of cell {second.cell}: the caller is at fault"
            )


class OpenRead:
    """A read in progress. Its executor calls `end` on the event loop once no byte can land any more, and not
    before."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[Pulled] = asyncio.get_running_loop().create_future()
        self.abandoned = False
        """The caller stopped waiting. Parts that have not begun can be skipped."""

    @property
    def ended(self) -> bool:
        return self._ended.done()

    def end(self, outcome: Pulled | Exception) -> None:
        """End the read. No byte can land any more."""
        if isinstance(outcome, Exception):
            self._ended.set_exception(outcome)
        else:
            self._ended.set_result(outcome)

    async def wait(self, seconds: float, what: str) -> Pulled:
        """Wait for the read. Return its result or raise its error. Overdue after `seconds`, or when cancelled
        with bytes in flight."""
        try:
            # `wait` and not `wait_for`: the future must outlive this caller, because bytes still land.
            await asyncio.wait((self._ended,), timeout=seconds)
        except asyncio.CancelledError:
            if not self._ended.done():
                raise Overdue(f"{what} was cancelled while bytes were landing", self._abandon()) from None
            # Retrieve the exception. Otherwise asyncio would report it as never retrieved.
            self._ended.exception()
            raise
        if self._ended.done():
            return self._ended.result()
        raise Overdue(
            f"{what} took more than {seconds:.3g} s; its cells stay in quarantine until it has settled",
            self._abandon(),
        )

    def _abandon(self) -> "asyncio.Future[None]":
        self.abandoned = True
        # Another future than `_ended`: the holder of a quarantine waits for the end and not for the outcome.
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(ended: "asyncio.Future[Pulled]") -> None:
            ended.exception()
            if not settled.done():
                settled.set_result(None)

        self._ended.add_done_callback(settle)
        return settled
