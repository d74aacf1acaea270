"""`roost layout`: what it shows, what it asks of the planner, and how other commands name sharded layers."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import pytest

from bus import Bus, Message
from bus.memory import MemoryBus
from bus.protocol.subjects import Subjects
from deploy.client.fleet_status import as_record, members
from deploy.views.event_lines import event_line
from deploy.views.status import engine_lines
from fleet.experts import ModelShape
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineJoined
from fleet.facts.migrations import MigrationCommitted, MigrationPlanned, MigrationStaged
from fleet.facts.placements import PlacementCommitted
from fleet.layout import DP_ATTENTION, TP_ATTENTION
from fleet.placement import linear, with_attention, with_rows
from fleet.requests.plans import KvMove, MigrationAccepted, SetLayout, SwitchEstimate
from tests.deploy.bus_responder import on_nats
from tests.deploy.commands import roost

pytestmark = pytest.mark.usefixtures("elsewhere")
SHAPE = ModelShape(layers=4, experts=8, top_k=2, hidden=16, expert_intermediate=8)
FIRST = linear(layers=4, experts=8, ranks=2)
JOINED = EngineJoined(
    engine="engine-0",
    worker_id=7,
    model="m",
    node="n",
    urls=("http://x", "http://y"),
    block_size=16,
    kv_blocks=8,
    max_context=512,
    max_batch_tokens=256,
    shape=SHAPE,
    attention=DP_ATTENTION,
    placement=FIRST.record(),
    unshardable="",
)
SERVED = PlacementCommitted(
    engine="engine-0",
    worker_id=7,
    attention=DP_ATTENTION,
    placement=with_rows(FIRST, {0: None, 1: None, 3: None}, epoch=5).record(),
)
PLANNED = MigrationPlanned(
    engine="engine-0",
    worker_id=7,
    plan="cafe",
    origin="operator",
    base_epoch=5,
    handovers=1,
    copies=8,
    bytes=4000,
    reason="layers 2 become sharded",
    to_sharded=(0, 1, 2),
    to_whole=(3,),
)
COMMITTED = MigrationCommitted(
    engine="engine-0",
    worker_id=7,
    plan="cafe",
    handover=3,
    number=0,
    epoch=6,
    copies=8,
    bytes=4000,
    seconds=0.5,
    commit_seconds=0.1,
    last=True,
)
ACCEPTED = MigrationAccepted(
    engine="engine-0",
    worker_id=7,
    plan="cafe",
    handovers=1,
    copies=8,
    bytes=4000,
    what=("layer 2: becomes sharded",),
    switch=SwitchEstimate(
        bytes_by_link={"local": 4000, "same-node": 0, "cross-node": 4000},
        seconds=1.5,
        budget_seconds=90.0,
        measured=True,
        cells=4,
        free=6,
    ),
)


@contextmanager
def planner(
    nats_url: str, namespace: str, received: list[Message], accepted: MigrationAccepted = ACCEPTED
) -> Iterator[None]:
    """Serve a planner that accepts a switch and records its end; `received`: the requests."""

    @asynccontextmanager
    async def serving(bus: Bus, subjects: Subjects) -> AsyncIterator[None]:
        await bus.record(subjects.membership("engine-0"), JOINED)
        await bus.record(subjects.placements("engine-0"), SERVED)

        async def answer(message: Message) -> Message:
            received.append(message)
            if isinstance(message, SetLayout) and not message.dry_run and accepted.handovers:
                for entry in (PLANNED, COMMITTED):
                    await bus.record(subjects.migrations("engine-0"), entry)
            return accepted

        async with bus.serve(subjects.migrate, answer):
            yield

    with on_nats(nats_url, namespace, serving):
        yield


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A namespace of its own."""
    name = f"layout-{abs(hash(request.node.name))}"
    monkeypatch.setenv("ROOST_BUS_NAMESPACE", name)
    monkeypatch.setenv("COLUMNS", "200")
    return name


