"""Child processes of a benchmark: started, probed until ready, ended with their context."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
ROOST = (sys.executable, "-c", "from deploy.cli import main; main()")
"""The command `roost` of this file's tree, whichever is installed."""
_START_SECONDS = 30.0
_END_SECONDS = 5.0
_ALL_THREADS = 2
"""Clock number of a process (CPUCLOCK_SCHED in clock_getcpuclockid(3)): time of all its threads."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def process(
    arguments: Sequence[str],
    ready: str | None,
    *,
    environment: Mapping[str, str] | None = None,
    answers: Callable[[bytes], bool] = lambda body: True,
    tree: Path = ROOT,
) -> AsyncIterator[int]:
    """Run a child and yield its process id once `ready` (a URL; None: no probe) answers as expected; end it
    with the context.

    The event loop continues meanwhile, because mocks must send heartbeats. environment: in addition to this
    process's own. tree: the checkout whose packages a Python child imports. Raises RuntimeError if the child
    ends before it answers, TimeoutError if it does not answer.
    """
    own = {**os.environ, **(environment or {}), "PYTHONPATH": str(tree)}
    with tempfile.TemporaryFile() as errors:
        child = await asyncio.create_subprocess_exec(
            *arguments, stdout=subprocess.DEVNULL, stderr=errors, cwd=tree, env=own
        )
        try:
            if ready is not None:
                await asyncio.to_thread(_await_url, ready, child, errors, answers)
            yield child.pid
        finally:
            await _end(child)


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.terminate()
    try:
        await asyncio.wait_for(child.wait(), _END_SECONDS)
    except TimeoutError:
        child.kill()
        await child.wait()


def _await_url(
    url: str, child: asyncio.subprocess.Process, errors: IO[bytes], answers: Callable[[bytes], bool]
) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if child.returncode is not None:
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-5:]
            raise RuntimeError(
                f"the process behind {url} ended with {child.returncode}; it said last: {' / '.join(last)}"
            )
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1) as answer:
            if answers(answer.read()):
                return
        time.sleep(0.05)
    raise TimeoutError(f"{url} did not answer within {_START_SECONDS:g} s")


@contextlib.asynccontextmanager
async def nats() -> AsyncIterator[str]:
    """Run a NATS server with JetStream on a free port, with a temporary store; yield its URL."""
    port, health = free_port(), free_port()
    with tempfile.TemporaryDirectory() as store:
        arguments = [
            str(BIN / "nats-server"),
            "-a",
            "127.0.0.1",
            "-p",
            str(port),
            "-m",
            str(health),
            "-js",
            "-sd",
            store,
        ]
        async with process(arguments, f"http://127.0.0.1:{health}/healthz"):
            yield f"nats://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def mock_engines(count: int) -> AsyncIterator[list[int]]:
    """Run `count` mock engines, one process each; yield their ports."""
    async with contextlib.AsyncExitStack() as stack:
        ports = [free_port() for _ in range(count)]
        for port in ports:
            await stack.enter_async_context(
                process(
                    [sys.executable, "-m", "benchmarks.rig.mock_engine", str(port)],
                    f"http://127.0.0.1:{port}/v1/models",
                )
            )
        yield ports


class Started(NamedTuple):
    """Router process and its port."""

    port: int
    pid: int

    def processor_seconds(self) -> float:
        """Return the processor time of all threads of the process, user and system together."""
        return time.clock_gettime(~self.pid << 3 | _ALL_THREADS)


@contextlib.asynccontextmanager
async def started_router(*arguments: str, tree: Path = ROOT) -> AsyncIterator[Started]:
    """Run the real `roost router` command of a checkout on a free port, ready to serve."""
    port = free_port()
    command = [*ROOST, "router", "--port", str(port), *arguments]
    async with process(command, f"http://127.0.0.1:{port}/ready", tree=tree) as pid:
        yield Started(port, pid)


@contextlib.asynccontextmanager
async def roost_router(*arguments: str, tree: Path = ROOT) -> AsyncIterator[int]:
    """Run `started_router`; yield its port."""
    async with started_router(*arguments, tree=tree) as router:
        yield router.port
