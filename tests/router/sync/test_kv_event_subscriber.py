"""Prefix knowledge of the router: the index of KV events, repaired feeds, and the approximate index without
events.
"""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus import Message, Received
from bus.memory import MemoryBroker, MemoryBus
from fleet.blocks import local_hashes, sequence_hashes
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvEvent, KvStored, RoutedKvEvent
from fleet.requests.engines import KvSnapshot, KvSnapshotRequested
from router.prefix_index.approximate_index import ApproximateIndex
from router.prefix_index.block_index import BlockIndex
from router.prefix_index.kv_event_index import KvEventIndex
from router.prefix_index.prompt import BYTES_PER_TOKEN, TextPrompt, TokenPrompt
from router.sync.kv_event_subscriber import KvEventSubscriber
from router.telemetry.metrics import RouterMetrics
from tests.router.block_builders import overlap, removed
from tests.router.router_fixture import WORKER, metric, stored, until

TOKENS = list(range(1000, 1040))
LOCAL = local_hashes(TOKENS, 4)
CHAINED = sequence_hashes(LOCAL)


# Feeds


class Rank:
    """KV side of a rank's agent: numbered batches, and a snapshot of all of them."""

    def __init__(self, bus: MemoryBus, broker: MemoryBroker) -> None:
        self.publisher = bus.publisher(broker.subjects.kv_events)
        self.sent: list[KvEvent] = []
        self.snapshots = 0
        self.epoch = 0
        self.answering = asyncio.Event()
        self.answering.set()

    async def say(self, *events: RoutedKvEvent, lost: bool = False) -> None:
        self.sent += [event.event for event in events]
        if lost:
            self.publisher.number()
        else:
            await self.publisher.publish(
                tuple(msgspec.structs.replace(event, epoch=self.epoch) for event in events)
            )

    async def switch(self, epoch: int, *blocks: RoutedKvEvent) -> None:
        """Begin an epoch with other attention: clear the cache, and store what is there now."""
        self.epoch, self.sent = epoch, []
        await self.say(cleared(), *blocks)

    async def answer(self, request: Message) -> Message:
        assert isinstance(request, KvSnapshotRequested)
        self.snapshots += 1
        events, sequence, epoch = tuple(self.sent), self.publisher.sequence - 1, self.epoch
        await self.answering.wait()
        return KvSnapshot(
            worker_id=WORKER,
            rank=0,
            publisher_id=self.publisher.publisher_id,
            sequence=sequence,
            events=events,
            epoch=epoch,
        )


def cleared() -> RoutedKvEvent:
    return RoutedKvEvent(worker_id=WORKER, event=KvEvent(event_id=1, data="cleared", dp_rank=0))


class World:
    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.rank = Rank(self.bus, self.broker)
        self.index = KvEventIndex(BlockIndex())
        self.metrics = RouterMetrics()
        self.feeds = KvEventSubscriber(self.index, MemoryBus(self.broker), self.broker.subjects, self.metrics)

    @property
    def overlap(self) -> int:
        return overlap(self.index.block_index, CHAINED).get((WORKER, 0), 0)

    @property
    def in_step(self) -> bool:
        return self.feeds.in_step((WORKER, 0))

    def requested(self, reason: str) -> float:
        return metric(self.metrics, "kv_snapshots_total", reason=reason)

    async def live(self, started: asyncio.Event) -> None:
        """Run the rank's server and the router's subscriber until cancelled."""
        subjects = self.broker.subjects
        async with (
            self.bus.serve(subjects.kv_snapshot("e", WORKER, 0), self.rank.answer),
            MemoryBus(self.broker).subscribe(subjects.kv_events) as inbox,
        ):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.feeds.run(), name="repairs")
                started.set()
                async for received in inbox:
                    self.feeds.receive(received)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world, started = World(), asyncio.Event()
    task = asyncio.create_task(world.live(started), name="the world")
    await started.wait()
    yield world
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_router_that_starts_late_asks_for_what_is_there(world: World) -> None:
    await world.rank.say(stored(LOCAL[:5]))
    world.feeds.add((WORKER, 0), "e")
    await until(lambda: world.in_step)
    assert world.overlap == 5
    await world.rank.say(stored(LOCAL[5:7], LOCAL[:5]))
    await until(lambda: world.overlap == 7)
    assert world.rank.snapshots == 1


