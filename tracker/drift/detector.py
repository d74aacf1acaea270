"""Detection of changes of popularity, and of their end. Pure: time is an argument.

The detector compares a fast and a slow profile of all traffic, by the Jensen-Shannon divergence of each layer
(Lin 1991), in nats, mean over layers. The threshold comes from sampling noise. That is not the noise of
independent draws: the tokens of a request share a domain, its layers agree, it spans many reports, and few
requests fall into one fast window. Therefore:

1. The mean divergence of pure noise falls as 1 / n. n is the effective number of tokens of the difference
   fast - slow: 1/n = sum over tokens of (w_fast / W_fast - w_slow / W_slow)^2 (Kish 1965, design effect). It
   follows the traffic rate immediately. The remaining factor, the noise n * divergence, depends only on the
   kind of traffic and is learnt (`tracker.drift.sampling_noise`). A sudden lump of many more tokens than
   usual is mostly a single large request, and counts like a usual lump.
2. Noise is learnt with a delay, and never if a shift came in between, so that a slow onset does not hide
   itself.
3. At `shift_sigmas` = 4.5 three independent looks in a million would exceed the threshold if the theory were
   exact. An alarm needs a divergence far above the threshold, or one that stays above it: noise that reaches
   it does not stay.
4. A shift smaller than `shift_floor` is too small to matter. If noise alone could diverge by more than
   MAX_NOISE, or no report arrived for a fast time constant, there is no evidence and no verdict: the
   previous state remains.

After an alarm a second slow profile starts empty (the reference). It represents the new state, so that
another change is detected long before the slow profile has adapted. An alarm requires both the slow profile
and the reference to differ from the fast one. Noise is also learnt from scratch, against the reference: a
different mix of requests has different noise. A shift has settled when fast and slow have agreed (divergence
under SETTLED times the threshold) for a fast time constant.
"""

from collections import deque
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray
from tracker.config import TrackerConfig
from tracker.drift.sampling_noise import SAMPLES, DriftNoise, array, divergence_by_layer, numbers

SETTLED = 0.5
"""A shift has settled when the divergence stays below this share of the threshold."""
LUMP_SECONDS = 0.25
"""Counts that arrive within this time are weighed as one."""
MAX_NOISE = 0.1
"""nats; with more divergence from noise alone, no verdict is possible"""
MAX_DIVERGENCE = log(2.0)
"""of two profiles without a common expert"""
LAG = 6.0
"""Delay before noise is learnt, in fast time constants."""
MEMORY = 4.0
"""Memory of the noise, in slow time constants."""
FAR, LASTING = 1.5, 0.5
"""A divergence above FAR times the threshold is an immediate shift; a smaller one after LASTING fast time
constants.
"""
YOUNG = 3.0
"""Fast time constants of traffic that a slow profile must hold before it is compared."""
OLD = 5.0
"""Slow time constants after which a reference no longer differs from the slow profile."""
FRESH_LOOKS = 6.0
"""Looks after an alarm before the new noise estimate replaces the old one. Until then there is no further
alarm.
"""


class PopularityShift(NamedTuple):
    """A shift (`settled` False) or its end. divergence, threshold: nats, mean over layers; layers: changed
    ones, most first.
    """

    settled: bool
    divergence: float
    threshold: float
    layers: tuple[int, ...]


