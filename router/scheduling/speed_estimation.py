"""Speed estimation for servers that state no speed, from their streams: first tokens measure prefill, times
between tokens measure decode. Pure.

Evidence is the logarithm of observed over predicted seconds, as predicted by `target_table.REFERENCE`. The
numbers of the reference mean nothing; its proportions are those of a GPU server. Evidence is pooled over
servers of one base model, since differences between them are mostly noise: the measured decode speeds of two
equal servers differ by a few percent, times all the tokens of an answer, which is more than a cached prefix
is worth. A server has a speed of its own only if it departs from the pool by more than DEPARTURE.

Robust: the estimate is the median of the first observations. Afterwards each observation moves it by at most
OUTLIER of its weight (Huber's clipped residual). A pool that was measured once stays measured, since hardware
does not change silently.
"""

from math import exp, log

from router.fleet_state.target_table import RankKey
from router.scheduling.speed_correction import DECODE_SPEED, PREFILL_SPEED, prefill_evidence

MIN_OBSERVATIONS, ENOUGH, MAX_OBSERVATIONS = 4.0, 16.0, 32.0
"""MIN_OBSERVATIONS make a measurement; the median is taken of the first ENOUGH; at most MAX_OBSERVATIONS are
remembered.
"""
_MAX_KEPT = 64
"""Most light observations kept for the median."""
OUTLIER = log(2.0)
DEPARTURE = log(1.3)
"""Distance from the pool at which a server's own estimate begins to count. It counts fully at twice this
distance.
"""
MAX_LOG_RATIO = log(1e4)
"""Ratios are clipped to this."""
HALF_LIFE_SECONDS = 60.0


class _Estimate:
    """Robust running mean of logarithms, and the weight of the evidence behind it."""

    __slots__ = ("_first", "value", "weight")

    def __init__(self) -> None:
        self.value, self.weight = 0.0, 0.0
        self._first: list[tuple[float, float]] | None = []
        """(observation, weight) while the median is taken; None afterwards"""

    def add(self, observed: float, weight: float) -> None:
        observed = min(max(observed, -MAX_LOG_RATIO), MAX_LOG_RATIO)
        self.weight = min(self.weight + weight, MAX_OBSERVATIONS)
        if self._first is None:
            self.value += min(max(observed - self.value, -OUTLIER), OUTLIER) * weight / self.weight
            return
        self._first.append((observed, weight))
        self.value = _median(self._first)
        if self.weight >= ENOUGH or len(self._first) >= _MAX_KEPT:
            self._first = None

    def age(self, left: float, least: float) -> None:
        """Keep a share of the evidence, but at least `least` of it if there is that much."""
        self.weight = max(self.weight * left, min(self.weight, least))


class _Estimates:
    """Estimates for prefill and decode, of one pool or of one server."""

    __slots__ = ("of",)

    def __init__(self) -> None:
        self.of = (_Estimate(), _Estimate())


class SpeedEstimation:
    """State: estimates by pool and by server."""

    def __init__(self) -> None:
        self._pools: dict[str, _Estimates] = {}
        self._servers: dict[RankKey, _Estimates] = {}
        self._pool_of: dict[RankKey, str] = {}
        self._aged_at: float | None = None

    def first_token(
        self, pool: str, server: RankKey, predicted_s: float, beside_s: float, observed_s: float
    ) -> None:
        """Record a first token (`speed_correction.prefill_evidence`)."""
        if predicted_s > 0 and observed_s > 0:
            self._add(PREFILL_SPEED, pool, server, *prefill_evidence(predicted_s, beside_s, observed_s))

    def step(
        self, pool: str, server: RankKey, predicted_s: float, observed_s: float, weight: float = 1.0
    ) -> None:
        """Record a decode step. weight: in (0, 1]."""
        if predicted_s > 0 and observed_s > 0:
            self._add(DECODE_SPEED, pool, server, log(observed_s / predicted_s), weight)

    def of(self, pool: str, server: RankKey) -> tuple[tuple[float, bool], tuple[float, bool]]:
        """Return, for prefill and for decode, the factor of a server's predicted seconds, and True if it was
        measured; (1.0, False) before.
        """
        return self._factor(PREFILL_SPEED, pool, server), self._factor(DECODE_SPEED, pool, server)

    def age(self, now: float) -> None:
        """Halve the evidence with every HALF_LIFE_SECONDS."""
        left = 1.0 if self._aged_at is None else 0.5 ** (max(now - self._aged_at, 0.0) / HALF_LIFE_SECONDS)
        self._aged_at = now
        for known, least in ((self._pools, MIN_OBSERVATIONS), (self._servers, 0.0)):
            for estimates in known.values():
                for estimate in estimates.of:
                    estimate.age(left, least)

    def forget_worker(self, worker_id: int) -> None:
        """Forget a server, and its pool with the pool's last server."""
        for key in [key for key in self._servers if key[0] == worker_id]:
            del self._servers[key]
            pool = self._pool_of.pop(key)
            if pool not in self._pool_of.values():
                del self._pools[pool]

    def _add(self, kind: int, pool: str, server: RankKey, ratio: float, weight: float) -> None:
        if self._pool_of.get(server, pool) != pool:
            self.forget_worker(server[0])  # the server serves another base model now
        if server not in self._pool_of:
            self._pool_of[server] = pool
            self._servers[server] = _Estimates()
            self._pools.setdefault(pool, _Estimates())
        for estimates in (self._pools.get(pool), self._servers.get(server)):
            assert estimates is not None
            estimates.of[kind].add(ratio, weight)

    def _factor(self, kind: int, pool: str, server: RankKey) -> tuple[float, bool]:
        estimates = self._pools.get(pool)
        if estimates is None or estimates.of[kind].weight < MIN_OBSERVATIONS:
            return 1.0, False
        pooled, own = estimates.of[kind].value, self._servers.get(server)
        if own is None or own.of[kind].weight < ENOUGH:
            return exp(pooled), True
        departure = own.of[kind].value - pooled
        counts = min(max(abs(departure) / DEPARTURE - 1.0, 0.0), 1.0)
        return exp(pooled + counts * departure), True


def _median(observations: list[tuple[float, float]]) -> float:
    """Return the weighted median of (value, weight) pairs."""
    half, passed = 0.5 * sum(weight for _, weight in observations), 0.0
    for value, weight in sorted(observations):
        passed += weight
        if passed >= half:
            return value
    raise AssertionError("unreachable: the weights add up")
