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
from fleet.facts.demand import PopularityShifted
from fleet.facts.migrations import (
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    MigrationStaged,
    PlanEvaluated,
)
from fleet.requests.control_loop import DescribeLoop, LoopDescribed, SetLoopState
from fleet.requests.refusal import RequestRefused
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
from migration.loop_state.engine_loop import (
    DemandShift,
    EngineLoopState,
    EngineStanding,
    grounds,
    story,
    withheld,
)
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
        self._plan_queries = inquiries
        self._executor = conductor
        self._requests = requests
        self._metrics = metrics
        self._clock = clock
        self._wall = wall
        self._state_store = StateStore(bus, subjects.loop_key, lead.standing)
        self._evaluator = PlanEvaluator(
            bus,
            subjects,
            config,
            watch,
            measured,
            inquiries,
            conductor,
            requests,
            self._state_store,
            metrics,
            tracing,
            clock,
            wall,
        )
        self._homes = HomesPublisher(bus, subjects, ledger, watch, metrics, self._under_way)
        self._histories: dict[str, PlanHistory] = {}
        """by engine"""
        self._loops: dict[str, EngineLoopState] = {}
        """by engine, present engines only"""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wakeups: dict[str, asyncio.Event] = {}

    async def run(self, ready: Callable[[], None]) -> None:
        """Run until cancelled. ready: called once all durable state is read.

        Raises BusError if it cannot be read at the start.
        """
        await self._state_store.read()
        async for received in self._bus.replay(self._subjects.migrations(), follow=False):
            await self._apply(received.message, received.published_at)
        async with asyncio.TaskGroup() as tasks:
            self._look(tasks)
            ready()
            tasks.create_task(self._follow(), name="follow the log of plans")
            for looks in itertools.count(1):
                await asyncio.sleep(_LOOK_SECONDS)
                if looks % _CHECK_LOOKS == 0:
                    await self._state_store.check()
                await self._state_store.keep()
                self._watch.turn(self._clock())
                self._look(tasks)

    def reconfigure(self, config: MigrationConfig) -> None:
        """Use new settings from now on."""
        self._config = config
        self._evaluator.reconfigure(config)
        now = self._clock()
        for loop in self._loops.values():
            loop.next_at = min(loop.next_at, now + config.cycle_seconds)
            self._wakeups[loop.engine].set()

    # Requests

    async def answer(self, message: Message) -> Message:
        """Answer a request from the bus."""
        if isinstance(message, SetLoopState):
            try:
                await self._state_store.steer(message.paused, message.reason, self._wall())
            except BusError as error:
                return RequestRefused(
                    reason=f"the change could not be stored and has no effect: {error}; try again"
                )
            logger.info(
                "plans of our own: %s",
                f"paused ({message.reason or 'no reason given'})" if message.paused else "made again",
            )
            for loop in self._loops.values() if not message.paused else ():
                loop.next_at = self._clock()
                self._wakeups[loop.engine].set()
        elif not isinstance(message, DescribeLoop):
            return RequestRefused(
                reason=(
                    f"a {type(message).__name__} is no request for this subject; send a SetLoopState or a"
                    " DescribeLoop"
                )
            )
        return self.described()

    def trust(self, engine: str) -> float:
        """Return the current discount factor on the predicted gains of an engine, in (0, 1]."""
        return self._evaluator.trust(engine)

    def described(self) -> LoopDescribed:
        """Describe the state of the control loop."""
        memory, config, now = self._state_store.memory, self._config, self._clock()
        here = [
            (self._loops[engine], entry)
            for engine, entry in sorted(self._ledger.engines().items())
            if engine in self._loops
        ]
        return LoopDescribed(
            policy=config.policy,
            automatic=config.automatic,
            paused=memory.paused,
            paused_reason=memory.paused_reason,
            paused_at=memory.paused_at,
            budget_bytes=config.budget_bytes,
            budget_seconds=config.budget_seconds,
            cycle_seconds=config.cycle_seconds,
            engines=tuple(story(loop, self._standing(loop, entry), config, now) for loop, entry in here),
        )

    def _standing(self, loop: EngineLoopState, entry: EngineEntry) -> EngineStanding:
        now, memory = self._clock(), self._evaluator.memory(loop.engine).begun(loop.worker_id)
        window = self._window(entry, now)
        return EngineStanding(
            entry.epoch,
            window,
            memory.at_start,
            self._evaluator.trust(loop.engine),
            self._watch.resting(loop.worker_id, now),
        )

    def _window(self, entry: EngineEntry, now: float) -> DispatchWindow | None:
        """Return the latest measurements, of the served epoch if there are enough."""
        seconds = self._config.window_seconds
        of_now = self._measured.window(
            entry.worker_id, entry.layout.boundary, now, epoch=entry.epoch, seconds=seconds
        )
        return of_now or self._measured.window(entry.worker_id, entry.layout.boundary, now, seconds=seconds)

    # Reports

    def shifted(self, said: PopularityShifted) -> None:
        """Apply that the popularity of a model shifted, or has settled."""
        now = self._clock()
        if not said.settled:
            self._watch.shifted(said.model, now)
        for loop in self._loops.values():
            if self._watch.model(loop.worker_id) != said.model:
                continue
            if said.settled:
                loop.settled()
            else:
                loop.shifted(DemandShift(now, said.traceparent))
                self._wakeups[loop.engine].set()

    async def _follow(self) -> None:
        async for received in self._bus.replay(self._subjects.migrations()):
            await self._apply(received.message, received.published_at)

    async def _apply(self, event: Message, published_at: float) -> None:
        """Apply one entry of the log of plans, old or new."""
        if not isinstance(
            event, MigrationPlanned | MigrationStaged | MigrationCommitted | MigrationAborted | PlanEvaluated
        ):
            return
        history = self._histories.get(event.engine)
        if history is None:
            history = self._begin(event.engine)
        # a publisher whose clock is ahead of ours must not prevent learning until then
        at = min(published_at, self._wall())
        if history.hear(event, self._clock() - (self._wall() - at), at):
            if isinstance(event, PlanEvaluated):
                await self._evaluator.learn(event, at)
            if (loop := self._loops.get(event.engine)) is not None:
                self._update(loop, event)

    def _update(
        self,
        loop: EngineLoopState,
        event: MigrationPlanned | MigrationStaged | MigrationCommitted | MigrationAborted | PlanEvaluated,
    ) -> None:
        """Update the engine after a log entry.

        The end of any plan changes the homes, regardless of its origin.
        """
        last = loop.annals.last
        if (
            isinstance(event, MigrationCommitted | MigrationAborted)
            and last is not None
            and last.end is event
        ):
            loop.next_at = self._clock()
            if last.own:
                self._metrics.plan_ended(last.planned.origin, "committed" if last.whole else "aborted")
            if (
                last.undoes
                and isinstance(event, MigrationAborted)
                and (harmful := loop.annals.to_undo) is not None
            ):
                loop.undoing_of(harmful).failed(
                    f"that was given up: {event.reason}", self._clock(), self._config.cycle_seconds
                )
            if (entry := self._ledger.entry(loop.worker_id)) is not None:
                self._evaluator.rest(entry, loop.annals)
        self._wakeups[loop.engine].set()

    def _begin(self, engine: str) -> PlanHistory:
        """Start the history of a new engine. If there are too many, drop the oldest engine that is gone."""
        if len(self._histories) >= MOST_ENGINES:
            gone = next((known for known in self._histories if known not in self._loops), None)
            if gone is not None:
                del self._histories[gone]
        history = self._histories[engine] = PlanHistory()
        return history

    # Membership

    def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Run one task for every present engine, and none for others."""
        now, engines = self._clock(), self._ledger.engines()
        for engine, loop in list(self._loops.items()):
            entry = engines.get(engine)
            if entry is None or entry.worker_id != loop.worker_id:
                self._tasks.pop(engine).cancel()
                del self._loops[engine], self._wakeups[engine]
        for engine, entry in engines.items():
            if engine not in self._loops:
                history = self._histories.get(engine) or self._begin(engine)
                loop = self._loops[engine] = EngineLoopState(
                    engine, entry.worker_id, now + self._config.cycle_seconds, history
                )
                self._wakeups[engine] = asyncio.Event()
                self._evaluator.rest(entry, history)
                self._tasks[engine] = tasks.create_task(
                    self._run_engine(loop), name=f"plan for engine {engine} and evaluate its plans"
                )
        self._homes.keep_only({entry.worker_id for entry in engines.values()})
        self._expose(now)

    def _expose(self, now: float) -> None:
        self._metrics.stored_bytes.set(self._watch.stored_bytes)
        self._metrics.bus_full(self._bus.full)
        self._metrics.paused(self._state_store.memory.paused)
        for engine, loop in self._loops.items():
            entry = self._ledger.engines()[engine]
            window = self._window(entry, now)
            if window is not None:
                self._metrics.measured(engine, window.measured.figures, window.layers)
            spent = loop.annals.spending.within(now, self._config.budget_seconds)
            self._metrics.loop(
                engine, self._evaluator.trust(engine), spent, loop.left_bytes(now, self._config)
            )

    # Actions

    async def _run_engine(self, loop: EngineLoopState) -> None:
        """Run the loop of one engine until cancelled.

        Failures are logged and retried: a defect in a planning run must not stop the recording of placements.
        """
        woken = self._wakeups[loop.engine]
        while True:
            woken.clear()
            wait = loop.due(self._config) - self._clock()
            if wait > 0:
                try:
                    async with asyncio.timeout(max(wait, _TICK_SECONDS)):
                        await woken.wait()
                except TimeoutError:
                    pass  # the next action is due
                await self._homes.settle(loop)
                continue
            await self._try_turn(loop)

    async def _try_turn(self, loop: EngineLoopState) -> None:
        try:
            await self._turn(loop)
        except BusError as error:
            logger.warning("the control loop of engine %s is held up: %s", loop.engine, error)
            loop.retry_at = self._clock() + _RETRY_SECONDS
        except Exception:
            self._metrics.unknown("failed")
            logger.exception("planning for engine %s failed", loop.engine)
            await self._homes.again(loop)
            loop.rested(self._clock(), None, self._config)
            loop.retry_at = self._clock() + _RETRY_SECONDS

    async def _turn(self, loop: EngineLoopState) -> None:
        """Perform one due action."""
        now, entry = self._clock(), self._ledger.entry(loop.worker_id)
        if entry is None:
            loop.retry_at = now + _RETRY_SECONDS
            return
        await self._homes.settle(loop)
        if (harmful := loop.to_undo) is not None and loop.undo_at() <= now:
            await self._undo(loop, harmful)
        elif (tale := loop.annals.to_judge) is not None and loop.judge_at(self._config) <= now:
            await self._evaluator.judge(loop, entry, tale)
        else:
            await self._plan_engine(loop, entry)

    async def _undo(self, loop: EngineLoopState, tale: PlanStory) -> None:
        undoing = loop.undoing_of(tale)
        try:
            if not self._acting():
                raise ValueError("automatic plans were off at that time: roost rollback")  # noqa: TRY301
            harm = await self._evaluator.undo(loop, tale, self._acting)
        except (ExecutorBusy, RankFull, Unfit) as error:
            undoing.failed(str(error), self._clock(), self._config.cycle_seconds)
        except ValueError as error:
            undoing.never(str(error))
        else:
            undoing.begun()
            loop.told(f"plan {tale.planned.plan} did harm and is rolled back", self._wall())
            await self._evaluator.harmed(loop.engine, harm)
            return
        logger.warning("engine %s: %s", loop.engine, undoing.trouble)

    async def _plan_engine(self, loop: EngineLoopState, entry: EngineEntry) -> None:
        """Plan for the engine, and carry out a plan that pays if nothing forbids it."""
        now, config = self._clock(), self._config
        self._watch.turn(now)
        await self._start(loop, entry, now)
        answers, again = loop.answers(now, config), self._watch.hurried(loop.worker_id)
        loop.rested(now, again, config)
        if self._under_way(loop.engine):
            await self._homes.again(loop)
            last = loop.annals.last
            # the log entry arrived before its writer saw the acknowledgement
            if last is not None and last.end is not None:
                loop.next_at = now + _LOOK_SECONDS
            return
        question = PlanningQuestion(
            config.policy, loop.left_bytes(now, config), trust=self._evaluator.trust(loop.engine)
        )
        try:
            decided = await self._plan_queries.decide(entry, question)
        except InvalidPlacementEvent as refusal:
            logger.debug("no plan for engine %s: %s", entry.engine, refusal)
            loop.told(str(refusal), self._wall())
            await self._homes.again(loop)
            return
        self._metrics.figures(decided.record)
        await self._homes.now(loop, entry, decided.homes)
        if decided.plan is None or decided.plan.refused:
            loop.told(decided.record.refused or "there is no plan", self._wall())
            return
        await self._decided(loop, decided, answers)

    async def _decided(
        self, loop: EngineLoopState, decided: PlannerDecision, answers: DemandShift | None
    ) -> None:
        """Carry out a plan that pays, or state why not."""
        plan, record, paused = decided.plan, decided.record, self._state_store.memory
        if plan is None:
            return
        try:
            entry = self._requests.movable(loop.engine)
        except ValueError as error:
            return loop.told(str(error), self._wall())
        if self._overtaken(loop, plan):
            return loop.told("others moved experts during planning", self._wall())
        if loop.shift is not None and loop.shift is not answers:
            return loop.told("popularity shifted during planning", self._wall())
        reason = withheld(
            loop,
            record,
            self._config,
            paused.paused_reason if paused.paused else None,
            answers,
            self._clock(),
        )
        if reason:
            return loop.told(f"{plan.reason}: not carried out, {reason}", self._wall())
        await self._carry_out(loop, entry, decided, answers)
        return None

    async def _carry_out(
        self, loop: EngineLoopState, entry: EngineEntry, decided: PlannerDecision, answers: DemandShift | None
    ) -> None:
        plan, record = decided.plan, decided.record
        if plan is None:
            return
        try:
            await self._executor.survey(entry, ASK_SECONDS)
            if not self._acting():
                raise ValueError("it was paused, or planner.automatic turned off, meanwhile")  # noqa: TRY301
            if self._overtaken(loop, plan):
                raise ValueError("others moved experts meanwhile")  # noqa: TRY301
            # only once it is nearly certain that another plan follows
            if (unjudged := loop.annals.to_judge) is not None:
                await self._evaluator.judge(
                    loop,
                    entry,
                    unjudged,
                    "demand shifted, and another plan follows before it could be judged",
                )
            why = grounds(record, "" if answers is None else answers.traceparent)
            accepted = await self._executor.accept(entry, plan, "planner", why, self._acting)
        except (ValueError, Unfit) as error:
            return loop.told(f"{plan.reason}: not carried out, {error}", self._wall())
        caused = "because popularity shifted" if answers is not None else "of the cycle"
        loop.told(f"{plan.reason}: plan {accepted.plan} ({caused}) is being carried out", self._wall())
        loop.settled()
        await self._evaluator.begun(loop, entry, accepted.plan, record, plan.base_epoch)
        await self._homes.after(loop, entry, decided.homes_after, plan.base_epoch + len(plan.handovers))
        return None

    def _acting(self) -> bool:
        """Return True if automatic plans may be carried out."""
        return self._config.automatic and not self._state_store.memory.paused

    def _overtaken(self, loop: EngineLoopState, plan: Plan) -> bool:
        """Return True if the placement that a plan was made for is outdated, or another plan is under way."""
        entry = self._ledger.engines().get(loop.engine)
        return (
            entry is None
            or (entry.worker_id, entry.epoch) != (loop.worker_id, plan.base_epoch)
            or self._under_way(loop.engine)
        )

    def _under_way(self, engine: str) -> bool:
        """Return True if an engine has an unfinished plan."""
        try:
            self._executor.refuse_second(engine)
        except ValueError:
            return True
        return False

    async def _start(self, loop: EngineLoopState, entry: EngineEntry, now: float) -> None:
        """Store the first measurements of this incarnation."""
        memory = self._evaluator.memory(loop.engine).begun(loop.worker_id)
        if memory.at_start is None:
            window = self._measured.window(
                loop.worker_id, entry.layout.boundary, now, seconds=self._config.window_seconds
            )
            if window is not None:
                started = msgspec.structs.replace(memory, at_start=window.measured.figures)
                await self._state_store.keep(self._state_store.memory.remembering(loop.engine, started))
