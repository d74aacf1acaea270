"""Membership of an engine, kept by its rank 0: claim the engine's name, record the join, send heartbeats,
answer describe requests, and record the leave.

The bus may disconnect and reconnect at any time. Durable records are written again then.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bus import BusError, Message
from bus.claims import NameClaim
from engine_adapter.config import AgentConfig
from engine_adapter.engine import Engine
from engine_adapter.reporting.rank_context import RankContext
from fleet.event import PROTOCOL
from fleet.facts.engines import EngineHeartbeat, EngineJoined, EngineLeft
from fleet.layout import AttentionLayout

log = logging.getLogger(__name__)
_LOOK_UP_SECONDS = 300.0
"""Interval between checks that the join record is still stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentIdentity:
    """Identity of this incarnation of the engine. The launcher chooses it and passes it to all ranks."""

    engine: str
    worker_id: int
    """Random u64."""
    node: str
    urls: tuple[str, ...]
    """Base URL of each rank's HTTP server."""
    nodes: tuple[str, ...] = ()
    """Machine of each rank. Empty: all ranks are on `node`."""
    replaces: int | None = None
    """worker_id of the previous incarnation, if the launcher knows that it is dead."""


class EngineMembership:
    """Membership of one incarnation of an engine. `joined` is set once the engine may be used."""

    def __init__(
        self, context: RankContext, engine: Engine, identity: AgentIdentity, config: AgentConfig
    ) -> None:
        self.joined = asyncio.Event()
        self.reason: str | None = "stopped"
        """Reason for leaving. None: leave without an event and keep the name until the claim expires."""
        self._bus = context.bus
        self._subjects = context.subjects
        self._about = context.about
        self._log = context.subjects.membership(identity.engine)
        self._engine = engine
        self._identity = identity
        self._config = config
        self._tokenizer: str | None = None

    async def run(self) -> None:
        """Be a member until cancelled. NameTaken when another engine has this name."""
        who = self._identity
        claim = NameClaim(
            self._bus,
            self._subjects.claim(who.engine),
            who.engine,
            worker_id=who.worker_id,
            node=who.node,
            replaces=who.replaces,
            lease=self._config.lease_seconds,
        )
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._leave, claim)
            await self._with_retries(claim.take)
            await stack.enter_async_context(
                self._bus.serve(
                    self._subjects.describe_engine(who.engine, who.worker_id),
                    self._answer_description,
                )
            )
            await self._with_retries(self._announce)
            self.joined.set()
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            tasks.create_task(self._send_heartbeats(), name=f"heartbeat of {who.engine}")
            tasks.create_task(self._keep_membership(claim), name=f"keep the name {who.engine}")

    async def _announce(self) -> None:
        """Write all durable records: the tokenizer and the join. Idempotent."""
        archive = self._about.tokenizer
        self._tokenizer = None if archive is None else await self._bus.put_blob(archive)
        await self._bus.record(self._log, self._description())

    def _description(self) -> EngineJoined:
        about, placement = self._about, self._engine.placement
        return EngineJoined(
            engine=self._identity.engine,
            worker_id=self._identity.worker_id,
            engine_kind=about.kind,
            model=about.model,
            models=about.models,
            node=self._identity.node,
            urls=self._identity.urls,
            rank_header=about.rank_header,
            nodes=self._identity.nodes,
            block_size=about.block_size,
            kv_blocks=about.kv_blocks,
            kv_block_bytes=about.kv_block_bytes,
            max_context=about.max_context,
            max_batch_tokens=about.max_batch_tokens,
            attention=None if placement is None else AttentionLayout(kind=placement.attention),
            unshardable=about.unshardable,
            tp_refusal=about.tp_refusal,
            dispatch=about.dispatch,
            rearranges=about.rearranges,
            gathers_all=about.gathers_all,
            shape=about.shape,
            placement=None if placement is None else placement.record(),
            tokenizer=self._tokenizer,
            weights_digest=about.weights_digest,
            speed=about.speed,
            tp_speed=about.tp_speed,
            layout_times=about.layout_times,
            hardware=about.hardware,
            capabilities=about.capabilities,
            protocol=PROTOCOL,
        )

    async def _answer_description(self, request: Message) -> Message:
        return self._description()

    async def _send_heartbeats(self) -> None:
        publisher = self._bus.publisher(self._subjects.heartbeats(self._identity.engine))
        while True:
            placement, who = self._engine.placement, self._identity
            await publisher.publish(
                EngineHeartbeat(
                    engine=who.engine,
                    worker_id=who.worker_id,
                    epoch=0 if placement is None else placement.epoch,
                    handover_seconds=self._engine.handover_seconds,
                )
            )
            await asyncio.sleep(self._config.heartbeat_seconds)

    async def _keep_membership(self, claim: NameClaim) -> None:
        """Hold the name. Announce again after the bus was disconnected or lost its store, and when the join
        record has expired from the log, for subscribers that start later."""
        away, clock = False, asyncio.get_running_loop().time
        looked = clock()
        while True:
            await asyncio.sleep(self._config.heartbeat_seconds)
            away = away or not self._bus.connected
            if not self._bus.connected:
                continue
            try:
                await claim.refresh()
                if away or claim.restored:
                    await self._announce()
                    log.info("the bus is back; %s has announced itself again", self._identity.engine)
                elif clock() - looked >= _LOOK_UP_SECONDS:
                    looked = clock()
                    await self._keep_announced()
                away = False
            except BusError as error:
                log.warning("%s cannot reach the bus, trying again: %s", self._identity.engine, error)
                away = True

    async def _keep_announced(self) -> None:
        """Record the join again if it has expired: a full log drops its oldest messages."""
        stored = [received async for received in self._bus.replay(self._log, latest=True, follow=False)]
        if not stored:
            await self._announce()
            log.info(
                "the join record of %s had expired from the log; it has announced itself again",
                self._identity.engine,
            )

    async def _with_retries(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Retry until the bus succeeds."""
        while True:
            try:
                return await attempt()
            except BusError as error:
                log.warning("%s cannot join yet, trying again: %s", self._identity.engine, error)
                await asyncio.sleep(self._config.heartbeat_seconds)

    async def _leave(self, claim: NameClaim) -> None:
        """Record the leave and release the name within a time limit, because the bus may be gone too."""
        if self.reason is None:
            return
        try:
            async with asyncio.timeout(self._config.farewell_seconds):
                if self.joined.is_set():
                    left = EngineLeft(
                        engine=self._identity.engine, worker_id=self._identity.worker_id, reason=self.reason
                    )
                    await self._bus.record(self._log, left)
                await claim.release()
        except (BusError, TimeoutError) as error:
            log.warning(
                "%s left without recording it: %s", self._identity.engine, error or "the bus did not answer"
            )
