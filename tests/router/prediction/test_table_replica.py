"""The router's replica of the tracker's tables: accepted and refused messages, and equality in the end."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus import Message
from bus.memory import MemoryBroker, MemoryBus
from fleet.facts.demand import KeyedRows, TablesPublished
from fleet.prediction import ROW, Query, longest_known, predict, row
from fleet.requests.demand import DescribeClusters, DescribeTables
from fleet.requests.refusal import RequestRefused
from fleet.signatures import ClusterModel, pack
from router.prediction.predictor import Predictor
from router.prediction.row_table import SLOT, WAYS, RowTable
from router.prediction.table_replica import SLICE, ChangeVerdict, TableReplica, read
from router.sync.table_subscriber import TableSubscriber
from router.telemetry.metrics import RouterMetrics
from tests.router.learnt_tables import halves, published_clusters, tables
from tests.router.metric_values import value_of
from tests.router.router_fixture import until

BUDGET = 1 << 20


def rows_of(count: int, tokens: Any = 7) -> Any:
    """Return uint8 [count, ROW], each row with its own number in it."""
    table = np.zeros((count, ROW), np.uint8)
    table[:, :4] = np.arange(count, dtype="<u4").view(np.uint8).reshape(count, 4)
    table[:, -4:] = np.broadcast_to(np.asarray(tokens, "<u4"), count).copy().view(np.uint8).reshape(count, 4)
    return table


# Rows

puttings = st.lists(
    st.lists(
        st.tuples(st.integers(0, 40).map(lambda number: number * (2**57 + 1)), st.integers(0, 3)), max_size=30
    ),
    max_size=12,
)


@given(puttings)
def test_rows_are_a_mapping_as_long_as_there_is_room(drawn: list[list[tuple[int, int]]]) -> None:
    rows, oracle = RowTable(64 * SLOT * WAYS), dict[int, bytes]()
    for number, putting in enumerate(drawn):
        packed = [row(bytes([number] * 8), tokens) for _, tokens in putting]
        rows.put(
            np.array([key for key, _ in putting], np.uint64),
            np.frombuffer(b"".join(packed), np.uint8).reshape(-1, ROW),
        )
        for (key, tokens), one in zip(putting, packed, strict=True):
            if tokens and key:
                oracle[key] = one
            else:
                oracle.pop(key, None)
    assert dict(rows) == oracle
    assert len(rows) == len(oracle)
    assert all(rows.get(number * (2**57 + 1)) == oracle.get(number * (2**57 + 1)) for number in range(50))


def test_rows_never_outgrow_their_budget_and_the_latest_stay() -> None:
    rng = np.random.default_rng(0)
    rows = RowTable(1000 * SLOT, 10_000)
    assert 900 * SLOT < rows.nbytes <= 1000 * SLOT
    keys = rng.integers(1, 2**64, 20_000, np.uint64)
    for start in range(0, len(keys), 100):
        rows.put(keys[start : start + 100], rows_of(100))
    assert 900 < len(rows) <= 1000
    assert all(int(key) in rows for key in keys[-200:])
    assert not any(int(key) in rows for key in keys[:10_000])


def test_of_rows_as_old_as_one_another_the_end_of_a_prefix_goes_first() -> None:
    rng = np.random.default_rng(1)
    rows = RowTable(200 * SLOT, 1000)
    chain = rng.integers(1, 2**64, 1000, np.uint64)
    rows.put(chain, rows_of(1000, 16 * np.arange(1, 1001)))
    assert longest_known(rows, chain.tolist())[0] >= 100


def test_a_table_grows_with_its_rows_up_to_its_budget_and_keeps_them() -> None:
    rng = np.random.default_rng(4)
    rows, oracle = RowTable(40_000 * SLOT), dict[int, bytes]()
    sizes = {rows.nbytes}
    for _ in range(80):
        keys, packed = rng.integers(1, 2**64, 200, np.uint64), rng.integers(1, 255, (200, ROW), np.uint8)
        if rows.crowded_by(200):
            rows = rows.grown(200)
            sizes.add(rows.nbytes)
        rows.put(keys, packed)
        oracle |= {key: one.tobytes() for key, one in zip(keys.tolist(), packed, strict=True)}
    assert len(sizes) > 3
    assert max(sizes) <= 40_000 * SLOT
    assert len(rows) >= 0.999 * len(oracle)
    assert all(oracle[key] == row for key, row in rows.items())
    assert not RowTable(SLOT * WAYS).crowded_by(10**9), "what the budget does not allow is not requested"


def test_a_table_of_many_ages_stays_whole_and_knows_its_oldest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.prediction.row_table._YOUNGEST", 40)
    rows = RowTable(SLOT * WAYS)
    for number in range(100):  # more than the ages there are
        rows.put(np.array([number % WAYS + 1], np.uint64), rows_of(1))
    assert len(rows) == WAYS
    assert 100 % WAYS + 1 in rows
    rows.put(np.array([99], np.uint64), rows_of(1))
    assert sorted(rows) == sorted({*range(1, WAYS + 1), 99} - {100 % WAYS + 1})


# Accepted and refused messages


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shares": b""}, "0 shares"),
        ({"shares": bytes(8)}, "no probabilities"),
        ({"shares": bytes(4 * 65)}, "65 shares"),
        ({"shares": b"12345"}, "not a multiple"),
        ({"shares": np.array([np.nan, 1], "<f4").tobytes()}, "finite"),
        ({"shares": np.array([-1, 2], "<f4").tobytes()}, "no probabilities"),
        ({"gain": float("nan")}, "gain"),
        ({"gain": 1.01}, "gain"),
        ({"gain": -0.1}, "gain"),
        ({"gains": np.array([0.5], "<f4").tobytes()}, "gains"),
        ({"gains": np.array([0.5, 1.5], "<f4").tobytes()}, "gains"),
        ({"gains": np.array([0.5, -0.5], "<f4").tobytes()}, "gains"),
        ({"gains": np.array([0.5, np.nan], "<f4").tobytes()}, "gains"),
        ({"gains": b"xyz"}, "gains"),
        ({"trust": {"prefix": float("inf")}}, "trust inf of source 'prefix'"),
        ({"trust": {"tokens": -1.0}}, "trust"),
        ({"trusts": bytes(4)}, "1 trusts"),
        ({"trusts": b"12345"}, "not a multiple"),
        ({"trusts": np.full(64, np.nan, "<f4").tobytes()}, "finite"),
        ({"trusts": np.full(64, -1, "<f4").tobytes()}, "64 trusts"),
        ({"trusts": np.full(64, 1e9, "<f4").tobytes()}, "64 trusts"),
        ({"reliability": {"tenant": float("nan")}}, "reliability"),
        ({"reliability": {"tenant": 1.5}}, "reliability"),
        ({"version": -1}, "version -1"),
        ({"buckets": -1}, "buckets"),
        ({"token_rows": b"123"}, "u32"),
        ({"token_rows": bytes(4)}, "do not make 1 rows"),
        ({"token_rows": bytes(4), "token_ratios": bytes(4)}, "outside the 0 buckets"),
        (
            {"buckets": 9, "token_rows": np.array([9], "<u4").tobytes(), "token_ratios": bytes(4)},
            "row 9 is outside",
        ),
        (
            {"buckets": 9, "token_rows": bytes(4), "token_ratios": np.array([np.inf, 0], "<f2").tobytes()},
            "finite",
        ),
        ({"blocks": KeyedRows(keys=bytes(8), rows=bytes(ROW - 1))}, "blocks"),
        ({"sessions": KeyedRows(keys=bytes(7), rows=b"")}, "sessions"),
        ({"tenants": KeyedRows(keys=b"", rows=bytes(ROW))}, "tenants"),
    ],
)
def test_tables_that_cannot_be_are_refused_with_the_reason(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(msgspec.structs.replace(tables(), **wrong))


def test_a_token_table_too_large_for_the_budget_is_refused() -> None:
    change = read(tables(buckets=BUDGET // 8))
    with pytest.raises(ValueError, match="more than half"):
        TableReplica(BUDGET).prepare(change)


def test_missing_sources_count_nothing_and_unknown_ones_are_left_out() -> None:
    change = read(tables(trust=0.0, reliability=0.0))
    assert not change.trust.any()
    found = read(msgspec.structs.replace(tables(), trust={"tokens": 0.5, "horoscope": 3.0}))
    assert found.trust.tolist() == [0.0, 0.0, 0.5, 0.0]


def test_trusts_may_depend_on_who_else_speaks() -> None:
    trusts = np.zeros((16, 4), "<f4")
    trusts[0b0010, 1] = 1.0  # the session alone
    published = tables(
        trusts=trusts.tobytes(), sessions={5: ((0.9, 0.1), 1e6)}, blocks={7: ((0.9, 0.1), 1e6)}
    )
    replica = TableReplica(BUDGET).prepare(read(published))
    assert replica.tables is not None
    assert predict(replica.tables, Query(session=5)).weights[0] == pytest.approx(0.9, abs=0.02)
    assert predict(replica.tables, Query(prefix=(7,), session=5)).weights[0] == pytest.approx(0.5)


def test_a_whole_is_taken_slice_by_slice_as_at_once() -> None:
    keys = np.random.default_rng(3).integers(1, 2**64, 3 * SLICE + 5, np.uint64)
    parts = [
        KeyedRows(keys=some.tobytes(), rows=rows_of(len(some)).tobytes())
        for some in (keys[: SLICE + 1], keys[SLICE + 1 : SLICE + 9], keys[SLICE + 9 :])
    ]
    change = read(msgspec.structs.replace(tables(), blocks=parts[0], sessions=parts[1], tenants=parts[2]))
    found = TableReplica(64 << 20).prepare(change).tables
    assert found is not None
    for table, part in zip((found.blocks, found.sessions, found.tenants), parts, strict=True):
        assert sorted(table) == sorted(np.frombuffer(part.keys, "<u8").tolist())


def test_a_change_to_another_version_or_of_another_size_is_a_gap_and_an_old_one_is_old() -> None:
    replica = TableReplica(BUDGET)
    assert replica.check(read(tables(4, 3))) is ChangeVerdict.GAP
    assert replica.check(read(tables(4))) is ChangeVerdict.TAKEN
    replica = replica.prepare(read(tables(4)))
    verdicts = {
        ChangeVerdict.OLD: [tables(4), tables(3), tables(4, 3), tables(2, 1)],
        ChangeVerdict.GAP: [tables(6, 5), tables(5, 4, buckets=3), tables(5, 4, shares=(1, 1, 1))],
        ChangeVerdict.TAKEN: [tables(5, 4), tables(9, 4), tables(7)],
    }
    for verdict, published in verdicts.items():
        assert {replica.check(read(one)) for one in published} == {verdict}


def test_the_replica_predicts_from_the_published_tables() -> None:
    message = tables(
        tokens=np.array([[0.5, -0.5], [0, 0]]),
        blocks={7: ((0.9, 0.1), 64)},
        sessions={5: ((0.2, 0.8), 100)},
        gain=0.25,
    )
    replica = TableReplica(BUDGET).prepare(read(message))
    assert replica.tables is not None
    assert replica.tables.gain == 0.25
    assert replica.tables.gain_of(np.array([0.9, 0.1], np.float32)) == 0.25, "the same for all"
    by_cluster = (
        TableReplica(BUDGET)
        .prepare(read(tables(gain=0.25, gains=np.array([1.0, 0.0], "<f4").tobytes())))
        .tables
    )
    assert by_cluster is not None
    assert by_cluster.gain_of(np.array([0.9, 0.1], np.float32)) == pytest.approx(0.9)
    found = predict(replica.tables, Query(prefix=(7, 8), tokens=range(40), session=5))
    assert found.known.blocks == 1
    assert found.known.evidence == (64.0, 100.0, 24.0, 0.0)
    assert found.weights[0] > 0.5
    assert replica.stored_bytes < BUDGET


# Staying in step with a tracker


class Tracker:
    """Publishes tables under its own version. The oracle."""

    def __init__(self) -> None:
        self.version = 100
        self.blocks: dict[int, tuple[tuple[float, float], float]] = {}
        self.tokens = np.zeros((4, 2))
        self.gain = 0.0
        self.requests = 0
        self.mute = False

    def change(self, seed: int) -> TablesPublished:
        rng = np.random.default_rng(seed)
        news: dict[int, tuple[tuple[float, float], float]] = {}
        for key in rng.integers(1, 12, rng.integers(0, 5)).tolist():
            weight, gone = float(rng.random()), rng.random() < 0.3
            news[key] = ((weight, 1 - weight), 0.0 if gone else float(rng.integers(1, 99)))
        self.blocks = {key: row for key, row in (self.blocks | news).items() if row[1]}
        bucket = int(rng.integers(0, 4))
        self.tokens[bucket] = rng.normal(size=2)
        self.gain = round(float(rng.random()), 3)
        self.version += 1
        token_rows = np.array([bucket], "<u4").tobytes()
        ratios = self.tokens[bucket].astype("<f2").tobytes()
        return tables(
            self.version,
            self.version - 1,
            gain=self.gain,
            blocks=news,
            buckets=4,
            token_rows=token_rows,
            token_ratios=ratios,
        )

    def whole(self) -> TablesPublished:
        return tables(self.version, gain=self.gain, blocks=self.blocks, tokens=self.tokens)

    async def describe(self, request: Message) -> Message:
        if self.mute:
            return RequestRefused(reason="unknown")
        if isinstance(request, DescribeClusters):
            return published_clusters(halves())
        assert request == DescribeTables(model="demo")
        self.requests += 1
        return self.whole()


class House:
    """The subscriptions of a router, and a tracker on the same bus."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.subjects = self.broker.subjects
        self.predictor = Predictor(budget)
        self.metrics = RouterMetrics()
        self.learnt: list[tuple[str, ClusterModel]] = []
        self.threads = ThreadPoolExecutor(1)
        self.tracker = Tracker()
        self.feeds = TableSubscriber(
            self.predictor,
            MemoryBus(self.broker),
            self.subjects,
            self.metrics,
            self.threads,
            asyncio.get_running_loop().time,
            self._learnt,
        )

    def _learnt(self, model: str, clusters: ClusterModel) -> None:
        self.learnt.append((model, clusters))

    async def run(self, started: asyncio.Event) -> None:
        async with (
            self.bus.subscribe(self.subjects.tables, self.subjects.clusters) as subscription,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self.feeds.listen(subscription))
            tasks.create_task(self.feeds.run())
            started.set()

    async def say(self, message: Message) -> None:
        await self.bus.publisher(self.subjects.tables).publish(message)

    @property
    def version(self) -> int:
        replica = self.predictor.replica("demo")
        return -1 if replica is None or replica.tables is None else replica.tables.version

    @property
    def blocks(self) -> int:
        replica = self.predictor.replica("demo")
        return 0 if replica is None or replica.tables is None else len(replica.tables.blocks)

    @property
    def refused(self) -> float:
        return value_of(self.metrics.bus_refused)

    def equal(self) -> bool:
        """Return True if the replica equals the tracker's tables."""
        replica = self.predictor.replica("demo")
        if replica is None or replica.tables is None:
            return False
        held, tracker = replica.tables, self.tracker
        rows = {
            key: row(pack(np.asarray(weights)).tobytes(), tokens)
            for key, (weights, tokens) in tracker.blocks.items()
        }
        same = (held.version, held.gain) == (tracker.version, tracker.gain)
        return (
            same
            and dict(held.blocks) == rows
            and bool((held.tokens == tracker.tokens.astype(np.float16).astype(np.float32)).all())
        )


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house, started = House(16 * BUDGET), asyncio.Event()
    task = asyncio.create_task(house.run(started))
    await started.wait()
    yield house
    task.cancel()
    await asyncio.wait([task])
    house.threads.shutdown()


