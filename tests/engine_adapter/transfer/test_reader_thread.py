"""The thread that reads, over a way whose requests are done when the test says so."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.config import TransferConfig
from engine_adapter.transfer.port import Overdue, PeerGone, Pull, TransferError
from engine_adapter.transfer.rate_limit import RateLimit
from engine_adapter.transfer.reader_thread import ReaderThread, requests
from fleet.requests.handovers import MemoryAddress

MIB = 1 << 20
CELL = 64 * 1024
CONFIG = TransferConfig(piece_bytes=CELL)


def address(agent: str = "e0-0.1", life: int = 0) -> MemoryAddress:
    return MemoryAddress(cells=8, cell_bytes=CELL, layout="l", base=4096, agent=agent, metadata=bytes([life]))


def whole(source: int, cell: int) -> Pull:
    return Pull(source, 0, cell, 0, CELL)


class Script:
    """A way that keeps a record, and whose requests wait for a word each."""

    name = "script"
    idle_seconds = None

    def __init__(self) -> None:
        self.record: list[str] = []
        self.done = threading.Event()
        self.done.set()
        self.error: Exception | None = None
        self.refused: TransferError | None = None
        self.threads: set[int] = set()
        self.posted: list[tuple[str, Pull]] = []
        self.checked = 0

    def open(self) -> None:
        self._note("open")
        if self.refused:
            raise self.refused

    def key(self, address: MemoryAddress) -> str:
        return address.agent

    def incarnation(self, address: MemoryAddress) -> bytes:
        return address.metadata

    def connect(self, address: MemoryAddress) -> "ScriptedPeer":
        self._note(f"connect {address.agent} {address.metadata[0]}")
        return ScriptedPeer(self)

    def disconnect(self, address: MemoryAddress) -> None:
        self._note(f"disconnect {address.agent} {address.metadata[0]}")

    def help(self) -> None:
        raise AssertionError("nobody asked for help")

    def _note(self, what: str) -> None:
        self.threads.add(threading.get_ident())
        self.record.append(what)


class ScriptedPeer:
    def __init__(self, script: Script) -> None:
        self._script = script

    def greet(self) -> None:
        return None

    def post(self, address: MemoryAddress, parts: Sequence[Pull]) -> object | None:
        self._script.posted += [(address.agent, part) for part in parts]
        return None if self._script.done.is_set() and self._script.error is None else object()

    def check(self, request: object) -> bool:
        self._script.threads.add(threading.get_ident())
        self._script.checked += 1
        if self._script.error is not None:
            raise self._script.error
        return self._script.done.is_set()


@pytest.fixture
async def script() -> Script:
    return Script()


@pytest.fixture
async def worker(script: Script) -> AsyncIterator[ReaderThread]:
    worker = ReaderThread(script, CONFIG)
    yield worker
    script.done.set()
    await worker.close()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that a thread does."""
    while not holds():  # noqa: ASYNC110 a thread tells nobody
        await asyncio.sleep(0.001)


async def given_up(worker: ReaderThread, script: Script, address: MemoryAddress, *pulls: Pull) -> Overdue:
    """A read of which one request was posted, and then nobody waits for it."""
    posted = len(script.posted)
    reading = asyncio.create_task(worker.read(address, pulls, 60), name="a read")
    await until(lambda: len(script.posted) > posted)
    reading.cancel()
    with pytest.raises(Overdue) as overdue:
        await reading
    return overdue.value


@given(
    st.lists(st.builds(Pull, *(st.integers(0, 9),) * 4, st.integers(1, 40)), max_size=5),
    st.integers(1, 50),
)
def test_requests_cover_every_byte_once_in_order_and_none_is_larger_than_a_piece(
    pulls: list[Pull], piece: int
) -> None:
    requested = list(requests(pulls, lambda: piece))
    assert all(0 < sum(part.bytes for part in parts) <= piece for parts in requested)

    def every_byte(ranges: Sequence[Pull]) -> list[tuple[int, ...]]:
        return [
            (source, source_offset + at, cell, offset + at)
            for source, source_offset, cell, offset, size in ranges
            for at in range(size)
        ]

    assert every_byte([part for parts in requested for part in parts]) == every_byte(pulls)
    assert all(
        sum(part.bytes for part in first) + second[0].bytes > piece for first, second in pairwise(requested)
    ), "two requests that one would do for"


