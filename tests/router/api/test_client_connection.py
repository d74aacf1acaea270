"""Clients that disconnect: detected late enough to cost nothing, early enough to matter, and never after the
answer.
"""

import asyncio
from typing import Any

import pytest

from router.api.client_connection import WATCH_AFTER_SECONDS, ClientWatch, ClientWatches


class Client:
    """Client that sends nothing until it disconnects."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.receives = 0

    async def receive(self) -> dict[str, Any]:
        self.receives += 1
        await self.left.wait()
        return {"type": "http.disconnect"}


async def answer(watches: ClientWatches, watch: ClientWatch, seconds: float) -> str:
    watches.start(watch, "r")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        return "left" if watch.client_disconnected() else "cancelled"
    finally:
        watch.stop()
    return "answered"


@pytest.mark.looptime
async def test_a_client_that_hangs_up_cancels_its_answer_alone() -> None:
    watches, clients = ClientWatches(), [Client(), Client()]
    answers = [asyncio.create_task(answer(watches, ClientWatch(client.receive), 1.0)) for client in clients]
    asyncio.get_running_loop().call_later(0.5, clients[0].left.set)
    assert await asyncio.gather(*answers) == ["left", "answered"]


@pytest.mark.looptime
async def test_short_answers_are_never_watched() -> None:
    watches, client = ClientWatches(), Client()
    for _ in range(3):
        assert await answer(watches, ClientWatch(client.receive), WATCH_AFTER_SECONDS / 2) == "answered"
    await asyncio.sleep(1.0)
    assert client.receives == 0


@pytest.mark.looptime
async def test_each_watch_begins_in_its_own_time() -> None:
    watches, clients = ClientWatches(), [Client(), Client()]
    loop = asyncio.get_running_loop()
    first = asyncio.create_task(answer(watches, ClientWatch(clients[0].receive), 1.0))
    await asyncio.sleep(WATCH_AFTER_SECONDS / 2)
    second = asyncio.create_task(answer(watches, ClientWatch(clients[1].receive), 1.0))
    began = loop.time()
    await asyncio.sleep(WATCH_AFTER_SECONDS * 0.6)
    assert [client.receives for client in clients] == [1, 0]
    await asyncio.sleep(WATCH_AFTER_SECONDS * 0.5)
    assert [client.receives for client in clients] == [1, 1]
    assert await asyncio.gather(first, second) == ["answered", "answered"]
    assert loop.time() - began == pytest.approx(1.0)


@pytest.mark.looptime
async def test_a_cancellation_by_another_task_is_distinguished() -> None:
    task = asyncio.create_task(answer(ClientWatches(), ClientWatch(Client().receive), 1.0))
    await asyncio.sleep(0.1)
    task.cancel()
    assert await task == "cancelled"
