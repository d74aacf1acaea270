"""The threshold rule of the Moebius paper (arXiv 2606.26607), between expert and tensor parallelism, with its
rollout variant. It knows no step times: the threshold is the operator's."""

from collections import deque
from math import ceil
from typing import NamedTuple

from fleet.layout_times import LayoutName
from migration.layouts.policy import LayoutDecision, LayoutLoad


class Thresholds(NamedTuple):
    """Settings of the rule. The defaults are the paper's, but for the window, which it does not state."""

    high: float = 256.0
    """requests from which the engine turns to expert parallelism"""
    low: float = 205.0
    """mean requests below which it turns to tensor parallelism: 0.8 of `high`"""
    window: float = 1.0
    """seconds over which the mean is taken"""
    cooldown: float = 5.0
    """seconds from the end of a switch to the next one"""


def rollout_thresholds(high: float = 256.0) -> Thresholds:
    """Return the variant for rollouts, whose batch only shrinks: no band and no window."""
    return Thresholds(high, high, 0.0, 0.0)


class ThresholdRule:
    """Turns to `loud` as soon as the requests reach the high threshold, and to `calm` when their mean over
    the window falls below the low one.

    Waiting requests count. Otherwise an engine that admits fewer than the threshold would never reach it.
    """

    def __init__(
        self,
        thresholds: Thresholds,
        room: dict[LayoutName, float],
        calm: LayoutName = "tp",
        loud: LayoutName = "ep",
    ) -> None:
        """room: tokens of KV that each layout holds."""
        if not 0 < thresholds.low <= thresholds.high:
            raise ValueError(
                "layout thresholds: low must be above 0 and at most high, not"
                f" {thresholds.low:g} and {thresholds.high:g}"
            )
        self._thresholds = thresholds
        self._room = room
        self._calm, self._loud = calm, loud
        self._counts: deque[tuple[float, float]] = deque()
        """time and requests of the reports in the window"""
        self._sum = 0.0

    def decide(self, load: LayoutLoad) -> LayoutDecision:
        """Return the decision at this report."""
        count, mean = load.running + load.waiting, self._mean(load)
        high, low, _, cooldown = self._thresholds
        rest = load.settled_at + cooldown - load.at
        target, why = None, f"{count:.0f} requests (mean {mean:.0f}) lie between {low:g} and {high:g}"
        if load.layout != self._loud and count >= high:
            target, why = self._loud, f"{count:.0f} requests reach {high:g}"
        elif load.layout != self._calm and mean < low:
            target, why = self._calm, f"{mean:.0f} requests on average are fewer than {low:g}"
        if target is not None and rest > 0:
            target, why = None, f"{why}, but the last switch ended less than {cooldown:g} s ago"
        if target is not None and load.kv_tokens > self._room[target]:
            target, why = None, f"{why}, but {ceil(load.kv_tokens)} tokens of KV have no room in {target}"
        verb = "stays" if target is None else f"turns to {target}"
        return LayoutDecision(target, target, 0.0, 0.0, f"{verb}: {why}")

    def _mean(self, load: LayoutLoad) -> float:
        """Return the mean requests of the window that ends now."""
        counts = self._counts
        counts.append((load.at, load.running + load.waiting))
        self._sum += counts[-1][1]
        while counts[0][0] < load.at - self._thresholds.window:
            self._sum -= counts.popleft()[1]
        return self._sum / len(counts)