def test_layouts_are_shown_with_those_that_cannot_be_set_and_why(nats_url: str, space: str) -> None:
    with planner(nats_url, space, []):
        shown = roost("layout", "--nats", nats_url)
        assert shown.exit_code == 0, shown.output
        assert "engine-0: epoch 5, 4 MoE layers, dp, layers 0-1, 3 sharded" in shown.stdout
        assert "no: its agent does not change its attention" in shown.stdout
        found = json.loads(roost("layout", "e0", "--json", "--nats", nats_url).stdout)["engine-0"]
        assert (found["epoch"], found["attention"], found["sharded"]) == (5, "dp", [0, 1, 3])
        assert [found["refused"][name] for name in ("ep", "experts-tp", "some layers")] == [None] * 3
        assert "no engine 'x'" in roost("layout", "x", "--nats", nats_url).stderr


def test_a_switch_is_shown_asked_for_and_followed_to_its_end(nats_url: str, space: str) -> None:
    received: list[Message] = []
    with planner(nats_url, space, received):
        done = roost("layout", "--set", "0-2", "--now", "--nats", nats_url)
    assert done.exit_code == 0, done.output
    for line in (
        "- layer 2: becomes sharded",
        "bytes: 4 kB local, 4 kB cross-node",
        "time: 1.50 s at the measured speed of links",
        "byte budget: it takes at least 90 s within it; --now ignores it",
        "cells: a rank fills up to 4 in a handover, of at least 6 that are free",
        "done: engine-0 serves epoch 6",
    ):
        assert line in done.stdout
    order = SetLayout(engine="engine-0", sharded=(0, 1, 2), now=True)
    assert received == [msgspec.structs.replace(order, dry_run=True), order]


def test_a_switch_of_attention_is_asked_for_with_all_layers_and_its_kv_is_shown(
    nats_url: str, space: str
) -> None:
    assert ACCEPTED.switch is not None
    kv = KvMove(pages=12, bytes=3_000_000, rounds=2, seconds=0.1, pause_seconds=0.002)
    estimate = msgspec.structs.replace(ACCEPTED.switch, cells=0, kv=kv)
    received: list[Message] = []
    with planner(nats_url, space, received, msgspec.structs.replace(ACCEPTED, switch=estimate)):
        done = roost("layout", "--set", "tp", "--dry-run", "--nats", nats_url)
    assert done.exit_code == 0, done.output
    assert "KV: with 12 pages in use" in done.stdout
    assert "in 2 rounds" in done.stdout
    assert "pauses for about 2 ms at the measured speed of links" in done.stdout
    assert "cells:" not in done.stdout
    assert received == [SetLayout(engine="engine-0", sharded=(0, 1, 2, 3), attention="tp", dry_run=True)]


def test_a_request_that_only_ends_a_waiting_plan_is_done_at_once(nats_url: str, space: str) -> None:
    line = "plan cafe, which waits for the byte budget after 1 of 3 handovers, ends, and nothing else changes"
    ended = MigrationAccepted(
        engine="engine-0", worker_id=7, plan="cafe", handovers=0, copies=0, bytes=0, what=(line,)
    )
    with planner(nats_url, space, [], ended):
        for arguments in (("layout", "--set", "0-1,3"), ("rollback", "--no-wait")):
            done = roost(*arguments, "--nats", nats_url)
            assert done.exit_code == 0, done.output
            assert f"- {line}" in done.stdout
            assert "done: engine-0 keeps what it serves" in done.stdout
            assert "continues without this command" not in done.stderr
        found = json.loads(roost("rollback", "--json", "--nats", nats_url).stdout)
        assert (found["outcome"], found["handovers"]) == ("done", 0)


def test_a_dry_run_asks_for_nothing_and_prints_json_for_programs(nats_url: str, space: str) -> None:
    received: list[Message] = []
    with planner(nats_url, space, received):
        done = roost("layout", "e0", "--set", "experts-tp", "--dry-run", "--json", "--nats", nats_url)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["switch"] == msgspec.to_builtins(ACCEPTED.switch)
    assert received == [SetLayout(engine="engine-0", sharded=(0, 1, 2, 3), dry_run=True)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "0-9"), "the model has MoE layers 0 to 3"),
        (("--set", "all"), "use ep, experts-tp, tp, or the layers"),
        (("--now",), "belongs to --set LAYOUT"),
    ],
)
def test_what_is_no_layout_is_a_mistake_in_the_command(
    nats_url: str, space: str, arguments: tuple[str, ...], words: str
) -> None:
    received: list[Message] = []
    with planner(nats_url, space, received):
        done = roost("layout", *arguments, "--nats", nats_url)
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert received == []


