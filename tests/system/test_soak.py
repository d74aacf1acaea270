"""A fleet for a long time: experts and requests move by themselves, users come and change their subject, and
everything fails that can.

    make soak                                   two hours of simulated engines: large KV caches, long answers
    make soak ARGS="--soak-engine embedded"     of the embedded engine: real experts, short answers
    make soak ARGS="--soak-engine layouts"      of the embedded engine on an emulated network, whose layout the
                                                planner chooses as crowds come and go
    pytest -m slow tests/system/test_soak.py --soak-seconds 600 --soak-seed 7 -s

What is asserted: no request is lost (`tests.system.load_clients` has the rule); a router that is stopped
gently breaks no stream; what is said and stored of epochs never goes back within a life of an engine, and
every expert is somewhere in every placement that is stored; layouts do not thrash; plans end; the fleet is whole again after every
mishap; no process grows, and none is left over. It may run beside other work: what is silent for want of a
processor is not dead for a quarter of a minute, and nothing is judged by how fast it is.
"""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest

from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.process import alongside
from fleet.facts.migrations import MigrationCommitted, MigrationPlanned, PlanEvaluated
from fleet.placement import Placement
from tests.faults.fleet_fixture import until
from tests.faults.records import Records
from tests.system.fault_injection import GentleStop, Mischief
from tests.system.fleets import MODEL, Fleet, leave_nothing, new_home
from tests.system.leak_watch import MIB, Epochs, Growth, Life, Memories, growth, later, listen, unended
from tests.system.load_clients import ONE_TRY_SECONDS, Break, Crowd, Library, Prompts, Tide, tides
from tests.system.long_answers import LongLibrary
from tests.system.migration_clients import Movers

ENGINES = 2
MISHAP_EVERY_SECONDS = 20.0
"""on average; about half of them find their victim spared"""
DRAIN_SECONDS = 240.0
"""of a router that is stopped gently: more than the longest answer takes on a busy machine"""
LOOK_SECONDS = 5.0
SAY_SECONDS = 60.0
FILL_SECONDS = 900.0
"""of a life in which caches of 32k blocks, and routers' indexes of them, may fill"""
JUDGED_SECONDS = 600.0
"""lives that are longer by this are judged by their slope from then on"""
MOST_RESIDENT = 1024 * MIB
"""of any process at any time"""
MEMORY = "memory: "
"""what is wrong with memory begins so"""
REST_SECONDS = 240.0
BROKEN_SECONDS = 30.0
"""connections may break within this time after a router was killed: those that waited for the next one
included"""
REFUSED_SECONDS = 5.0
"""a router that was asked to stop may close connections within this time that it had not read a request
from"""
COMMON = {
    "ROOST_PLANNER_LEASE_SECONDS": "3.0",
    "ROOST_PLANNER_REPEAT_SECONDS": "0.5",
    "ROOST_PLANNER_CYCLE_SECONDS": "10.0",
    "ROOST_PLANNER_WINDOW_SECONDS": "30.0",
    "ROOST_PLANNER_HOMES_SECONDS": "20.0",
    "ROOST_PLANNER_EVALUATION_SECONDS": "30.0",
    "ROOST_PLANNER_SETTLE_SECONDS": "5.0",
    "ROOST_PLANNER_COOLDOWN_SECONDS": "40.0",
    "ROOST_PLANNER_BUDGET_SECONDS": "240.0",
    "ROOST_TRACKER_SHIFT_WARMUP_SECONDS": "20.0",
    "ROOST_TRACKER_SHIFT_COOLDOWN_SECONDS": "20.0",
    "ROOST_TRACKER_SLOW_SECONDS": "120.0",
    "ROOST_ROUTER_DEAD_AFTER_SECONDS": "15.0",  # a busy machine is not dead
    "ROOST_AGENT_LEASE_SECONDS": "15.0",
    "ROOST_ROUTER_NO_ENGINE_WAIT_SECONDS": (
        "180.0"
    ),  # an engine that is killed while the other one starts is waited for
    "ROOST_ROUTER_QUEUE_WAIT_SECONDS": "180.0",
    "ROOST_ROUTER_FIRST_TOKEN_SECONDS": "240.0",
    "ROOST_ROUTER_BETWEEN_TOKENS_SECONDS": "120.0",
    "ROOST_ROUTER_KEPT_DECISIONS": "1000",  # so that memory is flat after minutes, not hours
    "ROOST_ROUTER_DRAIN_SECONDS": str(DRAIN_SECONDS),
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]


