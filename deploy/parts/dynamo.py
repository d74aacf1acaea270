"""Ranks of one of our engines as a worker of a Dynamo deployment (`roost worker --dynamo`)."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from deploy.launch_spec import RankLaunch
from deploy.parts.part_tasks import PartTasks
from engine_adapter.dynamo.address import COMPONENT, PREFILL_COMPONENT, DynamoAddress
from engine_adapter.dynamo.card import card_of
from engine_adapter.dynamo.connection import DynamoConnection, DynamoPlanes
from engine_adapter.dynamo.membership import DynamoMembership
from engine_adapter.dynamo.requests import DisaggregationMode
from engine_adapter.dynamo.worker import DynamoWorker, WorkerRank
from engine_adapter.engine import RankFacts
from engine_adapter.serving.http import RankTracing

_LOOK_SECONDS = 0.02


class DynamoSide:
    """Way of one process's ranks into Dynamo: opened before their agents start, joined once they serve."""

    def __init__(self, membership: DynamoMembership) -> None:
        self._membership = membership

    def report(self, rank: int) -> Callable[[RankFacts], None]:
        """Return the function that takes a rank's facts."""
        return partial(self._membership.report, rank)

    async def join(self, tasks: PartTasks, name: str) -> asyncio.Task[None]:
        """Join, and leave first of all when the part ends. Return the task that ends with DynamoFailed if the
        runtime does. Raises DynamoFailed."""
        await tasks.enter_async_context(self._membership)
        return await tasks.start(self._membership.failed(), f"{name} in Dynamo")


async def open_dynamo(
    address: str,
    environment: Mapping[str, str],
    ranks: Sequence[WorkerRank],
    tracings: Mapping[int, RankTracing],
    launch: RankLaunch,
    *,
    folder: Path,
    max_running: int,
    drain_seconds: float,
    mode: DisaggregationMode = "agg",
    all_idle: Callable[[], Awaitable[None]] | None = None,
) -> DynamoSide:
    """Connect to Dynamo's runtime. Raises DynamoFailed.

    address: `worker.dynamo`. ranks: those of this process, consecutive. folder: with the model's tokenizer.
    all_idle: waits for the ranks of other processes before this one ends.
    """
    numbered = {rank.description.rank: rank for rank in ranks}
    card = card_of(
        ranks[0].description,
        folder,
        ranks=len(ranks),
        max_running=max_running,
        engine=launch.engine,
        worker_id=launch.worker_id,
        mode=mode,
    )
    place = DynamoAddress.parse(address, PREFILL_COMPONENT if mode == "prefill" else COMPONENT)
    connection = await DynamoConnection.open(planes(environment), place)
    worker = DynamoWorker(numbered, tracings, mode)
    membership = DynamoMembership(connection, worker, numbered, card, drain_seconds, all_idle)
    await membership.open()
    return DynamoSide(membership)


def planes(environment: Mapping[str, str]) -> DynamoPlanes:
    """Return the choices of Dynamo's own variables, with its own defaults."""
    chosen = DynamoPlanes()
    return DynamoPlanes(
        discovery=environment.get("DYN_DISCOVERY_BACKEND", chosen.discovery),
        requests=environment.get("DYN_REQUEST_PLANE", chosen.requests),
        events=environment.get("DYN_EVENT_PLANE", chosen.events),
    )


async def idle_together(meeting: Path, rank: int, ranks: int) -> None:
    """Return once every rank of an engine has called this. The ranks step together, so the first to end would
    break the streams of the others."""
    (meeting / f"idle-{rank}").touch()
    while not all((meeting / f"idle-{other}").exists() for other in range(ranks)):  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_SECONDS)
