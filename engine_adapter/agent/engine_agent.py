"""Agent of one rank: publishes the rank's events and, on rank 0, keeps the engine's membership.

Every rank publishes its KV events, its load, its activated experts, its dispatch statistics and the experts
activated by each finished request (`engine_adapter.reporting`). Each has its own publisher identity. Every
rank also serves snapshots of its KV cache and takes part in handovers (`handover_agent`). The bus may
disconnect and reconnect at any time. Publishing continues meanwhile.
"""

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AsyncExitStack

from bus import Bus, Message
from bus.protocol.subjects import Subjects
from engine_adapter.agent.copy_runner import Staging
from engine_adapter.agent.handover_agent import HandoverAgent
from engine_adapter.agent.membership import AgentIdentity, EngineMembership
from engine_adapter.agent.rearrangement_agent import RearrangementAgent
from engine_adapter.config import AgentConfig
from engine_adapter.engine import Engine, RankFacts, Rearranger
from engine_adapter.reporting.activity_reports import ActivityReports
from engine_adapter.reporting.dispatch_reports import DispatchReports
from engine_adapter.reporting.kv_reports import KvReports
from engine_adapter.reporting.load_reports import LoadReports
from engine_adapter.reporting.rank_context import RankContext
from engine_adapter.reporting.request_profiles import RequestProfiler
from fleet.placement import Placement
from fleet.requests.engines import DescribeMemory

_NO_TRANSFERS = Staging()
"""No transfer backends: other ranks cannot be read. Sufficient for engines of one rank."""


class Agent:
    """Agent of one rank. `run` publishes until it is cancelled. `joined` is set once the engine may be
    used."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        engine: Engine,
        identity: AgentIdentity,
        config: AgentConfig,
        staging: Staging = _NO_TRANSFERS,
        rearranger: Rearranger | None = None,
        report: Callable[[RankFacts], None] | None = None,
    ) -> None:
        """staging: means to copy experts, for engines that support handovers. rearranger: way to the expert
        ranks of an engine that moves its experts itself, given to the agent of its first target only, which
        takes part in handovers for all expert ranks. report: called with the engine's facts as well, for a
        second system that the rank serves."""
        about = engine.description
        context = RankContext(bus, subjects, identity.engine, identity.worker_id, about)
        self._context = context
        self._engine = engine
        self._config = config
        self._also_report = report
        self._read_limit = staging.limit
        self._kv = KvReports(context, _epoch(engine.placement)) if about.capabilities.kv_events else None
        self._load = LoadReports(context, config.load_seconds)
        self._activity = ActivityReports(context, config.experts_seconds, _epoch(engine.placement))
        self._dispatch = DispatchReports(context, config.experts_seconds)
        self._profiler = (
            None
            if about.shape is None or not about.capabilities.experts
            else RequestProfiler(context, about.shape, config, identity.nodes)
        )
        """None for an engine that reports no experts. Nothing is subscribed to or kept then."""
        self._membership = EngineMembership(context, engine, identity, config)
        self.joined = self._membership.joined
        self.handovers = None if engine.experts is None else HandoverAgent(context, engine, staging)
        """Handover agent. None: Roost does not move this engine's experts."""
        self._rearrangements = (
            None
            if rearranger is None
            else RearrangementAgent(bus, subjects, identity.engine, identity.worker_id, rearranger)
        )

    def leaving(self, reason: str | None) -> None:
        """Set the reason for leaving, which goes into `EngineLeft`. None: leave without an event and keep the
        name until the claim expires."""
        self._membership.reason = reason

    async def run(self) -> None:
        """Publish until cancelled. NameTaken when another engine has this name."""
        context, about = self._context, self._context.about
        async with AsyncExitStack() as stack:
            if self._kv is not None:
                subject = context.subjects.kv_snapshot(*context.address)
                await stack.enter_async_context(context.bus.serve(subject, self._kv.answer))
            if self.handovers is None and self._rearrangements is None and not about.rearranges:
                commands = context.subjects.handover(*context.address)
                await stack.enter_async_context(context.bus.serve(commands, self._refuse_handover))
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            if self.handovers is not None:
                tasks.create_task(self.handovers.run(), name=f"handovers of {context.name}")
            if self._rearrangements is not None:
                tasks.create_task(self._rearrangements.run(), name=f"handovers of {context.engine}")
            tasks.create_task(self._report(), name=f"report events of {context.name}")
            if self._profiler is not None:
                tasks.create_task(self._profiler.run(), name=f"profile requests of {context.name}")
            if context.rank == 0:
                tasks.create_task(self._membership.run(), name=f"keep {context.engine} a member")
            else:
                self.joined.set()

    async def _report(self) -> None:
        clock = asyncio.get_running_loop().time
        now = clock()
        self._activity.begin(now)
        self._dispatch.begin(now)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(self._load.due, self._activity.due)):
                    await self._engine.wait_facts()
            facts, placement, now = self._engine.take_facts(), self._engine.placement, clock()
            if self._also_report is not None:
                self._also_report(facts)
            if self._read_limit is not None:
                steps = sum(one.steps for one in facts.sent)
                self._read_limit.note_steps(steps, sum(one.step_seconds for one in facts.sent), now)
            if self._kv is not None and facts.kv:
                await self._kv.publish(facts.kv, _epoch(placement))
            await self._load.update(facts.load, now)
            await self._activity.add(facts.activations, _epoch(placement), now)
            if self._context.about.capabilities.experts:
                await self._dispatch.add(facts.sent, now)
            if self._profiler is not None and (facts.ended or facts.ended_lost):
                self._profiler.take(facts.ended, facts.ended_lost, placement)
            await asyncio.sleep(self._config.facts_seconds)

    async def _refuse_handover(self, request: Message) -> Message:
        refusal = (
            "does not state the memory that it uses"
            if isinstance(request, DescribeMemory)
            else "cannot move its experts: engines of its kind take no part in handovers"
        )
        raise ValueError(f"{self._context.engine} {refusal}")


def _epoch(placement: Placement | None) -> int:
    return 0 if placement is None else placement.epoch
