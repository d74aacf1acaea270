"""Clients that disconnect: their answers are cancelled, once, and never after the answer's end."""

import asyncio
from collections.abc import Callable

import pytest

from router.api.client_connection import ClientWatch


class Client:
    """Client that stays until it leaves."""

    def __init__(self) -> None:
        self._callback: Callable[[], object] | None = None

    def on_disconnect(self, callback: Callable[[], object] | None) -> None:
        self._callback = callback

    def leave(self) -> None:
        if self._callback is not None:
            self._callback()


async def answer(client: Client, seconds: float) -> str:
    watch = ClientWatch(client.on_disconnect)
    watch.start()
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        return "left" if watch.client_disconnected() else "cancelled"
    finally:
        watch.stop()
    return "answered"


@pytest.mark.looptime
async def test_a_client_that_hangs_up_cancels_its_answer_alone() -> None:
    clients = [Client(), Client()]
    answers = [asyncio.create_task(answer(client, 1.0)) for client in clients]
    asyncio.get_running_loop().call_later(0.5, clients[0].leave)
    assert await asyncio.gather(*answers) == ["left", "answered"]


@pytest.mark.looptime
async def test_a_client_that_hangs_up_after_its_answer_cancels_nothing() -> None:
    client = Client()
    assert await answer(client, 1.0) == "answered"
    client.leave()
    await asyncio.sleep(1.0)


@pytest.mark.looptime
async def test_a_client_that_left_before_the_watch_began_is_noticed() -> None:
    class Gone(Client):
        def on_disconnect(self, callback: Callable[[], object] | None) -> None:
            if callback is not None:
                callback()

    assert await asyncio.create_task(answer(Gone(), 1.0)) == "left"


@pytest.mark.looptime
async def test_a_cancellation_by_another_task_is_distinguished() -> None:
    task = asyncio.create_task(answer(Client(), 1.0))
    await asyncio.sleep(0.1)
    task.cancel()
    assert await task == "cancelled"


@pytest.mark.looptime
async def test_a_server_without_the_extension_is_served_as_well() -> None:
    watch = ClientWatch(None)
    watch.start()
    watch.stop()
    assert not watch.client_disconnected()
