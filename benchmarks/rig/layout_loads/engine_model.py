"""Time model of a simulated engine: the true step times, limits and switch costs that policies only
estimate."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleet.layout_times import LayoutName
from migration.layouts.costs import LayoutLimits, SwitchCost


class StepTimes(NamedTuple):
    """Duration of a step in one layout: `decode[sequences] + kv_token * KV tokens + prefill_token * prompt
    tokens`."""

    decode: Sequence[float]
    """seconds, by number of decoding sequences from 0 to the most that the engine can run; [0] is 0"""
    kv_token: float
    """seconds per token of KV that the sequences read"""
    prefill_token: float
    """seconds per prompt token"""

    def seconds(self, sequences: float, context: float) -> float:
        """Return the duration of a decode step, linear between numbers of sequences."""
        last = len(self.decode) - 1
        below = min(int(sequences), last)
        share = min(sequences, last) - below
        base = self.decode[below]
        if share:
            base += share * (self.decode[below + 1] - base)
        return base + self.kv_token * sequences * context


class EngineModel(NamedTuple):
    """Engine with some layouts, its switches and its chunked prefill."""

    times: Mapping[LayoutName, StepTimes]
    limits: Mapping[LayoutName, LayoutLimits]
    switches: Mapping[tuple[LayoutName, LayoutName], SwitchCost]
    chunk: int
    """prompt tokens that a step computes at most, of all ranks together"""

    @property
    def layouts(self) -> tuple[LayoutName, ...]:
        return tuple(self.times)


class TrueCosts:
    """The model's own step times as `StepCosts`: a correct curve."""

    def __init__(self, times: Mapping[LayoutName, StepTimes], deviation: float = 0.0) -> None:
        self._times = times
        self._deviation = deviation

    def step_seconds(self, layout: LayoutName, sequences: float, context: float) -> float:
        return self._times[layout].seconds(sequences, context)

    def prefill_token(self, layout: LayoutName) -> float:
        return self._times[layout].prefill_token

    def uncertain(self, layout: LayoutName) -> bool:
        return layout not in self._times

    def step(self, layout: LayoutName, sequences: float, context: float) -> tuple[float, float]:
        return self.step_seconds(layout, sequences, context), self._deviation
