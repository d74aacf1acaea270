"""Work about requests that neither an answer nor a decision waits for, done for many requests at a time."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

DELAY_SECONDS = 0.005
"""Delay of the first item. Done for one request after another, the work costs a quarter of what it
costs between their answers, when its code and data have left the processor's caches. 5 ms hold some twenty
requests of a busy router; their bookkeeping takes a fifth of a millisecond.
"""


class Bookkeeping:
    """Queue of such work, carried out in order. Use it on one event loop; outside of any, work is carried out
    at once. State: what waits, and a timer.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, work: Callable[..., object], *arguments: Any) -> None:
        """Call `work` with these arguments soon."""
        self._waiting.append((work, arguments))
        if self._timer is not None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.catch_up()
        else:
            self._timer = loop.call_later(DELAY_SECONDS, self.catch_up)

    def catch_up(self) -> None:
        """Carry out at once what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            work, arguments = self._waiting.popleft()
            try:
                work(*arguments)
            except Exception:
                log.exception("a fault of the router's bookkeeping; the rest of it continues")
