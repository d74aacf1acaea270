"""Switches of the layout of one engine, as a whole or of single layers: plans under the budget and the rules
of all automatic plans."""

import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import NamedTuple

import msgspec

from fleet.facts.activity import DispatchMeasured
from fleet.facts.dynamo_kv import KvMetrics
from fleet.layout import Layout
from fleet.layout_times import LayoutName
from fleet.placement import Placement
from fleet.requests.layouts import EngineLayout
from fleet.text import byte_size
from migration.config import LayoutPolicyName, MigrationConfig
from migration.control_loop.context import LoopContext
from migration.control_loop.layout_controller import LayoutController
from migration.control_loop.state_store import StateStore
from migration.engine_state.placement_registry import EngineEntry
from migration.execution.handover_driver import Unfit
from migration.handover.handover_messages import Grounds
from migration.loop_state.engine_loop import EngineLoopState, forbidden
from migration.loop_state.plan_history import to_evaluate, turned_layers_since
from migration.loop_state.switch_trial import LEAST_STEPS, SwitchTrial
from migration.model.plan import Plan
from migration.model.plan_log import PlanRun
from migration.planning.layer_turns import TurnedLayers
from migration.planning.problem import LayerTurning
from migration.requests.operator_commands import ASK_SECONDS

logger = logging.getLogger(__name__)

_SWITCH_SECONDS = 1.0
"""Shortest time between two attempts to switch the layout."""
_UNMEASURED = "stays: the engine states no measured steps of its layouts"
_FAILED = "stays: its choice failed; see the planner's log"

Evaluate = Callable[[EngineEntry, PlanRun, str], Awaitable[None]]


class _Wish(NamedTuple):
    """A layout to switch to, and why."""

    layout: Layout
    goal: Placement | None
    """gives layers that become whole their experts; None: in order"""
    grounds: Grounds
    before: LayoutName
    after: LayoutName
    gain_of_layers: float = 0.0
    """`SwitchTrial.gain_of_layers`"""


