"""One process of Roost: its logging, signals, event loop and exit status.

SIGTERM, SIGINT and SIGHUP cancel the part once, and it stops cleanly within its own time limits; a second
signal ends the process at once. A part that can reload its settings uses SIGHUP for that (`on_hangup`),
unless its terminal was closed. An expected error is one line on standard error and exit status 1 (2 if trying
again would fail in the same way). Any other error is a bug, and shows its traceback.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvloop

from deploy.descriptors import raise_limit
from deploy.telemetry.log_writer import JsonFormatter, LogFile, LogWriter, PlainFormatter
from fleet.redaction import without_secrets

FAILURE = 1
FINAL = 2
"""Exit status of a process that its supervisor need not restart."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Errors = tuple[type[BaseException], ...]


STDOUT, STDERR = 1, 2
ACCESS = "roost.access"
"""Logger of the router's request lines, which are already JSON."""


class WithoutSecrets(logging.Formatter):
    """Formatter that removes users and passwords of URLs from log lines and tracebacks, whatever their
    source."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


def set_up_logging(level: str, form: str = "text", access_log: str = "-") -> None:
    """Configure logging: log lines to standard error, as text or as JSON; the router's request lines, always
    JSON, to a file, to standard output ("-"), or nowhere ("none").

    No log output ever blocks the process. Raises OSError if the file cannot be opened.
    """
    # Skip look-ups of values that no log line shows.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    lines = LogWriter(STDERR, _drop_notice)
    lines.setFormatter(
        JsonFormatter()
        if form == "json"
        else WithoutSecrets("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[lines])
    access = logging.getLogger(ACCESS)
    access.propagate = False
    if access_log == "none":
        access.disabled = True
        return

    def notice(dropped: int) -> str:
        return f'{{"dropped_lines":{dropped}}}'

    requests = LogWriter(STDOUT, notice) if access_log == "-" else LogFile(Path(access_log), notice)
    requests.setFormatter(PlainFormatter())
    access.addHandler(requests)


def _drop_notice(lines: int) -> str:
    return f"WARNING roost: {lines} log lines before this one were dropped: standard error was not read"


def dropped_lines() -> dict[str, int]:
    """Return the number of log lines dropped for lack of a reader, by logger: "access", and "log" for all
    others."""
    loggers = {"access": logging.getLogger(ACCESS), "log": logging.getLogger()}
    return {
        name: sum(one.dropped for one in logger.handlers if isinstance(one, LogWriter))
        for name, logger in loggers.items()
    }


def run(
    part: Coroutine[Any, Any, None],
    *,
    expected: Errors,
    final: Errors = (),
    fast_loop: bool = True,
    hint: str = "",
) -> int:
    """Run a part until it ends or is stopped. Returns the exit status.

    `expected` and `final` errors are printed as text, followed by `hint`; `final` errors give exit status 2.
    """
    raise_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if fast_loop else None) as runner:
        try:
            return runner.run(_until_signalled(part))
        except BaseException as error:
            signalled = first_of(error, (*expected, *final))
            if signalled is None:
                raise
            print_error(f"{signalled}; {hint}" if hint else str(signalled))
            return FINAL if isinstance(signalled, final) else FAILURE


def print_error(text: str) -> None:
    """Print one expected error, for users and for the end of a log."""
    sys.stderr.write(f"roost: {without_secrets(text)}\n")
    sys.stderr.flush()


def first_of(error: BaseException, kinds: Errors) -> BaseException | None:
    """Return the first error of these kinds in an error or a nested group of errors."""
    if isinstance(error, kinds):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            if found := first_of(inner, kinds):
                return found
    return None


async def _until_signalled(part: Coroutine[Any, Any, None]) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(part)
    signalled = False

    def stop() -> None:
        nonlocal signalled
        signalled = True
        task.cancel()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not signalled:
            raise
    return 0


@contextmanager
def on_hangup(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` at every SIGHUP while the context lasts. A SIGHUP from a closed terminal ends the process as
    before."""
    loop = asyncio.get_running_loop()
    attended = _has_terminal()

    def hung_up() -> None:
        if attended and not _has_terminal():
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            act()

    loop.add_signal_handler(signal.SIGHUP, hung_up)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


@asynccontextmanager
async def at_hangup(act: Callable[[], Awaitable[object]], name: str) -> AsyncIterator[asyncio.Task[None]]:
    """Run `act` at every SIGHUP while the context lasts, in a task of this name. Signals that come while it
    runs are merged into one."""
    hangup = asyncio.Event()

    async def attend() -> None:
        while True:
            await hangup.wait()
            hangup.clear()
            await act()

    with on_hangup(hangup.set):
        async with alongside(attend(), name) as task:
            yield task


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


@asynccontextmanager
async def alongside(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[asyncio.Task[None]]:
    """Run work as a task while the context lasts; then cancel it and wait for its end. The caller must check
    for its failure."""
    task = asyncio.create_task(work, name=name)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_ready(ready: asyncio.Event, *tasks: asyncio.Future[None]) -> None:
    """Return when the event is set; if one of the tasks ends before, raise its error."""
    async with alongside(_wait_for(ready), "wait until it is ready") as waiting:
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            await first_failure(tasks)


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


async def first_failure(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Wait until one of several endless tasks ends; raise its error."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    raise RuntimeError(
        f"{', '.join(getattr(task, 'get_name', lambda: 'a task')() for task in done)} ended unexpectedly"
    )
