"""Rows of the benchmark of placements: how few copies could do after a full change of domain, with split weights, by a mixed-integer program."""

from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.rig.placing import SHAPES, SLOTS, Case, Drifting, Row, Table, balance
from migration.changes import copies_between, made
from migration.few import few
from migration.full import full
from migration.weighted import weighted

PART = "a full change of domain, single layers: copies for 95 % of a full re-placement's gain (demand known exactly), and what no plan can do with less"
SKEWS = ("mild", "zipf", "lognormal")
TARGET = 0.95
SECONDS, QUICK_SECONDS = 60.0, 5.0
"""time limit of the solver for a layer"""


class Least(NamedTuple):
    """copies: of the best plan that was found in the time, None where none was; bound: no plan makes fewer."""

    copies: int | None
    bound: int


def rows(quick: bool) -> list[Row]:
    """One layer of each; quick: of the smallest engine alone."""
    layers, experts = SHAPES[0]
    ranks, skews, seconds = ((8,), SKEWS[1:], QUICK_SECONDS) if quick else ((8, 32, 64), SKEWS, SECONDS)
    return [_row(Case(skew, layers, experts, many, SLOTS[experts, many][0], 0), seconds) for many in ranks for skew in skews]


def _row(case: Case, seconds: float) -> Row:
    drifting = Drifting(case, "full")
    first, load = drifting.before[:1], drifting.now[:1]
    before, anew = (full(one, case.ranks, case.per_rank) for one in (first, load))
    keep, goal = (balance(table, load, case.ranks) for table in (before, anew))
    most = float(load.mean() * case.experts / case.ranks / (keep + TARGET * (goal - keep))[0])
    least = least_copies(before[0], load[0], case.ranks, most, seconds)
    even = made(before, few(before, load, case.ranks, goal=goal))
    split = weighted(before, load, case.ranks, case.experts, goal=goal).table
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
    """The fewest copies after which no rank need carry more than `most`, replicas sharing at will. row: [slots], load: [experts].

    y[e, g], 0 or 1: rank g holds e; x[e, g] <= y[e, g]: its part of e's load. Each expert is served wholly, each rank within its slots and its load;
    an expert of load w has ceil(w / most) holders at least. That count alone is a bound too, where the solver gets nowhere in the time.
    """
    experts, per = len(load), len(row) // ranks
    held = np.zeros((experts, ranks))
    slot = np.flatnonzero(row >= 0)
    held[row[slot], slot // per] = 1.0
    holders = np.maximum(np.ceil(load / most - 1e-9), 1.0)
    one = sparse.identity(experts * ranks, format="csr")
    nothing = sparse.csr_matrix((experts, experts * ranks))
    of_expert = sparse.kron(sparse.identity(experts), np.ones((1, ranks)), format="csr")
    of_rank = sparse.kron(np.ones((1, experts)), sparse.identity(ranks), format="csr")
    loads = sparse.kron(load[None, :] / most, sparse.identity(ranks), format="csr")
    free = sparse.csr_matrix((ranks, experts * ranks))
    constraints = [
        LinearConstraint(sparse.hstack([nothing, of_expert]), 1.0, 1.0),
        LinearConstraint(sparse.hstack([-one, one]), -np.inf, 0.0),
        LinearConstraint(sparse.hstack([of_rank, free]), -np.inf, per),
        LinearConstraint(sparse.hstack([free, loads]), -np.inf, 1.0),
        LinearConstraint(sparse.hstack([of_expert, nothing]), holders, np.inf),
    ]
    cost = np.concatenate([(1.0 - held).ravel(), np.zeros(experts * ranks)])
    whole = np.concatenate([np.ones(experts * ranks), np.zeros(experts * ranks)])
    found = milp(cost, constraints=constraints, integrality=whole, bounds=Bounds(0, 1), options={"time_limit": seconds})
    counted = int(np.maximum(holders - held.sum(axis=1), 0).sum())
    proved = 0 if found.mip_dual_bound is None else ceil(found.mip_dual_bound - 1e-6)
    return Least(None if found.x is None else round(found.fun), max(counted, proved))
