"""Roost before a real vLLM, as a user runs it: `roost up` without engines of its own, `roost worker --engine
vllm`, and a vLLM whose workers connect to that agent."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.rig.live.fleet import LiveFleet, environment, live_fleet, toml
from benchmarks.rig.processes import ROOST
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.client.migrations import PlanProgress, carried_out
from deploy.client.placements import Placements, placements
from deploy.local.parent_death import wrapped
from fleet.placement import Placement
from fleet.requests.plans import ApplyMap
from tests.vllm.server import SERVED

SETTINGS: dict[str, dict[str, Any]] = {
    "up": {"engines": 0},
    "planner": {"automatic": False},
    "vllm": {"load_seconds": 0.5, "report_seconds": 0.5},
}
NAME = "vllm"
PATIENCE_SECONDS = 240.0
"""time limit for anything to happen on a loaded machine"""


class Agent:
    """`roost worker --engine vllm`: to be killed and started again."""

    def __init__(self, live: LiveFleet, url: str, port: int, folder: Path, name: str = NAME) -> None:
        """folder: for its log, which outlives the fleet's own folder."""
        self._live = live
        self._url = url
        self.port = port
        self.name = name
        self.secret = live.folder / f"{name}.secret"
        self.log = folder / f"{name}.log"
        self._settings = live.folder / f"{name}.toml"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it. It waits for its vLLM by itself."""
        vllm = {**SETTINGS["vllm"], "secret_file": str(self.secret)}
        self._settings.write_text(toml({**SETTINGS, "vllm": vllm}))
        command = [*ROOST, "worker", "--engine", "vllm", "--url", self._url, "--name", self.name]
        command += ["--listen", f"127.0.0.1:{self.port}", "--nats", self._live.nats]
        command += ["--config", str(self._settings)]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *wrapped(command, os.getpid()),
                cwd=self._live.folder,
                env=environment(self._live.folder),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        await until(self.secret.exists, f"{self.name} writes its secret")

    @property
    def process(self) -> psutil.Process:
        """Its process, which must live."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    async def end(self) -> None:
        """Ask it to end, and wait for the end."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        await self.ended()

    async def ended(self) -> None:
        """Wait for the end."""
        assert self._process is not None
        async with asyncio.timeout(30):
            await self._process.wait()


@dataclass
class Fleet:
    """The fleet, and a connection to its bus."""

    live: LiveFleet
    bus: NatsBus
    subjects: Subjects
    said: list[str] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    """ids of the plans that the planner accepted"""

    @property
    def url(self) -> str:
        """URL of the router."""
        return self.live.router

    @property
    def targets(self) -> int:
        """The router is one target, whatever is behind it."""
        return 1

    async def now(self, name: str = NAME) -> Placements | None:
        """Return what an engine that has joined with its experts serves, by the records on the bus."""
        return (await placements(self.bus, self.subjects)).get(name)

    async def until_joined(self, name: str = NAME, *, other_than: int = 0) -> Placements:
        """Wait until an incarnation of an engine has joined with its experts."""
        found: list[Placements] = []

        async def there() -> bool:
            one = await self.now(name)
            if one is not None and one.joined.worker_id != other_than:
                found.append(one)
            return bool(found)

        await until(there, f"{name} joins with its experts")
        return found[0]

    async def apply(self, wanted: Placement, name: str = NAME) -> str:
        """Have a map brought into force, as `roost migrate --map` does. Return why it was not; empty: it
        is."""
        order = ApplyMap(engine=name, placement=wanted.record())
        progress = await carried_out(
            self.bus, self.subjects, order, wait=True, began=self._began, say=self.said.append
        )
        return "" if progress.aborted is None else progress.aborted.reason

    def _began(self, progress: PlanProgress) -> None:
        self.plans.append(progress.accepted.plan)

    async def command(self, *words: str) -> str:
        """Run a `roost` command before this fleet, and return its output. RuntimeError when it fails."""
        return await self.live.command(*words, "--nats", self.live.nats)


async def until(condition: Any, what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Look until something is so: other processes have no event to wait for."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        assert asyncio.get_running_loop().time() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.25)


def random_map(now: Placement, seed: int) -> Placement:
    """Return a random full map without an expert twice on a rank."""
    rng = np.random.default_rng(seed)
    rows = [_random_row(rng, now.experts, now.ranks, now.slots_per_rank) for _ in range(now.layers)]
    return Placement(np.array(rows), experts=now.experts, ranks=now.ranks)


def _random_row(rng: np.random.Generator, experts: int, ranks: int, width: int) -> list[int]:
    """Return one layer: all experts, and copies of some, none twice on a rank."""
    rows: list[list[int]] = [[] for _ in range(ranks)]
    for at, expert in enumerate(rng.permutation(experts).tolist()):
        rows[at % ranks].append(expert)
    for row in rows:
        others = np.setdiff1d(np.arange(experts), row)
        row += rng.choice(others, width - len(row), replace=False).tolist()
        rng.shuffle(row)
    return [expert for row in rows for expert in row]


@contextlib.asynccontextmanager
async def roost(folder: Path) -> AsyncIterator[Fleet]:
    """Router, tracker, planner and NATS, without an engine. folder: for the planner's log, which is kept."""
    async with live_fleet(SETTINGS) as live:
        config = BusConfig(urls=(live.nats,), credentials_file=live.credentials)
        subjects = Subjects(config.namespace)
        bus = await NatsBus.connect(live.nats, subjects, config, name="test")
        try:
            yield Fleet(live, bus, subjects)
        finally:
            await bus.close()
            (folder / "planner.log").write_text(live.log("planner", 1 << 20))


async def until_served(fleet: Fleet) -> None:
    """Wait until the router serves the model."""
    async with httpx.AsyncClient(timeout=5) as client:

        async def served() -> bool:
            answer = await client.get(f"{fleet.url}/v1/models")
            return answer.status_code == 200 and SERVED in answer.text

        await until(served, "the router serves the model")
