"""What a decision cost in hindsight: all its candidates re-priced at what came true. Pure.

Loads come true with the first report of each rank after the decision: what it changes is what had been believed wrongly. Experts and
cached tokens come true when the chosen rank tells what the request activated. Of ranks that were not chosen only the load is ever known;
their caches stay as believed. The regret is the price of the choice less the lowest price, never negative: it holds the errors of what was
believed, and what a policy other than the cost, a session or chance gave away. Expert terms count whole here: whether a prediction was to be
trusted is a question of foresight.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.signatures import Weights
from router.fleet_state.engine_state import PriceList
from router.fleet_state.reservations import Amounts
from router.scheduling.cost import TERMS, ExpectedLoad, score
from router.scheduling.decision import Decision

_HANDOVER = TERMS.index("handover")


class Truth(NamedTuple):
    """What came true of a decision. load: int64 [AMOUNTS, targets]; factors: float64 [2, targets], measured over modelled speeds."""

    load: Amounts
    factors: NDArray[np.float64] | None = None
    weights: Weights | None = None
    """float32 [K]: what the request activated; None: nobody said, and what was predicted stands"""
    cached_tokens: int | None = None
    """prompt tokens that the chosen rank had; None: nobody said"""


def repriced_ms(decision: Decision, truth: Truth, prices: PriceList) -> NDArray[np.float64]:
    """float64 [candidates]: what each would have cost. prices: of the decision's roster."""
    ask, roster, at = decision.ask, decision.roster, decision.at
    uncached = np.full(len(roster.targets), ask.prompt_tokens, np.int64)
    uncached[at] = decision.uncached
    if truth.cached_tokens is not None:
        uncached[at[decision.chosen]] = max(ask.prompt_tokens - truth.cached_tokens, 1)
    expected = _expected(decision, truth, prices)
    scores = score(roster, truth.load, uncached, ask.prompt_tokens, ask.output_tokens, decision.weights, expected, None, truth.factors)
    return np.asarray(scores.total[at] + decision.scores.terms[_HANDOVER])


def regret_ms(decision: Decision, truth: Truth, prices: PriceList) -> float:
    """Price of the choice less the lowest one."""
    costs = repriced_ms(decision, truth, prices)
    return float(costs[decision.chosen] - costs.min())


def _expected(decision: Decision, truth: Truth, prices: PriceList) -> ExpectedLoad | None:
    """What the request asks of experts at each target; where nobody said what it was, as it was believed."""
    if truth.weights is not None and len(truth.weights) == prices.clusters:
        remote, nodes, _, added = prices.of(truth.weights)
        return ExpectedLoad(remote, nodes, added)
    outlook = decision.outlook
    if outlook is None or outlook.expected is None:
        return None
    believed = outlook.expected
    whole = np.zeros((3, len(decision.roster.targets)))
    whole[:, decision.at] = believed.remote_ranks, believed.remote_nodes, believed.added_experts
    return ExpectedLoad(whole[0], whole[1], whole[2], believed.gain)


class Probe(NamedTuple):
    """A decision that is looked at again."""

    decision: Decision
    prices: PriceList
    load: Amounts
    """int64 [AMOUNTS, targets]"""
    made_at: float
    """seconds on the router's clock"""
    factors: NDArray[np.float64] | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the columns; prices are shared."""
        return self.decision.nbytes + self.load.nbytes


class WaitingProbes:
    """Probes whose locality has not come true yet, by decision id, oldest first. Beyond a budget of bytes the oldest are settled early."""

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
        """Those that have waited for so long, or are too many; taken out."""
        while self._probes:
            decision_id, oldest = next(iter(self._probes.items()))
            if oldest.made_at > made_before and self.bytes <= self._budget:
                return
            self.take(decision_id)
            yield oldest

    def __len__(self) -> int:
        return len(self._probes)
