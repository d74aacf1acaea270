"""TLS on both doors, with real certificates: who is believed, who is refused, and renewal under open
connections."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from deploy.http.limits import LIMITS, HttpLimits
from deploy.http.server import HttpServer
from deploy.http.sockets import listen, probe, url_of
from deploy.http.write_coalescing import WriteCoalescing
from deploy.security.tls import CertificateError, ServerTls
from router.config import RouterConfig
from router.upstream.http_client import HttpClient
from router.upstream.rank_client import Upstream, UpstreamFailed
from tests.certificates import Certificate, certificate


@pytest.fixture
def made(tmp_path: Path) -> Certificate:
    return certificate(tmp_path, "127.0.0.1", "localhost")


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the scheme and the body that came."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode() + b" " + body})


@asynccontextmanager
async def served(tls: ServerTls, limits: HttpLimits = LIMITS) -> AsyncIterator[str]:
    door = listen("127.0.0.1", 0)
    url = url_of(door, tls=True)
    async with HttpServer(echo, door, drain_seconds=0.5, limits=limits, tls=tls):
        yield url


async def answered(url: str, ca: Path | None, body: bytes = b"hello") -> bytes:
    """What a router that trusts `ca` reads there."""
    whole = b""
    async with (
        Upstream(RouterConfig(upstream_ca=ca, connect_seconds=5.0)) as upstream,
        upstream.call(url, "/", body, []) as call,
    ):
        while data := await call.read():
            whole += data
    return whole


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_router_speaks_tls_with_a_door_whose_authority_it_knows(made: Certificate, loop: Any) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(_spoken_with(made))


async def _spoken_with(made: Certificate) -> None:
    large = bytes(range(256)) * 8192
    async with served(ServerTls(made.cert, made.key)) as url:
        assert url.startswith("https://127.0.0.1:")
        assert await answered(url, made.ca) == b"https hello"
        assert await answered(url, made.ca, large) == b"https " + large
        await probe(f"{url}/health")  # the supervisor's, which believes any certificate of its own machine


async def test_a_connection_under_tls_is_kept_for_the_next_request(made: Certificate) -> None:
    async with served(ServerTls(made.cert, made.key)) as url:
        async with Upstream(RouterConfig(upstream_ca=made.ca)) as upstream:
            bodies = [await upstream.get(url, "/", {}, seconds=5, max_bytes=100) for _ in range(3)]
        assert bodies == [b"https "] * 3
        client = HttpClient(60.0, made.ca)
        origin = client.origin(url)
        first = await client.connect(origin, 5)
        first.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        while await first.read():
            pass
        client.give_back(origin, first)
        assert await client.connect(origin, 5) is first
        first.cut("the test is over")


async def test_a_stranger_with_a_certificate_of_his_own_is_not_sent_a_request(
    made: Certificate, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    forged = certificate(tmp_path / "other", "127.0.0.1")
    misnamed = ServerTls(*_pair(certificate(_folder(tmp_path / "name"), "elsewhere.example")))
    for tls, ca, complaint in (
        (ServerTls(forged.cert, forged.key), made.ca, "certificate verify failed"),
        (ServerTls(made.cert, made.key), None, "certificate verify failed"),
        (misnamed, tmp_path / "name" / "ca.pem", "IP address mismatch"),
    ):
        async with served(tls) as url:
            with pytest.raises(UpstreamFailed, match=complaint):
                await answered(url, ca)


async def test_plain_http_is_not_answered_on_a_tls_door(made: Certificate) -> None:
    async with served(ServerTls(made.cert, made.key)) as url:
        with pytest.raises(UpstreamFailed):
            await answered(url.replace("https://", "http://"), None)


async def test_a_certificate_is_renewed_while_connections_are_open(made: Certificate) -> None:
    tls = ServerTls(made.cert, made.key)
    async with served(tls) as url:
        async with Upstream(RouterConfig(upstream_ca=made.ca)) as upstream:
            assert await upstream.get(url, "/", {}, seconds=5, max_bytes=100) == b"https "
            renewed = made.renew("127.0.0.1")
            tls.check()
            tls.load()
            assert (
                await upstream.get(url, "/", {}, seconds=5, max_bytes=100) == b"https "
            )  # on the kept connection
        assert await answered(url, renewed.ca) == b"https hello"


def test_a_certificate_that_cannot_be_used_is_named_and_leaves_the_old_in_force(made: Certificate) -> None:
    tls = ServerTls(made.cert, made.key)
    made.key.write_text("-----BEGIN NOTHING-----\n")
    with pytest.raises(CertificateError, match=r"cert\.pem with the key .*key\.pem cannot be used"):
        tls.check()
    made.cert.unlink()
    with pytest.raises(CertificateError, match="cannot be used"):
        ServerTls(made.cert, made.key)


async def test_old_versions_of_tls_are_refused(made: Certificate) -> None:
    async with served(ServerTls(made.cert, made.key)) as url:
        context = ssl.create_default_context(cafile=str(made.ca))
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), ssl=context)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _pair(made: Certificate) -> tuple[Path, Path]:
    return made.cert, made.key


async def test_a_router_believes_another_authority_after_a_reload(made: Certificate) -> None:
    tls, config = ServerTls(made.cert, made.key), RouterConfig(upstream_ca=made.ca)
    async with served(tls) as url, Upstream(config) as upstream:
        renewed = made.renew("127.0.0.1")
        tls.load()
        async with asyncio.timeout(5):
            upstream.reconfigure(config)
            assert await upstream.get(url, "/", {}, seconds=5, max_bytes=100) == b"https "
            renewed.ca.write_text("no certificate")
            with pytest.raises(OSError, match=r"upstream_ca .*ca\.pem cannot be used"):
                upstream.reconfigure(config)
            assert await upstream.get(url, "/", {}, seconds=5, max_bytes=100) == b"https "


async def test_a_file_of_authorities_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"upstream_ca .*missing cannot be used"):
        async with Upstream(RouterConfig(upstream_ca=tmp_path / "missing")):
            pass


async def test_a_connection_may_be_closed_twice_under_tls(made: Certificate) -> None:
    loop, closed = asyncio.get_running_loop(), asyncio.Event()

    class Twice(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            gathering = WriteCoalescing(transport, loop)
            gathering.close()
            gathering.close()
            closed.set()

    server = await loop.create_server(Twice, "127.0.0.1", 0, ssl=ServerTls(made.cert, made.key).context)
    async with server:
        context = ssl.create_default_context(cafile=str(made.ca))
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=context)
        assert await reader.read() == b""
        writer.close()
    assert closed.is_set()


@pytest.mark.parametrize("sent", [b"", bytes.fromhex("16030100f4010000f00303")])
async def test_a_handshake_that_does_not_go_on_is_cut_like_a_slow_head(
    made: Certificate, sent: bytes
) -> None:
    async with served(ServerTls(made.cert, made.key), HttpLimits(head_seconds=0.2)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(sent)
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
        assert await answered(url, made.ca) == b"https hello"
