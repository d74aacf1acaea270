"""Ranks excluded from routing, with reasons: circuit breakers, outlier ejection and drains. Pure; the time
comes in as an argument.

Breaker, one per rank. Closed -> open after `breaker_failures` failures in a row -> half open after a delay:
one probe request at a time is let through -> closed on trial with the probe's first token (one more failure
opens it again, for twice as long) -> closed with a completed answer. A request counts only for the state in
which it began: a request that began before the breaker opened says nothing about the rank since then.

Outliers, per model (found by `router.health.outliers`), are ejected for a growing time. At most a share of a
model's ranks is ejected at once.

Drains come from an operator and hold for one incarnation. They always apply. Breakers and ejections are
ignored if they would leave a model without any rank (`Exclusions.hard`).

State: per rank its breaker and its recent observations; open visits (one per attempt of a request); drains by
incarnation.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from enum import StrEnum
from math import inf
from typing import NamedTuple

from router.config import RouterConfig
from router.fleet_state.target_table import RankKey, TargetTable
from router.health.outliers import WINDOW_SECONDS, OutlierDetector, RecentObservations, Visit, failing, slow

DOUBLINGS = 5
"""Most doublings of the open time of a breaker: up to 32 times the first one."""
EVALUATION_SECONDS = 1.0
"""Interval between two searches for outliers."""
EJECTION_SECONDS = 10.0
"""Ejection time of an outlier, times the number of its recent ejections."""
MAX_EJECTION = 12
"""Longest ejection, in multiples of EJECTION_SECONDS."""
MAX_DRAINS = 65_536
REASON_CHARACTERS = 200
"""Characters kept of an operator's reason, which is repeated in the record of every decision."""


class ExclusionKind(StrEnum):
    """Reason for the exclusion of a rank, for metrics."""

    BREAKER = "breaker"
    OUTLIER = "outlier"
    DRAIN = "drain"


class Exclusion(NamedTuple):
    """Exclusion of one rank."""

    kind: ExclusionKind
    reason: str


class Exclusions(NamedTuple):
    """Excluded ranks of one model. hard: those that stay excluded even if no other rank is left (drains)."""

    every: Mapping[RankKey, str]
    hard: Mapping[RankKey, str]
    kinds: Mapping[RankKey, ExclusionKind]

    def beside(self, reasons: Mapping[RankKey, str]) -> "Exclusions":
        """Return these exclusions plus others that are hard."""
        return Exclusions({**self.every, **reasons}, {**self.hard, **reasons}, self.kinds)


NO_EXCLUSIONS = Exclusions({}, {}, {})


class _Rank(OutlierDetector):
    """Breaker and observations of one rank."""

    __slots__ = (
        "ejected_until",
        "ejections",
        "failures",
        "level",
        "openings",
        "probe",
        "probe_until",
        "returned_at",
        "until",
    )

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0
        """failures in a row"""
        self.level = 0
        """openings since the last completed answer"""
        self.openings = 0
        self.until: float | None = None
        """None: the breaker is closed. Otherwise it is open until then, and half open afterwards"""
        self.probe: Hashable | None = None
        """the visit that tests if the rank has recovered"""
        self.probe_until = inf
        """time at which an unfinished probe is given up"""
        self.ejected_until: float | None = None
        self.ejections = 0
        """recent ejections"""
        self.returned_at = -inf
        """end of the last ejection"""


