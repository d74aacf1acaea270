"""Bookkeeping: done soon, in order, for many requests at a time."""

import asyncio

import pytest

from router.telemetry.bookkeeping import DELAY_SECONDS, Bookkeeping


@pytest.mark.looptime
async def test_what_waits_is_done_together_in_order_after_a_moment() -> None:
    bookkeeping, done = Bookkeeping(), list[tuple[int, float]]()
    loop = asyncio.get_running_loop()
    began = loop.time()
    for number in range(3):
        bookkeeping.add(lambda number: done.append((number, loop.time())), number)
        await asyncio.sleep(DELAY_SECONDS / 4)
    assert not done
    await asyncio.sleep(DELAY_SECONDS)
    assert [number for number, _ in done] == [0, 1, 2]
    assert [at - began for _, at in done] == pytest.approx([DELAY_SECONDS] * 3)


@pytest.mark.looptime
async def test_a_router_that_stops_does_it_at_once_and_only_once() -> None:
    bookkeeping, done = Bookkeeping(), list[int]()
    bookkeeping.add(done.append, 1)
    bookkeeping.catch_up()
    assert done == [1]
    await asyncio.sleep(2 * DELAY_SECONDS)
    assert done == [1]


@pytest.mark.looptime
async def test_a_failure_is_logged_and_what_follows_is_done(caplog: pytest.LogCaptureFixture) -> None:
    bookkeeping, done = Bookkeeping(), list[int]()
    bookkeeping.add(int, "no number")
    bookkeeping.add(done.append, 1)
    await asyncio.sleep(2 * DELAY_SECONDS)
    assert done == [1]
    assert "ValueError: invalid literal" in caplog.text


def test_outside_of_an_event_loop_it_is_done_at_once() -> None:
    bookkeeping, done = Bookkeeping(), list[int]()
    bookkeeping.add(done.append, 1)
    assert done == [1]
