"""Retry budget: retries as a share of recent requests, so that a failing fleet does not get twice the load.
Pure.

The budget of Finagle (`RetryBudget`) and of Google's "Site Reliability Engineering", chapter 22: retries are
counted against the requests of a sliding window, with a floor for quiet times. Two kinds of attempts repeat
no work and need no budget: an attempt whose connection failed (gRPC calls such retries transparent), and the
continuation of an answer that a client already has in part.
"""

WINDOW_SECONDS = 10.0
SLICES = 10
"""Slices of the window, which slides by a tenth of its length."""


class RetryBudget:
    """Counters of a sliding window. State: requests and retries per slice. Times are seconds on the caller's
    clock.
    """

    def __init__(self, share: float, min_retries: int) -> None:
        """share: retries allowed per request of the window, 0..1; min_retries: retries in a window that are
        always allowed.
        """
        self.share = share
        self.min_retries = min_retries
        self._requests = [0] * SLICES
        self._retries = [0] * SLICES
        self._slice = 0
        """number of the newest slice, counted from the clock's zero"""

    def reconfigure(self, share: float, min_retries: int) -> None:
        """Change the limits."""
        self.share, self.min_retries = share, min_retries

    def count_request(self, now: float) -> None:
        """Count a request."""
        self._requests[self._at(now)] += 1

    def may_retry(self, now: float, still_open: int) -> bool:
        """Return true and count a retry if the budget allows it. still_open: open requests, which may have
        come before the window.
        """
        at = self._at(now)
        allowed = sum(self._retries) < max(self.min_retries, self.share * (sum(self._requests) + still_open))
        self._retries[at] += allowed
        return allowed

    def _at(self, now: float) -> int:
        """Return the index of the present slice, after clearing the slices that have expired. A clock that
        runs backwards changes nothing.
        """
        newest = int(now * SLICES / WINDOW_SECONDS)
        if newest > self._slice:
            for passed in range(self._slice + 1, min(newest, self._slice + SLICES) + 1):
                self._requests[passed % SLICES] = self._retries[passed % SLICES] = 0
            self._slice = newest
        return self._slice % SLICES
