"""Evaluator of automatic plans: measures their effect, records the verdict, and rolls back harmful plans."""

import logging
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.facts.migrations import LoopFigures, PlanEvaluated
from fleet.placement import Placement
from migration.config import MigrationConfig
from migration.control_loop.context import LoopContext
from migration.control_loop.state_store import StateStore
from migration.engine_state.placement_registry import EngineEntry, InvalidPlacementEvent
from migration.handover.handover_messages import Grounds
from migration.loop_state.engine_loop import prices
from migration.loop_state.persistent_state import EngineMemory, Harm, PendingVerdict
from migration.loop_state.plan_history import changed_since, last_epoch, to_undo, turned_since
from migration.loop_state.switch_trial import SwitchTrial
from migration.loop_state.verdict import Evaluation, Measurement, PlanCase, evaluated, recovered
from migration.model.plan_log import PlanRun
from migration.model.plan_record import PlanRecord
from migration.planning.counterfactual import Counterfactual
from migration.requests.operator_commands import ASK_SECONDS

logger = logging.getLogger(__name__)

HARM_RESTS = 4.0
"""Cooldown of the experts of a harmful plan, relative to that of other moved experts."""
_NOTHING = LoopFigures(remote_ranks=0.0, local=0.0, balance=0.0, step_seconds=0.0)


