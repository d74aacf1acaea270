"""Shared-memory backend: maps the memory of other ranks of this machine and copies from it.

A rank's memory is an anonymous file (memfd). A process that may trace the rank can open it as /proc/PID/fd/N.
Inode and size are compared, since PID and N may have been reused by then. The mapping outlives the process
that it came from. The source takes no part in a copy, so a stopped or busy rank can still be read. A file
that may shrink is not mapped: reading beyond its end would kill the reader.
"""

import fcntl
import mmap
import os
from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_adapter.config import TransferConfig
from engine_adapter.engine import ExpertMemory
from engine_adapter.transfer.address_validation import check_read, own_address
from engine_adapter.transfer.port import AddressRefused, Landed, PeerGone, Pull, Pulled, TransferError
from engine_adapter.transfer.rate_limit import RateLimit
from engine_adapter.transfer.reader_thread import ReaderThread
from fleet.requests.handovers import MemoryAddress


@cache
def this_host() -> str:
    """Identify the group of processes that can map each other's memory: the boot ID of the machine and the
    PID namespace. Empty where the system does not provide them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


class SharedTransfer:
    """`Transfer` between ranks of one machine."""

    name = "shared"
    opened_bytes = 0

    def __init__(self, memory: ExpertMemory, config: TransferConfig, limit: RateLimit | None = None) -> None:
        """limit: as for `ReaderThread`."""
        self._own = own_address(memory)
        self._memory = memory
        self._worker = ReaderThread(_SharedBackend(memory), config, limit)

    def address(self, address: MemoryAddress) -> MemoryAddress:
        if self._memory.descriptor < 0 or not this_host():
            return address
        inode = os.fstat(self._memory.descriptor).st_ino
        return msgspec.structs.replace(
            address, host=this_host(), pid=os.getpid(), descriptor=self._memory.descriptor, inode=inode
        )

    def reaches(self, address: MemoryAddress) -> bool:
        return bool(this_host()) and address.host == this_host() and address.descriptor >= 0

    async def pull(
        self, address: MemoryAddress, pulls: Sequence[Pull], seconds: float, landed: Landed | None = None
    ) -> Pulled:
        check_read(address, pulls, self._own)
        if not self.reaches(address) or address.pid < 1:
            raise AddressRefused(
                f"memory of process {address.pid} of machine {address.host[:64]!r} cannot be mapped on"
                f" {this_host()!r}: read it by NIXL"
            )
        return await self._worker.read(address, pulls, seconds, landed)

    def forget(self, address: MemoryAddress) -> None:
        self._worker.forget(address)

    def busy(self, active: bool) -> None:
        """Do nothing: the source takes no part in a copy."""

    async def close(self) -> None:
        await self._worker.close()


class _SharedBackend:
    """Mappings of other processes' memory."""

    name = "shared memory"
    idle_seconds = None

    def __init__(self, memory: ExpertMemory) -> None:
        self._memory = memory

    def open(self) -> None:
        """Do nothing: mappings are made on demand."""

    def key(self, address: MemoryAddress) -> Hashable:
        return address.pid, address.descriptor

    def incarnation(self, address: MemoryAddress) -> Hashable:
        return address.inode, address.cells

    def connect(self, address: MemoryAddress) -> "_Mapping":
        return _Mapping(self._memory, map_memory(address))

    def disconnect(self, address: MemoryAddress) -> None:
        """Do nothing: the reader thread holds the last reference to the mapping."""

    def help(self) -> None:
        """Never called, because `idle_seconds` is None."""


class _Mapping:
    def __init__(self, memory: ExpertMemory, theirs: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._theirs = theirs

    def greet(self) -> None:
        """Do nothing: a mapping is already connected."""

    def post(self, address: MemoryAddress, parts: Sequence[Pull]) -> None:
        """Copy the parts. NumPy releases the GIL meanwhile."""
        for part in parts:
            first = part.source * address.cell_bytes + part.source_offset
            self._memory.cell(part.cell)[part.offset : part.offset + part.bytes] = self._theirs[
                first : first + part.bytes
            ]

    def check(self, request: object) -> bool:
        """Never called: a copy is done when `post` returns."""
        return True


def map_memory(address: MemoryAddress) -> NDArray[np.uint8]:
    """Map the memory at an address, uint8 [cells * cell_bytes], read-only. PeerGone when the process or the
    file has been replaced."""
    path, size = f"/proc/{address.pid}/fd/{address.descriptor}", address.cells * address.cell_bytes
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerGone(
            f"process {address.pid} has no such memory ({error}): it is dead; read another replica"
        ) from error
    except PermissionError as error:
        raise AddressRefused(
            f"{path} may not be opened ({error}): run all ranks as one user and in one container, or set"
            " transfer.backend to nixl"
        ) from error
    except OSError as error:
        raise TransferError(f"{path} cannot be opened: {error}") from error
    try:
        found = os.fstat(descriptor)
        if found.st_ino != address.inode or found.st_size < size:
            raise PeerGone(
                f"{path} is another file ({found.st_size} bytes) than announced ({size} bytes): the process"
                " that announced it is dead; read another replica"
            )
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise AddressRefused(
                f"{path} may still shrink, which would kill its readers: the rank has to seal its size"
                " (`mapped_memory.mapped`)"
            )
        return np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise TransferError(f"{path} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)