async def test_a_merely_announced_snapshot_is_requested_once_and_applied(house: House) -> None:
    async with house.bus.serve(house.subjects.describe_profile, house.tracker.describe):
        house.feeds.add("demo")
        await until(house.equal)
        house.tracker.change(1)
        house.tracker.change(2)
        before = house.tracker.requests
        for _ in range(3):
            await house.say(tables(house.tracker.version, house.tracker.version))
        await until(house.equal)
        await house.say(house.tracker.change(3))
        await until(house.equal)
        assert house.tracker.requests == before + 1


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from(["published", "lost", "twice", "late", "whole", "garbled"]), max_size=14),
)
def test_losses_repetitions_and_delays_leave_the_replica_equal_to_the_tracker(
    seed: int, fates: list[str]
) -> None:
    async def story() -> None:
        house, started = House(), asyncio.Event()
        task = asyncio.create_task(house.run(started))
        await started.wait()
        held: list[TablesPublished] = []
        async with house.bus.serve(house.subjects.describe_profile, house.tracker.describe):
            house.feeds.add("demo")
            for number, fate in enumerate(fates):
                change = house.tracker.change(seed + number)
                match fate:
                    case "published" | "twice":
                        await house.say(change)
                    case "late":
                        held.append(change)
                    case "whole":
                        await house.say(house.tracker.whole())
                    case "garbled":
                        await house.say(msgspec.structs.replace(change, shares=b"?"))
                if fate == "twice":
                    await house.say(change)
                if number % 3 == 0:
                    await asyncio.sleep(0)
            for change in held:
                await house.say(change)
            await house.say(house.tracker.change(seed - 1 & 0xFFFF))
            await until(house.equal)
        task.cancel()
        await asyncio.wait([task])
        house.threads.shutdown()

    asyncio.run(story())


