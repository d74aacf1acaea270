"""Arms of the comparison: the same requests to a vLLM under its own load balancer, or under Roost.

Each run leaves its raw evidence in a folder: the recorder's counters by step, the answers, the times. A
folder that is complete is not run again, so a comparison can be made in parts.
"""

import asyncio
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import aiohttp
import msgspec

from benchmarks.rig.live.document_traffic import Request
from benchmarks.rig.live.fleet import Settings, environment, toml
from benchmarks.rig.processes import ROOST as COMMAND
from benchmarks.rig.processes import free_port, nats, process
from benchmarks.rig.vllm.load import Plenty, send
from benchmarks.rig.vllm.recorder.roost_recorder import FOLDER
from benchmarks.rig.vllm.server import MODEL, RECORDER, ROOST, STAND_INS, Server, serving

_DONE = "run.json"
NEVER = 1_000_000_000
"""step interval of a vLLM whose maps Roost supplies"""
ENGINE = "vllm"
JOIN_SECONDS = 60.0
REPORT_SECONDS = 0.5
CADENCE: dict[str, dict[str, Any]] = {
    "planner": {
        "cycle_seconds": 3.0,
        "window_seconds": 20.0,
        "stale_seconds": 5.0,
        "evaluation_seconds": 15.0,
        "settle_seconds": 4.0,
        "cooldown_seconds": 60.0,
        "lifetime_seconds": 900.0,
    },
    "vllm": {"report_seconds": REPORT_SECONDS},
}
"""Fast settings: defaults are for hours, a benchmark lasts minutes."""


class Run(msgspec.Struct, frozen=True):
    """Answers of one run, in the order of the requests. The counters lie beside it."""

    texts: list[str]
    began: float
    """monotonic time of the first request, by the clock of the recorder"""
    seconds: float
    tokens: int
    much: Plenty


class Arm(Protocol):
    """One way to balance a vLLM's experts."""

    @property
    def name(self) -> str: ...

    @property
    def folder(self) -> str: ...

    async def run(self, python: Path, several: Sequence[Request], much: Plenty, folder: Path) -> Run:
        """Start a vLLM, send the requests, end it; leave the evidence in the folder."""


class EplbArm(NamedTuple):
    """vLLM's own load balancer."""

    interval: int
    """steps between rearrangements"""

    @property
    def name(self) -> str:
        return f"vLLM's EPLB, every {self.interval:,} steps"

    @property
    def folder(self) -> str:
        return f"eplb-{self.interval}"

    async def run(self, python: Path, several: Sequence[Request], much: Plenty, folder: Path) -> Run:
        server = Server(python, (STAND_INS, RECORDER), self.interval, environment={FOLDER: str(folder)})
        async with serving(server, folder / "vllm.log") as url:
            return await sent(url, several, much)


class RoostArm(NamedTuple):
    """Roost supplies the maps: router, tracker, planner, agent, and the plugin in vLLM's workers."""

    homes: bool = False
    """requests go to the rank that the planner gave their cluster"""
    settings: Settings = CADENCE

    @property
    def name(self) -> str:
        return "Roost, homes forced" if self.homes else "Roost"

    @property
    def folder(self) -> str:
        return "roost-homes" if self.homes else "roost"

    async def run(self, python: Path, several: Sequence[Request], much: Plenty, folder: Path) -> Run:
        forced = {"router": {"home_confidence": 0.0 if self.homes else 1.0}}
        async with fronted(python, {**self.settings, **forced}, folder) as fleet:
            run = await sent(fleet.router, several, much)
            (folder / "plans.txt").write_text(await fleet.command("status"))
            return run


class Fronted(NamedTuple):
    """A vLLM behind Roost."""

    vllm: str
    """URL"""
    router: str
    """URL"""
    nats: str
    """URL"""
    folder: Path

    async def command(self, *arguments: str) -> str:
        """Return the output of a `roost` command; RuntimeError if it fails."""
        done = await asyncio.to_thread(
            subprocess.run,
            [*COMMAND, *arguments, "--nats", self.nats],
            cwd=self.folder,
            env=environment(self.folder),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"roost {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}"
            )
        return done.stdout


