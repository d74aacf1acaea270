"""How a rank is picked once every candidate has been priced: what a policy minimises, and who is taken of those it likes. Pure numpy.

The policy cost minimises predicted milliseconds. The others know less and are there for comparison, and for those who want them:
classic, the weighted sum alpha * uncached share of the prompt + beta * remote share of expert traffic + gamma * relative load; kv, the most
cached prompt, then the least load; least_loaded, the fewest predicted milliseconds of promised work; round_robin, each rank in turn.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.config import Policy, RouterConfig
from router.scheduling.cost import Scores, Weights

Unit = Literal["ms", "1"]
Why = Literal["cheapest", "tie", "home", "session", "temperature", "only"]
"""cheapest: the lowest score; tie: one of those that share it, the one with the least promised work, or drawn by the seed where that is
equal too; home: the request is at home there, and that is worth what the rank costs more, if anything; session: the conversation stays where
it was; temperature: drawn; only: the only candidate."""
Column = NDArray[np.float64]

_SEEDS = 1 << 32
_ZERO = np.zeros(())
_SAME = 1e-12
"""Scores that differ by this share of themselves, or this, differ by rounding alone."""


@dataclass(frozen=True, slots=True)
class PolicyRules:
    """The settings that decide; see `RouterConfig`. stay_ms: a conversation leaves its rank when another is cheaper by more."""

    policy: Policy = "cost"
    weights: Weights = Weights()  # noqa: RUF009 immutable
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0
    temperature_ms: float = 0.0
    stay_ms: float = 1000.0
    home_confidence: float = 0.2
    """a request that is foretold with less is not sent home"""

    @property
    def steers(self) -> bool:
        """Whether it matters to these rules where experts are; to those to whom it does not, homes do not either."""
        return self.weights.experts > 0 if self.policy == "cost" else self.policy == "classic" and self.beta > 0

    @classmethod
    def of(cls, config: RouterConfig) -> "PolicyRules":
        weights = Weights(
            config.prefill_weight,
            config.queue_weight,
            config.decode_weight,
            config.experts_weight,
            config.distinct_weight,
            config.lockstep_weight,
            config.handover_weight,
        )
        classic = (config.classic_alpha, config.classic_beta, config.classic_gamma)
        return cls(config.policy, weights, *classic, config.temperature_ms, config.session_affinity_ms, config.home_confidence)

    def without(self, terms: tuple[str, ...]) -> "PolicyRules":
        """As if these terms did not count."""
        return replace(self, weights=replace(self.weights, **dict.fromkeys(terms, 0.0))) if terms else self


class CandidateFacts(msgspec.Struct, frozen=True):
    """What a policy may look at, one entry per candidate. uncached: prompt tokens to compute; remote_share: of routed pairs, as far as
    it is believed, 0 where experts are not priced; None: nothing is foretold. turn: counts the decisions of this model."""

    scores: Scores
    uncached: NDArray[np.int64]
    prompt_tokens: int
    remote_share: Column | None
    turn: int


class HomeRanks(NamedTuple):
    """Where a request is at home, and what that is worth."""

    at: NDArray[np.bool_]
    """bool [candidates]"""
    saves: Column | None
    """float64 [candidates]: ms of sending tokens that living there is expected to save, beside the candidate where it would cost most; None: nobody knows"""

    def of(self, at: NDArray[np.intp]) -> "HomeRanks":
        """For some of the candidates."""
        return HomeRanks(self.at[at], None if self.saves is None else self.saves[at])

    def near(self, score: Column, cheapest: int, best: NDArray[np.intp]) -> NDArray[np.intp]:
        """Indices of the homes that are worth going to: as cheap as the cheapest, or dearer by no more than they are expected to save beside it; of
        these, the cheapest. The score has counted that saving already, as far as prediction has earned it. It counts once more here, because whoever
        takes a place away from home keeps it from a request that is at home there, and full ranks free their places one by one."""
        if self.saves is None:
            return np.asarray(best[self.at[best]])
        homes = self.at.nonzero()[0]
        lowest, costs = float(score[cheapest]), score[homes]
        rounding = _SAME * max(1.0, lowest)
        homes = homes[costs <= lowest + rounding + np.maximum(self.saves[homes] - self.saves[cheapest], _ZERO)]
        if len(homes) < 2:
            return np.asarray(homes)
        costs = score[homes]
        return np.asarray(homes[costs <= float(np.minimum.reduce(costs)) + rounding])


class PolicyChoice(msgspec.Struct, frozen=True):
    """chosen: index of a candidate; tied: how many shared the lowest score."""

    chosen: int
    tied: int
    why: Why


def scored(rules: PolicyRules, facts: CandidateFacts) -> tuple[Column, Unit]:
    """What the policy minimises, float64 [candidates], and its unit."""
    match rules.policy:
        case "cost":
            return facts.scores.total, "ms"
        case "classic":
            return _classic(rules, facts), "1"
        case "kv":
            return _kv(facts), "1"
        case "least_loaded":
            return 1000.0 * facts.scores.promised, "ms"
        case "round_robin":
            return _round_robin(facts), "1"


def choose(
    rules: PolicyRules, score: Column, unit: Unit, total: Column, promised: Column, seed: int, held: int | None, home: HomeRanks | None = None
) -> PolicyChoice:
    """Pick a candidate by its score [candidates].

    total: predicted ms, by which a conversation decides whether it stays at `held`, the candidate that it was at, whatever the policy.
    home: None: nowhere, or it does not matter. promised: seconds of promised work. Homes that are worth it (`HomeRanks.near`) come first, then the
    lowest score; of equal ones (beside an engine's slowest rank, all ranks cost the same) the least promised work, and then the seed decides, u32
    of chance. With a temperature (policies in ms only) a rank whose score is higher by d is drawn with exp(-d / temperature_ms) of the
    probability of the lowest.
    """
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
    work = promised[among]
    least = among[work == work[work.argmin()]]
    alike = among is best or (len(among) == len(best) and bool((among == best).all()))
    return PolicyChoice(int(least[seed % len(least)]), len(best), "tie" if alike else "home")


def _classic(rules: PolicyRules, facts: CandidateFacts) -> Column:
    score = rules.alpha * facts.uncached / facts.prompt_tokens + rules.gamma * _relative(facts.scores.promised)
    return score if facts.remote_share is None else np.asarray(score + rules.beta * facts.remote_share)


def _kv(facts: CandidateFacts) -> Column:
    """Uncached share of the prompt; the relative load counts less than half a token and so decides among equals alone."""
    return np.asarray((facts.uncached + 0.5 * _relative(facts.scores.promised)) / max(facts.prompt_tokens, 1))


def _round_robin(facts: CandidateFacts) -> Column:
    """Turns until it is a candidate's turn."""
    return np.asarray((np.arange(len(facts.uncached)) - facts.turn) % len(facts.uncached), np.float64)


def _relative(promised: Column) -> Column:
    """Of the most loaded candidate: 0..1."""
    most = promised.max()
    return promised / most if most > 0 else np.zeros(len(promised))


def _drawn(above: Column, temperature_ms: float, seed: int) -> int:
    """above: by how much each score is above the lowest."""
    sums = np.exp(above / -temperature_ms).cumsum()
    return min(int(sums.searchsorted(sums[-1] * ((seed % _SEEDS) + 0.5) / _SEEDS)), len(above) - 1)
