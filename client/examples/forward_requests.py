"""Forward a request on one's own connection to the rank that the router chose, and report its course, so that
the router's next decisions count it.

python -m client.examples.forward_requests ROUTER_URL MODEL [KEY_FILE] [RANK_KEY_FILE]

The second key is for the ranks. Those of `roost up` serve routers alone: theirs is the fleet's secret.
"""

import asyncio
import sys
from pathlib import Path

import aiohttp

from client import RoostClient


async def forward(
    url: str, model: str, key: str | None = None, rank_key: str | None = None
) -> tuple[str, int]:
    """Return the name of the chosen rank, and the number of pieces that its answer had."""
    body = {"model": model, "prompt": [3, 1, 4, 1, 5], "max_tokens": 16, "stream": True}
    headers = {} if rank_key is None else {"authorization": f"Bearer {rank_key}"}
    pieces = 0
    async with RoostClient(url, key) as roost, roost.reserved(body, wait=True) as chosen:
        salted = body if chosen.cache_salt is None else body | {"cache_salt": chosen.cache_salt}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{chosen.url}/v1/completions", json=salted) as answer,
        ):
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    if not pieces:
                        await roost.release(chosen.id, first_token=True)
                    pieces += 1
    return chosen.chosen, pieces


if __name__ == "__main__":
    keys = [Path(name).read_text().strip() for name in sys.argv[3:5]]
    sys.stdout.write(
        "{} answered in {} pieces\n".format(*asyncio.run(forward(sys.argv[1], sys.argv[2], *keys)))
    )
