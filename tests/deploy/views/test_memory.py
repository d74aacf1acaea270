"""`roost layout --memory`: what ranks state, as a table and as JSON, and ranks that state nothing."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import msgspec
import pytest

from bus import Bus, Message
from bus.mailbox import Answer
from bus.protocol.subjects import Subjects
from deploy.client.memory import MemoryItems
from fleet.experts import ModelShape
from fleet.facts.engines import EngineJoined
from fleet.layout import DP_ATTENTION
from fleet.placement import linear
from fleet.requests.engines import DescribeMemory, MemoryDescribed
from fleet.requests.refusal import RequestRefused
from tests.deploy.bus_responder import on_nats
from tests.deploy.commands import roost

pytestmark = pytest.mark.usefixtures("elsewhere")
KB = 1000
RANKS = 10
JOINED = EngineJoined(
    engine="engine-0",
    worker_id=7,
    model="m",
    node="n",
    urls=("http://x",) * RANKS,
    block_size=16,
    kv_blocks=8,
    max_context=512,
    max_batch_tokens=256,
    shape=ModelShape(layers=2, experts=20, top_k=2, hidden=16, expert_intermediate=8),
    attention=DP_ATTENTION,
    placement=linear(layers=2, experts=20, ranks=RANKS).record(),
)
STATED = MemoryDescribed(
    worker_id=7,
    rank=0,
    cell_bytes=KB,
    cells={
        "whole": 40, "sharded": 20, "empty": 4, "free": 10,
        "pulling": 1, "verifying": 2, "staged": 3, "draining": 0, "quarantined": 5,
    },
    attention=100 * KB,
    other_weights=200 * KB,
    kv_pool=300 * KB,
    communicators=50 * KB,
    runtime=400 * KB,
    resident=2000 * KB,
    resident_shared=115 * KB,
    resident_foreign=30 * KB,
    resident_files=500 * KB,
)  # fmt: skip


@contextmanager
def engine(nats_url: str, namespace: str, ranks: Mapping[int, MemoryDescribed | str]) -> Iterator[None]:
    """Serve an engine of which these ranks answer: with their memory, or with a refusal."""

    def answering(rank: int, said: MemoryDescribed | str) -> Answer:
        async def answer(message: Message) -> Message:
            assert message == DescribeMemory(worker_id=7, rank=rank)
            return RequestRefused(reason=said) if isinstance(said, str) else said

        return answer

    @asynccontextmanager
    async def serving(bus: Bus, subjects: Subjects) -> AsyncIterator[None]:
        await bus.record(subjects.membership("engine-0"), JOINED)
        async with AsyncExitStack() as stack:
            for rank, said in ranks.items():
                subject = subjects.handover("engine-0", 7, rank)
                await stack.enter_async_context(bus.serve(subject, answering(rank, said)))
            yield

    with on_nats(nats_url, namespace, serving):
        yield


def of(rank: int) -> MemoryDescribed:
    return msgspec.structs.replace(STATED, rank=rank)


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A namespace of its own."""
    name = f"memory-{abs(hash(request.node.name))}"
    monkeypatch.setenv("ROOST_BUS_NAMESPACE", name)
    monkeypatch.setenv("COLUMNS", "200")
    return name


def test_items_add_up_to_the_resident_size() -> None:
    items = MemoryItems(STATED).items
    assert items == {
        "whole_experts": 40 * KB,
        "sharded_experts": 20 * KB,
        "empty_slots": 4 * KB,
        "spare_cells": 10 * KB,
        "staging": 11 * KB,
        "attention": 100 * KB,
        "other_weights": 200 * KB,
        "kv_pool": 300 * KB,
        "communicators": 50 * KB,
        "shared_with_ranks": 30 * KB,
        "libraries": 500 * KB,
        "runtime": 400 * KB,
        "other": 335 * KB,
    }
    assert sum(size for size in items.values() if size is not None) == STATED.resident