class LayoutSwitcher:
    """Used on one event loop, on the leader, for one incarnation of an engine."""

    def __init__(
        self,
        context: LoopContext,
        config: MigrationConfig,
        state_store: StateStore,
        entry: EngineEntry,
        discount: Callable[[], float],
    ) -> None:
        """discount: returns the factor applied to the predicted gains of the engine."""
        self._context = context
        self._config = config
        self._state_store = state_store
        self._engine, self._worker_id = entry.engine, entry.worker_id
        self._next_at = -inf
        self._without = _UNMEASURED
        """why there is no choice, if there is none"""
        joined, curves = entry.joined, state_store.memory.engine(entry.engine).curves
        self._choice = (
            LayoutController(context, config, self._policy, joined, curves, discount)
            if joined is not None and joined.layout_times
            else None
        )

    # Events

    def reconfigure(self, config: MigrationConfig) -> None:
        """Use new settings from now on."""
        self._config = config
        if self._choice is not None:
            self._choice.reconfigure(config, self._policy)

    def loaded(self, report: KvMetrics) -> float:
        """Apply the load of a target. Returns the time from which the policy's switch may be carried out;
        inf: it asks for none."""
        entry = self._context.placements.entry(self._worker_id)
        if self._choice is None or entry is None:
            return inf
        try:
            asks = self._choice.loaded(report, entry)
        except Exception:  # a defect in the choice of layouts must not end the planner
            logger.exception("the layout of engine %s is left as it is from now on", self._engine)
            self._choice, self._without = None, _FAILED
            return inf
        return max(self._context.clock(), self._next_at) if asks else inf

    def dispatched(self, report: DispatchMeasured) -> None:
        """Apply what a rank's steps dispatched."""
        if self._choice is not None:
            self._choice.dispatched(report)

    def ended(self, plan: str) -> None:
        """Measure the steps of a switch from now on, if this plan was one."""
        if self._choice is not None:
            self._choice.ended(plan)

    def remember(self) -> None:
        """Put the step times of the layouts into the persistent state, if they have changed."""
        if self._choice is None:
            return
        memory, record = self._state_store.memory.engine(self._engine), self._choice.curves.record()
        if record != memory.curves:
            self._state_store.change(self._engine, msgspec.structs.replace(memory, curves=record))

    # Questions

    @property
    def _policy(self) -> LayoutPolicyName:
        return self._state_store.memory.engine(self._engine).layout_policy(self._config.layout_policy)

    def trial(self, plan: str) -> SwitchTrial | None:
        """Return the trial of a switch; None: it was not seen from its beginning."""
        return None if self._choice is None else self._choice.trial(plan)

    def turning(self, entry: EngineEntry, state: EngineLoopState) -> LayerTurning:
        """Return the permission to change the form of single layers. Raises ValueError with the reason if
        there is none."""
        if self._policy == "static":
            raise ValueError(f"the planner does not choose the layout: roost layout {self._engine} --auto on")
        if self._policy != "regret":
            raise ValueError(f"policy {self._policy} chooses layouts as a whole")
        if reason := self._resting(state):
            raise ValueError(reason)
        if self._choice is None:
            raise ValueError(self._without)
        self._context.switches.check_legal(entry, turns=True, attends=False)
        since = self._context.clock() - self._config.cooldown_seconds
        return self._choice.turning(entry, turned_layers_since(state.plans, since))

    def describe(self, entry: EngineEntry, *, automatic: bool) -> EngineLayout:
        """Describe how the layout is chosen. automatic: automatic plans may be carried out."""
        chosen = self._state_store.memory.engine(self._engine).layout_chosen
        automatic = automatic and chosen is not False and self._policy != "static"
        if self._choice is not None:
            return self._choice.describe(entry, automatic=automatic)
        return EngineLayout(
            engine=self._engine,
            worker_id=self._worker_id,
            layout=str(entry.layout),
            policy=self._policy,
            automatic=automatic,
            decided=self._without,
        )

    # Actions

    async def switch(
        self, entry: EngineEntry, state: EngineLoopState, evaluate: Evaluate, acting: Callable[[], bool]
    ) -> str:
        """Carry out the switch that the policy asks for, if nothing forbids it. Returns what was decided;
        empty: nothing.

        evaluate: evaluates an earlier plan now, for a reason. acting: returns True while automatic plans may
        be carried out. Raises BusError if the bus fails; try again.
        """
        choice, self._next_at = self._choice, self._context.clock() + _SWITCH_SECONDS
        before, wanted = (None, None) if choice is None else (choice.layout, choice.wanted)
        if choice is None or before is None or wanted is None or self._context.under_way(self._engine):
            return ""
        figures = (choice.figures(before), choice.figures(wanted))
        grounds = Grounds(f"layout: {self._policy}", *figures)
        wish = _Wish(choice.target(wanted), None, grounds, before, wanted)
        try:
            plan = await self._carry_out(choice, wish, entry, state, evaluate, acting)
        except (ValueError, Unfit) as error:
            choice.withheld = str(error)
            return ""
        choice.withheld = ""
        return f"layout {wanted}: {choice.reason()}; plan {plan} is being carried out" if plan else ""

    async def turn(
        self,
        entry: EngineEntry,
        turned: TurnedLayers,
        traceparent: str,
        state: EngineLoopState,
        evaluate: Evaluate,
        acting: Callable[[], bool],
    ) -> str:
        """Carry out a change of single layers that the planner decided. Returns the plan's id; empty: a
        rollback comes first.

        traceparent: of the shift of demand that caused it; empty: none did. evaluate, acting: as in `switch`.
        Raises ValueError or Unfit with the reason if it is not possible now, and BusError if the bus fails.
        """
        choice = self._choice
        if choice is None or choice.layout is None:
            raise ValueError(self._without)
        before = choice.figures(choice.layout)
        seconds = max(before.step_seconds - turned.gain_seconds * choice.curves.machine, 0.0)
        after = msgspec.structs.replace(before, step_seconds=seconds)
        grounds = Grounds(f"layers: {self._policy}", before, after, traceparent)
        gain = 1.0 - seconds / before.step_seconds
        wish = _Wish(turned.layout, turned.goal, grounds, choice.layout, choice.layout, gain)
        return await self._carry_out(choice, wish, entry, state, evaluate, acting)

    async def _carry_out(
        self,
        choice: LayoutController,
        wish: _Wish,
        entry: EngineEntry,
        state: EngineLoopState,
        evaluate: Evaluate,
        acting: Callable[[], bool],
    ) -> str:
        """Start the plan of a switch, and its trial. Returns its id; empty: a rollback comes first."""
        if reason := self._withheld(state):
            raise ValueError(reason)
        layout, switches = wish.layout, self._context.switches
        statuses = await self._context.executor.survey(entry, ASK_SECONDS)
        made = await switches.plan(entry, layout.sharded, layout.attention, statuses, wish.goal)
        self._check_budget(made.plan, state)
        if (run := to_evaluate(state.plans)) is not None:
            trial = self.trial(run.plan)
            if trial is not None and trial.steps < LEAST_STEPS:
                raise ValueError(f"plan {run.plan}, the last switch, is not evaluated yet")
            await evaluate(entry, run, "a switch of layout follows before it could be evaluated")
            if state.to_undo is not None:
                return ""
        accepted = await self._context.executor.accept(
            entry, made.plan, "planner", wish.grounds, acting, switch=made.estimate
        )
        trial = SwitchTrial(accepted.plan, wish.before, wish.after, wish.gain_of_layers)
        choice.switched(trial, layout)
        return accepted.plan

    def _check_budget(self, plan: Plan, state: EngineLoopState) -> None:
        """Raise ValueError if a switch copies more than the budget has left."""
        moved = sum(handover.bytes for handover in plan.handovers)
        left = state.left_bytes(self._context.clock(), self._config)
        if moved > left:
            raise ValueError(
                f"it copies {byte_size(moved)}, and the byte budget has {byte_size(left)} left:"
                " planner.budget_bytes"
            )

    def _withheld(self, state: EngineLoopState) -> str:
        """Return why no switch is carried out now; empty: nothing forbids it."""
        memory = self._state_store.memory
        paused = memory.paused_reason if memory.paused else None
        return self._resting(state) or forbidden(state, self._config, paused, self._context.clock())

    def _resting(self, state: EngineLoopState) -> str:
        """Return why the layout of this engine stays, whatever other plans may do; empty: nothing forbids a
        switch."""
        known, wall = self._state_store.memory.engine(self._engine), self._context.wall()
        if known.layout_chosen is False:
            return f"the layout is chosen by hand: roost layout {self._engine} --auto on"
        for harm in known.harms:
            run = state.plans.runs.get(harm.plan)
            if harm.until > wall and run is not None and run.switches_layout:
                return f"plan {harm.plan} did harm; layouts rest for another {harm.until - wall:.0f} s"
        return ""