def test_events_name_the_layers_whose_form_changes() -> None:
    assert event_line(PLANNED) == (
        "engine-0: plan cafe of the operator begins, 8 copies, 4 kB, layers 0-2 become sharded, layers 3"
        " become whole"
    )
    staged = MigrationStaged(
        **{name: getattr(COMMITTED, name) for name in ("engine", "worker_id", "plan", "handover", "number")},
        epoch=6,
        placement=SERVED.placement,
        copies=8,
        bytes=4000,
        seconds=0.5,
    )
    assert str(event_line(staged)).endswith("; layers 0-1, 3 are sharded then")


def test_events_name_the_attention_that_changes() -> None:
    planned = msgspec.structs.replace(PLANNED, to_whole=(), attention="tp")
    assert str(event_line(planned)).endswith("layers 0-2 become sharded, attention becomes tensor-parallel")
    every = with_attention(with_rows(FIRST, dict.fromkeys(range(4)), epoch=6), "tp", epoch=7).record()
    staged = MigrationStaged(
        engine="engine-0", worker_id=7, plan="cafe", handover=4, number=1, epoch=7, placement=every,
        copies=0, bytes=0, seconds=0.1,
    )  # fmt: skip
    assert str(event_line(staged)).endswith(
        "; layers 0-3 are sharded then; attention is tensor-parallel then"
    )


async def test_under_tensor_parallel_attention_status_shows_an_engine_as_one_target() -> None:
    bus, subjects = MemoryBus(), Subjects()
    shape = msgspec.structs.replace(SHAPE, heads=4, kv_heads=2)
    every = with_rows(FIRST, dict.fromkeys(range(4)), epoch=6)
    await bus.record(subjects.membership("engine-0"), msgspec.structs.replace(JOINED, shape=shape))
    (one,) = await members(bus, subjects)
    for rank, used in enumerate((9, 3)):
        one.apply(KvMetrics(worker_id=7, dp_rank=rank, running=2, kv_used_blocks=used))
    assert [line.plain.split()[5] for line in list(engine_lines(one, each=True))[2:]] == ["9/8", "3/8"]
    one.apply(
        PlacementCommitted(
            engine="engine-0",
            worker_id=7,
            attention=TP_ATTENTION,
            placement=with_attention(every, "tp", epoch=7).record(),
        )
    )
    (row,) = [line.plain.split() for line in list(engine_lines(one, each=True))[2:]]
    assert (row[0], row[2], row[5]) == ("0-1", "2", "9/16"), "rank 0 speaks for all"
    assert (
        "running 2, waiting 0, prefill 0 tokens, KV blocks 9/16"
        in list(engine_lines(one, each=False))[1].plain
    )
    found = as_record(one)
    assert (found["targets"], found["kv_blocks"], found["target_kv_blocks"]) == (1, 8, 16)
    assert [rank["used_blocks"] for rank in found["ranks"]] == [9, None]
    await bus.close()


async def test_status_shows_the_forms_of_the_served_epoch() -> None:
    bus, subjects = MemoryBus(), Subjects()
    await bus.record(subjects.membership("engine-0"), JOINED)
    (before,) = await members(bus, subjects)
    assert "dp, experts whole" in next(engine_lines(before, each=False)).plain
    await bus.record(subjects.placements("engine-0"), msgspec.structs.replace(SERVED, worker_id=6))
    (other,) = await members(bus, subjects)
    assert "dp, experts whole" in next(engine_lines(other, each=False)).plain, "it is of another incarnation"
    await bus.record(subjects.placements("engine-0"), SERVED)
    (after,) = await members(bus, subjects)
    assert "dp, layers 0-1, 3 sharded" in next(engine_lines(after, each=False)).plain
    assert as_record(after)["layout"] == after.layout
    every = with_rows(FIRST, dict.fromkeys(range(4)), epoch=6)
    switched = PlacementCommitted(
        engine="engine-0",
        worker_id=7,
        attention=TP_ATTENTION,
        placement=with_attention(every, "tp", epoch=7).record(),
    )
    await bus.record(subjects.placements("engine-0"), switched)
    (last,) = await members(bus, subjects)
    assert "tp, layers 0-3 sharded" in next(engine_lines(last, each=False)).plain
    await bus.close()
