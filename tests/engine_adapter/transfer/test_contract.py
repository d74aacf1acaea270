"""One contract for every way to read another rank's experts: in-process, shared memory, NIXL as it comes, and
NIXL over tcp as between machines.

The ranks are processes, but for the in-process way. What a test needs of the others to be slow it makes slow
by a cap, or by stopping them.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.engine_adapter.transfer_process import digest, filled
from tests.engine_adapter.transfer_ranks import MEMORY, MIB, NIXL, SHARED, TCP, Rank, Ranks, ranks_of

WAYS = pytest.mark.parametrize(
    "way", [MEMORY, SHARED, NIXL, TCP], ids=lambda way: way.name, scope="module", indirect=True
)
pytestmark = WAYS


@pytest.fixture(scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield from ranks_of(request.param)


@pytest.fixture(scope="module")
def pair(way: Ranks) -> tuple[Rank, Rank]:
    """A source and a reader, of four cells of 1 MiB; they live as long as the tests of this way."""
    source, reader = way.start("e0-0.00000001"), way.start("e0-1.00000002")
    for cell in range(4):
        source.ask("fill", cell=cell, seed=cell + 1)
    return source, reader


def fresh(reader: Rank) -> None:
    for cell in range(4):
        reader.ask("fill", cell=cell, seed=0)


def same(source: Rank, theirs: int, reader: Rank, ours: int) -> bool:
    return bool(source.ask("sums", cell=theirs)["sums"] == reader.ask("sums", cell=ours)["sums"])


def test_cells_arrive_whole_and_no_others_change(pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    fresh(reader)
    assert reader.ask("pull", address=source.address, pulls=[[1, 2], [3, 0]], seconds=20)["pulled"] == 2 * MIB
    assert same(source, 1, reader, 2)
    assert same(source, 3, reader, 0)
    assert [reader.ask("zeros", cell=cell)["zeros"] for cell in (1, 3)] == [1, 1]


def test_what_opening_a_library_takes_is_stated(way: Ranks, pair: tuple[Rank, Rank]) -> None:
    """The cells and the code of libraries do not count."""
    stated = pair[0].ask("opened")["bytes"]
    if way.way in (NIXL, TCP):
        assert 0 < stated < 256 * MIB
    else:
        assert stated == 0


def test_ranges_arrive_at_their_offsets_and_no_other_byte_changes(pair: tuple[Rank, Rank]) -> None:
    """The two halves of a cell change places, into one cell from two."""
    source, reader = pair
    half, quarter = MIB // 2, MIB // 4
    for cell, seed in ((0, 1), (1, 2), (2, 1)):
        source.ask("fill", cell=cell, seed=seed)
    fresh(reader)
    pulls = [[0, half, 1, 0, half], [1, 0, 1, half, half], [2, quarter, 3, 3 * quarter, 5]]
    pulled = reader.ask("pull", address=source.address, pulls=pulls, seconds=20)["pulled"]
    assert pulled == MIB + 5
    first, second = filled(MIB, 1), filled(MIB, 2)
    landed = reader.ask("hash", cell=1)["hash"]
    assert landed == digest(np.concatenate([first[half:], second[:half]]))
    few = np.zeros(MIB, np.uint8)
    few[3 * quarter : 3 * quarter + 5] = first[quarter : quarter + 5]
    assert reader.ask("hash", cell=3)["hash"] == digest(few)
    assert [reader.ask("zeros", cell=cell)["zeros"] for cell in (0, 2)] == [1, 1]
    source.ask("fill", cell=2, seed=3)


def test_no_cells_are_nothing_to_read(pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    assert reader.ask("pull", address=source.address, pulls=[], seconds=20)["pulled"] == 0


@pytest.mark.parametrize(
    "pulls", [[[4, 0]], [[-1, 0]], [[0, 4]], [[0, -1]], [[0, 1], [1, 1]], [[0, 0], [1 << 40, 1]]]
)
def test_cells_that_do_not_exist_are_refused_before_any_byte_is_read(
    pair: tuple[Rank, Rank], pulls: list[list[int]]
) -> None:
    source, reader = pair
    fresh(reader)
    assert reader.ask("pull", address=source.address, pulls=pulls, seconds=20)["failed"] == "AddressRefused"
    assert reader.ask("zeros", cell=0)["zeros"] == 1


@pytest.mark.parametrize(
    "pulls",
    [
        [[0, 0, 0, 0, 0]],
        [[0, 0, 0, 0, -1]],
        [[0, 0, 0, 0, MIB + 1]],
        [[0, 1, 0, 0, MIB]],
        [[0, 0, 0, 1, MIB]],
        [[0, -1, 0, 0, 8]],
        [[0, 0, 0, -8, 8]],
        [[0, 1 << 62, 0, 0, 8]],
        [[0, 0, 0, 0, 9], [1, 0, 0, 8, 8]],
        [[0, 0, 0, 8, 8], [1, 0, 0, 0, 9]],
        [[0, 0, 0, 0, 32], [1, 0, 0, 8, 8], [2, 0, 0, 40, 8]],
    ],
)
def test_ranges_outside_of_a_cell_or_over_each_other_are_refused_before_any_byte_is_read(
    pair: tuple[Rank, Rank], pulls: list[list[int]]
) -> None:
    source, reader = pair
    fresh(reader)
    assert reader.ask("pull", address=source.address, pulls=pulls, seconds=20)["failed"] == "AddressRefused"
    assert reader.ask("zeros", cell=0)["zeros"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"layout": "another"},
        {"parts": 2},
        {"cell_bytes": MIB // 2},
        {"cells": 0},
        {"cells": 1 << 50},
        {"base": 0},
        {"base": 1 << 62},
    ],
)
def test_memory_that_cannot_be_like_ours_is_refused(
    pair: tuple[Rank, Rank], wrong: dict[str, object]
) -> None:
    source, reader = pair
    answer = reader.ask("pull", address=source.address | wrong, pulls=[[0, 0]], seconds=20)
    assert answer["failed"] == "AddressRefused", answer
    assert reader.ask("pull", address=source.address, pulls=[[0, 0]], seconds=20)["pulled"] == MIB


def test_a_lie_about_an_agent_is_refused_and_harms_no_other_read(way: Ranks, pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    address = source.address
    if way.way not in (NIXL, TCP):
        return
    reader.ask("pull", address=address, pulls=[[0, 0]], seconds=20)
    lies = [
        {"agent": "e0-9.1", "metadata": "bm9uc2Vuc2U="},
        {"agent": "e0-9.1", "metadata": address["metadata"][:100]},
        {"agent": "e0-9.1"},  # metadata of another
        {"agent": reader.address["agent"], "metadata": reader.address["metadata"]},
        {"agent": "n" * 300},
        {"device": 3},
        {"kind": "VRAM"},
        {"base": address["base"] + (1 << 32)},  # not registered over there
        {"metadata": ""},
    ]
    for lie in lies:
        answer = reader.ask("pull", address=address | lie, pulls=[[0, 0]], seconds=20)
        assert answer["failed"] == "AddressRefused", (lie, answer)
        assert reader.ask("pull", address=address, pulls=[[0, 0]], seconds=20)["pulled"] == MIB


def test_a_corrupted_byte_of_a_scale_is_named(pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    source_sums = source.ask("sums", cell=1)["sums"]
    source.ask("put", cell=1, offset=MIB - 3, value=0)
    reader.ask("pull", address=source.address, pulls=[[1, 1]], seconds=20)
    found = reader.ask("sums", cell=1)["sums"]
    source.ask("fill", cell=1, seed=2)
    assert [expected == got for expected, got in zip(source_sums, found, strict=True)] == [True, False]


def test_a_stopped_source_makes_reads_overdue_and_they_settle_once_it_goes_on(
    way: Ranks, pair: tuple[Rank, Rank]
) -> None:
    source, reader = pair
    reader.ask("pull", address=source.address, pulls=[[0, 0]], seconds=20)
    fresh(reader)
    source.stop()
    reading = reader.send("pull", address=source.address, pulls=[[1, 2]], seconds=0.3)
    first = reader.answer(reading)
    source.resume()
    if not way.way.hangs:
        assert first["pulled"] == MIB  # the system copies; the source has no part in it
        return
    assert "overdue" in first
    assert reader.answer(reading)["settled"]
    late = reader.ask("sums", cell=2)["sums"]
    assert late == source.ask("sums", cell=1)["sums"] or reader.ask("zeros", cell=2)["zeros"] > 0
    assert [reader.ask("zeros", cell=cell)["zeros"] for cell in (0, 1, 3)] == [
        1,
        1,
        1,
    ], "it landed outside of its cell"
    reader.ask("fill", cell=2, seed=9)
    poisoned = reader.ask("sums", cell=2)["sums"]
    reader.ask("pull", address=source.address, pulls=[[1, 3]], seconds=20)
    assert reader.ask("sums", cell=2)["sums"] == poisoned, "bytes landed after it had settled"
    assert same(source, 1, reader, 3)


def test_a_cancelled_read_settles(pair: tuple[Rank, Rank], way: Ranks) -> None:
    source, reader = pair
    if way.way.hangs:
        source.stop()
    reading = reader.send(
        "pull", address=source.address, pulls=[[1, 2]], seconds=60, cancel=0.1 if way.way.hangs else 0
    )
    first = reader.answer(reading)
    source.resume()
    if way.way.hangs or "overdue" in first:
        assert "cancelled" in first["overdue"]
        assert reader.answer(reading)["settled"]
    else:
        assert first["cancelled"]  # nothing was landing any more
    assert reader.ask("pull", address=source.address, pulls=[[1, 2]], seconds=20)["pulled"] == MIB


def test_a_rank_at_rest_uses_next_to_no_processor_and_one_that_is_read_little(
    way: Ranks, pair: tuple[Rank, Rank]
) -> None:
    source, reader = pair
    if way.way is MEMORY:
        return  # it has no thread
    reader.ask("busy", active=False)
    source.ask("busy", active=True)
    resting, helping = reader.send("cpu", seconds=0.4), source.send("cpu", seconds=0.4)
    assert reader.answer(resting)["cpu"] < 0.05
    assert source.answer(helping)["cpu"] < 0.25
    source.ask("busy", active=False)


def test_reads_from_a_killed_source_fail_and_its_next_life_is_read(
    way: Ranks, pair: tuple[Rank, Rank]
) -> None:
    """The last test, since it kills the source of all others."""
    first, reader = pair
    second = way.start("e0-0.00000001")  # the same name again, of another process
    assert reader.ask("pull", address=first.address, pulls=[[0, 0]], seconds=20)["pulled"] == MIB
    second.ask("fill", cell=0, seed=8)
    first.kill()
    if way.way.lively:
        assert reader.ask("pull", address=first.address, pulls=[[0, 0]], seconds=20)["failed"] == "PeerGone"
    reader.ask("forget", address=first.address)
    assert reader.ask("pull", address=first.address, pulls=[[0, 0]], seconds=20)["failed"] == "PeerGone"
    assert reader.ask("pull", address=second.address, pulls=[[0, 1]], seconds=20)["pulled"] == MIB
    assert same(second, 0, reader, 1)
