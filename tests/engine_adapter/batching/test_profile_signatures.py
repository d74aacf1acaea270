"""What is said of an ended request, against the same written down token by token."""

from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_adapter.batching import profile_signatures
from engine_adapter.batching.kv_cache import identify
from engine_adapter.batching.profile_signatures import longest_run, pair_counts, request_profiles
from engine_adapter.batching.routed_experts import RoutedTrace
from engine_adapter.engine import EndedRequest
from fleet.blocks import local_hashes, sequence_hashes
from fleet.dispatch import shares
from fleet.facts.activity import RequestProfile
from fleet.placement import Placement, linear
from fleet.routings import UNKNOWN
from fleet.signatures import PACKED, ClusterModel, pack, unpack
from tests.fleet.splits import random_split

BLOCK = 4


def clusters(random: np.random.Generator, layers: int, experts: int, count: int = 6) -> ClusterModel:
    """Random clusters; one slot in three is unused."""
    profiles = random.gamma(0.3, size=(count, layers, experts)) + 1e-3
    shares = random.dirichlet(np.ones(count)) * (random.random(count) > 1 / 3)
    shares[0] += 0.1
    return ClusterModel(
        3, np.float32(profiles / profiles.sum(axis=2, keepdims=True)), np.float32(shares / shares.sum()), 0.3
    )


def placement_of(random: np.random.Generator, layers: int, experts: int, ranks: int) -> Placement:
    """Every expert on a random rank, some on two."""
    rows = []
    for _ in range(layers):
        homes = random.integers(0, ranks, experts)
        held = [
            np.union1d(np.flatnonzero(homes == rank), random.integers(0, experts, random.integers(0, 3)))
            for rank in range(ranks)
        ]
        rows.append([np.pad(each, (0, experts - len(each)), constant_values=-1) for each in held])
    table = np.array(rows, np.int16).reshape(layers, -1)
    split = random_split(random, table, experts, nodes=True) if random.random() < 0.5 else None
    return Placement(table, experts=experts, ranks=ranks, split=split)