class CircuitBreakers:
    """Circuit breakers, ejections and drains of all ranks; see the module docstring. The caller reports the
    begin and the end of every attempt, and calls `eject_outliers` regularly (every second).
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._ranks: dict[RankKey, _Rank] = {}
        self._visits: dict[Hashable, Visit] = {}
        self._drains: dict[int, dict[int | None, str]] = {}
        """reasons by worker_id and rank (None: all ranks of the engine)"""
        self._opened: set[RankKey] = set()
        """ranks whose breaker is not closed"""
        self._ejected: set[RankKey] = set()
        self._version = 0
        """number of changes of the exclusions"""
        self._next = inf
        """next time at which something changes merely because time passes"""
        self._exclusions: dict[str, tuple[TargetTable, int, Exclusions]] = {}
        self._evaluated_at = -inf

    def reconfigure(self, config: RouterConfig) -> None:
        """Apply other settings. Open breakers keep their open time."""
        self._config = config
        if not config.outlier_factor:
            for key in list(self._ejected):
                self._return(key, -inf)

    @property
    def open_visits(self) -> int:
        """Attempts that have begun and not ended."""
        return len(self._visits)

    # Drains

    def drain(self, worker_id: int, rank: int | None, reason: str) -> None:
        """Stop new requests to a rank, or (None) to all ranks of an engine, by order of an operator.
        ValueError beyond MAX_DRAINS.
        """
        if sum(map(len, self._drains.values())) >= MAX_DRAINS:
            raise ValueError(
                f"more than {MAX_DRAINS} drains are remembered already: the one of worker {worker_id} is not"
            )
        self._drains.setdefault(worker_id, {})[rank] = reason[:REASON_CHARACTERS]
        self._version += 1

    def undrain(self, worker_id: int, rank: int | None) -> None:
        """Resume routing to a drained rank or engine."""
        ranks = self._drains.get(worker_id, {})
        ranks.pop(rank, None)
        if not ranks:
            self._drains.pop(worker_id, None)
        self._version += 1

    # Reports about attempts. `visit`: any value that identifies one attempt. Times: seconds on one clock.

    def began(self, visit: Hashable, key: RankKey, predicted: float | None, now: float) -> None:
        """Record the begin of an attempt. predicted: seconds until its first token."""
        rank = self._ranks.get(key)
        if rank is None:
            rank = self._ranks[key] = _Rank()
        known = self._visits[visit] = Visit(key, now, predicted, rank.openings)
        if predicted is not None:
            rank.waiting[visit] = known
        if rank.until is not None and now >= rank.until and not _probing(rank, now):
            rank.probe, rank.probe_until = visit, now + self._config.first_token_seconds
            self._changed(rank.probe_until)

    def untimed(self, visit: Hashable) -> None:
        """Exclude an attempt from outlier detection: the time of its first token stays unknown or means
        nothing.
        """
        known = self._visits.get(visit)
        if known is not None:
            self._ranks[known.key].waiting.pop(visit, None)

    def first_token(self, visit: Hashable, now: float) -> None:
        """Record the first token of an attempt. An open breaker closes on trial."""
        known = self._visits.get(visit)
        if known is None or known.first_token_seen:
            return
        known.first_token_seen = True
        rank = self._ranks[known.key]
        if rank.waiting.pop(visit, None) is not None:
            rank.ratios.add(known.ratio(now), now)
        if rank.until is not None and known.opening == rank.openings:
            self._close(known.key, rank)
            rank.failures = self._config.breaker_failures - 1

    def answered(self, visit: Hashable, now: float) -> None:
        """Record a completed answer."""
        known = self._visits.get(visit)
        if known is None:
            return
        rank = self._ranks[known.key]
        rank.ends.add(0.0, now)
        self.ended(visit)
        if known.opening == rank.openings:
            rank.failures = rank.level = 0
            if rank.until is not None:
                self._close(known.key, rank)

    def failed(self, visit: Hashable, now: float) -> bool:
        """Record a failure caused by the rank. Return True if it opened the rank's breaker."""
        known = self._visits.get(visit)
        if known is None:
            return False
        rank = self._ranks[known.key]
        rank.ends.add(1.0, now)
        counts = known.opening == rank.openings and (rank.until is None or rank.probe == visit)
        self.ended(visit)
        if not counts:
            return False
        rank.failures += 1
        if rank.until is None and rank.failures < self._config.breaker_failures:
            return False
        self._open(known.key, rank, now)
        return True

    def ended(self, visit: Hashable) -> None:
        """Record the end of an attempt that says nothing about the rank: the client left, the request was
        refused, or the rank was busy. Idempotent.
        """
        known = self._visits.pop(visit, None)
        if known is None:
            return
        rank = self._ranks[known.key]
        rank.waiting.pop(visit, None)
        if rank.probe == visit:
            rank.probe = None
            self._version += 1

    def forget_worker(self, worker_id: int) -> None:
        """Drop an incarnation that has left."""
        for key in [key for key in self._ranks if key[0] == worker_id]:
            del self._ranks[key]
            self._opened.discard(key)
            self._ejected.discard(key)
        self._visits = {visit: known for visit, known in self._visits.items() if known.key[0] != worker_id}
        self._drains.pop(worker_id, None)
        self._version += 1

    # Conclusions

    def exclusions(self, table: TargetTable, now: float) -> Exclusions:
        """Return the exclusions of a model at this time. Costs next to nothing when nothing is excluded."""
        if not self._opened and not self._ejected and not self._drains:
            return NO_EXCLUSIONS
        if now >= self._next:
            self._next = self._next_change(now)
            self._version += 1
        kept = self._exclusions.get(table.model)
        if kept is not None and kept[0] is table and kept[1] == self._version:
            return kept[2]
        found = {
            target.key: exclusion
            for target in table.targets
            if (exclusion := self._exclusion(target.key, now)) is not None
        }
        hard = {
            key: exclusion.reason for key, exclusion in found.items() if exclusion.kind is ExclusionKind.DRAIN
        }
        exclusions = Exclusions(
            {key: exclusion.reason for key, exclusion in found.items()},
            hard,
            {key: exclusion.kind for key, exclusion in found.items()},
        )
        self._exclusions[table.model] = table, self._version, exclusions
        return exclusions

    def eject_outliers(self, models: Iterable[Sequence[RankKey]], now: float) -> None:
        """Eject outliers and end ejections. models: for each model, the ranks that could serve it. Does
        nothing if called again within EVALUATION_SECONDS.
        """
        if now < self._evaluated_at + EVALUATION_SECONDS:
            return
        self._evaluated_at = now
        self._exclusions.clear()  # drops models that have left, too
        for ranks in models:
            self._eject_outliers_of(ranks, now)

    # Breakers

    def _open(self, key: RankKey, rank: _Rank, now: float) -> None:
        rank.until = now + self._config.breaker_seconds * 2.0 ** min(rank.level, DOUBLINGS)
        rank.level += 1
        rank.openings += 1
        rank.probe = None
        self._opened.add(key)
        self._changed(rank.until)

    def _close(self, key: RankKey, rank: _Rank) -> None:
        rank.until = rank.probe = None
        rank.failures = 0
        self._opened.discard(key)
        self._version += 1

    def _changed(self, next_change: float) -> None:
        self._version += 1
        self._next = min(self._next, next_change)

    def _next_change(self, now: float) -> float:
        ranks = [self._ranks[key] for key in self._opened | self._ejected]
        times = [
            time
            for rank in ranks
            for time in (rank.until, rank.probe_until if rank.probe is not None else None, rank.ejected_until)
        ]
        return min((time for time in times if time is not None and time > now), default=inf)

    # Outliers

    def _eject_outliers_of(self, ranks: Sequence[RankKey], now: float) -> None:
        limit = int(self._config.max_ejected_share * len(ranks) + 1e-9)
        out = sorted(
            (key for key in ranks if key in self._ejected),
            key=lambda key: self._ranks[key].ejected_until or now,
            reverse=True,
        )
        for number, key in enumerate(out):
            if number >= limit or (self._ranks[key].ejected_until or now) <= now:
                self._return(key, now)
        if not self._config.outlier_factor:
            return
        # Open breakers count towards the share, so that both mechanisms together leave enough ranks.
        room = limit - sum(key in self._ejected or key in self._opened for key in ranks)
        present = {key: self._ranks[key] for key in ranks if key in self._ranks and key not in self._ejected}
        for rank in present.values():
            rank.ratios.forget(now - WINDOW_SECONDS)
            rank.ends.forget(now - WINDOW_SECONDS)
            if now - rank.returned_at > WINDOW_SECONDS * max(rank.ejections, 1):
                rank.ejections = 0
        if room > 0:
            found = {**slow(present, self._config.outlier_factor, now), **failing(present)}
            for key in sorted(found, key=lambda key: -found[key])[:room]:
                self._eject(key, now)

    def _eject(self, key: RankKey, now: float) -> None:
        rank = self._ranks[key]
        rank.ejections += 1
        rank.ejected_until = now + EJECTION_SECONDS * min(rank.ejections, MAX_EJECTION)
        self._ejected.add(key)
        self._changed(rank.ejected_until)

    def _return(self, key: RankKey, now: float) -> None:
        """End the ejection of a rank. Only requests from now on count for its next judgement."""
        rank = self._ranks[key]
        rank.ejected_until, rank.returned_at = None, now
        rank.ratios, rank.ends = RecentObservations(), RecentObservations()
        self._ejected.discard(key)
        self._version += 1

    # Reasons

    def _exclusion(self, key: RankKey, now: float) -> Exclusion | None:
        drains = self._drains.get(key[0])
        if drains is not None:
            reason = drains.get(None, drains.get(key[1]))
            if reason is not None:
                return Exclusion(ExclusionKind.DRAIN, f"draining: {reason}" if reason else "draining")
        rank = self._ranks.get(key)
        if rank is None:
            return None
        if rank.until is not None:
            if now < rank.until:
                seconds = self._config.breaker_seconds * 2.0 ** min(rank.level - 1, DOUBLINGS)
                return Exclusion(
                    ExclusionKind.BREAKER,
                    f"its breaker is open: too many failures in a row; excluded for {seconds:g} s",
                )
            if _probing(rank, now):
                return Exclusion(
                    ExclusionKind.BREAKER,
                    "its breaker is half open: one probe request tests if it works again",
                )
        if rank.ejected_until is not None and now < rank.ejected_until:
            seconds = EJECTION_SECONDS * min(rank.ejections, MAX_EJECTION)
            return Exclusion(
                ExclusionKind.OUTLIER,
                "an outlier of its model: far slower than predicted, or failing far more often; ejected for"
                f" {seconds:g} s",
            )
        return None


def _probing(rank: _Rank, now: float) -> bool:
    return rank.probe is not None and now < rank.probe_until