async def test_only_one_thread_touches_the_way(worker: ReaderThread, script: Script) -> None:
    await asyncio.gather(*(worker.read(address(f"e0-{rank}.1"), [whole(0, rank)], 10) for rank in range(4)))
    worker.forget(address())
    await worker.close()
    assert len(script.threads) == 1
    assert threading.get_ident() not in script.threads


async def test_a_failed_peer_is_disconnected_once_everything_from_it_has_settled_and_connected_anew(
    worker: ReaderThread, script: Script
) -> None:
    script.done.clear()
    overdue = await given_up(worker, script, address(), whole(0, 0))
    script.error = PeerGone("dead")
    await overdue.settled
    script.error = None
    script.done.set()
    assert (await worker.read(address(), [whole(0, 0)], 10)).bytes == CELL
    assert script.record == ["open", "connect e0-0.1 0", "disconnect e0-0.1 0", "connect e0-0.1 0"]


async def test_a_next_life_of_the_same_name_waits_for_reads_of_the_last_one(
    worker: ReaderThread, script: Script
) -> None:
    script.done.clear()
    overdue = await given_up(worker, script, address(life=1), whole(0, 0))
    second = asyncio.create_task(
        worker.read(address(life=2), [whole(0, 1)], 10), name="reads from the next life"
    )
    checked = script.checked
    await until(lambda: script.checked > checked + 1)
    assert not overdue.settled.done()
    assert script.record == ["open", "connect e0-0.1 1"]
    script.done.set()
    await second
    assert overdue.settled.done()
    assert script.record[2:] == ["disconnect e0-0.1 1", "connect e0-0.1 2"]


async def test_a_read_that_nobody_waits_for_posts_nothing_new(worker: ReaderThread, script: Script) -> None:
    script.done.clear()
    overdue = await given_up(worker, script, address(), *(whole(cell, cell) for cell in range(4)))
    script.done.set()
    await overdue.settled
    assert len(script.posted) == 1


async def test_what_fails_has_settled_only_after_a_grace(worker: ReaderThread, script: Script) -> None:
    script.error = PeerGone("dead")
    began = asyncio.get_running_loop().time()
    with pytest.raises(PeerGone, match="dead"):
        await worker.read(address(), [whole(0, 0)], 10)
    assert asyncio.get_running_loop().time() - began >= 0.05


async def test_what_was_forgotten_is_disconnected_when_its_reads_have_settled(
    worker: ReaderThread, script: Script
) -> None:
    script.done.clear()
    overdue = await given_up(worker, script, address(), whole(0, 0))
    worker.forget(address(life=7))  # another life: not this one
    worker.forget(address())
    checked = script.checked
    await until(lambda: script.checked > checked + 1)
    assert script.record == ["open", "connect e0-0.1 0"]
    script.done.set()
    await overdue.settled
    await until(lambda: script.record[-1] == "disconnect e0-0.1 0")


async def test_progress_counts_what_has_landed_and_nothing_that_is_still_on_its_way(script: Script) -> None:
    worker = ReaderThread(script, TransferConfig(piece_bytes=4 * MIB))
    told: list[tuple[int, int]] = []

    def landed(size: int) -> None:
        told.append((size, sum(pull.bytes for _, pull in script.posted)))

    await worker.read(address(), [Pull(0, 0, 0, 0, 18 * MIB), Pull(1, 0, 1, 0, 6 * MIB)], 10, landed)
    await until(lambda: len(told) == 2)
    # Pieces of 4, 4, 4, 4, 2, 4 and 2 MiB, and a report once 8 MiB have landed since the last one.
    assert [size for size, _ in told] == [8 * MIB, 16 * MIB]
    assert all(size <= posted for size, posted in told)
    script.done.clear()
    told.clear()
    before = len(script.posted)
    reading = asyncio.create_task(
        worker.read(address(), [Pull(0, 0, 0, 0, 12 * MIB)], 10, landed), name="hangs"
    )
    await until(lambda: script.checked > 3)
    assert (len(script.posted), told) == (before + 1, [])
    script.done.set()
    await reading
    await until(lambda: len(told) == 1)
    assert told[0][0] == 8 * MIB
    await worker.close()


