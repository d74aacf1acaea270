"""Regret of a decision in milliseconds: all candidates are priced again with the facts measured afterwards.
Pure.

The actual load is known with the first report of each rank after the decision; the difference to the believed
load is the error. Actual experts and cached tokens are known once the chosen rank reports what the request
activated. Ranks that were not chosen only ever report their load; for their caches the belief stands. The
regret is the price of the chosen rank minus the lowest price, never negative. It contains the errors of
belief, and the losses caused by a policy other than cost, by session affinity or by chance. Expert terms
count in full here; the predictor alone decides how far to trust a prediction.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array, IntArray
from router.fleet_state.engine_state import PriceList
from router.scheduling.cost import ExpectedLoad, score
from router.scheduling.decision import Decision


class Truth(NamedTuple):
    """Measured facts about a decision. load: int64 [AMOUNTS, targets]; factors: float64 [2, targets],
    measured over modelled speeds.
    """

    load: IntArray
    factors: NDArray[np.float64] | None = None
    weights: Float32Array | None = None
    """float32 [K]: clusters that the request activated; None: not reported, the prediction stands"""
    cached_tokens: int | None = None
    """prompt tokens that the chosen rank had cached; None: not reported"""


def repriced_ms(decision: Decision, truth: Truth, prices: PriceList) -> NDArray[np.float64]:
    """Return what each candidate would have cost, float64 [candidates]. prices: those of the decision's
    target table.
    """
    ask, target_table, at = decision.ask, decision.target_table, decision.at
    uncached = np.full(len(target_table.targets), ask.prompt_tokens, np.int64)
    uncached[at] = decision.uncached
    if truth.cached_tokens is not None:
        uncached[at[decision.chosen]] = max(ask.prompt_tokens - truth.cached_tokens, 1)
    expected = _expected(decision, truth, prices)
    scores = score(
        target_table,
        truth.load,
        uncached,
        ask.prompt_tokens,
        ask.output_tokens,
        decision.weights,
        expected,
        None,
        truth.factors,
    )
    return np.asarray(scores.total[at] + decision.scores.ms("handover"))


def regret_ms(decision: Decision, truth: Truth, prices: PriceList) -> float:
    """Return the price of the chosen rank minus the lowest price."""
    costs = repriced_ms(decision, truth, prices)
    return float(costs[decision.chosen] - costs.min())


def _expected(decision: Decision, truth: Truth, prices: PriceList) -> ExpectedLoad | None:
    """Return the request's load on experts at each target, or the believed load if nothing was reported."""
    if truth.weights is not None and len(truth.weights) == prices.clusters:
        return ExpectedLoad(prices.of(truth.weights))
    prediction = decision.prediction
    if prediction is None or prediction.expected is None:
        return None
    whole = np.zeros((len(prediction.expert_load), len(decision.target_table.targets)))
    whole[:, decision.at] = prediction.expert_load
    return ExpectedLoad(whole, prediction.expected.gain)


class Probe(NamedTuple):
    """Decision that waits for its evaluation."""

    decision: Decision
    prices: PriceList
    load: IntArray
    """int64 [AMOUNTS, targets]"""
    made_at: float
    """seconds on the router's clock"""
    factors: NDArray[np.float64] | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the columns. Prices are shared and not counted."""
        return self.decision.nbytes + self.load.nbytes


class WaitingProbes:
    """Probes that still wait for the actual locality, by decision id, oldest first. Beyond a budget of bytes
    the oldest are settled early.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._probes: OrderedDict[str, Probe] = OrderedDict()
        self.bytes = 0

    def add(self, probe: Probe) -> None:
        self._probes[probe.decision.id] = probe
        self.bytes += probe.nbytes

    def take(self, decision_id: str) -> Probe | None:
        probe = self._probes.pop(decision_id, None)
        self.bytes -= 0 if probe is None else probe.nbytes
        return probe

    def over(self, made_before: float) -> Iterator[Probe]:
        """Remove and yield the probes made before a time, and the oldest ones beyond the budget."""
        while self._probes:
            decision_id, oldest = next(iter(self._probes.items()))
            if oldest.made_at > made_before and self.bytes <= self._budget:
                return
            self.take(decision_id)
            yield oldest

    def __len__(self) -> int:
        return len(self._probes)
