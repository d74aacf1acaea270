"""Random placements with demand and limits, of all shapes that solvers meet: empty slots, several nodes, dead
ranks, experts without demand, demand by rank."""

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.placement import EMPTY
from migration.model.constraints import Constraints


class Case(NamedTuple):
    table: NDArray[np.int16]
    demand: NDArray[np.float64]
    """[layers, experts], or [ranks, layers, experts]"""
    ranks: int
    experts: int
    node: NDArray[np.intp] | None
    limits: Constraints


@st.composite
def cases(draw: st.DrawFn, by_rank: bool | None = None) -> Case:
    """Draw a case of up to 16 ranks."""
    dice = np.random.default_rng(draw(st.integers(0, 2**32)))
    layers, ranks, per = draw(st.integers(1, 6)), draw(st.integers(2, 16)), draw(st.integers(1, 7))
    experts = draw(st.integers(max(1, ranks * per // 3), ranks * per))
    table = np.stack([_row(dice, ranks, per, experts) for _ in range(layers)])
    shape = (
        (ranks, layers, experts)
        if (draw(st.booleans()) if by_rank is None else by_rank)
        else (layers, experts)
    )
    demand = dice.gamma(draw(st.sampled_from([0.2, 1.0, 5.0])), size=shape)
    demand *= dice.random(shape) > draw(st.sampled_from([0.0, 0.3]))
    return Case(table, demand, ranks, experts, _node(draw, ranks), _limits(draw, dice, table, ranks, experts))


def _row(dice: np.random.Generator, ranks: int, per: int, experts: int) -> NDArray[np.int16]:
    """[ranks * per]: every expert once, then copies of the first ones where a rank has room for them."""
    row = np.full((ranks, per), EMPTY, np.int16)
    for expert in dice.permutation(experts):
        row[_with_room(dice, row, 1)[0], 0] = expert
        row.sort(axis=1)
    for _ in range(dice.integers(0, ranks * per - experts + 1)):
        expert = int(experts * dice.random() ** 3)
        free = np.flatnonzero((row[:, 0] == EMPTY) & ~(row == expert).any(axis=1))
        if len(free):
            row[dice.choice(free), 0] = expert
            row.sort(axis=1)
    return row.reshape(-1)


def _with_room(dice: np.random.Generator, row: NDArray[np.int16], count: int) -> NDArray[np.intp]:
    return np.asarray(dice.choice(np.flatnonzero(row[:, 0] == EMPTY), count))


def _node(draw: st.DrawFn, ranks: int) -> NDArray[np.intp] | None:
    return None if draw(st.booleans()) else np.arange(ranks) // draw(st.integers(1, 4))


def _limits(
    draw: st.DrawFn, dice: np.random.Generator, table: NDArray[np.int16], ranks: int, experts: int
) -> Constraints:
    given: dict[str, Any] = {}
    if draw(st.booleans()):
        given["frozen"] = dice.random((len(table), experts)) < 0.1
    if draw(st.booleans()):
        given["max_replicas"] = draw(st.integers(2, ranks))
    if draw(st.booleans()):
        given["min_replicas"] = 1 + (dice.random((len(table), experts)) < 0.1).astype(np.int64)
    if ranks > 2 and draw(st.booleans()):
        given["live"] = np.arange(ranks) != dice.integers(ranks)
    return Constraints(**given)
