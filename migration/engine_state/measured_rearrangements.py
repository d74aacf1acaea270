"""Measured map changes of an engine that moves its experts itself, which correct their stated speed. Pure."""

from dataclasses import dataclass
from math import isfinite

import msgspec

from fleet.facts.activity import RearrangementTime
from fleet.timing import RearrangeSpeed

FORGET = 0.5
"""Factor on older measurements with each new one: the network and the batch around a move change."""
FACTORS = (0.01, 100.0)
"""Smallest and largest correction of a stated speed."""


@dataclass(slots=True)
class MeasuredRearrangements:
    """Decayed sums of measured and predicted seconds. One factor is learnt: few moves are ever measured."""

    measured: float = 0.0
    predicted: float = 0.0

    def add(self, time: RearrangementTime, speed: RearrangeSpeed) -> None:
        """Add a measurement of an engine with this stated speed. ValueError for an impossible one.

        Changes within ranks, which are not priced, are ignored.
        """
        if not (isfinite(time.seconds) and time.seconds >= 0 and time.layers >= 0 and time.bytes >= 0):
            raise ValueError(f"a map change of {time} is impossible: numbers must be finite and not negative")
        if time.layers:
            self.measured = FORGET * self.measured + time.seconds
            self.predicted = FORGET * self.predicted + speed.layer * time.layers + speed.byte * time.bytes

    def correct(self, speed: RearrangeSpeed) -> RearrangeSpeed:
        """Return the speed, scaled to the measurements."""
        if not self.predicted:
            return speed
        factor = min(max(self.measured / self.predicted, FACTORS[0]), FACTORS[1])
        return msgspec.structs.replace(speed, layer=speed.layer * factor, byte=speed.byte * factor)
