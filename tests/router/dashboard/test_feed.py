"""The feed of the dashboard: what is computed when, and what each page gets."""

import asyncio
import json
from typing import Any

import pytest

from router.dashboard.feed import DashboardFeed, FeedPage
from router.dashboard.topic import Topic

PERIOD = 0.005


class Counting(Topic):
    """A view that a test changes."""

    def __init__(self, name: str = "numbers") -> None:
        self.name = name
        self.value: Any = 0
        self.viewed = 0
        self.seen = asyncio.Event()
        self.following = asyncio.Event()
        self.left = asyncio.Event()

    def view(self) -> Any:
        self.viewed += 1
        self.seen.set()
        if isinstance(self.value, Exception):
            raise self.value
        return {"value": self.value}

    async def follow(self) -> None:
        self.following.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def viewed_again(self, times: int = 2) -> None:
        for _ in range(times):
            self.seen.clear()
            await self.seen.wait()


def made(*topics: Topic, stopping: asyncio.Event | None = None) -> DashboardFeed:
    return DashboardFeed(topics, lambda: stopping is not None and stopping.is_set(), PERIOD)


async def value(page: FeedPage) -> Any:
    lines = (await page.next()).decode().splitlines()
    assert lines[0] == "event: numbers"
    return json.loads(lines[1].removeprefix("data: "))["value"]


async def test_a_page_gets_the_view_at_once_and_then_each_change() -> None:
    topic = Counting()
    with made(topic).page(["numbers"]) as page:
        assert await value(page) == 0
        topic.value = 7
        assert await value(page) == 7


async def test_what_does_not_change_is_not_sent_again() -> None:
    topic = Counting()
    with made(topic).page(["numbers"]) as page:
        await page.next()
        await topic.viewed_again()
        assert await page.next(0.0) == b": alive\n\n"


async def test_a_topic_is_computed_once_for_all_pages() -> None:
    topic = Counting()
    feed = made(topic)
    with feed.page(["numbers"]) as first:
        await first.next()
        before = topic.viewed
        with feed.page(["numbers"]) as second:
            assert await value(second) == 0
            assert topic.viewed == before


async def test_nothing_is_computed_or_followed_unless_a_page_watches() -> None:
    topic, other = Counting(), Counting("others")
    feed = made(topic, other)
    with feed.page(["numbers"]) as page:
        await page.next()
        await topic.following.wait()
    await topic.left.wait()
    before = topic.viewed
    with feed.page(["others"]) as page:
        await page.next()
        await other.viewed_again()
    assert topic.viewed == before
    with feed.page(["numbers"]) as page:
        topic.following.clear()
        assert await value(page) == 0, "it begins anew"
        await topic.following.wait()


async def test_a_slow_page_skips_what_came_in_between() -> None:
    topic = Counting()
    with made(topic).page(["numbers"]) as page:
        await page.next()
        for number in range(1, 5):
            topic.value = number
            await topic.viewed_again()
        assert await value(page) == 4
        assert await page.next(0.0) == b": alive\n\n"


async def test_pages_end_when_the_router_stops() -> None:
    topic, stopping = Counting(), asyncio.Event()
    feed = made(topic, stopping=stopping)
    with feed.page(["numbers"]) as page:
        await page.next()
        stopping.set()
        assert b"event: end" in await page.next()
        assert page.over
    with feed.page(["numbers"]) as late:
        assert b"the router stops" in await late.next()


async def test_a_view_that_fails_ends_its_pages_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    topic = Counting()
    feed = made(topic)
    with feed.page(["numbers"]) as page:
        await page.next()
        topic.value = ValueError("broken on purpose")
        assert b"event: end" in await page.next()
    assert "numbers failed" in caplog.text
    topic.value = 3
    with feed.page(["numbers"]) as page:
        assert await value(page) == 3


async def test_open_pages_are_counted() -> None:
    feed = made(Counting())
    with feed.page(["numbers"]), feed.page(["numbers"]):
        assert feed.open_pages == 2
    assert feed.open_pages == 0
