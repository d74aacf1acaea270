"""Rows of the placement benchmark: the fewest copies possible after a full change of domain, with split
weights, by a mixed-integer program."""

from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from benchmarks.rig.placements.cases import SHAPES, SLOTS, Case, Drifting, Row, Table, balance
from migration.model.placement_changes import copies_between, made
from migration.solvers.even_split_copies import even_split_copies
from migration.solvers.full_placement import full_placement
from migration.solvers.split_copies import split_copies

PART = (
    "a full change of domain, single layers: copies for 95 % of a full re-placement's gain (demand known"
    " exactly), and what no plan can do with less"
)
SKEWS = ("mild", "zipf", "lognormal")
TARGET = 0.95
SECONDS, QUICK_SECONDS = 60.0, 5.0
"""time limit of the solver for a layer"""


class Least(NamedTuple):
    """copies: of the best plan found in time, None if none was; bound: no plan needs fewer."""

    copies: int | None
    bound: int


def rows(quick: bool) -> list[Row]:
    """Return one row for each; quick: of the smallest engine only."""
    layers, experts = SHAPES[0]
    ranks, skews, seconds = ((8,), SKEWS[1:], QUICK_SECONDS) if quick else ((8, 32, 64), SKEWS, SECONDS)
    return [
        _row(Case(skew, layers, experts, many, SLOTS[experts, many][0], 0), seconds)
        for many in ranks
        for skew in skews
    ]


def _row(case: Case, seconds: float) -> Row:
    drifting = Drifting(case, "full")
    first, load = drifting.before[:1], drifting.now[:1]
    before, anew = (full_placement(one, case.ranks, case.per_rank) for one in (first, load))
    keep, goal = (balance(table, load, case.ranks) for table in (before, anew))
    most = float(load.mean() * case.experts / case.ranks / (keep + TARGET * (goal - keep))[0])
    least = least_copies(before[0], load[0], case.ranks, most, seconds)
    even = made(before, even_split_copies(before, load, case.ranks, goal=goal))
    split = split_copies(before, load, case.ranks, case.experts, goal=goal).table
    figures: dict[str, float | str] = {
        "balance kept": float(keep[0]),
        "full": float(goal[0]),
        "copies": str(copies_between(before, anew, case.ranks)),
        "few, even shares": str(copies_between(before, even, case.ranks)),
        "few, split weights": str(copies_between(before, split, case.ranks)),
        f"program, {seconds:.0f} s": "none found" if least.copies is None else str(least.copies),
        "at least": str(least.bound),
    }
    return Row(PART, str(case), figures)


def least_copies(row: Table, load: NDArray[np.float64], ranks: int, most: float, seconds: float) -> Least:
    """Return the fewest copies after which no rank carries more than `most`, with free shares. row: [slots],
    load: [experts].

    y[e, g], 0 or 1: rank g holds e; x[e, g] <= y[e, g]: its part of e's load. Each expert is served
    completely, each rank stays within its slots and its load. An expert of load w has at least ceil(w / most)
    holders (a redundant constraint that saves time). If the time limit is reached, the bound is that of the
    program with y between 0 and 1.
    """
    experts, per = len(load), len(row) // ranks
    held = np.zeros((experts, ranks))
    slot = np.flatnonzero(row >= 0)
    held[row[slot], slot // per] = 1.0
    cells = experts * ranks
    cost = np.concatenate([(1.0 - held).ravel(), np.zeros(cells)])
    one, no_expert, no_rank = (
        sparse.identity(cells, format="csr"),
        sparse.csr_matrix((experts, cells)),
        sparse.csr_matrix((ranks, cells)),
    )
    of_expert = sparse.kron(sparse.identity(experts), np.ones((1, ranks)), format="csr")
    of_rank = sparse.kron(np.ones((1, experts)), sparse.identity(ranks), format="csr")
    loads = sparse.kron(load[None, :] / most, sparse.identity(ranks), format="csr")
    below = sparse.vstack(
        [
            sparse.hstack([-one, one]),
            sparse.hstack([of_rank, no_rank]),
            sparse.hstack([no_rank, loads]),
            sparse.hstack([-of_expert, no_expert]),
        ],
        format="csr",
    )
    limit = np.concatenate(
        [np.zeros(cells), np.full(ranks, per), np.ones(ranks), -np.maximum(np.ceil(load / most - 1e-9), 1.0)]
    )
    wholly = sparse.hstack([no_expert, of_expert], format="csr")
    relaxed = linprog(cost, A_ub=below, b_ub=limit, A_eq=wholly, b_eq=np.ones(experts), bounds=(0, 1))
    if relaxed.fun is None:
        raise RuntimeError(f"the relaxed program of {ranks} ranks was not solved: {relaxed.message}")
    constraints = [LinearConstraint(below, -np.inf, limit), LinearConstraint(wholly, 1.0, 1.0)]
    whole = np.concatenate([np.ones(cells), np.zeros(cells)])
    found = milp(
        cost, constraints=constraints, integrality=whole, bounds=Bounds(0, 1), options={"time_limit": seconds}
    )
    proved = relaxed.fun if found.mip_dual_bound is None else max(relaxed.fun, found.mip_dual_bound)
    return Least(None if found.x is None else round(found.fun), ceil(proved - 1e-6))
