"""Learning from requests, as published on the bus and across restarts; on the memory bus, in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from bus import BusError, Message, Subscription
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from fleet.experts import ModelShape
from fleet.facts.activity import (
    CountsImported,
    ExpertsActivated,
    RequestOutcome,
    RequestProfile,
    RequestsFinished,
    RequestsProfiled,
    SampledProfile,
)
from fleet.facts.demand import (
    ClustersPublished,
    DemandPublished,
    KeyedRows,
    PopularityShifted,
    ProfilePublished,
    TablesPublished,
)
from fleet.facts.engines import EngineJoined
from fleet.facts.placements import PlacementCommitted
from fleet.layout import DP_ATTENTION
from fleet.placement import Placement
from fleet.popularity import ExpertCounts
from fleet.prediction import ROW
from fleet.requests.demand import (
    DescribeClusters,
    DescribePopularity,
    DescribeProfile,
    DescribeTables,
    PopularityDescribed,
)
from fleet.signatures import ClusterModel, pack
from tracker.config import TrackerConfig
from tracker.drift.detector import DriftDetector
from tracker.service import TrackerService, announced
from tracker.state_file import read, write

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]
SUBJECTS = Subjects()
LAYERS, EXPERTS, TOP_K = 4, 16, 2
SHAPE = ModelShape(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, hidden=4, expert_intermediate=8)
KINDS = np.random.default_rng(5).dirichlet(np.full(EXPERTS, 0.2), (2, LAYERS))
"""[kind, layer, expert]: two kinds of requests"""
T = TypeVar("T")


class Inline(Executor):
    """Executor that runs work immediately: virtual time knows no threads."""

    def submit(self, work: Any, /, *arguments: Any, **named: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(work(*arguments, **named))
        return done


class Held(Inline):
    """Executor that holds work until it is released."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Any, Any]] = []

    def submit(self, work: Any, /, *arguments: Any, **named: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        self.waiting.append((done, work, arguments))
        return done

    def let_go(self) -> None:
        for done, work, arguments in self.waiting:
            done.set_result(work(*arguments))
        self.waiting = []


class Clocks:
    """Clocks of a machine: one that starts over with every start of the tracker, and the wall clock."""

    def __init__(self) -> None:
        self.began = asyncio.get_running_loop().time()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time() - self.began

    def wall(self) -> float:
        return asyncio.get_running_loop().time() + 1.7e9


@asynccontextmanager
async def serving(
    bus: MemoryBus, fitting: Executor | None = None, **settings: Any
) -> AsyncIterator[TrackerService]:
    clocks = Clocks()
    service = TrackerService(
        bus, SUBJECTS, TrackerConfig(**settings), clocks.monotonic, clocks.wall, Inline(), fitting or Inline()
    )
    running = asyncio.create_task(service.run())
    try:
        async with asyncio.timeout(5):
            await service.ready.wait()
        yield service
    finally:
        assert not running.done(), running
        running.cancel()
        await asyncio.wait([running], timeout=10)
        assert running.cancelled()


def joined(worker_id: int = 1) -> EngineJoined:
    return EngineJoined(
        engine="a",
        worker_id=worker_id,
        model="m",
        node="n",
        urls=("http://x", "http://y"),
        block_size=16,
        kv_blocks=8,
        max_context=512,
        max_batch_tokens=256,
        shape=SHAPE,
        placement=Placement(np.tile(np.arange(EXPERTS), (LAYERS, 1)), experts=EXPERTS, ranks=2).record(),
    )


def drawn(random: np.random.Generator, kind: int, tokens: int) -> np.ndarray:
    return np.stack([random.multinomial(TOP_K * tokens, row) for row in KINDS[kind]])


def profiled(random: np.random.Generator, number: int, clusters: ClusterModel) -> RequestsProfiled:
    """Return a sampled request of one of two kinds, with one block of 16 tokens."""
    kind = number % 2
    prompt, completion = drawn(random, kind, 100), drawn(random, kind, 100)
    signature = pack(clusters.signature(prompt + completion)).tobytes()
    profile = RequestProfile(
        decision=f"d{number}",
        tokens=200,
        cached_tokens=0,
        signature=signature,
        local=0.25 + 0.5 * kind,
        blocks=np.array([1000 + number], "<u8").tobytes(),
        block_signatures=signature,
        block_size=16,
        sample=SampledProfile(prompt=ExpertCounts.of(prompt), completion=ExpertCounts.of(completion)),
    )
    return RequestsProfiled(
        engine="a", worker_id=1, rank=0, model="m", epoch=0, clusters=clusters.version, requests=(profile,)
    )


def finished(number: int, clusters: ClusterModel) -> RequestsFinished:
    kind = number % 2
    outcome = RequestOutcome(
        decision=f"d{number}",
        worker_id=1,
        rank=0,
        prefix=0,
        tokens=np.full(20, 7 + kind, "<u4").tobytes(),
        session=0,
        tenant=50 + kind,
        predicted=pack(clusters.shares).tobytes(),
        predicted_local=0.3 + 0.4 * kind,
        prior_local=0.5,
    )
    return RequestsFinished(model="m", tables=1, clusters=clusters.version, requests=(outcome,))


async def asked(bus: MemoryBus, question: Message, kind: type[T]) -> T:
    answer = await bus.request(SUBJECTS.describe_profile, question)
    assert isinstance(answer, kind)
    return answer


async def learn(bus: MemoryBus, count: int, seconds: float = 0.25) -> None:
    """Send reports of rank and router about requests of two kinds, with the tracker's present clusters."""
    random = np.random.default_rng(1)
    ranks, routers = bus.publisher(SUBJECTS.requests_profiled("a")), bus.publisher(SUBJECTS.requests_finished)
    for number in range(count):
        clusters = ClusterModel.from_record(
            (await asked(bus, DescribeClusters(model="m"), ClustersPublished)).record
        )
        await ranks.publish(profiled(random, number, clusters))
        await routers.publish(finished(number, clusters))
        await asyncio.sleep(seconds)


def report(counts: np.ndarray, tokens: int, rank: int = 0) -> ExpertsActivated:
    return ExpertsActivated(
        engine="a",
        worker_id=1,
        rank=rank,
        model="m",
        epoch=0,
        seconds=1.0,
        tokens=tokens,
        cached_tokens=0,
        counts=ExpertCounts.of(counts),
    )


async def latest(subscription: Subscription, kind: type[T], count: int = 1) -> T:
    """Return the count-th message of a kind from now on."""
    async with asyncio.timeout(60):
        async for received in subscription:
            if isinstance(received.message, kind):
                count -= 1
                if not count:
                    return received.message
    raise AssertionError(f"no {kind.__name__}")


async def shift_told(bus: MemoryBus) -> PopularityShifted:
    """Return the published shift after a flip: a minute of the second kind of traffic after 400 s of the
    first.
    """
    random, reports = np.random.default_rng(3), bus.publisher(SUBJECTS.experts("a"))
    async with bus.subscribe(SUBJECTS.shifts) as shifts:
        for second in range(460):
            await reports.publish(report(drawn(random, int(second >= 400), 400), 400))
            await asyncio.sleep(1)
        return await latest(shifts, PopularityShifted)


async def test_clusters_and_tables_are_there_as_soon_as_a_models_shape_is_known() -> None:
    bus = MemoryBus()
    async with serving(bus), bus.subscribe(SUBJECTS.clusters) as told:
        for question in (
            DescribeClusters(model="m"),
            DescribeTables(model="m"),
            DescribePopularity(model="m"),
        ):
            with pytest.raises(BusError, match="'m'"):
                await bus.request(SUBJECTS.describe_profile, question)
        await bus.record(SUBJECTS.membership("a"), joined())
        published = await latest(told, ClustersPublished)
        model = ClusterModel.from_record(published.record)
        assert model.shares.tolist() == [1.0] + [0.0] * 31
        np.testing.assert_allclose(model.profiles, 1 / EXPERTS, rtol=1e-3)
        tables = await asked(bus, DescribeTables(model="m"), TablesPublished)
        assert (tables.base, tables.clusters, tables.gain) == (None, published.record.version, 0.0)


async def test_kinds_of_requests_become_clusters_and_what_is_learnt_is_told_as_changes() -> None:
    bus = MemoryBus()
    await bus.record(SUBJECTS.membership("a"), joined())
    async with serving(bus) as service, bus.subscribe(SUBJECTS.tables) as told:
        await learn(bus, 160)
        await asyncio.sleep(5)
        model = ClusterModel.from_record(
            (await asked(bus, DescribeClusters(model="m"), ClustersPublished)).record
        )
        assert (model.shares > 0.1).sum() == 2
        random = np.random.default_rng(9)
        signatures = [model.signature(drawn(random, kind, 100)) for kind in (0, 1)]
        assert signatures[0].argmax() != signatures[1].argmax()
        whole = await asked(bus, DescribeTables(model="m"), TablesPublished)
        assert 8 * 100 < len(whole.blocks.keys) <= 8 * 160, "signatures over a single cluster say nothing"
        changes: list[TablesPublished] = []
        async with asyncio.timeout(1):
            async for received in told:
                assert isinstance(received.message, TablesPublished)
                changes.append(received.message)
                if received.message.version == whole.version:
                    break
        assert all(change.base in (None, change.version - 1) for change in changes)
        assert [change.version for change in changes] == list(range(changes[0].version, whole.version + 1))
        found = await asked(bus, DescribePopularity(model="m"), PopularityDescribed)
        assert 100 < found.outcomes <= 160
        assert found.stored_blocks == len(whole.blocks.keys) // 8
        assert len(found.clusters) == (model.shares > 0).sum()
        assert {source.source: source.requests for source in found.sources}["tokens"] > 100
        exposed = service.metrics.exposition()
        for line in (
            b"roost_tracker_profiled_total 160.0",
            b"roost_tracker_finished_total 160.0",
            b'roost_tracker_outcomes{model="m"} 1',
        ):
            assert line in exposed, exposed.decode()


async def test_requests_that_cannot_be_learnt_from_are_counted_and_a_repeated_message_counts_once() -> None:
    broker = MemoryBroker()
    bus, copies = MemoryBus(broker), []
    await bus.record(SUBJECTS.membership("a"), joined())
    async with serving(bus) as service:
        await learn(bus, 40)
        await asyncio.sleep(5)
        before = (await asked(bus, DescribePopularity(model="m"), PopularityDescribed)).stored_blocks
        clusters = ClusterModel.from_record(
            (await asked(bus, DescribeClusters(model="m"), ClustersPublished)).record
        )
        random = np.random.default_rng(2)
        good = profiled(random, 100, clusters)
        publisher = bus.publisher(SUBJECTS.requests_profiled("a"))
        original = broker.deliver
        broker.deliver = lambda subject, raw: (copies.append((subject, raw)), original(subject, raw))[1]  # type: ignore[method-assign]
        await publisher.publish(good)
        broker.deliver = original  # type: ignore[method-assign]
        for subject, raw in copies * 2:
            broker.deliver(subject, raw)
        structs = msgspec.structs
        bad = structs.replace(good.requests[0], decision="x", signature=b"1")
        sample = structs.replace(
            good.requests[0],
            decision="y",
            sample=SampledProfile(
                prompt=ExpertCounts.of(np.ones((1, 1), int)), completion=ExpertCounts.of(np.ones((1, 1), int))
            ),
        )
        await publisher.publish(structs.replace(good, requests=(bad, sample)))
        await publisher.publish(structs.replace(good, model="nobody's"))
        outcomes = bus.publisher(SUBJECTS.requests_finished)
        outcome = finished(0, clusters)
        await outcomes.publish(
            structs.replace(outcome, requests=(structs.replace(outcome.requests[0], predicted=b""),))
        )
        await asyncio.sleep(3)
        found = await asked(bus, DescribePopularity(model="m"), PopularityDescribed)
        assert found.stored_blocks == before + 1
        exposed = service.metrics.exposition()
        for line in (
            b"roost_tracker_duplicates_total 2.0",
            b'rejected_total{reason="signature"}',
            b'rejected_total{reason="sample"} 1.0',
            b'rejected_total{reason="model"} 1.0',
            b'rejected_total{reason="outcome"} 1.0',
        ):
            assert line in exposed, exposed.decode()


async def test_what_is_remote_follows_the_newest_placement() -> None:
    bus = MemoryBus()
    await bus.record(SUBJECTS.membership("a"), joined())
    counts = np.zeros((LAYERS, EXPERTS), int)
    counts[:, 0] = 20
    turned = Placement(
        np.tile(np.roll(np.arange(EXPERTS), 8), (LAYERS, 1)), experts=EXPERTS, ranks=2, epoch=1
    )
    async with serving(bus), bus.subscribe(SUBJECTS.demand) as demands:
        reports = bus.publisher(SUBJECTS.experts("a"))
        await reports.publish(report(counts, 10))
        assert (await latest(demands, DemandPublished)).remote == pytest.approx(0.0)
        await bus.record(
            SUBJECTS.placements("a"),
            PlacementCommitted(engine="a", worker_id=1, attention=DP_ATTENTION, placement=turned.record()),
        )
        await asyncio.sleep(0)
        await reports.publish(report(counts, 10))
        assert (await latest(demands, DemandPublished)).remote == pytest.approx(1.0)
        (rank,) = (await asked(bus, DescribePopularity(model="m"), PopularityDescribed)).ranks
        assert [(layer, expert) for layer, expert, _ in rank.wanted_remote] == [
            (layer, 0) for layer in range(LAYERS)
        ]


async def test_a_placement_that_contradicts_itself_is_counted_and_ignored() -> None:
    bus = MemoryBus()
    broken = msgspec.structs.replace(
        Placement(np.arange(4)[None], experts=4, ranks=2).record(), slots=b"12345678"
    )
    async with serving(bus) as service:
        await bus.record(
            SUBJECTS.placements("a"),
            PlacementCommitted(engine="a", worker_id=1, attention=DP_ATTENTION, placement=broken),
        )
        await asyncio.sleep(3)
        assert b'rejected_total{reason="placement"} 1.0' in service.metrics.exposition()


async def test_counts_of_another_system_enter_the_profile_once() -> None:
    bus = MemoryBus()
    counts = np.zeros((LAYERS, EXPERTS), int)
    counts[:, 3] = 100_000
    imported = CountsImported(model="m", digest="abc", tokens=50_000, counts=ExpertCounts.of(counts))
    async with serving(bus) as service:
        publisher = bus.publisher(SUBJECTS.imports)
        await publisher.publish(imported)
        await publisher.publish(imported)
        await asyncio.sleep(3)
        found = await asked(bus, DescribeProfile(model="m"), ProfilePublished)
        assert found.tokens == pytest.approx(50_000, rel=0.01)
        np.testing.assert_allclose(found.profile.array()[:, 3], 1.0, atol=0.01)
        assert b"roost_tracker_imports_total 1.0" in service.metrics.exposition()


async def test_a_flip_of_the_mix_is_told_as_a_shift() -> None:
    bus = MemoryBus()
    await bus.record(SUBJECTS.membership("a"), joined())
    async with serving(bus):
        told = await shift_told(bus)
        assert not told.settled
        assert told.divergence > told.threshold > 0
        found = await asked(bus, DescribePopularity(model="m"), PopularityDescribed)
        assert found.shifted
        assert found.divergence is not None
        assert np.abs(found.fast.array() - KINDS[1]).mean() < np.abs(found.slow.array() - KINDS[1]).mean()


async def test_answers_come_while_clusters_are_being_fitted() -> None:
    bus, fitting = MemoryBus(), Held()  # while work waits for an executor, looptime lets real time pass
    async with serving(bus, fitting, publish_seconds=0.1, refine_seconds=0.1) as service:
        await bus.publisher(SUBJECTS.experts("a")).publish(
            report(drawn(np.random.default_rng(1), 0, 100), 100)
        )
        await asyncio.sleep(0.1)
        await learn(bus, 15, seconds=0.02)
        assert len(fitting.waiting) == 1
        assert (await asked(bus, DescribePopularity(model="m"), PopularityDescribed)).stored_bytes > 0
        fitting.let_go()
        await asyncio.sleep(0.3)
        assert b"roost_tracker_refit_seconds_count 1.0" in service.metrics.exposition()


async def told_of_everything(
    bus: MemoryBus,
) -> tuple[ProfilePublished, TablesPublished, ClustersPublished, PopularityDescribed]:
    return (
        await asked(bus, DescribeProfile(model="m"), ProfilePublished),
        await asked(bus, DescribeTables(model="m"), TablesPublished),
        await asked(bus, DescribeClusters(model="m"), ClustersPublished),
        await asked(bus, DescribePopularity(model="m"), PopularityDescribed),
    )


async def test_a_restart_changes_nothing_but_versions(tmp_path: Path) -> None:
    bus, file, random = MemoryBus(), tmp_path / "state", np.random.default_rng(4)
    await bus.record(SUBJECTS.membership("a"), joined())
    async with serving(bus, state_file=file):
        reports = bus.publisher(SUBJECTS.experts("a"))
        for second in range(30):
            await reports.publish(report(drawn(random, second % 2, 50), 50, rank=second % 2))
            await asyncio.sleep(1)
        await learn(bus, 80)
        await asyncio.sleep(10)
        before = await told_of_everything(bus)
    async with serving(bus, state_file=file):
        after = await told_of_everything(bus)
    structs = msgspec.structs
    assert after[0] == structs.replace(before[0], version=after[0].version)
    assert after[1].version > before[1].version
    assert after[2].record.version > before[2].record.version
    assert after[1] == structs.replace(before[1], version=after[1].version, clusters=after[2].record.version)
    assert after[2].record == structs.replace(before[2].record, version=after[2].record.version)
    assert after[3] == before[3]


async def test_decay_goes_on_while_the_tracker_is_away(tmp_path: Path) -> None:
    bus, file, counts = MemoryBus(), tmp_path / "state", np.ones((LAYERS, EXPERTS), int)
    await bus.record(SUBJECTS.membership("a"), joined())
    async with serving(bus, state_file=file):
        await bus.publisher(SUBJECTS.experts("a")).publish(report(counts, 1000))
        await asyncio.sleep(1)
        before = await asked(bus, DescribeProfile(model="m"), ProfilePublished)
    await asyncio.sleep(900)
    async with serving(bus, state_file=file):
        after = await asked(bus, DescribeProfile(model="m"), ProfilePublished)
    assert after.tokens == pytest.approx(before.tokens / np.e, rel=0.01)


async def test_reports_missed_while_the_tracker_was_away_are_no_silence(tmp_path: Path) -> None:
    bus, file, counts = MemoryBus(), tmp_path / "state", np.full((LAYERS, EXPERTS), 5, int)
    await bus.record(SUBJECTS.membership("a"), joined())
    reports = bus.publisher(SUBJECTS.experts("a"))

    async def speak(seconds: int) -> None:
        for _ in range(seconds):
            await reports.publish(report(counts, 40))
            await asyncio.sleep(1)

    async with serving(bus, state_file=file, forget_seconds=100.0):
        await speak(10)
    await speak(20)
    async with serving(bus, state_file=file, forget_seconds=100.0), bus.subscribe(SUBJECTS.demand) as demands:
        await speak(4)
        assert (await latest(demands, DemandPublished)).tokens_per_second == pytest.approx(40.0, rel=0.05)


async def test_after_a_crash_the_state_is_that_of_a_while_ago(tmp_path: Path) -> None:
    bus, file, counts = MemoryBus(), tmp_path / "state", np.ones((LAYERS, EXPERTS), int)
    copy = tmp_path / "copy"
    await bus.record(SUBJECTS.membership("a"), joined())
    async with serving(bus, state_file=file, state_seconds=5.0) as service:
        await bus.publisher(SUBJECTS.experts("a")).publish(report(counts, 1000))
        await asyncio.sleep(6)
        copy.write_bytes(file.read_bytes())
        assert b'roost_tracker_saves_total{outcome="written"} 1.0' in service.metrics.exposition()
        before = await asked(bus, DescribeProfile(model="m"), ProfilePublished)
    async with serving(bus, state_file=copy):
        after = await asked(bus, DescribeProfile(model="m"), ProfilePublished)
    assert after.tokens == pytest.approx(before.tokens, rel=0.001)


async def test_a_state_file_that_cannot_be_written_or_used_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bus, file = MemoryBus(), tmp_path / "state"
    file.write_bytes(b"foreign")
    await bus.record(SUBJECTS.membership("a"), joined())
    async with serving(bus, state_file=file):
        assert (await asked(bus, DescribeProfile(model="m"), ProfilePublished)).tokens == 0.0
    assert "starting afresh" in caplog.text
    async with serving(bus, state_file=Path("/dev/null/state"), state_seconds=1.0) as service:
        await asyncio.sleep(2)
        assert b'roost_tracker_saves_total{outcome="failed"} 1.0' in service.metrics.exposition()


async def test_what_was_learnt_over_other_settings_is_learnt_anew_and_the_rest_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bus, file, counts = MemoryBus(), tmp_path / "state", np.ones((LAYERS, EXPERTS), int)
    await bus.record(SUBJECTS.membership("a"), joined())
    async with serving(bus, state_file=file):
        await bus.publisher(SUBJECTS.experts("a")).publish(report(counts, 1000))
        await learn(bus, 4)
    async with serving(bus, state_file=file, clusters=8):
        assert (await asked(bus, DescribeClusters(model="m"), ClustersPublished)).record.clusters == 8
        assert (await asked(bus, DescribeProfile(model="m"), ProfilePublished)).tokens > 900
    assert "the learnt state of m cannot be restored" in caplog.text


@pytest.mark.parametrize(
    ("damage", "says", "tokens"),
    [
        ({"drifts": {"m": {}}}, "the drift state of m cannot be restored", 1000.0),
        ({"drifts": {"m": DriftDetector(TrackerConfig(), 1, 2).state()}}, "it is of 1 x 2 experts", 1000.0),
        ({"learnt": {"m": {}}}, "the learnt state of m cannot be restored", 1000.0),
        ({"activity": (("model", []),)}, "the saved activity cannot be restored", 0.0),
    ],
)
async def test_a_part_of_the_state_that_cannot_be_used_begins_afresh(
    damage: dict[str, Any], says: str, tokens: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bus, file, counts = MemoryBus(), tmp_path / "state", np.ones((LAYERS, EXPERTS), int)
    await bus.record(SUBJECTS.membership("a"), joined())
    async with serving(bus, state_file=file):
        await bus.publisher(SUBJECTS.experts("a")).publish(report(counts, 1000))
        await asyncio.sleep(0.1)
    saved = read(file)
    assert saved is not None
    write(file, msgspec.structs.replace(saved, **damage))
    async with serving(bus, state_file=file):
        assert (await asked(bus, DescribeProfile(model="m"), ProfilePublished)).tokens == pytest.approx(
            tokens, rel=0.01
        )
        assert (await asked(bus, DescribePopularity(model="m"), PopularityDescribed)).outcomes == 0
    assert says in caplog.text


# Large snapshots are announced, and requested


def large_tables(version: int, base: int | None, rows: int) -> TablesPublished:
    keyed = KeyedRows(keys=bytes(8 * rows), rows=bytes(ROW * rows))
    about: dict[str, Any] = {
        "clusters": 1,
        "shares": b"",
        "trust": {},
        "reliability": {},
        "gain": 0.5,
        "buckets": 4,
    }
    return TablesPublished(
        model="m",
        version=version,
        base=base,
        blocks=keyed,
        token_rows=bytes(8),
        token_ratios=bytes(4),
        **about,
    )


@pytest.mark.parametrize(
    ("base", "rows", "whole"), [(None, 100_000, False), (None, 10, True), (6, 20_000, True)]
)
async def test_large_whole_tables_are_announced_as_a_change_to_themselves_without_rows(
    base: int | None, rows: int, whole: bool
) -> None:
    tables = large_tables(7, base, rows)
    said = announced(tables)
    assert (said == tables) == whole
    assert (said.version, said.gain, said.buckets) == (7, 0.5, 4)
    if not whole:
        assert (said.base, said.blocks, said.token_rows, said.token_ratios) == (7, KeyedRows(), b"", b"")


async def test_everybody_who_asks_for_tables_before_the_next_version_is_given_the_same_object() -> None:
    bus = MemoryBus()
    await bus.record(SUBJECTS.membership("a"), joined())
    async with serving(bus) as service:
        await learn(bus, 40)
        await asyncio.sleep(5)
        first, second = [await service.describe(DescribeTables(model="m")) for _ in range(2)]
        assert first is second, "it is encoded and kept once (bus.large_answers)"
        await learn(bus, 40)
        await asyncio.sleep(5)
        third = await service.describe(DescribeTables(model="m"))
        assert isinstance(first, TablesPublished)
        assert isinstance(third, TablesPublished)
        assert third.version > first.version
