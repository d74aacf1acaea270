"""Transportation problem: carry supplies to places of limited room, for the greatest total value. Pure.

The simplex method on a network (Dantzig 1951): a basis is a spanning tree of rows and columns. In each turn
the potentials of the tree price all cells, and the cell that gains most enters. Load moves along the ring
that it closes with the tree, until a cell of the ring is empty and leaves. The start takes the cells of
greatest value first, which is near the optimum where rows want different columns.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray, IndexArray
from migration import kernels

_TURNS = 40
"""Most turns, per row and column. Some one or two are usual; beyond that, the ring's loads are too small to
tell them from rounding, and what was reached is used."""
_ROUNDING = 1e-12
"""Missing room, relative to the supplies, that counts as the rounding of sums."""
_STILL = 1e-13
"""Gain below which no cell enters, relative to the largest value."""


def transported(value: NDArray[Any], supply: FloatArray, room: FloatArray) -> FloatArray:
    """float64 [rows, columns]: what each row carries to each column, such that sum(carried * value) is
    greatest.

    Rows carry their whole supply [rows]; columns take at most their room [columns]. Where several solutions
    are best, one of them. ValueError if there is more supply than room, beyond rounding, or a value is not
    finite.
    """
    if not np.isfinite(value).all():
        raise ValueError("transportation: a value is not finite")
    needed = float(supply.sum())
    spare = float(room.sum()) - needed
    if spare < -_ROUNDING * needed:
        raise ValueError(f"transportation: room for {room.sum():.6f}, and supplies of {supply.sum():.6f}")
    # A last row of no value fills the room that is left, so that all columns are full.
    cost = np.zeros((len(supply) + 1, len(room)))
    np.negative(value, out=cost[:-1])
    supplies = np.append(np.asarray(supply, np.float64), max(spare, 0.0))
    order = np.argsort(cost, axis=None, kind="stable")
    turns, still = _TURNS * (len(supply) + 1 + len(room)), _STILL * float(np.abs(cost).max(initial=0.0))
    carried = np.zeros(cost.shape)
    library = kernels.compiled()
    if library is None:
        _solve(cost, order, supplies, room, turns, still, carried)
    else:
        library.transported(
            cost, order, supplies, kernels.plain(np.asarray(room, np.float64)), turns, still, carried
        )
    return carried[:-1]


def _solve(
    cost: FloatArray,
    order: IndexArray,
    supply: FloatArray,
    room: FloatArray,
    turns: int,
    still: float,
    into: FloatArray,
) -> None:
    """Implement `transported` in Python. order: the cells, flat, by rising cost."""
    rows, columns = cost.shape
    cells, loads = _started(order, supply.tolist(), room.tolist())
    for _ in range(turns):
        potential, parent = _priced(cells, cost, rows)
        gains = cost - potential[:rows, None] - potential[rows:]
        entering = int(gains.argmin())
        row, column = divmod(entering, columns)
        if gains[row, column] >= -still:
            break
        # Nodes are rows, then columns. The ring alternates: edges at even places of either side give.
        sides = _ring(parent, row, rows + column)
        giving = [edge for side in sides for edge in side[::2]]
        leaving = min(giving, key=lambda edge: loads[edge])
        least = loads[leaving]
        for side in sides:
            for place, edge in enumerate(side):
                loads[edge] += least if place % 2 else -least
        cells[leaving], loads[leaving] = (row, column), least
    for (row, column), load in zip(cells, loads, strict=True):
        into[row, column] = load


def _started(
    order: IndexArray, supply: list[float], room: list[float]
) -> tuple[list[tuple[int, int]], list[float]]:
    """Return the cells of a spanning tree and their loads: cheapest cells first, each closes a row or a
    column."""
    cells: list[tuple[int, int]] = []
    loads: list[float] = []
    open_rows, open_columns = [True] * len(supply), [True] * len(room)
    rows, columns = len(supply), len(room)
    for cell in order.tolist():
        row, column = divmod(cell, len(room))
        if not open_rows[row] or not open_columns[column]:
            continue
        # The last row closes columns only, and the last column rows only, whatever rounding has left.
        closes_row = rows > 1 and (columns == 1 or supply[row] <= room[column])
        load = supply[row] if closes_row else room[column]
        cells.append((row, column))
        loads.append(load)
        if closes_row:
            open_rows[row], rows = False, rows - 1
            room[column] = max(room[column] - load, 0.0)
        else:
            open_columns[column], columns = False, columns - 1
            supply[row] = max(supply[row] - load, 0.0)
        if rows + columns == 1:
            break
    return cells, loads


def _priced(
    cells: list[tuple[int, int]], cost: FloatArray, rows: int
) -> tuple[FloatArray, list[tuple[int, int]]]:
    """Return the potentials [rows + columns] at which the tree's cells gain nothing, and for each node (its
    parent, the edge to it); row 0 is the root."""
    nodes = rows + cost.shape[1]
    edges: list[list[tuple[int, int]]] = [[] for _ in range(nodes)]
    for edge, (row, column) in enumerate(cells):
        edges[row].append((rows + column, edge))
        edges[rows + column].append((row, edge))
    potential, parent = np.zeros(nodes), [(-1, -1)] * nodes
    waiting = [0]
    while waiting:
        node = waiting.pop()
        for other, edge in edges[node]:
            if edge != parent[node][1]:
                parent[other] = (node, edge)
                potential[other] = cost[cells[edge]] - potential[node]
                waiting.append(other)
    return potential, parent


def _ring(parent: list[tuple[int, int]], row: int, column: int) -> tuple[list[int], list[int]]:
    """Return the edges from a row, and from a column, up to where their ways to the root meet."""
    above = {row: 0}
    node, mine = row, list[int]()
    while parent[node][0] >= 0:
        node, edge = parent[node]
        mine.append(edge)
        above[node] = len(mine)
    node, theirs = column, list[int]()
    while node not in above:
        node, edge = parent[node]
        theirs.append(edge)
    return mine[: above[node]], theirs