@asynccontextmanager
async def fronted(
    python: Path, settings: Settings, folder: Path, flags: Sequence[str] = ()
) -> AsyncIterator[Fronted]:
    """Run a vLLM with the plugin, its agent, tracker, planner and router, each a process of its own, as an
    operator would; yield once a request can be routed and the planner knows the placement."""
    secret, agent = folder / "secret", free_port()
    secret.write_text("benchmark")
    secret.chmod(0o600)
    own = {FOLDER: str(folder), "ROOST_AGENT": f"127.0.0.1:{agent}", "ROOST_SECRET_FILE": str(secret)}
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{free_port()}",
        "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
        "topic": "",
    }
    server = Server(
        python,
        (STAND_INS, RECORDER, ROOST),
        NEVER,
        ("--kv-events-config", json.dumps(events), *flags),
        own,
    )
    vllm = {"listen": f"127.0.0.1:{agent}", "secret_file": str(secret)}
    (folder / "roost.toml").write_text(toml(_with(settings, "vllm", vllm)))
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(nats())
        behind = await stack.enter_async_context(serving(server, folder / "vllm.log"))
        door = free_port()
        for part in (
            ["worker", "--engine", "vllm", "--url", behind, "--name", ENGINE],
            ["tracker"],
            ["planner"],
            ["router", "--port", str(door)],
        ):
            await stack.enter_async_context(_part(part, url, folder))
        fleet = Fronted(behind, f"http://127.0.0.1:{door}", url, folder)
        await _joined(fleet)
        yield fleet


def _with(settings: Settings, section: str, keys: dict[str, Any]) -> dict[str, Any]:
    return {**settings, section: {**settings.get(section, {}), **keys}}


def _part(arguments: list[str], url: str, folder: Path) -> Any:
    """Run one part of Roost; its log lies in the folder."""
    log = folder / f"{arguments[0]}.log"
    command = [*COMMAND, *arguments, "--nats", url, "--config", str(folder / "roost.toml")]
    shell = ["bash", "-c", 'exec "$@" > "$0" 2>&1', str(log), *command]
    return process(shell, None, environment={"XDG_STATE_HOME": str(folder)})


async def _joined(fleet: Fronted) -> None:
    """Return once the router serves the model and the planner has a placement. TimeoutError says what the
    parts last said."""
    deadline = time.monotonic() + JOIN_SECONDS
    async with aiohttp.ClientSession(fleet.router) as http:
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, RuntimeError):  # until they are up
                async with http.get("/v1/models") as answer:
                    known = MODEL in await answer.text()
                if known and ENGINE in await fleet.command("placement"):
                    return
            await asyncio.sleep(1.0)
    said = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in fleet.folder.glob("*.log"))
    raise TimeoutError(f"{ENGINE} has not joined within {JOIN_SECONDS:g} s\n{said}")


async def sent(url: str, several: Sequence[Request], much: Plenty) -> Run:
    """Send the requests and keep what came back."""
    began = time.monotonic()
    answers = await send(url, MODEL, several, much)
    tokens = sum(answer.completion_tokens for answer in answers)
    return Run([answer.text for answer in answers], began, time.monotonic() - began, tokens, much)


async def run_or_read(
    arm: Arm, python: Path, several: Sequence[Request], much: Plenty, folder: Path
) -> tuple[Run, Path]:
    """Run an arm, or read the run of this load that the folder already holds. Returns also the folder with
    the counters."""
    place = folder / arm.folder
    found = _kept(place, much)
    if found is None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        found = await arm.run(python, several, much, place)
        (place / _DONE).write_bytes(msgspec.json.encode(found))
    return found, place


def _kept(folder: Path, much: Plenty) -> Run | None:
    file = folder / _DONE
    if not file.is_file():
        return None
    run = msgspec.json.decode(file.read_bytes(), type=Run)
    return run if run.much == much else None
