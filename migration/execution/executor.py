"""Executor of plans: one handover at a time per engine, several engines in parallel.

All actions follow from durable state. The log gives the unfinished plan of an engine and its progress. The
engine's key tells whether a handover is open. A plan that was just accepted and a plan left by a dead
coordinator therefore take the same path: finish the open handover, then start the next handover of the
unfinished plan, until none is left.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from math import inf

import msgspec

from bus import BlobLost, Bus, BusError, Subscription
from bus.claims import LeaseTaken
from bus.protocol.subjects import Subjects, engine_of
from fleet.facts.engines import EngineHeartbeat
from fleet.facts.migrations import MigrationPlanned, Origin
from fleet.facts.placements import PlacementCommitted
from fleet.handover import CoordinatorState as State
from fleet.membership import Heartbeats
from fleet.requests.handovers import HandoverDescribed
from fleet.requests.plans import MigrationAccepted, SwitchEstimate
from migration.config import MigrationConfig
from migration.engine_state.placement_registry import EngineEntry, PlacementRegistry
from migration.execution.handover_driver import HandoverDriver, Unfit, plausible, stray
from migration.execution.leader_lease import LeaderLease
from migration.execution.migration_log import MigrationLog, StoredHandover, Superseded, Withdrawn
from migration.handover.coordinator import HandoverSpec, HandoverTimes, begun, taken_over
from migration.handover.handover_messages import (
    Grounds,
    accepted,
    announced,
    dropped,
    found_on_ranks,
    left_open,
    next_of,
    received,
)
from migration.handover.rank_progress import ENGINE_GONE, HandoverFailure
from migration.model.plan import NO_LAYER, Handover, Inapplicable, Plan, applied
from migration.model.plan_log import PlanEntry, PlanRun
from migration.telemetry.metrics import MigrationMetrics
from migration.telemetry.tracing import MigrationTracing, PlanTrace

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 1.0


class ExecutorBusy(ValueError):
    """Error: the engine already has a plan under way; the text names it."""


class PlanExecutor:
    """Used on one event loop, on the leader.

    committed: called with every recorded placement. clock: monotonic seconds; wall: Unix seconds.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        config: MigrationConfig,
        placements: PlacementRegistry,
        metrics: MigrationMetrics,
        lead: LeaderLease,
        committed: Callable[[PlacementCommitted], None],
        clock: Callable[[], float],
        tracing: MigrationTracing | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._config = config
        self._placements = placements
        self._metrics = metrics
        self._lead = lead
        self._clock = clock
        self._tracing = tracing
        self.log = MigrationLog(
            bus, subjects, placements, committed, config.retry_seconds, lead.until_leading, clock, wall
        )
        """the log of plans, read by this executor while it runs"""
        self.log.observers.append(self._planned)
        self._heartbeats = Heartbeats(config.silent_seconds / 2, listening=inf)
        self._driver = HandoverDriver(bus, subjects, self.log, lead, metrics, self._gone, self._silent, clock)
        self._times = HandoverTimes(config.repeat_seconds, _GRACE_SECONDS, config.commit_seconds)
        self._statuses: dict[int, dict[int, HandoverDescribed]] = {}
        """by worker_id and rank: last status report"""
        self._fences: dict[int, int] = {}
        """by worker_id: fencing token of ours that its ranks have seen"""
        self._plans: dict[str, Plan] = {}
        """by engine: plan under way, once it was read"""
        self._traces: dict[str, PlanTrace] = {}
        """by engine: trace of the plan under way"""
        self._since: dict[str, float] = {}
        """by engine: start time of its plan"""
        self._accepting: set[str] = set()
        self._saving: set[str] = set()
        """engines whose next handover waits for the byte budget"""
        self._endings: dict[str, str] = {}
        """by engine: reason why its plan, which waits for the byte budget, is to end"""
        self._attending: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    def reconfigure(self, config: MigrationConfig) -> None:
        """Use new settings from the next handover on."""
        self._config = config

    async def run(self, ready: Callable[[], None]) -> None:
        """Run until cancelled. ready: called once the log is read.

        Raises BusError if the log cannot be read at the start, and LeaseTaken if another service is the
        leader.
        """
        subjects = self._subjects
        async with self._bus.subscribe(subjects.handovers(), subjects.heartbeats()) as reports:
            await self.log.read()
            try:
                async with asyncio.TaskGroup() as tasks:
                    self._tasks = tasks
                    tasks.create_task(self._listen(reports), name="receive rank reports and heartbeats")
                    tasks.create_task(self.log.read(follow=True), name="follow the log of plans")
                    tasks.create_task(self._watch(), name="watch plans and find unattended ones")
                    ready()
            finally:
                self._tasks = None
                for trace in self._traces.values():
                    trace.end(None)

    # Requests

    async def accept(
        self,
        entry: EngineEntry,
        plan: Plan,
        origin: Origin,
        grounds: Grounds | None = None,
        still: Callable[[], bool] | None = None,
        *,
        paced: bool = False,
        switch: SwitchEstimate | None = None,
        replaces: str = "",
    ) -> MigrationAccepted:
        """Start a plan. It is durable when this returns.

        plan: must apply to the served placement (`migration.planning.operator_plans`). grounds: for plans
        started by the planner. still: returns True while the plan is still to be started; called right before
        each attempt to persist it. paced: each handover waits until the byte budget permits it. switch: cost
        of a switch of layout, for the answer. replaces: id of a plan that waits for the byte budget
        (`waiting`), and is ended first; empty: none.

        Raises ExecutorBusy if a plan is under way, Withdrawn if `still` returned False, ValueError if the
        plan is for another epoch, and BusError if the bus fails.
        """
        engine = entry.engine
        self._check_free(engine, replaces)
        if plan.base_epoch != entry.epoch:
            raise ValueError(
                f"plan is for epoch {plan.base_epoch}, the engine serves {entry.epoch}; plan anew"
            )
        self._accepting.add(engine)
        try:
            plan = msgspec.structs.replace(plan, id=self.log.plans.engines[engine].unused(plan.id))
            if replaces:
                await self._end_waiting(engine, f"replaced by plan {plan.id}")
            blob = await self.log.store(plan)
            await self._lead.until_leading()
            answers = "" if grounds is None else grounds.traceparent
            trace = None if self._tracing is None else self._tracing.plan(engine, plan, origin, answers)
            self._plans[engine] = plan
            if trace is not None:
                self._traces[engine] = trace
            await self.log.record(
                announced(
                    entry,
                    plan,
                    origin,
                    blob,
                    answers if trace is None else trace.traceparent,
                    grounds,
                    paced=paced,
                ),
                still,
            )
            logger.info(
                "plan %s of engine %s: %d handovers from epoch %d, %s",
                plan.id,
                engine,
                len(plan.handovers),
                plan.base_epoch,
                plan.reason,
            )
        except Withdrawn:
            self._plans.pop(engine, None)
            if (unused := self._traces.pop(engine, None)) is not None:
                unused.end(None)
            await self.log.forget(blob)
            raise
        finally:
            self._accepting.discard(engine)
        self._attend_to(engine)
        return accepted(entry, plan, switch)

    async def end_waiting(self, engine: str, plan: str, reason: str) -> None:
        """End a plan that waits for the byte budget (`waiting`). What it has changed stays.

        Raises ExecutorBusy if it does not wait any more.
        """
        self._check_free(engine, plan)
        self._accepting.add(engine)
        try:
            await self._end_waiting(engine, reason)
        finally:
            self._accepting.discard(engine)

    async def _end_waiting(self, engine: str, reason: str) -> None:
        """Have the task that attends to an engine end the waiting plan, and wait for the end of that task, so
        that the engine is free. The caller keeps other plans out (`_accepting`)."""
        self._endings[engine] = reason
        try:
            if (attending := self._attending.get(engine)) is not None:
                await asyncio.wait({attending})
        finally:
            del self._endings[engine]
        if self.log.plans.engines[engine].under_way is not None:
            self.refuse_second(engine)

    def waiting(self, engine: str) -> PlanRun | None:
        """Return the plan of an engine whose next handover waits for the byte budget, with no handover open.
        None: there is none."""
        return self.log.plans.engines[engine].under_way if engine in self._saving else None

    def _check_free(self, engine: str, replaces: str) -> None:
        """Raise ExecutorBusy if the engine has a plan under way, unless it is this one and waits."""
        run = self.waiting(engine)
        if engine in self._accepting or run is None or run.plan != replaces:
            self.refuse_second(engine)

    def refuse_second(self, engine: str) -> None:
        """Raise ExecutorBusy if the engine has a plan under way."""
        if (reason := self.busy(engine)) is not None:
            raise ExecutorBusy(f"engine {engine!r} is {reason}")

    def busy(self, engine: str) -> str | None:
        """Return the plan that an engine carries out, in words; None: there is none."""
        run = self.log.plans.engines[engine].under_way
        if run is not None:
            progress = f"handover {run.progress.next + 1} of {run.planned.handovers}"
            if engine in self._saving:
                progress += ", which waits for the byte budget; a layout or a rollback may replace it"
            if pending := self.pending(engine):
                progress += f", pending: {pending}"
            return (
                f"carrying out plan {run.plan} ({progress}); try again when that has ended"
                " (roost events --kind migration)"
            )
        if engine in self._accepting:
            return "just starting another plan; try again when that has ended"
        return None

    def pending(self, engine: str) -> str:
        """Return what the ranks of an engine that rearranges wait for after a decision, in words
        (`HandoverDescribed.pending`); empty: nothing out of the ordinary."""
        entry = self._placements.engines().get(engine)
        statuses = {} if entry is None else self._statuses.get(entry.worker_id, {})
        return ", ".join(sorted({status.pending for status in statuses.values()} - {""}))

    async def survey(
        self, entry: EngineEntry, patience: float = 0.0, token: int = 0
    ) -> tuple[HandoverDescribed, ...]:
        """Return the status of every rank.

        patience: seconds within which every rank must answer. token: see `DescribeHandover`. Raises Unfit
        naming a rank that takes part in no handovers or does not answer in time.
        """
        statuses = await self._driver.survey(
            entry.engine, entry.worker_id, entry.placement.ranks, patience, token
        )
        for status in statuses:
            self._note(status, self._placements.entry(status.worker_id))
        return statuses

    # Reports

    async def _listen(self, subscription: Subscription) -> None:
        async for received_message in subscription:
            if not isinstance(report := received_message.message, HandoverDescribed | EngineHeartbeat):
                continue
            entry = self._placements.entry(report.worker_id)
            if entry is not None and entry.engine != engine_of(received_message.subject):
                continue  # one engine sends reports in the name of another
            if isinstance(report, EngineHeartbeat):
                self._heartbeats.beat(report.worker_id, self._clock())
            elif plausible(report):
                self._note(report, entry)
                self._driver.receive(report)

    def _note(self, status: HandoverDescribed, entry: EngineEntry | None) -> None:
        if entry is not None and 0 <= status.rank < entry.placement.ranks:
            self._statuses.setdefault(status.worker_id, {})[status.rank] = status

    def _planned(self, entry: PlanEntry) -> None:
        """Attend to plans of other services that believed they were the leader."""
        if isinstance(entry, MigrationPlanned):
            self._attend_to(entry.engine)

    async def _watch(self) -> None:
        """Attend to engines with work that has no task: plans of a previous coordinator, and handovers open
        only on ranks."""
        for engine in {*self._placements.engines(), *self.log.plans.engines}:
            self._attend_to(engine)
        while True:
            self._heartbeats.listen(self._clock(), audible=self._bus.connected)
            for engine in self.log.plans.busy:
                self._attend_to(engine)
            for engine, entry in self._placements.engines().items():
                if stray(tuple(self._statuses.get(entry.worker_id, {}).values())):
                    self._attend_to(engine)
            self._publish_metrics()
            await asyncio.sleep(min(_LOOK_SECONDS, self._config.silent_seconds / 4))

    def _publish_metrics(self) -> None:
        """Update the watchdog metrics."""
        present = {entry.worker_id for entry in self._placements.engines().values()}
        self._heartbeats.keep_only(present)
        self._statuses = {
            worker_id: statuses for worker_id, statuses in self._statuses.items() if worker_id in present
        }
        self._fences = {worker_id: token for worker_id, token in self._fences.items() if worker_id in present}
        now = self._clock()
        self._since = {engine: self._since.get(engine, now) for engine in self.log.plans.busy}
        for engine, entry in self._placements.engines().items():
            self._metrics.cells(engine, tuple(self._statuses.get(entry.worker_id, {}).values()))
            run, plan = self.log.plans.engines[engine].under_way, self._plans.get(engine)
            left = () if run is None or plan is None else plan.handovers[run.progress.next :]
            pending = 0 if run is None else run.planned.handovers - run.progress.next
            layers = len({step.layer for handover in left for step in handover.steps} - {NO_LAYER})
            self._metrics.pending(engine, now - self._since.get(engine, now), pending, layers)

    def _gone(self, engine: str, worker_id: int) -> str:
        """Return why an incarnation has ended; empty: there is no proof that it has."""
        entry = self._placements.engines().get(engine)
        if entry is None:
            return "it has left"
        return "it has restarted" if entry.worker_id != worker_id else ""

    def _silent(self, worker_id: int) -> bool:
        return self._heartbeats.silence(worker_id, self._clock()) > self._config.silent_seconds

    # Actions

    def _attend_to(self, engine: str) -> None:
        if self._tasks is None or engine in self._attending or engine in self._accepting:
            return
        self._since.setdefault(engine, self._clock())
        self._attending[engine] = self._tasks.create_task(
            self._attend(engine), name=f"carry out plans of engine {engine}"
        )

    async def _attend(self, engine: str) -> None:
        """Work on an engine until nothing is left to do. Failures are retried: a plan must end, and the log
        must say how."""
        try:
            while not await self._try_advance(engine):
                pass
        finally:
            self._attending.pop(engine, None)
            self._saving.discard(engine)

    async def _try_advance(self, engine: str) -> bool:
        """Attempt one action. Returns True if nothing is left to do."""
        try:
            return await self._advance(engine)
        except LeaseTaken:
            raise
        except Superseded as superseded:
            logger.warning("%s", superseded)
        except BusError as error:
            logger.warning("plans of engine %s are held up: %s", engine, error)
        except Exception:  # a defect in one engine's plan must not end those of others
            logger.exception("plans of engine %s are held up", engine)
        await asyncio.sleep(self._config.retry_seconds)
        return False

    async def _advance(self, engine: str) -> bool:
        """Perform one pending action. Returns True if there is none."""
        found = await self._conclude(engine)
        if (second := self.log.plans.engines[engine].second) is not None:
            await self._drop(
                second,
                HandoverFailure("another plan was under way; try again when that has ended", "busy"),
            )
            return False
        run = self.log.plans.engines[engine].under_way
        if run is not None:
            await self._next(engine, run, found)
            return False
        self._plans.pop(engine, None)
        last, trace = self.log.plans.engines[engine].current, self._traces.pop(engine, None)
        if trace is not None:
            trace.end(None if last is None else last.end)
        await self._clear_strays(engine, found)
        await self.log.clear(engine)
        return self.log.plans.engines[engine].under_way is None

    async def _conclude(self, engine: str) -> StoredHandover:
        """Finish the handover that is open under the engine's key."""
        found = await self.log.look(engine)
        left, run = found.open, self.log.plans.engines[engine].current
        if left is None or left.state is State.IDLE:
            return found
        logger.info(
            "handover %d of engine %s was left %s by a previous coordinator; resuming it",
            left.handover,
            engine,
            left.state,
        )
        staged = (
            None
            if run is None or run.progress.staged is None or run.progress.staged.handover != left.handover
            else run.progress.staged
        )
        what = left_open(engine, left, staged, self._placements.entry(left.worker_id), self._config)
        plan_trace = None if run is None or run.plan != left.plan else self._trace(engine, run)
        await self._lead.until_leading()
        handover = taken_over(
            what,
            left,
            self._lead.token,
            self._times,
            self._clock(),
            0.0 if staged is None else staged.seconds,
        )
        await self._driver.drive(
            handover, found.revision, None if plan_trace is None else plan_trace.handover(what)
        )
        return await self.log.look(engine)

    async def _next(self, engine: str, run: PlanRun, found: StoredHandover) -> None:
        """Carry out the next handover of a plan, or abandon the plan if it cannot continue."""
        entry = self._placements.engines().get(engine)
        if entry is None or entry.worker_id != run.planned.worker_id:
            why = (
                f"engine {engine!r} {'has left' if entry is None else 'has restarted'}; plan anew for what it"
                " serves then"
            )
            return await self._drop(run, HandoverFailure(why, ENGINE_GONE))
        try:
            plan = await self._plan(engine, run)
            if (ending := self._endings.get(engine)) is not None:
                return await self._drop(run, HandoverFailure(ending, "replaced"))
            if run.planned.paced and not self._permits(engine, plan.handovers[run.progress.next]):
                self._saving.add(engine)
                return await asyncio.sleep(_LOOK_SECONDS)
            self._saving.discard(engine)  # from here on a handover may be open
            placement = await asyncio.to_thread(applied, entry.placement, plan.handovers[run.progress.next])
            found, previous = await self._ready(entry, plan.handovers[run.progress.next], found)
        except (BlobLost, IndexError) as error:
            return await self._drop(
                run, HandoverFailure(f"its plan is not stored: {error}; plan anew", "plan")
            )
        except Inapplicable as error:
            return await self._drop(run, HandoverFailure(str(error), error.cause.value))
        except Unfit as unfit:
            return await self._drop(run, unfit.failure)
        await self._hand_over(
            next_of(entry, plan, run.progress.next, placement, previous + 1, self._config),
            found,
            self._trace(engine, run),
        )
        return None

    def _permits(self, engine: str, handover: Handover) -> bool:
        """Return True if the byte budget permits a handover now."""
        spending, config = self.log.plans.engines[engine].spending, self._config
        return spending.permits(self._clock(), handover.bytes, config.budget_bytes, config.budget_seconds)

    async def _ready(
        self, entry: EngineEntry, handover: Handover, found: StoredHandover
    ) -> tuple[StoredHandover, int]:
        """Wait until every rank is free for a handover.

        Returns the durable state and the highest handover number used so far. Raises Unfit if a rank is not
        free.
        """
        statuses = await self._fenced(entry, self._config.stage_seconds)
        if stray(statuses):
            found = await self._clear_strays(entry.engine, found)
            statuses = await self._fenced(entry, self._config.stage_seconds)
        for status in statuses:
            if status.handover or status.served != entry.epoch:
                raise Unfit(
                    HandoverFailure(
                        f"rank {status.rank} serves epoch {status.served}, but the log says {entry.epoch}:"
                        " restart its engine",
                        "epoch",
                        status.rank,
                    )
                )
        statuses = await self._room(entry, received(handover, entry.placement), statuses)
        return found, max(
            0 if found.open is None else found.open.highest, *(status.concluded for status in statuses)
        )

    async def _fenced(self, entry: EngineEntry, patience: float = 0.0) -> tuple[HandoverDescribed, ...]:
        """Fence off previous leaders, then return the status of every rank.

        Afterwards no rank obeys a previous leader. An open handover can therefore be finished from the
        reported status alone, even if the store does not know it. Raises Unfit if a rank does not answer.
        """
        highest = max(status.token for status in await self.survey(entry, patience))
        if highest > self._lead.token or (
            highest == self._lead.token and self._fences.get(entry.worker_id) != highest
        ):
            # an equal token may belong to another service: tokens restart if the server lost its store
            await self._lead.outbid(highest)
        self._fences[entry.worker_id] = self._lead.token
        return await self.survey(entry, patience, self._lead.token)

    async def _room(
        self, entry: EngineEntry, needed: list[int], statuses: tuple[HandoverDescribed, ...]
    ) -> tuple[HandoverDescribed, ...]:
        """Wait, up to the staging time limit, for cells that are draining or in quarantine. Ranks report a
        remaining lack."""
        until = self._clock() + self._config.stage_seconds
        while self._clock() < until and any(
            status.free < needed[status.rank] <= status.free + status.draining + status.quarantined
            for status in statuses
        ):
            await asyncio.sleep(self._config.repeat_seconds)
            statuses = await self.survey(entry, self._config.stage_seconds)
        return statuses

    async def _hand_over(
        self, what: HandoverSpec, found: StoredHandover, plan_trace: PlanTrace | None
    ) -> None:
        trace = None if plan_trace is None else plan_trace.handover(what)
        if trace is not None:
            what = trace.carried_by(what)
        await self._lead.until_leading()
        handover = begun(what, self._lead.token, self._times, self._clock())
        revision = await self.log.keep(
            what.engine, handover.durable(State.PROPOSING, self._clock()), found.revision
        )
        await self._driver.drive(handover, revision, trace)

    async def _clear_strays(self, engine: str, found: StoredHandover) -> StoredHandover:
        """Finish a handover that ranks have open but that is not in durable storage.

        Either the ranks missed its end, or a server lost its store.
        """
        entry = self._placements.engines().get(engine)
        if entry is None or not stray(tuple(self._statuses.get(entry.worker_id, {}).values())):
            return found
        try:
            open_ = stray(await self._fenced(entry))
        except Unfit as unfit:
            logger.warning("engine %s: %s", engine, unfit)
            self._statuses.pop(entry.worker_id, None)
            return found
        if open_ is None:
            return found
        logger.warning(
            "ranks of engine %s have handover %d open, which is not in the store; new state: %s",
            engine,
            *open_,
        )
        left = found_on_ranks(entry, *open_, self._lead.token, found.open)
        revision = await self.log.keep(engine, left, found.revision)
        what = left_open(engine, left, None, None, self._config)
        await self._driver.drive(
            taken_over(what, left, self._lead.token, self._times, self._clock()), revision
        )
        return await self.log.look(engine)

    async def _drop(self, run: PlanRun, failure: HandoverFailure) -> None:
        """Abandon the rest of a plan, with no handover open."""
        logger.warning(
            "plan %s of engine %s is abandoned: %s",
            run.plan,
            run.planned.engine,
            failure.reason,
        )
        await self.log.record(dropped(run, failure))
        self._metrics.dropped(failure.fault)

    async def _plan(self, engine: str, run: PlanRun) -> Plan:
        """Return the plan under way. Raises BlobLost if it is not stored."""
        plan = self._plans.get(engine)
        if plan is None or plan.id != run.plan:
            plan = self._plans[engine] = await self.log.plan(run.planned.blob)
        return plan

    def _trace(self, engine: str, run: PlanRun) -> PlanTrace | None:
        if engine not in self._traces and self._tracing is not None:
            self._traces[engine] = self._tracing.resumed(run.planned)
        return self._traces.get(engine)
