"""The time model against brute force."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.dispatch import LocalReplicas, shares
from fleet.experts import ExpertId, ModelShape
from fleet.placement import EMPTY, FULL, Placement, linear, with_rows
from fleet.popularity import ExpertTable, profile, uniform
from fleet.timing import (
    EngineSpeed,
    expected_local_share,
    expected_remote,
    gathered_bytes,
    running_seconds,
    step_seconds,
    surplus_pairs,
)
from tests.fleet.splits import random_split, random_table


def expected_remote_ranks(profile: NDArray[Any], placement: Placement, top_k: int) -> NDArray[np.float64]:
    return expected_remote(profile, placement, top_k, np.zeros(placement.ranks, np.intp))[0]


def expected_remote_nodes(
    profile: NDArray[Any], placement: Placement, top_k: int, node: NDArray[np.intp]
) -> NDArray[np.float64]:
    return expected_remote(profile, placement, top_k, node)[1]


def test_expected_remote_ranks_equal_the_exhaustive_count_of_independent_draws() -> None:
    rng = np.random.default_rng(3)
    wanted = rng.dirichlet(np.ones(5), size=2)
    placement = linear(layers=2, experts=5, ranks=3)
    for home in range(3):
        exact = 0.0
        for layer, draws in itertools.product(range(2), itertools.product(range(5), repeat=3)):
            ranks = {placement.holders(ExpertId(layer, e))[0] for e in draws} - {home}
            exact += float(np.prod([wanted[layer, e] for e in draws])) * len(ranks)
        assert expected_remote_ranks(wanted, placement, 3)[home] == pytest.approx(exact)


def shared_out(placement: Placement) -> NDArray[np.float64]:
    """Return the share of an expert's tokens, not kept by holders, that each rank serves: [layers, ranks,
    experts].
    """
    held = LocalReplicas.of(placement)
    return np.stack([held.by_rank(part / FULL, layer) for layer, part in enumerate(placement.split.spill)])


def _with_replicas(rng: np.random.Generator, layers: int, experts: int, ranks: int, extra: int) -> Placement:
    """Return a placement with every expert, and `extra` further ones on each rank."""
    slots = experts // ranks + extra
    table = np.full((layers, ranks, slots), -1, np.int16)
    for layer in range(layers):
        table[layer, :, : experts // ranks] = rng.permutation(experts).reshape(ranks, -1)
        for rank in range(ranks):
            table[layer, rank, experts // ranks :] = rng.choice(
                np.setdiff1d(np.arange(experts), table[layer, rank]), extra, replace=False
            )
    return Placement(table.reshape(layers, -1), experts=experts, ranks=ranks)


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_many_profiles_are_priced_at_once_as_each_alone_and_by_the_definition(extra: int) -> None:
    rng = np.random.default_rng(extra)
    profiles = rng.dirichlet(np.ones(12), size=(5, 3))
    placement = _with_replicas(rng, 3, 12, 4, extra)
    share = shared_out(placement)
    remote, local = (
        expected_remote_ranks(profiles, placement, 4),
        expected_local_share(profiles, placement, np.zeros(4, np.intp)),
    )
    assert remote.shape == local.shape == (5, 4)
    for at, home in itertools.product(range(5), range(4)):
        held = share[:, home] > 0
        assert local[at, home] == pytest.approx(float((profiles[at] * held).sum()) / 3)
        mass = np.einsum("le,lre->lr", profiles[at], np.where(held[:, None], 0.0, share))
        assert remote[at, home] == pytest.approx(float((1 - (1 - mass) ** 4).sum()))
        assert expected_remote_ranks(profiles[at], placement, 4)[home] == pytest.approx(remote[at, home])


@pytest.mark.parametrize("nodes", [(0, 0, 1), (0, 1, 0), (0, 1, 2), (0, 0, 0)])
def test_expected_remote_nodes_equal_the_exhaustive_count_of_independent_draws(
    nodes: tuple[int, ...],
) -> None:
    rng = np.random.default_rng(5)
    wanted = rng.dirichlet(np.ones(5), size=2)
    placement = linear(layers=2, experts=5, ranks=3)
    found = expected_remote_nodes(wanted, placement, 3, np.array(nodes))
    for home in range(3):
        exact = 0.0
        for layer, draws in itertools.product(range(2), itertools.product(range(5), repeat=3)):
            reached = {nodes[placement.holders(ExpertId(layer, e))[0]] for e in draws} - {nodes[home]}
            exact += float(np.prod([wanted[layer, e] for e in draws])) * len(reached)
        assert found[home] == pytest.approx(exact)


@pytest.mark.parametrize("extra", [0, 2])
def test_expected_remote_nodes_equal_what_drawn_tokens_reach(extra: int) -> None:
    """Tokens are drawn expert by expert, and each expert's holder by its share. The home rank serves its own
    experts.
    """
    rng = np.random.default_rng(extra)
    node, ranks, top_k, tokens = np.array([0, 0, 1, 1, 2, 2]), 6, 4, 40_000
    placement = _with_replicas(rng, 1, 12, ranks, extra)
    share = shared_out(placement)
    wanted = rng.dirichlet(np.ones(12), size=1)
    drawn = rng.choice(12, size=(tokens, top_k), p=wanted[0])
    served = (rng.random((tokens, top_k, 1)) > share[0].cumsum(axis=0).T[drawn]).sum(axis=2)
    found = expected_remote_nodes(wanted, placement, top_k, node)
    for home in range(ranks):
        at = node[np.where(share[0, home][drawn] > 0, home, served)]
        reached = sum((at == other).any(axis=1) for other in range(3) if other != node[home])
        assert found[home] == pytest.approx(float(np.mean(reached)), abs=0.02)


@pytest.mark.parametrize(
    ("seed", "nodes"), [(0, (0, 0, 0)), (1, (0, 1, 0)), (2, (1, 0, 2)), (3, (0, 1, 1)), (4, (0, 0, 1))]
)
def test_any_split_reaches_what_the_exhaustive_count_of_the_rule_says(
    seed: int, nodes: tuple[int, ...]
) -> None:
    """Enumerate two draws of an expert and the slots that serve it. Sharded layers do not count."""
    rng, node = np.random.default_rng(seed), np.array(nodes)
    table = random_table(rng, 3, 3, 5, 2)
    split = random_split(rng, table, 5, nodes=seed > 0)
    sharded = [[1], [0, 2], [], [0, 1], [0]][seed]
    whole = [layer for layer in range(3) if layer not in sharded]
    placement = with_rows(Placement(table, experts=5, ranks=3, split=split), dict.fromkeys(sharded), epoch=0)
    wanted = rng.dirichlet(np.ones(5), size=(2, 3))
    remote, away = expected_remote(wanted, placement, 2, node)
    local = expected_local_share(wanted, placement, node)
    for at, home in itertools.product(range(2), range(3)):
        part = shares(placement, home, node)
        ranks = nodes_reached = own = 0.0
        for layer in whole:
            chance = [
                float(wanted[at, layer, expert] * part[layer, slot]) if expert != EMPTY else 0.0
                for slot, expert in enumerate(table[layer])
            ]
            rank = [slot // placement.slots_per_rank for slot in range(len(chance))]
            own += sum(each for each, server in zip(chance, rank, strict=True) if server == home) / len(whole)
            for one, two in itertools.product(range(len(chance)), repeat=2):
                together = chance[one] * chance[two]
                ranks += together * len({rank[one], rank[two]} - {home})
                nodes_reached += together * len({nodes[rank[one]], nodes[rank[two]]} - {nodes[home]})
        assert (remote[at, home], away[at, home]) == pytest.approx((ranks, nodes_reached))
        assert local[at, home] == pytest.approx(own)


def test_where_no_layer_is_whole_nothing_is_sent_to_an_expert_and_nothing_is_local() -> None:
    sharded = with_rows(linear(layers=2, experts=4, ranks=2), {0: None, 1: None}, epoch=0)
    assert not expected_remote_ranks(uniform(2, 4), sharded, 2).any()
    with pytest.raises(ValueError, match="no layer of whole experts"):
        expected_local_share(uniform(2, 4), sharded, np.zeros(2, np.intp))


@pytest.mark.parametrize(("dtype", "value"), [("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_collectives_of_sharded_layers_move_each_token_to_all_other_ranks_and_back(
    ranks: int, dtype: str, value: int
) -> None:
    """Count the copies of one token of each rank."""
    shape = ModelShape(layers=5, experts=4, top_k=2, hidden=6, expert_intermediate=8, dtype=dtype)
    came = [0] * ranks
    for _, home, other in itertools.product(range(3), range(ranks), range(ranks)):
        if home != other:
            came[other] += 6 * value  # the hidden state
            came[home] += 6 * value  # the other's sum
    assert [gathered_bytes(shape, ranks, 3) * ranks] * ranks == pytest.approx(came)
    assert gathered_bytes(shape, ranks, 0) == 0.0


def test_a_step_waits_for_the_fullest_rank_of_each_layer() -> None:
    served = np.array([[[4.0, 0.0, 2.0], [1.0, 1.0, 1.0]], [[0.0, 9.0, 0.0], [3.0, 0.0, 0.0]]])
    assert surplus_pairs(served).tolist() == [2.0, 8.0]
    nothing, speed = np.zeros(3), EngineSpeed(step=1.0, expert_pair=0.5)
    names = (
        "prefill_tokens",
        "prefill_pairs",
        "sequences",
        "blocks",
        "remote_ranks",
        "remote_nodes",
        "distinct_experts",
    )
    assert (
        step_seconds(speed, **dict.fromkeys(names, nothing), surplus=float(surplus_pairs(served[1]))).tolist()
        == [5.0] * 3
    )


def test_nodes_are_reached_less_often_than_ranks_and_one_node_reaches_nobody() -> None:
    rng = np.random.default_rng(1)
    profiles, placement = rng.dirichlet(np.ones(12), size=(5, 3)), _with_replicas(rng, 3, 12, 4, 1)
    remote = expected_remote_ranks(profiles, placement, 4)
    assert (expected_remote_nodes(profiles, placement, 4, np.array([0, 0, 1, 1])) < remote).all()
    assert expected_remote_nodes(profiles, placement, 4, np.arange(4)) == pytest.approx(remote)
    assert (expected_remote_nodes(profiles, placement, 4, np.zeros(4, np.intp)) == 0).all()


def test_uniform_demand_over_nodes_reaches_about_the_published_number_of_them() -> None:
    """k = 8 of E = 256: one remote node of two, 2.71 of four."""
    for ranks, nodes, published in ((16, 2, 1.00), (32, 4, 2.71)):
        found = expected_remote_nodes(
            uniform(1, 256),
            linear(layers=1, experts=256, ranks=ranks),
            8,
            np.repeat(np.arange(nodes), ranks // nodes),
        )
        assert found == pytest.approx(np.full(ranks, published), rel=0.01)


@settings(deadline=None, max_examples=50)
@given(alike=st.integers(1, 9), left=st.integers(0, 30), blocks=st.integers(0, 40), output=st.integers(1, 30))
def test_what_runs_adds_to_each_step_until_it_is_done(
    alike: int, left: int, blocks: int, output: int
) -> None:
    """Equal sequences, step by step."""
    step_by_step = sum(alike * (2e-3 + 1e-5 * blocks) for step in range(output) if step < left)
    columns = (np.array([float(value)]) for value in (2e-3, 1e-5, alike, alike * blocks, alike * left))
    assert running_seconds(*columns, output)[0] == pytest.approx(step_by_step)


def test_one_rank_reaches_nobody_and_more_ranks_cost_more() -> None:
    assert expected_remote_ranks(uniform(4, 32), linear(layers=4, experts=32, ranks=1), 4).max() == 0
    two, four = (
        expected_remote_ranks(uniform(4, 32), linear(layers=4, experts=32, ranks=r), 4)[0] for r in (2, 4)
    )
    assert 0 < two < four


def test_uniform_demand_over_eight_ranks_reaches_about_the_published_number_of_ranks() -> None:
    """Distinct experts reach 4.63 remote ranks at k = 8, E = 256; independent draws come within 1.5 %."""
    remote = expected_remote_ranks(uniform(1, 256), linear(layers=1, experts=256, ranks=8), 8)[0]
    assert remote == pytest.approx(4.63, rel=0.015)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), 2e6])
def test_speeds_that_cannot_be_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="prefill_token"):
        EngineSpeed(prefill_token=bad)


def test_no_evidence_gives_the_uniform_profile_and_evidence_takes_over() -> None:
    counts = np.zeros((2, 4))
    assert np.allclose(profile(counts), uniform(2, 4))
    counts[0, 1] = 1e6
    assert profile(counts)[0, 1] > 0.999


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_table_with_impossible_values_is_refused(bad: float) -> None:
    table = ExpertTable.of(np.array([[1.0, bad]]))
    with pytest.raises(ValueError, match="finite"):
        table.array()


def test_a_table_whose_bytes_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not make"):
        ExpertTable(layers=2, experts=2, values=b"1234").array()
