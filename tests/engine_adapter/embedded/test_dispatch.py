"""Dispatch and combine: every pair reaches its expert's slot, in order, and comes home weighted, whoever
holds the expert."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.embedded.dispatch import (
    GROUP_ROWS,
    CapacityError,
    DispatchError,
    ExpertIndexError,
    GlooDispatch,
    HandleError,
    LocalDispatch,
    group_by_slot,
    sent_away,
)
from engine_adapter.embedded.step_sync import RankGroup
from fleet.dispatch import flows
from fleet.placement import Placement, linear, with_rows
from tests.engine_adapter.layer_forms import TORCH, computed_by
from tests.fleet.splits import random_split, random_table


@st.composite
def placements(draw, ranks, experts, layers=1):
    """Any legal placement: every expert somewhere, some on several ranks, empty slots in between, shared out
    evenly or in any other way."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(layers):
        holds = random.random((ranks, experts)) < draw(st.sampled_from([0.0, 0.3, 1.0]))
        holds[random.integers(ranks, size=experts), np.arange(experts)] = True
        row = np.full((ranks, experts), -1)
        for rank in range(ranks):
            row[rank] = random.permutation(np.where(holds[rank], np.arange(experts), -1))
        rows.append(row.reshape(-1))
    table = np.stack(rows).astype(np.int16)
    split = random_split(random, table, experts, nodes=draw(st.booleans())) if draw(st.booleans()) else None
    return Placement(table, experts=experts, ranks=ranks, split=split)


@st.composite
def batches(draw, experts, top_k, hidden=5):
    """Activations, distinct experts per token, and weights."""
    tokens = draw(st.integers(0, 40))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = torch.from_numpy(random.standard_normal((tokens, hidden)).astype(np.float32))
    chosen = np.array([random.permutation(experts)[:top_k] for _ in range(tokens)], np.int64).reshape(
        tokens, top_k
    )
    return x, chosen, torch.from_numpy(random.random((tokens, top_k)).astype(np.float32))


def scale_by_expert(dispatched, placement, rank, layer):
    """The stand-in experts: expert e multiplies by e + 1 and adds e; poison where no row is."""
    experts = placement.on_rank(rank)[layer]
    results = torch.full_like(dispatched.rows, torch.nan)
    begin = 0
    for slot, end in enumerate(dispatched.ends.tolist()):
        results[begin:end] = dispatched.rows[begin:end] * float(experts[slot] + 1) + float(experts[slot])
        begin = end
    return results


def expected(x, chosen, weights):
    """The same, densely, in float64."""
    each = (
        x.double()[:, None] * (torch.from_numpy(chosen)[..., None] + 1) + torch.from_numpy(chosen)[..., None]
    )
    return (each * weights.double()[..., None]).sum(dim=1)


@settings(deadline=None)
@given(st.data())
def test_local_dispatch_and_combine_equal_a_dense_float64_reference(data):
    experts, top_k = data.draw(st.sampled_from([(1, 1), (4, 2), (9, 3), (32, 4)]))
    placement = data.draw(placements(1, experts, layers=2))
    x, chosen, weights = data.draw(batches(experts, top_k))
    dispatch = LocalDispatch(placement, max_tokens=64)
    dispatch.begin_step(len(x), None)
    for layer in range(2):
        sent = dispatch.dispatch(layer, x, chosen)
        found = dispatch.combine(scale_by_expert(sent, placement, 0, layer), weights, sent.handle)
        assert found.dtype == torch.float32
        assert torch.allclose(found.double(), expected(x, chosen, weights), rtol=1e-5, atol=1e-5)
        assert sent.counts.sum() == chosen.size


