"""Rows of the placement benchmark: destinations saved by choosing a token's replicas jointly
(`fleet.dispatch.COVER`).

8 ranks with 8 spare slots each. Tokens come evenly from all ranks; their experts are drawn without
replacement from their rank's demand.
"""

import numpy as np
from numpy.typing import NDArray

from benchmarks.rig.placements.cases import Row, timed
from benchmarks.rig.placements.popularity import SKEWS, by_rank, domains
from fleet.dispatch import Chooser, reached
from fleet.placement import Placement
from migration.solvers.eplb import as_placement, eplb_global
from migration.solvers.locality_placement import LocalityProblem, locality_placement

PART = (
    "ranks besides its own that a token is sent to: replicas chosen for each of its experts alone (split), or"
    " together (cover)"
)
LAYERS, EXPERTS, RANKS, SPARE, DOMAINS, TOKENS, LEAK = 2, 256, 8, 8, 8, 2000, 0.3


def rows(quick: bool) -> list[Row]:
    """Return rows for EPLB's replicas, placed for balance alone, and Roost's, placed near the demand."""
    skews, top_ks = (("topheavy",), (8,)) if quick else (SKEWS, (4, 8))
    return [
        row
        for skew in skews
        for special in (0.25, 0.5)
        for top_k in top_ks
        for row in _rows(skew, special, top_k)
    ]


def _rows(skew: str, special: float, top_k: int) -> list[Row]:
    dice = np.random.default_rng([SKEWS.index(skew), int(100 * special), top_k])
    truth = by_rank(domains(skew, DOMAINS, special, LAYERS, EXPERTS, dice), RANKS, LEAK)
    slots = EXPERTS // RANKS + SPARE
    balanced = as_placement(
        eplb_global((truth * 1e5).sum(axis=0), RANKS * slots, RANKS).astype(np.int16), RANKS
    )
    near = locality_placement(truth * 1e5, LocalityProblem(np.zeros(RANKS, np.intp), slots))
    placements = (
        ("EPLB", Placement(balanced, experts=EXPERTS, ranks=RANKS)),
        ("Roost", Placement(near.table, experts=EXPERTS, ranks=RANKS, split=near.split)),
    )
    home = np.repeat(np.arange(RANKS), TOKENS // RANKS)
    demand = np.stack(
        [dice.choice(EXPERTS, top_k, replace=False, p=truth[rank, 0] / truth[rank, 0].sum()) for rank in home]
    )
    return [
        _row(f"{skew}, b {special}, top {top_k}, {name}", placement, home, demand)
        for name, placement in placements
    ]


def _row(case: str, placement: Placement, home: NDArray[np.intp], experts: NDArray[np.int64]) -> Row:
    chooser, demand = (
        Chooser(placement, range(RANKS), np.zeros(RANKS, np.intp)),
        home[:, None] * EXPERTS + experts,
    )
    split, split_ms = timed(lambda: chooser.choose(0, demand.ravel(), 0).reshape(demand.shape), 5)
    cover, cover_ms = timed(lambda: chooser.cover(0, demand, 0), 5)
    by_split, by_cover = (
        float(reached(slots // placement.slots_per_rank, home).mean()) for slots in (split, cover)
    )
    even, evened = (_balance(slots // placement.slots_per_rank) for slots in (split, cover))
    figures: dict[str, float | str] = {
        "ranks, split": by_split,
        "ranks, cover": by_cover,
        "saved, %": 100 * (1 - by_cover / by_split),
        "balance, split": even,
        "balance, cover": evened,
        "ms, split": split_ms,
        "ms, cover": cover_ms,
    }
    return Row(PART, case, figures)


def _balance(rank: NDArray[np.int64]) -> float:
    """Return mean over largest load of a rank, over the pairs of all tokens."""
    served = np.bincount(rank.ravel(), minlength=RANKS)
    return float(served.mean() / served.max())
