"""Print the engines of a fleet with their load, and what the planner would do for each.

python -m client.examples.watch_fleet ROUTER_URL [KEY_FILE]
"""

import asyncio
import sys
from pathlib import Path

from client import RoostClient, RoostError


async def overview(url: str, key: str | None = None) -> list[str]:
    """Return one line per engine."""
    lines = []
    async with RoostClient(url, key) as roost:
        for engine in (await roost.status()).engines:
            requests = sum(rank.requests for rank in engine.ranks)
            try:
                plan = await roost.plan(engine.engine)
            except RoostError as error:
                planned = str(error)
            else:
                planned = plan.refused or f"plan {plan.id}: {plan.copies} copies"
            lines.append(
                f"{engine.engine}: {engine.state}, epoch {engine.epoch}, {requests} requests; {planned}"
            )
    return lines


if __name__ == "__main__":
    keys = [Path(name).read_text().strip() for name in sys.argv[2:3]]
    sys.stdout.write("\n".join(asyncio.run(overview(sys.argv[1], *keys))) + "\n")
