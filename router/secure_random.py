"""Bytes of the system's random generator, for ids and seeds: many are fetched at a time, because the system call
costs more than everything else about an id."""

import os

_FETCHED_BYTES = 4096


class SecureRandom:
    """State: fetched bytes that were not given out yet. Each byte is given out once; a copy of the object (by a
    fork) would give the same ones."""

    def __init__(self) -> None:
        self._fetched = b""
        self._at = 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes, at most 4096."""
        at, end = self._at, self._at + count
        if end > len(self._fetched):
            self._fetched, at, end = os.urandom(_FETCHED_BYTES), 0, count
        self._at = end
        return self._fetched[at:end]
