"""Resident memory of this process, as the kernel counts it."""

from pathlib import Path
from typing import NamedTuple

_STATUS = Path("/proc/self/status")


class ResidentMemory(NamedTuple):
    """Resident memory of a process, in bytes. All are 0 where the system does not state them."""

    total: int = 0
    shared: int = 0
    """Part of `total` in shared memory, such as expert cells that other processes can map."""
    files: int = 0
    """Part of `total` mapped from files: the code of libraries. Processes share it."""

    @property
    def private(self) -> int:
        """Return the rest: memory of this process alone."""
        return self.total - self.shared - self.files


def resident_memory() -> ResidentMemory:
    """Read the resident memory of this process."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return ResidentMemory()
    found = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return ResidentMemory(*(_bytes(found.get(name)) for name in ("VmRSS", "RssShmem", "RssFile")))


def _bytes(value: list[str] | None) -> int:
    """Return the bytes of a field such as `1768 kB`. 0 for a field that is missing."""
    return int(value[0]) * 1024 if value else 0
