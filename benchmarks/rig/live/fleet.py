"""One real fleet on this machine, with a roost.toml that is rewritten at run time: `roost up` and `roost` as
a user runs them.

NATS, router, tracker, planner and ranks are separate processes; they end with the context, also when this
process is killed.
"""

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rig.processes import ROOST, ROOT
from deploy.local.parent_death import wrapped

START_SECONDS = 120.0
COMMAND_SECONDS = 120.0
STOP_SECONDS = 30.0
RESTART_SECONDS = 30.0
Settings = Mapping[str, Mapping[str, Any]]
"""by section and key of roost.toml"""


def toml(settings: Settings) -> str:
    """Return the settings as roost.toml. Text, numbers, booleans and lists of them have the same form in JSON
    and TOML."""
    return "\n".join(
        f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        for section, keys in settings.items()
    )


def merged(*several: Settings) -> dict[str, dict[str, Any]]:
    """Merge settings key by key; later ones win."""
    found: dict[str, dict[str, Any]] = {}
    for settings in several:
        for section, keys in settings.items():
            found.setdefault(section, {}).update(keys)
    return found


class LiveFleet:
    """Running `roost up` in a temporary folder. `nats` and `router` are URLs."""

    def __init__(self, folder: Path, up: asyncio.subprocess.Process, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings
        self.nats = ""
        self.router = ""
        self.credentials: Path | None = None
        """the operator's credentials for its NATS server"""
        self._up = up

    @property
    def _environment(self) -> dict[str, str]:
        return environment(self.folder)

    async def started(self) -> None:
        """Return once it serves. Raises RuntimeError with its output if it ends before, or TimeoutError."""
        output = self.folder / "up.out"
        async with asyncio.timeout(START_SECONDS):
            while "Ctrl-C stops everything" not in output.read_text():
                self.check()
                await asyncio.sleep(0.05)
        running = json.loads(next(self.folder.glob("roost/run-*/running.json")).read_text())
        self.nats, self.router, self.credentials = (
            running["nats"],
            running["router"],
            Path(running["credentials"]) / "operator.json",
        )

    def check(self) -> None:
        """Raise RuntimeError if `roost up` has ended."""
        if self._up.returncode is not None:
            raise RuntimeError(
                f"roost up ended with {self._up.returncode}; it said:"
                f" {(self.folder / 'up.out').read_text()[-2000:]}"
            )

    async def command(self, *arguments: str) -> str:
        """Return the output of a successful `roost` command. Raises RuntimeError with its error output."""
        process = await asyncio.create_subprocess_exec(
            *ROOST,
            *arguments,
            cwd=self.folder,
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(COMMAND_SECONDS):
            out, errors = await process.communicate()
        if process.returncode != 0:
            raise RuntimeError(
                f"roost {' '.join(arguments)} ended with {process.returncode}:"
                f" {errors.decode().strip()[-2000:]} {out.decode().strip()[-500:]}"
            )
        return out.decode()

    async def reload(self, settings: Settings) -> None:
        """Rewrite roost.toml and reload it. Raises RuntimeError if it is refused; the fleet then keeps its
        settings."""
        (self.folder / "roost.toml").write_text(toml(settings))
        await self.command("reload", "--nats", self.nats)
        self.settings = settings

    async def restart(self, part: str, between: Callable[[], None] = lambda: None) -> None:
        """Kill a part (tracker, planner); the supervisor restarts it. between: called while the part is
        down."""
        before = self.processes()[part]
        ready = next(self.folder.glob("roost/run-*/")) / f"{part}.ready"
        before.kill()
        between()
        async with asyncio.timeout(RESTART_SECONDS):
            while self.processes().get(part, before).pid == before.pid or not ready.exists():  # noqa: ASYNC110 processes tell nobody
                await asyncio.sleep(0.05)

    async def forget_traffic(self) -> None:
        """Reset the tracker to its initial state."""
        state = next(self.folder.glob("roost/run-*/")) / "tracker.state"
        await self.restart("tracker", lambda: state.unlink(missing_ok=True))

    def processes(self) -> dict[str, psutil.Process]:
        """Return the processes by name: nats, router, tracker, planner, engine-0/1 ..."""
        found: dict[str, psutil.Process] = {}
        for process in psutil.Process(self._up.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                name = _name(process.cmdline())
                if name is not None:
                    found[name] = process
        return found

    def log(self, part: str, size: int = 4000) -> str:
        """Return the end of a part's log."""
        return next(self.folder.glob(f"roost/run-*/{part.replace('/', '-')}.log")).read_text()[-size:]


def _name(command: list[str]) -> str | None:
    if not command:
        return None
    if not command[-1].startswith('{"part"'):
        return "nats" if "nats-server" in command[0] else None
    order = json.loads(command[-1])
    return (
        f"{order['rank']['engine']}/{order['rank']['rank']}"
        if order["part"] == "rank"
        else str(order["part"])
    )


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a user whose settings are all in one file."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROOST_", "OTEL_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder)}


@asynccontextmanager
async def live_fleet(settings: Settings) -> AsyncIterator[LiveFleet]:
    """Run a fleet with these settings; it is ended, and its files removed, with the context."""
    folder = Path(tempfile.mkdtemp(prefix="roost-live-"))
    (folder / "roost.toml").write_text(toml(settings))
    with (folder / "up.out").open("wb") as out:
        command = wrapped([*ROOST, "up", "--port", "0"], os.getpid())
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env=environment(folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            process_group=0,
        )
    fleet = LiveFleet(folder, process, settings)
    try:
        await fleet.started()
        yield fleet
    finally:
        await _end(process)
        shutil.rmtree(folder, ignore_errors=True)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process as Ctrl-C does, and kill it if necessary."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    began = time.monotonic()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise RuntimeError(
            f"roost up did not end within {time.monotonic() - began:.0f} s, and was killed"
        ) from None
