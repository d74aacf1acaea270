"""Speeds of servers that state none, learnt from their streams: first tokens tell of prefill, times between tokens of decode. Pure.

Evidence is the logarithm of observed over predicted seconds, predicted by `roster.REFERENCE`, whose numbers mean nothing and whose
proportions are those of a GPU server. It is pooled over servers of one base model, since their differences are noise more often than
not: the measured decode speeds of two equal servers differ by a few percent, times all the tokens of an answer, which is more than a cached
prefix is worth. A server has a speed of its own only where it departs from the pool by more than DEPARTURE.

Robust: the estimate is the median of the first observations; afterwards each moves it by at most OUTLIER of its weight (Huber's clipped
residual). A pool that was measured once stays measured, since hardware does not change in silence.
"""

from math import exp, log

from router.fleet_state.target_table import RankKey

PREFILL_KIND, DECODE_KIND = 0, 1
KINDS = 2
LEAST, ENOUGH, MOST = 4.0, 16.0, 32.0
"""Observations: LEAST make a measurement; the median is taken of the first ENOUGH; no more than MOST are remembered."""
_MOST_KEPT = 64
"""Of light observations the median is taken of the first so many."""
OUTLIER = log(2.0)
DEPARTURE = log(1.3)
"""A server's own estimate begins to count with this distance from the pool's, and counts whole with twice as much."""
FARTHEST = log(1e4)
"""Beyond this ratio an observation is taken for it."""
HALF_LIFE_SECONDS = 60.0
_LEAST_SHARE = 0.1
"""of a first token's time, at least, is prefill"""


class _Estimate:
    """A robust running mean of logarithms, and the weight of the evidence behind it."""

    __slots__ = ("_first", "value", "weight")

    def __init__(self) -> None:
        self.value, self.weight = 0.0, 0.0
        self._first: list[tuple[float, float]] | None = []
        """(observation, weight), while the median is taken; None: no longer"""

    def add(self, observed: float, weight: float) -> None:
        observed = min(max(observed, -FARTHEST), FARTHEST)
        self.weight = min(self.weight + weight, MOST)
        if self._first is None:
            self.value += min(max(observed - self.value, -OUTLIER), OUTLIER) * weight / self.weight
            return
        self._first.append((observed, weight))
        self.value = _median(self._first)
        if self.weight >= ENOUGH or len(self._first) >= _MOST_KEPT:
            self._first = None

    def age(self, left: float, least: float) -> None:
        """Keep a share of the evidence, and what there is of `least`."""
        self.weight = max(self.weight * left, min(self.weight, least))


class _Estimates:
    """Of one pool, or of one server: of prefill and of decode."""

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

    def first_token(self, pool: str, server: RankKey, predicted_s: float, beside_s: float, observed_s: float) -> None:
        """Take in a first token that came after observed_s. predicted_s: of the prefill, and of the prefill before it; beside_s: of what else
        passes until a first token comes. It weighs as the square of the prefill's share (inverse variance)."""
        if predicted_s > 0 and observed_s > 0:
            ratio = log(max(observed_s - beside_s, _LEAST_SHARE * observed_s) / predicted_s)
            self._add(PREFILL_KIND, pool, server, ratio, (predicted_s / (predicted_s + beside_s)) ** 2)

    def step(self, pool: str, server: RankKey, predicted_s: float, observed_s: float, weight: float = 1.0) -> None:
        """Take in a decode step. weight: in (0, 1]."""
        if predicted_s > 0 and observed_s > 0:
            self._add(DECODE_KIND, pool, server, log(observed_s / predicted_s), weight)

    def of(self, pool: str, server: RankKey) -> tuple[tuple[float, bool], tuple[float, bool]]:
        """Of prefill and of decode: the factor of a server's predicted seconds, and whether it was measured; (1.0, False) before."""
        return self._factor(PREFILL_KIND, pool, server), self._factor(DECODE_KIND, pool, server)

    def age(self, now: float) -> None:
        """Halve the evidence with every HALF_LIFE_SECONDS."""
        left = 1.0 if self._aged_at is None else 0.5 ** (max(now - self._aged_at, 0.0) / HALF_LIFE_SECONDS)
        self._aged_at = now
        for known, least in ((self._pools, LEAST), (self._servers, 0.0)):
            for estimates in known.values():
                for estimate in estimates.of:
                    estimate.age(left, least)

    def forget_worker(self, worker_id: int) -> None:
        """Forget a server, and its pool with the last one of it."""
        for key in [key for key in self._servers if key[0] == worker_id]:
            del self._servers[key]
            pool = self._pool_of.pop(key)
            if pool not in self._pool_of.values():
                del self._pools[pool]

    def _add(self, kind: int, pool: str, server: RankKey, ratio: float, weight: float) -> None:
        if self._pool_of.get(server, pool) != pool:
            self.forget_worker(server[0])  # it serves another base model now
        if server not in self._pool_of:
            self._pool_of[server] = pool
            self._servers[server] = _Estimates()
            self._pools.setdefault(pool, _Estimates())
        for estimates in (self._pools.get(pool), self._servers.get(server)):
            assert estimates is not None
            estimates.of[kind].add(ratio, weight)

    def _factor(self, kind: int, pool: str, server: RankKey) -> tuple[float, bool]:
        estimates = self._pools.get(pool)
        if estimates is None or estimates.of[kind].weight < LEAST:
            return 1.0, False
        pooled, own = estimates.of[kind].value, self._servers.get(server)
        if own is None or own.of[kind].weight < ENOUGH:
            return exp(pooled), True
        departure = own.of[kind].value - pooled
        counts = min(max(abs(departure) / DEPARTURE - 1.0, 0.0), 1.0)
        return exp(pooled + counts * departure), True


def _median(observations: list[tuple[float, float]]) -> float:
    """Of (value, weight)."""
    half, passed = 0.5 * sum(weight for _, weight in observations), 0.0
    for value, weight in sorted(observations):
        passed += weight
        if passed >= half:
            return value
    raise AssertionError("unreachable: the weights add up")
