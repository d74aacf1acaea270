"""Keyed queues, and requests that are repeated until they succeed."""

import asyncio
from itertools import pairwise

import pytest

from bus.keyed_queue import KeyedQueue, RetryQueue


async def test_a_key_waits_once_and_room_is_bounded() -> None:
    queue: KeyedQueue[int] = KeyedQueue(2)
    for key in (1, 1, 2, 3):
        queue.ask(key)
    assert len(queue) == 2
    assert [await queue.next(), await queue.next()] == [1, 2]
    waiting = asyncio.create_task(queue.next())
    await asyncio.sleep(0)
    queue.ask(1)
    assert await waiting == 1


class Requests:
    """Requests by key with their times; all fail until `works`."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, float]] = []
        self.works = False

    async def send(self, key: str) -> bool:
        self.sent.append((key, asyncio.get_running_loop().time()))
        return self.works

    def pauses(self, key: str) -> list[float]:
        return [later - sooner for sooner, later in pairwise(at for sent, at in self.sent if sent == key)]


@pytest.mark.looptime
async def test_a_failed_request_is_repeated_with_doubling_pauses_until_it_succeeds() -> None:
    requests = Requests()
    queue: RetryQueue[str] = RetryQueue(requests.send, 8, 1.0, 4.0)
    running = asyncio.create_task(queue.run())
    queue.ask("model")
    await asyncio.sleep(15.5)
    assert requests.pauses("model") == pytest.approx([1, 2, 4, 4, 4])
    requests.works = True
    await asyncio.sleep(60)
    assert len(requests.sent) == 7
    running.cancel()


@pytest.mark.looptime
async def test_a_key_that_fails_holds_no_other_up_and_a_new_demand_starts_over() -> None:
    requests = Requests()
    queue: RetryQueue[str] = RetryQueue(requests.send, 8, 1.0, 100.0)
    running = asyncio.create_task(queue.run())
    queue.ask("one")
    await asyncio.sleep(3.5)
    requests.works = True
    queue.ask("two")
    await asyncio.sleep(0)
    assert requests.sent[-1][0] == "two"
    requests.works = False
    queue.ask("one")
    await asyncio.sleep(1.25)
    assert requests.pauses("one") == pytest.approx([1, 2, 0.5, 1])
    running.cancel()
