"""Feed of the dashboard: server-sent events, one per topic and change.

A topic is computed once a second for all pages together, while a page watches it, and encoded once. A page
gets the newest frame of each of its topics: one that reads slowly skips the frames in between, so that
nothing queues.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from router.dashboard.topic import Topic
from router.http.server_sent_events import written

log = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
MAX_PAGES = 32
"""Pages that may be open at one router process."""
HEARTBEAT_SECONDS = 10.0
"""Interval of comments while nothing changes, so that both sides notice a dead connection."""
END = "end"
"""Last event of a feed that the router ends."""


class FeedPage:
    """Feed of one open page."""

    def __init__(self, channels: Sequence["_Channel"], ended: str | None) -> None:
        """ended: reason why the feed is over already."""
        self._channels = channels
        self._sent = dict.fromkeys(channels, 0)
        self._reason = ended
        self._changed = asyncio.Event()
        self.over = False
        """`next` has returned the last piece"""

    async def next(self, seconds: float = HEARTBEAT_SECONDS) -> bytes:
        """Return the newest frames that this page has not got, or a comment when there are none for
        these seconds.
        """
        try:
            async with asyncio.timeout(seconds):
                while not (piece := self._take()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return b": alive\n\n"
        return piece

    def _take(self) -> bytes:
        if self._reason is not None:
            self.over = True
            return end_frame(self._reason)
        fresh = [channel for channel in self._channels if channel.version != self._sent[channel]]
        self._sent.update((channel, channel.version) for channel in fresh)
        return b"".join(channel.frame for channel in fresh)

    def wake(self) -> None:
        """Look for newer frames."""
        self._changed.set()

    def end(self, reason: str) -> None:
        """End the feed in place of the next frame."""
        self._reason = reason
        self._changed.set()


class _Channel:
    """One topic and the pages that watch it."""

    def __init__(self, topic: Topic, period: float, is_stopping: Callable[[], bool]) -> None:
        self.topic = topic
        self.frame = b""
        self.version = 0
        self._period = period
        self._is_stopping = is_stopping
        self._pages: set[FeedPage] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, page: FeedPage) -> None:
        self._pages.add(page)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"shows {self.topic.name} to pages")
            self._task.add_done_callback(self._failed)

    def remove(self, page: FeedPage) -> None:
        self._pages.discard(page)
        if not self._pages and self._task is not None:
            self._task.cancel()
            self._task, self.frame = None, b""

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.topic.follow(), name=f"follows {self.topic.name} for pages")
            while True:
                if self._is_stopping():
                    self._end("the router stops")
                self._refresh()
                await asyncio.sleep(self._period)

    def _refresh(self) -> None:
        frame = written(self.topic.name, msgspec.json.encode(self.topic.view()))
        if frame != self.frame:
            self.frame = frame
            self.version += 1
            for page in self._pages:
                page.wake()

    def _end(self, reason: str) -> None:
        for page in self._pages:
            page.end(reason)

    def _failed(self, task: asyncio.Task[None]) -> None:
        if task is self._task:
            self._task, self.frame = None, b""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the dashboard's topic %s failed", self.topic.name, exc_info=error)
            self._end(f"the view {self.topic.name} failed; the router's log says why")


class DashboardFeed:
    """All topics and pages of one router process. is_stopping: true once the router stops; then the pages
    end within a period.
    """

    def __init__(
        self, topics: Iterable[Topic], is_stopping: Callable[[], bool], period: float = PERIOD_SECONDS
    ) -> None:
        self._is_stopping = is_stopping
        self._channels = {topic.name: _Channel(topic, period, is_stopping) for topic in topics}
        self._open = 0

    @property
    def topics(self) -> tuple[str, ...]:
        """Names of the topics."""
        return tuple(self._channels)

    @property
    def open_pages(self) -> int:
        """Number of pages that read the feed."""
        return self._open

    @contextmanager
    def page(self, names: Iterable[str]) -> Iterator[FeedPage]:
        """Watch these topics while the context lasts."""
        channels = [self._channels[name] for name in dict.fromkeys(names)]
        page = FeedPage(channels, "the router stops" if self._is_stopping() else None)
        self._open += 1
        for channel in channels:
            channel.add(page)
        try:
            yield page
        finally:
            self._open -= 1
            for channel in channels:
                channel.remove(page)


def end_frame(reason: str) -> bytes:
    """Return the last event of a feed."""
    return written(END, msgspec.json.encode({"reason": reason}))
