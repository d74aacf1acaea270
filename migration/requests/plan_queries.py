"""Planning runs, one at a time and off the event loop, for the control loop and for requests over the bus."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

import msgspec

from bus import Message
from fleet.placement import Placement
from fleet.requests.plans import DescribePlan, PlanDescribed
from fleet.requests.refusal import RequestRefused
from migration.config import POLICIES, MigrationConfig
from migration.engine_state.demand_windows import DemandWindows
from migration.engine_state.placement_registry import EngineEntry, InvalidPlacementEvent, PlacementRegistry
from migration.planning.counterfactual import Counterfactual, counterfactual_gain
from migration.planning.planner import decide
from migration.planning.planner_decision import PlannerDecision
from migration.planning.problem import LayerTurning, PlanningQuestion
from migration.telemetry.metrics import MigrationMetrics

logger = logging.getLogger(__name__)


class PlanQueries:
    """Created and used on one event loop. A separate thread runs the planner on immutable values.

    clock: monotonic seconds. plan_discount: factor applied to the predicted gains of an engine, by its name.
    turning: permission to change the form of its single layers, by its name; None: there is none.
    planning_executor: runs one function at a time; None: a thread of its own, which `close` ends.
    """

    def __init__(
        self,
        placements: PlacementRegistry,
        demand: DemandWindows,
        config: MigrationConfig,
        metrics: MigrationMetrics,
        clock: Callable[[], float],
        plan_discount: Callable[[str], float],
        turning: Callable[[str], LayerTurning | None],
        planning_executor: Executor | None = None,
    ) -> None:
        self._placements = placements
        self._demand = demand
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._plan_discount = plan_discount
        self._turning = turning
        self._owns_executor = planning_executor is None
        self._executor = planning_executor or ThreadPoolExecutor(1, "plans")
        self._waiting = 0

    def reconfigure(self, config: MigrationConfig) -> None:
        """Use new settings for all later planning runs."""
        self._config = config

    def close(self) -> None:
        """End the thread without waiting for the current run."""
        if self._owns_executor:
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def answer(self, message: Message) -> Message:
        """Answer a request from the bus."""
        if not isinstance(message, DescribePlan):
            return RequestRefused(
                reason=(
                    f"a {type(message).__name__} is no question for this subject; send a"
                    f" {DescribePlan.__name__}"
                )
            )
        try:
            entry, question = self._checked(message)
            self._waiting += 1
            try:
                decided = await self.decide(entry, question)
            finally:
                self._waiting -= 1
        except ValueError as error:
            return RequestRefused(reason=str(error))
        plan = (
            b""
            if decided.plan is None or decided.plan.refused
            else await asyncio.to_thread(msgspec.json.encode, decided.plan)
        )
        return PlanDescribed(
            engine=entry.engine,
            worker_id=entry.worker_id,
            record=msgspec.json.encode(decided.record),
            plan=plan,
        )

    async def decide(self, entry: EngineEntry, question: PlanningQuestion) -> PlannerDecision:
        """Plan for one engine. Raises InvalidPlacementEvent if too little is known."""
        try:
            view = self._demand.view(entry, self._clock())
        except InvalidPlacementEvent as refusal:
            self._metrics.unknown(refusal.fault.value)
            raise
        began = self._clock()
        decided = await asyncio.get_running_loop().run_in_executor(
            self._executor, decide, view, question, self._config
        )
        taken = self._clock() - began
        self._metrics.planning_run(None if decided.why is None else decided.why.value, taken)
        return decided._replace(record=msgspec.structs.replace(decided.record, plan_seconds=taken))

    async def regret(self, entry: EngineEntry, placement: Placement) -> Counterfactual:
        """Compare the served placement of an engine with another. Raises InvalidPlacementEvent if too little
        is known."""
        view = self._demand.view(entry, self._clock())
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, counterfactual_gain, view, placement, self._config
        )

    def _checked(self, request: DescribePlan) -> tuple[EngineEntry, PlanningQuestion]:
        """Check a request. Raises ValueError naming what is invalid, or if too many requests are waiting."""
        entry = self._placements.engines().get(request.engine)
        if entry is None:
            raise ValueError(
                f"no engine {request.engine!r} with experts is present; there are:"
                f" {', '.join(sorted(self._placements.engines())) or 'none'}"
            )
        if self._waiting >= self._config.max_questions:
            raise ValueError(
                f"{self._waiting} plan requests are waiting already; try again later, or raise"
                " planner.max_questions"
            )
        question = _question(request, entry, self._config, self._plan_discount(request.engine))
        # Another policy is asked for what it would do with the experts.
        turns = question.policy == self._config.policy and not question.dead
        return entry, question._replace(turning=self._turning(request.engine) if turns else None)


def _question(
    request: DescribePlan, entry: EngineEntry, config: MigrationConfig, plan_discount: float
) -> PlanningQuestion:
    """Check the parameters of a request. Raises ValueError naming what is invalid."""
    policy = next((policy for policy in POLICIES if policy == (request.policy or config.policy)), None)
    if policy is None:
        raise ValueError(f"no policy {request.policy!r}; there are: {', '.join(POLICIES)}")
    if request.budget_bytes is not None and request.budget_bytes < 0:
        raise ValueError(f"a budget of {request.budget_bytes} bytes; use 0 or more")
    for what, numbers, most in (
        ("rank", request.dead, entry.placement.ranks),
        ("layer", request.layers, entry.placement.layers),
    ):
        outside = [number for number in numbers if not 0 <= number < most]
        if outside:
            raise ValueError(
                f"engine {request.engine!r} has no {what} {outside[0]}; they run from 0 to {most - 1}"
            )
    if len(set(request.dead)) == entry.placement.ranks:
        raise ValueError("all ranks are named as dead; nothing would be left to plan for")
    budget = config.budget_bytes if request.budget_bytes is None else request.budget_bytes
    return PlanningQuestion(
        policy,
        budget,
        request.memory,
        tuple(sorted(set(request.dead))),
        tuple(sorted(set(request.layers))),
        bounds=True,
        plan_discount=plan_discount,
    )
