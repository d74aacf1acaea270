"""Roost before real vLLMs: NATS, an agent for each server, tracker, planner and router, each a process of its
own, as an operator runs them."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from benchmarks.rig.live.fleet import Settings, environment, merged, toml
from benchmarks.rig.processes import ROOST, free_port, nats, process
from benchmarks.rig.vllm.server import MODEL

JOIN_SECONDS = 90.0
_DISPATCHING = """
from deploy.cli import main
from engine_adapter.vllm import reports
from fleet.timing import EngineSpeed
from migration.engine_state import demand_windows

reports.GATHERS = ()
demand_windows.EngineSpeed = lambda: EngineSpeed(dispatch=2e-4)
main()
"""
_PAUSE_SECONDS = 1.0


class Behind(NamedTuple):
    """One vLLM deployment, and its agent."""

    name: str
    """of the engine in the fleet"""
    url: str
    settings: dict[str, Any]
    """keys of `[vllm]`"""
    is_dispatching: bool = False
    """its agent takes vLLM's backend for one that sends a token only where its experts are, and the planner
    takes sending for slow: so there are homes, though nothing on a processor gains from them"""


class Fronted(NamedTuple):
    """vLLMs behind Roost. router, nats: URLs."""

    router: str
    nats: str
    folder: Path

    async def command(self, *arguments: str) -> str:
        """Return the output of a `roost` command. Raises RuntimeError with its error output if it fails."""
        done = await self._run(arguments)
        if done.returncode != 0:
            said = done.stderr[-2000:] + done.stdout[-500:]
            raise RuntimeError(f"roost {' '.join(arguments)} ended with {done.returncode}: {said}")
        return done.stdout

    async def said(self, *arguments: str) -> str:
        """Return what a `roost` command prints, whether it succeeds or not."""
        done = await self._run(arguments)
        return done.stdout + done.stderr

    async def _run(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(
            subprocess.run,
            [*ROOST, *arguments, "--nats", self.nats],
            cwd=self.folder,
            env=environment(self.folder),
            capture_output=True,
            text=True,
            check=False,
        )


@asynccontextmanager
async def fronted(servers: Sequence[Behind], settings: Settings, folder: Path) -> AsyncIterator[Fronted]:
    """Run Roost before these servers; yield once the router serves their model and all have joined. Logs and
    settings lie in the folder."""
    async with AsyncExitStack() as stack:
        bus, door, pids = await stack.enter_async_context(nats()), free_port(), []
        is_dispatching = any(server.is_dispatching for server in servers)
        roost = (sys.executable, "-c", _DISPATCHING) if is_dispatching else ROOST
        for name in ("tracker", "planner", "router"):
            arguments = ["--port", str(door)] if name == "router" else []
            pids.append(
                await stack.enter_async_context(_part(name, arguments, bus, settings, folder, roost=roost))
            )
        for server in servers:
            own = merged(settings, {"vllm": server.settings})
            arguments = ["--engine", "vllm", "--url", server.url]
            part = _part("worker", arguments, bus, own, folder, server.name, roost)
            pids.append(await stack.enter_async_context(part))
        fleet = Fronted(f"http://127.0.0.1:{door}", bus, folder)
        await _joined(fleet, servers, pids)
        yield fleet


def _part(
    part: str,
    arguments: list[str],
    bus: str,
    settings: Settings,
    folder: Path,
    name: str = "",
    roost: Sequence[str] = ROOST,
) -> AbstractAsyncContextManager[int]:
    """Run one part of Roost with its own settings file and log."""
    file, log = folder / f"{name or part}.toml", folder / f"{name or part}.log"
    file.write_text(toml(settings))
    named = ["--name", name] if name else []
    command = [*roost, part, *arguments, *named, "--nats", bus, "--config", str(file)]
    shell = ["bash", "-c", 'exec "$@" > "$0" 2>&1', str(log), *command]
    return process(shell, None, environment={"XDG_STATE_HOME": str(folder)})


async def _joined(fleet: Fronted, servers: Sequence[Behind], pids: Sequence[int]) -> None:
    """Return once the router serves the model and every server has joined. Raises TimeoutError, or
    RuntimeError when a part has ended, with what the parts last said."""
    deadline = time.monotonic() + JOIN_SECONDS
    async with aiohttp.ClientSession(fleet.router) as http:
        while time.monotonic() < deadline:
            if not all(map(psutil.pid_exists, pids)):
                raise RuntimeError(f"a part has ended\n{await asyncio.to_thread(_last_words, fleet.folder)}")
            with contextlib.suppress(aiohttp.ClientError, RuntimeError):  # until they are up
                async with http.get("/v1/models") as answer:
                    known = MODEL in await answer.text()
                status = await fleet.command("status")
                if known and all(server.name in status for server in servers):
                    return
            await asyncio.sleep(_PAUSE_SECONDS)
    said = await asyncio.to_thread(_last_words, fleet.folder)
    raise TimeoutError(f"not all servers have joined within {JOIN_SECONDS:g} s\n{said}")


def _last_words(folder: Path) -> str:
    return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(folder.glob("*.log")))


def kv_events(ranks: int) -> tuple[str, str]:
    """Return the flag that makes a vLLM of this many data-parallel ranks publish its KV events.

    Rank r binds the r-th port after the first. vLLM binds only an endpoint with a wildcard; to any other one
    it connects."""
    first = _ports(2 * ranks)
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{first}",
        "replay_endpoint": f"tcp://*:{first + ranks}",
    }
    return "--kv-events-config", json.dumps(config)


def _ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    while True:
        first = free_port()
        if first + count < 65_536 and all(_is_free(first + offset) for offset in range(count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
