"""Parts without another HTTP face show their metrics when told where."""

import asyncio
import urllib.error
import urllib.request
from contextlib import AsyncExitStack

import pytest

from deploy.doors import CannotListen
from deploy.scraping import offer_metrics
from tests.conftest import free_port


def page(port: int, path: str) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
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


@pytest.mark.parametrize("address", ["", "9464", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:99999"])
async def test_what_is_no_address_is_refused_with_the_remedy(address: str) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(CannotListen, match="HOST:PORT"):
            await offer_metrics(stack, address, lambda: b"")
