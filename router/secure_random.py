"""Bytes of the system's random generator, for ids and seeds. They are fetched in batches, because the system
call costs more than the rest of making an id.
"""

import os

_FETCHED_BYTES = 4096


class SecureRandom:
    """Buffer of random bytes. Each byte is used once. Do not copy the object (also not by a fork): a copy
    would return the same bytes.
    """

    def __init__(self) -> None:
        self._fetched = b""
        self._at = 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes, at most 4096."""
        at, end = self._at, self._at + count
        if end > len(self._fetched):
            self._fetched, at, end = os.urandom(_FETCHED_BYTES), 0, count
        self._at = end
        return self._fetched[at:end]
