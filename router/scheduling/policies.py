"""Choice of a rank among priced candidates: the score that each policy minimises, and the tie-breaking. Pure
numpy.

The policy cost minimises predicted milliseconds. The other policies know less and exist for comparison, and
for deployments that prefer them:
- classic: the weighted sum alpha * uncached share of the prompt + beta * remote share of expert traffic +
  gamma * relative load;
- kv: the most cached prompt, then the least load;
- least_loaded: the fewest predicted milliseconds of outstanding work;
- round_robin: each rank in turn.
"""

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray
from router import kernels
from router.config import Policy, RouterConfig
from router.scheduling.cost import TERMS, Scores, Weights

Unit = Literal["ms", "1"]
Why = Literal["cheapest", "tie", "home", "session", "temperature", "only"]
"""cheapest: the lowest score; tie: one of those that share the lowest score, chosen by the least outstanding
work, then by the seed; home: a home of the request, whose saving covers its extra cost, if any; session: the
session stays on its rank; temperature: drawn; only: the only candidate.
"""

_SEEDS = 1 << 32
_ZERO = np.zeros(())
_SAME = 1e-12
"""Scores that differ by this share of themselves, or by this amount, differ only by rounding."""


@dataclass(frozen=True, slots=True)
class PolicyRules:
    """The settings that decide; see `RouterConfig`. stay_ms: a session leaves its rank when another is
    cheaper by more.
    """

    policy: Policy = "cost"
    weights: Weights = field(default_factory=Weights)
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0
    temperature_ms: float = 0.0
    stay_ms: float = 1000.0
    home_confidence: float = 0.1
    """requests predicted with less confidence are not sent to their homes"""

    @property
    def depends_on_experts(self) -> bool:
        """True if expert placement affects these rules. If not, homes do not count either."""
        return (
            self.weights.by_term["experts"] > 0
            if self.policy == "cost"
            else self.policy == "classic" and self.beta > 0
        )

    @classmethod
    def of(cls, config: RouterConfig) -> "PolicyRules":
        weights = Weights({term: getattr(config, f"{term}_weight") for term in TERMS})
        classic = (config.classic_alpha, config.classic_beta, config.classic_gamma)
        return cls(
            config.policy,
            weights,
            *classic,
            config.temperature_ms,
            config.session_affinity_ms,
            config.home_confidence,
        )

    def without(self, terms: tuple[str, ...]) -> "PolicyRules":
        """Return the rules without these terms."""
        return replace(self, weights=self.weights.without(terms))


class CandidateFacts(msgspec.Struct, frozen=True):
    """Facts available to a policy, one entry per candidate. uncached: prompt tokens to compute; remote_share:
    calibrated share of remote routed pairs, 0 where experts are not priced, None without a prediction. turn:
    number of decisions for this model so far.
    """

    scores: Scores
    uncached: NDArray[np.int64]
    prompt_tokens: int
    remote_share: FloatArray | None
    turn: int


