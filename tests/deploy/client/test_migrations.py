"""`roost migrate`, `plan --apply`, `rollback`: what is asked of the planner, and how what becomes of it is
told."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bus import Bus, Message
from bus.memory import MemoryBus
from bus.protocol.subjects import Subjects
from deploy.cli.events import FAMILIES, KINDS
from deploy.client import migrations
from deploy.client.fleet_status import members, note_plans
from deploy.client.migrations import NoSuchEngine, NotAccepted, PlanProgress, carried_out, engine_named
from deploy.parts.resume import last_record
from deploy.process import SIGNALS, alongside
from deploy.views.map_files import encoded
from deploy.views.migration import as_record
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.simulated.engine import SimulatedEngine
from fleet.experts import ModelShape
from fleet.facts.engines import EngineJoined
from fleet.facts.migrations import (
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    MigrationStaged,
    PlanEvaluated,
    PullReport,
)
from fleet.placement import linear
from fleet.requests.handovers import HandoverDescribed
from fleet.requests.plans import (
    ApplyMap,
    ApplyPlan,
    DescribePlan,
    MigrateExpert,
    MigrationAccepted,
    PlanDescribed,
    RollBack,
)
from fleet.requests.refusal import RequestRefused
from migration.config import MigrationConfig
from migration.model.plan import planned
from migration.model.plan_record import PlanRecord
from migration.service import MigrationService
from tests.deploy.bus_responder import on_nats
from tests.deploy.commands import roost
from tests.deploy.loop_figures import PREDICTED, START
from tests.simulated_engines import simulated_engine

pytestmark = pytest.mark.usefixtures("elsewhere")
SUBJECTS = Subjects()
SHAPE = ModelShape(layers=2, experts=8, top_k=2, hidden=4, expert_intermediate=8)
FIRST = linear(layers=2, experts=8, ranks=2)
ASKED = MigrateExpert(engine="engine-0", layer=1, expert=3, rank=1)
WHO: dict[str, Any] = {"engine": "engine-0", "worker_id": 7, "plan": "cafe"}
ACCEPTED = MigrationAccepted(
    **WHO, handovers=2, copies=3, bytes=3000, what=("expert 1/3 from rank 0 to rank 1",)
)
PULL = PullReport(source=0, transfer="shared", experts=1, bytes=1000, seconds=0.1)
PLANNED = MigrationPlanned(
    **WHO, origin="operator", base_epoch=0, handovers=2, copies=3, bytes=3000, reason="somebody wants it"
)
ABORTED = MigrationAborted(
    **WHO,
    handover=6,
    number=1,
    epoch=2,
    reason="rank 1 has no free cell: wait until reads have settled",
    fault="room",
    rank=1,
)


def staged(number: int) -> MigrationStaged:
    return MigrationStaged(
        **WHO,
        handover=5 + number,
        number=number,
        epoch=1 + number,
        placement=FIRST.record(),
        copies=1,
        bytes=1000,
        seconds=0.2,
        pulls=(PULL,),
    )


def committed(number: int) -> MigrationCommitted:
    return MigrationCommitted(
        **WHO,
        handover=5 + number,
        number=number,
        epoch=1 + number,
        copies=1,
        bytes=1000,
        seconds=0.25,
        commit_seconds=0.05,
        last=number == 1,
    )


GOOD = (PLANNED, staged(0), committed(0), staged(1), committed(1))


def joined(engine: str, worker_id: int = 7, shape: ModelShape | None = SHAPE) -> EngineJoined:
    about: dict[str, Any] = {
        "model": "m",
        "node": "n",
        "urls": ("http://x", "http://y"),
        "block_size": 16,
        "kv_blocks": 8,
    }
    return EngineJoined(
        engine=engine, worker_id=worker_id, shape=shape, max_context=512, max_batch_tokens=256, **about
    )


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus()
    for worker_id, name in enumerate(("engine-0", "engine-1", "plain-2"), start=7):
        await bus.record(
            SUBJECTS.membership(name), joined(name, worker_id, None if name == "plain-2" else SHAPE)
        )
    yield bus
    await bus.close()


def telling(bus: Bus, subjects: Subjects, *story: Message) -> Callable[[Message], Awaitable[Message]]:
    """A planner that accepts whatever it is asked, and tells at once how it goes."""

    async def answer(message: Message) -> Message:
        for said in story:
            await bus.record(subjects.migrations("engine-0"), said)
        return ACCEPTED

    return answer


async def follow(bus: MemoryBus, *story: Message, wait: bool = True) -> tuple[PlanProgress, list[str]]:
    said: list[str] = []
    async with bus.serve(SUBJECTS.migrate, telling(bus, SUBJECTS, *story)), asyncio.timeout(5):
        return await carried_out(bus, SUBJECTS, ASKED, wait=wait, began=lambda _: None, say=said.append), said


# Which engine


@pytest.mark.parametrize(("text", "name"), [("engine-0", "engine-0"), ("e0", "engine-0"), ("e1", "engine-1")])
async def test_an_engine_is_known_by_its_name_and_by_its_letters_and_number(
    bus: MemoryBus, text: str, name: str
) -> None:
    assert (await engine_named(bus, SUBJECTS, text)).engine == name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("e2", "no engine 'e2' with experts; there are: engine-0, engine-1"),
        ("p2", "no engine 'p2' with experts"),
        (None, "name an engine; there are: engine-0, engine-1"),
    ],
)
async def test_another_engine_is_refused_with_those_that_are_there(
    bus: MemoryBus, text: str | None, says: str
) -> None:
    with pytest.raises(NoSuchEngine) as refusal:
        await engine_named(bus, SUBJECTS, text)
    assert says in str(refusal.value)


async def test_a_short_name_of_two_engines_is_no_name(bus: MemoryBus) -> None:
    await bus.record(SUBJECTS.membership("east-0"), joined("east-0"))
    with pytest.raises(NoSuchEngine, match="'e0' is short for east-0, engine-0: say which"):
        await engine_named(bus, SUBJECTS, "e0")


# How it goes


async def test_a_plan_is_followed_to_its_last_commit(bus: MemoryBus) -> None:
    course, said = await follow(bus, *GOOD)
    assert (
        course.committed,
        course.aborted,
        course.epoch,
        course.next,
        course.copies,
        course.copied_bytes,
    ) == (
        True,
        None,
        2,
        2,
        2,
        2000,
    )
    assert said == [
        "under way: somebody wants it",
        "handover 1 of 2: staged on all ranks after 0.20 s",
        "handover 1 of 2: epoch 1 is served, 50 ms after the decision",
        "handover 2 of 2: staged on all ranks after 0.20 s",
        "handover 2 of 2: epoch 2 is served, 50 ms after the decision",
    ]
    record = as_record(course)
    assert (record["outcome"], record["bytes_by_transfer"], record["seconds"]) == (
        "done",
        {"shared": 2000},
        0.5,
    )


async def test_a_plan_that_is_given_up_says_why_and_what_had_been_done(bus: MemoryBus) -> None:
    course, _ = await follow(bus, *GOOD[:3], ABORTED)
    record = as_record(course)
    assert (
        record["outcome"],
        record["handovers_done"],
        record["epoch"],
        record["rank"],
        record["fault"],
    ) == ("given up", 1, 1, 1, "room")
    assert "no free cell" in record["reason"]


async def test_what_became_of_an_equal_plan_a_moment_ago_is_not_taken_for_this_one(bus: MemoryBus) -> None:
    await follow(bus, PLANNED, ABORTED)
    course, _ = await follow(bus, *GOOD)
    assert course.aborted is None
    assert course.next == 2


async def test_other_plans_of_the_engine_are_none_of_its_business(bus: MemoryBus) -> None:
    course, _ = await follow(bus, msgspec.structs.replace(ABORTED, plan="another"), *GOOD)
    assert course.committed
    assert course.aborted is None


async def test_without_waiting_it_is_only_accepted(bus: MemoryBus) -> None:
    course, said = await follow(bus, wait=False)
    assert as_record(course)["outcome"] == "under way"
    assert said == []


async def test_a_refusal_is_told_in_the_planners_words_and_silence_as_silence(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(message: Message) -> Message:
        return RequestRefused(reason="rank 1 holds expert 1/3 already")

    async with bus.serve(SUBJECTS.migrate, refuse):
        with pytest.raises(NotAccepted, match="holds expert 1/3 already"):
            await carried_out(bus, SUBJECTS, ASKED, wait=True, began=lambda _: None, say=print)
    monkeypatch.setattr(migrations, "ASK_SECONDS", 0.05)
    with pytest.raises(NotAccepted, match="the planner does not answer"):
        await carried_out(bus, SUBJECTS, ASKED, wait=True, began=lambda _: None, say=print)


async def test_a_planner_that_takes_over_is_waited_for(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "TAKEOVER_SECONDS", 0.4)
    missed, said = asyncio.Event(), list[str]()
    order = asyncio.ensure_future(
        carried_out(
            bus,
            SUBJECTS,
            ASKED,
            wait=True,
            began=lambda _: None,
            say=lambda text: said.append(text) or missed.set(),
        )
    )
    async with asyncio.timeout(5):
        await missed.wait()
        async with bus.serve(SUBJECTS.migrate, telling(bus, SUBJECTS, *GOOD)):
            assert (await order).committed
    assert said[0] == "no planner is running; waiting for one to take over"


async def test_silence_about_a_plan_is_noticed(bus: MemoryBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "QUIET_SECONDS", 0.01)
    quiet = asyncio.Event()
    async with bus.serve(SUBJECTS.migrate, telling(bus, SUBJECTS, PLANNED)):
        course = asyncio.ensure_future(
            carried_out(
                bus,
                SUBJECTS,
                ASKED,
                wait=True,
                began=lambda _: None,
                say=lambda text: "nothing new" in text and quiet.set(),
            )
        )
        async with asyncio.timeout(5):
            await quiet.wait()
            await bus.record(SUBJECTS.migrations("engine-0"), ABORTED)
            assert (await course).end == ABORTED


def test_how_far_ranks_are_is_shown_and_counted() -> None:
    course = PlanProgress(accepted=ACCEPTED)
    assert course.present == "handover 1 of 2"
    plain: dict[str, Any] = {
        "worker_id": 7,
        "served": 0,
        "token": 1,
        "handover": 5,
        "concluded": 4,
        "flipped": 4,
    }
    course.note(HandoverDescribed(rank=1, state="staging", pulls=(PULL,), **plain))
    course.note(HandoverDescribed(rank=0, state="staged", **plain))
    course.note(HandoverDescribed(rank=0, state="staging", **{**plain, "worker_id": 8}))
    assert course.present == "handover 1 of 2: rank 0 staged, rank 1 staging"
    assert course.pulled == 1000
    course.note(HandoverDescribed(rank=2, state="staged", **plain))
    assert course.present == "handover 1 of 2: 2 ranks staged, rank 1 staging"
    course.note(committed(0))
    assert (course.pulled, course.present) == (1000, "handover 2 of 2")


def test_what_decided_ranks_wait_for_is_told_once_and_shown() -> None:
    course = PlanProgress(accepted=ACCEPTED)
    plain: dict[str, Any] = {
        "worker_id": 7,
        "served": 0,
        "token": 1,
        "handover": 5,
        "concluded": 4,
        "flipped": 4,
        "state": "ready",
    }
    assert course.note(HandoverDescribed(rank=0, **plain)) is None
    assert course.note(HandoverDescribed(rank=0, pending="idle", **plain)) == "pending: idle"
    assert course.note(HandoverDescribed(rank=1, pending="idle", **plain)) is None
    assert course.present == "handover 1 of 2: 2 ranks ready, pending: idle"
    assert course.note(HandoverDescribed(rank=1, pending="3 of 8 layers", **plain)) == (
        "pending: 3 of 8 layers, idle"
    )


def test_families_of_kinds_name_kinds() -> None:
    assert {kind for kinds in FAMILIES.values() for kind in kinds} <= set(KINDS)


# As commands


PLAN = planned(FIRST, reason="it is hot")
RECORD = PlanRecord(
    engine="engine-0",
    worker_id="7",
    model="m",
    epoch=0,
    policy="roost",
    tokens_per_second=1.0,
    pairs=1.0,
    judged_pairs=1.0,
    next_window=False,
    id=PLAN.id,
)


@contextmanager
def planner(
    nats_url: str, namespace: str, received: list[Message], *story: Message, plan: bytes = b""
) -> Iterator[None]:
    """A planner on a NATS server; `heard`: what it is asked."""

    @asynccontextmanager
    async def serving(bus: Bus, subjects: Subjects) -> AsyncIterator[None]:
        await bus.record(subjects.membership("engine-0"), joined("engine-0"))
        tell = telling(bus, subjects, *story)

        async def answer(message: Message) -> Message:
            received.append(message)
            if isinstance(message, DescribePlan):
                refused = None if plan else "no gain beyond sampling noise"
                return PlanDescribed(
                    engine="engine-0",
                    worker_id=7,
                    record=msgspec.json.encode(msgspec.structs.replace(RECORD, refused=refused)),
                    plan=plan,
                )
            return await tell(message)

        async with bus.serve(subjects.migrate, answer), bus.serve(subjects.describe_plan, answer):
            yield

    with on_nats(nats_url, namespace, serving):
        yield


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A namespace of its own."""
    name = f"migrations-{abs(hash(request.node.name))}"
    monkeypatch.setenv("ROOST_BUS_NAMESPACE", name)
    return name


