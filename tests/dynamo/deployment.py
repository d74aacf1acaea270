"""A Dynamo deployment on this machine: its frontend, and our workers as a user starts them."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from benchmarks.rig.processes import ROOST
from deploy.local.parent_death import wrapped
from tests.conftest import free_port
from tests.dynamo.environment import PYTHON, ROOT

NAMESPACE = "roosttest"
PATIENCE_SECONDS = 120.0
"""time limit for anything to happen on a loaded machine"""


@dataclass
class DynamoProcess:
    """One process of the deployment, with its log."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    async def end(self) -> int:
        """Ask it to end, and return its exit status."""
        if self.process.returncode is None:
            self.process.terminate()
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.process.wait()

    def ranks(self) -> list[psutil.Process]:
        """Return the processes with the ranks of a worker."""
        return [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if '"rank"' in " ".join(child.cmdline()) or '"simulated"' in " ".join(child.cmdline())
        ]

    def kill_engine(self) -> None:
        """Kill worker and ranks as `kill -9` does, so that nothing restarts them."""
        family = [
            *psutil.Process(self.process.pid).children(recursive=True),
            psutil.Process(self.process.pid),
        ]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)


class DynamoFrontend:
    """A running frontend."""

    def __init__(self, url: str, process: DynamoProcess) -> None:
        self.url = url
        self.process = process
        self.client = httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS)

    async def models(self) -> list[str]:
        """Return the models that it serves."""
        return [one["id"] for one in (await self.client.get("/v1/models")).json()["data"]]

    async def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """Return the answer to a completion, which must succeed."""
        model = (await self.models())[0]
        answer = await self.client.post("/v1/completions", json={"model": model, "prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " "))
        )


class DynamoDeployment:
    """Processes of one deployment while the context lasts. Environment as Dynamo documents it."""

    def __init__(self, folder: Path, events: str = "zmq", nats: str = "", etcd: str = "") -> None:
        """nats: URL of the server of the event plane. etcd: URL of the server for discovery, else files."""
        self.folder = folder
        self.variables = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE": events,
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_SELF_HOST_METADATA": "0",
            "DYN_LOG": "warn",
            "HF_HUB_OFFLINE": "1",
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
        }
        if nats:
            self.variables |= {"NATS_SERVER": nats}
        if etcd:
            self.variables |= {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": etcd}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        (self.folder / "discovery").mkdir(exist_ok=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def instances(self) -> list[Path]:
        """Return the discovery records of workers."""
        return sorted((self.folder / "discovery" / "v1" / "instances").glob("*generate*"))

    async def frontend(self, mode: str, *options: str, workers: int = 1) -> DynamoFrontend:
        """Start a frontend, and return it once it serves a model by this number of workers."""
        port = free_port()
        process = await self.start(
            f"frontend-{port}",
            [
                *(str(PYTHON), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)),
                *("--router-mode", mode, "--namespace", NAMESPACE, *options),
            ],
        )
        frontend = DynamoFrontend(f"http://127.0.0.1:{port}", process)
        self._stack.push_async_callback(frontend.client.aclose)

        async def serves() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return bool(await frontend.models()) and len(self.instances()) >= workers
            return False

        await until(serves, f"the frontend serves; see {process.log}")
        return frontend

    async def worker(self, name: str, *options: str) -> DynamoProcess:
        """Start `roost worker --dynamo`, and return it once discovery names it."""
        before = len(self.instances())
        process = await self.start(
            name, [*ROOST, "worker", "--dynamo", NAMESPACE, "--name", name, *options], PYTHONPATH=str(ROOT)
        )

        async def joined() -> bool:
            assert process.process.returncode is None, process.log.read_text()
            return "is ready" in process.log.read_text() and len(self.instances()) > before

        await until(joined, f"{name} joins; see {process.log}")
        return process

    async def start(self, name: str, command: list[str], **variables: str) -> DynamoProcess:
        """Start a process of the deployment."""
        environment = {
            key: value
            for key, value in os.environ.items()
            if key != "PYTHONPATH" and not key.startswith("ROOST_")
        }
        log = self.folder / f"{name}.log"
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *wrapped(command, os.getpid()),
                cwd=self.folder,
                env=environment | self.variables | variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        started = DynamoProcess(name, process, log)
        self._stack.push_async_callback(started.end)
        return started


async def until(fact: Callable[[], Any], description: str) -> None:
    """Wait for a fact, which other processes bring about."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await fact():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"not within {PATIENCE_SECONDS:g} s: {description}") from None


async def streamed(frontend: DynamoFrontend, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a streamed completion. AssertionError when it ends with an error."""
    async with frontend.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line[6:])
                assert "choices" in chunk, chunk
                yield chunk
            assert not line.startswith("event: error"), line
