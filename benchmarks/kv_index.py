"""Prefix index compared with Dynamo's RadixTree, in one run: look-ups of a decision, events of ranks, and
memory.

Look-ups start from a prompt's token ids. They return the leading blocks at each target, as a column, and the
sequence hash of the last known block, which predicts experts. Nothing, half, or all of a prompt is held by a
rank of every other engine (its first 16 blocks by all). `in Python`: without the compiled hashing. Events
start as bytes: envelope, payload, subscriber, index. Memory is measured in a separate process.

    python -m benchmarks.kv_index --quick
"""

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import typer
from dynamo._core import RadixTree
from numpy.typing import NDArray

from benchmarks.rig.decisions import BLOCK_SIZE, RANKS, Held, Prompts, Rank, fresh, prompts
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, median, percentile
from bus import Message, Received
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.codec import decode, encode, seal, unseal
from bus.protocol.subjects import KV_EVENTS
from fleet.blocks import local_hashes, sequence_hashes
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvEvent, KvStored, RoutedKvEvent
from fleet.requests.engines import KvSnapshot, KvSnapshotRequested
from router import kernels
from router.fleet_state.target_table import TargetTable
from router.prefix_index.block_index import BlockIndex
from router.prefix_index.kv_event_index import KvEventIndex
from router.prefix_index.prompt import TokenPrompt
from router.sync.kv_event_subscriber import KvEventSubscriber
from router.telemetry.metrics import RouterMetrics

FLEETS = (8, 64, 512)
SHARES = {"nothing": 0.0, "half": 0.5, "all": 1.0}
LENGTHS = (1024, 4096, 16_384)
FASTER, BLOCKS_PER_SECOND, EVENTS_PER_SECOND, MEMORY_LIMIT = 2.0, 200_000.0, 15_000.0, 0.2
"""least ratio to the tree's speed; blocks and events per second; GB for ENTRIES"""
ENTRIES = 1_000_000
SHARED_BY = 8
"""ranks that hold a shared block"""
PUBLISHER = 7


def changed(rank: Rank, local: list[int], number: int, behind: int | None = None) -> RoutedKvEvent:
    """Return the event of a rank that stored blocks after a prefix."""
    chained = sequence_hashes(local, behind)
    stored = KvStored(
        blocks=tuple(KvBlock(*pair) for pair in zip(chained, local, strict=True)), parent_hash=behind
    )
    return RoutedKvEvent(
        worker_id=rank[0], event=KvEvent(event_id=number, dp_rank=rank[1], data=KvChange(stored=stored))
    )


# Look-ups


class Ours:
    def __init__(self, ranks: list[Rank]) -> None:
        self.block_index = BlockIndex()
        self._index = KvEventIndex(self.block_index)
        targets = tuple(SimpleNamespace(key=rank) for rank in ranks)
        self._target_table = cast(
            TargetTable, SimpleNamespace(model="m", targets=targets, block_sizes=(BLOCK_SIZE,))
        )

    def hold(self, held: Held) -> None:
        local = local_hashes(held.ids[: held.tokens])
        self._index.apply(changed(rank, local, 1) for rank in held.ranks)

    def find(self, ids: list[int]) -> tuple[NDArray[np.int64], int]:
        prompt = TokenPrompt(ids)
        blocks, known = self.block_index.overlap(self._target_table, prompt)
        return blocks, prompt.chained(BLOCK_SIZE)[known - 1] if known else 0


class Tree:
    def __init__(self, ranks: list[Rank]) -> None:
        self._tree: Any = RadixTree()
        self._at = {rank: at for at, rank in enumerate(ranks)}

    def hold(self, held: Held) -> None:
        local = local_hashes(held.ids[: held.tokens])
        for rank in held.ranks:
            self._tree.apply_event(rank[0], json.dumps(_plain(changed(rank, local, 1))).encode())

    def find(self, ids: list[int]) -> tuple[NDArray[np.int64], int]:
        overlap = np.zeros(len(self._at), np.int64)
        local = local_hashes(ids, BLOCK_SIZE)
        for rank, blocks in self._tree.find_matches(local).scores.items():
            overlap[self._at[rank]] = blocks
        known = int(np.maximum.reduce(overlap))
        return overlap, sequence_hashes(local[:known])[-1] if known else 0


def _plain(routed: RoutedKvEvent) -> dict[str, Any]:
    change = cast(KvChange, routed.event.data)
    assert change.stored is not None
    blocks = [
        {"block_hash": block.block_hash, "tokens_hash": block.tokens_hash} for block in change.stored.blocks
    ]
    return {
        "event_id": 1,
        "dp_rank": routed.event.dp_rank,
        "data": {"stored": {"parent_hash": change.stored.parent_hash, "blocks": blocks}},
    }


