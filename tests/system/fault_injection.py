"""What goes wrong in a running fleet, at times and places that a seed decides; each mishap says what it did.

The supervisor gives a unit up that ends seven times in a row within half a minute of its start, as it should.
A unit that was killed is therefore left alone until it has run for longer than that.
"""

import asyncio
import contextlib
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
import numpy as np
import psutil

from bus import BusError, Declined
from deploy.local.fleet import FLEET_SECRET
from deploy.local.supervise import Policy
from fleet.facts.migrations import MigrationPlanned
from fleet.layout import AttentionKind
from fleet.requests.control_loop import LoopDescribed, SetLoopState
from fleet.requests.plans import RollBack, SetLayout
from fleet.shared_secret import SharedSecret
from tests.faults.plans import Impossible, series
from tests.faults.records import Records
from tests.system.fleets import Fleet
from tests.system.load_clients import TAG_LENGTH, Open, Outcomes

SETTLED_SECONDS = 240.0
"""the fleet is whole again after a mishap within this time, at the latest"""
LOOK_SECONDS = 10.0
"""of one look at whether it is"""
LONE_SHARE = 0.7
"""of the mishaps are waited for; others overlap with the next one"""
ORDER_SECONDS = 90.0
PAUSE_SECONDS = (3.0, 12.0)
PARTS = ("planner", "tracker", "router-0", "router-1", "nats")
GENTLE = "router stopped gently"
SPARED_AT_FIRST = ("engine-1", "tracker", "router-1")
"""Nobody kills these in the first half of the time, nor the others in the second: so each lives long enough
to show whether it grows."""


@dataclass(frozen=True, slots=True)
class Mishap:
    """Seconds since the beginning."""

    at: float
    what: str
    on: str
    detail: str = ""
    whole_after: float | None = None
    """seconds until the fleet was whole again; None: it was not waited for"""


@dataclass(frozen=True, slots=True)
class RouterKill:
    """A router process that was killed at once. Seconds of the event loop."""

    at: float
    tag: str
    """what its decisions' ids began with; empty: it did not say"""


@dataclass
class GentleStop:
    """A router process that was asked to stop, as a rolling update does. Seconds of the event loop."""

    at: float
    router: str
    tag: str
    streams: list[Open]
    """that it was answering then; what became of each is said by themselves"""
    others: list[Open]
    """not streamed, or without a head yet: it is not known which process answers them"""
    gone_after: float | None = None
    """seconds until the process had ended"""


@dataclass
class Happened:
    """So far."""

    mishaps: list[Mishap] = field(default_factory=list)
    router_kills: list[RouterKill] = field(default_factory=list)
    gentle_stops: list[GentleStop] = field(default_factory=list)
    stores_lost: list[float] = field(default_factory=list)
    forgotten: set[str] = field(default_factory=set)
    """plans that had begun when a store was lost: nobody may be able to say how they ended"""
    orders: dict[str, int] = field(default_factory=dict)
    """operators' orders, by what became of them"""
    layouts: Counter[str] = field(default_factory=Counter)
    """operators' orders of a layout, by engine"""
    wrong: list[str] = field(default_factory=list)


