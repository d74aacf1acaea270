"""Ranks that stand out from the others of their model: first tokens far later than predicted, or far more failures. Pure.

Everything is relative to the other ranks: where all are slow or failing, nobody stands out, and leaving some alone would help nobody.
"""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from math import inf, sqrt

from router.fleet_state.target_table import RankKey

WINDOW_SECONDS = 30.0
"""older observations say nothing about an outlier"""
KEPT = 32
"""observations of a kind and a rank, at most"""
LEAST = 8
"""observations without which a rank is neither an outlier nor one to compare with"""
GRACE_SECONDS = 0.02
"""added to first tokens' times, observed and predicted: ratios of a few milliseconds are noise"""
FAILURE_EXCESS = 0.3
"""the share of failed requests by which a rank must exceed the others"""
FAILURE_SIGMAS = 4.0
"""the same in standard deviations of what chance would do (binomial, of the others' share)"""


class Visit:
    """One attempt of one request at one rank."""

    __slots__ = ("began", "key", "opening", "predicted", "told")

    def __init__(self, key: RankKey, began: float, predicted: float | None, opening: int) -> None:
        self.key = key
        self.began = began
        self.predicted = predicted
        """seconds to the first token; None: nobody foretold them"""
        self.opening = opening
        """how often the rank's breaker had opened when it began"""
        self.told = False
        """its first token has come"""

    def ratio(self, now: float) -> float:
        """Of the time to the first token, if it came now, to what was predicted."""
        return (now - self.began + GRACE_SECONDS) / ((self.predicted or 0.0) + GRACE_SECONDS)


class RecentObservations:
    """The last observations of one kind, oldest first."""

    __slots__ = ("_times", "values")

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=KEPT)
        self.values: deque[float] = deque(maxlen=KEPT)

    def add(self, value: float, now: float) -> None:
        self._times.append(now)
        self.values.append(value)

    def forget(self, before: float) -> None:
        """Those that are older."""
        while self._times and self._times[0] < before:
            self._times.popleft()
            self.values.popleft()


class OutlierDetector:
    """What is seen of one rank."""

    __slots__ = ("ends", "ratios", "waiting")

    def __init__(self) -> None:
        self.ratios = RecentObservations()
        """of the time to the first token: observed / predicted"""
        self.ends = RecentObservations()
        """1.0: the request failed, 0.0: it was answered"""
        self.waiting: dict[Hashable, Visit] = {}
        """visits whose first token was foretold and has not come, oldest first"""


def slow(ranks: Mapping[RankKey, OutlierDetector], factor: float, now: float) -> dict[RankKey, float]:
    """Ranks whose median ratio is `factor` times the median of the others' medians, by how many times of that.

    Requests that still wait for their first token count once their ratio is beyond doubt: it can only grow. They are looked at when the
    one that waits longest is.
    """
    seen = {key: sorted(rank.ratios.values) for key, rank in ranks.items()}
    medians = sorted((_median(ratios), key) for key, ratios in seen.items() if len(ratios) >= LEAST)
    ordered = [median for median, _ in medians]
    places = {key: at for at, (_, key) in enumerate(medians)}
    found: dict[RankKey, float] = {}
    for key, ratios in seen.items():
        at, waiting = places.get(key), ranks[key].waiting
        longest = next(iter(waiting.values())).ratio(now) if waiting else 0.0
        bound = factor * _median(ordered, without=at)
        if max(longest, 0.0 if at is None else ordered[at]) < bound:
            continue  # the usual case
        late = [ratio for visit in islice(waiting.values(), KEPT) if (ratio := visit.ratio(now)) >= bound] if longest >= bound else []
        known = sorted(ratios + late)
        if len(known) >= LEAST and _median(known) >= bound:
            found[key] = _median(known) / bound
    return found


def failing(ranks: Mapping[RankKey, OutlierDetector]) -> dict[RankKey, float]:
    """Ranks whose share of failed requests stands out from that of all others together, by how many times as much as it must."""
    ends = {key: (sum(rank.ends.values), len(rank.ends.values)) for key, rank in ranks.items()}
    all_failed, all_ended = sum(failed for failed, _ in ends.values()), sum(ended for _, ended in ends.values())
    found: dict[RankKey, float] = {}
    for key, (failed, ended) in ends.items():
        others_failed, others_ended = all_failed - failed, all_ended - ended
        if not failed or ended < LEAST or others_ended < LEAST:
            continue
        usual = (others_failed + 1) / (others_ended + 2)  # Laplace: none of a few is not never
        needed = max(FAILURE_EXCESS, FAILURE_SIGMAS * sqrt(usual * (1 - usual) / ended))
        excess = failed / ended - others_failed / others_ended
        if excess >= needed:
            found[key] = excess / needed
    return found


def _median(ordered: Sequence[float], without: int | None = None) -> float:
    """Of sorted numbers, but for the one at `without`; inf when none is left."""
    count = len(ordered) - (without is not None)
    if count == 0:
        return inf
    low, high = (count - 1) // 2, count // 2
    if without is not None:
        low, high = low + (low >= without), high + (high >= without)
    return (ordered[low] + ordered[high]) / 2
