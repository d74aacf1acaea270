"""Keeps the view fresh over the bus: who is there, how loaded, what is placed where, what is cached, what is foretold."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

from bus import Bus, BusError, Message, Received, Subscription
from bus.joins import holds_its_name, vouched
from bus.protocol.subjects import Subjects
from fleet.dispatch import numbered
from fleet.events import DescribeEngine, EngineHeartbeat, EngineJoined, EngineLeft, HomesPublished, KvMetrics, PlacementCommitted, RankDrained
from fleet.placement import Placement
from fleet.signatures import ClusterModel
from router.fleet_state.cluster_homes import homes_of
from router.fleet_state.dispatch_cost import DispatchCost, DispatchInputs, locality
from router.fleet_state.engine_state import EngineStatus
from router.keyed_queue import KeyedQueue
from router.scheduling.scheduler import Scheduler
from router.sync.kv_event_subscriber import KvEventSubscriber
from router.sync.table_subscriber import TableSubscriber
from router.telemetry.metrics import RouterMetrics
from router.tokenization.tokenizer_registry import TokenizerRegistry

log = logging.getLogger(__name__)

_DESCRIBE_PAUSE_SECONDS = 1.0
_FOLLOW_PAUSE_SECONDS = 1.0
_TABLES_WAITING = 256


class FleetSubscriber:
    """All listening to one bus. `run` listens until it is cancelled; the handlers are synchronous and change the picker's state."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        picker: Scheduler,
        lexicon: TokenizerRegistry,
        metrics: RouterMetrics,
        threads: ThreadPoolExecutor,
        clock: Callable[[], float],
        forget: Callable[[int], None],
        reported: Callable[[KvMetrics], None],
        changed: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._picker = picker
        self._view = picker.view
        self._lexicon = lexicon
        self._metrics = metrics
        self._threads = threads
        self._clock = clock
        self._forget = forget
        self._reported = reported
        self._changed = changed
        self.behind = {subjects.membership(): "joins", subjects.placements(): "placements", subjects.drains(): "drains"}
        """what is stored under these subjects has not all been heard yet"""
        self.acquainted = asyncio.Event()
        """set once the stored joins have been heard"""
        self.listening = asyncio.Event()
        """set once nothing said on the bus is missed any more"""
        self.kv = KvEventSubscriber(picker.kv, bus, subjects, metrics)
        self.tracker = TableSubscriber(picker.foresight, bus, subjects, metrics, threads, clock, self._learnt)
        self._strangers: KeyedQueue[tuple[str, int]] = KeyedQueue(256)
        self._unpriced: KeyedQueue[int] = KeyedQueue(65_536)

    async def run(self) -> None:
        subjects = self._subjects
        async with AsyncExitStack() as stack:
            kv = await stack.enter_async_context(self._bus.subscribe(subjects.kv_events))
            said = await stack.enter_async_context(self._bus.subscribe(subjects.heartbeats(), subjects.kv_metrics, subjects.homes))
            foretold = await stack.enter_async_context(self._bus.subscribe(subjects.clusters, subjects.tables, limit=_TABLES_WAITING))
            self.listening.set()
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            tasks.create_task(self._follow(subjects.membership()), name="follows joins and leaves")
            tasks.create_task(self._follow(subjects.placements()), name="follows placements")
            tasks.create_task(self._follow(subjects.drains()), name="follows drains")
            tasks.create_task(self._listen(said), name="listens to heartbeats and loads")
            tasks.create_task(self._listen_kv(kv), name="listens to KV events")
            tasks.create_task(self._watch_drops(kv, said, foretold), name="counts what was dropped, and measures the replicas")
            tasks.create_task(self._meet(), name="asks strangers who they are")
            tasks.create_task(self._price(), name="prices placements")
            tasks.create_task(self.tracker.listen(foretold), name="takes the tracker's tables and clusters")
            tasks.create_task(self.tracker.run(), name="asks the tracker for what was missed")
            tasks.create_task(self._lexicon.run(self._bus), name="fetches tokenizers")
            tasks.create_task(self.kv.run(), name="repairs KV feeds")

    async def _follow(self, subject: str) -> None:
        """What is stored is told again after an interruption; hearing it twice changes nothing."""
        while True:
            try:
                if subject in self.behind:
                    async for received in self._counted(subject, follow=False):
                        self._heard(received.message)
                    if self.behind.pop(subject) == "joins":
                        self.acquainted.set()
                async for received in self._counted(subject, follow=True):
                    self._heard(received.message)
            except BusError as error:
                log.warning("%s cannot be followed at present: %s", subject, error)
            await asyncio.sleep(_FOLLOW_PAUSE_SECONDS)

    def _counted(self, subject: str, *, follow: bool) -> AsyncIterator[Received]:
        """What is stored; of joins, those that hold their engine's name."""
        stored = self._bus.replay(subject, latest=True, follow=follow)
        return vouched(self._bus, self._subjects, stored) if subject == self._subjects.membership() else stored

    async def _listen(self, said: Subscription) -> None:
        async for received in said:
            self._heard(received.message)

    async def _listen_kv(self, kv: Subscription) -> None:
        async for received in kv:
            self.kv.hear(received)

    async def _watch_drops(self, *subscriptions: Subscription) -> None:
        while True:
            self._metrics.bus_dropped.set(sum(subscription.dropped for subscription in subscriptions))
            for store, count in self._bus.full.items():
                self._metrics.bus_full.labels(store).set(count)
            self.tracker.measure()
            await asyncio.sleep(1.0)

    def _heard(self, message: Message) -> None:
        """One fact. What contradicts itself is refused and counted; it must not stop the listening."""
        try:
            self._check_speaker(message)
            match message:
                case EngineJoined():
                    self.joined(message)
                case EngineLeft():
                    self._view.leave(message.worker_id)
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

    def _check_speaker(self, message: Message) -> None:
        """ValueError when a message of one engine names the worker of another: only the name is vouched for (by subject, and by claim)."""
        known, named = self._view.engine(getattr(message, "worker_id", -1)), getattr(message, "engine", None)
        if known is not None and named is not None and known.joined.engine != named:
            raise ValueError(f"it is of engine {named!r} and names worker {known.joined.worker_id}, which is engine {known.joined.engine!r}")

    def joined(self, joined: EngineJoined) -> None:
        """An engine introduced itself. ValueError when what it says contradicts itself."""
        known = self._view.engine(joined.worker_id)
        if known is not None and known.joined == joined and known.standing is not EngineStatus.LEFT:
            return
        for superseded in self._view.join(joined, self._clock()):
            log.info("engine %s came back as worker %d; worker %d is forgotten", joined.engine, joined.worker_id, superseded)
            self._forget(superseded)
        if joined.tokenizer is not None and joined.capabilities.token_ids:
            self._view.block(joined.worker_id, self._lexicon.want(joined.tokenizer))
        if joined.capabilities.kv_events:
            for rank in range(len(joined.urls)):
                self.kv.add((joined.worker_id, rank), joined.engine)
        self._unpriced.ask(joined.worker_id)
        if joined.shape is not None:
            self.tracker.add(joined.model)

    def _beat(self, beat: EngineHeartbeat) -> None:
        known = self._view.engine(beat.worker_id)
        behind = known is not None and known.placement is not None and known.placement.epoch != beat.epoch
        if not self._view.heard(beat.worker_id, self._clock()) or behind:
            self._strangers.ask((beat.engine, beat.worker_id))
        self._view.handing_over(beat.worker_id, beat.handover_seconds)

    def _load(self, load: KvMetrics) -> None:
        sequences = (load.running or 0) + (load.waiting or 0)
        steps = sequences * self._picker.expected_steps_left
        amounts = (load.active_prefill_tokens or 0, sequences, load.active_decode_blocks or 0, steps)
        if max(amounts) >= 2**62:
            raise ValueError(f"worker {load.worker_id} rank {load.dp_rank} reports an absurd load {amounts}")
        self._picker.reservations.report((load.worker_id, load.dp_rank), amounts, self._clock())
        self._reported(load)

    def _learnt(self, model: str, clusters: ClusterModel) -> None:
        if self._view.learn(model, clusters):
            for state in self._view.engines():
                if state.joined.model == model:
                    self._unpriced.ask(state.joined.worker_id)

    def _placed(self, committed: PlacementCommitted) -> None:
        if self._view.place(committed.worker_id, Placement.from_record(committed.placement), committed.layout):
            self._unpriced.ask(committed.worker_id)

    def _homes(self, said: HomesPublished) -> None:
        """The planner's word about an engine. ValueError when it contradicts itself or the engine."""
        state = self._view.engine(said.worker_id)
        if state is not None and self._view.settle(said.worker_id, homes_of(said, len(state.joined.urls))):
            log.debug("homes of engine %s, version %d: %s", said.engine, said.version, said.reason)

    def _drained(self, said: RankDrained) -> None:
        """An operator's word. It may come before the engine's join, and of incarnations that are gone."""
        health = self._picker.health
        if said.draining:
            health.drain(said.worker_id, said.rank, said.reason)
        else:
            health.undrain(said.worker_id, said.rank)
        where = f"engine {said.engine}" if said.rank is None else f"{said.engine}/{said.rank}"
        log.info("%s %s", where, f"takes no new requests: {said.reason or 'drained'}" if said.draining else "takes requests again")

    async def _meet(self) -> None:
        """Heartbeats of somebody whose join was missed, or whose placement moved on without us."""
        while True:
            engine, worker_id = await self._strangers.next()
            try:
                answer = await self._bus.request(self._subjects.describe_engine(engine, worker_id), DescribeEngine(worker_id=worker_id))
                held = isinstance(answer, EngineJoined) and await holds_its_name(self._bus, self._subjects, answer)
            except BusError as error:
                log.debug("worker %d could not be asked who it is: %s", worker_id, error)
                await asyncio.sleep(_DESCRIBE_PAUSE_SECONDS)
                continue
            if isinstance(answer, EngineJoined) and (answer.engine, answer.worker_id) == (engine, worker_id) and held:
                self._introduced(answer)

    def _introduced(self, joined: EngineJoined) -> None:
        for state in self._view.engines():
            if state.joined.engine == joined.engine and state.joined.worker_id != joined.worker_id and state.standing is EngineStatus.LIVE:
                log.warning("worker %d says it is engine %s, which lives as worker %d; it is not used", joined.worker_id, joined.engine, state.joined.worker_id)
                return
        self._heard(joined)
        self._view.heard(joined.worker_id, self._clock())

    async def _price(self) -> None:
        """Off the event loop: large placements take some hundred milliseconds. Engines that are alike follow one another and are priced once."""
        last: tuple[DispatchInputs, DispatchCost] | None = None
        while True:
            worker_id = await self._unpriced.next()
            state = self._view.engine(worker_id)
            if state is None:
                continue
            placement = state.placement
            work = DispatchInputs(numbered(state.nodes), state.joined.shape, state.layout, placement, self._view.clusters(state.joined.model))
            if last is None or not last[0].same_as(work):
                last = work, await asyncio.get_running_loop().run_in_executor(self._threads, locality, *work)
            self._view.price(worker_id, None if placement is None else placement.epoch, last[1])
