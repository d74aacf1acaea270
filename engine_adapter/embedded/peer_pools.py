"""KV memory of the other ranks of this engine, mapped so that their units can be read."""

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine_adapter.embedded.kv_pool import KvPool
from engine_adapter.embedded.step_sync import RankGroup
from engine_adapter.kv_switch.kv_state import UnitRead
from engine_adapter.transfer.port import TransferError
from engine_adapter.transfer.shared_memory import map_memory
from fleet.requests.handovers import MemoryAddress


class PeerPools:
    """KV pools of all ranks of an engine on one machine, by rank."""

    def __init__(self, own: KvPool, theirs: Sequence[NDArray[np.uint8]]) -> None:
        """theirs: uint8 [units, unit_bytes] of every rank. That of this rank is not read."""
        self._own = own
        self._theirs = theirs

    @classmethod
    def meet(cls, own: KvPool, group: RankGroup) -> "PeerPools":
        """Map the pools of all ranks. All ranks call it together. TransferError when a pool cannot be mapped,
        on every rank alike."""
        here = own.descriptor, os.getpid(), os.fstat(own.descriptor).st_ino
        found: list[NDArray[np.uint8]] = []
        failure: TransferError | None = None
        for number, address in enumerate(group.gather(here)):
            try:
                found.append(np.empty((0, 0), np.uint8) if number == group.rank else _mapped(own, *address))
            except TransferError as error:
                failure = error
        failed = [number for number, (code,) in enumerate(group.gather([failure is not None])) if code]
        if failed:
            raise TransferError(
                f"rank {failed[0]} cannot map the KV memory of the others: {failure or 'see its log'}"
            ) from failure
        return cls(own, found)

    def read(self, reads: Sequence[UnitRead]) -> int:
        """Copy units of other ranks into own ones, and return the bytes. NumPy releases the GIL meanwhile."""
        for source_rank, source, unit in reads:
            self._own.unit(unit)[:] = self._theirs[source_rank][source]
        return len(reads) * self._own.unit_bytes


def _mapped(own: KvPool, descriptor: int, pid: int, inode: int) -> NDArray[np.uint8]:
    address = MemoryAddress(
        cells=own.units,
        cell_bytes=own.unit_bytes,
        layout="",
        base=0,
        pid=pid,
        descriptor=descriptor,
        inode=inode,
    )
    return map_memory(address).reshape(own.units, own.unit_bytes)