@dataclass(frozen=True)
class Kind:
    """What is soaked. per_second: users."""

    ranks: int
    per_second: float
    options: tuple[str, ...]
    settings: dict[str, str]
    library: Callable[[int], Prompts]
    throng: int = 0
    """users who ask one thing after another in every other phase. Layouts change, too."""

    @property
    def simulated(self) -> bool:
        return "simulated" in self.options


KINDS = {
    "simulated": Kind(
        ranks=4,
        per_second=1.5,
        options=("--engine", "simulated"),
        settings={
            "ROOST_SIMULATED_MODEL": MODEL,
            "ROOST_SIMULATED_KV_BLOCKS": "32768",
            "ROOST_SIMULATED_SLOTS_PER_RANK": "10",
            "ROOST_SIMULATED_STEP": "0.1",
            "ROOST_SIMULATED_PREFILL_TOKEN": "1e-5",
        },
        library=LongLibrary,
    ),
    "embedded": Kind(
        ranks=2,
        per_second=2.5,
        options=(),
        settings={
            "ROOST_ENGINE_KV_BLOCKS": "256",
            "ROOST_ENGINE_SLOTS_PER_RANK": "20",
            "ROOST_ENGINE_DISPATCH_SECONDS": "2e-4",
            "ROOST_TRANSFER_BACKEND": "nixl",
            "ROOST_PLANNER_STAGE_SECONDS": "5.0",
        },
        library=lambda _: Library(),
    ),
    "layouts": Kind(
        ranks=2,
        per_second=1.0,
        options=(),
        settings={
            "ROOST_ENGINE_KV_BLOCKS": "512",
            "ROOST_ENGINE_SLOTS_PER_RANK": "20",
            "ROOST_ENGINE_LINK_SECONDS": "5e-5",
            "ROOST_TRANSFER_BACKEND": "nixl",
            "ROOST_PLANNER_STAGE_SECONDS": "5.0",
            "ROOST_PLANNER_LAYOUT_POLICY": "regret",
        },
        library=lambda _: Library(),
        throng=64,
    ),
}
PHASE_SECONDS = 60.0
"""of a throng, and between two of them"""


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.config.getoption("--soak-engine")]


@pytest.fixture
def fleet(kind: Kind) -> Iterator[Fleet]:
    """Two engines before two router processes; a loop that is in a hurry."""
    home = new_home(**COMMON, **kind.settings)
    fleet = Fleet(
        home, *kind.options, "--ranks", str(kind.ranks), "--engines", str(ENGINES), "--processes", "2"
    )
    yield fleet
    fleet.http.close()
    leave_nothing(fleet)


class Form(NamedTuple):
    """How many requests are open at a time, and the layout of each engine."""

    at: float
    """seconds since the beginning"""
    open: int
    layouts: dict[str, str]


