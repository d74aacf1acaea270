"""Log handler that never blocks its caller: a thread writes, many lines in one system call.

A pipe that is not read (a container runtime in blocking mode, a stopped `| jq`) blocks its writer for good.
Here only the thread blocks. Lines beyond its buffer are dropped and counted, and a notice states their number
once the pipe is read again.
"""

import json
import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from fleet.redaction import without_secrets

GATHER_SECONDS = 0.05
"""Longest delay before a line is written."""
MAX_HELD_CHARACTERS = 4 * 1024 * 1024
"""Size of the buffer; lines beyond it are dropped. As much again may be in the current write."""
MAX_LINE_CHARACTERS = 64 * 1024
FLUSH_SECONDS = 1.0
"""Time limit for a flush, and so for the end of the process, without a reader."""


class PlainFormatter(logging.Formatter):
    """Format a message without any addition."""

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage()


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (RFC 3339, UTC), level, logger, message, and the traceback of an
    error."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
        }
        if record.exc_info:
            fields["traceback"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(fields, ensure_ascii=False)


class LogWriter(logging.Handler):
    """Write formatted records to a file descriptor, one line each."""

    def __init__(self, descriptor: int, notice: Callable[[int], str]) -> None:
        """Start the writer. notice: returns the line, without its end, that states the number of lines
        dropped before it."""
        super().__init__()
        self.dropped = 0
        """lines, since the start"""
        self._descriptor = descriptor
        self._notice = notice
        self._held: list[str] = []
        self._characters = 0
        self._unreported = 0
        self._guard = threading.Lock()
        """guards the four fields above; never held during a write"""
        self._work, self._hurry, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)[:MAX_LINE_CHARACTERS]
        except Exception:  # noqa: BLE001 as every handler of the library: a line that cannot be formatted is reported on standard error
            self.handleError(record)
            return
        with self._guard:
            if self._characters + len(line) > MAX_HELD_CHARACTERS:
                self._drop(1)
                return
            self._held.append(line)
            self._characters += len(line)
            first = len(self._held) == 1
        if first:
            self._wake()

    def flush(self) -> None:
        """Wait until all is written, for at most FLUSH_SECONDS."""
        if self._thread is not None:
            self._hurry.set()
            self._idle.wait(FLUSH_SECONDS)
            self._hurry.clear()

    def _wake(self) -> None:
        self._idle.clear()
        self._work.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="writes log lines", daemon=True)
            self._thread.start()

    def _drop(self, lines: int) -> None:
        self.dropped += lines
        self._unreported += lines

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._hurry.wait(GATHER_SECONDS)
            self._work.clear()
            with self._guard:
                lines, self._held, self._characters = self._held, [], 0
                unreported = self._unreported
            if lines or unreported:
                self._write_lines(lines, unreported)
            with self._guard:
                if not self._held:
                    self._idle.set()

    def _write_lines(self, lines: list[str], unreported: int) -> None:
        """Write lines. unreported: lines dropped after these for lack of room."""
        notice = [self._notice(unreported)] if unreported else []
        try:
            self._write("\n".join([*lines, *notice]) + "\n")
        except OSError:  # its reader has gone; a later write may find another one
            with self._guard:
                self._drop(len(lines))
        else:
            with self._guard:
                self._unreported -= unreported

    def _write(self, text: str) -> None:
        left = memoryview(text.encode(errors="backslashreplace"))
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another process has made the descriptor non-blocking
                select.select([], [self._descriptor], [])


class LogFile(LogWriter):
    """Append to a file, and reopen it once log rotation has moved or removed it. Processes may share the
    file."""

    def __init__(self, path: Path, notice: Callable[[int], str]) -> None:
        """Open the file. Raises OSError if it cannot be opened."""
        super().__init__(_opened(path), notice)
        self._path = path

    def _write(self, text: str) -> None:
        here = os.fstat(self._descriptor)
        there = None
        with suppress(FileNotFoundError):
            there = self._path.stat()
        if there is None or (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            os.close(self._descriptor)
            self._descriptor = _opened(self._path)
        super()._write(text)


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
