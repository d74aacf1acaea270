"""Child processes that die with this process, and units of them that fail and restart together.

A `Child` is one process in its own process group (a Ctrl-C in the terminal reaches the supervisor alone),
tied to this process by a parent-death signal, with its output in a log file. A `Unit` is one or more children
with a common lifetime: when one ends, the others are ended, and all restart after a growing pause. The number
of consecutive restarts is bounded.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.parent_death import wrapped

FINAL = 2
"""Exit status of a child that would fail again in the same way: its unit is not restarted."""
Say = Callable[[str], None]


class UnitFailed(Exception):
    """Unit that cannot be started or restarted; the text names the child, its exit and the end of its log."""


@dataclass(frozen=True, slots=True)
class Command:
    """One process to run. `keep`: file descriptors that it inherits."""

    name: str
    arguments: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    keep: tuple[int, ...] = ()


async def _nothing() -> None:
    """Return at once: readiness check of units without one."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One run of a unit. `ready` returns when it serves; `healthy` raises OSError or TimeoutError when it
    does not answer."""

    commands: Sequence[Command]
    ready: Callable[[], Awaitable[None]] = _nothing
    healthy: Callable[[], Awaitable[None]] | None = None
    started: Callable[[], None] = lambda: None
    """called once all processes run; inherited descriptors can then be closed"""


@dataclass(frozen=True, slots=True)
class Policy:
    """Time limits and restart policy; seconds."""

    ready_seconds: float = 120.0
    grace_seconds: float = 5.0
    """from SIGTERM to SIGKILL"""
    crash_grace_seconds: float = 1.5
    """from SIGTERM to SIGKILL for the survivors of a unit that lost a process"""
    first_pause_seconds: float = 0.2
    longest_pause_seconds: float = 10.0
    failures: int = 6
    """consecutive failures allowed; one more is final"""
    steady_seconds: float = 30.0
    """an incarnation that lasts this long resets the count"""
    health_seconds: float = 5.0
    health_misses: int = 3

    def pause(self, failures: int) -> float:
        """Return the pause before the next start after `failures` consecutive failures (1 or more): doubling,
        bounded."""
        return min(self.longest_pause_seconds, self.first_pause_seconds * 2.0 ** (failures - 1))


class Child:
    """Running process."""

    def __init__(self, command: Command, process: asyncio.subprocess.Process) -> None:
        self.command = command
        self._process = process

    @classmethod
    async def start(cls, command: Command) -> "Child":
        """Start the command, tied to this process. Raises OSError if Python cannot be run or the log not be
        written."""
        with command.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *wrapped(command.arguments, os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(command.environment),
                pass_fds=command.keep,
                process_group=0,
            )
        return cls(command, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.ended is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, grace: float) -> None:
        """Stop the process: SIGTERM, then SIGKILL, which also ends a stopped process."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), grace)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.wait()

    def ending(self) -> str:
        """Describe how the process ended."""
        status = self.ended
        if status is None:
            return f"{self.command.name} runs"
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{self.command.name} {how}"


ERROR_PREFIX = "roost: "
"""Prefix of the last log lines of a Roost process (`deploy.process.print_error`)."""


def tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log, indented: only the final error lines if there are any; empty for an
    empty or missing log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    shown = text.splitlines()[-lines:]
    errors = [line for line in shown if line.startswith(ERROR_PREFIX)]
    return "".join(f"\n    {line}" for line in errors[-1:] or shown)


