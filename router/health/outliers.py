"""Outliers among the ranks of a model: first tokens far later than predicted, or far more failures. Pure.

All criteria are relative to the other ranks. If all ranks are slow or failing, none is an outlier, since
ejecting some would not help.
"""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from math import inf, sqrt

from router.fleet_state.target_table import RankKey

WINDOW_SECONDS = 30.0
"""Older observations do not count."""
MAX_OBSERVATIONS = 32
"""Most observations kept, per kind and rank."""
MIN_OBSERVATIONS = 8
"""Fewest observations with which a rank can be an outlier or serve for comparison."""
GRACE_SECONDS = 0.02
"""Added to observed and predicted times of first tokens, since ratios of a few milliseconds are noise."""
FAILURE_EXCESS = 0.3
"""Excess over the others' share of failed requests that makes an outlier."""
FAILURE_SIGMAS = 4.0
"""The same excess in standard deviations of chance (binomial, with the others' share)."""


class Visit:
    """One attempt of one request at one rank."""

    __slots__ = ("began", "first_token_seen", "key", "opening", "predicted")

    def __init__(self, key: RankKey, began: float, predicted: float | None, opening: int) -> None:
        self.key = key
        self.began = began
        self.predicted = predicted
        """predicted seconds to the first token; None: no prediction"""
        self.opening = opening
        """number of openings of the rank's breaker when the visit began"""
        self.first_token_seen = False
        """True once its first token has come"""

    def ratio(self, now: float) -> float:
        """Return the ratio of observed to predicted time to first token, as if the first token came now."""
        return (now - self.began + GRACE_SECONDS) / ((self.predicted or 0.0) + GRACE_SECONDS)


class RecentObservations:
    """The last observations of one kind, oldest first."""

    __slots__ = ("_times", "values")

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MAX_OBSERVATIONS)
        self.values: deque[float] = deque(maxlen=MAX_OBSERVATIONS)

    def add(self, value: float, now: float) -> None:
        self._times.append(now)
        self.values.append(value)

    def forget(self, before: float) -> None:
        """Drop older observations."""
        while self._times and self._times[0] < before:
            self._times.popleft()
            self.values.popleft()


class OutlierDetector:
    """Observations of one rank."""

    __slots__ = ("ends", "ratios", "waiting")

    def __init__(self) -> None:
        self.ratios = RecentObservations()
        """observed over predicted times to first token"""
        self.ends = RecentObservations()
        """1.0 for a failed request, 0.0 for a completed one"""
        self.waiting: dict[Hashable, Visit] = {}
        """visits with a prediction whose first token has not come yet, oldest first"""


def slow(ranks: Mapping[RankKey, OutlierDetector], factor: float, now: float) -> dict[RankKey, float]:
    """Find ranks whose median ratio is at least `factor` times the median of the other ranks' medians.
    Values: ratio to that bound.

    A request that still waits for its first token counts as soon as its ratio exceeds the bound, since the
    ratio can only grow. Waiting requests are examined only if the longest wait exceeds the bound.
    """
    seen = {key: sorted(rank.ratios.values) for key, rank in ranks.items()}
    medians = sorted(
        (_median(ratios), key) for key, ratios in seen.items() if len(ratios) >= MIN_OBSERVATIONS
    )
    ordered = [median for median, _ in medians]
    places = {key: at for at, (_, key) in enumerate(medians)}
    found: dict[RankKey, float] = {}
    for key, ratios in seen.items():
        at, waiting = places.get(key), ranks[key].waiting
        longest = next(iter(waiting.values())).ratio(now) if waiting else 0.0
        bound = factor * _median(ordered, without=at)
        if max(longest, 0.0 if at is None else ordered[at]) < bound:
            continue  # the usual case
        late = (
            [
                ratio
                for visit in islice(waiting.values(), MAX_OBSERVATIONS)
                if (ratio := visit.ratio(now)) >= bound
            ]
            if longest >= bound
            else []
        )
        known = sorted(ratios + late)
        if len(known) >= MIN_OBSERVATIONS and _median(known) >= bound:
            found[key] = _median(known) / bound
    return found


def failing(ranks: Mapping[RankKey, OutlierDetector]) -> dict[RankKey, float]:
    """Find ranks whose share of failed requests exceeds that of all others together by the required margin.
    Values: excess over margin.
    """
    ends = {key: (sum(rank.ends.values), len(rank.ends.values)) for key, rank in ranks.items()}
    all_failed, all_ended = (
        sum(failed for failed, _ in ends.values()),
        sum(ended for _, ended in ends.values()),
    )
    found: dict[RankKey, float] = {}
    for key, (failed, ended) in ends.items():
        others_failed, others_ended = all_failed - failed, all_ended - ended
        if not failed or ended < MIN_OBSERVATIONS or others_ended < MIN_OBSERVATIONS:
            continue
        # Laplace's rule of succession: no failure among a few requests does not mean a rate of zero
        usual = (others_failed + 1) / (others_ended + 2)
        needed = max(FAILURE_EXCESS, FAILURE_SIGMAS * sqrt(usual * (1 - usual) / ended))
        excess = failed / ended - others_failed / others_ended
        if excess >= needed:
            found[key] = excess / needed
    return found


def _median(ordered: Sequence[float], without: int | None = None) -> float:
    """Return the median of sorted numbers, ignoring the one at index `without`; inf when none is left."""
    count = len(ordered) - (without is not None)
    if count == 0:
        return inf
    low, high = (count - 1) // 2, count // 2
    if without is not None:
        low, high = low + (low >= without), high + (high >= without)
    return (ordered[low] + ordered[high]) / 2
