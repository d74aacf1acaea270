"""Listening, serving, and stopping within a bound."""

import asyncio
import contextlib
import gc
import socket
from typing import Any

import pytest

from deploy.http.limited_protocol import LimitedProtocol
from deploy.http.server import HttpServer
from deploy.http.sockets import CannotListen, HttpError, adopt, listen, probe, url_of


class App:
    """Answers /slow when told to, everything else at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        self.asked.set()
        if scope["path"] == "/slow":
            await self.go.wait()
        await send(
            {
                "type": "http.response.start",
                "status": 404 if scope["path"] == "/missing" else 200,
                "headers": [],
            }
        )
        await send({"type": "http.response.body", "body": b"hello"})


async def test_pages_are_served_and_other_statuses_raise() -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with HttpServer(App(), listener, drain_seconds=1):
        await probe(f"{url_of(listener)}/page")
        with pytest.raises(HttpError, match="HTTP 404"):
            await probe(f"{url_of(listener)}/missing")
    with pytest.raises(OSError, match="Connect call failed"):
        await probe(f"http://127.0.0.1:{port}")


async def test_a_closed_connection_leaves_no_ring_of_references() -> None:
    def connections() -> int:
        return sum(type(one) is LimitedProtocol for one in gc.get_objects())

    listener = listen("127.0.0.1", 0)
    gc.collect()
    before = connections()
    gc.disable()
    try:
        async with HttpServer(App(), listener, drain_seconds=1):
            for _ in range(3):
                await probe(f"{url_of(listener)}/page")
            async with asyncio.timeout(5):
                while connections() > before:  # noqa: ASYNC110 (the connections end in their own time)
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_connections_send_without_delay() -> None:
    with listen("127.0.0.1", 0) as listener:
        _, writer = await asyncio.open_connection(*listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await writer.wait_closed()


async def test_an_open_request_is_finished_before_the_stop() -> None:
    app, listener = App(), listen("127.0.0.1", 0)
    async with HttpServer(app, listener, drain_seconds=5):
        asking = asyncio.create_task(probe(f"{url_of(listener)}/slow"))
        await app.asked.wait()
        asyncio.get_running_loop().call_later(0.3, app.go.set)
    await asking


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_accepted_just_before_the_stop_is_closed(turns: int) -> None:
    """After any number of turns of the event loop, of which accepting takes several."""
    listener = listen("127.0.0.1", 0)
    with socket.socket() as client:
        async with HttpServer(App(), listener, drain_seconds=1):
            await probe(url_of(listener))
            client.connect(listener.getsockname())
            client.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


async def test_a_request_that_never_ends_delays_the_stop_by_a_bound_only() -> None:
    app, listener = App(), listen("127.0.0.1", 0)
    clock = asyncio.get_running_loop().time
    async with HttpServer(app, listener, drain_seconds=1):
        asking = asyncio.create_task(probe(f"{url_of(listener)}/slow"))
        await app.asked.wait()
        before = clock()
    assert 0.9 < clock() - before < 4
    with pytest.raises(HttpError, match="HTTP 500"):
        await asking


def test_addresses_that_cannot_be_bound_are_refused_with_the_remedy() -> None:
    with pytest.raises(CannotListen, match=r"cannot listen on 'no\.such\.host\.invalid'.*--host"):
        listen("no.such.host.invalid", 0)
    with (
        listen("127.0.0.1", 0) as listener,
        pytest.raises(CannotListen, match=r"Address already in use.*--port"),
    ):
        listen("127.0.0.1", listener.getsockname()[1])


def test_a_descriptor_that_is_no_socket_is_refused() -> None:
    with pytest.raises(CannotListen, match="file descriptor 987654 is no socket"):
        adopt(987654)


def test_urls_are_those_a_client_here_can_use() -> None:
    with listen("0.0.0.0", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_face_that_stops_serving_by_itself_is_a_failure() -> None:
    async def broken(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.failed", "message": "no"})

    async with HttpServer(broken, listen("127.0.0.1", 0), drain_seconds=1) as face:
        with pytest.raises(RuntimeError, match="the application did not start"):
            await asyncio.wait_for(face.failed(), 5)