async def test_the_snapshot_is_requested_once_and_deltas_follow_without_requests(house: House) -> None:
    async with house.bus.serve(house.subjects.describe_profile, house.tracker.describe):
        house.feeds.add("demo")
        house.feeds.add("demo")
        await until(lambda: house.feeds.in_step("demo"))
        for number in range(5):
            await house.say(house.tracker.change(number))
        await until(house.equal)
        assert house.tracker.requests == 1
        assert [(model, clusters.version) for model, clusters in house.learnt] == [("demo", 1)]
        assert value_of(house.metrics.table_requests) == 0
        await house.say(house.tracker.change(9) and house.tracker.change(10))
        await until(house.equal)
        assert house.tracker.requests == 2
        assert value_of(house.metrics.table_requests) == 1


async def test_an_answer_is_taken_even_where_the_tracker_began_anew_with_lower_versions(house: House) -> None:
    async with house.bus.serve(house.subjects.describe_profile, house.tracker.describe):
        house.feeds.add("demo")
        await until(lambda: house.version == 100)
        house.tracker.version = 3
        await house.say(tables(105, 104))
        await until(lambda: house.version == 3)
        await house.say(house.tracker.change(1))
        await until(house.equal)


async def test_what_cannot_be_used_is_counted_and_the_next_change_repairs_it(house: House) -> None:
    async with house.bus.serve(house.subjects.describe_profile, house.tracker.describe):
        house.feeds.add("demo")
        await until(lambda: house.version == 100)
        await house.say(msgspec.structs.replace(house.tracker.change(1), gain=7.0))
        await house.say(
            msgspec.structs.replace(
                published_clusters(halves()),
                record=msgspec.structs.replace(halves().record(), profiles=b"short"),
            )
        )
        await house.say(DescribeTables(model="demo"))
        await until(lambda: house.refused == 3)
        assert house.version == 100
        await house.say(house.tracker.change(2))
        await until(house.equal)


