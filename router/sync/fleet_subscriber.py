"""View of the fleet, kept fresh over the bus: members, loads, placements, cached blocks and predictions."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

from bus import Bus, BusError, Message, Received, Subscription
from bus.joins import holds_its_name, refusal_of, verified_members
from bus.keyed_queue import KeyedQueue
from fleet.dispatch import numbered
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineHeartbeat, EngineJoined, EngineLeft, RankDrained
from fleet.facts.placements import HomesPublished, PlacementCommitted
from fleet.placement import Placement
from fleet.requests.engines import DescribeEngine
from fleet.signatures import ClusterModel
from router.context import RouterContext
from router.fleet_state.cluster_homes import homes_of
from router.fleet_state.dispatch_cost import DispatchCost, DispatchInputs, locality
from router.fleet_state.engine_state import EngineStatus
from router.fleet_state.target_table import RankKey
from router.sync.kv_event_subscriber import KvEventSubscriber, Snapshots
from router.sync.table_subscriber import TableSubscriber
from router.tokenization.tokenizer_registry import TokenizerRegistry

log = logging.getLogger(__name__)

_DESCRIBE_PAUSE_SECONDS = 1.0
_FOLLOW_PAUSE_SECONDS = 1.0
_TABLES_WAITING = 256


class FleetSubscriber:
    """All subscriptions of one bus. `run` listens until cancelled; the handlers are synchronous and change
    the scheduler's state.
    """

    def __init__(
        self,
        bus: Bus,
        context: RouterContext,
        tokenizers: TokenizerRegistry,
        forget: Callable[[int], None],
        reported: Callable[[KvMetrics], None],
        changed: Callable[[], None],
        kv_applied: Callable[[RankKey], None],
        heard: Callable[[Received], None],
    ) -> None:
        self._bus = bus
        self._subjects = subjects = context.subjects
        self._scheduler = context.scheduler
        self._view = context.scheduler.view
        self._tokenizers = tokenizers
        self._metrics = context.metrics
        self._threads = context.threads
        self._clock = context.clock
        self._forget = forget
        self._reported = reported
        self._changed = changed
        self._heard = heard
        self.unread = {
            subjects.membership(): "joins",
            subjects.placements(): "placements",
            subjects.drains(): "drains",
        }
        """subjects whose stored messages have not all been read yet"""
        self.members_known = asyncio.Event()
        """set once the stored joins have been read"""
        self.listening = asyncio.Event()
        """set once all subscriptions are active"""
        self.kv = KvEventSubscriber(context.scheduler.kv, bus, subjects, context.metrics, kv_applied)
        self.tracker = TableSubscriber(
            context.scheduler.predictor,
            bus,
            subjects,
            context.metrics,
            context.threads,
            context.clock,
            self.learn_clusters,
        )
        self._unknown: KeyedQueue[tuple[str, int]] = KeyedQueue(256)
        self._unpriced: KeyedQueue[int] = KeyedQueue(65_536)

    async def run(self) -> None:
        subjects = self._subjects
        async with AsyncExitStack() as stack:
            kv = await stack.enter_async_context(self._bus.subscribe(subjects.kv_events))
            beats = await stack.enter_async_context(
                self._bus.subscribe(subjects.heartbeats(), subjects.kv_metrics, subjects.homes)
            )
            tables = await stack.enter_async_context(
                self._bus.subscribe(subjects.clusters, subjects.tables, limit=_TABLES_WAITING)
            )
            told = await stack.enter_async_context(
                self._bus.subscribe(subjects.shifts, subjects.tracker_heartbeat)
            )
            self.listening.set()
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            tasks.create_task(self._follow(subjects.membership()), name="follows joins and leaves")
            tasks.create_task(self._follow(subjects.placements()), name="follows placements")
            tasks.create_task(self._follow(subjects.drains()), name="follows drains")
            tasks.create_task(self._listen(beats), name="listens to heartbeats and loads")
            tasks.create_task(self._pass_on(told), name="passes the tracker's telemetry on to programs")
            tasks.create_task(self._listen_kv(kv), name="listens to KV events")
            tasks.create_task(
                self._watch_drops(kv, beats, tables, told),
                name="counts dropped messages, and measures the replicas",
            )
            tasks.create_task(self._describe_unknown(), name="describes unknown engines")
            tasks.create_task(self._price(), name="prices placements")
            tasks.create_task(self.tracker.listen(tables), name="applies the tracker's tables and clusters")
            tasks.create_task(self.tracker.run(), name="requests missed tables and clusters")
            tasks.create_task(self._tokenizers.run(self._bus), name="fetches tokenizers")
            tasks.create_task(self.kv.run(), name="repairs KV feeds")

    async def _follow(self, subject: str) -> None:
        """Replay and follow a subject. After an interruption stored messages are delivered again, which is
        harmless: handlers are idempotent.
        """
        while True:
            try:
                if subject in self.unread:
                    async for received in self._stored(subject, follow=False):
                        self.handle(received.message)
                    if self.unread.pop(subject) == "joins":
                        self.members_known.set()
                async for received in self._stored(subject, follow=True):
                    self.handle(received.message)
            except BusError as error:
                log.warning("%s cannot be followed at present: %s", subject, error)
            await asyncio.sleep(_FOLLOW_PAUSE_SECONDS)

    def _stored(self, subject: str, *, follow: bool) -> AsyncIterator[Received]:
        """Replay the stored messages; of joins, only those that hold their engine's name."""
        stored = self._bus.replay(subject, latest=True, follow=follow)
        return (
            verified_members(self._bus, self._subjects, stored)
            if subject == self._subjects.membership()
            else stored
        )

    async def _listen(self, subscription: Subscription) -> None:
        async for received in subscription:
            self.handle(received.message)
            self._heard(received)

    async def _pass_on(self, subscription: Subscription) -> None:
        """Give programs what routing does not use."""
        async for received in subscription:
            self._heard(received)

    async def _listen_kv(self, kv: Subscription) -> None:
        async for received in kv:
            self.kv.receive(received)

    async def _watch_drops(self, *subscriptions: Subscription) -> None:
        while True:
            self._metrics.bus_dropped.set(sum(subscription.dropped for subscription in subscriptions))
            for store, count in self._bus.refusals.items():
                self._metrics.store_refusals.labels(store).set(count)
            self.tracker.measure()
            await asyncio.sleep(1.0)

    def handle(self, message: Message) -> None:
        """Apply one message. An inconsistent one is refused and counted; it must not end the subscription."""
        try:
            self._check_sender(message)
            match message:
                case EngineJoined():
                    self.joined(message)
                case EngineLeft():
                    self._view.leave(message.worker_id, message.reason)
                case EngineHeartbeat():
                    self._beat(message)
                case KvMetrics():
                    self._load(message)
                case PlacementCommitted():
                    self._placed(message)
                case RankDrained():
                    self._drained(message)
                case HomesPublished():
                    self._homes(message)
                case _:
                    self._metrics.bus_refused.inc()
        except ValueError as error:
            log.warning("a %s cannot be used: %s", type(message).__name__, error)
            self._metrics.bus_refused.inc()
        else:
            self._changed()

    def _check_sender(self, message: Message) -> None:
        """Raise ValueError when a message of one engine names the worker of another: only the engine's name
        is authenticated (by subject, and by claim).
        """
        known, named = self._view.engine(getattr(message, "worker_id", -1)), getattr(message, "engine", None)
        if known is not None and named is not None and known.joined.engine != named:
            raise ValueError(
                f"it is of engine {named!r} and names worker {known.joined.worker_id}, which is engine"
                f" {known.joined.engine!r}"
            )

    def joined(self, joined: EngineJoined, snapshots: Snapshots | None = None) -> None:
        """Apply the join of an engine. ValueError when it is inconsistent.

        snapshots: of an engine of another runtime. Its requests arrive with token ids, and its tokenizer is
        not fetched.
        """
        known = self._view.engine(joined.worker_id)
        if known is not None and known.joined == joined and known.status is not EngineStatus.LEFT:
            return
        before = self._served(joined.worker_id)
        for superseded in self._view.join(joined, self._clock()):
            log.info(
                "engine %s came back as worker %d; worker %d is forgotten",
                joined.engine,
                joined.worker_id,
                superseded,
            )
            self._forget(superseded)
        if snapshots is not None:
            self._view.block(joined.worker_id, None)
        elif joined.tokenizer is not None and joined.capabilities.token_ids:
            self._view.block(joined.worker_id, self._tokenizers.request(joined.tokenizer))
        elif joined.tokenizer is not None and joined.capabilities.returns_ids:
            self._tokenizers.request(joined.tokenizer)  # until it is known, prompts are hashed as text
        if joined.capabilities.kv_events:
            for rank in range(len(joined.urls)):
                self.kv.add((joined.worker_id, rank), joined.engine, snapshots)
        self._compare_attention(joined.worker_id, before)
        self._unpriced.ask(joined.worker_id)
        if joined.shape is not None:
            self.tracker.add(joined.model)

    def _beat(self, beat: EngineHeartbeat) -> None:
        known = self._view.engine(beat.worker_id)
        unread = known is not None and known.placement is not None and known.placement.epoch != beat.epoch
        if not self._view.sign_of_life(beat.worker_id, self._clock()) or unread:
            self._unknown.ask((beat.engine, beat.worker_id))
        self._view.handing_over(beat.worker_id, beat.handover_seconds)

    def _load(self, load: KvMetrics) -> None:
        sequences = (load.running or 0) + (load.waiting or 0)
        steps = sequences * self._scheduler.expected_steps_left
        amounts = (load.active_prefill_tokens or 0, sequences, load.active_decode_blocks or 0, steps)
        if max(amounts) >= 2**62:
            raise ValueError(f"worker {load.worker_id} rank {load.dp_rank} reports an absurd load {amounts}")
        engine = self._view.engine(load.worker_id)
        # vLLM counts sequences, not the prompt tokens that are left of them.
        known = engine is None or not engine.joined.capabilities.returns_ids
        rank = load.worker_id, load.dp_rank
        self._scheduler.reservations.report(rank, amounts, self._clock(), prefill_known=known)
        self._reported(load)

    def learn_clusters(self, model: str, clusters: ClusterModel) -> None:
        """Apply a model's clusters, and price its placements anew if they are newer than the known ones."""
        if self._view.learn(model, clusters):
            for state in self._view.engines():
                if state.joined.model == model:
                    self._unpriced.ask(state.joined.worker_id)

    def _placed(self, committed: PlacementCommitted) -> None:
        """Apply a newly served placement."""
        before = self._served(committed.worker_id)
        placement = Placement.from_record(committed.served)
        if self._view.place(committed.worker_id, placement, committed.layout):
            self._unpriced.ask(committed.worker_id)
            self._compare_attention(committed.worker_id, before)

    def _served(self, worker_id: int) -> Placement | None:
        """Return the last known placement of an engine; None: there is none."""
        state = self._view.engine(worker_id)
        return None if state is None else state.placement

    def _compare_attention(self, worker_id: int, before: Placement | None) -> None:
        """Forget what was known of the ranks of an engine if its attention has changed since a placement."""
        now = self._served(worker_id)
        if before is None or now is None or now.attention == before.attention:
            return
        log.info("worker %d serves %s attention from epoch %d on", worker_id, now.attention, now.epoch)
        # It may have changed in an earlier epoch than the newest, which alone is known.
        self.kv.restart(worker_id, before.epoch + 1)
        self._scheduler.attention_changed(worker_id)

    def _homes(self, published: HomesPublished) -> None:
        """Apply the planner's homes of an engine. ValueError when they are inconsistent, or do not fit the
        engine.
        """
        state = self._view.engine(published.worker_id)
        if state is not None and self._view.set_homes(
            published.worker_id, homes_of(published, len(state.joined.urls))
        ):
            log.debug(
                "homes of engine %s, version %d: %s", published.engine, published.version, published.reason
            )

    def _drained(self, drained: RankDrained) -> None:
        """Apply an operator's drain. It may arrive before the engine's join, or name an incarnation that has
        left.
        """
        health = self._scheduler.health
        if drained.draining:
            health.drain(drained.worker_id, drained.rank, drained.reason)
        else:
            health.undrain(drained.worker_id, drained.rank)
        where = f"engine {drained.engine}" if drained.rank is None else f"{drained.engine}/{drained.rank}"
        log.info(
            "%s %s",
            where,
            (
                f"takes no new requests: {drained.reason or 'drained'}"
                if drained.draining
                else "takes requests again"
            ),
        )

    async def _describe_unknown(self) -> None:
        """Request the join of engines that send heartbeats but whose join was missed, or whose placement has
        a newer epoch.
        """
        while True:
            engine, worker_id = await self._unknown.next()
            try:
                answer = await self._bus.request(
                    self._subjects.describe_engine(engine, worker_id), DescribeEngine(worker_id=worker_id)
                )
                held = (
                    isinstance(answer, EngineJoined)
                    and refusal_of(answer) is None
                    and await holds_its_name(self._bus, self._subjects, answer)
                )
            except BusError as error:
                log.debug("worker %d did not describe itself: %s", worker_id, error)
                await asyncio.sleep(_DESCRIBE_PAUSE_SECONDS)
                continue
            if (
                isinstance(answer, EngineJoined)
                and (answer.engine, answer.worker_id) == (engine, worker_id)
                and held
            ):
                self._described(answer)

    def _described(self, joined: EngineJoined) -> None:
        for state in self._view.engines():
            if (
                state.joined.engine == joined.engine
                and state.joined.worker_id != joined.worker_id
                and state.status is EngineStatus.LIVE
            ):
                log.warning(
                    "worker %d claims to be engine %s, which is alive as worker %d; ignored",
                    joined.worker_id,
                    joined.engine,
                    state.joined.worker_id,
                )
                return
        self.handle(joined)
        self._view.sign_of_life(joined.worker_id, self._clock())

    async def _price(self) -> None:
        """Price placements off the event loop, because large ones take some hundred milliseconds. Consecutive
        equal engines are priced once.
        """
        last: tuple[DispatchInputs, DispatchCost] | None = None
        while True:
            worker_id = await self._unpriced.next()
            state = self._view.engine(worker_id)
            if state is None:
                continue
            placement = state.placement
            work = DispatchInputs(
                numbered(state.nodes),
                state.joined.shape,
                state.layout,
                placement,
                self._view.clusters(state.joined.model),
                state.rules,
            )
            if last is None or not last[0].same_as(work):
                last = work, await asyncio.get_running_loop().run_in_executor(self._threads, locality, *work)
            self._view.price(worker_id, None if placement is None else placement.epoch, last[1])
