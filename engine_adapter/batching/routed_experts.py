"""Which experts a request's tokens went to, kept per position while the request lives. Pure numpy."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet.routings import UNKNOWN, count_pairs


class Routed(Protocol):
    """The chosen experts of one request, by position."""

    def chosen(self) -> NDArray[np.int16]:
        """int16 [positions, layers, k] up to the last computed position, UNKNOWN where nothing was computed."""
        ...

    def counts(self) -> NDArray[np.int64]:
        """int64 [layers, experts]: (token, k) pairs of all computed positions; the request's profile."""
        ...


class RoutedTrace:
    """The chosen experts of one request, by position. Positions served from the prefix cache are unknown, not zero."""

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        self.experts = experts
        self._table = np.full((0, layers, top_k), UNKNOWN, np.int16)
        self._end = 0

    def note(self, start: int, routed: NDArray[Any]) -> None:
        """Tokens at positions start, start + 1, ... chose routed: int [n, layers, k]. Computing a position again replaces it."""
        end = start + len(routed)
        if end > len(self._table):
            grown = np.full((max(end, 2 * len(self._table)), *self._table.shape[1:]), UNKNOWN, np.int16)
            grown[: len(self._table)] = self._table
            self._table = grown
        self._table[start:end] = routed
        self._end = max(self._end, end)

    def chosen(self) -> NDArray[np.int16]:
        """int16 [positions, layers, k] up to the last computed position, UNKNOWN where nothing was computed."""
        return self._table[: self._end]

    def counts(self) -> NDArray[np.int64]:
        """int64 [layers, experts]: (token, k) pairs of all computed positions; the request's profile."""
        return count_pairs(self.chosen(), self.experts)