class _Faded:
    """Counts [layers, experts] and their tokens, decayed with one time constant."""

    def __init__(self, layers: int, experts: int, constant: float) -> None:
        self.constant = constant
        self.counts: FloatArray = np.zeros((layers, experts))
        self.tokens = 0.0
        self.squares = 0.0
        """sum of squared token weights"""
        self.shared = 0.0
        """sum of products of token weights here and in the fast window"""

    def fade(self, seconds: float, fast: float) -> None:
        kept = exp(-seconds / self.constant)
        self.counts *= kept
        self.tokens *= kept
        self.squares *= kept * kept
        self.shared *= kept * exp(-seconds / fast)

    def add(self, counts: NDArray[Any], tokens: float, doubt: float) -> None:
        """Add counts. doubt: the tokens, or more if they carry less evidence."""
        self.counts += counts
        self.tokens += tokens
        self.squares += doubt
        self.shared += doubt

    def state(self) -> dict[str, Any]:
        return {
            "counts": self.counts.astype("<f8").tobytes(),
            "sums": [self.tokens, self.squares, self.shared],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.counts = array(state["counts"], self.counts.shape)
        self.tokens, self.squares, self.shared = numbers(state["sums"], 3)


class DriftDetector:
    """Detector for one model's traffic over all ranks. `now` is seconds of one monotonic clock."""

    def __init__(self, config: TrackerConfig, layers: int, experts: int) -> None:
        self._config = config
        self.layers = layers
        self.experts = experts
        self.shifted = False
        self.divergence: float | None = None
        """divergence of the fast from the slow profile, nats, mean over layers, at the last judgement; None:
        no evidence
        """
        self.threshold: float | None = None
        """divergence that noise alone would rarely exceed; None: no evidence"""
        self._fast = _Faded(layers, experts, config.fast_seconds)
        self._slow = _Faded(layers, experts, config.slow_seconds)
        self._reference: _Faded | None = None
        self._noise = DriftNoise(layers)
        self._fresh: DriftNoise | None = None
        """noise since the last alarm, until it suffices"""
        self._pending: NDArray[np.float32] = np.zeros((layers, experts), np.float32)
        self._pending_tokens = 0.0
        self._lumps = 0.0
        """lumps of counts in the fast window"""
        self._began: float | None = None
        """caller's clock when the own time was 0; None: no report yet in this incarnation"""
        self._at = 0.0
        """own time up to which the windows are current"""
        self._reported_at: float | None = None
        self._observed = 0.0
        """time with reports, seconds"""
        self._since_alarm = 0.0
        """part of it since the last alarm"""
        self._calm_since: float | None = None
        self._above_since: float | None = None
        self._sampled_at: float | None = None
        self._samples: deque[tuple[float, NDArray[np.float64]]] = deque(maxlen=int(LAG * SAMPLES) + 1)

    def observe(self, counts: NDArray[Any], tokens: float, now: float) -> None:
        """Add a report: counts [layers, experts] of (token, k) pairs and their tokens. No effect without
        tokens.
        """
        if tokens <= 0:
            return
        at = self._own_time(now)
        if at - self._at > LUMP_SECONDS:
            self._catch_up(at)
        self._pending += counts
        self._pending_tokens += tokens
        self._reported_at = max(at, self._at)

    def evaluate(self, now: float) -> PopularityShift | None:
        """Compare the profiles, and return the shift if the state changed.

        Call it more often than every quarter of the fast time constant.
        """
        at = self._own_time(now)
        self._catch_up(at)
        self.divergence = self.threshold = None
        compared = self._compare(self._slow) if self._has_reports(at) else None
        if compared is None:
            self._calm_since = self._above_since = None
            return None
        by_layer, evidence = compared
        divergence = float(by_layer.mean())
        self._learn(at, compared)
        if self._noise.looks < 1.0:
            return None
        threshold = self._threshold(evidence)
        if threshold is None:
            return None
        self.divergence, self.threshold = divergence, threshold
        return self._verdict(by_layer, evidence, at)

    # The windows

    def _own_time(self, now: float) -> float:
        """Convert to own time, which continues across restarts."""
        if self._began is None:
            self._began = now - self._at
        return now - self._began

    def _catch_up(self, now: float) -> None:
        """Advance the windows to a moment. Pending counts belong to the previous moment."""
        windows = [window for window in (self._fast, self._slow, self._reference) if window is not None]
        if self._pending_tokens:
            # A lump far above the usual one is most likely a single large request, and counts like a usual
            # one.
            usual = (self._fast.tokens + self._pending_tokens) / (self._lumps + 1.0)
            doubt = self._pending_tokens * max(1.0, self._pending_tokens / usual)
            for window in windows:
                window.add(self._pending, self._pending_tokens, doubt)
            self._lumps += 1.0
            self._pending[:] = 0.0
            self._pending_tokens = 0.0
        passed = now - self._at
        if passed <= 0:
            return
        self._lumps *= exp(-passed / self._config.fast_seconds)
        for window in windows:
            window.fade(passed, self._config.fast_seconds)
        covered = min(passed, self._config.fast_seconds) if self._has_reports(now) else 0.0
        self._observed += covered
        self._since_alarm += covered
        if self._reference is not None and self._since_alarm > OLD * self._config.slow_seconds:
            self._reference = None
        self._at = now

    def _has_reports(self, now: float) -> bool:
        """Return True if a report arrived within a fast time constant."""
        return self._reported_at is not None and now - self._reported_at <= self._config.fast_seconds

    def _compare(self, slow: _Faded) -> tuple[NDArray[np.float64], float] | None:
        """Return the fast profile's divergence from this one by layer [layers], and the effective tokens of
        the difference.
        """
        fast = self._fast
        if fast.tokens <= 0.0 or slow.tokens <= 0.0:
            return None
        doubt = (
            fast.squares / fast.tokens**2
            + slow.squares / slow.tokens**2
            - 2.0 * slow.shared / (fast.tokens * slow.tokens)
        )
        # While the slow window holds little more than the fast one, they do not differ.
        if doubt < 0.25 * fast.squares / fast.tokens**2:
            return None
        return divergence_by_layer(fast.counts, slow.counts), 1.0 / doubt

    # Noise

    def _learn(self, now: float, compared: tuple[NDArray[np.float64], float]) -> None:
        """Sample the noise if a sample is due, and learn from earlier samples; immediately during warm-up,
        without an alarm.
        """
        interval = self._config.fast_seconds / SAMPLES
        since = self._observed if self._reference is None else self._since_alarm
        if since < YOUNG * self._config.fast_seconds or (
            self._sampled_at is not None and now - self._sampled_at < interval
        ):
            return
        against = compared if self._reference is None else self._compare(self._reference)
        if against is None or not against[0].any():
            return
        self._sampled_at = now
        self._samples.append((now, against[0] * against[1]))
        eager = self._fresh is not None or self._observed < self._config.shift_warmup_seconds
        lag = 0.0 if eager else LAG * self._config.fast_seconds
        noise = self._fresh or self._noise
        while self._samples and self._samples[0][0] <= now - lag:
            noise.learn(interval, MEMORY * self._config.slow_seconds, self._samples.popleft()[1])
        if self._fresh is not None and self._fresh.looks >= FRESH_LOOKS:
            self._noise, self._fresh = self._fresh, None

    def _threshold(self, evidence: float) -> float | None:
        """Return the threshold in nats; None if noise is unbounded."""
        noise = self._noise.mean / evidence
        threshold = max(self._config.shift_floor, self._noise.ratio(self._config.shift_sigmas) * noise)
        return threshold if noise <= MAX_NOISE and threshold < MAX_DIVERGENCE else None

    # The verdict

    def _verdict(self, by_layer: NDArray[np.float64], evidence: float, now: float) -> PopularityShift | None:
        assert self.divergence is not None
        assert self.threshold is not None
        if self._observed < self._config.shift_warmup_seconds:
            return None
        if self._stands_out(now) and self._is_new():
            self._alarm()
            return PopularityShift(False, self.divergence, self.threshold, self._moved(by_layer, evidence))
        if self.shifted and self._has_ended(evidence, now):
            self.shifted, self._calm_since = False, None
            return PopularityShift(True, self.divergence, self.threshold, ())
        return None

    def _stands_out(self, now: float) -> bool:
        """Return True if the divergence is far above the threshold, or has been above it for a while."""
        assert self.divergence is not None
        assert self.threshold is not None
        if self.divergence <= self.threshold:
            self._above_since = None
            return False
        if self._above_since is None:
            self._above_since = now
        return (
            self.divergence > FAR * self.threshold
            or now - self._above_since >= LASTING * self._config.fast_seconds
        )

    def _is_new(self) -> bool:
        """Return True if the fast profile also differs from the traffic since the last alarm, and that alarm
        is not recent.
        """
        if self._reference is None:
            return True
        if self._fresh is not None or self._since_alarm < self._config.shift_cooldown_seconds:
            return False
        compared = self._compare(self._reference)
        if compared is None:
            return False
        by_layer, evidence = compared
        threshold = self._threshold(evidence)
        return threshold is not None and float(by_layer.mean()) > threshold

    def _alarm(self) -> None:
        self.shifted = True
        self._samples.clear()
        self._calm_since = self._above_since = None
        self._since_alarm = 0.0
        self._reference = _Faded(self.layers, self.experts, self._config.slow_seconds)
        self._fresh = DriftNoise(self.layers)

    def _has_ended(self, evidence: float, now: float) -> bool:
        assert self.divergence is not None
        usual = max(
            self._config.shift_floor,
            self._noise.usual_ratio(self._config.shift_sigmas) * self._noise.mean / evidence,
        )
        early = self._fresh is not None or self._since_alarm < self._config.shift_cooldown_seconds
        if early or self.divergence > SETTLED * usual:
            self._calm_since = None
            return False
        if self._calm_since is None:
            self._calm_since = now
        return now - self._calm_since >= self._config.fast_seconds

    def _moved(self, by_layer: NDArray[np.float64], evidence: float) -> tuple[int, ...]:
        """Return the layers whose divergence exceeds their own noise by the same ratio, largest change
        first."""
        limit = np.maximum(
            self._config.shift_floor,
            self._noise.ratio(self._config.shift_sigmas) * self._noise.by_layer / evidence,
        )
        order = np.argsort(-by_layer, kind="stable")
        return tuple(int(layer) for layer in order if by_layer[layer] > limit[layer])

    # Restarts

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`: plain numbers and bytes."""
        self._catch_up(self._at)
        return {
            "shape": [self.layers, self.experts],
            "fast": self._fast.state(),
            "slow": self._slow.state(),
            "reference": None if self._reference is None else self._reference.state(),
            "noise": self._noise.state(),
            "fresh": None if self._fresh is None else self._fresh.state(),
            "shifted": self.shifted,
            "seconds": [self._observed, self._since_alarm, self._at],
            "lumps": self._lumps,
            "moments": [self._reported_at, self._calm_since, self._above_since, self._sampled_at],
            "samples": [[at, values.astype("<f8").tobytes()] for at, values in self._samples],
        }

    @classmethod
    def restore(cls, config: TrackerConfig, state: dict[str, Any]) -> "DriftDetector":
        """Restore a detector. Time continues with the first call. ValueError for an invalid state."""
        try:
            drift = cls(config, *_shape(state["shape"], config.max_cells))
            drift._take(state)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"drift: not a state ({type(error).__name__}: {error})") from error
        return drift

    def _take(self, state: dict[str, Any]) -> None:
        self._fast.restore(state["fast"])
        self._slow.restore(state["slow"])
        if state["reference"] is not None:
            self._reference = _Faded(self.layers, self.experts, self._config.slow_seconds)
            self._reference.restore(state["reference"])
        self._noise.restore(state["noise"])
        if state["fresh"] is not None:
            self._fresh = DriftNoise(self.layers)
            self._fresh.restore(state["fresh"])
        self.shifted = bool(state["shifted"])
        (self._lumps,) = numbers([state["lumps"]], 1)
        self._observed, self._since_alarm, self._at = numbers(state["seconds"], 3)
        self._reported_at, self._calm_since, self._above_since, self._sampled_at = (
            None if at is None else float(at) for at in state["moments"]
        )
        self._samples.extend((float(at), array(raw, (self.layers,))) for at, raw in state["samples"])


def _shape(raw: Any, max_cells: int) -> tuple[int, int]:
    layers, experts = map(int, raw)
    if not (1 <= layers and 1 <= experts and layers * experts <= max_cells):
        raise ValueError(f"a table of {layers} x {experts}")
    return layers, experts
