"""Parts without another HTTP face show their metrics when told where."""

import asyncio
import urllib.error
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from deploy.http.metrics_server import offer_metrics
from deploy.http.sockets import CannotListen
from tests.conftest import free_port


def page(port: int, path: str, key: str | None = None) -> tuple[int, str, bytes]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers), timeout=5
        ) as answer:
            return answer.status, answer.headers["content-type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["content-type"], error.read()


async def test_metrics_and_health_are_served_where_asked_and_nowhere_afterwards() -> None:
    port = free_port()
    async with AsyncExitStack() as stack:
        await offer_metrics(stack, f"127.0.0.1:{port}", lambda: b"roost_things_total 3.0\n")
        status, kind, body = await asyncio.to_thread(page, port, "/metrics")
        assert (status, body) == (200, b"roost_things_total 3.0\n")
        assert kind.startswith("text/plain; version=0.0.4")
        assert (await asyncio.to_thread(page, port, "/health"))[0] == 200
        status, _, body = await asyncio.to_thread(page, port, "/elsewhere")
        assert status == 404
        assert b"/metrics" in body
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(page, port, "/metrics")


async def test_metrics_may_ask_for_a_key_and_health_never_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port, key = free_port(), tmp_path / "key"
    key.write_text("a-key-for-the-scraper\n")
    async with AsyncExitStack() as stack:
        await offer_metrics(stack, f"127.0.0.1:{port}", lambda: b"roost_things_total 3.0\n", key)
        assert (await asyncio.to_thread(page, port, "/metrics"))[0] == 401
        assert (await asyncio.to_thread(page, port, "/metrics", "a-key-for-others"))[0] == 401
        assert (await asyncio.to_thread(page, port, "/health"))[0] == 200
        assert (await asyncio.to_thread(page, port, "/metrics", "a-key-for-the-scraper"))[0] == 200
    assert not caplog.text
    key.write_text("short")
    async with AsyncExitStack() as stack:
        with pytest.raises(CannotListen, match=r"metrics_key_file .*key: secret 1 must be"):
            await offer_metrics(stack, f"127.0.0.1:{port}", lambda: b"", key)


async def test_metrics_for_other_machines_without_a_key_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with AsyncExitStack() as stack:
        await offer_metrics(stack, "0.0.0.0:0", lambda: b"")
    assert "other machines may read /metrics on 0.0.0.0:0 without a key" in caplog.text


@pytest.mark.parametrize("address", ["", "9464", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:99999"])
async def test_what_is_no_address_is_refused_with_the_remedy(address: str) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(CannotListen, match="HOST:PORT"):
            await offer_metrics(stack, address, lambda: b"")
