"""Control loop of one engine: plans, carries out plans that pay, evaluates them, undoes harm.

It runs in a task of its own, so that a failure of one engine does not delay another.
"""

import asyncio
import logging
from math import inf

import msgspec

from bus import BusError
from fleet.facts.activity import DispatchMeasured
from fleet.facts.demand import PopularityShifted
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.migrations import MigrationAborted, MigrationStaged
from fleet.requests.control_loop import EngineLoop
from fleet.requests.layouts import EngineLayout
from migration.config import MigrationConfig
from migration.control_loop.context import LoopContext
from migration.control_loop.evaluator import PlanEvaluator
from migration.control_loop.homes_publisher import HomesPublisher
from migration.control_loop.layout_switcher import LayoutSwitcher
from migration.control_loop.state_store import StateStore
from migration.engine_state.placement_registry import EngineEntry, InvalidPlacementEvent
from migration.execution.executor import ExecutorBusy
from migration.execution.handover_driver import Unfit
from migration.loop_state.dispatch_windows import DispatchWindow
from migration.loop_state.engine_loop import (
    DemandShift,
    EngineLoopState,
    EngineStanding,
    described,
    grounds,
    withheld,
)
from migration.loop_state.plan_history import to_evaluate, to_undo
from migration.model.plan import Plan
from migration.model.plan_log import PlanEntry, PlanRun
from migration.planning.layer_turns import TurnedLayers
from migration.planning.planner_decision import PlannerDecision
from migration.planning.problem import LayerTurning, PlanningQuestion
from migration.requests.operator_commands import ASK_SECONDS
from migration.requests.switch_plans import RankFull

logger = logging.getLogger(__name__)

_TICK_SECONDS = 1e-3
"""Shortest wait: a clock may not advance by less."""
_TOO_LITTLE = "single layers: too little demand was seen"
_RETRY_SECONDS = 5.0
"""Delay before a failed action is retried."""