class PlanEvaluator:
    """Used on one event loop, on the leader."""

    def __init__(self, context: LoopContext, config: MigrationConfig, state_store: StateStore) -> None:
        self._context = context
        self._config = config
        self._state_store = state_store

    def reconfigure(self, config: MigrationConfig) -> None:
        """Use new settings for later evaluations."""
        self._config = config

    def memory(self, engine: str) -> EngineMemory:
        """Return the persistent state of an engine."""
        return self._state_store.memory.engine(engine)

    def plan_discount(self, engine: str) -> float:
        """Return the current discount factor on the predicted gains of an engine, in (0, 1]."""
        known = self.memory(engine)
        seconds = self._context.wall() - known.plan_discount_at
        return recovered(known.plan_discount, seconds, self._config.lifetime_seconds)

    async def begin(self, entry: EngineEntry, plan: str, record: PlanRecord, base_epoch: int) -> None:
        """Remember the inputs for evaluating a plan that was just accepted. Without them there is no
        verdict."""
        machines = self._context.demand.machines(entry.worker_id)
        step = None if machines is None else prices(record, entry.placement.ranks, machines[0].top_k)
        if step is None:
            return
        window = self._context.measured(entry, epoch=base_epoch, seconds=self._config.evaluation_seconds)
        pending = PendingVerdict(plan=plan, prices=step, before=None if window is None else window.measured)
        memory = self.memory(entry.engine).begun(entry.worker_id)
        await self._remember(entry.engine, msgspec.structs.replace(memory, pending=pending))

    async def evaluate(self, entry: EngineEntry, run: PlanRun, disturbed: str = "") -> None:
        """Evaluate a plan and record the verdict.

        disturbed: reason why an evaluation is not possible any more. Raises BusError if the bus fails; try
        again.
        """
        pending, planned = self.memory(entry.engine).pending, run.planned
        if pending is not None and pending.plan != run.plan:
            pending = None
        window = self._context.measured(
            entry, epoch=run.progress.epoch, since=run.ended_at + self._config.settle_seconds
        )
        disturbed = disturbed or self._disturbed(entry, run)
        counterfactual = None if disturbed or pending is None else await self._counterfactual(entry, run)
        priced = pending is not None and planned.before is not None and planned.after is not None
        case = PlanCase(
            predicted_before=planned.before or _NOTHING,
            predicted_after=planned.after or _NOTHING,
            before=None if pending is None else pending.before,
            after=None if window is None else window.measured,
            prices=pending.prices if pending is not None and priced else None,
            min_pairs=self._config.min_pairs * entry.placement.experts,
            counterfactual_gain=None if counterfactual is None else counterfactual.seconds,
            min_gain=0.0 if counterfactual is None else counterfactual.least,
            committed=run.progress.committed,
            disturbed=disturbed,
        )
        found = evaluated(case, self.plan_discount(entry.engine))
        await self._record(run, found, case.before, None if case.disturbed else case.after)

    async def evaluate_switch(self, entry: EngineEntry, run: PlanRun, trial: SwitchTrial | None) -> None:
        """Evaluate a switch of layout and record the verdict.

        trial: its steps so far; None: this service did not lead when it ended. Raises BusError if the bus
        fails; try again.
        """
        discount, disturbed = self.plan_discount(entry.engine), self._disturbed(entry, run)
        if trial is None or disturbed:
            reason = disturbed or "another planner leads since, which did not see the steps before"
            found = Evaluation("unknown", None, discount, reason)
        else:
            found = trial.evaluated(discount)
        await self._record(run, found, None, None)

    async def undo(self, run: PlanRun, still: Callable[[], bool]) -> Harm:
        """Start the rollback of a harmful plan. Returns the cooldown to apply afterwards (`harmed`).

        still: see `PlanExecutor.accept`. Raises ExecutorBusy, RankFull or Unfit if it is not possible now,
        another ValueError if it never will be, and BusError if the bus fails.
        """
        planned, executor, commands = run.planned, self._context.executor, self._context.commands
        present = commands.present if run.switches_layout else commands.movable
        entry, made = present(planned.engine), last_epoch(self._context.plans(planned.engine))
        if entry.epoch != made:
            raise ValueError(f"epoch {entry.epoch} is served, not {made}, which it led to")
        executor.refuse_second(entry.engine)
        statuses = await executor.survey(entry, ASK_SECONDS)
        goal = await commands.before(planned)
        plan = await commands.undoing(entry, planned, goal, statuses)
        until = self._context.wall() + HARM_RESTS * self._config.cooldown_seconds
        moved = changed(goal, entry.placement)
        if run.switches_layout:
            moved = np.zeros_like(moved)  # the layout did harm; experts may move
        cells = self._harmed(entry.engine, run.plan, moved)
        harm = Harm.of(run.plan, until, cells)
        grounds = Grounds(self._config.policy, traceparent=planned.traceparent)
        await executor.accept(entry, plan, "rollback", grounds, still)
        return harm

    def _harmed(self, engine: str, plan: str, cells: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Add the experts that an aborted rollback has already moved back."""
        known = next((harm.resting() for harm in self.memory(engine).harms if harm.plan == plan), None)
        return cells if known is None or known.shape != cells.shape else cells | known

    async def harmed(self, engine: str, harm: Harm) -> None:
        """Remember the experts that must cool down after the rollback of a harmful plan.

        This is stored only once the rollback is durable. If the service dies in between, the experts have
        only the normal cooldown, and the discount factor has already fallen. In the opposite order a crash
        would freeze the experts where they do harm, for a rollback that does not exist.
        """
        await self._remember(engine, self.memory(engine).harmed(harm, self._context.wall()))

    def rest(self, entry: EngineEntry) -> None:
        """Freeze the experts of harmful plans once these are rolled back. Before that they must be free to
        move."""
        plans = self._context.plans(entry.engine)
        if plans.last is not None and plans.last.end is None:
            return  # this may be the rollback; no plan is made before its end
        now, wall, harmful = self._context.clock(), self._context.wall(), to_undo(plans)
        for harm in self.memory(entry.engine).harms:
            cells = harm.resting()
            if cells is not None and harm.until > wall and (harmful is None or harmful.plan != harm.plan):
                self._context.demand.harmed(entry.worker_id, cells, now + harm.until - wall)

    async def _counterfactual(self, entry: EngineEntry, run: PlanRun) -> Counterfactual | None:
        """Compare with the placement before a plan; None: not possible."""
        try:
            before = await self._context.commands.before(run.planned)
            return await self._context.plan_queries.regret(entry, before)
        except (InvalidPlacementEvent, ValueError) as error:
            logger.info(
                "engine %s: the placement before plan %s cannot be evaluated: %s",
                entry.engine,
                run.plan,
                error,
            )
            return None

    async def _record(
        self, run: PlanRun, found: Evaluation, before: Measurement | None, after: Measurement | None
    ) -> None:
        planned = run.planned
        message = PlanEvaluated(
            engine=planned.engine,
            worker_id=planned.worker_id,
            plan=run.plan,
            epoch=run.progress.epoch,
            verdict=found.verdict,
            predicted_before=planned.before or _NOTHING,
            predicted_after=planned.after or _NOTHING,
            measured_before=None if before is None else before.figures,
            measured_after=None if after is None else after.figures,
            realised=found.realised,
            plan_discount=found.plan_discount,
            reason=found.reason,
        )
        await self._context.executor.log.write(message)
        logger.info(
            "plan %s of engine %s: %s; %s; plan discount %.2f",
            message.plan,
            message.engine,
            message.verdict,
            message.reason,
            message.plan_discount,
        )
        self._context.metrics.evaluated(message)
        if self._context.tracing is not None:
            self._context.tracing.evaluated(message, run.planned.traceparent)
        await self._state_store.keep()

    def learn(self, message: PlanEvaluated, at: float) -> None:
        """Take over the discount factor of a verdict, unless a newer one is known. at: Unix seconds.

        It is in the log, so `StateStore.keep` may store it later.
        """
        known = self.memory(message.engine)
        if at > known.plan_discount_at and 0 < message.plan_discount <= 1:
            evaluated_now = known.pending is not None and known.pending.plan == message.plan
            self._state_store.change(
                message.engine,
                msgspec.structs.replace(
                    known,
                    plan_discount=message.plan_discount,
                    plan_discount_at=at,
                    pending=None if evaluated_now else known.pending,
                ),
            )

    async def _remember(self, engine: str, memory: EngineMemory) -> None:
        self._state_store.change(engine, memory)
        await self._state_store.keep()

    def _disturbed(self, entry: EngineEntry, run: PlanRun) -> str:
        """Return the reason why current measurements say nothing about a plan; empty: they are valid."""
        if entry.worker_id != run.planned.worker_id:
            return "the engine has restarted meanwhile"
        if turned_since(self._context.plans(entry.engine), run):
            return "layers changed their form meanwhile"
        if entry.epoch != run.progress.epoch or changed_since(self._context.plans(entry.engine), run):
            return "others moved experts meanwhile"
        return ""


def changed(before: Placement, after: Placement) -> NDArray[np.bool_]:
    """Return the experts whose holders differ, bool [layers, experts]. Raises ValueError if the shapes
    differ."""
    held = [placement.replicas_on_rank > 0 for placement in (before, after)]
    if held[0].shape != held[1].shape:
        raise ValueError(
            f"placements of {held[0].shape} and {held[1].shape} (layers, ranks, experts) cannot be compared;"
            " plan anew"
        )
    return np.asarray((held[0] != held[1]).any(axis=1))
