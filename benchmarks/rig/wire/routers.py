"""Routers to be measured, as processes whose processor time is known."""

import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.rig.mock_fleet import MODEL
from benchmarks.rig.processes import free_port, process

_ALL_THREADS = 2
"""Clock number of a process (CPUCLOCK_SCHED in clock_getcpuclockid(3)): time of all its threads."""


class Running(NamedTuple):
    """A router's port and process; `engines`: the process of the engines that it brings, else None."""

    port: int
    pid: int
    engines: int | None = None

    def processor_seconds(self) -> float:
        """Return the processor time of the router's processes, without its engines."""
        return processor_seconds(self.pid)


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process and of its children, user and system together."""
    return sum(time.clock_gettime(~one << 3 | _ALL_THREADS) for one in _family(pid))


def _family(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from _family(int(child))


Start = Callable[[], contextlib.AbstractAsyncContextManager[Running]]


async def started(stack: contextlib.AsyncExitStack, start: Start) -> Running | str:
    """Return the router, or the reason for its absence. Tries twice: a free port may be taken meanwhile."""
    reason = ""
    for _ in range(2):
        try:
            return await stack.enter_async_context(start())
        except (OSError, RuntimeError, TimeoutError) as error:
            reason = f"it did not start: {error}"
    return reason


@contextlib.asynccontextmanager
async def pass_through(engines: list[int]) -> AsyncIterator[Running]:
    """Run the smallest router in Python before these engines (`benchmarks.rig.wire.pass_through`)."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.rig.wire.pass_through", str(port), *map(str, engines)]
    async with process(command, f"http://127.0.0.1:{port}/v1/models") as pid:
        yield Running(port, pid)


@contextlib.asynccontextmanager
async def smg(command: Path, policy: str, urls: list[str]) -> AsyncIterator[Running]:
    """Run SGLang's router before these engines."""
    port = free_port()
    arguments = [
        str(command),
        "launch",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--worker-urls",
        *urls,
        "--policy",
        policy,
    ]
    quiet = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "error"]
    async with process([*arguments, *quiet], f"http://127.0.0.1:{port}/v1/models") as pid:
        yield Running(port, pid)


@contextlib.asynccontextmanager
async def dynamo(python: Path, model: Path, workers: int) -> AsyncIterator[Running]:
    """Run Dynamo's frontend in KV mode over its mocker, which serves as the engines."""
    port = free_port()
    with tempfile.TemporaryDirectory() as shared:
        local = {
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "DYN_SELF_HOST_METADATA": "0",
        }
        planes = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": shared,
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "error",
        }
        mocker = [
            str(python),
            "-m",
            "dynamo.mocker",
            "--model-path",
            str(model),
            "--model-name",
            MODEL,
            "--num-workers",
            str(workers),
        ]
        mocker += [
            "--block-size",
            "16",
            "--num-gpu-blocks-override",
            "16384",
            "--speedup-ratio",
            "1000",
            "--max-num-seqs",
            "256",
        ]
        frontend = [
            str(python),
            "-m",
            "dynamo.frontend",
            "--http-host",
            "127.0.0.1",
            "--http-port",
            str(port),
            "--router-mode",
            "kv",
        ]
        async with contextlib.AsyncExitStack() as stack:
            # The mocker has no HTTP server: its presence shows in the frontend's list of models.
            engines = await stack.enter_async_context(process(mocker, None, environment=local | planes))
            url = f"http://127.0.0.1:{port}/v1/models"
            pid = await stack.enter_async_context(
                process(
                    frontend, url, environment=local | planes, answers=lambda body: MODEL.encode() in body
                )
            )
            yield Running(port, pid, engines)
