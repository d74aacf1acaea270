"""Reads the experts of other ranks of this machine through shared memory: their memory is mapped here, and copied from.

A rank's memory is of a file that has no path (memfd). Whoever may trace the process can open it as /proc/PID/fd/N; number, inode and size are compared, since
both PID and N may by then be another's. The mapping outlives the process it came from. The source has no part in a copy: one that is stopped, or busy, is
read from all the same. A file that may shrink is not mapped: reading behind its end would kill the reader.
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
from engine_adapter.transfer.port import AddressRefused, PeerGone, Pull, Pulled, TransferError
from engine_adapter.transfer.read_validation import own_address, refuse
from engine_adapter.transfer.reader_thread import Part, ReaderThread
from fleet.events import MemoryAddress


@cache
def this_host() -> str:
    """What processes that can map each other's memory have in common: the machine since it was started, and the namespace of process numbers. Empty where
    the system does not tell."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


class SharedTransfer:
    """The `Transfer` between ranks of one machine."""

    name = "shared"

    def __init__(self, memory: ExpertMemory, config: TransferConfig) -> None:
        self._own = own_address(memory)
        self._memory = memory
        self._worker = ReaderThread(_SharedWay(memory), config, memory.cell_bytes)

    def address(self, address: MemoryAddress) -> MemoryAddress:
        if self._memory.descriptor < 0 or not this_host():
            return address
        inode = os.fstat(self._memory.descriptor).st_ino
        return msgspec.structs.replace(address, host=this_host(), pid=os.getpid(), descriptor=self._memory.descriptor, inode=inode)

    def reaches(self, address: MemoryAddress) -> bool:
        return bool(this_host()) and address.host == this_host() and address.descriptor >= 0

    async def pull(self, address: MemoryAddress, pulls: Sequence[Pull], seconds: float) -> Pulled:
        refuse(address, pulls, self._own)
        if not self.reaches(address) or address.pid < 1:
            raise AddressRefused(f"memory of process {address.pid} of machine {address.host[:64]!r} cannot be mapped on {this_host()!r}: read it by NIXL")
        return await self._worker.read(address, pulls, seconds)

    def forget(self, address: MemoryAddress) -> None:
        self._worker.forget(address)

    def busy(self, active: bool) -> None:
        """A copy needs nobody's help."""

    async def close(self) -> None:
        await self._worker.close()


class _SharedWay:
    """Mappings of other processes' memory."""

    name = "shared memory"
    idle_seconds = None

    def __init__(self, memory: ExpertMemory) -> None:
        self._memory = memory

    def open(self) -> None:
        """Nothing is needed before the first mapping."""

    def key(self, address: MemoryAddress) -> Hashable:
        return address.pid, address.descriptor

    def incarnation(self, address: MemoryAddress) -> Hashable:
        return address.inode, address.cells

    def connect(self, address: MemoryAddress) -> "_Mapping":
        return _Mapping(self._memory, _mapped(address))

    def disconnect(self, address: MemoryAddress) -> None:
        """The mapping goes with the last reference to it, which was the worker's."""

    def help(self) -> None:
        """Never asked."""


class _Mapping:
    def __init__(self, memory: ExpertMemory, theirs: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._theirs = theirs

    def greet(self) -> None:
        """What is mapped is connected."""

    def post(self, address: MemoryAddress, parts: Sequence[Part]) -> None:
        """Copies; other threads run meanwhile."""
        for part in parts:
            first = part.source * address.cell_bytes + part.offset
            self._memory.cell(part.cell)[part.offset : part.offset + part.size] = self._theirs[first : first + part.size]

    def check(self, request: object) -> bool:
        """Never asked: a copy is done when it returns."""
        return True


def _mapped(address: MemoryAddress) -> NDArray[np.uint8]:
    """uint8 [cells * cell_bytes], read-only. PeerGone when process or file are not those of the address any more."""
    path, size = f"/proc/{address.pid}/fd/{address.descriptor}", address.cells * address.cell_bytes
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerGone(f"process {address.pid} has no such memory ({error}): it is dead; read another replica") from error
    except PermissionError as error:
        raise AddressRefused(
            f"{path} may not be opened ({error}): run all ranks as one user and in one container, or set the transfer's way to nixl"
        ) from error
    except OSError as error:
        raise TransferError(f"{path} cannot be opened: {error}") from error
    try:
        found = os.fstat(descriptor)
        if found.st_ino != address.inode or found.st_size < size:
            raise PeerGone(
                f"{path} is another file ({found.st_size} bytes) than was said ({size} bytes): the process that said so is dead; read another replica"
            )
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise AddressRefused(f"{path} may still shrink, and whoever reads it then is killed: the rank has to seal its size (`cells.mapped`)")
        return np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise TransferError(f"{path} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)
