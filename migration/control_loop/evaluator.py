"""Evaluator of automatic plans: measures their effect, records the verdict, and rolls back harmful plans."""

import logging
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from bus import Bus
from bus.protocol.subjects import Subjects
from fleet.facts.migrations import LoopFigures, PlanEvaluated
from fleet.placement import Placement
from migration.config import MigrationConfig
from migration.control_loop.state_store import StateStore
from migration.engine_state.demand_windows import DemandWindows
from migration.engine_state.placement_registry import EngineEntry, InvalidPlacementEvent
from migration.execution.executor import PlanExecutor
from migration.handover.handover_messages import Grounds
from migration.loop_state.dispatch_windows import DispatchWindows
from migration.loop_state.engine_loop import EngineLoopState, prices
from migration.loop_state.persistent_state import EngineMemory, Harm, PendingVerdict
from migration.loop_state.plan_history import PlanHistory, PlanStory
from migration.loop_state.verdict import Judgement, PlanCase, judged, recovered
from migration.model.plan_record import PlanRecord
from migration.planning.counterfactual import Counterfactual
from migration.requests.operator_commands import ASK_SECONDS, OperatorCommands
from migration.requests.plan_queries import PlanQueries
from migration.telemetry.metrics import MigrationMetrics
from migration.telemetry.tracing import MigrationTracing

logger = logging.getLogger(__name__)

HARM_RESTS = 4.0
"""Cooldown of the experts of a harmful plan, relative to that of other moved experts."""
_NOTHING = LoopFigures(remote_ranks=0.0, local=0.0, balance=0.0, step_seconds=0.0)


