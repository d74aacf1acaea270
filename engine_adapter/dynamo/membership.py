"""Membership of a worker in a Dynamo deployment: in discovery while it serves, its events, and an end that
breaks no stream."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from engine_adapter.dynamo.card import WorkerCard
from engine_adapter.dynamo.kv_events import KvEventTranslator
from engine_adapter.dynamo.worker import DynamoWorker, RequestContext, WorkerRank
from engine_adapter.engine import RankFacts, RankLoad

log = logging.getLogger(__name__)
RequestHandler = Callable[[object, RequestContext], AsyncGenerator[dict[str, Any]]]


class DynamoFailed(Exception):
    """Dynamo's runtime cannot be used. The text states the reason."""


class DynamoLink(Protocol):
    """Connection to Dynamo's runtime. Implemented in `connection`."""

    @property
    def instance_id(self) -> int: ...

    async def open_publishers(self, ranks: range, block_size: int) -> None: ...

    def publish_kv(self, rank: int, events: list[dict[str, Any]]) -> None: ...

    def publish_load(self, rank: int, load: RankLoad) -> None: ...

    async def register(self, card: WorkerCard) -> None: ...

    async def serve(self, handler: RequestHandler, model: str) -> None: ...

    async def ended(self) -> None: ...

    async def withdraw(self) -> None: ...

    async def close(self) -> None: ...


class DynamoMembership:
    """Membership of one worker, while the context lasts. `open` must be awaited before; facts may be reported
    from then on."""

    def __init__(
        self,
        connection: DynamoLink,
        worker: DynamoWorker,
        ranks: Mapping[int, WorkerRank],
        card: WorkerCard,
        drain_seconds: float,
        all_idle: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """drain_seconds: time for open requests to finish at the end. all_idle: waits for the engine's ranks
        in other processes, called once this worker is idle."""
        self._connection = connection
        self._worker = worker
        self._card = card
        self._drain_seconds = drain_seconds
        self._all_idle = all_idle
        self._translators = {rank: KvEventTranslator(one.stored_block) for rank, one in ranks.items()}

    async def open(self) -> None:
        """Get ready to publish."""
        ranks = range(self._card.first_rank, self._card.first_rank + self._card.ranks)
        await self._connection.open_publishers(ranks, self._card.block_size)

    def report(self, rank: int, facts: RankFacts) -> None:
        """Publish the KV changes and the load of a rank."""
        events = self._translators[rank].events(facts.kv)
        if events:
            self._connection.publish_kv(rank, events)
        self._connection.publish_load(rank, facts.load)

    async def __aenter__(self) -> Self:
        await self._connection.register(self._card)
        await self._connection.serve(self._worker.generate, self._card.model)
        log.info(
            "%s serves %s in Dynamo as instance %016x, ranks %d to %d",
            self._card.engine,
            self._card.model,
            self._connection.instance_id,
            self._card.first_rank,
            self._card.first_rank + self._card.ranks - 1,
        )
        return self

    async def failed(self) -> None:
        """Wait while it serves. Raise DynamoFailed when the runtime has ended."""
        await self._connection.ended()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave discovery first, so that routers send nothing further, then finish what is open."""
        try:
            async with asyncio.timeout(self._drain_seconds):
                await self._connection.withdraw()
                await self._worker.idle()
                if self._all_idle is not None:
                    await self._all_idle()
        except TimeoutError:
            log.warning(
                "%s leaves Dynamo with %d requests open after %g s (drain_seconds)",
                self._card.engine,
                self._worker.open_requests,
                self._drain_seconds,
            )
            self._worker.break_off()
        finally:
            await self._connection.close()
