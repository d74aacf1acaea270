"""A log handler for many short lines: those of a moment go out in one system call."""

import asyncio
import logging
from typing import TextIO

GATHER_SECONDS = 0.05
MOST_HELD = 1000
"""Lines; then they are written at once."""


class GatheredLines(logging.Handler):
    """Writes messages bare, a line each, GATHER_SECONDS late at most; at once where no event loop runs. The process's end writes what is held."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._held: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._held.append(record.getMessage())
        if len(self._held) == 1:
            try:
                asyncio.get_running_loop().call_later(GATHER_SECONDS, self.flush)
            except RuntimeError:
                self.flush()
        elif len(self._held) >= MOST_HELD:
            self.flush()

    def flush(self) -> None:
        self.acquire()
        try:
            held, self._held = self._held, []
            if held:
                self._stream.write("\n".join(held) + "\n")
                self._stream.flush()
        except (OSError, ValueError):  # nobody reads any more, or the stream is closed: as other handlers do, say so and go on
            self.handleError(logging.makeLogRecord({"msg": f"{len(held)} lines could not be written"}))
        finally:
            self.release()
