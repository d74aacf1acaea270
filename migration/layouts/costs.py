"""Prices that a layout policy decides by: step times, limits of each layout, and the loss of a switch."""

from math import inf
from typing import NamedTuple, Protocol

from fleet.layout_times import LayoutName


class StepCosts(Protocol):
    """Step times of an engine in each layout, scalar: seconds. A policy asks several times per report."""

    def step_seconds(self, layout: LayoutName, sequences: float, context: float) -> float:
        """Return the duration of a decode step. context: mean tokens of a sequence."""
        ...

    def step(self, layout: LayoutName, sequences: float, context: float) -> tuple[float, float]:
        """Return `step_seconds` and their relative standard error."""
        ...

    def prefill_token(self, layout: LayoutName) -> float:
        """Return the seconds that a prompt token adds to a step."""
        ...

    def uncertain(self, layout: LayoutName) -> bool:
        """Return True when no measurement of the layout is recent enough to decide by."""
        ...


class LayoutLimits(NamedTuple):
    """Requests and KV that the engine can hold in one layout."""

    max_running: int
    """sequences that decode at once"""
    kv_tokens: int
    """tokens of KV of all ranks together"""
    prompt_tokens: float = inf
    """prompt tokens of a step at most, of all ranks together"""

    def holds(self, running: float, kv_tokens: float) -> bool:
        """Return True if a switch to this layout keeps every running sequence and its KV."""
        return running <= self.max_running and kv_tokens <= KV_FILL * self.kv_tokens

    def batch(self, requests: float, context: float) -> float:
        """Return how many of these requests can decode at once, at most. context: tokens of each."""
        most: float = self.max_running
        if context > 0.0:
            most = min(most, KV_FILL * self.kv_tokens / context)
        return most if most < requests else requests


KV_FILL = 0.97
"""Share of the KV that may be in use when a request is admitted or a switch begins; the rest is for growth
until the next chance to act."""


class SwitchCost(NamedTuple):
    """Time that a switch in one direction takes, and what it costs the requests meanwhile."""

    weights_seconds: float
    """bytes of the busiest rank's weights, divided by the speed of its link or by the cap on it"""
    kv_token_seconds: float
    """the same for each token of KV in use. It depends on the direction: with fewer KV heads than ranks, the
    way to tensor-parallel attention is the dear one
    """
    pause: float
    """seconds without any step: the last round of KV and the change of page tables"""
    slowdown: float
    """relative increase of the duration of a step while copies are under way and layers are half turned"""

    def seconds(self, kv_tokens: float) -> float:
        """Return the time from the decision until the new layout serves, without the pause."""
        return self.weights_seconds + self.kv_token_seconds * kv_tokens

    def loss(self, kv_tokens: float) -> float:
        """Return the serving time that the switch costs: seconds by which every request is delayed."""
        slow = self.slowdown
        return self.pause + self.seconds(kv_tokens) * slow / (1.0 + slow)
