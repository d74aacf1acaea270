"""Controller of the migration service: plans for every engine, carries out plans that pay, evaluates them,
undoes harm.

Every engine has its own task, so that a failure of one does not delay another. Planning runs one at a time,
off the event loop. After a restart, only the log of plans and the state under the loop's key are needed to
resume.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

import msgspec

from bus import Bus, BusError, Message
from bus.protocol.subjects import Subjects
from fleet.events import (
    DescribeLoop,
    LoopDescribed,
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    MigrationStaged,
    PlanJudged,
    PopularityShifted,
    RequestRefused,
    SteerLoop,
)
from migration.config import MigrationConfig
from migration.control_loop.evaluator import PlanEvaluator
from migration.control_loop.homes_publisher import HomesPublisher
from migration.control_loop.state_store import StateStore
from migration.engine_state.demand_windows import DemandWindows
from migration.engine_state.placement_registry import EngineEntry, InvalidPlacementEvent, PlacementRegistry
from migration.execution.executor import ExecutorBusy, PlanExecutor
from migration.execution.handover_driver import Unfit
from migration.execution.leader_lease import LeaderLease
from migration.loop_state.dispatch_windows import DispatchWindow, DispatchWindows
from migration.loop_state.engine_loop import DemandShift, EngineLoopState, EngineStanding, grounds, story, withheld
from migration.loop_state.plan_history import PlanHistory, PlanStory
from migration.model.plan import Plan
from migration.planning.planner import PlannerDecision
from migration.planning.problem import PlanningQuestion
from migration.requests.operator_commands import ASK_SECONDS, OperatorCommands, RankFull
from migration.requests.plan_queries import PlanQueries
from migration.telemetry.metrics import MigrationMetrics
from migration.telemetry.tracing import MigrationTracing

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_CHECK_LOOKS = 30
"""Interval of checks that the persistent state is still stored, in looks."""
_TICK_SECONDS = 1e-3
"""Shortest wait: a clock may not advance by less."""
_RETRY_SECONDS = 5.0
"""Delay before a failed action is retried."""
MOST_ENGINES = 1024
"""Limit on the engines whose plans are remembered, present or gone."""


class Controller:
    """Used on one event loop, on the leader. clock: monotonic seconds; wall: Unix seconds."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        config: MigrationConfig,
        ledger: PlacementRegistry,
        watch: DemandWindows,
        measured: DispatchWindows,
        inquiries: PlanQueries,
        conductor: PlanExecutor,
        requests: OperatorCommands,
        lead: LeaderLease,
        metrics: MigrationMetrics,
        tracing: MigrationTracing | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._config = config
        self._ledger = ledger
        self._watch = watch
        self._measured = measured
        self._inquiries = inquiries
        self._conductor = conductor
        self._requests = requests
        self._metrics = metrics
        self._clock = clock
        self._wall = wall
        self._remembering = StateStore(bus, subjects.loop_key, lead.standing)
        self._judge = PlanEvaluator(bus, subjects, config, watch, measured, inquiries, conductor, requests, self._remembering, metrics, tracing, clock, wall)
        self._housing = HomesPublisher(bus, subjects, ledger, watch, metrics, self._under_way)
        self._annals: dict[str, PlanHistory] = {}
        """by engine"""
        self._pilots: dict[str, EngineLoopState] = {}
        """by engine, present engines only"""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._woken: dict[str, asyncio.Event] = {}

    async def run(self, ready: Callable[[], None]) -> None:
        """Run until cancelled. ready: called once all durable state is read.

        Raises BusError if it cannot be read at the start.
        """
        await self._remembering.read()
        async for received in self._bus.replay(self._subjects.migrations(), follow=False):
            await self._heard(received.message, received.published_at)
        async with asyncio.TaskGroup() as tasks:
            self._look(tasks)
            ready()
            tasks.create_task(self._follow(), name="follow the log of plans")
            for looks in itertools.count(1):
                await asyncio.sleep(_LOOK_SECONDS)
                if looks % _CHECK_LOOKS == 0:
                    await self._remembering.check()
                await self._remembering.keep()
                self._watch.turn(self._clock())
                self._look(tasks)

    def reconfigure(self, config: MigrationConfig) -> None:
        """Use new settings from now on."""
        self._config = config
        self._judge.reconfigure(config)
        now = self._clock()
        for pilot in self._pilots.values():
            pilot.next_at = min(pilot.next_at, now + config.cycle_seconds)
            self._woken[pilot.engine].set()

    # Requests

    async def answer(self, message: Message) -> Message:
        """Answer a request from the bus."""
        if isinstance(message, SteerLoop):
            try:
                await self._remembering.steer(message.paused, message.reason, self._wall())
            except BusError as error:
                return RequestRefused(reason=f"the change could not be stored and has no effect: {error}; try again")
            logger.info("plans of our own: %s", f"paused ({message.reason or 'no reason given'})" if message.paused else "made again")
            for pilot in self._pilots.values() if not message.paused else ():
                pilot.next_at = self._clock()
                self._woken[pilot.engine].set()
        elif not isinstance(message, DescribeLoop):
            return RequestRefused(reason=f"a {type(message).__name__} is no request for this subject; send a SteerLoop or a DescribeLoop")
        return self.described()

    def trust(self, engine: str) -> float:
        """Return the current discount factor on the predicted gains of an engine, in (0, 1]."""
        return self._judge.trust(engine)

    def described(self) -> LoopDescribed:
        """Describe the state of the control loop."""
        memory, config, now = self._remembering.memory, self._config, self._clock()
        here = [(self._pilots[engine], entry) for engine, entry in sorted(self._ledger.engines().items()) if engine in self._pilots]
        return LoopDescribed(
            policy=config.policy,
            automatic=config.automatic,
            paused=memory.paused,
            paused_reason=memory.paused_reason,
            paused_at=memory.paused_at,
            budget_bytes=config.budget_bytes,
            budget_seconds=config.budget_seconds,
            cycle_seconds=config.cycle_seconds,
            engines=tuple(story(pilot, self._standing(pilot, entry), config, now) for pilot, entry in here),
        )

    def _standing(self, pilot: EngineLoopState, entry: EngineEntry) -> EngineStanding:
        now, memory = self._clock(), self._judge.memory(pilot.engine).begun(pilot.worker_id)
        window = self._window(entry, now)
        return EngineStanding(entry.epoch, window, memory.at_start, self._judge.trust(pilot.engine), self._watch.resting(pilot.worker_id, now))

    def _window(self, entry: EngineEntry, now: float) -> DispatchWindow | None:
        """Return the latest measurements, of the served epoch if there are enough."""
        seconds = self._config.window_seconds
        of_now = self._measured.window(entry.worker_id, entry.layout.boundary, now, epoch=entry.epoch, seconds=seconds)
        return of_now or self._measured.window(entry.worker_id, entry.layout.boundary, now, seconds=seconds)

    # Reports

    def shifted(self, said: PopularityShifted) -> None:
        """Apply that the popularity of a model shifted, or has settled."""
        now = self._clock()
        if not said.settled:
            self._watch.shifted(said.model, now)
        for pilot in self._pilots.values():
            if self._watch.model(pilot.worker_id) != said.model:
                continue
            if said.settled:
                pilot.settled()
            else:
                pilot.shifted(DemandShift(now, said.traceparent))
                self._woken[pilot.engine].set()

    async def _follow(self) -> None:
        async for received in self._bus.replay(self._subjects.migrations()):
            await self._heard(received.message, received.published_at)

    async def _heard(self, said: Message, published_at: float) -> None:
        """Apply one entry of the log of plans, old or new."""
        if not isinstance(said, MigrationPlanned | MigrationStaged | MigrationCommitted | MigrationAborted | PlanJudged):
            return
        annals = self._annals.get(said.engine)
        if annals is None:
            annals = self._begin(said.engine)
        at = min(published_at, self._wall())  # a publisher whose clock is ahead of ours must not prevent learning until then
        if annals.hear(said, self._clock() - (self._wall() - at), at):
            if isinstance(said, PlanJudged):
                await self._judge.learn(said, at)
            if (pilot := self._pilots.get(said.engine)) is not None:
                self._news(pilot, said)

    def _news(self, pilot: EngineLoopState, said: MigrationPlanned | MigrationStaged | MigrationCommitted | MigrationAborted | PlanJudged) -> None:
        """Update the engine after a log entry.

        The end of any plan changes the homes, regardless of its origin.
        """
        last = pilot.annals.last
        if isinstance(said, MigrationCommitted | MigrationAborted) and last is not None and last.end is said:
            pilot.next_at = self._clock()
            if last.own:
                self._metrics.plan_ended(last.planned.origin, "committed" if last.whole else "aborted")
            if last.undoes and isinstance(said, MigrationAborted) and (harmful := pilot.annals.to_undo) is not None:
                pilot.undoing_of(harmful).failed(f"that was given up: {said.reason}", self._clock(), self._config.cycle_seconds)
            if (entry := self._ledger.entry(pilot.worker_id)) is not None:
                self._judge.rest(entry, pilot.annals)
        self._woken[pilot.engine].set()

    def _begin(self, engine: str) -> PlanHistory:
        """Start the history of a new engine. If there are too many, drop the oldest engine that is gone."""
        if len(self._annals) >= MOST_ENGINES:
            gone = next((known for known in self._annals if known not in self._pilots), None)
            if gone is not None:
                del self._annals[gone]
        annals = self._annals[engine] = PlanHistory()
        return annals

    # Membership

    def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Run one task for every present engine, and none for others."""
        now, engines = self._clock(), self._ledger.engines()
        for engine, pilot in list(self._pilots.items()):
            entry = engines.get(engine)
            if entry is None or entry.worker_id != pilot.worker_id:
                self._tasks.pop(engine).cancel()
                del self._pilots[engine], self._woken[engine]
        for engine, entry in engines.items():
            if engine not in self._pilots:
                annals = self._annals.get(engine) or self._begin(engine)
                pilot = self._pilots[engine] = EngineLoopState(engine, entry.worker_id, now + self._config.cycle_seconds, annals)
                self._woken[engine] = asyncio.Event()
                self._judge.rest(entry, annals)
                self._tasks[engine] = tasks.create_task(self._pilot(pilot), name=f"plan for engine {engine} and evaluate its plans")
        self._housing.keep_only({entry.worker_id for entry in engines.values()})
        self._expose(now)

    def _expose(self, now: float) -> None:
        self._metrics.stored_bytes.set(self._watch.stored_bytes)
        self._metrics.bus_full(self._bus.full)
        self._metrics.paused(self._remembering.memory.paused)
        for engine, pilot in self._pilots.items():
            entry = self._ledger.engines()[engine]
            window = self._window(entry, now)
            if window is not None:
                self._metrics.measured(engine, window.measured.figures, window.layers)
            spent = pilot.annals.spending.within(now, self._config.budget_seconds)
            self._metrics.loop(engine, self._judge.trust(engine), spent, pilot.left_bytes(now, self._config))

    # Actions

    async def _pilot(self, pilot: EngineLoopState) -> None:
        """Run the loop of one engine until cancelled.

        Failures are logged and retried: a defect in a planning run must not stop the recording of placements.
        """
        woken = self._woken[pilot.engine]
        while True:
            woken.clear()
            wait = pilot.due(self._config) - self._clock()
            if wait > 0:
                try:
                    async with asyncio.timeout(max(wait, _TICK_SECONDS)):
                        await woken.wait()
                except TimeoutError:
                    pass  # the next action is due
                await self._housing.settle(pilot)
                continue
            await self._tried(pilot)

    async def _tried(self, pilot: EngineLoopState) -> None:
        try:
            await self._turn(pilot)
        except BusError as error:
            logger.warning("the control loop of engine %s is held up: %s", pilot.engine, error)
            pilot.retry_at = self._clock() + _RETRY_SECONDS
        except Exception:
            self._metrics.unknown("failed")
            logger.exception("planning for engine %s failed", pilot.engine)
            await self._housing.again(pilot)
            pilot.rested(self._clock(), None, self._config)
            pilot.retry_at = self._clock() + _RETRY_SECONDS

    async def _turn(self, pilot: EngineLoopState) -> None:
        """Perform one due action."""
        now, entry = self._clock(), self._ledger.entry(pilot.worker_id)
        if entry is None:
            pilot.retry_at = now + _RETRY_SECONDS
            return
        await self._housing.settle(pilot)
        if (harmful := pilot.to_undo) is not None and pilot.undo_at() <= now:
            await self._undo(pilot, harmful)
        elif (tale := pilot.annals.to_judge) is not None and pilot.judge_at(self._config) <= now:
            await self._judge.judge(pilot, entry, tale)
        else:
            await self._think(pilot, entry)

    async def _undo(self, pilot: EngineLoopState, tale: PlanStory) -> None:
        undoing = pilot.undoing_of(tale)
        try:
            if not self._acting():
                raise ValueError("automatic plans were off at that time: roost rollback")  # noqa: TRY301
            harm = await self._judge.undo(pilot, tale, self._acting)
        except (ExecutorBusy, RankFull, Unfit) as error:
            undoing.failed(str(error), self._clock(), self._config.cycle_seconds)
        except ValueError as error:
            undoing.never(str(error))
        else:
            undoing.begun()
            pilot.told(f"plan {tale.planned.plan} did harm and is rolled back", self._wall())
            await self._judge.harmed(pilot.engine, harm)
            return
        logger.warning("engine %s: %s", pilot.engine, undoing.trouble)

    async def _think(self, pilot: EngineLoopState, entry: EngineEntry) -> None:
        """Plan for the engine, and carry out a plan that pays if nothing forbids it."""
        now, config = self._clock(), self._config
        self._watch.turn(now)
        await self._start(pilot, entry, now)
        answers, again = pilot.answers(now, config), self._watch.hurried(pilot.worker_id)
        pilot.rested(now, again, config)
        if self._under_way(pilot.engine):
            await self._housing.again(pilot)
            last = pilot.annals.last
            if last is not None and last.end is not None:  # the log entry arrived before its writer saw the acknowledgement
                pilot.next_at = now + _LOOK_SECONDS
            return
        question = PlanningQuestion(config.policy, pilot.left_bytes(now, config), trust=self._judge.trust(pilot.engine))
        try:
            decided = await self._inquiries.decide(entry, question)
        except InvalidPlacementEvent as refusal:
            logger.debug("no plan for engine %s: %s", entry.engine, refusal)
            pilot.told(str(refusal), self._wall())
            await self._housing.again(pilot)
            return
        self._metrics.figures(decided.record)
        await self._housing.now(pilot, entry, decided.homes)
        if decided.plan is None or decided.plan.refused:
            pilot.told(decided.record.refused or "there is no plan", self._wall())
            return
        await self._decided(pilot, decided, answers)

    async def _decided(self, pilot: EngineLoopState, decided: PlannerDecision, answers: DemandShift | None) -> None:
        """Carry out a plan that pays, or state why not."""
        plan, record, paused = decided.plan, decided.record, self._remembering.memory
        if plan is None:
            return
        try:
            entry = self._requests.movable(pilot.engine)
        except ValueError as error:
            return pilot.told(str(error), self._wall())
        if self._overtaken(pilot, plan):
            return pilot.told("others moved experts during planning", self._wall())
        if pilot.shift is not None and pilot.shift is not answers:
            return pilot.told("popularity shifted during planning", self._wall())
        reason = withheld(pilot, record, self._config, paused.paused_reason if paused.paused else None, answers, self._clock())
        if reason:
            return pilot.told(f"{plan.reason}: not carried out, {reason}", self._wall())
        await self._carry_out(pilot, entry, decided, answers)
        return None

    async def _carry_out(self, pilot: EngineLoopState, entry: EngineEntry, decided: PlannerDecision, answers: DemandShift | None) -> None:
        plan, record = decided.plan, decided.record
        if plan is None:
            return
        try:
            await self._conductor.survey(entry, ASK_SECONDS)
            if not self._acting():
                raise ValueError("it was paused, or planner.automatic turned off, meanwhile")  # noqa: TRY301
            if self._overtaken(pilot, plan):
                raise ValueError("others moved experts meanwhile")  # noqa: TRY301
            if (unjudged := pilot.annals.to_judge) is not None:  # only once it is nearly certain that another plan follows
                await self._judge.judge(pilot, entry, unjudged, "demand shifted, and another plan follows before it could be judged")
            why = grounds(record, "" if answers is None else answers.traceparent)
            accepted = await self._conductor.accept(entry, plan, "planner", why, self._acting)
        except (ValueError, Unfit) as error:
            return pilot.told(f"{plan.reason}: not carried out, {error}", self._wall())
        caused = "because popularity shifted" if answers is not None else "of the cycle"
        pilot.told(f"{plan.reason}: plan {accepted.plan} ({caused}) is being carried out", self._wall())
        pilot.settled()
        await self._judge.begun(pilot, entry, accepted.plan, record, plan.base_epoch)
        await self._housing.after(pilot, entry, decided.homes_after, plan.base_epoch + len(plan.handovers))
        return None

    def _acting(self) -> bool:
        """Return True if automatic plans may be carried out."""
        return self._config.automatic and not self._remembering.memory.paused

    def _overtaken(self, pilot: EngineLoopState, plan: Plan) -> bool:
        """Return True if the placement that a plan was made for is outdated, or another plan is under way."""
        entry = self._ledger.engines().get(pilot.engine)
        return entry is None or (entry.worker_id, entry.epoch) != (pilot.worker_id, plan.base_epoch) or self._under_way(pilot.engine)

    def _under_way(self, engine: str) -> bool:
        """Return True if an engine has an unfinished plan."""
        try:
            self._conductor.refuse_second(engine)
        except ValueError:
            return True
        return False

    async def _start(self, pilot: EngineLoopState, entry: EngineEntry, now: float) -> None:
        """Store the first measurements of this incarnation."""
        memory = self._judge.memory(pilot.engine).begun(pilot.worker_id)
        if memory.at_start is None:
            window = self._measured.window(pilot.worker_id, entry.layout.boundary, now, seconds=self._config.window_seconds)
            if window is not None:
                started = msgspec.structs.replace(memory, at_start=window.measured.figures)
                await self._remembering.keep(self._remembering.memory.remembering(pilot.engine, started))
