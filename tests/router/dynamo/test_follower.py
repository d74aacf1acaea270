"""The router knows Dynamo's workers, their blocks and their loads."""

import asyncio
import random

import msgspec

from fleet.blocks import local_hashes, sequence_hashes
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvEvent, KvMetrics, KvStored, RoutedKvEvent
from router.fleet_state.engine_state import EngineStatus
from router.prefix_index.prompt import TokenPrompt
from tests.router.dynamo.fake_workers import DynamoFleet, dynamo_fleet, envelope
from tests.router.dynamo.recorded import DUMP, MESSAGES, WORKER, mutated, stored
from tests.router.router_fixture import until

TOKENS = list(range(64))


def blocks(
    worker: int, count: int, *, first: int = 0, rank: int = 0, event_id: int = 1
) -> tuple[RoutedKvEvent, ...]:
    """The event that a worker stored some blocks of TOKENS."""
    local = local_hashes(TOKENS)
    chained = sequence_hashes(local)
    change = KvStored(
        blocks=tuple(KvBlock(chained[at], local[at]) for at in range(first, first + count)),
        parent_hash=chained[first - 1] if first else None,
    )
    return (
        RoutedKvEvent(
            worker_id=worker, event=KvEvent(event_id=event_id, data=KvChange(stored=change), dp_rank=rank)
        ),
    )


def overlap(fleet: DynamoFleet) -> list[int]:
    table = fleet.service.scheduler.target_table("tiny")
    return fleet.service.scheduler.kv.block_index.overlap(table, TokenPrompt(TOKENS)).blocks.tolist()


async def test_a_recorded_worker_is_followed_with_its_events() -> None:
    async with dynamo_fleet() as fleet:
        fleet.calls.dumped = DUMP
        fleet.store.records = {key: record for key, (_, record) in stored().items()}
        await until(lambda: WORKER in fleet.follower.workers)
        assert len(fleet.feed.addresses) == 3  # blocks of two ranks, and the load of both
        await until(lambda: overlap(fleet) == [3, 3])
        for frames in MESSAGES:
            fleet.feed.messages.put_nowait(frames)
        await until(lambda: not fleet.service.fleet_subscriber.kv.out_of_step())  # type: ignore[union-attr]
        assert overlap(fleet) == [3, 3]
        assert fleet.follower.refused.total() == 0


async def test_workers_come_and_go() -> None:
    async with dynamo_fleet(11, 12) as fleet:
        assert fleet.service.view.models(live=True) == ["tiny"]
        fleet.store.records = {key: one for key, one in fleet.store.records.items() if "11" not in key}
        await until(lambda: set(fleet.follower.workers) == {12})
        assert [state.joined.worker_id for state in fleet.service.view.engines()] == [12]


async def test_events_are_followed_and_a_gap_is_repaired_from_dynamos_index() -> None:
    async with dynamo_fleet(11, 12) as fleet:
        await until(lambda: not fleet.service.fleet_subscriber.kv.out_of_step())  # type: ignore[union-attr]
        fleet.feed.messages.put_nowait(envelope(11, 0, blocks(11, 2)))
        await until(lambda: overlap(fleet) == [2, 0])
        fleet.calls.dumped = msgspec.json.encode(blocks(11, 4))
        before = fleet.calls.dumps
        fleet.feed.messages.put_nowait(envelope(11, 5, blocks(11, 1, first=3)))
        await until(lambda: overlap(fleet) == [4, 0])
        assert fleet.calls.dumps > before


async def test_ranks_that_ask_together_share_a_dump() -> None:
    async with dynamo_fleet(11, 12, 13, ranks=4) as fleet:
        await until(lambda: not fleet.service.fleet_subscriber.kv.out_of_step())  # type: ignore[union-attr]
        assert fleet.calls.dumps <= 6