async def test_reads_take_turns_under_a_cap(script: Script) -> None:
    worker = ReaderThread(script, TransferConfig(piece_bytes=CELL, bytes_per_second=100 * CELL))
    pulls = [whole(cell, cell) for cell in range(4)]
    await asyncio.gather(worker.read(address("a"), pulls, 10), worker.read(address("b"), pulls, 10))
    await worker.close()
    turns = [agent for agent, _ in script.posted]
    assert sorted(turns[:4]) == ["a", "a", "b", "b"], turns


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 1)), max_size=30), st.integers(1, 100_000))
def test_no_stretch_of_time_holds_more_than_the_cap_and_one_piece(
    pieces: list[tuple[int, float]], rate: int
) -> None:
    pace, now = RateLimit(rate, 1 << 20), 0.0
    begun: list[tuple[float, int]] = []
    for size, idle in pieces:
        now += pace.wait(now) + idle
        pace.begin(size, now)
        begun.append((now, size))
    for first, (since, _) in enumerate(begun):
        taken = 0
        for when, size in begun[first:]:
            assert taken <= rate * (when - since) * (1 + 1e-9) + 1e-3
            taken += size


def test_a_capped_rank_reads_in_smaller_pieces() -> None:
    assert RateLimit(None, 1 << 24).piece_bytes(0.0) == 1 << 24
    assert RateLimit(1 << 26, 1 << 24).piece_bytes(0.0) < 1 << 20
    assert RateLimit(1, 1 << 24).piece_bytes(0.0) == 1 << 16
    assert RateLimit(1, 4096).piece_bytes(0.0) == 4096


async def test_a_way_that_is_impossible_says_so_to_every_read(script: Script) -> None:
    script.refused = TransferError("no such thing here")
    worker = ReaderThread(script, CONFIG)
    for _ in range(2):
        with pytest.raises(TransferError, match="no such thing here"):
            await worker.read(address(), [whole(0, 0)], 10)
    assert not worker.opened
    await worker.close()


async def test_a_defect_of_the_thread_fails_reads_and_is_told(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    worker = ReaderThread(script, CONFIG)
    script.error = ZeroDivisionError("a defect")
    overdue = await given_up(worker, script, address(), whole(0, 0))
    await until(lambda: "a defect" in caplog.text)
    with pytest.raises(TransferError, match="a defect"):
        await worker.read(address(), [whole(0, 0)], 10)
    assert not overdue.settled.done(), "bytes may still land"
    await worker.close()


async def test_nothing_is_read_after_the_end(worker: ReaderThread) -> None:
    await worker.read(address(), [whole(0, 0)], 10)
    await worker.close()
    with pytest.raises(TransferError, match="closed"):
        await worker.read(address(), [whole(0, 0)], 10)


async def test_the_end_does_not_wait_long_for_what_hangs(
    script: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine_adapter.transfer.reader_thread._CLOSE_SECONDS", 0.02)
    worker = ReaderThread(script, CONFIG)
    script.done.clear()
    overdue = await given_up(worker, script, address(), whole(0, 0))
    await worker.close()
    assert "until the process ends" in caplog.text
    assert not any(one.name == f"reads experts by {script.name}" for one in threading.enumerate())
    checked = script.checked
    script.done.set()
    assert not overdue.settled.done(), "nobody looks any more"
    assert script.checked == checked
