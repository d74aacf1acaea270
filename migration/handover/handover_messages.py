"""What is handed over next, from a plan and the log. Pure."""

from typing import NamedTuple

from fleet.events import ExpertCopy, LoopFigures, MigrationAborted, MigrationAccepted, MigrationPlanned, MigrationStaged, Origin
from fleet.handover import CoordinatorState
from fleet.placement import Placement
from migration.config import MigrationConfig
from migration.engine_state.placement_registry import EngineEntry
from migration.handover.coordinator import HandoverSpec, OpenHandover
from migration.handover.rank_progress import HandoverFailure
from migration.model.plan import Handover, Plan
from migration.model.plan_log import PlanRun
from migration.planning.plan_report import steps

MOST_WORDS = 16
"""Steps of a plan that an answer puts into words."""
MOST_REASON = 1000
"""characters"""


class Grounds(NamedTuple):
    """Why the planner has a plan carried out by itself."""

    policy: str
    before: LoopFigures | None = None
    """as it is foretold to go on without the plan; None: nobody has reckoned"""
    after: LoopFigures | None = None
    """and with it"""
    traceparent: str = ""
    """W3C; of what it answers, e.g. the span of a shift; empty: its trace begins with it"""


def next_of(entry: EngineEntry, plan: Plan, number: int, placement: Placement, handover: int, config: MigrationConfig) -> HandoverSpec:
    """Handover `number` of a plan, which makes this placement, as the engine's handover of another number."""
    what = plan.handovers[number]
    copies = copies_of(what)
    return HandoverSpec(
        engine=entry.engine,
        worker_id=entry.worker_id,
        ranks=placement.ranks,
        handover=handover,
        plan=plan.id,
        number=number,
        last=number + 1 == len(plan.handovers),
        epoch=what.epoch,
        placement=placement.record(),
        layout=entry.layout,
        copies=copies,
        copied=len(copies),
        bytes=what.bytes,
        stage_seconds=config.stage_seconds + _most_bytes(what, placement) / config.stage_bytes_per_second,
    )


def left_open(engine: str, left: OpenHandover, staged: MigrationStaged | None, entry: EngineEntry | None, config: MigrationConfig) -> HandoverSpec:
    """What a predecessor left open. staged: of that handover; entry: of that life of the engine; None: the log does not know."""
    return HandoverSpec(
        engine=engine,
        worker_id=left.worker_id,
        ranks=left.ranks,
        handover=left.handover,
        plan=left.plan,
        number=left.number,
        last=left.last,
        epoch=left.epoch,
        placement=None if staged is None else staged.placement,
        layout=None if entry is None else entry.layout,
        copied=left.copied,
        bytes=left.bytes,
        stage_seconds=config.stage_seconds,
        given=left.given,
    )


def unheard_of(entry: EngineEntry, handover: int, state: CoordinatorState, token: int, stored: OpenHandover | None) -> OpenHandover:
    """A handover that ranks have open though nothing durable knows of it, as it has to be ended. stored: what was found durable instead."""
    return OpenHandover(
        state=state,
        worker_id=entry.worker_id,
        ranks=entry.placement.ranks,
        handover=handover,
        plan="",
        number=0,
        last=False,
        epoch=entry.epoch,
        copied=0,
        bytes=0,
        token=token,
        given=0 if stored is None else stored.highest,
    )


def copies_of(handover: Handover) -> tuple[ExpertCopy, ...]:
    """What ranks are told to copy."""
    return tuple(
        ExpertCopy(layer=step.layer, expert=copy.expert, source=copy.source, slot=copy.slot)
        for step in handover.steps
        for copy in step.copies
        if copy.source is not None
    )


def received(handover: Handover, placement: Placement) -> list[int]:
    """Experts that each rank takes in."""
    counts = [0] * placement.ranks
    for step in handover.steps:
        for copy in step.copies:
            counts[copy.slot // placement.slots_per_rank] += 1
    return counts


def _most_bytes(handover: Handover, placement: Placement) -> int:
    """That any rank takes in."""
    taken = [0] * placement.ranks
    for step in handover.steps:
        for copy in step.copies:
            taken[copy.slot // placement.slots_per_rank] += copy.bytes
    return max(taken)


# What is said of it


def announced(entry: EngineEntry, plan: Plan, origin: Origin, blob: str, traceparent: str, grounds: Grounds | None = None) -> MigrationPlanned:
    """That a plan is carried out from now on. grounds: of the planner, where it does so by itself."""
    policy, before, after, _ = grounds or Grounds("")
    return MigrationPlanned(
        engine=entry.engine,
        worker_id=entry.worker_id,
        plan=plan.id,
        origin=origin,
        base_epoch=plan.base_epoch,
        handovers=len(plan.handovers),
        copies=len(plan.copies),
        bytes=plan.bytes,
        reason=plan.reason[:MOST_REASON],
        blob=blob,
        traceparent=traceparent,
        before=before,
        after=after,
        policy=policy,
    )


def accepted(entry: EngineEntry, plan: Plan) -> MigrationAccepted:
    """The same, as an answer."""
    return MigrationAccepted(
        engine=entry.engine,
        worker_id=entry.worker_id,
        plan=plan.id,
        handovers=len(plan.handovers),
        copies=len(plan.copies),
        bytes=plan.bytes,
        what=tuple(f"layer {step.layer}: {step.what}" for step in steps(plan)[:MOST_WORDS]),
    )


def dropped(course: PlanRun, failure: HandoverFailure) -> MigrationAborted:
    """That the rest of a plan is given up, with no handover open."""
    planned = course.planned
    return MigrationAborted(
        engine=planned.engine,
        worker_id=planned.worker_id,
        plan=planned.plan,
        handover=0,
        number=course.next,
        epoch=planned.base_epoch + course.next + 1,
        reason=failure.reason,
        fault=failure.fault,
        rank=failure.rank,
    )