@pytest.mark.parametrize(
    ("change", "unknown"),
    [
        ({"attention": None}, {"attention", "other"}),
        ({"ranks_in_process": 4}, {"shared_with_ranks", "libraries", "other"}),
        ({"resident": 0}, {"shared_with_ranks", "libraries", "other"}),
    ],
)
def test_what_is_not_known_is_not_made_up(change: dict[str, int | None], unknown: set[str]) -> None:
    items = MemoryItems(msgspec.structs.replace(STATED, **change)).items
    assert {name for name, size in items.items() if size is None} == unknown


def test_the_memory_of_many_ranks_is_shown_in_several_tables(nats_url: str, space: str) -> None:
    note = "a \x1b[31mnote"
    stated = {rank: of(rank) for rank in range(RANKS)}
    stated[3] = msgspec.structs.replace(stated[3], note=note, kv_pool=None)
    with engine(nats_url, space, stated):
        shown = roost("layout", "e0", "--memory", "--nats", nats_url)
        found = json.loads(roost("layout", "--memory", "--json", "--nats", nats_url).stdout)["engine-0"]
    assert shown.exit_code == 0, shown.output
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "engine-0 rank 0 rank 1 rank 2 rank 3 rank 4 rank 5 rank 6 rank 7" in lines
    assert "engine-0 rank 8 rank 9" in lines
    assert "experts of whole layers 40 kB 40 kB" in lines
    assert "KV pool 300 kB 300 kB 300 kB unknown 300 kB 300 kB 300 kB 300 kB" in lines
    assert "other 335 kB 335 kB 335 kB unknown 335 kB 335 kB 335 kB 335 kB" in lines
    assert "resident size of the process 2 MB 2 MB" in lines
    assert "rank 9 has cells in staging: 1 pulling, 2 verifying, 3 staged, 5 quarantined" in lines
    assert "\x1b[31m" not in shown.stdout
    assert [one["items"]["kv_pool"] for one in found[2:4]] == [300 * KB, None]
    assert found[0]["cells"] == STATED.cells
    assert (found[0]["resident"], found[0]["resident_shared"]) == (2000 * KB, 115 * KB)


def test_ranks_that_state_nothing_are_named_with_the_reason(nats_url: str, space: str) -> None:
    refusal = "engine-0 moves its experts itself, and does not state the memory that it uses"
    answers = dict.fromkeys(range(1, RANKS - 1), refusal) | {0: of(0), RANKS - 1: of(0)}
    with engine(nats_url, space, answers):
        shown = roost("layout", "--memory", "--nats", nats_url)
        found = json.loads(roost("layout", "--memory", "--json", "--nats", nats_url).stdout)["engine-0"]
    assert shown.exit_code == 1, shown.output
    assert "rank 0" in shown.stdout
    assert f"engine-0 ranks 1, 2, 3, 4, 5, 6, 7, 8: {refusal}" in shown.stderr
    assert "engine-0 rank 9: it answered with MemoryDescribed" in shown.stderr, "it speaks for another rank"
    assert found[1] == {"refused": refusal}


def test_a_rank_that_is_gone_is_named(nats_url: str, space: str) -> None:
    with engine(nats_url, space, {rank: of(rank) for rank in range(RANKS - 1)}):
        shown = roost("layout", "--memory", "--nats", nats_url)
    assert shown.exit_code == 1, shown.output
    assert "engine-0 rank 9: " in shown.stderr


@pytest.mark.parametrize("option", [("--set", "ep"), ("--now",), ("--dry-run",), ("--no-wait",)])
def test_it_changes_nothing_and_says_so(nats_url: str, space: str, option: tuple[str, ...]) -> None:
    done = roost("layout", "--memory", *option, "--nats", nats_url)
    assert done.exit_code == 2, done.output
    assert f"{option[0]} does not go with --memory, which changes nothing" in done.stderr
