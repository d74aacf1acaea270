"""Child processes that die with us, and units of them that fail and restart as one.

A `Child` is one process in its own process group (a Ctrl-C in the terminal reaches the supervisor alone), tied to us by a
parent-death signal, its output in a log file. A `Unit` is one or more children that live and die together: when one ends,
the others are ended and all start anew, after a growing pause, a bounded number of times in a row.
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
    """A unit cannot be brought (back) up; the text says which child, how it ended, and shows the end of its log."""


@dataclass(frozen=True, slots=True)
class Command:
    """One process to run. `keep` are file descriptors it inherits."""

    name: str
    arguments: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    keep: tuple[int, ...] = ()


async def _nothing() -> None:
    """For units that are ready as soon as they run."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of a unit. `ready` returns when it serves; `healthy` raises OSError or TimeoutError when it does not answer."""

    commands: Sequence[Command]
    ready: Callable[[], Awaitable[None]] = _nothing
    healthy: Callable[[], Awaitable[None]] | None = None
    started: Callable[[], None] = lambda: None
    """called when all processes run: what they inherited can be closed"""


@dataclass(frozen=True, slots=True)
class Policy:
    """How long to wait and how often to try; seconds."""

    ready_seconds: float = 120.0
    grace_seconds: float = 5.0
    """between SIGTERM and SIGKILL"""
    crash_grace_seconds: float = 1.5
    """the same for the survivors of a unit that lost a process"""
    first_pause_seconds: float = 0.2
    longest_pause_seconds: float = 10.0
    failures: int = 6
    """in a row; one more is final"""
    steady_seconds: float = 30.0
    """a life of this length starts the count anew"""
    health_seconds: float = 5.0
    health_misses: int = 3

    def pause(self, failures: int) -> float:
        """Seconds to wait before the next life, after so many failures in a row (1 or more): doubling, bounded."""
        return min(self.longest_pause_seconds, self.first_pause_seconds * 2.0 ** (failures - 1))


class Child:
    """A running process."""

    def __init__(self, command: Command, process: asyncio.subprocess.Process) -> None:
        self.command = command
        self._process = process

    @classmethod
    async def start(cls, command: Command) -> "Child":
        """Start it, tied to this process. OSError when even Python cannot be run, or the log not be written."""
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
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.ended is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, grace: float) -> None:
        """End it: politely, then surely. SIGKILL also ends a stopped process."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), grace)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.wait()

    def epitaph(self) -> str:
        """How it ended."""
        status = self.ended
        if status is None:
            return f"{self.command.name} runs"
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{self.command.name} {how}"


WORDS = "roost: "
"""What the last words of a Roost process begin with (`deploy.process.print_error`)."""


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, indented: only its last words when it has some; nothing when it is empty or missing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    shown = text.splitlines()[-lines:]
    said = [line for line in shown if line.startswith(WORDS)]
    return "".join(f"\n    {line}" for line in said[-1:] or shown)


class Unit:
    """Keeps one unit up while its context lasts. `launch` makes each life: new ports, a new identity."""

    def __init__(self, name: str, launch: Callable[[], Awaitable[Incarnation]], policy: Policy, say: Say) -> None:
        self.name = name
        self.children: list[Child] = []
        self._launch = launch
        self._policy = policy
        self._say = say
        self._ready = asyncio.Event()
        self._ever_ready = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to keep the unit up."""
        self._task = asyncio.create_task(self._keep_up(), name=f"keep {self.name} up")

    async def stop(self) -> None:
        """End its processes, for good; bounded by the grace period."""
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
        """Whether the present life serves."""
        return self._ready.is_set()

    @property
    def is_given_up(self) -> bool:
        """Whether it will not be started again."""
        return self._task is not None and self._task.done()

    async def failed(self) -> None:
        """Return never; raise UnitFailed when the unit is given up."""
        if self._task is None:
            raise RuntimeError(f"{self.name} was not started")
        await asyncio.shield(self._task)

    async def ready(self) -> None:
        """Return when the present life serves (at once if it does). UnitFailed when it is given up before."""
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
        """End every process at once, for a user in a hurry."""
        for child in self.children:
            child.signal(signal.SIGKILL)

    async def _keep_up(self) -> None:
        clock = asyncio.get_running_loop().time
        failures = 0
        while True:
            born = clock()
            reason = await self._live()
            failures = 1 if clock() - born > self._policy.steady_seconds else failures + 1
            if not self._ever_ready or failures > self._policy.failures or any(child.ended == FINAL for child in self.children):
                raise UnitFailed(f"{self.name}: {reason}{self._last_words()}")
            pause = self._policy.pause(failures)
            self._say(f"{self.name}: {reason}; starting it again in {pause:.1f} s")
            await asyncio.sleep(pause)

    async def _live(self) -> str:
        """One life, from launch to the end of the last process; returns what ended it."""
        self.children = []
        grace = self._policy.grace_seconds
        try:
            incarnation = await self._launch()
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
        """Until a child ends, readiness fails, or health is lost; returns the reason."""
        ends = [asyncio.create_task(child.wait(), name=f"wait for the end of {child.command.name}") for child in self.children]
        course = asyncio.create_task(self._course(incarnation), name=f"probe {self.name}")
        try:
            await asyncio.wait([*ends, course], return_when=asyncio.FIRST_COMPLETED)
            ended = [child.epitaph() for child, end in zip(self.children, ends, strict=True) if end.done()]
            return ", ".join(ended) if ended else course.result()
        finally:
            for task in (*ends, course):
                task.cancel()
            await asyncio.gather(*ends, course, return_exceptions=True)

    async def _course(self, incarnation: Incarnation) -> str:
        """Readiness, then health for ever; returns when either fails."""
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
        while misses < self._policy.health_misses:
            await asyncio.sleep(self._policy.health_seconds)
            misses = 0 if await self._answers(incarnation) else misses + 1
        return f"no answer to {misses} health probes"

    async def _answers(self, incarnation: Incarnation) -> bool:
        if incarnation.healthy is None:
            return True
        try:
            async with asyncio.timeout(self._policy.health_seconds):
                await incarnation.healthy()
        except (OSError, TimeoutError):
            return False
        return True

    def _last_words(self) -> str:
        """The end of the logs of those that ended by themselves, else of all."""
        guilty = [child for child in self.children if child.ended not in (None, 0, -signal.SIGTERM, -signal.SIGKILL)] or self.children
        return "".join(f"\n  {child.command.log}:{tail(child.command.log)}" for child in guilty)
