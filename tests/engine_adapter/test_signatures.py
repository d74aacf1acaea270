"""What is said of an ended request, against the same written down token by token."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter import signatures
from engine_adapter.embedded.routed import RoutedTrace
from engine_adapter.embedded.scheduler import identify
from engine_adapter.engine import EndedRequest
from engine_adapter.signatures import block_signatures, computed_blocks, pair_counts, request_profile
from fleet.blocks import local_hashes, sequence_hashes
from fleet.events import RequestProfile
from fleet.placement import Placement, linear
from fleet.routings import UNKNOWN
from fleet.signatures import PACKED, ClusterModel, pack

BLOCK = 4


def clusters(random: np.random.Generator, layers: int, experts: int, count: int = 6) -> ClusterModel:
    """Random clusters; one slot in three is unused."""
    profiles = random.gamma(0.3, size=(count, layers, experts)) + 1e-3
    shares = random.dirichlet(np.ones(count)) * (random.random(count) > 1 / 3)
    shares[0] += 0.1
    return ClusterModel(3, np.float32(profiles / profiles.sum(axis=2, keepdims=True)), np.float32(shares / shares.sum()), 0.3)


def placement_of(random: np.random.Generator, layers: int, experts: int, ranks: int) -> Placement:
    """Every expert on a random rank, some on two."""
    rows = []
    for _ in range(layers):
        homes = random.integers(0, ranks, experts)
        held = [np.union1d(np.flatnonzero(homes == rank), random.integers(0, experts, random.integers(0, 3))) for rank in range(ranks)]
        rows.append([np.pad(each, (0, experts - len(each)), constant_values=-1) for each in held])
    return Placement(np.array(rows).reshape(layers, -1), experts=experts, ranks=ranks)


@st.composite
def ended_requests(draw: st.DrawFn) -> tuple[EndedRequest, ClusterModel, Placement, int]:
    """A trace with unknown positions anywhere, and everything it is judged by."""
    layers, experts, ranks = draw(st.integers(1, 3)), draw(st.integers(2, 7)), draw(st.integers(1, 3))
    top_k = draw(st.integers(1, min(3, experts)))
    spans = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 13)), min_size=1, max_size=6))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    known = np.concatenate([np.full(length, computed) for computed, length in spans])
    routed = np.full((len(known), layers, top_k), UNKNOWN, np.int16)
    for position in np.flatnonzero(known):
        routed[position] = [random.choice(experts, top_k, replace=False) for _ in range(layers)]
    routed = routed[: np.flatnonzero(known)[-1] + 1 if known.any() else 0]
    tokens = random.integers(0, 1000, len(routed) + draw(st.integers(0, BLOCK))).tolist()
    ended = EndedRequest("d", draw(st.integers(0, len(routed))), routed, identify(tokens, BLOCK))
    return ended, clusters(random, layers, experts), placement_of(random, layers, experts, ranks), draw(st.integers(0, ranks - 1))


def counted(routed: np.ndarray, positions: Any, experts: int) -> np.ndarray:
    """[layers, experts], one token after another."""
    counts = np.zeros((routed.shape[1], experts), np.int64)
    for position in positions:
        for layer, chosen in enumerate(routed[position]):
            for expert in chosen:
                if expert != UNKNOWN:
                    counts[layer, expert] += 1
    return counts


def longest_run(routed: np.ndarray) -> list[int]:
    """Indexes of the blocks of which everything is known, of the longest unbroken run, the first of several."""
    best: list[int] = []
    run: list[int] = []
    for block in range(len(routed) // BLOCK + 1):
        rows = routed[block * BLOCK : (block + 1) * BLOCK]
        run = [*run, block] if len(rows) == BLOCK and (rows[:, 0, 0] != UNKNOWN).all() else []
        best = max(best, run, key=len)
    return best


def blocks_of(profile: RequestProfile) -> list[int]:
    return [int.from_bytes(profile.blocks[at : at + 8], "little") for at in range(0, len(profile.blocks), 8)]


@given(ended_requests(), st.booleans())
def test_a_profile_is_what_counting_token_by_token_gives(case: tuple[EndedRequest, ClusterModel, Placement, int], sampled: bool) -> None:
    ended, model, placement, rank = case
    routed, experts = ended.routed, placement.experts
    profile = request_profile(ended, model, placement, rank, block_size=BLOCK, most_blocks=100, sampled=sampled)
    counts = counted(routed, range(len(routed)), experts)
    computed = sum(position[0][0] != UNKNOWN for position in routed.tolist())
    assert (profile.decision, profile.tokens, profile.cached_tokens, profile.block_size) == ("d", computed, len(routed) - computed, BLOCK)
    assert profile.signature == pack(model.signature(counts)).tobytes()
    held = [set(placement.on_rank(rank)[layer].tolist()) for layer in range(placement.layers)]
    near = sum(count for layer, row in enumerate(counts) for expert, count in enumerate(row.tolist()) if expert in held[layer])
    assert profile.local == (pytest.approx(near / counts.sum()) if computed else None)
    run = longest_run(routed)
    assert blocks_of(profile) == [ended.blocks[block].block_hash for block in run]
    assert profile.parent == (ended.blocks[run[0] - 1].block_hash if run and run[0] else None)
    each = [pack(model.signature(counted(routed, range(block * BLOCK, (block + 1) * BLOCK), experts))).tobytes() for block in run]
    assert profile.block_signatures == b"".join(each)
    if not sampled:
        assert profile.sample is None
        return
    assert profile.sample is not None
    assert np.array_equal(profile.sample.prompt.array(), counted(routed, range(ended.prompt_tokens), experts))
    assert np.array_equal(profile.sample.completion.array(), counted(routed, range(ended.prompt_tokens, len(routed)), experts))


@given(ended_requests(), st.integers(1, 4))
def test_of_a_long_request_the_first_blocks_are_said_and_the_signature_stays_that_of_all(
    case: tuple[EndedRequest, ClusterModel, Placement, int], most: int
) -> None:
    ended, model, placement, rank = case
    whole = request_profile(ended, model, placement, rank, block_size=BLOCK, most_blocks=100)
    part = request_profile(ended, model, placement, rank, block_size=BLOCK, most_blocks=most)
    assert blocks_of(part) == blocks_of(whole)[:most]
    assert part.block_signatures == whole.block_signatures[: most * PACKED]
    assert (part.parent, part.signature, part.tokens, part.local) == (whole.parent, whole.signature, whole.tokens, whole.local)


def test_tables_that_are_filled_in_many_turns_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(5)
    chosen = random.integers(0, 8, (40 * BLOCK, 3, 2)).astype(np.int16)
    model = clusters(random, 3, 8)
    at_once = pair_counts(chosen, 8), block_signatures(chosen, model, BLOCK)
    monkeypatch.setattr(signatures, "CELLS", 3 * 8 * 7)
    assert np.array_equal(pair_counts(chosen, 8), at_once[0])
    assert np.array_equal(block_signatures(chosen, model, BLOCK), at_once[1])


def test_hashes_are_those_of_the_tokens_and_the_parent_closes_the_reused_prefix() -> None:
    random = np.random.default_rng(2)
    tokens = random.integers(0, 1000, 11 * BLOCK + 1).tolist()
    trace = RoutedTrace(2, 6, 2)
    trace.note(3 * BLOCK, random.integers(0, 6, (len(tokens) - 1 - 3 * BLOCK, 2, 2)))
    ended = EndedRequest("", 20, trace.chosen(), identify(tokens, BLOCK))
    profile = request_profile(ended, clusters(random, 2, 6), linear(layers=2, experts=6, ranks=2), 1, block_size=BLOCK, most_blocks=100)
    chained = sequence_hashes(local_hashes(tokens, BLOCK))
    assert (blocks_of(profile), profile.parent) == (chained[3:], chained[2])
    assert (profile.tokens, profile.cached_tokens) == (8 * BLOCK, 3 * BLOCK)


def test_a_position_computed_again_counts_once_and_as_it_was_the_last_time() -> None:
    trace = RoutedTrace(1, 4, 1)
    trace.note(0, np.full((6, 1, 1), 3))
    trace.note(4, np.full((3, 1, 1), 2))
    assert pair_counts(trace.chosen(), 4).tolist() == [[0, 0, 3, 4]]


@pytest.mark.parametrize(
    ("known", "run"),
    [
        ("", (0, 0)),
        ("...", (0, 0)),
        ("----", (0, 0)),
        ("....", (0, 1)),
        ("--......-.........", (1, 2)),
        ("....-..............", (2, 4)),
        ("--------..........", (2, 4)),
    ],
)
def test_the_blocks_that_are_reported_are_full_computed_and_consecutive(known: str, run: tuple[int, int]) -> None:
    assert computed_blocks(np.array([letter == "." for letter in known], bool), BLOCK) == run
