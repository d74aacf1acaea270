"""Prices of placements are the same in both forms, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.dispatch import loads, served_by
from fleet.experts import ModelShape
from fleet.placement import Placement
from migration import kernels
from migration.model.dispatch_traffic import dispatched
from migration.solvers.split_weights import reweight
from tests.migration.kernels.cases import Case, cases


def placed(case: Case) -> tuple[Placement, NDArray[np.intp]]:
    """Return the case's placement with the split that suits it, and the ranks' nodes."""
    split = reweight(case.table, case.demand, case.ranks, case.experts, case.node)
    placement = Placement(case.table, experts=case.experts, ranks=case.ranks, split=split)
    return placement, np.zeros(case.ranks, np.intp) if case.node is None else case.node


@settings(max_examples=100, deadline=None)
@given(cases(by_rank=True), st.integers(1, 40), st.booleans(), st.booleans())
def test_dispatched_demand_is_the_same(case: Case, top_k: int, single: bool, shuffled: bool) -> None:
    placement, node = placed(case)
    if shuffled:
        node = node[np.random.default_rng(top_k).permutation(len(node))]
    demand = case.demand.astype(np.float32) if single else case.demand
    with kernels.python_form():
        expected = dispatched(placement, demand, node, top_k)
    found = dispatched(placement, demand, node, top_k)
    assert all(np.array_equal(one, two) for one, two in zip(found, expected, strict=True))


@settings(max_examples=20, deadline=None)
@given(cases(by_rank=True))
def test_the_same_where_gates_limit_groups(case: Case) -> None:
    placement, node = placed(case)
    few = min(2, case.experts)
    shape = ModelShape(
        layers=placement.layers,
        experts=case.experts,
        top_k=few,
        hidden=8,
        expert_intermediate=8,
        groups=case.experts,
        groups_per_token=few,
    )
    with kernels.python_form():
        expected = dispatched(placement, case.demand, node, few, shape)
    found = dispatched(placement, case.demand, node, few, shape)
    assert all(np.array_equal(one, two) for one, two in zip(found, expected, strict=True))


def test_the_forms_agree_on_many_ranks_and_serve_what_the_dispatch_rule_says() -> None:
    dice = np.random.default_rng(0)
    table = np.stack([np.concatenate([dice.permutation(300) for _ in range(2)]) for _ in range(2)])
    table, node = table.astype(np.int16), np.arange(300) // 7
    demand = dice.gamma(0.3, size=(300, 2, 300))
    placement = Placement(
        table, experts=300, ranks=300, split=reweight(table, demand, 300, 300, node), duplicates=True
    )
    with kernels.python_form():
        expected = dispatched(placement, demand, node, 8)
    found = dispatched(placement, demand, node, 8)
    assert all(np.array_equal(one, two) for one, two in zip(found, expected, strict=True))
    assert np.allclose(found.load, loads(placement, demand, node))
    assert np.allclose(found.local, np.einsum("lrr->lr", served_by(placement, demand, node)))


def test_experts_that_do_not_exist_are_refused() -> None:
    library = kernels.compiled()
    if library is None:
        pytest.skip("no library")
    table, share = np.array([[0, 7]], np.int16), np.ones((1, 2))
    arrays = [np.zeros(shape) for shape in ((1, 2),) * 5 + ((1, 1, 2), (1, 2), (1, 1))]
    with pytest.raises(ValueError, match="no such expert"):
        library.priced_traffic(
            table, share, share, share, np.ones((1, 2, 2)), np.zeros(2, np.int64), 1, 2, 2, 2, *arrays
        )
    with pytest.raises(ValueError, match="differ in length"):
        library.priced_traffic(
            table, share, share, share, np.ones((1, 2, 3)), np.zeros(2, np.int64), 1, 2, 2, 2, *arrays
        )
