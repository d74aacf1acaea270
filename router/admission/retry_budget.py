"""How many requests may be tried again: a share of those that came lately, so that a fleet in trouble is not asked twice as much. Pure.

The budget of Finagle (`RetryBudget`) and of Google's "Site Reliability Engineering", chapter 22: retries are counted against the
requests of a sliding window, with a floor for quiet times. What is no second try of the same work needs no budget: an attempt for which
no connection could be made (gRPC calls such retries transparent), and the continuation of an answer that a client has part of already.
"""

WINDOW_SECONDS = 10.0
SLICES = 10
"""The window slides by a tenth of its length."""


class RetryBudget:
    """State: requests and retries per slice of the window. Times are seconds on the caller's clock."""

    def __init__(self, share: float, least: int) -> None:
        """share: retries may be so many of the window's requests, 0..1; least: retries in a window that are always allowed."""
        self.share = share
        self.least = least
        self._requests = [0] * SLICES
        self._retries = [0] * SLICES
        self._slice = 0
        """number of the newest slice since the clock's zero"""

    def reconfigure(self, share: float, least: int) -> None:
        """Allow as much from now on."""
        self.share, self.least = share, least

    def asked(self, now: float) -> None:
        """A request came."""
        self._requests[self._at(now)] += 1

    def may_retry(self, now: float, still_open: int) -> bool:
        """Whether one of them may be tried once more; that is counted if so. still_open: requests that may have come before the window."""
        at = self._at(now)
        allowed = sum(self._retries) < max(self.least, self.share * (sum(self._requests) + still_open))
        self._retries[at] += allowed
        return allowed

    def _at(self, now: float) -> int:
        """The place of the present slice; slices that have passed are emptied. A clock that goes back changes nothing."""
        newest = int(now * SLICES / WINDOW_SECONDS)
        if newest > self._slice:
            for passed in range(self._slice + 1, min(newest, self._slice + SLICES) + 1):
                self._requests[passed % SLICES] = self._retries[passed % SLICES] = 0
            self._slice = newest
        return self._slice % SLICES
