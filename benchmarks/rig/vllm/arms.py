"""Arms of the comparison: the same requests to a vLLM under its own load balancer, or under Roost.

Each run leaves its raw evidence in a folder: the recorder's counters by step, the answers, the times. A
folder that is complete is not run again, so a comparison can be made in parts.
"""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from benchmarks.rig.live.document_traffic import Request
from benchmarks.rig.live.fleet import Settings, merged
from benchmarks.rig.processes import free_port
from benchmarks.rig.vllm.fronted import Behind, Fronted, fronted, kv_events
from benchmarks.rig.vllm.load import Plenty, send
from benchmarks.rig.vllm.recorder.roost_recorder import FOLDER
from benchmarks.rig.vllm.server import MODEL, RECORDER, ROOST, STAND_INS, Server, serving

_DONE = "run.json"
NEVER = 1_000_000_000
"""step interval of a vLLM whose maps Roost supplies"""
ENGINE = "e0"
PLACED_SECONDS = 60.0
REPORT_SECONDS = 0.5
CADENCE: dict[str, dict[str, Any]] = {
    "planner": {
        "cycle_seconds": 3.0,
        "window_seconds": 45.0,
        "stale_seconds": 5.0,
        "evaluation_seconds": 15.0,
        "settle_seconds": 4.0,
        "cooldown_seconds": 60.0,
        "lifetime_seconds": 900.0,
    },
    "vllm": {"report_seconds": REPORT_SECONDS},
}
"""Fast settings: defaults are for hours, a benchmark lasts minutes."""


SHOWN = (
    ("status",),
    ("placement",),
    ("popularity",),
    ("plan", ENGINE),
    ("migrate", "--expert", "0/5", "--to", f"{ENGINE}/1", "--dry-run"),
)
"""commands whose output after a run is kept"""


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
        async with serving(server, folder / "vllm.log") as vllm:
            return await sent(vllm.url, several, much)


class RoostArm(NamedTuple):
    """Roost supplies the maps: router, tracker, planner, agent, and the plugin in vLLM's workers."""

    homes: bool = False
    """requests go to the rank that the planner gave their cluster. vLLM sends every token to every rank, so
    there would be no homes: agent and planner are made to believe otherwise (`Behind.is_dispatching`)"""
    settings: Settings = CADENCE

    @property
    def name(self) -> str:
        return "Roost, homes forced" if self.homes else "Roost"

    @property
    def folder(self) -> str:
        return "roost-homes" if self.homes else "roost"

    async def run(self, python: Path, several: Sequence[Request], much: Plenty, folder: Path) -> Run:
        homes = {"router": {"home_confidence": 0.0 if self.homes else 1.0}}
        settings = merged(self.settings, homes)
        async with commanded(python, settings, folder, is_dispatching=self.homes) as fleet:
            run = await sent(fleet.router, several, much)
            for shown in SHOWN:
                (folder / f"{shown[0]}.txt").write_text(await fleet.said(*shown))
            return run


@asynccontextmanager
async def commanded(
    python: Path, settings: Settings, folder: Path, *, is_dispatching: bool = False
) -> AsyncIterator[Fronted]:
    """Run a vLLM with the plugin, behind Roost; yield once it has joined with its placement."""
    secret, agent = folder / "secret", f"127.0.0.1:{free_port()}"
    secret.write_text("a secret of the benchmark")
    secret.chmod(0o600)
    own = {FOLDER: str(folder), "ROOST_AGENT": agent, "ROOST_SECRET_FILE": str(secret)}
    server = Server(python, (STAND_INS, RECORDER, ROOST), NEVER, kv_events(2), own)
    async with serving(server, folder / "vllm.log") as vllm:
        about = {"listen": agent, "secret_file": str(secret)}
        behind = Behind(ENGINE, vllm.url, about, is_dispatching)
        async with fronted([behind], settings, folder) as fleet:
            await _placed(fleet)
            yield fleet


async def _placed(fleet: Fronted) -> None:
    """Return once the planner knows the placement."""
    async with asyncio.timeout(PLACED_SECONDS):
        while ENGINE not in await fleet.command("placement"):  # noqa: ASYNC110 commands tell nothing on their own
            await asyncio.sleep(1.0)


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