class HomeRanks(NamedTuple):
    """Homes of a request among the candidates, and their value."""

    at: NDArray[np.bool_]
    """bool [candidates]"""
    saves: FloatArray | None
    """float64 [candidates]: expected saving in ms of sending tokens, of which only differences between
    candidates count; None: unknown
    """

    def of(self, at: NDArray[np.intp]) -> "HomeRanks":
        """Return the homes among some of the candidates."""
        return HomeRanks(self.at[at], None if self.saves is None else self.saves[at])

    def near(self, score: FloatArray, cheapest: int, best: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the indices of the homes worth choosing: as cheap as the cheapest candidate, or more
        expensive by at most their expected saving over it. Of these, only the cheapest.

        The score already contains that saving, as far as prediction has earned it. It counts for more here
        (`decision.HOME_WORTH`): other requests step together with this one, and one that is placed elsewhere
        occupies a place that is the home of another, while full ranks free their places one by one.
        """
        if self.saves is None:
            return np.asarray(best[self.at[best]])
        homes = self.at.nonzero()[0]
        lowest, costs = float(score[cheapest]), score[homes]
        rounding = _SAME * max(1.0, lowest)
        homes = homes[
            costs <= lowest + rounding + np.maximum(self.saves[homes] - self.saves[cheapest], _ZERO)
        ]
        if len(homes) < 2:
            return np.asarray(homes)
        costs = score[homes]
        return np.asarray(homes[costs <= float(np.minimum.reduce(costs)) + rounding])


class PolicyChoice(msgspec.Struct, frozen=True):
    """chosen: index of a candidate; tied: number of candidates with the lowest score."""

    chosen: int
    tied: int
    why: Why


def scored(rules: PolicyRules, facts: CandidateFacts) -> tuple[FloatArray, Unit]:
    """Return the score that the policy minimises, float64 [candidates], and its unit."""
    match rules.policy:
        case "cost":
            return facts.scores.total, "ms"
        case "classic":
            return _classic(rules, facts), "1"
        case "kv":
            return _kv(facts), "1"
        case "least_loaded":
            return 1000.0 * facts.scores.outstanding, "ms"
        case "round_robin":
            return _round_robin(facts), "1"


def choose(
    rules: PolicyRules,
    score: FloatArray,
    unit: Unit,
    total: FloatArray,
    outstanding: FloatArray,
    seed: int,
    held: int | None,
    home: HomeRanks | None = None,
) -> PolicyChoice:
    """Pick a candidate by its score [candidates].

    total: predicted ms, by which a session decides to stay at `held`, its last rank, under any policy. home
    None: there is none, or homes do not count. outstanding: seconds of outstanding work. Homes worth choosing
    (`HomeRanks.near`) come first, then the lowest score. Ties (beside an engine's slowest rank, all ranks
    cost the same) go to the least outstanding work, then to the seed, a random u32. With a temperature
    (policies in ms only) a rank whose score is higher by d is drawn with exp(-d / temperature_ms) times the
    probability of the lowest.
    """
    if held is None and home is None and not (rules.temperature_ms and unit == "ms"):
        chosen, tied = _cheapest(score, outstanding, seed)
        return PolicyChoice(chosen, tied, "only" if len(score) == 1 else "tie" if tied > 1 else "cheapest")
    cheapest = int(score.argmin())
    lowest = float(score[cheapest])
    best = (score <= lowest + _SAME * max(1.0, lowest)).nonzero()[0]
    if len(score) == 1:
        return PolicyChoice(0, 1, "only")
    if held is not None and float(total[held] - total[total.argmin()]) <= rules.stay_ms:
        return PolicyChoice(held, len(best), "cheapest" if held in best else "session")
    if rules.temperature_ms and unit == "ms":
        drawn = _drawn(score - lowest, rules.temperature_ms, seed)
        if drawn not in best:
            return PolicyChoice(drawn, len(best), "temperature")
    among = best if home is None else home.near(score, cheapest, best)
    if not len(among):
        among = best
    if len(among) == 1:
        at = int(among[0])
        return PolicyChoice(at, len(best), "cheapest" if len(best) == 1 and at == cheapest else "home")
    work = outstanding[among]
    smallest = among[work == work[work.argmin()]]
    alike = among is best or (len(among) == len(best) and bool((among == best).all()))
    return PolicyChoice(int(smallest[seed % len(smallest)]), len(best), "tie" if alike else "home")


def _cheapest(score: FloatArray, outstanding: FloatArray, seed: int) -> tuple[int, int]:
    """Return the choice without homes, sessions and temperature: a candidate, and the number of those that
    share the lowest score.
    """
    library = kernels.compiled()
    if library is not None:
        return library.cheapest(len(score), score, outstanding, _SAME, seed)
    costs, work = score.tolist(), outstanding.tolist()
    lowest = min(costs)
    limit = lowest + _SAME * max(1.0, lowest)
    best = [at for at, cost in enumerate(costs) if cost <= limit]
    least = min([work[at] for at in best])
    smallest = [at for at in best if work[at] == least]
    return smallest[seed % len(smallest)], len(best)


def _classic(rules: PolicyRules, facts: CandidateFacts) -> FloatArray:
    score = rules.alpha * facts.uncached / facts.prompt_tokens + rules.gamma * _relative(
        facts.scores.outstanding
    )
    return score if facts.remote_share is None else np.asarray(score + rules.beta * facts.remote_share)


def _kv(facts: CandidateFacts) -> FloatArray:
    """Return the uncached share of the prompt. Relative load counts less than half a token and so only breaks
    ties.
    """
    return np.asarray(
        (facts.uncached + 0.5 * _relative(facts.scores.outstanding)) / max(facts.prompt_tokens, 1)
    )


def _round_robin(facts: CandidateFacts) -> FloatArray:
    """Return the number of turns until each candidate's turn."""
    return np.asarray((np.arange(len(facts.uncached)) - facts.turn) % len(facts.uncached), np.float64)


def _relative(outstanding: FloatArray) -> FloatArray:
    """Return the work relative to the most loaded candidate, 0..1."""
    largest = outstanding.max()
    return outstanding / largest if largest > 0 else np.zeros(len(outstanding))


def _drawn(above: FloatArray, temperature_ms: float, seed: int) -> int:
    """Draw a candidate. above: distance of each score from the lowest."""
    sums = np.exp(above / -temperature_ms).cumsum()
    return min(int(sums.searchsorted(sums[-1] * ((seed % _SEEDS) + 0.5) / _SEEDS)), len(above) - 1)
