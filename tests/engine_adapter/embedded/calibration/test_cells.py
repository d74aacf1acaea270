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
    known_tokens,
    owned,
    prompts,
)
from engine_adapter.embedded.paged_attention import PAGE_TOKENS
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
    shares = room.ranks if attention == "tp" else 1
    for cell in [*batches(room).cells, *prompts(room)]:
        for rank in range(room.ranks):
            sequences = len(owned(cell, attention, rank, room.ranks))
            assert sequences <= room.sequences * shares or sequences <= shares
            assert sequences * cell.tokens <= room.tokens * shares
            # A sequence is admitted only if each running one could grow by a page.
            assert sequences * (-(-cell.context // PAGE_TOKENS) + 1) - 1 <= of_rank
        assert cell.cached + cell.tokens + cell.steps - 1 == cell.context <= room.positions
        assert cell.cached % PAGE_TOKENS == 0


@given(rooms)
def test_ranks_share_the_sequences_or_rank_0_plans_every_one(room: Room) -> None:
    for cell in [*batches(room).cells, *prompts(room)]:
        shared = [owned(cell, "dp", rank, room.ranks) for rank in range(room.ranks)]
        first, *others = (owned(cell, "tp", rank, room.ranks) for rank in range(room.ranks))
        assert not any(others)
        assert sorted(number for numbers in shared for number in numbers) == list(first)
        assert max(map(len, shared)) == len(shared[0])
        if isinstance(cell, DecodeCell):
            assert len(first) == cell.sequences


@given(rooms, st.integers(2, 300))
def test_sequences_know_what_is_cached_and_what_a_step_computes(room: Room, vocabulary: int) -> None:
    for cell in [*batches(room).cells, *prompts(room)]:
        for number in range(3):
            known = known_tokens(cell, number, vocabulary)
            assert len(known) == cell.cached + cell.tokens
            assert all(0 <= token < vocabulary for token in known)


@given(rooms, st.floats(1e-4, 100), st.floats(1e-4, 100), st.integers(1, 4))
def test_a_slow_engine_measures_fewer_sequences_and_tokens(
    room: Room, decode: float, prompt: float, layouts: int
) -> None:
    """If a step takes as long for each sequence and each token, whatever their number."""
    found = affordable(room, decode, prompt, layouts)
    assert 1 <= found.sequences <= room.sequences
    assert 1 <= found.tokens <= room.tokens
    of_sequence, of_token = decode / batches(room).sequences[-1], prompt / prompts(room)[0].tokens
    decodes = layouts * sum(of_sequence * cell.sequences for cell in batches(found).cells)
    full, *others = (of_token * cell.tokens for cell in prompts(found))
    smallest = found.sequences == 1 or found.tokens == 1
    assert decodes + layouts * full + 2 * sum(others) <= ROUND_SECONDS or smallest
    if layouts * 6 * decode + (layouts + 5) * prompt <= ROUND_SECONDS:
        assert found == room
