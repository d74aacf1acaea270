"""Log of a server that is not there."""

import asyncio
import logging

_EXPLAIN_SECONDS = 60.0
"""Interval of the log lines of a server that is not there."""
log = logging.getLogger(__name__)


class Absence:
    """Log of a server that is not there: at once for a new reason, and from time to time for the same."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reason = ""
        self._at = float("-inf")

    def explain(self, reason: str) -> None:
        """Log the reason, unless it was logged a short time ago."""
        now = asyncio.get_running_loop().time()
        if reason != self._reason or now >= self._at + _EXPLAIN_SECONDS:
            log.warning("%s is not there, looking again and again: %s", self._name, reason)
            self._reason, self._at = reason, now