class Case(NamedTuple):
    requests: list[EndedRequest]
    model: ClusterModel
    placement: Placement
    rank: int
    node: NDArray[np.intp]

    def profiles(self, max_blocks: int = 100, sampled: bool = False) -> list[RequestProfile]:
        expected = [sampled] * len(self.requests)
        return request_profiles(
            self.requests,
            self.model,
            self.placement,
            self.rank,
            self.node,
            block_size=BLOCK,
            max_blocks=max_blocks,
            sampled=expected,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Some traces with unknown positions anywhere, and everything they are judged by."""
    layers, experts, ranks = draw(st.integers(1, 3)), draw(st.integers(2, 7)), draw(st.integers(1, 3))
    top_k = draw(st.integers(1, min(3, experts)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    requests = []
    for at in range(draw(st.integers(1, 4))):
        spans = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 13)), min_size=1, max_size=6))
        known = np.concatenate([np.full(length, computed) for computed, length in spans])
        routed = np.full((len(known), layers, top_k), UNKNOWN, np.int16)
        for position in np.flatnonzero(known):
            routed[position] = [random.choice(experts, top_k, replace=False) for _ in range(layers)]
        routed = routed[: np.flatnonzero(known)[-1] + 1 if known.any() else 0]
        tokens = random.integers(0, 1000, len(routed) + draw(st.integers(0, BLOCK))).tolist()
        requests.append(
            EndedRequest(
                f"d{at}",
                draw(st.integers(0, len(routed))),
                RoutedTrace.of(routed),
                [block.identity for block in identify(tokens, BLOCK)],
            )
        )
    return Case(
        requests,
        clusters(random, layers, experts),
        placement_of(random, layers, experts, ranks),
        draw(st.integers(0, ranks - 1)),
        random.integers(0, 2, ranks),
    )


def counted(routed: np.ndarray, positions: Any, experts: int) -> np.ndarray:
    """[layers, experts], one token after another."""
    counts = np.zeros((routed.shape[1], experts), np.int64)
    for position in positions:
        for layer, chosen in enumerate(routed[position]):
            for expert in chosen:
                if expert != UNKNOWN:
                    counts[layer, expert] += 1
    return counts


def run_of(routed: np.ndarray) -> list[int]:
    """Indexes of the blocks of which everything is known, of the longest unbroken run, the first of
    several."""
    best: list[int] = []
    run: list[int] = []
    for block in range(len(routed) // BLOCK + 1):
        rows = routed[block * BLOCK : (block + 1) * BLOCK]
        run = [*run, block] if len(rows) == BLOCK and (rows[:, 0, 0] != UNKNOWN).all() else []
        best = max(best, run, key=len)
    return best


def blocks_of(profile: RequestProfile) -> list[int]:
    return [int.from_bytes(profile.blocks[at : at + 8], "little") for at in range(0, len(profile.blocks), 8)]


@given(cases(), st.booleans(), st.sampled_from([1, 60, 1 << 18]))
def test_a_profile_is_what_counting_token_by_token_gives(case: Case, sampled: bool, cells: int) -> None:
    with patch.object(profile_signatures, "CELLS", cells):
        profiles = case.profiles(sampled=sampled)
    assert [profile.decision for profile in profiles] == [one.decision for one in case.requests]
    for ended, profile in zip(case.requests, profiles, strict=True):
        assert_counted(ended, profile, case)
        assert (profile.sample is not None) == sampled
        if profile.sample is not None:
            experts = case.placement.experts
            assert np.array_equal(
                profile.sample.prompt.array(), counted(ended.routed, range(ended.prompt_tokens), experts)
            )
            assert np.array_equal(
                profile.sample.completion.array(),
                counted(ended.routed, range(ended.prompt_tokens, len(ended.routed)), experts),
            )


def assert_counted(ended: EndedRequest, profile: RequestProfile, case: Case) -> None:
    routed, model, placement = ended.routed, case.model, case.placement
    counts = counted(routed, range(len(routed)), placement.experts)
    computed = sum(position[0][0] != UNKNOWN for position in routed.tolist())
    assert (profile.tokens, profile.cached_tokens, profile.block_size) == (
        computed,
        len(routed) - computed,
        BLOCK,
    )
    assert_packed(profile.signature, model, counts)
    part, per = shares(placement, case.rank, case.node), placement.slots_per_rank
    here = [
        (layer, slot)
        for layer in range(placement.layers)
        for slot in range(case.rank * per, (case.rank + 1) * per)
    ]
    near = sum(part[at] * counts[at[0], placement.expert_of_slot[at]] for at in here)
    assert profile.local == (pytest.approx(near / counts.sum()) if computed else None)
    run = run_of(routed)
    assert blocks_of(profile) == [ended.blocks[block].block_hash for block in run]
    assert profile.parent == (ended.blocks[run[0] - 1].block_hash if run and run[0] else None)
    assert len(profile.block_signatures) == PACKED * len(run)
    for at, block in enumerate(run):
        own = counted(routed, range(block * BLOCK, (block + 1) * BLOCK), placement.experts)
        assert_packed(profile.block_signatures[at * PACKED : (at + 1) * PACKED], model, own)


def assert_packed(packed: bytes, model: ClusterModel, counts: np.ndarray) -> None:
    """It is the signature of counts, up to one step of its rounding: products of matrices are not added up in
    the same order."""
    nothing = np.zeros(model.clusters, np.float32)
    expected = pack(model.signature(counts)).tolist()
    assert unpack(packed, nothing) == pytest.approx(unpack(expected, nothing), abs=1.1 / 255)


@given(cases(), st.integers(1, 4))
def test_of_a_long_request_the_first_blocks_are_said_and_the_signature_stays_that_of_all(
    case: Case, limit: int
) -> None:
    for part, whole in zip(case.profiles(max_blocks=limit), case.profiles(), strict=True):
        assert blocks_of(part) == blocks_of(whole)[:limit]
        assert part.block_signatures == whole.block_signatures[: limit * PACKED]
        assert (part.parent, part.signature, part.tokens, part.local) == (
            whole.parent,
            whole.signature,
            whole.tokens,
            whole.local,
        )


def test_hashes_are_those_of_the_tokens_and_the_parent_closes_the_reused_prefix() -> None:
    random = np.random.default_rng(2)
    tokens = random.integers(0, 1000, 11 * BLOCK + 1).tolist()
    trace = RoutedTrace(2, 2)
    trace.note(3 * BLOCK, random.integers(0, 6, (len(tokens) - 1 - 3 * BLOCK, 2, 2)))
    ended = EndedRequest("", 20, trace, [block.identity for block in identify(tokens, BLOCK)])
    (profile,) = Case(
        [ended], clusters(random, 2, 6), linear(layers=2, experts=6, ranks=2), 1, np.zeros(2, np.intp)
    ).profiles()
    chained = sequence_hashes(local_hashes(tokens, BLOCK))
    assert (blocks_of(profile), profile.parent) == (chained[3:], chained[2])
    assert (profile.tokens, profile.cached_tokens) == (8 * BLOCK, 3 * BLOCK)


def test_a_position_computed_again_counts_once_and_as_it_was_the_last_time() -> None:
    trace = RoutedTrace(1, 1)
    trace.note(0, np.full((6, 1, 1), 3))
    trace.note(4, np.full((3, 1, 1), 2))
    assert pair_counts(trace.chosen(), 4).tolist() == [[0, 0, 3, 4]]


@pytest.mark.parametrize(
    ("full", "run"),
    [
        ("", (0, 0)),
        ("-", (0, 0)),
        ("..-", (0, 2)),
        ("--..", (2, 4)),
        (".-.--", (0, 1)),
        (".-..-..-", (2, 4)),
        ("..-...", (3, 6)),
    ],
)
def test_the_blocks_that_are_reported_are_the_longest_unbroken_run(full: str, run: tuple[int, int]) -> None:
    assert longest_run(np.array([letter == "." for letter in full], bool)) == run
