"""Messages that wait to be sent to the agent."""

import threading
from collections import deque

import msgspec

from roost_vllm.wire import FromWorker

MOST_BYTES = 64 * 1024 * 1024
_EACH_BYTES = 1024
"""counted for each message beside its long fields"""


class Outbox:
    """Queue between vLLM's threads and the link's. It holds messages while it is open, and at most
    MOST_BYTES of them: the oldest go first, because reports may be lost, and states are told again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[FromWorker, int]] = deque()
        self._is_open = False
        self.bytes = 0
        """that wait"""

    def open(self) -> None:
        """Take messages from now on."""
        with self._lock:
            self._is_open = True

    def close(self) -> None:
        """Drop all messages, and take none from now on."""
        with self._lock:
            self._is_open = False
            self._waiting.clear()
            self.bytes = 0

    def put(self, message: FromWorker) -> bool:
        """Add a message. False: the outbox is closed, and the message is dropped."""
        size = _EACH_BYTES + sum(len(value) for value in _long_fields(message))
        with self._lock:
            if not self._is_open:
                return False
            self._waiting.append((message, size))
            self.bytes += size
            while self.bytes > MOST_BYTES:
                self.bytes -= self._waiting.popleft()[1]
            return True

    def take(self) -> FromWorker | None:
        """Return the oldest message, and forget it. None: there is none."""
        with self._lock:
            if not self._waiting:
                return None
            message, size = self._waiting.popleft()
            self.bytes -= size
            return message


def _long_fields(message: FromWorker) -> list[bytes]:
    return [value for value in msgspec.structs.astuple(message) if isinstance(value, bytes)]