def test_migrate_asks_for_an_expert_and_tells_what_came_of_it(nats_url: str, space: str) -> None:
    received: list[Message] = []
    with planner(nats_url, space, received, *GOOD):
        done = roost(
            "migrate", "--expert", "1/3", "--to", "e0/1", "--from", "0", "--move", "--nats", nats_url
        )
        assert done.exit_code == 0, done.output
        assert (
            "- expert 1/3 from rank 0 to rank 1\nplan cafe of engine-0: 3 copies (3 kB) in 2 handovers"
            in done.stdout
        ), "what moves is shown before it is asked for"
        assert "done: engine-0 serves epoch 2; 2 copies, 2 kB by shared, 0.50 s" in done.stdout
        order = MigrateExpert(engine="engine-0", layer=1, expert=3, rank=1, source=0, move=True)
        assert received == [msgspec.structs.replace(order, dry_run=True), order]
        found = json.loads(roost("rollback", "--to-before", "beef", "--json", "--nats", nats_url).stdout)
        assert (found["outcome"], found["epoch"]) == ("done", 2)
        assert received[2:] == [RollBack(engine="engine-0", plan="beef")]


def test_a_dry_run_shows_what_would_move_and_asks_for_nothing(nats_url: str, space: str) -> None:
    received: list[Message] = []
    with planner(nats_url, space, received):
        done = roost("migrate", "--expert", "1/3", "--to", "e0/1", "--dry-run", "--nats", nats_url)
    assert done.exit_code == 0, done.output
    assert "- expert 1/3 from rank 0 to rank 1" in done.stdout
    assert received == [MigrateExpert(engine="engine-0", layer=1, expert=3, rank=1, dry_run=True)]