class PlanEvaluator:
    """Used on one event loop, on the leader. clock: monotonic seconds; wall: Unix seconds."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        config: MigrationConfig,
        watch: DemandWindows,
        measured: DispatchWindows,
        inquiries: PlanQueries,
        conductor: PlanExecutor,
        requests: OperatorCommands,
        remembering: StateStore,
        metrics: MigrationMetrics,
        tracing: MigrationTracing | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._config = config
        self._watch = watch
        self._measured = measured
        self._plan_queries = inquiries
        self._executor = conductor
        self._requests = requests
        self._state_store = remembering
        self._metrics = metrics
        self._tracing = tracing
        self._clock = clock
        self._wall = wall

    def reconfigure(self, config: MigrationConfig) -> None:
        """Use new settings for later evaluations."""
        self._config = config

    def memory(self, engine: str) -> EngineMemory:
        """Return the persistent state of an engine."""
        return self._state_store.memory.engine(engine)

    def trust(self, engine: str) -> float:
        """Return the current discount factor on the predicted gains of an engine, in (0, 1]."""
        known = self.memory(engine)
        return recovered(known.trust, self._wall() - known.trust_at, self._config.lifetime_seconds)

    async def begun(
        self, pilot: EngineLoopState, entry: EngineEntry, plan: str, record: PlanRecord, base_epoch: int
    ) -> None:
        """Remember the inputs for evaluating a plan that was just accepted. Without them there is no
        verdict."""
        machines = self._watch.machines(entry.worker_id)
        reckoned = None if machines is None else prices(record, entry.placement.ranks, machines[0].top_k)
        if reckoned is None:
            return
        window = self._measured.window(
            entry.worker_id,
            entry.layout.boundary,
            self._clock(),
            epoch=base_epoch,
            seconds=self._config.judge_seconds,
        )
        judging = PendingVerdict(
            plan=plan, prices=reckoned, before=None if window is None else window.measured
        )
        await self._remember(
            pilot.engine,
            msgspec.structs.replace(self.memory(pilot.engine).begun(pilot.worker_id), judging=judging),
        )

    async def judge(
        self, pilot: EngineLoopState, entry: EngineEntry, tale: PlanStory, disturbed: str = ""
    ) -> None:
        """Evaluate a plan and record the verdict.

        disturbed: reason why an evaluation is not possible any more. Raises BusError if the bus fails; try
        again.
        """
        now, memory, planned = self._clock(), self.memory(pilot.engine), tale.planned
        judging = (
            memory.judging if memory.judging is not None and memory.judging.plan == planned.plan else None
        )
        since = tale.ended_at + self._config.settle_seconds
        window = self._measured.window(
            entry.worker_id, entry.layout.boundary, now, epoch=tale.epoch, since=since
        )
        disturbed = disturbed or _disturbed(pilot, entry, tale)
        regret = None if disturbed or judging is None else await self._regret(entry, tale)
        case = PlanCase(
            predicted_before=planned.before or _NOTHING,
            predicted_after=planned.after or _NOTHING,
            before=None if judging is None else judging.before,
            after=None if window is None else window.measured,
            prices=(
                None if judging is None or planned.before is None or planned.after is None else judging.prices
            ),
            least_pairs=self._config.least_pairs * entry.placement.experts,
            regret_seconds=None if regret is None else regret.seconds,
            least_regret=0.0 if regret is None else regret.least,
            whole=tale.whole,
            disturbed=disturbed,
        )
        await self._record(pilot, entry, tale, case, judged(case, self.trust(pilot.engine)))

    async def undo(self, pilot: EngineLoopState, tale: PlanStory, still: Callable[[], bool]) -> Harm:
        """Start the rollback of a harmful plan. Returns the cooldown to apply afterwards (`harmed`).

        still: see `PlanExecutor.accept`. Raises ExecutorBusy, RankFull or Unfit if it is not possible now,
        another ValueError if it never will be, and BusError if the bus fails.
        """
        entry, made = self._requests.movable(pilot.engine), pilot.annals.epoch
        if entry.epoch != made:
            raise ValueError(f"epoch {entry.epoch} is served, not {made}, which it led to")
        self._executor.refuse_second(entry.engine)
        statuses = await self._executor.survey(entry, ASK_SECONDS)
        goal = await self._requests.before(tale.planned)
        plan = await self._requests.undoing(entry, tale.planned, goal, statuses)
        until = HARM_RESTS * self._config.cooldown_seconds
        harm = Harm.of(
            tale.planned.plan,
            self._wall() + until,
            self._harmed(entry.engine, tale.planned.plan, changed(goal, entry.placement)),
        )
        await self._executor.accept(
            entry, plan, "rollback", Grounds(self._config.policy, traceparent=tale.planned.traceparent), still
        )
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
        await self._remember(engine, self.memory(engine).harmed(harm, self._wall()))

    def rest(self, entry: EngineEntry, annals: PlanHistory) -> None:
        """Freeze the experts of harmful plans once these are rolled back. Before that they must be free to
        move."""
        if annals.last is not None and annals.last.end is None:
            return  # this may be the rollback; no plan is made before its end
        now, wall, stands = self._clock(), self._wall(), annals.to_undo
        for harm in self.memory(entry.engine).harms:
            cells = harm.resting()
            if (
                cells is not None
                and harm.until > wall
                and (stands is None or stands.planned.plan != harm.plan)
            ):
                self._watch.harmed(entry.worker_id, cells, now + harm.until - wall)

    async def _regret(self, entry: EngineEntry, tale: PlanStory) -> Counterfactual | None:
        """Compare with the placement before a plan; None: not possible."""
        try:
            return await self._plan_queries.regret(entry, await self._requests.before(tale.planned))
        except (InvalidPlacementEvent, ValueError) as error:
            logger.info(
                "engine %s: the placement before plan %s cannot be evaluated: %s",
                entry.engine,
                tale.planned.plan,
                error,
            )
            return None

    async def _record(
        self, pilot: EngineLoopState, entry: EngineEntry, tale: PlanStory, case: PlanCase, found: Judgement
    ) -> None:
        verdict = PlanEvaluated(
            engine=entry.engine,
            worker_id=tale.planned.worker_id,
            plan=tale.planned.plan,
            epoch=tale.epoch,
            verdict=found.verdict,
            predicted_before=case.predicted_before,
            predicted_after=case.predicted_after,
            measured_before=None if case.before is None else case.before.figures,
            measured_after=None if case.after is None or case.disturbed else case.after.figures,
            realised=found.realised,
            trust=found.trust,
            reason=found.reason,
        )
        await self._bus.record(self._subjects.migrations(entry.engine), verdict)
        pilot.annals.hear(verdict, self._clock(), self._wall())
        logger.info(
            "plan %s of engine %s: %s; %s; trust %.2f",
            verdict.plan,
            verdict.engine,
            verdict.verdict,
            verdict.reason,
            verdict.trust,
        )
        self._metrics.judged(verdict)
        if self._tracing is not None:
            self._tracing.judged(verdict, tale.planned.traceparent)
        await self.learn(verdict, self._wall())

    async def learn(self, said: PlanEvaluated, at: float) -> None:
        """Take over the discount factor of a verdict, unless a newer one is known. at: Unix seconds."""
        known = self.memory(said.engine)
        if at > known.trust_at and 0 < said.trust <= 1:
            judging = None if known.judging is not None and known.judging.plan == said.plan else known.judging
            await self._remember(
                said.engine, msgspec.structs.replace(known, trust=said.trust, trust_at=at, judging=judging)
            )

    async def _remember(self, engine: str, memory: EngineMemory) -> None:
        await self._state_store.keep(self._state_store.memory.remembering(engine, memory))


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


def _disturbed(pilot: EngineLoopState, entry: EngineEntry, tale: PlanStory) -> str:
    """Return the reason why current measurements say nothing about a plan; empty: they are valid."""
    if entry.worker_id != tale.planned.worker_id:
        return "the engine has restarted meanwhile"
    if entry.epoch != tale.epoch or pilot.annals.follows(tale):
        return "others moved experts meanwhile"
    return ""