@dataclass
class Soak:
    """Everything that goes on."""

    kind: Kind
    seconds: float
    seed: int
    course: list[Tide]
    crowd: Crowd
    mischief: Mischief
    memories: Memories
    epochs: Epochs
    records: Records
    movers: Movers
    began: float
    progress: list[tuple[float, int, int]] = field(default_factory=list)
    """seconds, and how many requests had come and were answered by then"""
    forms: list[Form] = field(default_factory=list)

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(f"engine-{number}" for number in range(ENGINES))

    def line(self) -> str:
        """How it goes."""
        outcomes, happened = self.crowd.outcomes, self.mischief.happened
        epochs = {
            name: max((one.placement.epoch for one in self.records.history(name).placements), default=-1)
            for name in self.engines
        }
        resident = {life.name: life.resident[-1] // MIB for life in self.memories.lives if life.resident}
        return (
            f"{time.monotonic() - self.began:7.1f} s  {outcomes.answered} of {outcomes.came} answered,"
            f" {outcomes.asked_again.total()} when asked again, {len(outcomes.lost)} lost, {len(outcomes.wrong)} wrong,"
            f" {len(outcomes.open)} open; epochs {epochs}; {len(happened.mishaps)} mishaps;"
            f" {len(happened.gentle_stops)} gentle stops broke {len(self._streams_broken())} streams; MiB"
            f" {resident}"
        )

    def note(self) -> None:
        """How far users are."""
        self.progress.append(
            (round(time.monotonic() - self.began, 3), self.crowd.outcomes.came, self.crowd.outcomes.answered)
        )

    def sample(self) -> None:
        """What layouts the engines have now."""
        histories = {name: self.records.history(name) for name in self.engines}
        layouts = {name: form_of(one.latest) for name, one in histories.items() if one.placements}
        at = round(time.monotonic() - self.began, 1)
        self.forms.append(Form(at, len(self.crowd.outcomes.open), layouts))

    # what must be so

    def failures(self, *, over: bool = True) -> list[str]:
        """Everything that is not as it should be, in sentences. over: nothing is under way any more."""
        outcomes, happened = self.crowd.outcomes, self.mischief.happened
        return [
            *(f"lost: {message}" for message in outcomes.lost[:20]),
            *(f"wrong: {message}" for message in outcomes.wrong[:20]),
            *self._breaks(),
            *(f"epochs: {message}" for message in self.epochs.wrong[:20]),
            *happened.wrong[:20],
            *self._thrash(),
            *(f"left over: {message}" for message in self.memories.left_over),
            *(self._stuck() if over else ()),
            *(growing(self.memories.lives) if over else ()),
        ]

    def _breaks(self) -> list[str]:
        """Connections that broke though the router behind them had not been killed, and streams that a gentle
        stop broke off."""
        alone = [one for one in self.crowd.outcomes.broken if not self._is_excused(one)]
        found = (
            [f"{len(alone)} connections broke, and their router had not been killed: {alone[:5]}"]
            if alone
            else []
        )
        return found + [f"gentle stop at {at:.1f} s: {message}" for at, message in self._streams_broken()]

    def _is_excused(self, one: Break) -> bool:
        happened = self.mischief.happened
        for kill in happened.router_kills:
            if kill.at - 1.0 <= one.at <= kill.at + BROKEN_SECONDS and (
                not one.tag or not kill.tag or one.tag == kill.tag
            ):
                return True
        # a request that had not been read when the router stopped reading: nothing of an answer had come
        return not one.tag and any(
            stop.at - 1.0 <= one.requested_at <= one.at <= stop.at + REFUSED_SECONDS
            for stop in happened.gentle_stops
        )

    def _streams_broken(self) -> list[tuple[float, str]]:
        """Seconds since the beginning, and which."""
        stops = self.mischief.happened.gentle_stops
        return [
            (stop.at - self.began, f"a stream of {stop.router} broke after {one.tokens} tokens")
            for stop in stops
            for one in stop.streams
            if one.outcome == "broken" and not self._killed_meanwhile(stop)
        ]

    def _killed_meanwhile(self, stop: GentleStop) -> bool:
        """Nobody kills a router that is stopping; this would be the test's own fault."""
        return any(
            stop.at <= kill.at <= stop.at + (stop.gone_after or DRAIN_SECONDS) and kill.tag == stop.tag
            for kill in self.mischief.happened.router_kills
        )

    def _stuck(self) -> list[str]:
        forgotten = self.mischief.happened.forgotten
        left = {
            name: [plan for plan in unended(self.records.history(name).migrations) if plan not in forgotten]
            for name in self.engines
        }
        return [f"plans of {name} that never ended: {plans}" for name, plans in left.items() if plans]

    def switches(self, engine: str) -> list[MigrationPlanned]:
        """Switches of layout that the planner chose."""
        stored = self.records.history(engine).migrations
        return [one for one in stored if isinstance(one, MigrationPlanned) and is_chosen_switch(one)]

    def _thrash(self) -> list[str]:
        """Engines that were switched more often than their load or their life changed."""
        phases = math.ceil(min(time.monotonic() - self.began, self.seconds) / PHASE_SECONDS)
        found = []
        for name in self.engines:
            switches, lives = len(self.switches(name)), len(self.records.history(name).joins)
            by_hand = self.mischief.happened.layouts[name]
            if switches > phases + lives + by_hand:
                found.append(
                    f"thrash: {name} switched {switches} times in {phases} phases of load, {lives} lives and"
                    f" {by_hand} switches by hand"
                )
        return found

    def _forms(self) -> dict[str, Any]:
        return {
            "at": [one.at for one in self.forms],
            "open": [one.open for one in self.forms],
            "engines": {name: [one.layouts.get(name) for one in self.forms] for name in self.engines},
        }

    def report(self, domains: tuple[str, ...]) -> dict[str, Any]:
        """For whoever was not there."""
        outcomes, happened = self.crowd.outcomes, self.mischief.happened
        message = [one for name in self.engines for one in self.records.history(name).migrations]
        return {
            "seconds": self.seconds,
            "seed": self.seed,
            "fleet": {
                "engines": ENGINES,
                "ranks": self.kind.ranks,
                "routers": 2,
                "simulated": self.kind.simulated,
                "settings": self.kind.settings,
            },
            "requests": {
                "came": outcomes.came,
                "answered": outcomes.answered,
                "streamed": outcomes.streamed,
                "tokens": outcomes.tokens,
                "answered_at_once": outcomes.answered - outcomes.asked_again.total(),
                "asked_again": outcomes.asked_again.total(),
                "asked_again_by_cause": dict(outcomes.asked_again),
                "refused_to_come_again": {str(status): count for status, count in outcomes.refused.items()},
                "connections_broken_with_a_router": len(outcomes.broken),
                "turned_away": outcomes.turned_away,
                "compared": outcomes.compared,
                "close_choices": outcomes.close,
                "wrong": len(outcomes.wrong),
                "lost": len(outcomes.lost),
                "seconds_median": float(np.median(outcomes.seconds)) if outcomes.seconds else None,
                "seconds_99": float(np.quantile(outcomes.seconds, 0.99)) if outcomes.seconds else None,
                "streams_by_length": by_length(outcomes.streamed_seconds),
            },
            "progress": dict(
                zip(("at", "came", "answered"), map(list, zip(*self.progress, strict=True)), strict=True)
            ),
            "epochs": {
                "heard": self.epochs.messages,
                "stored": self.epochs.committed,
                "went_back": len(self.epochs.wrong),
            },
            "plans": {
                **Counter(f"{one.origin}" for one in message if isinstance(one, MigrationPlanned)),
                "handovers": sum(isinstance(one, MigrationCommitted) for one in message),
                "bytes": sum(one.bytes for one in message if isinstance(one, MigrationPlanned)),
                "judged": dict(Counter(one.verdict for one in message if isinstance(one, PlanEvaluated))),
            },
            "layouts": {
                name: {
                    "chosen": [f"{one.policy}: {one.reason}" for one in self.switches(name)],
                    "by_hand": happened.layouts[name],
                }
                for name in self.engines
            },
            **({"name": "soak-layouts", "forms": self._forms()} if self.forms else {}),
            "orders": happened.orders,
            "gentle_stops": [
                {
                    "at": round(stop.at - self.began, 1),
                    "router": stop.router,
                    "streams_open": len(stop.streams),
                    "finished": sum(one.outcome == "finished" for one in stop.streams),
                    "broken": sum(one.outcome == "broken" for one in stop.streams),
                    "others_open": len(stop.others),
                    "others_broken": sum(one.outcome == "broken" for one in stop.others),
                    "gone_after": None if stop.gone_after is None else round(stop.gone_after, 1),
                }
                for stop in happened.gentle_stops
            ],
            "mishaps": [asdict(one) for one in happened.mishaps],
            "tides": [
                {
                    "kind": one.kind,
                    "seconds": one.seconds,
                    "last": dict(zip(domains, one.last.round(3).tolist(), strict=True)),
                }
                for one in self.course
            ],
            "memory": [
                {"name": life.name, "pid": life.pid, **thinned(life)}
                for life in self.memories.lives
                if life.at
            ],
            "fill_seconds": FILL_SECONDS,
            "growth": [asdict(one) for one in grown(self.memories.lives)],
            "growth_by_kind": by_kind(grown(self.memories.lives)),
            "failures": self.failures(),
        }


def form_of(placement: Placement) -> str:
    """The name of a layout; "mixed" while layers are turned over."""
    if placement.attention == "tp":
        return "tp"
    turned = len(placement.sharded)
    return "ep" if not turned else "experts-tp" if turned == placement.layers else "mixed"


def is_chosen_switch(plan: MigrationPlanned) -> bool:
    return plan.policy.startswith("layout: ")


def grown(lives: list[Life]) -> list[Growth]:
    settled = [later(life, FILL_SECONDS) for life in lives]
    return [growth(life) for life in settled if len(life.at) >= 8 and life.seconds >= JUDGED_SECONDS]


def rejudged(report: dict[str, Any]) -> dict[str, Any]:
    """A report of a run that judged memory from the beginning of each life on, judged as it is now: from what
    the report keeps of memory. What was said of growth then stays, as "superseded"."""
    lives = [
        Life(life["name"], life["pid"], life["at"], [round(mib * MIB) for mib in life["mib"]])
        for life in report["memory"]
    ]
    old = [failure for failure in report["failures"] if failure.startswith(MEMORY)]
    return {
        **report,
        "fill_seconds": FILL_SECONDS,
        "growth": [asdict(one) for one in grown(lives)],
        "growth_by_kind": by_kind(grown(lives)),
        "failures": [failure for failure in report["failures"] if failure not in old] + growing(lives),
        "superseded": [*report.get("superseded", []), *old],
    }


def by_kind(growths: list[Growth]) -> dict[str, dict[str, float]]:
    """Of the processes of one kind: how many lives were judged, bytes at their ends, and bytes per hour;
    medians, and the worst slope."""
    found: dict[str, list[Growth]] = {}
    for one in growths:
        found.setdefault(one.name.split("-")[0], []).append(one)
    return {
        name: {
            "lives": len(lives),
            "end": float(np.median([one.end for one in lives])),
            "slope": float(np.median([one.slope for one in lives])),
            "worst_slope": max(one.slope for one in lives),
        }
        for name, lives in sorted(found.items())
    }


def by_length(seconds: list[float]) -> dict[str, int]:
    """Answered streams: below ten seconds, tens of seconds, minutes."""
    edges = {"below 10 s": (0.0, 10.0), "10 to 60 s": (10.0, 60.0), "above 60 s": (60.0, math.inf)}
    return {name: sum(least <= one < most for one in seconds) for name, (least, most) in edges.items()}


def growing(lives: list[Life]) -> list[str]:
    """Lives that used more and more memory, or too much."""
    found = [
        f"{MEMORY}{one.name} (pid {one.pid}) grows by {one.slope / MIB:.1f} MiB an hour, and by"
        f" {one.grown / MIB:.1f} MiB from the third quarter of its {one.seconds:.0f} s to the last"
        for one in grown(lives)
        if one.leaks
    ]
    large = [(life, max(life.resident)) for life in lives if life.resident]
    return found + [
        f"{MEMORY}{life.name} (pid {life.pid}) had {most / MIB:.0f} MiB"
        for life, most in large
        if most > MOST_RESIDENT
    ]


def thinned(life: Life) -> dict[str, list[float]]:
    """About one look a minute: seconds, and MiB."""
    every = max(1, round(SAY_SECONDS / LOOK_SECONDS))
    return {
        "at": [round(at) for at in life.at[::every]],
        "mib": [round(resident / MIB, 1) for resident in life.resident[::every]],
    }


async def soak(
    fleet: Fleet,
    kind: Kind,
    seconds: float,
    seed: int,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """What happened; under "failures" what should not have. keep: takes what has happened so far, now and
    then."""
    subjects = Subjects("roost")
    bus = await NatsBus.connect(
        fleet.nats, subjects, fleet.bus_config(reconnect_max_seconds=0.2), name="soak"
    )
    dice = [np.random.default_rng((seed, part)) for part in range(3)]
    library = await asyncio.to_thread(kind.library, seed)
    course = tides(len(library.domains), seconds, dice[0])
    records, memories, epochs = Records(bus, subjects), Memories(fleet), Epochs()
    limits, connector = (
        aiohttp.ClientTimeout(total=ONE_TRY_SECONDS),
        aiohttp.TCPConnector(limit=0, force_close=True),
    )
    try:
        async with (
            alongside(records.follow(), "reads what is stored") as reading,
            alongside(listen(bus, subjects, epochs), "listens for epochs") as listening,
            alongside(memories.look_on(LOOK_SECONDS), "looks at memory") as looking,
            aiohttp.ClientSession(fleet.router, timeout=limits, connector=connector) as http,
        ):
            crowd = Crowd(http, library, course, kind.per_second, dice[1])
            mischief = Mischief(
                fleet,
                http,
                records,
                crowd.outcomes,
                dice[2],
                engines=ENGINES,
                ranks=kind.ranks,
                seconds=seconds,
                drain_seconds=DRAIN_SECONDS,
                simulated=kind.simulated,
                layouts=kind.throng > 0,
            )
            running = Soak(
                kind,
                seconds,
                seed,
                course,
                crowd,
                mischief,
                memories,
                epochs,
                records,
                Movers(records),
                time.monotonic(),
            )

            async def tell() -> None:
                known: set[str] = set()
                while True:
                    await asyncio.sleep(SAY_SECONDS)
                    running.note()
                    say(running.line())
                    keep(
                        running.report(library.domains)
                        | {"so_far_seconds": round(time.monotonic() - running.began)}
                    )
                    for sentence in running.failures(over=False):
                        if sentence not in known:
                            known.add(sentence)
                            say(f"FAILURE: {sentence}")

            async def sample() -> None:
                while kind.throng:
                    running.sample()
                    await asyncio.sleep(LOOK_SECONDS)

            async with (
                alongside(tell(), "says how it goes"),
                alongside(sample(), "looks at layouts"),
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(crowd.come(seconds), name="users")
                if kind.throng:
                    tasks.create_task(crowd.throng(kind.throng, seconds, PHASE_SECONDS), name="throngs")
                tasks.create_task(
                    mischief.go_on(min(MISHAP_EVERY_SECONDS, seconds / 20), say), name="mishaps"
                )
            running.note()
            await come_to_rest(running)
            for watching in (reading, listening, looking):
                assert not watching.done(), watching
            say(running.line())
            return running.report(library.domains)
    finally:
        await bus.close()


async def come_to_rest(running: Soak) -> None:
    """Nothing new from the loop; every plan ends, every rank serves what is stored, and an operator can still
    move experts."""
    if await running.mischief.steer(paused=True) is None:
        running.mischief.happened.wrong.append("the loop cannot be paused in the end: nobody answers")
    for engine in running.engines:
        try:
            await until(
                lambda name=engine: rests(running, name),
                lambda name=engine: standing(running, name),
                REST_SECONDS,
            )
            if form_of(running.records.history(engine).latest) != "ep":
                await running.records.switch(engine, (), seconds=REST_SECONDS)
            await until(
                lambda name=engine: moves(running, name),
                lambda name=engine: f"{name} takes a plan: {running.mischief.happened.orders}",
                REST_SECONDS,
            )
            await until(
                lambda name=engine: rests(running, name),
                lambda name=engine: standing(running, name),
                REST_SECONDS,
            )
        except AssertionError as error:
            running.mischief.happened.wrong.append(f"in the end: {error}")


async def rests(running: Soak, engine: str) -> bool:
    history = running.records.history(engine)
    forgotten = running.mischief.happened.forgotten
    if not history.known or any(plan not in forgotten for plan in unended(history.migrations)):
        return False
    served = await running.movers.served(engine)
    return bool(served) and set(served) == {history.latest.epoch}


async def moves(running: Soak, engine: str) -> bool:
    """Whether a plan of one handover was accepted; it is asked for again while it is not."""
    return await running.mischief.move(engine, 1) == "accepted"


def standing(running: Soak, engine: str) -> str:
    history = running.records.history(engine)
    return (
        f"{engine} rests: on record {history.latest.epoch}, known {history.known}, open plans"
        f" {unended(history.migrations)}, last {history.migrations[-3:]}"
    )


def test_a_fleet_in_trouble_loses_no_request_and_no_epoch_and_does_not_grow(
    fleet: Fleet, kind: Kind, request: pytest.FixtureRequest
) -> None:
    seconds, seed = (
        float(request.config.getoption("--soak-seconds")),
        int(request.config.getoption("--soak-seed")),
    )
    file = request.config.getoption("--soak-report")
    assert math.isfinite(seconds), seconds
    assert seconds >= 30, seconds

    def say(text: str) -> None:
        print(text, flush=True)  # noqa: T201

    say(f"\nsoak: {seconds:.0f} s, seed {seed}, in {fleet.run_directory}")

    def keep(found: dict[str, Any]) -> None:
        if file is not None:
            draft = Path(f"{file}.new")
            draft.write_text(json.dumps(found, allow_nan=False) + "\n")
            draft.replace(file)

    found = asyncio.run(soak(fleet, kind, seconds, seed, say, keep))
    keep(found)
    assert not found["failures"], "\n".join(found["failures"])
