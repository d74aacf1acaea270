"""Agent of one rank: publishes the rank's events and, on rank 0, the engine's membership.

Every rank publishes its KV events, its load, its activated experts, its dispatch statistics
(`reporting.dispatch_reports`) and the experts activated by each finished request
(`reporting.request_profiles`). Each has its own publisher identity. Every rank also serves snapshots of its
KV cache and takes part in handovers (`handover_agent`). Only rank 0 handles membership: it claims the
engine's name, records the join, sends heartbeats, answers describe requests, and records the leave. The bus
may disconnect and reconnect at any time. Publishing continues meanwhile. Sequence numbers reveal the gap, and
readers repair it with a snapshot. Durable records are written again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal

from bus import Bus, BusError, Message
from bus.claims import NameClaim
from bus.protocol.subjects import Subjects
from engine_adapter.agent.handover_agent import HandoverAgent, Staging
from engine_adapter.batching.kv_snapshot import KvMirror
from engine_adapter.config import AgentConfig
from engine_adapter.engine import Activations, Engine, RankLoad
from engine_adapter.reporting.dispatch_reports import DispatchReports
from engine_adapter.reporting.request_profiles import RequestProfiler
from fleet.facts.activity import ExpertsActivated
from fleet.facts.dynamo_kv import KvChange, KvEvent, KvMetrics, RoutedKvEvent
from fleet.facts.engines import EngineHeartbeat, EngineJoined, EngineLeft
from fleet.popularity import ExpertCounts
from fleet.requests.engines import KvSnapshot, KvSnapshotRequested

log = logging.getLogger(__name__)
SNAPSHOT_SECONDS = 0.5
"""Lifetime of a cached KV snapshot. It is the reply to all requests within this time that need no later
message."""
SNAPSHOT_SHARE = 20.0
"""Lifetime of a snapshot as a multiple of the time to build it. Even on a slow machine, building snapshots
takes at most a twentieth of the time."""
_LOOK_UP_SECONDS = 300.0
"""Interval between checks that the join record is still stored."""
_NO_TRANSFERS = Staging()
"""No transfer backends: other ranks cannot be read. Sufficient for engines of one rank."""


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


class Agent:
    """Agent of one rank. `run` publishes until it is cancelled. `joined` is set once the engine may be
    used."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        engine: Engine,
        identity: AgentIdentity,
        config: AgentConfig,
        staging: Staging = _NO_TRANSFERS,
    ) -> None:
        """staging: means to copy experts, for engines that support handovers."""
        self.joined = asyncio.Event()
        self._bus = bus
        self._subjects = subjects
        self._engine = engine
        self._about = engine.description
        self._identity = identity
        self._config = config
        self._reason: str | None = "stopped"
        self._mirror = KvMirror(self._about.kv_blocks)
        self._event_id = 0
        # A snapshot must combine the mirror and the sequence number of one moment.
        self._kv_turn = asyncio.Lock()
        self._snapshot: KvSnapshot | None = None
        """The last snapshot. Many routers request one at the same time, and the same object is encoded only
        once (`bus.parts`)."""
        self._tokenizer: str | None = None
        self._load: RankLoad | None = None
        self._load_at = float("-inf")
        self._activations: Activations | None = None
        self._experts_at = float("-inf")
        self._polled_at = float("-inf")
        self._experts_epoch = self._epoch
        self._kv = bus.publisher(subjects.kv_events)
        self._metrics = bus.publisher(subjects.kv_metrics)
        self._experts = bus.publisher(subjects.experts(identity.engine))
        self._dispatch_reports = DispatchReports(
            bus, subjects, self._about, identity.engine, identity.worker_id, config.experts_seconds
        )
        self._profiler = self._make_profiler()
        self.handovers = (
            None
            if engine.experts is None
            else HandoverAgent(bus, subjects, engine, identity.engine, identity.worker_id, staging)
        )
        """Handover agent. None: this engine cannot move its experts."""

    def _make_profiler(self) -> RequestProfiler | None:
        """Return None for an engine that reports no experts. Nothing is subscribed to or kept then."""
        about, who = self._about, self._identity
        if about.shape is None or not about.capabilities.experts:
            return None
        return RequestProfiler(
            self._bus, self._subjects, about, about.shape, who.engine, who.worker_id, self._config, who.nodes
        )

    def leaving(self, reason: str | None) -> None:
        """Set the reason for leaving, which goes into `EngineLeft`. None: leave without an event and keep the
        name until the claim expires."""
        self._reason = reason

    async def run(self) -> None:
        """Publish until cancelled. NameTaken when another engine has this name."""
        async with AsyncExitStack() as stack:
            if self._about.capabilities.kv_events:
                subject = self._subjects.kv_snapshot(
                    self._identity.engine, self._identity.worker_id, self._about.rank
                )
                await stack.enter_async_context(self._bus.serve(subject, self._answer_snapshot))
            if self.handovers is None:
                commands = self._subjects.handover(
                    self._identity.engine, self._identity.worker_id, self._about.rank
                )
                await stack.enter_async_context(self._bus.serve(commands, self._refuse_handover))
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            if self.handovers is not None:
                tasks.create_task(
                    self.handovers.run(),
                    name=f"handovers of rank {self._about.rank} of {self._identity.engine}",
                )
            tasks.create_task(
                self._report(), name=f"report events of rank {self._about.rank} of {self._identity.engine}"
            )
            if self._profiler is not None:
                tasks.create_task(
                    self._profiler.run(),
                    name=f"profile requests of rank {self._about.rank} of {self._identity.engine}",
                )
            if self._about.rank == 0:
                tasks.create_task(self._membership(), name=f"keep {self._identity.engine} a member")
            else:
                self.joined.set()

    # reports of every rank

    async def _report(self) -> None:
        clock = asyncio.get_running_loop().time
        self._experts_at = self._polled_at = clock()
        self._dispatch_reports.begin(self._polled_at)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(
                    min(
                        self._load_at + self._config.load_seconds,
                        self._experts_at + self._config.experts_seconds,
                    )
                ):
                    await self._engine.wait_facts()
            facts, placement, now = self._engine.take_facts(), self._engine.placement, clock()
            await self._publish_kv(facts.kv)
            await self._publish_load(facts.load, now)
            await self._update_experts(facts.activations, 0 if placement is None else placement.epoch, now)
            if self._about.capabilities.experts:
                await self._dispatch_reports.add(facts.sent, now)
            if self._profiler is not None and (facts.ended or facts.ended_lost):
                self._profiler.take(facts.ended, facts.ended_lost, placement)
            await asyncio.sleep(self._config.facts_seconds)

    async def _publish_kv(self, changes: tuple[KvChange | Literal["cleared"], ...]) -> None:
        if not changes or not self._about.capabilities.kv_events:
            return
        forgotten = self._mirror.forgotten
        async with self._kv_turn:
            for change in changes:
                self._mirror.apply(change)
            await self._kv.publish(tuple(self._routed(change) for change in changes))
        if self._mirror.forgotten > forgotten:
            log.warning(
                "rank %d stored more KV blocks than the %d it has; snapshots lack %d",
                self._about.rank,
                self._mirror.limit,
                self._mirror.forgotten,
            )

    def _routed(self, change: KvChange | Literal["cleared"]) -> RoutedKvEvent:
        self._event_id += 1
        return RoutedKvEvent(
            worker_id=self._identity.worker_id,
            event=KvEvent(event_id=self._event_id, data=change, dp_rank=self._about.rank),
        )

    async def _publish_load(self, load: RankLoad, now: float) -> None:
        due = now - self._load_at >= self._config.load_seconds
        if self._about.capabilities.load and (due or load != self._load):
            await self._metrics.publish(
                KvMetrics(
                    worker_id=self._identity.worker_id,
                    dp_rank=self._about.rank,
                    active_decode_blocks=load.decode_blocks,
                    active_prefill_tokens=load.prefill_tokens,
                    kv_used_blocks=load.used_blocks,
                    running=load.running,
                    waiting=load.waiting,
                    step_seconds=load.step_seconds,
                )
            )
            due = True
        if due:
            self._load, self._load_at = load, now

    async def _update_experts(self, new: Activations | None, epoch: int, now: float) -> None:
        # A report covers one epoch, so the counts from before the flip are sent at once.
        if epoch != self._experts_epoch:
            await self._report_experts(self._polled_at)
            self._experts_epoch = epoch
        if new is not None:
            self._activations = new if self._activations is None else _sum(self._activations, new)
        self._polled_at = now
        if now - self._experts_at >= self._config.experts_seconds:
            await self._report_experts(now)

    async def _report_experts(self, until: float) -> None:
        seconds = until - self._experts_at
        if seconds <= 0:
            return
        activations, self._activations, self._experts_at = self._activations, None, until
        if (
            activations is not None
            and (activations.tokens or activations.cached_tokens)
            and self._about.capabilities.experts
        ):
            await self._experts.publish(
                ExpertsActivated(
                    engine=self._identity.engine,
                    worker_id=self._identity.worker_id,
                    rank=self._about.rank,
                    model=self._about.model,
                    epoch=self._experts_epoch,
                    seconds=seconds,
                    tokens=activations.tokens,
                    cached_tokens=activations.cached_tokens,
                    counts=ExpertCounts.of(activations.counts),
                )
            )

    async def _refuse_handover(self, request: Message) -> Message:
        raise ValueError(
            f"{self._identity.engine} cannot move its experts: engines of its kind take no part in handovers"
        )

    async def _answer_snapshot(self, request: Message) -> Message:
        if not isinstance(request, KvSnapshotRequested):
            raise TypeError(f"expected KvSnapshotRequested, got {type(request).__name__}")
        async with self._kv_turn:
            if self._snapshot is None or request.after is None or self._snapshot.sequence < request.after:
                loop = asyncio.get_running_loop()
                began = loop.time()
                self._snapshot = self._snapshot_now()
                seconds = max(SNAPSHOT_SECONDS, SNAPSHOT_SHARE * (loop.time() - began))
                loop.call_later(seconds, self._forget_snapshot, self._snapshot)
            return self._snapshot

    def _snapshot_now(self) -> KvSnapshot:
        return KvSnapshot(
            worker_id=self._identity.worker_id,
            rank=self._about.rank,
            publisher_id=self._kv.publisher_id,
            sequence=self._kv.sequence - 1,
            events=self._mirror.snapshot(self._about.rank),
        )

    def _forget_snapshot(self, snapshot: KvSnapshot) -> None:
        if self._snapshot is snapshot:
            self._snapshot = None

    # membership, published by rank 0

    async def _membership(self) -> None:
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
                    self._subjects.describe_engine(who.engine, who.worker_id), self._answer_description
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
        await self._bus.record(self._subjects.membership(self._identity.engine), self._description())

    def _description(self) -> EngineJoined:
        about, placement = self._about, self._engine.placement
        return EngineJoined(
            engine=self._identity.engine,
            worker_id=self._identity.worker_id,
            model=about.model,
            node=self._identity.node,
            urls=self._identity.urls,
            nodes=self._identity.nodes,
            block_size=about.block_size,
            kv_blocks=about.kv_blocks,
            kv_block_bytes=about.kv_block_bytes,
            max_context=about.max_context,
            max_batch_tokens=about.max_batch_tokens,
            layout=about.layout,
            dispatch=about.dispatch,
            shape=about.shape,
            placement=None if placement is None else placement.record(),
            tokenizer=self._tokenizer,
            weights_digest=about.weights_digest,
            speed=about.speed,
            capabilities=about.capabilities,
        )

    async def _answer_description(self, request: Message) -> Message:
        return self._description()

    @property
    def _epoch(self) -> int:
        placement = self._engine.placement
        return 0 if placement is None else placement.epoch

    async def _send_heartbeats(self) -> None:
        publisher = self._bus.publisher(self._subjects.heartbeats(self._identity.engine))
        while True:
            handover = self._engine.handover_seconds
            who = self._identity
            await publisher.publish(
                EngineHeartbeat(
                    engine=who.engine, worker_id=who.worker_id, epoch=self._epoch, handover_seconds=handover
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
        stored = [
            received
            async for received in self._bus.replay(
                self._subjects.membership(self._identity.engine), latest=True, follow=False
            )
        ]
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
        if self._reason is None:
            return
        try:
            async with asyncio.timeout(self._config.farewell_seconds):
                if self.joined.is_set():
                    left = EngineLeft(
                        engine=self._identity.engine, worker_id=self._identity.worker_id, reason=self._reason
                    )
                    await self._bus.record(self._subjects.membership(self._identity.engine), left)
                await claim.release()
        except (BusError, TimeoutError) as error:
            log.warning(
                "%s left without recording it: %s", self._identity.engine, error or "the bus did not answer"
            )


def _sum(before: Activations, new: Activations) -> Activations:
    return Activations(
        counts=before.counts + new.counts,
        tokens=before.tokens + new.tokens,
        cached_tokens=before.cached_tokens + new.cached_tokens,
    )
