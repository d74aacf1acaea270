"""The loop closes on a real fleet, with nobody touching it: requests of two kinds part, experts move to where
theirs live, and a change is followed."""

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import numpy as np
import pytest

from bus import BusError
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.process import alongside
from fleet.facts.activity import DispatchMeasured
from fleet.facts.demand import PopularityShifted
from fleet.facts.migrations import MigrationCommitted, MigrationPlanned
from fleet.facts.placements import HomesPublished
from fleet.requests.control_loop import DescribeLoop, LoopDescribed
from fleet.requests.demand import DescribePopularity, PopularityDescribed
from tests.faults.fleet_fixture import until
from tests.faults.records import Records
from tests.system.fleets import MODEL, Fleet, leave_nothing, new_home
from tests.system.load_clients import documents

PROMPT_TOKENS, TOKENS = 96, 24
AT_ONCE = 8
STAGE_SECONDS = 180.0
"""for each stage: on two idle cores they take 5 to 20"""
KINDS, OTHERS = ("c", "ja"), ("html", "ru")
LAST = 40
"""requests of each kind, by which it is judged where they live"""
APART = 0.5
LATELY_SECONDS = 5.0
PLAIN = 0.008
"""nats: a threshold that a change of both kinds is twice above"""
FEWER = 0.8
"""of the remote ranks by token at first"""
CHAIN = {
    "roost.popularity.shift": {""},
    "roost.plan": {"roost.popularity.shift"},
    "roost.handover": {"roost.plan"},
    "roost.handover.prepare": {"roost.handover"},
}
"""spans, and those right above them"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """One engine of two ranks whose links are slow; a loop that is in a hurry."""
    home = new_home(
        ROOST_ENGINE_SLOTS_PER_RANK="20",
        ROOST_ENGINE_DISPATCH_SECONDS="1e-3",
        ROOST_PLANNER_CYCLE_SECONDS="2.0",
        ROOST_PLANNER_WINDOW_SECONDS="5.0",
        ROOST_PLANNER_STALE_SECONDS="5.0",
        ROOST_PLANNER_HOMES_SECONDS="4.0",
        ROOST_PLANNER_EVALUATION_SECONDS="5.0",
        ROOST_PLANNER_SETTLE_SECONDS="2.0",
        ROOST_PLANNER_COOLDOWN_SECONDS="5.0",
        ROOST_TRACKER_FAST_SECONDS="2.0",
        ROOST_TRACKER_SLOW_SECONDS="60.0",
        ROOST_TRACKER_SHIFT_SIGMAS="2.0",
        ROOST_TRACKER_SHIFT_WARMUP_SECONDS="10.0",
        ROOST_TRACKER_SHIFT_COOLDOWN_SECONDS="5.0",
    )
    fleet = Fleet(home, "--ranks", "2")
    yield fleet
    fleet.http.close()
    leave_nothing(fleet)


class Texts:
    """Prompts of a kind, hardly one of which comes twice."""

    def __init__(self) -> None:
        self._ids = documents()

    def prompt(self, domain: str, dice: np.random.Generator) -> list[int]:
        text = self._ids[domain][int(dice.integers(len(self._ids[domain])))]
        begin = int(dice.integers(len(text) - PROMPT_TOKENS))
        return text[begin : begin + PROMPT_TOKENS]


@dataclass
class World:
    """What users speak of, where they were served, and what is heard."""

    http: aiohttp.ClientSession
    records: Records
    texts: Texts
    kinds: tuple[str, ...]
    """that users speak of in turn"""
    served: list[tuple[str, str]] = field(default_factory=list)
    """(kind, rank) of requests, in the order of their ends"""
    sent: list[tuple[float, float, float]] = field(default_factory=list)
    """(when, distinct remote ranks per token and layer, tokens) of intervals of ranks"""
    homes: HomesPublished | None = None
    shifts: list[PopularityShifted] = field(default_factory=list)
    decided: dict[float, str] = field(default_factory=dict)
    """by the time when it was: what the planner decided"""

    async def ask(self, dice: np.random.Generator) -> None:
        """One thing after another, of all kinds in turn."""
        for number in itertools.count(int(dice.integers(2))):
            kind = self.kinds[number % len(self.kinds)]
            body = {
                "model": MODEL,
                "prompt": self.texts.prompt(kind, dice),
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            async with self.http.post("/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
                decision = answer.headers["x-roost-decision-id"]
            async with self.http.get(f"/v1/decisions/{decision}") as answer:
                if answer.status == 200:
                    self.served.append((kind, (await answer.json())["chosen"]))

    def remote(self, since: float, until_: float) -> float:
        """Distinct remote ranks per token and layer that ranks measured in a time of the event loop."""
        taken = [(remote * tokens, tokens) for at, remote, tokens in self.sent if since <= at <= until_]
        return sum(one for one, _ in taken) / max(sum(tokens for _, tokens in taken), 1.0)

    def apart(self) -> float:
        """Of the last requests of the two kinds: the share that would have to move for both to be served
        alike, from 0 to 1."""
        shares = []
        for kind in self.kinds:
            ranks = Counter([rank for one, rank in self.served if one == kind][-LAST:])
            shares.append({rank: count / max(ranks.total(), 1) for rank, count in ranks.items()})
        return 0.5 * sum(
            abs(shares[0].get(rank, 0.0) - shares[-1].get(rank, 0.0)) for rank in {*shares[0], *shares[-1]}
        )

    async def look(self) -> None:
        """For ever: at what the planner says that it decided."""
        while True:
            with contextlib.suppress(BusError):
                answer = await self.records.bus.request(self.records.subjects.loop, DescribeLoop(), 2.0)
                if (
                    isinstance(answer, LoopDescribed)
                    and answer.engines
                    and (outcomes := answer.engines[0]).decided_at is not None
                ):
                    self.decided[outcomes.decided_at] = outcomes.decided
            await asyncio.sleep(0.5)

    def own(self) -> list[MigrationPlanned]:
        return [
            one
            for one in self.records.history("engine-0").migrations
            if isinstance(one, MigrationPlanned) and one.origin == "planner"
        ]

    def committed(self, plans: list[MigrationPlanned]) -> MigrationPlanned | None:
        ends = ((plan, self.records.history("engine-0").end_of(plan.plan)) for plan in plans)
        return next((plan for plan, end in ends if isinstance(end, MigrationCommitted)), None)


@asynccontextmanager
async def living(fleet: Fleet) -> AsyncIterator[World]:
    """Users ask while the context lasts."""
    subjects, loop = Subjects("roost"), asyncio.get_running_loop()
    bus = await NatsBus.connect(fleet.nats, subjects, fleet.bus_config(), name="onlooker")
    records = Records(bus, subjects)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with (
            bus.subscribe(subjects.dispatched(), subjects.homes, subjects.shifts) as messages,
            aiohttp.ClientSession(
                fleet.router, timeout=aiohttp.ClientTimeout(total=60), connector=connector
            ) as http,
            alongside(records.follow(), "reads what is stored"),
        ):
            world = World(http, records, await asyncio.to_thread(Texts), KINDS)

            async def hear() -> None:
                async for received in messages:
                    match received.message:
                        case DispatchMeasured() as answer if answer.tokens:
                            world.sent.append(
                                (
                                    loop.time(),
                                    sum(answer.remote_ranks) / len(answer.remote_ranks) / answer.tokens,
                                    answer.tokens,
                                )
                            )
                        case HomesPublished() as answer:
                            world.homes = answer
                        case PopularityShifted() as answer:
                            world.shifts.append(answer)

            async with (
                alongside(hear(), "hears"),
                alongside(world.look(), "looks"),
                asyncio.TaskGroup() as users,
            ):
                asking = [
                    users.create_task(world.ask(np.random.default_rng(number)), name=f"user {number}")
                    for number in range(AT_ONCE)
                ]
                yield world
                for task in asking:
                    task.cancel()
    finally:
        await bus.close()


def above(fleet: Fleet, plan: MigrationPlanned) -> dict[str, set[str]]:
    """The spans of a plan's trace by name, and the names of those right above them, as the fleet has exported
    them."""
    spans = [
        span
        for line in fleet.spans.read_text().splitlines()
        if (span := json.loads(line))["trace_id"] == trace_of(plan.traceparent)
    ]
    names = {span["span_id"]: span["name"] for span in spans}
    found: dict[str, set[str]] = {}
    for span in spans:
        found.setdefault(span["name"], set()).add(names.get(span["parent_id"], ""))
    return found


def trace_of(traceparent: str) -> str:
    return traceparent.split("-")[1] if traceparent else ""


async def test_kinds_of_requests_part_and_their_experts_move_and_a_change_is_followed_in_one_trace(
    fleet: Fleet,
) -> None:
    loop = asyncio.get_running_loop()
    async with living(fleet) as world:
        # 1. As it begins: every rank holds what a linear placement gives it, and requests live anywhere.
        await until(lambda: len(world.served) >= 4 * AT_ONCE, lambda: story(world), STAGE_SECONDS)
        first = world.remote(0.0, loop.time())

        # 2. Two kinds of requests: homes and experts are moved, kinds part, and tokens are sent to fewer
        # ranks.
        def closed() -> bool:
            return (
                world.committed(world.own()) is not None
                and world.apart() > APART
                and lately(world) < FEWER * first
            )

        await until(
            closed,
            lambda: f"the loop closes: {story(world)}; remote ranks {first:.3f} at first",
            STAGE_SECONDS,
        )

        # 3. Others, once the tracker knows what chance does: the shift is noticed, and what is done about it
        # hangs below it.
        await until(
            lambda: knows_noise(world),
            lambda: f"the tracker knows what is noise: {story(world)}",
            STAGE_SECONDS,
        )
        known, world.kinds = len(world.own()), OTHERS

        def answering() -> MigrationPlanned | None:
            shifts = {trace_of(shift.traceparent) for shift in world.shifts if not shift.settled}
            return world.committed(
                [plan for plan in world.own()[known:] if trace_of(plan.traceparent) in shifts]
            )

        plan = await until(
            answering,
            lambda: f"a plan answers a shift, of {len(world.shifts)}: {story(world)}",
            STAGE_SECONDS,
        )
        await until(
            lambda: CHAIN.items() <= above(fleet, plan).items(),
            lambda: f"one trace: {above(fleet, plan)}",
            STAGE_SECONDS,
        )


async def knows_noise(world: World) -> bool:
    """Whether a change of subject would stand out of it."""
    described = await world.records.bus.request(
        world.records.subjects.describe_profile, DescribePopularity(model=MODEL), 5.0
    )
    return isinstance(described, PopularityDescribed) and (described.threshold or 1.0) < PLAIN


def lately(world: World) -> float:
    """Remote ranks by token, in the last seconds."""
    now = asyncio.get_running_loop().time()
    return world.remote(now - LATELY_SECONDS, now)


def story(world: World) -> str:
    """For whoever has to find out why."""
    plans = [(plan.reason, plan.bytes) for plan in world.own()]
    return (
        f"{len(world.served)} served, apart {world.apart():.2f}, remote ranks {lately(world):.3f}; plans"
        f" {plans}; decided {list(world.decided.values())[-5:]}"
    )
