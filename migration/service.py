"""Migration service: records the placement of each engine, plans better placements and carries out
migrations.

It answers plan requests (`roost plan`) and carries out plans on request
(`migration.requests.operator_commands`, `migration.execution.executor`) or automatically
(`migration.control_loop.controller`). Of several services one leads and does all this; the others are on
standby.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

from bus import Bus, BusError, Received, Subscription
from bus.claims import LeaseTaken
from bus.joins import holds_its_name, refusal_of, verified_members
from bus.protocol.sequence import MessageOrder, Sequences
from bus.protocol.subjects import Subjects
from fleet.facts.activity import DispatchMeasured, ExpertsActivated, TokensSampled
from fleet.facts.demand import ClustersPublished, DemandPublished, PopularityShifted, TablesPublished
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import ConfigChanged, EngineHeartbeat, EngineJoined, EngineLeft
from fleet.facts.placements import PlacementCommitted
from fleet.placement import Placement
from fleet.requests.demand import DescribeClusters
from fleet.requests.engines import DescribeEngine
from fleet.signatures import ClusterModel
from migration.config import MigrationConfig
from migration.control_loop.context import LoopContext
from migration.control_loop.controller import Controller
from migration.engine_state.demand_windows import DemandWindows
from migration.engine_state.placement_registry import (
    EngineEntry,
    InvalidPlacementEvent,
    PlacementFault,
    PlacementRegistry,
)
from migration.engine_state.unknown_engines import UnknownEngines
from migration.execution.executor import PlanExecutor
from migration.execution.leader_lease import LeaderLease
from migration.loop_state.dispatch_windows import DispatchWindows
from migration.model.move_history import retraced
from migration.planning.problem import LayerTurning
from migration.reload import refused, reloaded
from migration.requests.operator_commands import OperatorCommands
from migration.requests.plan_queries import PlanQueries
from migration.requests.switch_plans import SwitchPlans
from migration.telemetry.metrics import MigrationMetrics
from migration.telemetry.tracing import MigrationTracing

logger = logging.getLogger(__name__)

WARN_SECONDS = 60.0
"""Minimum interval between log lines about one kind of rejected report."""
_ANSWER_SECONDS = 10.0
_HEARTBEATS_WAITING = 1024
_TABLES_WAITING = 64
"""Tables are large, and only the newest are relevant."""


class MigrationService:
    """Runs once, until cancelled. `ready` is set once the log is read and epoch 0 of every present engine is
    recorded.

    One service per namespace is the leader (`migration.execution.leader_lease`). The others wait, and are
    `ready` as well. The leader records the first epoch of each incarnation exactly once, also across
    restarts: it reads the log before it writes, and again if the result of a write is unknown.

    clock: monotonic seconds. planning_executor: see `PlanQueries`.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        config: MigrationConfig,
        clock: Callable[[], float] = time.monotonic,
        planning_executor: Executor | None = None,
    ) -> None:
        self.ready = asyncio.Event()
        self.metrics = MigrationMetrics()
        self.placements = PlacementRegistry()
        self.demand = DemandWindows(config)
        self.dispatch = DispatchWindows(config)
        self._bus = bus
        self._subjects = subjects
        self._config = config
        self._clock = clock
        self._instance = secrets.randbits(64)
        """identity of this process, for the audit log of its settings"""
        self._plan_queries = PlanQueries(
            self.placements,
            self.demand,
            config,
            self.metrics,
            clock,
            self._plan_discount,
            self._turning,
            planning_executor,
        )
        self._sequences = Sequences()
        self._unknown_engines = UnknownEngines()
        self._joining = asyncio.Lock()
        """held while an engine is added or removed: the log and the engine's own answer may both report the
        same join, which must be recorded once"""
        self._warned: dict[PlacementFault, float] = {}
        """time of the last log line about each kind of rejection"""
        self.controller: Controller | None = None
        """set while this service is the leader"""
        self._lead = LeaderLease(bus, subjects.coordinator, config.lease_seconds, clock)
        self._tracing = MigrationTracing.create()

    async def run(self) -> None:
        """Wait for the lead, read the log, then follow it. Raises BusError if the bus cannot be reached
        before this service leads or stands by for the first time. Later it waits for the bus."""
        try:
            while True:
                await self._lead.take(self.ready.set, patient=self.ready.is_set())
                self.metrics.leader.set(1)
                try:
                    await self._leading()
                except* LeaseTaken as taken:
                    logger.warning("lost the lead: %s", taken.exceptions[0])
                except* BusError as failed:
                    if not self.ready.is_set():
                        raise
                    logger.warning("cannot lead at present: %s", failed.exceptions[0])
                    await asyncio.sleep(self._config.retry_seconds)
                finally:
                    self.controller = None
                    self.metrics.leader.set(0)
                    self.metrics.serving({})
        finally:
            self._plan_queries.close()
            await self._lead.give_up()

    async def _leading(self) -> None:
        """Run as the leader until cancelled. Raises LeaseTaken, in a group, once another service is the
        leader."""
        subjects, executor = self._subjects, self._make_executor()
        switches = SwitchPlans(self._config, self.demand, executor, self._clock)
        requests = OperatorCommands(
            self._bus, subjects, self._config, self.placements, self.demand, executor, switches
        )
        controller = self.controller = self._make_controller(executor, requests, switches)
        async with (
            self._bus.subscribe(subjects.demand, subjects.kv_metrics) as reports,
            self._bus.subscribe(
                subjects.dispatched(), subjects.experts(), subjects.tokens_sampled(), subjects.shifts
            ) as measurements,
            self._bus.subscribe(subjects.clusters, subjects.tables, limit=_TABLES_WAITING) as tables,
            self._bus.subscribe(subjects.heartbeats(), limit=_HEARTBEATS_WAITING) as heartbeats,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._lead.hold(), name="renew the leader lease")
            await self._replay_placements(subjects.placements())
            known: set[str] = set()
            async for received in verified_members(
                self._bus, subjects, self._bus.replay(subjects.membership(), latest=True, follow=False)
            ):
                known.add(received.subject)
                await self._member(received)
            await self._identify_missing(known)
            await self._retrace(self.placements.engines().values())
            executor_ready = asyncio.Event()
            tasks.create_task(executor.run(executor_ready.set), name="carry out plans")
            await executor_ready.wait()
            tasks.create_task(self._follow_members(), name="record the placement of engines that join")
            tasks.create_task(self._follow_placements(), name="follow the recorded placements")
            tasks.create_task(
                self._identify_unknown(heartbeats), name="identify engines without a known join"
            )
            tasks.create_task(self._listen(reports), name="receive demand and load")
            tasks.create_task(
                self._listen(measurements), name="receive dispatch measurements and demand shifts"
            )
            tasks.create_task(self._listen(tables), name="receive clusters and their predictability")
            tasks.create_task(self._request_missing(), name="request missing clusters")
            loop_ready = asyncio.Event()
            tasks.create_task(controller.run(loop_ready.set), name="plan automatically and evaluate plans")
            await loop_ready.wait()
            async with (
                self._bus.serve(subjects.describe_plan, self._plan_queries.answer),
                self._bus.serve(subjects.migrate, requests.answer),
                self._bus.serve(subjects.loop, controller.answer),
            ):
                self.ready.set()
                await asyncio.get_running_loop().create_future()

    def _make_executor(self) -> PlanExecutor:
        return PlanExecutor(
            self._bus,
            self._subjects,
            self._config,
            self.placements,
            self.metrics,
            self._lead,
            self._recorded,
            self._clock,
            self._tracing,
        )

    def _make_controller(
        self, executor: PlanExecutor, requests: OperatorCommands, switches: SwitchPlans
    ) -> Controller:
        context = LoopContext(
            bus=self._bus,
            subjects=self._subjects,
            placements=self.placements,
            demand=self.demand,
            dispatch=self.dispatch,
            plan_queries=self._plan_queries,
            executor=executor,
            commands=requests,
            switches=switches,
            lead=self._lead,
            metrics=self.metrics,
            tracing=self._tracing,
            clock=self._clock,
            wall=time.time,
        )
        return Controller(context, self._config)

    def _plan_discount(self, engine: str) -> float:
        """Return the discount factor applied to the predicted gains of an engine, in (0, 1]."""
        return 1.0 if self.controller is None else self.controller.plan_discount(engine)

    def _turning(self, engine: str) -> LayerTurning | None:
        """Return the permission to change the form of an engine's single layers; None: there is none."""
        return None if self.controller is None else self.controller.turning(engine)

    # Settings

    def reconfigure(self, new: MigrationConfig) -> ConfigChanged:
        """Use other settings from the next planning cycle on.

        Either all settings are applied or, if one needs a restart, none. The answer says which.
        """
        change = reloaded(self._config, new, self._instance)
        if change.changed:
            self._config = new
            for part in (self.demand, self.dispatch, self._plan_queries, self.controller):
                if part is not None:
                    part.reconfigure(new)
        return change

    async def reload(self, read: Callable[[], MigrationConfig]) -> ConfigChanged:
        """Read the settings and apply them. The result is logged and stored on the bus.

        If `read` raises ValueError or OSError, the reload is refused.
        """
        try:
            change = self.reconfigure(read())
        except (ValueError, OSError) as error:
            change = refused(str(error), self._instance)
        self.metrics.reloaded(
            "refused" if change.refused is not None else "changed" if change.changed else "same"
        )
        changes = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in change.changed.items())
        if change.refused is None:
            logger.info("settings were read again: %s", changes or "nothing differs")
        else:
            logger.error("new settings are refused: %s", change.refused)
        try:
            await self._bus.record(self._subjects.config(change.part), change)
        except BusError as error:
            logger.warning("the result of the reload cannot be stored on the bus: %s", error)
        return change

    # Membership and placements

    async def _follow_members(self) -> None:
        async for received in verified_members(
            self._bus, self._subjects, self._bus.replay(self._subjects.membership(), latest=True)
        ):
            await self._member(received)

    async def _follow_placements(self) -> None:
        async for received in self._bus.replay(self._subjects.placements(), latest=True):
            self._placement(received)

    async def _identify_missing(self, known: set[str]) -> None:
        """Ask engines whose join event has expired from the log, before anything of theirs is ended.

        The log holds their placement, but neither a join nor a leave. Engines that are alive still answer.
        known: subjects on which the log does hold a join or a leave.
        """
        async with asyncio.TaskGroup() as asking:
            for engine, entry in self.placements.newest().items():
                if self._subject_of(engine) not in (None, *known):
                    asking.create_task(
                        self._identify(engine, entry.worker_id), name=f"ask {engine} whether it is present"
                    )

    async def _identify_unknown(self, heartbeats: Subscription) -> None:
        """Ask engines without a known join to identify themselves.

        While another engine of the same name is present, the log decides.
        """
        async for received in heartbeats:
            beat = received.message
            if (
                not isinstance(beat, EngineHeartbeat)
                or self.placements.present(beat.engine)
                or self._subject_of(beat.engine) is None
            ):
                continue
            if self._unknown_engines.due(beat.worker_id, self._clock()) and await self._identify(
                beat.engine, beat.worker_id
            ):
                try:
                    await self._retrace(
                        entry
                        for entry in self.placements.engines().values()
                        if entry.worker_id == beat.worker_id
                    )
                except BusError as error:
                    logger.warning(
                        "recent moves on engine %s cannot be read and are ignored: %s", beat.engine, error
                    )

    async def _identify(self, engine: str, worker_id: int) -> bool:
        """Ask an engine without a known join to identify itself. Returns True if it is known now."""
        try:
            answer = await self._bus.request(
                self._subjects.describe_engine(engine, worker_id), DescribeEngine(worker_id=worker_id)
            )
            if isinstance(answer, EngineJoined) and refusal_of(answer) is not None:
                return False
            if isinstance(answer, EngineJoined) and not await holds_its_name(
                self._bus, self._subjects, answer
            ):
                logger.warning(
                    "worker %d claims to be engine %s, but does not hold that name; it is ignored",
                    worker_id,
                    engine,
                )
                return False
        except BusError as error:
            logger.debug("worker %d of engine %s does not identify itself: %s", worker_id, engine, error)
            return False
        async with self._joining:
            if self.placements.present(engine):
                return False
            try:
                if not isinstance(answer, EngineJoined) or (answer.engine, answer.worker_id) != (
                    engine,
                    worker_id,
                ):
                    raise InvalidPlacementEvent(PlacementFault.CONTRADICTION, "it claims another identity")  # noqa: TRY301
                logger.info(
                    "engine %s (worker %d) is present, though its join event has expired from the log",
                    engine,
                    worker_id,
                )
                await self._joined(answer)
            except InvalidPlacementEvent as refusal:
                self.metrics.rejected(refusal.fault.value)
                logger.warning(
                    "worker %d of engine %s describes itself in an invalid way: %s",
                    worker_id,
                    engine,
                    refusal,
                )
            self._membership_changed()
        return self.placements.present(engine)

    async def _retrace(self, entries: Iterable[EngineEntry]) -> None:
        """Rebuild the move histories from the log."""
        incarnations: dict[int, list[tuple[Placement, str | None, float]]] = {
            entry.worker_id: [] for entry in entries
        }
        now, wall = self._clock(), time.time()
        async for received in self._bus.replay(self._subjects.placements(), follow=False):
            committed = received.message
            if isinstance(committed, PlacementCommitted) and committed.worker_id in incarnations:
                try:
                    placement = Placement.from_record(committed.served)
                except ValueError as error:  # already rejected and counted when the log was read
                    logger.debug(
                        "epoch %d of engine %s is ignored in the move history: %s",
                        committed.placement.epoch,
                        committed.engine,
                        error,
                    )
                else:
                    incarnations[committed.worker_id].append(
                        (placement, committed.plan, now - max(wall - received.published_at, 0.0))
                    )
        for worker_id, epochs in incarnations.items():
            self.demand.retraced(worker_id, retraced(worker_id, epochs))

    async def _replay_placements(self, subject: str) -> None:
        async for received in self._bus.replay(subject, follow=False):
            self._placement(received)

    def _placement(self, received: Received) -> None:
        try:
            if isinstance(received.message, PlacementCommitted):
                self._committed(received.message)
            else:
                self._refuse(received, "kind", "is no PlacementCommitted")
        except InvalidPlacementEvent as refusal:
            self._refuse(received, refusal.fault.value, str(refusal))
        self.metrics.serving(self.placements.engines())

    def _committed(self, committed: PlacementCommitted) -> None:
        entry = self.placements.entry(committed.worker_id) if self.placements.committed(committed) else None
        if entry is not None:
            self.demand.placed(entry.worker_id, entry.placement, committed.plan, self._clock())
            self.dispatch.placed(entry)

    def _recorded(self, committed: PlacementCommitted) -> None:
        """Apply an epoch that this service recorded or found in the log."""
        try:
            self._committed(committed)
        except InvalidPlacementEvent as refusal:
            self.metrics.rejected(refusal.fault.value)
            logger.warning("epoch %d of engine %s: %s", committed.placement.epoch, committed.engine, refusal)
        self.metrics.serving(self.placements.engines())

    async def _member(self, received: Received) -> None:
        async with self._joining:
            match received.message:
                case EngineJoined() | EngineLeft() as event if (
                    of := self.placements.engine_of(event.worker_id)
                ) not in (None, event.engine):
                    self._refuse(
                        received, "engine", f"names worker {event.worker_id}, which is engine {of!r}"
                    )
                case EngineJoined() as joined:
                    try:
                        await self._joined(joined)
                    except InvalidPlacementEvent as refusal:
                        self._refuse(received, refusal.fault.value, str(refusal))
                case EngineLeft() as left:
                    self.placements.left(left.worker_id)
                    self.demand.left(left.worker_id)
                case _:
                    self._refuse(received, "kind", "is neither EngineJoined nor EngineLeft")
            self._membership_changed()

    async def _joined(self, joined: EngineJoined) -> None:
        """Add an engine that announced itself. Raises InvalidPlacementEvent if the announcement is
        invalid."""
        missing = self.placements.joined(joined)
        if missing is not None:
            await self._record(missing)
        if (entry := self.placements.entry(joined.worker_id)) is not None:
            self.demand.joined(joined, entry, self._clock())

    def _membership_changed(self) -> None:
        """Update what depends on the set of present engines."""
        self.dispatch.keep_only(self.placements.engines().values())
        self.metrics.serving(self.placements.engines())

    def _subject_of(self, engine: str) -> str | None:
        """Return the membership subject of an engine; None: the name is not valid."""
        try:
            return self._subjects.membership(engine)
        except ValueError:
            return None

    async def _record(self, committed: PlacementCommitted) -> None:
        """Write an epoch to the log exactly once. If the result of a write is unknown, read the log before
        repeating it."""
        subject, began = self._subjects.placements(committed.engine), self._clock()
        while self.placements.entry(committed.worker_id) is None:
            try:
                await self._bus.record(subject, committed)
                self.placements.committed(committed)
            except BusError as error:
                self.metrics.retries.inc()
                logger.warning(
                    "epoch %d of engine %s is not recorded yet: %s",
                    committed.placement.epoch,
                    committed.engine,
                    error,
                )
                await self._replay_when_available(subject)
            else:
                self.metrics.recorded.inc()
                self.metrics.recording.observe(self._clock() - began)
                logger.info(
                    "recorded epoch %d of engine %s (worker %d)",
                    committed.placement.epoch,
                    committed.engine,
                    committed.worker_id,
                )

    async def _replay_when_available(self, subject: str) -> None:
        """Read the log, once the bus is available again."""
        while True:
            await asyncio.sleep(self._config.retry_seconds)
            try:
                return await self._replay_placements(subject)
            except BusError as error:
                logger.warning("%s cannot be read: %s", subject, error)

    def _refuse(self, received: Received, reason: str, detail: str) -> None:
        self.metrics.rejected(reason)
        logger.warning("refused a %s on %s: %s", type(received.message).__name__, received.subject, detail)

    # Demand and load

    async def _listen(self, subscription: Subscription) -> None:
        async for received in subscription:
            verdict = self._sequences.observe(received.publisher_id, received.sequence)
            if verdict.order is MessageOrder.GAP:
                self.metrics.lost.inc(verdict.missing)
            if not verdict.fresh:
                continue
            try:
                await self._apply(received)
            except InvalidPlacementEvent as refusal:
                self._refuse_with_limited_log(received, refusal)

    async def _apply(self, received: Received) -> None:
        """Apply one report. Raises InvalidPlacementEvent if it cannot be used."""
        if isinstance(
            sent := received.message, DispatchMeasured | TokensSampled
        ) and self.placements.engine_of(sent.worker_id) not in (None, sent.engine):
            raise InvalidPlacementEvent(
                PlacementFault.CONTRADICTION,
                f"engine {sent.engine!r} reported the measurements of another engine",
            )
        match received.message:
            case DemandPublished() as demand:
                self.demand.demand(demand, self._clock())
            case KvMetrics() as load:
                self.demand.load(load, self._clock())
                if self.controller is not None:
                    self.controller.loaded(load)
            case DispatchMeasured() as sent:
                self.dispatch.add(sent, self._clock())
                self.demand.rearranged(sent)
                if self.controller is not None:
                    self.controller.dispatched(sent)
            case ExpertsActivated() as activated:
                self.demand.activated(activated, self._clock())
            case TokensSampled() as tokens:
                self.demand.sampled(tokens, self._clock())
            case PopularityShifted() as shift if self.controller is not None:
                self.controller.shifted(shift)
            case TablesPublished() as tables if tables.model in self.demand.models:
                self.demand.predictability(tables.model, tables.reliability)
            case ClustersPublished() as clusters if clusters.model in self.demand.models:
                await self._clusters(clusters)

    async def _clusters(self, published: ClustersPublished) -> None:
        try:
            clusters = await asyncio.to_thread(ClusterModel.from_record, published.record)
        except ValueError as error:
            raise InvalidPlacementEvent(
                PlacementFault.CLUSTERS, f"clusters of model {published.model!r}: {error}"
            ) from error
        self.demand.clusters(published.model, clusters)

    def _refuse_with_limited_log(self, received: Received, refusal: InvalidPlacementEvent) -> None:
        """Count every rejection, but limit the rate of log lines."""
        self.metrics.rejected(refusal.fault.value)
        now = self._clock()
        if now - self._warned.get(refusal.fault, -WARN_SECONDS) >= WARN_SECONDS:
            self._warned[refusal.fault] = now
            logger.warning(
                "refused a %s: %s; others of this kind are only counted for %g s",
                type(received.message).__name__,
                refusal,
                WARN_SECONDS,
            )

    async def _request_missing(self) -> None:
        """Request missing clusters periodically."""
        while True:
            await asyncio.sleep(self._config.cycle_seconds)
            await self._request_clusters()

    async def _request_clusters(self) -> None:
        """Request the clusters of models without known clusters. The tracker publishes only changes, perhaps
        long ago."""
        for model in self.demand.models_without_clusters:
            try:
                answer = await self._bus.request(
                    self._subjects.describe_profile, DescribeClusters(model=model), _ANSWER_SECONDS
                )
                if isinstance(answer, ClustersPublished):
                    await self._clusters(answer)
            except (BusError, InvalidPlacementEvent) as error:
                logger.debug("no clusters of model %s: %s", model, error)
