"""Shape of a layout policy: a load in, a decision with its reason out; and the policy that never moves."""

from math import inf
from typing import NamedTuple, Protocol

from fleet.layout_times import LayoutName


class LayoutLoad(NamedTuple):
    """Load of an engine at a report, scalars only."""

    at: float
    """seconds, on any clock that does not jump"""
    layout: LayoutName
    """in force"""
    running: float
    """sequences that decode"""
    waiting: float
    """requests that have arrived and do not decode yet, those in prefill included"""
    kv_tokens: float
    """tokens of KV in use, of all ranks together"""
    steps: int
    """decode steps since the last report"""
    prefilled: int
    """prompt tokens computed since the last report"""
    settled_at: float = -inf
    """seconds: end of the last switch"""
    discount: float = 1.0
    """factor applied to predicted gains, in (0, 1], from the results of earlier plans"""

    @property
    def context(self) -> float:
        """Mean tokens of a running sequence."""
        return self.kv_tokens / self.running if self.running else self.kv_tokens


class LayoutDecision(NamedTuple):
    """Answer of a policy to a report."""

    target: LayoutName | None
    """layout to switch to; None: stay"""
    best: LayoutName | None
    """layout that the figures are about, where there is one to compare with"""
    regret: float
    """seconds of serving lost until now by staying"""
    cost: float
    """seconds of serving that the switch would cost now"""
    grounds: object
    """what decided: its `str` is the sentence with the numbers, which is written only when it is asked for"""

    @property
    def reason(self) -> str:
        """Return the sentence with the numbers that decided."""
        return str(self.grounds)


class LayoutPolicy(Protocol):
    """Decides at every report; keeps what it has accumulated. While a switch is under way it is not asked."""

    def decide(self, load: LayoutLoad) -> LayoutDecision:
        """Return the decision at this report."""
        ...


class FixedLayout:
    """Policy that stays in the layout that it finds."""

    def decide(self, load: LayoutLoad) -> LayoutDecision:
        """Return the decision to stay."""
        return LayoutDecision(None, None, 0.0, 0.0, f"stays in {load.layout}: the policy is static")