def test_a_map_from_a_file_is_shown_and_asked_for(nats_url: str, space: str, tmp_path: Path) -> None:
    placement = linear(layers=2, experts=8, ranks=2)
    file = tmp_path / "map.json"
    file.write_bytes(encoded(placement, "vllm"))
    received: list[Message] = []
    with planner(nats_url, space, received, *GOOD):
        done = roost("migrate", "--map", str(file), "--to", "e0", "--nats", nats_url)
    assert done.exit_code == 0, done.output
    order = ApplyMap(engine="engine-0", placement=placement.record())
    assert received == [msgspec.structs.replace(order, dry_run=True), order]
    assert roost("migrate", "--map", str(file), "--expert", "1/3", "--to", "e0").exit_code == 2


def test_migrate_ends_in_status_1_when_it_is_given_up(nats_url: str, space: str) -> None:
    with planner(nats_url, space, [], *GOOD[:3], ABORTED):
        done = roost("migrate", "--expert", "1/3", "--to", "engine-0/1", "--nats", nats_url)
    assert done.exit_code == 1
    assert "given up (rank 1): rank 1 has no free cell" in done.stderr
    assert "engine-0 stays at epoch 1; 1 handover of 2 had been done" in done.stderr


def test_a_plan_is_written_to_a_file_and_carried_out_from_there(
    nats_url: str, space: str, tmp_path: Path
) -> None:
    received: list[Message] = []
    file, plan = tmp_path / "plan.json", msgspec.json.encode(PLAN)
    with planner(nats_url, space, received, *GOOD, plan=plan):
        written = roost("plan", "--out", str(file), "--nats", nats_url)
        assert (written.exit_code, file.read_bytes()) == (0, plan)
        assert f"roost migrate --plan {file} --to engine-0" in written.stderr
        assert roost("migrate", "--plan", str(file), "--nats", nats_url).exit_code == 0
        applied = roost("plan", "--apply", "--nats", nats_url)
        assert applied.exit_code == 0
        assert "dry run" not in applied.stdout
        assert "done: engine-0 serves epoch 2" in applied.stdout
        found = json.loads(roost("plan", "--apply", "--json", "--nats", nats_url).stdout)
        assert (found["asked"]["id"], found["outcome"]) == (PLAN.id, "done")
    assert [one for one in received if not isinstance(one, DescribePlan)] == [
        ApplyPlan(engine="engine-0", plan=plan)
    ] * 3