class EngineController:
    """Used on one event loop, on the leader, for one incarnation of an engine."""

    def __init__(
        self,
        context: LoopContext,
        config: MigrationConfig,
        state_store: StateStore,
        evaluator: PlanEvaluator,
        homes: HomesPublisher,
        entry: EngineEntry,
    ) -> None:
        self.engine, self.worker_id = entry.engine, entry.worker_id
        self._context = context
        self._config = config
        self._state_store = state_store
        self._evaluator = evaluator
        self._homes = homes
        self._state = EngineLoopState(
            entry.engine,
            entry.worker_id,
            context.clock() + config.cycle_seconds,
            context.plans(entry.engine),
        )
        self._wakeup = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._layouts = LayoutSwitcher(
            context, config, state_store, entry, lambda: evaluator.plan_discount(self.engine)
        )
        evaluator.rest(entry)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run in a task of this group."""
        self._task = tasks.create_task(
            self._run(), name=f"plan for engine {self.engine} and evaluate its plans"
        )

    def stop(self) -> None:
        """End the task."""
        if self._task is not None:
            self._task.cancel()

    # Events

    def reconfigure(self, config: MigrationConfig) -> None:
        """Use new settings from now on."""
        self._config = config
        self._layouts.reconfigure(config)
        self._plan_by(self._context.clock() + config.cycle_seconds)

    def resume(self) -> None:
        """Plan at once."""
        self._plan_by(self._context.clock())

    def shifted(self, message: PopularityShifted) -> None:
        """Apply that the popularity of a model shifted, or has settled."""
        if self._context.demand.model(self.worker_id) != message.model:
            return
        if message.settled:
            self._state.shift = None
        else:
            self._state.shifted(DemandShift(self._context.clock(), message.traceparent))
            self._wakeup.set()

    def loaded(self, report: KvMetrics) -> None:
        """Apply the load of a target. The policy may ask for a switch of layout."""
        at = self._layouts.loaded(report)
        if at < self._state.switch_at:
            self._state.switch_at = at
            self._wakeup.set()

    def dispatched(self, report: DispatchMeasured) -> None:
        """Apply what a rank's steps dispatched."""
        self._layouts.dispatched(report)

    def logged(self, entry: PlanEntry) -> None:
        """Apply a new log entry about this engine.

        The end of any plan changes the homes, regardless of its origin.
        """
        if isinstance(entry, MigrationStaged):
            return
        run = self._state.plans.last
        if run is not None and run.end is entry:
            self._ended(run)
        self._wakeup.set()

    def _ended(self, run: PlanRun) -> None:
        now, aborted = self._context.clock(), run.end if isinstance(run.end, MigrationAborted) else None
        self._state.next_at = now
        self._layouts.ended(run.plan)
        if run.own:
            self._context.metrics.plan_ended(
                run.planned.origin, "committed" if aborted is None else "aborted"
            )
        harmful = to_undo(self._state.plans)
        if run.undoes and aborted is not None and harmful is not None:
            self._state.rollback_of(harmful).failed(
                f"that was given up: {aborted.reason}", now, self._config.cycle_seconds
            )
        if (entry := self._context.placements.entry(self.worker_id)) is not None:
            self._evaluator.rest(entry)

    def _plan_by(self, at: float) -> None:
        self._state.next_at = min(self._state.next_at, at)
        self._wakeup.set()

    # Reports

    def describe(self, entry: EngineEntry) -> EngineLoop:
        """Describe the loop of this engine."""
        memory = self._evaluator.memory(self.engine).begun(self.worker_id)
        now = self._context.clock()
        standing = EngineStanding(
            entry.epoch,
            self._window(entry),
            memory.at_start,
            self._evaluator.plan_discount(self.engine),
            self._context.demand.resting(self.worker_id, now),
            self._context.executor.pending(self.engine),
        )
        return described(self._state, standing, self._config, now)

    def publish_metrics(self, entry: EngineEntry) -> None:
        """Update the metrics of this engine."""
        now, metrics = self._context.clock(), self._context.metrics
        if (window := self._window(entry)) is not None:
            metrics.measured(self.engine, window.measured.figures, window.layers)
        metrics.loop(
            self.engine,
            self._evaluator.plan_discount(self.engine),
            self._state.plans.spending.within(now, self._config.budget_seconds),
            self._state.left_bytes(now, self._config),
        )

    def _window(self, entry: EngineEntry) -> DispatchWindow | None:
        """Return the latest measurements, of the served epoch if there are enough."""
        seconds = self._config.window_seconds
        of_served = self._context.measured(entry, epoch=entry.epoch, seconds=seconds)
        return of_served or self._context.measured(entry, seconds=seconds)

    # Actions

    async def _run(self) -> None:
        """Run the loop until cancelled."""
        while True:
            self._wakeup.clear()
            wait = self._state.due(self._config) - self._context.clock()
            if wait > 0:
                try:
                    async with asyncio.timeout(max(wait, _TICK_SECONDS)):
                        await self._wakeup.wait()
                except TimeoutError:
                    pass  # the next action is due
                await self._homes.settle(self._state)
                continue
            await self._try_act()

    async def _try_act(self) -> None:
        """Perform one due action.

        Failures are logged and retried: a defect in a planning run must not stop the recording of placements.
        """
        state = self._state
        try:
            await self._act()
        except BusError as error:
            logger.warning("the control loop of engine %s is held up: %s", self.engine, error)
            state.retry_at = self._context.clock() + _RETRY_SECONDS
        except Exception:
            self._context.metrics.unknown("failed")
            logger.exception("planning for engine %s failed", self.engine)
            await self._homes.again(state)
            state.schedule(self._context.clock(), None, self._config)
            state.retry_at = self._context.clock() + _RETRY_SECONDS

    async def _act(self) -> None:
        state, now = self._state, self._context.clock()
        entry = self._context.placements.entry(self.worker_id)
        if entry is None:
            state.retry_at = now + _RETRY_SECONDS
            return
        await self._homes.settle(state)
        if (harmful := state.to_undo) is not None and state.rollback_at() <= now:
            await self._undo(harmful)
        elif (run := to_evaluate(state.plans)) is not None and state.evaluate_at(self._config) <= now:
            await self._evaluate(entry, run)
        elif state.switch_at <= now:
            await self._switch(entry)
        else:
            await self._plan(entry)

    async def _evaluate(self, entry: EngineEntry, run: PlanRun, disturbed: str = "") -> None:
        """Evaluate a plan. disturbed: see `PlanEvaluator.evaluate`; a switch of layout is evaluated all the
        same."""
        if run.switches_layout:
            await self._evaluator.evaluate_switch(entry, run, self._layouts.trial(run.plan))
        else:
            await self._evaluator.evaluate(entry, run, disturbed)

    async def _undo(self, run: PlanRun) -> None:
        rollback = self._state.rollback_of(run)
        try:
            if not self._acting():
                raise ValueError("automatic plans were off at that time: roost rollback")  # noqa: TRY301
            harm = await self._evaluator.undo(run, self._acting)
        except (ExecutorBusy, RankFull, Unfit) as error:
            rollback.failed(str(error), self._context.clock(), self._config.cycle_seconds)
        except ValueError as error:
            rollback.never(str(error))
        else:
            rollback.begun()
            self._decide(f"plan {run.plan} did harm and is rolled back")
            await self._evaluator.harmed(self.engine, harm)
            return
        logger.warning("engine %s: %s", self.engine, rollback.trouble)

    async def _plan(self, entry: EngineEntry) -> None:
        """Plan for the engine, and carry out a plan that pays if nothing forbids it."""
        state, now, config = self._state, self._context.clock(), self._config
        self._context.demand.turn(now)
        await self._remember_start(entry)
        shift, again = state.pending_shift(now, config), self._context.demand.hurried(self.worker_id)
        state.schedule(now, again, config)
        if self._context.under_way(self.engine):
            await self._homes.again(state)
            return
        discount = self._evaluator.plan_discount(self.engine)
        question = PlanningQuestion(
            config.policy, state.left_bytes(now, config), plan_discount=discount, turning=self.turning()
        )
        try:
            decided = await self._context.plan_queries.decide(entry, question)
        except InvalidPlacementEvent as refusal:
            logger.debug("no plan for engine %s: %s", self.engine, refusal)
            self._decide(str(refusal))
            await self._homes.again(state)
            return
        self._context.metrics.figures(decided.record)
        if question.turning is not None:
            state.single_layers = decided.record.single_layers or _TOO_LITTLE
        await self._homes.now(state, entry, decided.homes)
        plan = decided.plan
        if plan is None or plan.refused:
            self._decide(decided.record.refused or "there is no plan")
        elif reason := self._withheld(decided, plan, shift):
            self._decide(reason)
        elif decided.turned is not None:
            await self._turn(decided.turned, plan, shift)
        else:
            await self._carry_out(decided, plan, shift)

    def _withheld(self, decided: PlannerDecision, plan: Plan, shift: DemandShift | None) -> str:
        """Return why a plan that pays is not carried out; empty: nothing forbids it."""
        state, memory = self._state, self._state_store.memory
        try:
            self._context.commands.movable(self.engine)
        except ValueError as error:
            return str(error)
        if self._overtaken(plan):
            return "others moved experts during planning"
        if state.shift is not None and state.shift is not shift:
            return "popularity shifted during planning"
        paused = memory.paused_reason if memory.paused else None
        reason = withheld(state, decided.record, self._config, paused, shift, self._context.clock())
        return f"{plan.reason}: not carried out, {reason}" if reason else ""

    async def _carry_out(self, decided: PlannerDecision, plan: Plan, shift: DemandShift | None) -> None:
        entry, state = self._context.commands.movable(self.engine), self._state
        try:
            await self._context.executor.survey(entry, ASK_SECONDS)
            if not self._acting():
                raise ValueError("it was paused, or planner.automatic turned off, meanwhile")  # noqa: TRY301
            if self._overtaken(plan):
                raise ValueError("others moved experts meanwhile")  # noqa: TRY301
            # only once it is nearly certain that another plan follows
            if (run := to_evaluate(state.plans)) is not None:
                await self._evaluate(
                    entry, run, "demand shifted, and another plan follows before it could be evaluated"
                )
            why = grounds(decided.record, "" if shift is None else shift.traceparent)
            accepted = await self._context.executor.accept(entry, plan, "planner", why, self._acting)
        except (ValueError, Unfit) as error:
            return self._decide(f"{plan.reason}: not carried out, {error}")
        caused = "because popularity shifted" if shift is not None else "of the cycle"
        self._decide(f"{plan.reason}: plan {accepted.plan} ({caused}) is being carried out")
        state.shift = None
        await self._evaluator.begin(entry, accepted.plan, decided.record, plan.base_epoch)
        await self._homes.after(state, entry, decided.homes_after, plan.base_epoch + len(plan.handovers))
        return None

    async def _turn(self, turned: TurnedLayers, plan: Plan, shift: DemandShift | None) -> None:
        """Carry out a change of single layers."""
        state = self._state
        try:
            if self._overtaken(plan):
                raise ValueError("others moved experts meanwhile")  # noqa: TRY301
            entry = self._context.commands.movable(self.engine)
            trace = "" if shift is None else shift.traceparent
            begun = await self._layouts.turn(entry, turned, trace, state, self._evaluate, self._acting)
        except (ValueError, Unfit) as error:
            self._decide(f"{plan.reason}: not carried out, {error}")
        else:
            if begun:
                self._decide(f"{plan.reason}: plan {begun} is being carried out")
                state.shift = None

    def turning(self) -> LayerTurning | None:
        """Return the permission to change the form of single layers; None: there is none, and the state says
        why."""
        entry = self._context.placements.entry(self.worker_id)
        if entry is None:
            return None
        try:
            return self._layouts.turning(entry, self._state)
        except ValueError as error:
            self._state.single_layers = f"single layers: {error}"
            return None

    async def _switch(self, entry: EngineEntry) -> None:
        """Carry out the switch of layout that the policy asks for, if nothing forbids it."""
        self._state.switch_at = inf
        decided = await self._layouts.switch(entry, self._state, self._evaluate, self._acting)
        if decided:
            self._decide(decided)

    def layout(self, entry: EngineEntry) -> EngineLayout:
        """Describe how the layout of this engine is chosen."""
        described = self._layouts.describe(entry, automatic=self._acting())
        return msgspec.structs.replace(described, single_layers=self._state.single_layers)

    def remember_curves(self) -> None:
        """Put the step times of the layouts into the persistent state."""
        self._layouts.remember()

    async def _remember_start(self, entry: EngineEntry) -> None:
        """Store the first measurements of this incarnation."""
        memory = self._evaluator.memory(self.engine).begun(self.worker_id)
        window = self._context.measured(entry, seconds=self._config.window_seconds)
        if memory.at_start is None and window is not None:
            started = msgspec.structs.replace(memory, at_start=window.measured.figures)
            self._state_store.change(self.engine, started)
            await self._state_store.keep()

    def _decide(self, sentence: str) -> None:
        self._state.decide(sentence, self._context.wall())

    def _acting(self) -> bool:
        """Return True if automatic plans may be carried out."""
        return self._config.automatic and not self._state_store.memory.paused

    def _overtaken(self, plan: Plan) -> bool:
        """Return True if the placement that a plan was made for is outdated, or another plan is under way."""
        entry = self._context.placements.engines().get(self.engine)
        return (
            entry is None
            or (entry.worker_id, entry.epoch) != (self.worker_id, plan.base_epoch)
            or self._context.under_way(self.engine)
        )
