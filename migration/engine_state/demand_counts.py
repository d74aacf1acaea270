"""What the requests of one rank want, word by word: the last word, and what was wanted since a window began. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.events import KvMetrics
from migration.model.engine_view import DemandCounts


@dataclass(slots=True)
class DemandByRank:
    """The last word about one rank, and what it wanted since the window began. Counting a word is a matter of its seconds until another comes."""

    rates: NDArray[np.float32]
    """[layers, experts], pairs per second: the last word; never written to"""
    before: NDArray[np.float32] | None = None
    """[layers, experts], pairs: of the words before it in this window; never written to"""
    lasted: float = 0.0
    """seconds of this window that the last word has held"""
    known: float = 0.0
    """seconds of this window of which it is known what was wanted"""
    version: int = -1
    heard_at: float = -np.inf
    wants: bool = False
    pairs: float = 0.0
    counted_at: float = 0.0
    load: KvMetrics | None = None
    load_at: float = -np.inf

    def speak(self, rates: NDArray[np.float32]) -> None:
        """From now on this is wanted."""
        if self.lasted and self.wants:
            added = self.rates * np.float32(self.lasted)
            self.before = added if self.before is None else self.before + added
        self.rates, self.lasted, self.wants = rates, 0.0, bool(rates.any())

    def begin(self) -> None:
        """A new window."""
        self.before, self.lasted, self.known = None, 0.0, 0.0

    @property
    def counted_pairs(self) -> float:
        """Of the last layer, in this window."""
        before = 0.0 if self.before is None else float(self.before[-1].sum())
        return before + float(self.rates[-1].sum()) * self.lasted

    @property
    def counted(self) -> DemandCounts:
        """The window as it stands."""
        return DemandCounts(self.before, self.rates, self.lasted, self.known)
