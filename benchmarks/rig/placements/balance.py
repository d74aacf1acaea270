"""Rows of the placement benchmark: a full placement for balance, compared with EPLB and with an upper
bound."""

from itertools import groupby
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from benchmarks.rig.placements.cases import Case, Drifting, Row, balance, cases, duplicates, timed
from benchmarks.rig.report import Target
from migration.solvers.eplb import eplb_global, eplb_hierarchical
from migration.solvers.full_placement import bound, full_placement

PART = "a full placement for balance, scored on the window it is made of; gap: to the bound"
GAP, FULL_MS, ENOUGH_SLOTS = 0.004, 60.0, 5
GROUPS, NODES = 8, 4
"""of the hierarchical variant"""
ROUNDING = 1e-9


class _Found(NamedTuple):
    """Results; balance is a mean over layers."""

    ours: float
    least: float
    eplb: float
    by_node: float
    bound: float
    twice: int
    eplb_twice: int
    ms: float


def rows(quick: bool) -> list[Row]:
    """Return one row for each shape, number of ranks and skew; seeds combined."""
    of_case = groupby(cases(seeds=1 if quick else 3), key=str)
    return [_row(name, [(case, _found(case)) for case in group]) for name, group in of_case]


def _found(case: Case) -> _Found:
    seen = Drifting(case, "noise").before
    table, ms = timed(lambda: full_placement(seen, case.ranks, case.per_rank))
    raw = eplb_global(seen, case.slots, case.ranks).astype(np.int16)
    by_node = eplb_hierarchical(seen, case.slots, GROUPS, NODES, case.ranks).astype(np.int16)
    ours, theirs, nodes = (balance(one, seen, case.ranks) for one in (table, raw, by_node))
    limit = bound(seen, case.ranks, case.per_rank)
    if (ours > limit + ROUNDING).any():
        raise RuntimeError(f"{case}: a balance above what is possible; the bound is wrong")
    return _Found(
        float(ours.mean()),
        float(ours.min()),
        float(theirs.mean()),
        float(nodes.mean()),
        float(limit.mean()),
        duplicates(table, case.ranks),
        duplicates(raw, case.ranks),
        ms,
    )


def _row(name: str, found: list[tuple[Case, _Found]]) -> Row:
    case, seeds = found[0][0], [one for _, one in found]
    gap = max(one.bound - one.ours for one in seeds)
    held = [
        Target(
            "balance above EPLB's",
            100.0 * min(one.ours - one.eplb for one in seeds),
            -ROUNDING,
            unit=" points",
        ),
        Target("experts twice on a rank", max(one.twice for one in seeds), 0, at_least=False, unit=""),
        Target("full placement", median(one.ms for one in seeds), FULL_MS, at_least=False, unit=" ms"),
    ]
    if case.per_rank >= ENOUGH_SLOTS:
        held.append(
            Target(
                f"gap to the bound at {ENOUGH_SLOTS} slots per rank or more",
                gap,
                GAP,
                at_least=False,
                unit="",
            )
        )
    figures: dict[str, float | str] = {
        "EPLB": mean(one.eplb for one in seeds),
        f"in {NODES} nodes": mean(one.by_node for one in seeds),
        "twice": str(max(one.eplb_twice for one in seeds)),
        "Roost": mean(one.ours for one in seeds),
        "least": min(one.least for one in seeds),
        "twice ": str(max(one.twice for one in seeds)),
        "bound": mean(one.bound for one in seeds),
        "gap": gap,
        "ms": median(one.ms for one in seeds),
    }
    return Row(PART, name, figures, tuple(held))