async def test_a_gap_is_repaired_by_a_snapshot(world: World) -> None:
    world.feeds.add((WORKER, 0), "e")
    await world.rank.say(stored(LOCAL[:2]))
    await until(lambda: world.in_step and world.overlap == 2)
    await world.rank.say(stored(LOCAL[2:4], LOCAL[:2]), lost=True)
    await world.rank.say(stored(LOCAL[4:6], LOCAL[:4]))
    await until(lambda: world.in_step and world.overlap == 6)
    assert world.requested("gap") == 1


async def test_a_batch_with_a_bad_event_is_repaired_by_a_snapshot(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.sync.kv_event_subscriber._BAD_EVENT_SECONDS", 0.01)
    world.feeds.add((WORKER, 0), "e")
    await world.rank.say(stored(LOCAL[:2]))
    await until(lambda: world.in_step and world.overlap == 2)
    bad = RoutedKvEvent(worker_id=WORKER, event=KvEvent(event_id=9, data=KvChange(), dp_rank=0))
    world.rank.sent += [
        event.event for event in (stored(LOCAL[2:4], LOCAL[:2]), stored(LOCAL[4:6], LOCAL[:4]))
    ]
    await world.rank.publisher.publish((stored(LOCAL[2:4], LOCAL[:2]), bad, stored(LOCAL[4:6], LOCAL[:4])))
    await until(lambda: world.in_step and world.overlap == 6)
    assert world.requested("bad_event") == 1
    await world.rank.say(stored(LOCAL[6:8], LOCAL[:6]))
    await until(lambda: world.overlap == 8)


async def test_a_lost_removal_is_noticed_by_the_next_message(world: World) -> None:
    world.feeds.add((WORKER, 0), "e")
    await world.rank.say(stored(LOCAL[:6]))
    await until(lambda: world.overlap == 6)
    await world.rank.say(removed(LOCAL, [5, 4, 3]), lost=True)
    await world.rank.say(stored(local_hashes([1, 2, 3, 4], 4)))
    await until(lambda: world.in_step and world.overlap == 3)


async def test_events_that_arrive_while_a_snapshot_is_awaited_are_applied_after_it(world: World) -> None:
    world.rank.answering.clear()
    await world.rank.say(stored(LOCAL[:2]))
    world.feeds.add((WORKER, 0), "e")
    await until(lambda: world.rank.snapshots == 1)
    await world.rank.say(stored(LOCAL[2:5], LOCAL[:2]))
    await world.rank.say(removed(LOCAL, [4]))
    await asyncio.sleep(0.01)  # they have arrived, and must not be applied yet
    assert world.overlap == 0
    world.rank.answering.set()
    await until(lambda: world.in_step)
    assert world.overlap == 4
    assert world.rank.snapshots == 1


async def test_messages_that_a_snapshot_contains_already_are_not_applied_twice(world: World) -> None:
    world.feeds.add((WORKER, 0), "e")
    await until(lambda: world.in_step)
    await world.rank.say(stored(LOCAL[:3]))
    await until(lambda: world.overlap == 3)
    late = Received(
        world.broker.subjects.kv_events,
        world.rank.publisher.publisher_id,
        0,
        0.0,
        (removed(LOCAL, [0, 1, 2]),),
    )
    world.feeds.receive(late)
    assert (world.overlap, world.in_step) == (3, True)


async def test_a_restarted_publisher_is_met_with_a_snapshot(world: World) -> None:
    world.feeds.add((WORKER, 0), "e")
    await world.rank.say(stored(LOCAL[:3]))
    await until(lambda: world.overlap == 3)
    world.rank.publisher = world.bus.publisher(world.broker.subjects.kv_events)
    world.rank.sent = []
    await world.rank.say(stored(LOCAL[:1]))
    await until(lambda: world.in_step and world.overlap == 1)


async def test_a_block_behind_an_unknown_parent_calls_for_a_snapshot(world: World) -> None:
    world.feeds.add((WORKER, 0), "e")
    await until(lambda: world.in_step)
    world.rank.sent = [stored(LOCAL[:2]).event]
    await world.rank.say(stored(LOCAL[2:4], LOCAL[:2]))
    await until(lambda: world.in_step and world.overlap == 4)
    assert world.requested("orphan") == 1


async def test_a_snapshot_is_requested_again_until_the_rank_answers(world: World) -> None:
    refusals = iter([True, True])
    honest = world.rank.answer

    async def reluctant(request: Message) -> Message:
        if next(refusals, False):
            raise RuntimeError("not now")
        return await honest(request)

    async with world.bus.serve(world.broker.subjects.kv_snapshot("e", WORKER, 1), reluctant):
        world.feeds.add((WORKER, 1), "e")
        await until(lambda: next(refusals, None) is None)
    world.feeds.forget_worker(WORKER)
    assert not world.feeds.in_step((WORKER, 1))


async def test_messages_held_back_for_a_snapshot_are_bounded_and_the_snapshot_is_requested_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.sync.kv_event_subscriber._LATE_BLOCKS", 8)
    world.rank.answering.clear()
    world.feeds.add((WORKER, 0), "e")
    await until(lambda: world.rank.snapshots == 1)
    for at in range(9):
        await world.rank.say(stored(LOCAL[at : at + 1], LOCAL[:at]))
    await until(lambda: world.feeds.late_blocks == 2 * 1)  # only the ninth: its event and its block
    world.rank.answering.set()
    await until(lambda: world.in_step and world.overlap == 9)
    assert (world.rank.snapshots, world.requested("gap"), world.feeds.late_blocks) == (2, 1, 0)


async def test_snapshots_larger_than_a_slice_are_applied_completely(world: World) -> None:
    long = local_hashes(list(range(4 * 1500)), 4)
    chained = sequence_hashes(long)
    for at in range(len(long)):
        one = KvStored(blocks=(KvBlock(chained[at], long[at]),), parent_hash=chained[at - 1] if at else None)
        world.rank.sent.append(KvEvent(event_id=at, data=KvChange(stored=one)))
    await world.rank.publisher.publish((stored(local_hashes([9, 9, 9, 9], 4)),))
    world.feeds.add((WORKER, 0), "e")
    await until(lambda: world.in_step)
    assert overlap(world.index.block_index, chained)[WORKER, 0] == 1500


async def test_nonsense_from_ranks_is_counted_and_changes_nothing(world: World) -> None:
    world.feeds.add((WORKER, 0), "e")
    await until(lambda: world.in_step)
    await world.rank.say(stored(LOCAL[:2]))
    subject, publisher = world.broker.subjects.kv_events, world.rank.publisher.publisher_id
    world.feeds.receive(Received(subject, 99, 0, 0.0, ()))
    world.feeds.receive(Received(subject, publisher, 0, 0.0, (stored(LOCAL), stored(LOCAL, rank=1))))
    world.feeds.receive(Received(subject, 99, 5, 0.0, (stored(LOCAL, worker=4711),)))
    await until(lambda: world.overlap == 2)
    assert metric(world.metrics, "bus_messages_refused_total") == 1
    assert overlap(world.index.block_index, CHAINED) == {(WORKER, 0): 2}


# Changes of attention


async def test_events_of_the_new_attention_that_came_before_the_news_of_it_are_kept(world: World) -> None:
    world.feeds.add((WORKER, 0), "e")
    await world.rank.say(stored(LOCAL[:6]))
    await until(lambda: world.overlap == 6)
    await world.rank.switch(4, stored(LOCAL[:3]))
    await until(lambda: world.overlap == 3)
    world.feeds.restart(WORKER, 4)
    assert (world.overlap, world.in_step, world.rank.snapshots) == (3, True, 1)
    await world.rank.say(stored(LOCAL[3:5], LOCAL[:3]))
    await until(lambda: world.overlap == 5)


async def test_nothing_of_before_a_change_of_attention_counts_after_the_news_of_it(world: World) -> None:
    world.feeds.add((WORKER, 0), "e")
    await world.rank.say(stored(LOCAL[:6]))
    await until(lambda: world.overlap == 6)
    world.feeds.restart(WORKER, 4)
    assert world.overlap == 0
    await world.rank.say(stored(LOCAL[6:8], LOCAL[:6]))  # the last of the epoch before
    await until(lambda: world.rank.snapshots >= 2)
    assert (world.overlap, world.in_step) == (0, False), "its snapshot is of the epoch before"
    await world.rank.switch(4, stored(LOCAL[:3]))
    await until(lambda: world.in_step)
    assert world.overlap == 3
    assert world.requested("attention") == 1
    world.feeds.restart(WORKER, 4)
    assert world.in_step, "the same news again"


async def test_a_snapshot_that_was_under_way_as_the_attention_changed_is_not_used(world: World) -> None:
    world.rank.answering.clear()
    await world.rank.say(stored(LOCAL[:6]))
    world.feeds.add((WORKER, 0), "e")
    await until(lambda: world.rank.snapshots == 1)
    world.feeds.restart(WORKER, 4)
    world.rank.answering.set()
    await until(lambda: world.rank.snapshots >= 2)
    assert world.overlap == 0
    await world.rank.switch(4, stored(LOCAL[:2]))
    await until(lambda: world.in_step)
    assert world.overlap == 2


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["store", "switch", "news", "lose", "wait"]), min_size=4, max_size=14))
def test_in_whatever_order_news_and_events_come_only_the_newest_known_epoch_counts(steps: list[str]) -> None:
    async def walk() -> None:
        world, started = World(), asyncio.Event()
        task = asyncio.create_task(world.live(started))
        await started.wait()
        world.feeds.add((WORKER, 0), "e")
        rank, known, stored_blocks = world.rank, 0, 0
        for step in [*steps, "news"]:
            match step:
                case "store" | "lose":
                    await rank.say(
                        stored(LOCAL[stored_blocks : stored_blocks + 1], LOCAL[:stored_blocks]),
                        lost=step == "lose",
                    )
                    stored_blocks += 1
                case "switch" if known == rank.epoch:
                    stored_blocks = 1
                    await rank.switch(rank.epoch + 1, stored(LOCAL[:1]))
                case "news" if known < rank.epoch:
                    known = rank.epoch
                    world.feeds.restart(WORKER, known)
                case "wait":
                    await until(lambda: world.in_step)
            stored_blocks %= len(LOCAL)
            if not stored_blocks:
                break
            if world.in_step:
                assert world.overlap <= max(stored_blocks, 1) or known < rank.epoch
        await rank.say(removed(LOCAL, []))
        await until(lambda: world.in_step and world.overlap == min(stored_blocks, len(LOCAL)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    if steps.count("store") + steps.count("lose") < len(LOCAL):
        asyncio.run(walk())


# Approximate index


def guesses(capacity: int) -> tuple[ApproximateIndex, BlockIndex]:
    block_index = BlockIndex()
    return ApproximateIndex(capacity, block_index), block_index


def test_prefixes_remember_what_was_routed_where() -> None:
    prefixes, block_index = guesses(100)
    prefixes.routed((1, 0), CHAINED[:5])
    prefixes.routed((2, 0), CHAINED[:2])
    assert overlap(block_index, CHAINED) == {(1, 0): 5, (2, 0): 2}
    assert overlap(block_index, sequence_hashes(LOCAL[1:])) == {}
    prefixes.forget_worker(1)
    assert overlap(block_index, CHAINED) == {(2, 0): 2}


def test_a_prefix_memory_never_exceeds_its_capacity_and_keeps_nearly_as_much() -> None:
    capacity, each = 1000, 9
    prefixes, block_index = guesses(capacity)
    prompts = [list(range(1 + each * at, 1 + each * (at + 1))) for at in range(400)]
    for number, blocks in enumerate(prompts, 1):
        prefixes.routed((1, 0), blocks)
        assert len(prefixes) == block_index.held((1, 0))
        assert min(each * number, 15 * capacity // 16) <= len(prefixes) <= capacity
        assert all(block_index.holds((1, 0), prompt[-1]) for prompt in prompts[max(number - 100, 0) : number])


def test_a_full_prefix_memory_forgets_the_oldest_prompt_from_its_end() -> None:
    prefixes, block_index = guesses(6)
    other = sequence_hashes(local_hashes(list(range(16)), 4))
    prefixes.routed((1, 0), CHAINED[:4])
    prefixes.routed((1, 0), other)
    assert len(prefixes) == block_index.held((1, 0)) == 6
    assert overlap(block_index, other) == {(1, 0): 4}
    assert overlap(block_index, CHAINED) == {(1, 0): 2}
    prefixes.routed((1, 0), CHAINED, capacity=3)
    assert len(prefixes) == 3
    assert overlap(block_index, CHAINED) == {(1, 0): 3}


def test_ranks_share_what_all_prefix_memories_together_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.prefix_index.approximate_index.MAX_BLOCKS", 12)
    prefixes, block_index = guesses(100)
    for rank in range(4):
        prefixes.routed((1, rank), CHAINED)
    assert [block_index.held((1, rank)) for rank in range(4)] == [10, 6, 4, 3]
    prefixes.routed((1, 0), CHAINED)
    assert overlap(block_index, CHAINED)[1, 0] == 3


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12), st.integers(1, 8))
def test_a_prefix_memory_never_exceeds_its_capacity_and_keeps_the_newest_prompts_head(
    prompts: list[list[int]], capacity: int
) -> None:
    prefixes, block_index = guesses(capacity)
    for prompt in prompts:
        chained = sequence_hashes(prompt)
        prefixes.routed((1, 0), chained)
        assert len(prefixes) == block_index.held((1, 0)) <= capacity
        if prompt:
            assert overlap(block_index, chained)[1, 0] == min(len(prompt), capacity)


def test_text_blocks_stand_in_for_tokens() -> None:
    text = b"The same beginning, over and over. " * 20
    one, two = TextPrompt(text + b"first", "demo"), TextPrompt(text + b"second", "demo")
    assert one.tokens == len(text + b"first") // BYTES_PER_TOKEN
    same = [a == b for a, b in zip(one.chained(16), two.chained(16), strict=False)]
    assert sum(same) == (8 + len(text)) // 64
    assert len(TextPrompt(b"", "demo").chained(16)) == len(TextPrompt(b"short", "demo").chained(16)) == 0


def test_models_of_one_server_share_no_text_blocks() -> None:
    text = b"The same beginning, over and over. " * 20
    assert not set(TextPrompt(text, "base").chained(16)) & set(TextPrompt(text, "adapter").chained(16))


def test_the_chain_of_a_token_prompt_is_made_per_block_size() -> None:
    prompt = TokenPrompt(TOKENS)
    assert prompt.chained(4)[:] == CHAINED
    assert prompt.chained(8)[:] == sequence_hashes(local_hashes(TOKENS, 8))
