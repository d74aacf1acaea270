"""Few copies with split weights: as few as exhaustive search needs, within every limit, none for noise."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from benchmarks.rig.placements.cases import Case, Drifting, balance
from fleet.dispatch import loads
from fleet.placement import EMPTY, Placement
from migration.model.constraints import Constraints
from migration.model.placement_changes import ChangeKind, copies_between, made, taken
from migration.model.sampling_noise import LoadNoise
from migration.solvers.full_placement import full_placement
from migration.solvers.split_copies import SplitCopies, min_copies, split_copies

Table = NDArray[np.int16]


def served(plan: SplitCopies, demand: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    """[layers, ranks] by the shared dispatch rule, demand [layers, experts] coming evenly from all ranks."""
    placement = Placement(plan.table, experts=demand.shape[1], ranks=ranks, split=plan.split)
    return loads(placement, np.broadcast_to(demand / ranks, (ranks, *demand.shape)), np.zeros(ranks, np.intp))


def fullest(row: NDArray[np.int16], load: NDArray[np.float64], ranks: int) -> float:
    """Least possible load of the fullest rank, in mean rank loads, with the best split of every expert."""
    slot = np.flatnonzero(row != EMPTY)
    rank, expert, n = slot // (len(row) // ranks), row[slot], len(slot)
    upper, equal = np.zeros((ranks, n + 1)), np.zeros((len(load), n + 1))
    upper[rank, np.arange(n)], upper[:, n] = load[expert], -1.0
    equal[expert, np.arange(n)] = 1.0
    return (
        float(
            linprog(np.eye(n + 1)[n], upper, np.zeros(ranks), equal, np.ones(len(load)), method="highs").fun
        )
        * ranks
        / load.sum()
    )


def fewest(
    row: NDArray[np.int16], load: NDArray[np.float64], ranks: int, cap: float, most: int
) -> int | None:
    """Fewest replications after which some split keeps all ranks under the cap; None: more than `most` are
    needed."""
    counts = np.bincount(row[row != EMPTY], minlength=len(load))
    spare = [slot for slot in range(len(row)) if row[slot] == EMPTY or counts[row[slot]] > 1]
    for copies in range(most + 1):
        for slots in combinations(spare, copies):
            for experts in product(range(len(load)), repeat=copies):
                new = row.copy()
                new[list(slots)] = experts
                per_rank = [part[part != EMPTY] for part in new.reshape(ranks, -1)]
                legal = len(np.unique(new[new != EMPTY])) == len(load) and all(
                    len(set(part)) == len(part) for part in per_rank
                )
                if legal and fullest(new, load, ranks) <= cap:
                    return copies
    return None


def random_table(layers: int, experts: int, ranks: int, slots: int, dice: np.random.Generator) -> Table:
    rows = []
    for _ in range(layers):
        row = np.full((ranks, slots // ranks), EMPTY, np.int16)
        row.T.flat[:experts] = dice.permutation(experts)
        for rank, free in np.argwhere(row == EMPTY):
            if dice.random() < 0.7:
                row[rank, free] = dice.choice(np.setdiff1d(np.arange(experts), row[rank]))
        rows.append(row.ravel())
    return np.stack(rows)


def test_needs_as_few_copies_as_exhaustive_search_on_three_ranks_and_six_experts() -> None:
    dice = np.random.default_rng(1)
    needed, spent, missed = [], [], 0
    for _ in range(12):
        table, load = random_table(1, 6, 3, 9, dice), dice.gamma(0.7, size=(1, 6)) + 0.05
        least = fewest(table[0], load[0], 3, 1 / 0.9, 2)
        plan = split_copies(table, load, 3, 6, Constraints(target=1.0), goal=np.array([0.9]))
        if least is not None:
            assert min_copies(table, load, 3, np.array([1 / 0.9]))[0] <= least
            needed.append(least)
            spent.append(len(plan.changes.kind))
            missed += fullest(plan.table[0], load[0], 3) > 1 / 0.9 + 0.01
    assert len(needed) >= 8
    assert missed <= 1
    assert sum(spent) <= sum(needed) + 1


@pytest.mark.parametrize("drift", ["jitter30", "mix25"])
@pytest.mark.parametrize(("ranks", "slots", "most"), [(8, 96, 0.01), (16, 96, 0.03)])
def test_few_copies_win_back_what_a_full_replacement_would(
    drift: str, ranks: int, slots: int, most: float
) -> None:
    drifting = Drifting(Case("lognormal", 6, 64, ranks, slots, 3), drift)
    before, now = (
        full_placement(drifting.before, ranks, slots // ranks),
        full_placement(drifting.now, ranks, slots // ranks),
    )
    plan = split_copies(
        before,
        drifting.now,
        ranks,
        64,
        goal=balance(now, drifting.now, ranks),
        noise=LoadNoise(drifting.case.window),
    )
    after = served(plan, drifting.next, ranks)
    kept, anew = balance(before, drifting.next, ranks), balance(now, drifting.next, ranks)
    assert (after.mean(axis=1) / after.max(axis=1) - kept).sum() > 0.93 * (anew - kept).sum()
    assert copies_between(before, plan.table, ranks) <= most * before.size


def test_what_a_new_sample_of_the_same_demand_explains_gets_no_copy() -> None:
    drifting = Drifting(Case("zipf", 8, 64, 16, 96, 5), "noise")
    before = full_placement(drifting.before, 16, 6)
    plan = split_copies(before, drifting.now, 16, 64, noise=LoadNoise(drifting.case.window))
    assert not plan.changes
    np.testing.assert_array_equal(plan.table, before)


def test_layers_that_weights_alone_bring_to_the_cap_get_no_copy() -> None:
    table = np.array([[0, 1, 0, 2]], np.int16)
    plan = split_copies(table, np.array([[4.0, 3.0, 1.0]]), 2, 3)
    assert not plan.changes
    np.testing.assert_allclose(served(plan, np.array([[4.0, 3.0, 1.0]]), 2), [[4, 4]], rtol=1e-3)


def test_a_rank_that_holds_nothing_shared_makes_room_by_giving_away_its_smallest_expert() -> None:
    table = np.array(
        [[0, 5, 1, 0, 5, 2, 3, 4, 6]], np.int16
    )  # ranks 0 and 1 share experts 0 and 5, rank 2 shares nothing
    load = np.array([[2.0, 4.0, 4.0, 0.2, 1.0, 0.1, 0.7]])
    plan = split_copies(table, load, 3, 7, goal=np.array([0.97]))
    np.testing.assert_array_equal(plan.changes.expert, [3, 1])
    assert served(plan, load, 3).max() < 1.03 * 4


def test_the_gains_of_a_layer_add_up_to_the_fall_of_its_fullest_rank() -> None:
    dice = np.random.default_rng(7)
    table, load = random_table(5, 24, 8, 40, dice), dice.gamma(0.5, size=(5, 24)) + 0.02
    plan = split_copies(table, load, 8, 24)
    for layer in range(5):
        gain = plan.changes.gain[plan.changes.layer == layer].sum()
        fall = fullest(table[layer], load[layer], 8) - fullest(plan.table[layer], load[layer], 8)
        assert gain == pytest.approx(fall, abs=0.05)


def test_a_heavy_expert_needs_as_many_holders_as_it_has_loads_of_a_rank() -> None:
    table = np.array([[0, 1, 2, -1, 3, -1, 4, -1]], np.int16)
    load = np.array([[8.0, 1.0, 1.0, 1.0, 1.0]])
    assert min_copies(table, load, 4, np.array([1.0])).tolist() == [2]
    assert len(split_copies(table, load, 4, 5).changes.kind) >= 2


def test_a_goal_for_other_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"goal has shape \(2,\); expected one balance for each of 1 layers"):
        split_copies(np.array([[0, 1]], np.int16), np.ones((1, 2)), 2, 2, goal=np.ones(2))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(2, 5),
    st.sampled_from(["free", "budget", "replicas", "frozen", "dead", "kept"]),
)
def test_every_plan_keeps_every_limit(seed: int, ranks: int, kind: str) -> None:
    dice = np.random.default_rng(seed)
    experts, slots = 2 * ranks, 4 * ranks
    table, load = random_table(3, experts, ranks, slots, dice), dice.gamma(0.3, size=(3, experts))
    live, frozen = np.arange(ranks) > 0, dice.random((3, experts)) < 0.5
    least = np.full((3, experts), 2)
    limits = {
        "free": Constraints(),
        "budget": Constraints(max_copies=1),
        "replicas": Constraints(max_replicas=2),
        "frozen": Constraints(frozen=frozen),
        "dead": Constraints(live=live),
        "kept": Constraints(min_replicas=least),
    }[kind]
    plan = split_copies(table, load, ranks, experts, limits, node=np.arange(ranks) % 2 if seed % 2 else None)
    before, after = (
        Placement(each, experts=experts, ranks=ranks).replicas_on_rank > 0 for each in (table, plan.table)
    )
    Placement(plan.table, experts=experts, ranks=ranks, split=plan.split)
    np.testing.assert_array_equal(made(table, plan.changes), plan.table)
    assert (plan.changes.kind == ChangeKind.REPLICATE).all()
    for upto in range(len(plan.changes.kind)):
        Placement(made(table, taken(plan.changes, np.arange(upto))), experts=experts, ranks=ranks)
    assert copies_between(table, plan.table, ranks) == len(plan.changes.kind)
    was, holders = before.sum(axis=1), after.sum(axis=1)
    match kind:
        case "budget":
            assert len(plan.changes.kind) <= 1
        case "replicas":
            assert (holders <= np.maximum(was, 2)).all()
        case "frozen":
            np.testing.assert_array_equal(np.moveaxis(before, 2, 1)[frozen], np.moveaxis(after, 2, 1)[frozen])
        case "dead":
            np.testing.assert_array_equal(before[:, 0], after[:, 0])
            assert ((after[:, 1:].sum(axis=1) > 0) | (before[:, 1:].sum(axis=1) == 0)).all()
        case "kept":
            assert (holders >= np.minimum(was, 2)).all()
