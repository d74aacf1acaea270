"""Estimate of a factor of step times that drifts, as a logarithm."""

import msgspec

MOST_LOG = 5.0
"""Highest log factor that is believed: a factor of about 150."""
_MOST_VARIANCE = 1.0
_LAST_INSTANT = 1e11
"""Unix time far ahead: what is later was stored in other units."""


class LogFactor(msgspec.Struct, kw_only=True):
    """A logarithm with its variance: a Kalman filter of one number. ValueError names a figure out of
    range."""

    value: float
    variance: float
    updated: float
    """Unix time"""

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("value", self.value, -MOST_LOG, MOST_LOG),
            ("variance", self.variance, 0.0, _MOST_VARIANCE),
            ("time", self.updated, 0.0, _LAST_INSTANT),
        ):
            if not low <= value <= high:
                raise ValueError(f"log factor: its {name} must be from {low:g} to {high:g}, not {value}")

    def aged(self, drift: float, at: float) -> float:
        """Return the variance at a time. drift: variance per second. Time never runs backwards."""
        if at <= self.updated:
            return self.variance
        return min(self.variance + drift * (at - self.updated), _MOST_VARIANCE)

    def grow(self, drift: float, at: float) -> None:
        """Let it drift until this time."""
        if at > self.updated:
            self.variance, self.updated = self.aged(drift, at), at

    def take(self, surprise: float, share: float, total: float) -> None:
        """Take its part of a surprise. share: its weight in the prediction; total: variance of the
        surprise."""
        gain = self.variance * share / total
        value = self.value + gain * surprise
        self.value = value if -MOST_LOG <= value <= MOST_LOG else max(-MOST_LOG, min(value, MOST_LOG))
        self.variance *= 1.0 - gain * share

    def copy(self) -> "LogFactor":
        """Return an independent copy."""
        return LogFactor(value=self.value, variance=self.variance, updated=self.updated)
