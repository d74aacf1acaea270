"""Chosen experts of a request's tokens, stored per position while the request is open. Pure NumPy."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.routings import UNKNOWN


class RoutedTrace:
    """Chosen experts of one request, by position. Positions served from the prefix cache are UNKNOWN, not
    zero."""

    def __init__(self, layers: int, top_k: int) -> None:
        self.positions = 0
        self._table = np.full((0, layers, top_k), UNKNOWN, np.int16)

    @classmethod
    def of(cls, routed: NDArray[Any]) -> "RoutedTrace":
        """Return the trace of a request whose tokens chose these experts, from position 0 on: int [n, layers,
        k]."""
        trace = cls(*routed.shape[1:])
        trace.note(0, routed)
        return trace

    @property
    def nbytes(self) -> int:
        return int(self._table.nbytes)

    def note(self, start: int, routed: NDArray[Any]) -> None:
        """Record the experts of the tokens at positions start, start + 1, and so on. routed: int [n, layers,
        k]. A recomputed position is overwritten."""
        end = start + len(routed)
        if end > len(self._table):
            grown = np.full((max(end, 2 * len(self._table)), *self._table.shape[1:]), UNKNOWN, np.int16)
            grown[: len(self._table)] = self._table
            self._table = grown
        self._table[start:end] = routed
        self.positions = max(self.positions, end)

    def chosen(self) -> NDArray[np.int16]:
        return self._table[: self.positions]
