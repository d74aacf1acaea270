"""Last plan entry in an engine's log, skipping verdicts on earlier plans that may follow it."""

import time

from bus import Bus, Message, Received
from fleet.facts.migrations import PlanEvaluated

_MARGIN_SECONDS = 60.0
"""First search window before a verdict. A verdict follows its plan after about this time; clocks differ."""
_FURTHER = 8.0
"""Growth factor of the search window."""
_MOST_SECONDS = 30 * 86400.0
"""Largest search window; beyond it the whole log is read."""


async def before_verdicts(bus: Bus, newest: Received) -> Message | None:
    """Return the newest stored message on this subject that is not a verdict. None: there are only verdicts.

    If `newest` is a verdict, searches backwards from it. Reads as little of a long log as possible, since
    handover records are large. Raises BusError as `Bus.replay` does.
    """
    if not isinstance(newest.message, PlanEvaluated):
        return newest.message
    seconds = max(time.time() - newest.published_at, 0.0) + _MARGIN_SECONDS
    while True:
        since = seconds if seconds < _MOST_SECONDS else None
        last: Message | None = None
        async for received in bus.replay(newest.subject, since=since, follow=False):
            if not isinstance(received.message, PlanEvaluated):
                last = received.message
        if last is not None or since is None:
            return last
        seconds *= _FURTHER
