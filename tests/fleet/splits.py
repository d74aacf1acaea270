"""Random placements and splits for tests."""

import numpy as np
from numpy.typing import NDArray

from fleet.placement import EMPTY, FULL, Split


def random_table(
    dice: np.random.Generator, layers: int, ranks: int, experts: int, spare: int
) -> NDArray[np.int16]:
    """Return int16 [layers, slots]: every expert at least once, with random further replicas and empty
    slots."""
    slots = -(-experts // ranks) + spare
    table = np.full((layers, ranks, slots), EMPTY, np.int16)
    for layer in range(layers):
        for at, expert in enumerate(dice.permutation(experts)):
            table[layer, at % ranks, at // ranks] = expert
        for rank in range(ranks):
            absent = [e for e in range(experts) if e not in table[layer, rank]]
            free = np.flatnonzero(table[layer, rank] == EMPTY)
            copies = dice.integers(0, min(len(absent), len(free)) + 1)
            table[layer, rank, free[:copies]] = dice.permutation(absent)[:copies]
    return table.reshape(layers, -1)


def random_split(dice: np.random.Generator, table: NDArray[np.int16], experts: int, *, nodes: bool) -> Split:
    """Return a random valid split. Extremes are as likely as intermediate values."""
    held = table != EMPTY
    keep, near = (
        np.where(held, dice.choice([0, 1, FULL // 3, FULL - 1, FULL], table.shape), 0).astype(np.uint16)
        for _ in range(2)
    )
    spill = np.zeros(table.shape, np.uint16)
    for layer, expert in np.ndindex(len(table), experts):
        at = np.flatnonzero(table[layer] == expert)
        cuts = np.sort(dice.choice([0, 1, FULL // 2, FULL, int(dice.integers(FULL))], len(at) - 1))
        spill[layer, at] = np.diff(cuts, prepend=0, append=FULL)
    return Split(keep, spill, near if nodes else np.zeros_like(near))