class Compared:
    """Microseconds of look-ups by fleet, share and length: Roost's, those of its Python form, the tree's."""

    def __init__(self, quick: bool) -> None:
        chance = np.random.default_rng(0)
        self.asked = {
            (name, length): prompts(chance, length, share, 32)
            for name, share in SHARES.items()
            for length in LENGTHS
        }
        self.rounds = 4 if quick else 20
        self.report = Report(
            "from token ids to leading blocks by target, us",
            ["ranks, held, prompt", "ours p50", "p99", "in Python p50", "RadixTree p50", "p99", "faster"],
        )
        self.faster: dict[tuple[int, str, int], float] = {}

    def run(self) -> None:
        for count in FLEETS:
            ranks = [(engine, rank) for engine in range(1, count // RANKS + 1) for rank in range(RANKS)]
            ours, tree = Ours(ranks), Tree(ranks)
            for part in self.asked.values():
                for held in part.held(count // RANKS):
                    ours.hold(held)
                    tree.hold(held)
            for (name, length), part in self.asked.items():
                self._measure(count, name, length, part, ours, tree)

    def _measure(self, count: int, name: str, length: int, part: Prompts, ours: Ours, tree: Tree) -> None:
        compiled: list[float] = []
        python: list[float] = []
        theirs: list[float] = []
        for _ in range(self.rounds):
            with kernels.python_form():
                _timed(ours.find, part, python)
            _timed(tree.find, part, theirs)
            _timed(ours.find, part, compiled)
        for ids in part.ids[::5]:
            (overlap, last), (expected, expected_last) = ours.find(ids), tree.find(ids)
            if last != expected_last or not np.array_equal(overlap, expected):
                raise RuntimeError(
                    f"{count} ranks, {name} held, {length} tokens: the index and the tree found different"
                    " blocks"
                )
        faster = median(theirs) / median(compiled)
        self.faster[count, name, length] = faster
        cells = (
            median(compiled),
            percentile(compiled, 0.99),
            median(python),
            median(theirs),
            percentile(theirs, 0.99),
            faster,
        )
        self.report.add(f"{count}, {name}, {length} tokens", *cells)


def _timed(find: Callable[[list[int]], object], part: Prompts, taken: list[float]) -> None:
    """Append the microseconds of a look-up of each prompt."""
    for ids in map(fresh, part.ids):
        began = time.perf_counter()
        find(ids)
        taken.append(1e6 * (time.perf_counter() - began))


# Events


async def ingested(events: int, blocks: int) -> float:
    """Return events per second on one core, each of `blocks` blocks in one message: from bytes to the index,
    64 ranks in turn."""
    ranks = [(engine, rank) for engine in range(1, 9) for rank in range(RANKS)]
    broker = MemoryBroker()
    index = KvEventIndex(BlockIndex())
    feeds = KvEventSubscriber(index, MemoryBus(broker), broker.subjects, RouterMetrics())
    await _joined(feeds, MemoryBus(broker), broker, ranks)
    messages = list(_messages(ranks, events, blocks))
    gc.collect()
    gc.freeze()
    began = time.perf_counter()
    for raw in messages:
        envelope = unseal(raw)
        message = decode(envelope.topic, envelope.payload)
        feeds.receive(
            Received(
                broker.subjects.kv_events,
                envelope.publisher_id,
                envelope.sequence,
                envelope.published_at / 1000,
                message,
            )
        )
    taken = time.perf_counter() - began
    if index.block_index.entries != events * blocks:
        raise RuntimeError(
            f"{events} events of {blocks} blocks left {index.block_index.entries} blocks in the index"
        )
    return events / taken


async def _joined(feeds: KvEventSubscriber, bus: MemoryBus, broker: MemoryBroker, ranks: list[Rank]) -> None:
    """Synchronise every rank's feed, with nothing stored."""

    async def empty(request: Message) -> Message:
        assert isinstance(request, KvSnapshotRequested)
        return KvSnapshot(
            worker_id=request.worker_id, rank=request.rank, publisher_id=PUBLISHER, sequence=-1, events=()
        )

    async with asyncio.TaskGroup() as tasks:
        repairing = tasks.create_task(feeds.run(), name="repairs feeds")
        for rank in ranks:
            async with bus.serve(broker.subjects.kv_snapshot("e", *rank), empty):
                feeds.add(rank, "e")
                while not feeds.in_step(rank):  # noqa: ASYNC110 a feed tells nobody
                    await asyncio.sleep(0)
        repairing.cancel()


def _messages(ranks: list[Rank], events: int, blocks: int) -> Iterator[bytes]:
    """Return messages as ranks publish them: each rank extends prompts of 64 blocks."""
    chance = np.random.default_rng(1)
    parents: dict[Rank, int | None] = dict.fromkeys(ranks)
    for number in range(events):
        rank, sequence = ranks[number % len(ranks)], number // len(ranks)
        local = chance.integers(1, 2**64, blocks, np.uint64).tolist()
        event = changed(rank, local, sequence + 1, parents[rank] if (sequence * blocks) % 64 else None)
        parents[rank] = sequence_hashes(local, parents[rank] if (sequence * blocks) % 64 else None)[-1]
        yield seal(PUBLISHER, sequence, 0.0, KV_EVENTS, encode(KV_EVENTS, (event,)))


# Memory


def resident(ranks: int, shared: bool, tree: bool) -> float:
    """Return the GB of ENTRIES (block, rank) pairs, measured in a separate process."""
    asked = [
        sys.executable,
        "-m",
        "benchmarks.kv_index",
        "--entries-of",
        f"{ranks},{int(shared)},{int(tree)}",
    ]
    return float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


def grown(ranks: int, shared: bool, tree: bool) -> float:
    """Return the GB by which this process grows while 16-block events create ENTRIES."""
    everybody = [(engine, rank) for engine in range(1, ranks // RANKS + 1) for rank in range(RANKS)]
    chance, process = np.random.default_rng(2), psutil.Process()
    each = SHARED_BY if shared else 1
    index, radix = KvEventIndex(BlockIndex()), cast(Any, RadixTree())

    def apply(event: bytes) -> None:
        if tree:
            routed = cast(tuple[RoutedKvEvent, ...], decode(KV_EVENTS, event))[0]
            radix.apply_event(routed.worker_id, json.dumps(_plain(routed)).encode())
        else:
            index.apply(cast(tuple[RoutedKvEvent, ...], decode(KV_EVENTS, event)))

    gc.collect()
    before = process.memory_info().rss
    for number in range(ENTRIES // 64 // each):
        local = chance.integers(1, 2**64, 64, np.uint64).tolist()
        chained = sequence_hashes(local)
        for holder in range(each):
            rank = everybody[(number * (1 if each == 1 else 3) + holder * max(1, ranks // each)) % ranks]
            for at in range(0, 64, 16):
                apply(
                    encode(
                        KV_EVENTS, (changed(rank, local[at : at + 16], at, chained[at - 1] if at else None),)
                    )
                )
    gc.collect()
    return (process.memory_info().rss - before) / 1e9


def memories(fleets: tuple[int, ...]) -> tuple[Report, float]:
    report = Report(
        f"resident memory of {ENTRIES:,} (block, rank) pairs, GB",
        ["ranks", "index, disjoint", "shared", "RadixTree, disjoint", "shared"],
    )
    worst = 0.0
    for ranks in fleets:
        found = [resident(ranks, shared, tree) for tree in (False, True) for shared in (False, True)]
        report.add(str(ranks), *found)
        worst = max(worst, *found[:2])
    return report, worst


def best(measure: Callable[[], float], times: int = 3) -> float:
    return max(measure() for _ in range(times))


Entries = typer.Option("", "--entries-of", hidden=True)


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check, entries_of: str = Entries) -> None:
    """Measure look-ups, events and memory of the prefix index and of Dynamo's RadixTree."""
    if entries_of:
        ranks, shared, tree = (int(part) for part in entries_of.split(","))
        print(grown(ranks, bool(shared), bool(tree)))
        return
    compared = Compared(quick)
    compared.run()
    events = 4_000 if quick else 40_000
    sixteen, one = (
        best(lambda: asyncio.run(ingested(events, 16))),
        best(lambda: asyncio.run(ingested(2 * events, 1))),
    )
    memory, worst = memories(FLEETS[1:2] if quick else FLEETS)
    report = compared.report
    report.notes += [
        f"{memory.title}: "
        + "; ".join(f"{row[0]} ranks {', '.join(f'{cell:.3f}' for cell in row[1:])}" for row in memory.rows)
    ]
    report.notes += [
        f"columns: {', '.join(memory.columns[1:])}; shared: a block is held by {SHARED_BY} ranks"
    ]
    report.notes += [
        (
            f"events of 16 blocks: {sixteen:,.0f}/s; of one block: {one:,.0f}/s; load average"
            f" {os.getloadavg()[0]:.1f}"
        )
    ]
    least = {
        share: min(
            (found, f"{count} ranks, {length} tokens")
            for (count, name, length), found in compared.faster.items()
            if name == share
        )
        for share in SHARES
    }
    report.targets += [
        Target(f"memory of {ENTRIES:,} entries, worst", worst, MEMORY_LIMIT, at_least=False, unit=" GB"),
        Target("events of one block per second", one, EVENTS_PER_SECOND, unit=""),
        Target("blocks per second in events of 16", 16 * sixteen, BLOCKS_PER_SECOND, unit=""),
        Target(
            f"times as fast as RadixTree, all of a prompt held, least ({least['all'][1]})",
            least["all"][0],
            1.0,
        ),
        Target(
            f"times as fast as RadixTree, half of a prompt held, least ({least['half'][1]})",
            least["half"][0],
            FASTER,
        ),
    ]
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
