"""Kinds of steps that are measured: they fit the engine, whatever its limits."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.embedded.calibration.cells import (
    BATCHES,
    ROUND_SECONDS,
    DecodeCell,
    Room,
    affordable,
    batches,
    prompts,
    works,
)
from engine_adapter.embedded.model_runner import PAGE_TOKENS
from fleet.layout import AttentionKind

rooms = st.builds(
    lambda ranks, pages, **limits: Room(ranks=ranks, pages=ranks * pages, **limits),
    ranks=st.integers(1, 8),
    sequences=st.integers(1, 256),
    tokens=st.integers(2, 2048),
    pages=st.integers(2, 4096),
    positions=st.integers(2, 4096),
)


@given(rooms)
def test_batches_rise_from_one_sequence_to_as_many_as_the_engine_runs(room: Room) -> None:
    found = batches(room)
    assert found.sequences[0] == 1
    assert found.sequences[-1] <= room.ranks * min(room.sequences, room.tokens)
    assert len(found.sequences) <= BATCHES
    for numbers in (found.sequences, found.contexts):
        assert all(one < later for one, later in pairwise(numbers))


def test_a_large_engine_measures_six_batches_in_equal_ratios_in_short_and_long_contexts() -> None:
    found = batches(Room(ranks=2, sequences=64, tokens=512, pages=1 << 16, positions=4096))
    assert found.sequences == (1, 3, 7, 18, 49, 128)
    assert found.contexts == (64, 1024)


@given(rooms, st.sampled_from(["dp", "tp"]))
def test_every_step_fits_the_pages_the_positions_and_the_tokens(room: Room, attention: AttentionKind) -> None:
    of_rank = room.pages if attention == "tp" else room.pages // room.ranks
    most = room.tokens * (room.ranks if attention == "tp" else 1)
    for cell in [*batches(room).cells, *prompts(room)]:
        for rank in range(room.ranks):
            work = works(cell, attention, rank, room.ranks, 256)
            pages = [page for one in work for page in one.pages]
            assert len(set(pages)) == len(pages)
            assert max(pages, default=0) < of_rank
            assert sum(len(one.tokens) for one in work) <= most
            for one in work:
                assert 0 < one.start + len(one.tokens) <= min(room.positions, PAGE_TOKENS * len(one.pages))


@given(rooms)
def test_ranks_share_the_sequences_or_all_compute_every_one(room: Room) -> None:
    for cell in [*batches(room).cells, *prompts(room)]:
        shared = [works(cell, "dp", rank, room.ranks, 256) for rank in range(room.ranks)]
        every = [works(cell, "tp", rank, room.ranks, 256) for rank in range(room.ranks)]
        assert all(one == every[0] for one in every)
        assert sum(map(len, shared)) == len(every[0])
        assert max(map(len, shared)) == len(shared[0])
        if isinstance(cell, DecodeCell):
            assert len(every[0]) == cell.sequences


@given(rooms, st.floats(1e-4, 100), st.integers(1, 4))
def test_a_slow_engine_measures_fewer_sequences(room: Room, slowest: float, layouts: int) -> None:
    """If a step takes as long for each sequence, whatever their number."""
    found = affordable(room, slowest, layouts)
    assert 1 <= found.sequences <= room.sequences
    each = slowest / batches(room).sequences[-1]
    seconds = [each * cell.sequences for cell in batches(found).cells]
    assert layouts * sum(seconds) <= 1.5 * ROUND_SECONDS or found.sequences == 1
    if layouts * 4 * slowest <= ROUND_SECONDS:
        assert found == room
