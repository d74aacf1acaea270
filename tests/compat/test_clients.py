"""OpenAI's own client before a recorded vLLM: it returns and raises the same through Roost as without it."""

import asyncio
import sys
from pathlib import Path

from tests.compat.exchange import neutral
from tests.compat.replay import Replay
from tests.router.houses import OpenHouse, served_web, until

ROOT = Path(__file__).parents[2]


async def returned(client: str, base: str) -> list[str]:
    """What each call of a client returned or raised, a line each, without ids and times."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.compat.clients", client, base, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    assert child.returncode == 0
    return neutral(out).decode().splitlines()


async def test_the_openai_client_sees_no_difference(open_house: OpenHouse) -> None:
    replay = Replay()
    async with served_web(replay.app()) as server:
        house = await open_house(bus=False, backends=(server,), probe_seconds=0.05)
        await until(lambda: house.service.view.models(live=True))
        direct, routed = await returned("openai", server), await returned("openai", house.url)
    assert len(direct) > 60
    assert [pair for pair in zip(direct, routed, strict=True) if pair[0] != pair[1]] == []
    assert replay.unknown == []