@settings(deadline=None)
@given(st.lists(st.integers(0, 7), max_size=60), st.integers(1, 5))
def test_groups_are_sorted_stable_padded_and_complete(slots, min_rows):
    groups = group_by_slot(np.array(slots, np.int64), 8, min_rows)
    with computed_by(TORCH):
        by_numpy = group_by_slot(np.array(slots, np.int64), 8, min_rows)
    for one, other in zip(astuple(groups), astuple(by_numpy), strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    begins = np.concatenate([[0], groups.ends[:-1]])
    assert groups.counts.tolist() == [slots.count(slot) for slot in range(8)]
    for slot, (begin, end) in enumerate(zip(begins, groups.ends, strict=True)):
        pairs = [pair for pair, other in enumerate(slots) if other == slot]
        assert end - begin == (max(len(pairs), min_rows) if pairs else 0)
        assert groups.row_of_pair[pairs].tolist() == list(range(begin, begin + len(pairs)))
        assert groups.pair_of_row[begin : begin + len(pairs)].tolist() == pairs


def test_an_expert_the_model_does_not_have_is_refused_before_anything_is_computed():
    dispatch = LocalDispatch(linear(layers=1, experts=4, ranks=1), max_tokens=8)
    dispatch.begin_step(2, None)
    for wrong in (4, -1):
        with pytest.raises(ExpertIndexError, match=f"token 1 names expert {wrong}"):
            dispatch.dispatch(0, torch.zeros(2, 3), np.array([[0, 1], [wrong, 2]]))
    assert issubclass(ExpertIndexError, IndexError)


def test_more_tokens_than_agreed_are_refused():
    dispatch = LocalDispatch(linear(layers=1, experts=4, ranks=1), max_tokens=8)
    with pytest.raises(CapacityError, match="9 tokens of one rank"):
        dispatch.begin_step(9, None)
    with pytest.raises(DispatchError, match="brings 3 tokens, but the step headers say"):
        dispatch.begin_step(3, [4])


def test_a_handle_is_good_for_one_combine_of_the_latest_dispatch():
    dispatch = LocalDispatch(linear(layers=1, experts=4, ranks=1), max_tokens=8)
    dispatch.begin_step(1, None)
    x, chosen, weights = torch.ones(1, 3), np.array([[0, 1]]), torch.ones(1, 2)
    old = dispatch.dispatch(0, x, chosen)
    new = dispatch.dispatch(0, x, chosen)
    with pytest.raises(HandleError, match="not the latest"):
        dispatch.combine(old.rows, weights, old.handle)
    dispatch.combine(new.rows, weights, new.handle)
    with pytest.raises(HandleError, match="used up"):
        dispatch.combine(new.rows, weights, new.handle)


def test_local_dispatch_is_for_one_rank():
    with pytest.raises(ValueError, match="needs 2 ranks"):
        LocalDispatch(linear(layers=1, experts=4, ranks=2), max_tokens=8)


@pytest.fixture(scope="module", params=[2, 4])
def groups(request, tmp_path_factory):
    """The ranks of an engine as threads of this process, with a real process group between them."""
    directory, ranks = tmp_path_factory.mktemp("ranks"), request.param
    with ThreadPoolExecutor(ranks) as pool:
        joined = list(
            pool.map(lambda rank: RankGroup(directory, rank, ranks, step_timeout_s=5), range(ranks))
        )
        yield joined, pool
        for group in joined:
            group.close()


@pytest.mark.parametrize(
    "small_gather_bytes", [10**6, 0], ids=["activations-to-everybody", "activations-where-needed"]
)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_ranks_together_equal_a_dense_float64_reference(groups, small_gather_bytes, data):
    joined, pool = groups
    placement = data.draw(placements(len(joined), 8, layers=2))
    brought = [data.draw(batches(8, 2)) for _ in joined]
    received, cover = data.draw(st.booleans()), data.draw(st.booleans())

    def run(group):
        x, chosen, weights = brought[group.rank]
        dispatch = GlooDispatch(group, placement, 64, cover=cover, small_gather_bytes=small_gather_bytes)
        dispatch.begin_step(len(x), [len(other) for other, _, _ in brought] if received else None)
        found = []
        for layer in range(2):
            sent = dispatch.dispatch(layer, x, chosen)
            found.append(
                (
                    sent,
                    dispatch.combine(
                        scale_by_expert(sent, placement, group.rank, layer), weights, sent.handle
                    ),
                )
            )
        return found

    everyone = list(pool.map(run, joined))
    for layer in range(2):
        assert sum(int(found[layer][0].counts.sum()) for found in everyone) == sum(
            chosen.size for _, chosen, _ in brought
        )
        for (x, chosen, weights), found in zip(brought, everyone, strict=True):
            assert torch.allclose(
                found[layer][1].double(), expected(x, chosen, weights), rtol=1e-5, atol=1e-5
            )


PARTS = {2: [0.75, 0.25], 4: [0.5, 0.25, 0.125, 0.125]}
"""of every expert, by ranks of the engine: fractions that floating-point numbers express exactly"""


def scale_by_part(gathered, rank, ranks):
    """The stand-in experts of a sharded layer: each rank computes its part of what expert e would. Poison
    where no row is."""
    results = torch.full_like(gathered.rows, torch.nan)
    begin, part = 0, PARTS[ranks][rank]
    for expert, end in enumerate(gathered.ends.tolist()):
        results[begin:end] = (gathered.rows[begin:end] * float(expert + 1) + float(expert)) * part
        begin = end
    return results


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_parts_of_all_ranks_together_equal_a_dense_float64_reference(groups, data):
    joined, pool = groups
    ranks = len(joined)
    placement = with_rows(linear(layers=2, experts=8, ranks=ranks), {1: None}, epoch=1)
    brought = [data.draw(batches(8, 3)) for _ in joined]

    def run(group):
        x, chosen, weights = brought[group.rank]
        dispatch = GlooDispatch(group, placement, 64)
        dispatch.begin_step(len(x), [len(other) for other, _, _ in brought])
        gathered = dispatch.gather(x, chosen, weights)
        sums = dispatch.reduce(scale_by_part(gathered, group.rank, ranks), gathered.handle)
        sent = dispatch.dispatch(0, x, chosen)
        dispatch.combine(scale_by_expert(sent, placement, group.rank, 0), weights, sent.handle)
        return gathered, sums, len(dispatch.served_by)

    everyone = list(pool.map(run, joined))
    for (x, chosen, weights), (gathered, sums, counted) in zip(brought, everyone, strict=True):
        assert torch.allclose(sums.double(), expected(x, chosen, weights), rtol=1e-5, atol=1e-5)
        assert (sums.dtype, counted) == (torch.float32, 1)
        assert torch.equal(gathered.rows, everyone[0][0].rows), "every rank computes the same rows"


def test_a_tokens_sum_over_ranks_has_the_same_bits_alone_and_among_others(groups):
    joined, pool = groups
    ranks, random = len(joined), np.random.default_rng(3)
    placement = with_rows(linear(layers=1, experts=8, ranks=ranks), {0: None}, epoch=1)
    x = torch.from_numpy(random.standard_normal((ranks, 9, 5)).astype(np.float32))
    weights = torch.from_numpy(random.random((ranks, 9, 3)).astype(np.float32))
    chosen = np.array([[random.permutation(8)[:3] for _ in range(9)] for _ in joined])

    def run(group, counts):
        at, count = group.rank, counts[group.rank]
        dispatch = GlooDispatch(group, placement, 64)
        dispatch.begin_step(count, counts)
        gathered = dispatch.gather(x[at, :count], chosen[at, :count], weights[at, :count])
        return dispatch.reduce(scale_by_part(gathered, at, ranks), gathered.handle)

    for counts in ([9] * ranks, [1] * ranks, [0] * (ranks - 1) + [4]):
        for rank, found in enumerate(pool.map(run, joined, [counts] * ranks)):
            rows = x[rank, : counts[rank]].numpy()
            total = None
            for part in PARTS[ranks]:
                products = [
                    (rows * np.float32(1 + e) + np.float32(e))
                    * np.float32(part)
                    * weights[rank, : len(rows), k, None].numpy()
                    for k, e in ((k, chosen[rank, : len(rows), k, None]) for k in range(3))
                ]
                mine = (products[0] + products[1]) + products[2]
                total = mine if total is None else total + mine
            assert np.array_equal(found.numpy(), total)


def test_a_gather_is_reduced_once_before_the_next():
    dispatch = LocalDispatch(linear(layers=1, experts=4, ranks=1), max_tokens=8)
    dispatch.begin_step(1, None)
    x, chosen, weights = torch.ones(1, 3), np.array([[0, 1]]), torch.ones(1, 2)
    old = dispatch.gather(x, chosen, weights)
    new = dispatch.gather(x, chosen, weights)
    with pytest.raises(HandleError, match="not the latest"):
        dispatch.reduce(old.rows, old.handle)
    assert dispatch.reduce(new.rows, new.handle).tolist() == [[2.0] * 3]
    with pytest.raises(HandleError, match="used up"):
        dispatch.reduce(new.rows, new.handle)
    with pytest.raises(ExpertIndexError, match="token 0 names expert 4"):
        dispatch.gather(x, np.array([[0, 4]]), weights)


def test_slots_serve_their_shares_of_what_all_ranks_bring_step_by_step(groups):
    joined, pool = groups
    ranks, random = len(joined), np.random.default_rng(5)
    table = random_table(random, 2, ranks, 6, 3)
    placement = Placement(table, experts=6, ranks=ranks, split=random_split(random, table, 6, nodes=True))
    brought = random.integers(0, 6, (ranks, 40, 3, 1))

    def run(group):
        dispatch = GlooDispatch(group, placement, 64)
        served = np.zeros((2, placement.slots_per_rank), np.int64)
        for step in range(40):
            dispatch.begin_step(3, [3] * ranks)
            for layer in range(2):
                sent = dispatch.dispatch(layer, torch.ones(3, 4), brought[group.rank, step])
                dispatch.combine(sent.rows, torch.ones(3, 1), sent.handle)
                served[layer] += sent.counts
        return served

    found = np.concatenate(list(pool.map(run, joined)), axis=1)
    demand = np.stack([[np.bincount(one.ravel(), minlength=6)] * 2 for one in brought])
    expected = flows(placement, demand, np.zeros(ranks, np.intp)).served
    assert found.sum(axis=1).tolist() == [ranks * 120] * 2
    assert np.abs(found - expected).max() < 2 * ranks


def test_rows_of_a_slot_are_ordered_by_source_rank_then_token(groups):
    joined, pool = groups
    ranks = len(joined)
    placement = linear(layers=1, experts=ranks, ranks=ranks)

    def run(group):
        x = torch.arange(5.0)[:, None] + 10 * group.rank
        dispatch = GlooDispatch(group, placement, 64)
        dispatch.begin_step(5, [5] * ranks)
        sent = dispatch.dispatch(0, x, np.zeros((5, 1), np.int64))
        dispatch.combine(sent.rows, torch.ones(5, 1), sent.handle)
        return sent

    sent = list(pool.map(run, joined))
    assert sent[0].rows[:, 0].tolist() == [10 * rank + token for rank in range(ranks) for token in range(5)]
    assert all(not one.rows.numel() for one in sent[1:])


def test_a_step_that_only_one_rank_has_work_for_is_a_step_of_all(groups):
    joined, pool = groups
    placement = linear(layers=1, experts=8, ranks=len(joined))
    tokens = [0] * (len(joined) - 1) + [3]

    def run(group):
        count = tokens[group.rank]
        chosen = np.tile(np.arange(8), (count, 1))
        dispatch = GlooDispatch(group, placement, 64)
        dispatch.begin_step(count, tokens)
        sent = dispatch.dispatch(0, torch.ones(count, 4, dtype=torch.bfloat16), chosen)
        assert sent.counts.tolist() == [3] * placement.slots_per_rank
        assert sent.rows.shape == (placement.slots_per_rank * GROUP_ROWS, 4)
        return dispatch.combine(sent.rows, torch.ones(count, 8), sent.handle)

    assert [found.sum().item() for found in pool.map(run, joined)] == [0.0] * (len(joined) - 1) + [
        3 * 4 * 8.0
    ]


def test_whole_tokens_reach_fewer_ranks_and_come_home_the_same_to_the_last_bit(groups):
    joined, pool = groups
    ranks, random = len(joined), np.random.default_rng(7)
    table = np.tile(np.arange(8), (1, ranks))
    table[0, :8] = [0, 1, *[-1] * 6]  # rank 0 lacks most; the others have everything
    placement = Placement(table, experts=8, ranks=ranks)
    x = torch.from_numpy(random.standard_normal((40, 5)).astype(np.float32))
    chosen, weights = (
        np.array([random.permutation(8)[:4] for _ in range(40)]),
        torch.rand(40, 4, generator=torch.Generator().manual_seed(1)),
    )

    def run(group, cover):
        tokens = 40 if group.rank == 0 else 0
        dispatch = GlooDispatch(group, placement, 64, cover=cover, small_gather_bytes=0)
        dispatch.begin_step(tokens, [40] + [0] * (ranks - 1))
        sent = dispatch.dispatch(0, x[:tokens], chosen[:tokens])
        fetched = len({tuple(row) for row in sent.rows.tolist()}) if group.rank else 0
        return (
            dispatch.combine(scale_by_expert(sent, placement, group.rank, 0), weights[:tokens], sent.handle),
            fetched,
        )

    split, cover = (list(pool.map(run, joined, [how] * ranks)) for how in (False, True))
    assert torch.equal(split[0][0], cover[0][0])
    fetched = [sum(one[1] for one in found) for found in (split, cover)]
    assert fetched[1] == sum(bool((token > 1).any()) for token in chosen)
    assert fetched[1] < fetched[0] or ranks == 2


@given(data=st.data(), ranks=st.integers(1, 5), tokens=st.integers(0, 6), top_k=st.integers(1, 4))
def test_a_token_is_sent_once_to_each_other_rank_that_serves_any_of_its_experts(data, ranks, tokens, top_k):
    row = st.lists(st.integers(0, ranks - 1), min_size=top_k, max_size=top_k)
    served_by = data.draw(st.lists(row, min_size=tokens, max_size=tokens))
    rank = data.draw(st.integers(0, ranks - 1))
    assert sent_away(np.array(served_by, np.int64).reshape(tokens, top_k), rank) == sum(
        len(set(one) - {rank}) for one in served_by
    )


def test_slowed_links_take_their_time_for_each_token_sent_away_and_change_no_result(groups, monkeypatch):
    joined, pool = groups
    placement = linear(layers=1, experts=8, ranks=len(joined))
    slept, chosen = [], np.array([[0, 7], [0, 1], [6, 7]])
    monkeypatch.setattr(RankGroup, "wait", lambda _, seconds: slept.append(seconds))

    def run(group, seconds):
        count = 3 if group.rank == 0 else 0
        dispatch = GlooDispatch(group, placement, 64)
        dispatch.slow_links(seconds)
        dispatch.begin_step(count, [3] + [0] * (len(joined) - 1))
        sent = dispatch.dispatch(0, torch.arange(count * 4.0).view(count, 4), chosen[:count])
        return dispatch.combine(
            scale_by_expert(sent, placement, group.rank, 0), torch.ones(count, 2), sent.handle
        )

    plain, slowed = (list(pool.map(run, joined, [seconds] * len(joined))) for seconds in (0.0, 0.25))
    assert torch.equal(plain[0], slowed[0])
    away = {2: [0.5], 3: [0.5], 4: [0.5]}[len(joined)]  # of tokens 0 and 2, each to the last rank
    assert [one for one in slept if one] == away


def test_slowed_links_take_their_time_for_each_token_that_all_other_ranks_gather(groups, monkeypatch):
    joined, pool = groups
    ranks = len(joined)
    placement = with_rows(linear(layers=1, experts=8, ranks=ranks), {0: None}, epoch=1)
    slept = []
    monkeypatch.setattr(RankGroup, "wait", lambda _, seconds: slept.append(seconds))

    def run(group):
        count = 3 if group.rank == 0 else 0
        dispatch = GlooDispatch(group, placement, 64)
        dispatch.slow_links(0.25)
        dispatch.begin_step(count, [3] + [0] * (ranks - 1))
        gathered = dispatch.gather(torch.ones(count, 4), np.zeros((count, 1), np.int64), torch.ones(count, 1))
        dispatch.reduce(gathered.rows, gathered.handle)

    list(pool.map(run, joined))
    assert sorted(slept) == [0.0] * (ranks - 1) + [0.75 * (ranks - 1)]