class Unit:
    """Keep one unit running while the context lasts.

    launch: creates each incarnation, with new ports and a new identity. group: units that serve in each
    other's place. Health probes end one of them at a time: on an overloaded machine none answers in time, and
    restarting all of them at once would leave none.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[[], Awaitable[Incarnation]],
        policy: Policy,
        say: Say,
        group: Sequence["Unit"] = (),
    ) -> None:
        self.name = name
        self._group = group
        self.children: list[Child] = []
        self.launch = launch
        self._policy = policy
        self._say = say
        self._ready = asyncio.Event()
        self._ever_ready = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to supervise the unit."""
        self._task = asyncio.create_task(self._keep_up(), name=f"keep {self.name} up")

    async def stop(self) -> None:
        """End its processes permanently; bounded by the grace period."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def __aenter__(self) -> "Unit":
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def is_ready(self) -> bool:
        """Return whether the current incarnation serves."""
        return self._ready.is_set()

    @property
    def is_given_up(self) -> bool:
        """Return whether the unit will not be restarted."""
        return self._task is not None and self._task.done()

    async def failed(self) -> None:
        """Wait; raise UnitFailed when the unit is given up."""
        if self._task is None:
            raise RuntimeError(f"{self.name} was not started")
        await asyncio.shield(self._task)

    async def ready(self) -> None:
        """Return when the current incarnation serves (at once if it does). Raises UnitFailed if the unit is
        given up before."""
        waiter = asyncio.create_task(self._ready.wait(), name=f"wait for {self.name}")
        failure = asyncio.create_task(self.failed(), name=f"watch {self.name}")
        try:
            await asyncio.wait([waiter, failure], return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                failure.result()
        finally:
            for task in (waiter, failure):
                task.cancel()
            await asyncio.gather(waiter, failure, return_exceptions=True)

    def kill(self) -> None:
        """Kill every process at once, after a second Ctrl-C."""
        for child in self.children:
            child.signal(signal.SIGKILL)

    async def _keep_up(self) -> None:
        clock = asyncio.get_running_loop().time
        failures = 0
        while True:
            started_at = clock()
            reason = await self._live()
            failures = 1 if clock() - started_at > self._policy.steady_seconds else failures + 1
            if (
                not self._ever_ready
                or failures > self._policy.failures
                or any(child.ended == FINAL for child in self.children)
            ):
                raise UnitFailed(f"{self.name}: {reason}{self._log_ends()}")
            pause = self._policy.pause(failures)
            self._say(f"{self.name}: {reason}; starting it again in {pause:.1f} s")
            await asyncio.sleep(pause)

    async def _live(self) -> str:
        """Run one incarnation, from launch to the end of the last process; return the reason of its end."""
        self.children = []
        grace = self._policy.grace_seconds
        try:
            incarnation = await self.launch()
            try:
                for command in incarnation.commands:
                    self.children.append(await Child.start(command))
            finally:
                incarnation.started()
            reason = await self._watch(incarnation)
            grace = self._policy.crash_grace_seconds
            return reason
        finally:
            self._ready.clear()
            await asyncio.gather(*(child.stop(grace) for child in self.children))

    async def _watch(self, incarnation: Incarnation) -> str:
        """Wait until a child ends, readiness fails, or health is lost; return the reason."""
        ends = [
            asyncio.create_task(child.wait(), name=f"wait for the end of {child.command.name}")
            for child in self.children
        ]
        probing = asyncio.create_task(self._probe(incarnation), name=f"probe {self.name}")
        try:
            await asyncio.wait([*ends, probing], return_when=asyncio.FIRST_COMPLETED)
            ended = [child.ending() for child, end in zip(self.children, ends, strict=True) if end.done()]
            return ", ".join(ended) if ended else probing.result()
        finally:
            for task in (*ends, probing):
                task.cancel()
            await asyncio.gather(*ends, probing, return_exceptions=True)

    async def _probe(self, incarnation: Incarnation) -> str:
        """Wait for readiness, then probe health forever; return the reason when either fails."""
        try:
            async with asyncio.timeout(self._policy.ready_seconds):
                await incarnation.ready()
        except TimeoutError:
            return f"not ready after {self._policy.ready_seconds:.0f} s"
        if self._ever_ready:
            self._say(f"{self.name} serves again")
        self._ever_ready = True
        self._ready.set()
        misses = 0
        while misses < self._policy.health_misses or self._is_needed():
            await asyncio.sleep(self._policy.health_seconds)
            misses = 0 if await self._answers(incarnation) else misses + 1
        self._ready.clear()  # at once: the others of the group look at it
        return f"no answer to {misses} health probes"

    def _is_needed(self) -> bool:
        """True while another unit of the group restarts: until it serves, this one may be all that clients
        have."""
        return any(not unit.is_ready and not unit.is_given_up for unit in self._group if unit is not self)

    async def _answers(self, incarnation: Incarnation) -> bool:
        if incarnation.healthy is None:
            return True
        try:
            async with asyncio.timeout(self._policy.health_seconds):
                await incarnation.healthy()
        except (OSError, TimeoutError):
            return False
        return True

    def _log_ends(self) -> str:
        """Return the end of the logs of the children that ended on their own account, else of all."""
        guilty = [
            child for child in self.children if child.ended not in (None, 0, -signal.SIGTERM, -signal.SIGKILL)
        ] or self.children
        return "".join(f"\n  {child.command.log}:{tail(child.command.log)}" for child in guilty)
