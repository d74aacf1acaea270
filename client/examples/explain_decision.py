"""Ask where a request would go, and what would change it; nothing is run or booked.

python -m client.examples.explain_decision ROUTER_URL MODEL [KEY_FILE]
"""

import asyncio
import sys
from pathlib import Path

from client import RoostClient


async def explain(url: str, model: str, key: str | None = None) -> str:
    """Return one sentence about the decision for a short prompt."""
    body = {"model": model, "prompt": [3, 1, 4, 1, 5], "max_tokens": 16}
    async with RoostClient(url, key) as roost:
        decision = await roost.decide(body, session="conversation-17")
        other = await roost.decide(body, gone=[decision.chosen])
    scores = ", ".join(f"{one.engine}/{one.rank} {one.score:.3f}" for one in decision.candidates)
    return f"{decision.chosen} ({decision.why}; {scores}); without it {other.chosen}"


if __name__ == "__main__":
    keys = [Path(name).read_text().strip() for name in sys.argv[3:4]]
    sys.stdout.write(asyncio.run(explain(sys.argv[1], sys.argv[2], *keys)) + "\n")
