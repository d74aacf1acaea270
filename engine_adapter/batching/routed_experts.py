"""Chosen experts of a request's tokens, stored per position while the request is open. Pure NumPy."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet.routings import UNKNOWN, count_pairs


class Routed(Protocol):
    """Chosen experts of one request, by position."""

    def chosen(self) -> NDArray[np.int16]:
        """int16 [positions, layers, k] up to the last computed position. UNKNOWN where nothing was
        computed."""
        ...

    def counts(self) -> NDArray[np.int64]:
        """int64 [layers, experts]: (token, k) pairs of all computed positions. This is the request's
        profile."""
        ...


class RoutedTrace:
    """Chosen experts of one request, by position. Positions served from the prefix cache are UNKNOWN, not
    zero."""

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        self.experts = experts
        self._table = np.full((0, layers, top_k), UNKNOWN, np.int16)
        self._end = 0

    def note(self, start: int, routed: NDArray[Any]) -> None:
        """Record the experts of the tokens at positions start, start + 1, and so on. routed: int [n, layers,
        k]. A recomputed position is overwritten."""
        end = start + len(routed)
        if end > len(self._table):
            grown = np.full((max(end, 2 * len(self._table)), *self._table.shape[1:]), UNKNOWN, np.int16)
            grown[: len(self._table)] = self._table
            self._table = grown
        self._table[start:end] = routed
        self._end = max(self._end, end)

    def chosen(self) -> NDArray[np.int16]:
        """int16 [positions, layers, k] up to the last computed position. UNKNOWN where nothing was
        computed."""
        return self._table[: self._end]

    def counts(self) -> NDArray[np.int64]:
        """int64 [layers, experts]: (token, k) pairs of all computed positions. This is the request's
        profile."""
        return count_pairs(self.chosen(), self.experts)