async def test_a_restarted_publisher_is_read_anew() -> None:
    async with dynamo_fleet(11) as fleet:
        await until(lambda: not fleet.service.fleet_subscriber.kv.out_of_step())  # type: ignore[union-attr]
        fleet.feed.messages.put_nowait(envelope(11, 0, blocks(11, 3)))
        await until(lambda: overlap(fleet) == [3])
        fleet.feed.messages.put_nowait(envelope(11, 0, blocks(11, 1), publisher=78))
        await until(lambda: overlap(fleet) == [1])


def load(fleet: DynamoFleet) -> list[list[int]]:
    """The load of each rank: prompt tokens, requests, blocks, tokens to come."""
    service = fleet.service
    rows = service.scheduler.target_table("tiny").rows
    return [
        [int(one) for one in rank] for rank in service.scheduler.reservations.load(rows, service.clock()).T
    ]


def used(worker: int, blocks: int, rank: int = 0) -> list[bytes]:
    """The message that requests on a worker hold some blocks."""
    return envelope(worker, 0, KvMetrics(worker_id=worker, dp_rank=rank, kv_used_blocks=blocks), "kv_metrics")


async def test_blocks_that_no_booking_explains_are_requests_of_other_routers() -> None:
    async with dynamo_fleet(11, 12) as fleet:
        fleet.feed.messages.put_nowait(used(11, 33))
        await until(lambda: load(fleet)[0][1:3] == [2, 33])  # of 16 blocks, the size of an unknown request
        assert load(fleet)[1] == [0, 0, 0, 0]
        for _ in range(4):
            await fleet.ask(TOKENS)
        assert {one.instance for one in fleet.calls.served} == {12}
        fleet.feed.messages.put_nowait(used(11, 0))
        await until(lambda: load(fleet)[0] == [0, 0, 0, 0])


async def test_blocks_of_own_requests_count_once() -> None:
    async with dynamo_fleet(11) as fleet:
        fleet.calls.hold = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(fleet.ask(TOKENS, count=16))
            await until(lambda: fleet.calls.served)
            before = load(fleet)
            fleet.feed.messages.put_nowait(used(11, before[0][2]))
            await fleet.polled()
            assert load(fleet) == before
            fleet.feed.messages.put_nowait(used(11, 3 * before[0][2]))
            await until(lambda: load(fleet)[0][1] == 3)  # two more of the same size
            fleet.calls.hold.set()
            await asked
            await until(lambda: load(fleet)[0][1] == 1)


async def test_a_load_that_cannot_be_is_left_out() -> None:
    async with dynamo_fleet(11) as fleet:
        for frames in (used(11, 2**62), used(99, 50), used(11, 50, rank=7), used(11, -5)):
            fleet.follower.take(frames)
        fleet.follower.take(envelope(11, 0, KvMetrics(worker_id=11, active_decode_blocks=700), "kv_metrics"))
        await fleet.polled()
        assert load(fleet) == [[0, 0, 0, 0]]


async def test_a_worker_whose_connection_failed_waits_for_its_next_sign_of_life() -> None:
    async with dynamo_fleet(11) as fleet:
        fleet.service.view.unreachable(11)
        await asyncio.sleep(0.05)
        state = fleet.service.view.engine(11)
        assert state is not None
        assert state.status is EngineStatus.UNREACHABLE
        fleet.store.now = 3.0
        await until(lambda: state.status is EngineStatus.LIVE)


async def test_a_thousand_mutated_messages_and_records_are_counted_and_harm_nothing() -> None:
    chance = random.Random(5)
    async with dynamo_fleet(11) as fleet:
        for at in range(1000):
            frames = list(chance.choice(MESSAGES))
            frames[3] = mutated(frames[3], chance)
            fleet.follower.take(frames)
            key, (_, record) = chance.choice(list(stored().items()))
            fleet.store.records[f"bad{at % 8}{key}"] = mutated(record, chance)
            if at % 50 == 0:
                fleet.follower.update(await fleet.store.read())
        assert fleet.follower.refused["message"] > 500
        assert fleet.follower.refused["record"] > 50
        assert 11 in fleet.follower.workers
        fleet.store.records = {key: one for key, one in fleet.store.records.items() if "bad" not in key}
        await until(lambda: set(fleet.follower.workers) == {11})
