"""Large answers, in the number and size of a large fleet, from a real server with its default limits."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable

import pytest

from bus import Bus, Message
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from fleet.facts.demand import KeyedRows, TablesPublished
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvEvent, KvStored
from fleet.prediction import ROW
from fleet.requests.demand import DescribeTables
from fleet.requests.engines import KvSnapshot, KvSnapshotRequested

BLOCKS = 32_768
"""per rank: half a million tokens in blocks of 16"""
RANKS = 4
"""distinct ranks, queried repeatedly; each snapshot differs from the last, as on a busy rank"""
ROUTERS = 2
AT_ONCE = 4
"""concurrency of `router.sync.kv_event_subscriber`"""
TABLES_BYTES = 60 * 2**20


def snapshot(rank: int, sequence: int) -> KvSnapshot:
    """Return a snapshot of 1.9 MB."""
    base = (rank << 56) + (1 << 62)
    blocks = tuple(KvBlock(base + number, base - number) for number in range(BLOCKS))
    event = KvEvent(event_id=1, data=KvChange(stored=KvStored(blocks=blocks)), dp_rank=rank)
    return KvSnapshot(worker_id=1, rank=rank, publisher_id=7, sequence=sequence, events=(event,))


class Rank:
    """Answers each request with a new snapshot; the blocks are created once."""

    def __init__(self, rank: int) -> None:
        self.answered = 0
        self._snapshot = snapshot(rank, 0)

    async def answer(self, _: Message) -> KvSnapshot:
        self.answered += 1
        known = self._snapshot
        return KvSnapshot(
            worker_id=1, rank=known.rank, publisher_id=7, sequence=self.answered, events=known.events
        )


def tables(model: str) -> TablesPublished:
    rows = TABLES_BYTES // (8 + ROW)
    return TablesPublished(
        model=model,
        version=1,
        clusters=1,
        shares=b"",
        trust={},
        reliability={},
        gain=0.0,
        buckets=0,
        blocks=KeyedRows(keys=os.urandom(8) * rows, rows=os.urandom(ROW) * rows),
    )


Connect = Callable[[], contextlib.AbstractAsyncContextManager[Bus]]


@pytest.fixture
def connect(nats_url: str) -> Connect:
    """Connect clients of one namespace with common settings."""
    subjects_of = f"size{time.monotonic_ns()}"

    @contextlib.asynccontextmanager
    async def connected() -> AsyncIterator[Bus]:
        bus = await NatsBus.connect(nats_url, Subjects(subjects_of))
        try:
            yield bus
        finally:
            await bus.close()

    return connected


async def ask_for_snapshots(connect: Connect, count: int) -> list[KvSnapshot]:
    """Request snapshots from RANKS ranks in turn, by ROUTERS routers, without pauses. Returns them without
    their events.
    """
    subjects, ranks, found = Subjects(), [Rank(number) for number in range(RANKS)], list[KvSnapshot]()
    async with contextlib.AsyncExitStack() as stack:
        engine, *routers = [await stack.enter_async_context(connect()) for _ in range(1 + ROUTERS)]
        for number, rank in enumerate(ranks):
            await stack.enter_async_context(engine.serve(subjects.kv_snapshot("e", 1, number), rank.answer))
        wanted = iter(range(count))

        async def ask(router: Bus) -> None:
            for number in wanted:
                rank = number % RANKS
                answer = await router.request(
                    subjects.kv_snapshot("e", 1, rank), KvSnapshotRequested(worker_id=1, rank=rank), 20.0
                )
                assert isinstance(answer, KvSnapshot)
                assert (answer.rank, len(answer.events[0].data.stored.blocks)) == (rank, BLOCKS)  # type: ignore[union-attr]
                found.append(
                    KvSnapshot(worker_id=1, rank=rank, publisher_id=7, sequence=answer.sequence, events=())
                )

        await asyncio.gather(*(ask(router) for router in routers for _ in range(AT_ONCE)))
        assert sum(engine.refusals.values()) == 0
        assert {use.store: use.used for use in await engine.stores()}["parcels"] == 0
    return found


async def test_more_snapshots_flow_than_the_bucket_had_room_for(connect: Connect) -> None:
    found = await ask_for_snapshots(connect, 100)
    assert sorted((one.rank, one.sequence) for one in found) == [
        (rank, number) for rank in range(RANKS) for number in range(1, 26)
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_snapshots_of_a_thousand_ranks_flow(connect: Connect) -> None:
    assert len(await ask_for_snapshots(connect, 1000)) == 1000


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_two_routers_that_start_beside_four_models_get_the_whole_tables_of_each(
    connect: Connect,
) -> None:
    said = {model: tables(model) for model in ("a", "b", "c", "d")}

    async def answer(request: Message) -> Message:
        assert isinstance(request, DescribeTables)
        return said[request.model]

    async with connect() as tracker, connect() as first, connect() as second:
        async with tracker.serve(Subjects().describe_profile, answer):
            asked = [
                router.request(Subjects().describe_profile, DescribeTables(model=model), 60.0)
                for router in (first, second)
                for model in said
            ]
            answers = await asyncio.gather(*asked)
        assert answers == [*said.values(), *said.values()]
        assert sum(tracker.refusals.values()) == 0
