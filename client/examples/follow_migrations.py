"""Follow the migrations of a fleet: each once, also when a router restarts. Keep the position of the last
event, and the next run continues there.

python -m client.examples.follow_migrations ROUTER_URL [KEY_FILE]
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from client import MissedEvents, RoostClient
from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationPlanned


async def follow(url: str, key: str | None = None, after: int | None = None) -> AsyncIterator[str]:
    """Yield a line about each migration of the last hour, or behind a position, and then of new ones."""
    async with RoostClient(url, key) as roost, aclosing(roost.migrations(since="1h", after=after)) as events:
        async for event in events:
            if isinstance(event, MissedEvents):
                yield f"some events are lost: {event.reason}"
                continue
            match event.message:
                case MigrationPlanned(plan=plan, engine=engine, copies=copies):
                    yield f"{event.position}: plan {plan} of {engine} begins, {copies} copies"
                case MigrationCommitted(plan=plan, last=True, epoch=epoch):
                    yield f"{event.position}: plan {plan} is done, epoch {epoch}"
                case MigrationAborted(plan=plan, reason=reason):
                    yield f"{event.position}: plan {plan} was aborted: {reason}"


async def main(url: str, key: str | None = None) -> None:
    async for line in follow(url, key):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *(Path(name).read_text().strip() for name in sys.argv[2:3])))