class Mischief:
    """Goes on at random intervals while `go_on` runs, for so many seconds."""

    def __init__(
        self,
        fleet: Fleet,
        http: aiohttp.ClientSession,
        records: Records,
        outcomes: Outcomes,
        dice: np.random.Generator,
        *,
        engines: int,
        ranks: int,
        seconds: float,
        drain_seconds: float,
        simulated: bool,
        layouts: bool = False,
    ) -> None:
        """told: what users get. drain_seconds: a router's. simulated: all ranks of an engine are one
        process."""
        self.happened = Happened()
        self._fleet = fleet
        self._http = http
        self._records = records
        self._dice = dice
        self._engines = tuple(f"engine-{number}" for number in range(engines))
        self._ranks = ranks
        self._outcomes = outcomes
        self._drain_seconds = drain_seconds
        self._simulated = simulated
        self._stopping: set[str] = set()
        """routers that have been asked to stop and have not ended"""
        self._seeing_off: asyncio.Task[None] | None = None
        self._seconds = seconds
        self._killed: dict[str, float] = {}
        self._lives: dict[str, int] = {}
        """by engine that was killed: joins on record before that"""
        self._began = asyncio.get_running_loop().time()
        self.kinds: Mapping[str, tuple[float, Callable[[], Awaitable[tuple[str, str] | None]]]] = {
            "engine killed" if simulated else "rank killed": (
                3.0,
                self._kill_an_engine if simulated else self._kill_a_rank,
            ),
            GENTLE: (2.5, self._stop_a_router),
            "planner killed": (2.0, lambda: self._kill("planner")),
            "tracker killed": (1.5, lambda: self._kill("tracker")),
            "router killed": (2.0, self._kill_a_router),
            "NATS killed": (1.5, lambda: self._kill("nats")),
            "NATS lost its store": (0.5, self._lose_the_store),
            "KV events lost": (1.0 if simulated else 0.0, self._lose_kv_events),
            "loop paused": (1.5, self._pause),
            "experts moved by hand": (2.5, self._move),
            "rolled back by hand": (1.0, self._roll_back),
            "layout set by hand": (2.0 if layouts else 0.0, self._set_layout),
        }

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return asyncio.get_running_loop().time() - self._began

    async def go_on(self, every: float, say: Callable[[str], None]) -> None:
        """At exponential intervals of this mean; returns when the fleet is whole again after the last one."""
        names = list(self.kinds)
        weights = np.array([self.kinds[name][0] for name in names])
        while True:
            pause = float(self._dice.exponential(every))
            if self.now + pause >= self._seconds:
                await asyncio.sleep(max(self._seconds - self.now, 0.0))
                break
            await asyncio.sleep(pause)
            name = str(self._dice.choice(names, p=weights / weights.sum()))
            lone = (
                self._dice.random() < LONE_SHARE and name != GENTLE
            )  # which takes minutes, and other things go wrong meanwhile
            began = self.now
            found = await self.kinds[name][1]()
            if found is None:
                continue  # its victim is spared at present
            whole = await self.wholeness(name) if lone else None
            self.happened.mishaps.append(Mishap(began, name, found[0], found[1], whole))
            say(
                f"{began:7.1f} s  {name}:"
                f" {' '.join(found)}{'' if whole is None else f'; whole again after {whole:.1f} s'}"
            )
        if self._seeing_off is not None:
            await self._seeing_off
        await self.wholeness("everything")

    async def wholeness(self, what: str) -> float:
        """Seconds until everybody serves again. Routers that were asked to stop are not waited for."""
        began = self.now
        while not await self._whole():
            if self.now - began > SETTLED_SECONDS:
                message = (
                    f"{began:.1f} s: not whole {SETTLED_SECONDS:.0f} s after {what}; processes:"
                    f" {sorted(self._fleet.processes())}"
                )
                self.happened.wrong.append(message)
                break
            await asyncio.sleep(0.2)
        return self.now - began

    async def _whole(self) -> bool:
        there = set(await asyncio.to_thread(self._fleet.processes))
        ranks = {
            engine if self._simulated else f"{engine}/{rank}"
            for engine in self._engines
            for rank in range(self._ranks)
        }
        if not {*PARTS, *ranks} - self._stopping <= there:
            return False
        if any(len(self._records.history(engine).joins) <= joins for engine, joins in self._lives.items()):
            return False
        try:
            for number, url in enumerate(self._fleet.routers):
                if f"router-{number}" in self._stopping:
                    continue
                limit = aiohttp.ClientTimeout(total=LOOK_SECONDS)
                async with self._http.post(
                    f"{url}/v1/route", json=self._fleet.body(), timeout=limit
                ) as answer:
                    if answer.status != 200 or len((await answer.json())["candidates"]) != sum(
                        map(self._targets, self._engines)
                    ):
                        return False
        except (aiohttp.ClientError, TimeoutError):
            return False
        return True

    def _targets(self, engine: str) -> int:
        """Where requests of an engine can go: under tensor-parallel attention to all its ranks together."""
        history = self._records.history(engine)
        return 1 if history.placements and history.latest.attention == "tp" else self._ranks

    # processes

    def _may(self, unit: str) -> bool:
        """Whether it was left alone for long enough, and is not spared."""
        if (unit in SPARED_AT_FIRST) == (self.now < self._seconds / 2):
            return False
        if self.now - self._killed.get(unit, -1e9) < Policy().steady_seconds + 10.0:
            return False
        self._killed[unit] = self.now
        return True

    async def _kill(self, part: str) -> tuple[str, str] | None:
        process = (await asyncio.to_thread(self._fleet.processes)).get(part)
        if process is None or not self._may(part):
            return None
        _end(process)
        return part, f"pid {process.pid}"

    async def _tag_of(self, number: int) -> str:
        """What the decisions' ids of a router process begin with; empty when it does not say."""
        limit = aiohttp.ClientTimeout(total=LOOK_SECONDS)
        try:
            async with self._http.post(
                f"{self._fleet.routers[number]}/v1/route", json=self._fleet.body(), timeout=limit
            ) as answer:
                return str((await answer.json())["id"])[:TAG_LENGTH] if answer.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError, KeyError):
            return ""

    async def _kill_a_router(self) -> tuple[str, str] | None:
        number = int(self._dice.integers(2))
        if f"router-{1 - number}" in self._stopping or f"router-{number}" in self._stopping:
            return None  # two at once is a fleet that is down
        tag = await self._tag_of(number)
        found = await self._kill(f"router-{number}")
        if found is not None:
            self.happened.router_kills.append(RouterKill(asyncio.get_running_loop().time(), tag))
        return found

    async def _stop_a_router(self) -> tuple[str, str] | None:
        """Ask one to stop, and look at what becomes of the streams that it answers. The other one serves
        meanwhile."""
        number = int(self._dice.integers(2))
        name, other = f"router-{number}", f"router-{1 - number}"
        process = (await asyncio.to_thread(self._fleet.processes)).get(name)
        young = self.now - self._killed.get(other, -1e9) < Policy().steady_seconds
        if process is None or self._stopping or young:
            return None
        tag = await self._tag_of(number)
        if not tag or not self._may(name):
            return None
        now = asyncio.get_running_loop().time()
        streams = [one for one in self._outcomes.open if one.stream and one.tag == tag]
        stop = GentleStop(now, name, tag, streams, [one for one in self._outcomes.open if not one.tag])
        self.happened.gentle_stops.append(stop)
        self._stopping.add(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
        self._seeing_off = asyncio.create_task(self._see_off(stop, process), name=f"sees {name} off")
        return name, f"pid {process.pid}, {len(streams)} streams open"

    async def _see_off(self, stop: GentleStop, process: psutil.Process) -> None:
        """Note when it has ended."""
        limit = self._drain_seconds + 60.0
        try:
            await asyncio.to_thread(process.wait, limit)
        except psutil.TimeoutExpired:
            self.happened.wrong.append(
                f"{stop.router} (pid {process.pid}) had not ended {limit:.0f} s after it was asked to stop"
            )
        stop.gone_after = asyncio.get_running_loop().time() - stop.at
        self._killed[stop.router] = self.now
        self._stopping.discard(stop.router)

    async def _kill_a_rank(self) -> tuple[str, str] | None:
        engine, rank = str(self._dice.choice(self._engines)), int(self._dice.integers(self._ranks))
        process = (await asyncio.to_thread(self._fleet.processes)).get(f"{engine}/{rank}")
        others_young = any(
            self.now - self._killed.get(other, -1e9) < Policy().steady_seconds
            for other in self._engines
            if other != engine
        )
        if process is None or others_young or not self._may(engine):
            return None  # the other one may not serve yet: two at once is a fleet that is down
        self._lives[engine] = len(self._records.history(engine).joins)
        _end(process)
        return f"{engine}/{rank}", f"pid {process.pid}"

    async def _kill_an_engine(self) -> tuple[str, str] | None:
        """All ranks of a simulated engine at once: they are one process."""
        engine = str(self._dice.choice(self._engines))
        process = (await asyncio.to_thread(self._fleet.processes)).get(engine)
        others_young = any(
            self.now - self._killed.get(other, -1e9) < Policy().steady_seconds
            for other in self._engines
            if other != engine
        )
        if process is None or others_young or not self._may(engine):
            return None
        self._lives[engine] = len(self._records.history(engine).joins)
        _end(process)
        return engine, f"pid {process.pid}"

    async def _lose_kv_events(self) -> tuple[str, str] | None:
        """Some are never reported, so that routers find gaps and ask for snapshots, which are large."""
        engine = str(self._dice.choice(self._engines))
        joins = self._records.history(engine).joins
        if not joins:
            return None
        limit = aiohttp.ClientTimeout(total=LOOK_SECONDS)
        order = {"fault": "lose_kv_events", "seconds": 5.0, "share": 0.2}
        try:
            secret = SharedSecret.parse((self._fleet.run_directory / FLEET_SECRET).read_text())
            headers = {"authorization": secret.authorization}
            async with self._http.post(
                f"{joins[-1].urls[0]}/simulate", json=order, headers=headers, timeout=limit
            ) as answer:
                return engine, f"status {answer.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return engine, f"not told: {error!r}"

    async def _lose_the_store(self) -> tuple[str, str] | None:
        """It is killed, and finds nothing when it is started again."""
        found = await self._kill("nats")
        if found is None:
            return None
        store = self._fleet.run_directory / "nats" / "store"
        lost = store.with_name(f"lost-{self.now:.0f}")
        store.rename(lost)
        await asyncio.to_thread(shutil.rmtree, lost)
        self.happened.stores_lost.append(asyncio.get_running_loop().time())
        self.happened.forgotten |= {
            message.plan for history in self._records.histories.values() for message in history.migrations
        }
        return found

    # the planner's work

    async def _pause(self) -> tuple[str, str] | None:
        """The loop; meanwhile the planner begins nothing of its own."""
        started = await self.steer(paused=True)
        if started is None:
            return "planner", "nobody answers"
        await asyncio.sleep(1.0)  # what was begun before it, as it is heard here
        known = {engine: self._own_plans(engine) for engine in self._engines}
        lost = len(self.happened.stores_lost)
        seconds = float(self._dice.uniform(*PAUSE_SECONDS))
        await asyncio.sleep(seconds)
        begun = {engine: self._own_plans(engine) - known[engine] for engine in self._engines}
        if any(begun.values()) and lost == len(self.happened.stores_lost):
            self.happened.wrong.append(
                f"{self.now:.1f} s: while the loop was paused, plans were begun: {begun}"
            )
        resumed = await self.steer(paused=False)
        return "planner", f"for {seconds:.1f} s{'' if resumed else '; nobody answered when it was to go on'}"

    async def steer(self, *, paused: bool) -> LoopDescribed | None:
        """Until it is so. None: nobody did it in time."""
        deadline = self.now + ORDER_SECONDS
        while self.now < deadline:
            try:
                answer = await self._records.bus.request(
                    self._records.subjects.loop, SetLoopState(paused=paused, reason="the soak says so"), 3.0
                )
            except BusError:
                await asyncio.sleep(0.5)
                continue
            if isinstance(answer, LoopDescribed) and answer.paused == paused:
                return answer
            self.happened.wrong.append(
                f"{self.now:.1f} s: asked for paused = {paused}, the planner answers {answer!r}"[:500]
            )
            return None
        return None

    def _own_plans(self, engine: str) -> frozenset[str]:
        return frozenset(
            one.plan
            for one in self._records.history(engine).migrations
            if isinstance(one, MigrationPlanned) and one.origin == "planner"
        )

    async def _move(self) -> tuple[str, str] | None:
        engine, handovers = str(self._dice.choice(self._engines)), int(self._dice.integers(1, 5))
        return engine, await self.move(engine, handovers)

    async def move(self, engine: str, handovers: int) -> str:
        """What became of an operator's order."""
        try:
            plan = series(self._records.history(engine).latest, self._dice, handovers)
            await self._records.order(engine, plan, ORDER_SECONDS, patiently=False)
        except (BusError, IndexError, Impossible) as error:
            return self._count(error)
        return self._count(None)

    async def _set_layout(self) -> tuple[str, str] | None:
        engine = str(self._dice.choice(self._engines))
        history = self._records.history(engine)
        if not history.placements:
            return None
        every = tuple(range(history.latest.layers))
        layouts: dict[str, tuple[tuple[int, ...], AttentionKind]] = {
            "ep": ((), "dp"),
            "experts-tp": (every, "dp"),
            "tp": (every, "tp"),
        }
        name = str(self._dice.choice(list(layouts)))
        self.happened.layouts[engine] += 1
        request = SetLayout(engine=engine, sharded=layouts[name][0], attention=layouts[name][1], now=True)
        try:
            await self._records.bus.request(self._records.subjects.migrate, request, 5.0)
        except BusError as error:
            return engine, f"{name}, {self._count(error)}"
        return engine, f"{name}, {self._count(None)}"

    async def _roll_back(self) -> tuple[str, str] | None:
        engine = str(self._dice.choice(self._engines))
        try:
            await self._records.bus.request(self._records.subjects.migrate, RollBack(engine=engine), 5.0)
        except BusError as error:
            return engine, self._count(error)
        return engine, self._count(None)

    def _count(self, error: Exception | None) -> str:
        match error:
            case None:
                outcome = "accepted"
            case Declined():
                outcome = "declined"
            case BusError():
                outcome = "nobody answered"
            case _:
                outcome = "nothing to move"
        self.happened.orders[outcome] = self.happened.orders.get(outcome, 0) + 1
        return outcome if error is None else f"{outcome}: {str(error)[:100]}"


def _end(process: psutil.Process) -> None:
    """At once; returns when it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
        process.wait(5)
