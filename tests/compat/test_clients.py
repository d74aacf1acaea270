"""OpenAI's own client before a recorded vLLM: it returns and raises the same through a real `roost router`
process as without it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.compat.exchange import neutral
from tests.compat.replay import Replay
from tests.conftest import free_port
from tests.web_server import served_web

ROOT = Path(__file__).parents[2]


async def returned(client: str, base: str) -> list[str]:
    """What each call of a client returned or raised, a line each, without ids and times."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.compat.clients", client, base, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    assert child.returncode == 0
    return neutral(out).decode().splitlines()


@asynccontextmanager
async def router_before(server: str) -> AsyncIterator[str]:
    """The router as it is run, on its own event loop; its base URL."""
    url = f"http://127.0.0.1:{free_port()}"
    roost = [
        sys.executable,
        "-c",
        "from deploy.cli import main; main()",
        "router",
        "--port",
        url.rpartition(":")[2],
        "--backend",
        server,
    ]
    child = await asyncio.create_subprocess_exec(*roost, "--access-log", "none", cwd=ROOT)
    try:
        async with asyncio.timeout(30), httpx.AsyncClient() as client:
            while not await answers(client, f"{url}/ready"):  # noqa: ASYNC110 another process has no event
                await asyncio.sleep(0.05)
        yield url
    finally:
        child.terminate()
        await child.wait()


async def answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.HTTPError:
        return False


async def test_the_openai_client_sees_no_difference() -> None:
    replay = Replay()
    async with served_web(replay.app()) as server, router_before(server) as router:
        direct, routed = await returned("openai", server), await returned("openai", router)
    assert len(direct) > 60
    assert [pair for pair in zip(direct, routed, strict=True) if pair[0] != pair[1]] == []
    assert replay.unknown == []
