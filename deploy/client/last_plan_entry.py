"""How far an engine's plans got, by the last word about it in their log, between whose entries verdicts on earlier plans may stand."""

import time

from bus import Bus, Message, Received
from fleet.events import PlanJudged

_MARGIN_SECONDS = 60.0
"""A verdict is looked behind so far at first: it comes about so long after what it is about, and clocks differ."""
_FURTHER = 8.0
"""times as far is looked next"""
_MOST_SECONDS = 30 * 86400.0
"""Further back is all there is."""


async def before_verdicts(bus: Bus, newest: Received) -> Message | None:
    """The newest stored message on the subject of this one, which is that, or, where it is a verdict, was stored before it. None: there are only verdicts.

    Of a long log as little is read as there must be, since what it says of handovers is large. BusError as from `Bus.replay`.
    """
    if not isinstance(newest.message, PlanJudged):
        return newest.message
    seconds = max(time.time() - newest.published_at, 0.0) + _MARGIN_SECONDS
    while True:
        since = seconds if seconds < _MOST_SECONDS else None
        last: Message | None = None
        async for received in bus.replay(newest.subject, since=since, follow=False):
            if not isinstance(received.message, PlanJudged):
                last = received.message
        if last is not None or since is None:
            return last
        seconds *= _FURTHER
