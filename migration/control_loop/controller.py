"""Controller of the migration service: one control loop per engine, their common state, and requests about
them.

After a restart, only the log of plans and the state under the loop's key are needed to resume.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable

import msgspec

from bus import BusError, Message
from fleet.event import PROTOCOL
from fleet.facts.activity import DispatchMeasured
from fleet.facts.demand import PopularityShifted
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.migrations import PlanEvaluated
from fleet.requests.control_loop import DescribeLoop, LoopDescribed, SetLoopState
from fleet.requests.layouts import DescribeLayouts, LayoutsDescribed, SetLayoutChoice
from fleet.requests.refusal import RequestRefused
from migration.config import MigrationConfig
from migration.control_loop.context import LoopContext
from migration.control_loop.engine_controller import EngineController
from migration.control_loop.evaluator import PlanEvaluator
from migration.control_loop.homes_publisher import HomesPublisher
from migration.control_loop.state_store import StateStore
from migration.model.plan_log import PlanEntry
from migration.planning.problem import LayerTurning

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_CHECK_LOOKS = 30
"""Interval of checks that the persistent state is still stored, in looks."""
MAX_ENGINES = 1024
"""Limit on the engines whose plans are remembered, present or gone."""


class Controller:
    """Used on one event loop, on the leader."""

    def __init__(self, context: LoopContext, config: MigrationConfig) -> None:
        self.context = context
        self._config = config
        self._state_store = StateStore(context.bus, context.subjects.loop_key, context.lead.until_leading)
        self._evaluator = PlanEvaluator(context, config, self._state_store)
        self._homes = HomesPublisher(context)
        self._engines: dict[str, EngineController] = {}
        """by name, present engines only"""

    async def run(self, ready: Callable[[], None]) -> None:
        """Run until cancelled, after the executor has read the log. ready: called once all durable state is
        read.

        Raises BusError if it cannot be read at the start.
        """
        await self._state_store.read()
        log = self.context.executor.log
        for plans in log.plans.engines.values():
            for run in plans.runs.values():
                if run.evaluated is not None:
                    self._evaluator.learn(run.evaluated, run.evaluated_at)
        log.observers.append(self._logged)
        async with asyncio.TaskGroup() as tasks:
            self._look(tasks)
            ready()
            for looks in itertools.count(1):
                await asyncio.sleep(_LOOK_SECONDS)
                if looks % _CHECK_LOOKS == 0:
                    await self._state_store.check()
                    for engine in self._engines.values():
                        engine.remember_curves()
                await self._state_store.keep()
                self.context.demand.turn(self.context.clock())
                self._look(tasks)

    def reconfigure(self, config: MigrationConfig) -> None:
        """Use new settings from now on."""
        self._config = config
        self.context.executor.reconfigure(config)
        self.context.commands.reconfigure(config)
        self.context.switches.reconfigure(config)
        self._evaluator.reconfigure(config)
        for engine in self._engines.values():
            engine.reconfigure(config)

    # Requests

    async def answer(self, message: Message) -> Message:
        """Answer a request from the bus."""
        if isinstance(message, SetLoopState):
            try:
                await self._state_store.pause(message.paused, message.reason, self.context.wall())
            except BusError as error:
                return RequestRefused(
                    reason=f"the change could not be stored and has no effect: {error}; try again"
                )
            logger.info(
                "automatic plans: %s",
                f"paused ({message.reason or 'no reason given'})" if message.paused else "resumed",
            )
            for engine in self._engines.values() if not message.paused else ():
                engine.resume()
        elif isinstance(message, SetLayoutChoice | DescribeLayouts):
            return self._layouts(message)
        elif not isinstance(message, DescribeLoop):
            return RequestRefused(
                reason=(
                    f"a {type(message).__name__} is no request for this subject; send a SetLoopState, a"
                    " DescribeLoop, a SetLayoutChoice or a DescribeLayouts"
                )
            )
        return self.described()

    def _layouts(self, message: SetLayoutChoice | DescribeLayouts) -> Message:
        """Answer how layouts are chosen, after a change of it. The change is stored with the next look."""
        present = self.context.placements.engines()
        names = [message.engine] if message.engine else sorted(self._engines)
        if message.engine and message.engine not in self._engines:
            there = ", ".join(sorted(self._engines)) or "none"
            return RequestRefused(
                reason=f"no engine {message.engine!r} with experts is present; there are: {there}"
            )
        if isinstance(message, SetLayoutChoice):
            for name in names:
                memory = self._state_store.memory.engine(name)
                changed = msgspec.structs.replace(memory, layout_chosen=message.automatic)
                self._state_store.change(name, changed)
                self._engines[name].reconfigure(self._config)
        return LayoutsDescribed(
            engines=tuple(self._engines[name].layout(present[name]) for name in names if name in present)
        )

    def plan_discount(self, engine: str) -> float:
        """Return the current discount factor on the predicted gains of an engine, in (0, 1]."""
        return self._evaluator.plan_discount(engine)

    def turning(self, engine: str) -> LayerTurning | None:
        """Return the permission to change the form of an engine's single layers; None: there is none."""
        return None if (one := self._engines.get(engine)) is None else one.turning()

    def described(self) -> LoopDescribed:
        """Describe the state of the control loop."""
        memory, config = self._state_store.memory, self._config
        present = sorted(self.context.placements.engines().items())
        return LoopDescribed(
            policy=config.policy,
            automatic=config.automatic,
            paused=memory.paused,
            paused_reason=memory.paused_reason,
            paused_at=memory.paused_at,
            budget_bytes=config.budget_bytes,
            budget_seconds=config.budget_seconds,
            cycle_seconds=config.cycle_seconds,
            engines=tuple(
                self._engines[name].describe(entry) for name, entry in present if name in self._engines
            ),
            protocol=PROTOCOL,
        )

    # Events

    def shifted(self, message: PopularityShifted) -> None:
        """Apply that the popularity of a model shifted, or has settled."""
        if not message.settled:
            self.context.demand.shifted(message.model, self.context.clock())
        for engine in self._engines.values():
            engine.shifted(message)

    def loaded(self, report: KvMetrics) -> None:
        """Apply the load of a target."""
        if (engine := self._of_worker(report.worker_id)) is not None:
            engine.loaded(report)

    def dispatched(self, report: DispatchMeasured) -> None:
        """Apply what a rank's steps dispatched."""
        if (engine := self._of_worker(report.worker_id)) is not None:
            engine.dispatched(report)

    def _of_worker(self, worker_id: int) -> EngineController | None:
        name = self.context.placements.engine_of(worker_id)
        engine = None if name is None else self._engines.get(name)
        return engine if engine is not None and engine.worker_id == worker_id else None

    def _logged(self, entry: PlanEntry) -> None:
        """Apply a new entry of the log of plans."""
        if isinstance(entry, PlanEvaluated):
            run = self.context.plans(entry.engine).runs[entry.plan]
            self._evaluator.learn(entry, run.evaluated_at)
        if (engine := self._engines.get(entry.engine)) is not None:
            engine.logged(entry)

    # Membership

    def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Run one loop for every present engine, and none for others."""
        present = self.context.placements.engines()
        for name, engine in list(self._engines.items()):
            entry = present.get(name)
            if entry is None or entry.worker_id != engine.worker_id:
                self._engines.pop(name).stop()
        self.context.executor.log.plans.trim(MAX_ENGINES, present)
        for name, entry in present.items():
            if name not in self._engines:
                engine = self._engines[name] = EngineController(
                    self.context, self._config, self._state_store, self._evaluator, self._homes, entry
                )
                engine.start(tasks)
        self._homes.keep_only({entry.worker_id for entry in present.values()})
        self._publish_metrics()

    def _publish_metrics(self) -> None:
        metrics = self.context.metrics
        metrics.stored_bytes.set(self.context.demand.stored_bytes)
        metrics.store_refusals(self.context.bus.refusals)
        metrics.paused(self._state_store.memory.paused)
        present = self.context.placements.engines()
        for name, engine in self._engines.items():
            engine.publish_metrics(present[name])