async def test_unserved_models_are_not_followed_and_forgotten_ones_release_their_memory(house: House) -> None:
    async with house.bus.serve(house.subjects.describe_profile, house.tracker.describe):
        await house.say(tables(1))
        await house.say(published_clusters(halves()))
        await asyncio.sleep(0.01)
        house.feeds.add("demo")
        await until(lambda: house.version == 100)
        assert [model for model, _ in house.learnt] == ["demo"]
        house.feeds.measure()
        assert b'roost_router_tables_version{model="demo"} 100.0' in house.metrics.exposition()
        house.feeds.keep_only(set())
        assert house.version == -1
        assert b'model="demo"' not in house.metrics.exposition()
        await house.say(tables(300))
        await asyncio.sleep(0.01)
        assert house.version == -1


@pytest.mark.looptime
async def test_without_a_tracker_requests_back_off_until_there_is_one(house: House) -> None:
    house.tracker.mute = True
    requested_at: list[float] = []
    loop = asyncio.get_running_loop()

    async def describe(request: Message) -> Message:
        requested_at.append(loop.time())
        return await house.tracker.describe(request)

    async with house.bus.serve(house.subjects.describe_profile, describe):
        house.feeds.add("demo")
        await asyncio.sleep(300)
        pauses = np.diff(requested_at)
        assert 8 < len(requested_at) < 20
        assert pauses[0] == pytest.approx(1.0, abs=0.1)
        assert pauses[-1] == pytest.approx(30.0, abs=0.1)
        assert house.version == -1
        house.tracker.mute = False
        await asyncio.sleep(31)
        assert house.equal()


async def test_large_tables_are_taken_whole_and_by_changes(house: House) -> None:
    keys = np.random.default_rng(5).integers(1, 2**64, 12_000, np.uint64)
    part = KeyedRows(keys=keys.tobytes(), rows=rows_of(len(keys)).tobytes())

    async def describe(request: Message) -> Message:
        return (
            published_clusters(halves())
            if isinstance(request, DescribeClusters)
            else msgspec.structs.replace(tables(1), blocks=part)
        )

    async with house.bus.serve(house.subjects.describe_profile, describe):
        house.feeds.add("demo")
        await until(lambda: house.version == 1)
        assert house.blocks == len(keys)
        more = np.random.default_rng(6).integers(1, 2**64, 9_000, np.uint64)
        await house.say(
            msgspec.structs.replace(
                tables(2, 1), blocks=KeyedRows(keys=more.tobytes(), rows=rows_of(len(more)).tobytes())
            )
        )
        await until(lambda: house.version == 2)
        assert house.blocks == len(keys) + len(more)
