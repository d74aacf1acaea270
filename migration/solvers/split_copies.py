"""Few copies with split weights: remove the imbalance that new weights alone cannot, with as few copies as
possible. Pure.

The search for copies is `migration.solvers.overflow_copies`.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray, SlotTable
from fleet.placement import EMPTY, Split
from migration.model.constraints import UNLIMITED, Constraints
from migration.model.placement_changes import NONE, PlacementChanges, made, within
from migration.model.sampling_noise import LoadNoise, changed, deviation, expected_most
from migration.solvers.overflow_copies import NEAR_CAP, overflow_copies
from migration.solvers.split_weights import ROUNDS, SLACK, DemandPull, check, diffused, reweighted, shared

NEARBY = 0.02
"""Most by which the fullest rank may stay above that of a full re-placement, in mean rank loads, whatever the
gain: more would be noticeable in a step."""
_CERTAIN = 5e-3
"""Part of the missing load that may be due to weights not yet converged."""
_TINY = 1e-9


class SplitCopies(NamedTuple):
    """A placement, its split, and the copies that lead to it."""

    table: SlotTable
    split: Split
    changes: PlacementChanges
    """Replications, each with the fall of its layer's most loaded rank after convergence of the weights, in
    mean rank loads."""


def split_copies(
    table: SlotTable,
    demand: NDArray[Any],
    ranks: int,
    experts: int,
    limits: Constraints = UNLIMITED,
    *,
    goal: NDArray[Any] | None = None,
    noise: LoadNoise | None = None,
    node: NDArray[np.intp] | None = None,
    slack: float = SLACK,
) -> SplitCopies:
    """Return few copies, and the weights, that reach `limits.target` of a full re-placement's gain over the
    even split.

    table: legal, int16 [layers, slots]; demand: [layers, experts] or [ranks, layers, experts] (see
    `reweight`); goal: [layers], balance of a full re-placement under this demand; None: 1. noise: number of
    pairs behind the demand; None: it is exact. With it, layers whose imbalance is explained by sampling get
    no copies. node: int [ranks]; slack: as for `reweight`. ValueError when shapes contradict each other.
    """
    check(table, demand, ranks, experts)
    wants = DemandPull(demand, ranks, node, limits.live)
    changes = copies_for(table, wants, limits, goal=goal, noise=noise)
    after, pairs = made(table, changes), None if noise is None else noise.window
    return SplitCopies(after, reweighted(after, wants, pairs=pairs, slack=slack), changes)


def copies_for(
    table: SlotTable,
    wants: DemandPull,
    limits: Constraints = UNLIMITED,
    *,
    goal: NDArray[Any] | None = None,
    noise: LoadNoise | None = None,
) -> PlacementChanges:
    """Return the copies of `split_copies` alone, for callers that ask several solvers about one demand."""
    if goal is not None and np.shape(goal) != (len(table),):
        raise ValueError(
            f"split: goal has shape {np.shape(goal)}; expected one balance for each of {len(table)} layers"
        )
    ranks = wants.ranks
    aim = np.ones(len(table)) if goal is None else np.clip(np.asarray(goal, np.float64), _TINY, 1.0)
    parts = shared(table, wants.load, ranks, limits.live)
    if not len(parts.slot) and not (table == EMPTY).any():
        return NONE
    served = parts.whole / parts.replicas
    cap, open_layers = _caps(
        table, wants.load, parts.of_rank(served).reshape(len(table), ranks), aim, limits, noise
    )
    # Half the rounds suffice here: the search continues from these weights.
    served = diffused(parts, served, ROUNDS // 2)
    above = _alive(parts.of_rank(served).reshape(len(table), ranks), limits).max(axis=1) > cap + NEAR_CAP
    changes = overflow_copies(table, wants.load, parts, served, cap, open_layers & above, limits, wants.node)
    return changes if limits.max_copies is None else within(changes, limits.max_copies)


def _alive(loads: FloatArray, limits: Constraints) -> FloatArray:
    """[layers, live ranks]."""
    return loads if limits.live is None else np.asarray(loads[:, limits.live])


def _caps(
    table: SlotTable,
    load: FloatArray,
    even: FloatArray,
    goal: FloatArray,
    limits: Constraints,
    noise: LoadNoise | None,
) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Return ([layers] acceptable load of the fullest rank, [layers] True where demand has changed). even:
    [layers, ranks] loads under the even split.

    With noise, loads of the next window exceed those of this one by the sampling error: the target part
    refers to the gain that remains.
    """
    alive = _alive(even, limits)
    most, least = np.maximum(alive.max(axis=1, initial=0.0), 1.0), 1.0 / goal
    part = limits.target
    if noise is None:
        return np.minimum(1.0 / (part / least + (1.0 - part) / most), least + NEARBY), np.ones(
            len(even), bool
        )
    held = table != EMPTY
    place = (np.arange(len(table))[:, None] * load.shape[1] + table)[held]
    spread = deviation(
        load, np.bincount(place, minlength=load.size).reshape(load.shape), alive.shape[1], noise.window
    )
    blur = expected_most(alive.shape[1]) * spread
    cap = np.clip(1.0 / (part / (least + blur) + (1.0 - part) / most) - blur, least, least + NEARBY)
    return cap, changed(alive, goal, spread)


def min_copies(table: SlotTable, load: NDArray[Any], ranks: int, cap: NDArray[Any]) -> NDArray[np.int64]:
    """int64 [layers]: lower bound of the copies that keep every rank load below `cap` [layers] (in mean rank
    loads), with any split. Not always sufficient.

    The larger of two bounds. First: a rank serves at most `cap`, so an expert of load x needs x / cap
    holders. Second: a copy adds at most `cap` to the flow from experts into ranks of that capacity, and all
    copies of an expert add at most x, while without copies the excess is missing.
    """
    check(table, load, ranks, load.shape[1])
    wants = DemandPull(load, ranks, None, None)
    parts = shared(table, wants.load, ranks)
    even = parts.whole / parts.replicas
    loads = parts.of_rank(diffused(parts, even, 10 * ROUNDS)).reshape(len(table), ranks)
    missing = np.maximum(loads - cap[:, None], 0.0).sum(axis=1)
    layer, slot = np.nonzero(table != EMPTY)
    holders = np.bincount(layer * load.shape[1] + table[layer, slot], minlength=load.size).reshape(load.shape)
    needed = np.maximum(np.ceil(wants.load / cap[:, None] - 1e-6) - holders, 0.0).sum(axis=1)
    each = np.clip(wants.load[:, :, None] - cap[:, None, None] * np.arange(ranks), 0.0, cap[:, None, None])
    most = np.cumsum(np.sort(each.reshape(len(table), -1), axis=1)[:, ::-1], axis=1)
    enough = np.where(missing > _CERTAIN, (most < missing[:, None] - _CERTAIN).sum(axis=1) + 1, 0)
    return np.asarray(np.maximum(needed, enough), np.int64)
