"""Engine of real ranks in processes of their own whose layout a real planner switches on request."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rig.engine_ranks import Carried, Ranks, Requester, ranks_of, requester
from benchmarks.rig.flip_rank import Job
from benchmarks.rig.processes import ROOST, nats, process
from fleet.experts import ModelShape
from fleet.layout import AttentionKind
from fleet.requests.plans import SetLayout

RANKS = 2
ENGINE = "turning"
WARM_SECONDS = 2.0


class Rig(NamedTuple):
    """The engine, and its planner."""

    ranks: Ranks
    asking: Requester

    async def switch(self, layers: int, *, sharded: bool, attention: AttentionKind = "dp") -> Carried:
        """Turn all layers over, or change the attention, or both, without waiting for the planner's
        budget."""
        wanted = tuple(range(layers)) if sharded else ()
        request = SetLayout(engine=ENGINE, sharded=wanted, attention=attention, now=True)
        return await self.asking.carry_out(request)


@asynccontextmanager
async def turning_engine(
    shape: ModelShape,
    checkpoint: Path,
    transfer: Mapping[str, Any],
    *,
    spare_layers: int = 1,
    sequences: int = 0,
    settings: Mapping[str, Any] | None = None,
    program: str = "benchmarks.rig.flip_rank",
) -> AsyncIterator[Rig]:
    """Run the engine until the context ends.

    transfer, settings: of `TransferConfig` and `EmbeddedConfig`. sequences: answers at a time per rank under
    closed load. program: module of a rank.
    """
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(nats())
        planner = checkpoint.parent / "roost.toml"
        planner.write_text("[planner]\nautomatic = false\n")
        await stack.enter_async_context(
            process([*ROOST, "planner", "--nats", url, "--config", str(planner)], None)
        )
        job = Job(
            nats=url,
            engine=ENGINE,
            worker_id=secrets.randbits(63),
            ranks=RANKS,
            slots=-(-shape.experts // RANKS),
            ballast_bytes=0,
            sequences=sequences,
            transfer={"audit_seconds": 0, **transfer},
            checkpoint=str(checkpoint),
            spare_layers=spare_layers,
            settings=dict(settings or {}),
        )
        ranks = await stack.enter_async_context(ranks_of(job, program))
        await asyncio.sleep(WARM_SECONDS)
        yield Rig(ranks, await stack.enter_async_context(requester(url, ENGINE)))