def test_a_plan_that_does_nothing_is_neither_applied_nor_written(
    nats_url: str, space: str, tmp_path: Path
) -> None:
    with planner(nats_url, space, []):
        for option in (("--apply",), ("--out", str(tmp_path / "plan.json"))):
            refused = roost("plan", *option, "--nats", nats_url)
            assert refused.exit_code == 1
            assert "no gain beyond sampling noise" in refused.stderr
    assert not (tmp_path / "plan.json").exists()
    file = tmp_path / "nothing.json"
    file.write_bytes(msgspec.json.encode(planned(FIRST, refused="not worth it")))
    assert "this plan does nothing: not worth it" in roost("migrate", "--plan", str(file)).stderr


@pytest.fixture
def signals() -> Iterator[None]:
    """What signals do is as before afterwards: a command that is interrupted lets a second one end the
    process."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_a_command_that_is_interrupted_leaves_its_plan_going_on_and_says_so(
    nats_url: str, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "deploy.client.migrations.PlanProgress.note",
        lambda self, message: os.kill(os.getpid(), signal.SIGINT),
    )
    with planner(nats_url, space, [], PLANNED):
        left = roost("migrate", "--expert", "1/3", "--to", "e0/1", "--nats", nats_url)
    assert left.exit_code == 130
    assert "plan cafe continues without this command: see roost events" in left.stderr


# With an engine and a planner


async def test_an_expert_moves_while_an_engine_serves_and_back_and_its_next_life_goes_on_with_that() -> None:
    bus, said = MemoryBus(), list[str]()
    service = MigrationService(bus, SUBJECTS, MigrationConfig(cycle_seconds=3600.0))

    async def do(order: Any) -> PlanProgress:
        return await carried_out(bus, SUBJECTS, order, wait=True, began=lambda _: None, say=said.append)

    async with (
        simulated_engine(bus, SUBJECTS, "sim-0", ranks=2, slots_per_rank=17) as host,
        alongside(service.run(), "the planner"),
        asyncio.timeout(20),
    ):
        await service.ready.wait()
        request = GenerationRequest(prompt=list(range(1, 20)), max_tokens=400, ignore_eos=True)
        alone = await (await host.engine.ranks[0].submit(request)).rest()
        meanwhile = await host.engine.ranks[0].submit(request)
        await anext(meanwhile)
        copied = await do(MigrateExpert(engine="sim-0", layer=2, expert=3, rank=1))
        assert (copied.aborted, copied.epoch, copied.copies, set(copied.by_transfer)) == (
            None,
            1,
            1,
            {"simulated"},
        )
        assert 3 in host.engine.placement.on_rank(1)[2]
        again = MigrateExpert(engine="sim-0", layer=2, expert=3, rank=1)
        with pytest.raises(NotAccepted, match="holds expert 2/3 already"):
            await do(again)
        moved = await do(MigrateExpert(engine="sim-0", layer=0, expert=5, rank=1, swap=20))
        assert (moved.epoch, moved.copies) == (2, 2)
        back = await do(RollBack(engine="sim-0", plan=copied.accepted.plan))
        assert back.epoch == host.engine.placement.epoch == 3
        first, now = SimulatedEngine(host.engine.config).placement, host.engine.placement
        assert np.array_equal(first.replicas_on_rank, now.replicas_on_rank)
        rest = (await meanwhile.rest()).token_ids
        assert rest == alone.token_ids[-len(rest) :]
    last = await last_record(bus, SUBJECTS, "sim-0")
    assert last is not None
    assert last.epoch == 3
    await bus.close()


async def test_an_engine_that_leaves_amid_a_plan_ends_it_with_a_word_why() -> None:
    bus, staging = MemoryBus(), asyncio.Event()
    service = MigrationService(bus, SUBJECTS, MigrationConfig(cycle_seconds=3600.0))

    async def hear() -> None:
        async with bus.subscribe(SUBJECTS.handovers()) as received:
            async for one in received:
                if isinstance(one.message, HandoverDescribed) and one.message.state == "staging":
                    staging.set()

    async with (
        alongside(service.run(), "the planner"),
        alongside(hear(), "hear of the staging"),
        asyncio.timeout(20),
    ):
        async with simulated_engine(bus, SUBJECTS, "sim-0", rank_bytes_per_second=1e3, ranks=2):
            await service.ready.wait()
            order = MigrateExpert(engine="sim-0", layer=2, expert=3, rank=1)
            course = asyncio.ensure_future(
                carried_out(bus, SUBJECTS, order, wait=True, began=lambda _: None, say=lambda _: None)
            )
            await staging.wait()
        failed = (await course).aborted
    assert failed is not None
    assert failed.reason
    assert failed.epoch == 1
    await bus.close()


async def test_status_tells_which_plan_is_under_way(bus: MemoryBus) -> None:
    async def migrating() -> list[str]:
        engines = await members(bus, SUBJECTS)
        await note_plans(bus, SUBJECTS, engines)
        return [engine.migrating for engine in engines if engine.joined.engine == "engine-0"]

    found = []
    earlier: dict[str, Any] = {
        **WHO,
        "plan": "before",
        "predicted_before": START,
        "predicted_after": PREDICTED,
        "plan_discount": 1.0,
    }
    judged = PlanEvaluated(**earlier, epoch=0, verdict="kept", reason="it stays")
    for said in (
        judged,
        PLANNED,
        judged,
        *GOOD,
        judged,
        PLANNED,
        judged,
        judged,
        ABORTED,
        judged,
        msgspec.structs.replace(PLANNED, worker_id=99),
        judged,
    ):
        await bus.record(SUBJECTS.migrations("engine-0"), said)
        found += await migrating()
    assert [bool(plan) for plan in found] == [
        False,
        True,
        True,
        *[True] * 4,
        False,
        False,
        True,
        True,
        True,
        *[False] * 4,
    ]
    assert set(found) == {"", "cafe"}
