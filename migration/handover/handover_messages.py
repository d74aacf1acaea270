"""Messages of the next handover, built from a plan and the log. Pure."""

from typing import NamedTuple

import numpy as np

from fleet.arrays import SlotTable
from fleet.facts.migrations import LoopFigures, MigrationAborted, MigrationPlanned, MigrationStaged, Origin
from fleet.handover import CoordinatorState
from fleet.layout import AttentionLayout
from fleet.placement import EMPTY, Placement, PlacementRecord, as_stated
from fleet.requests.handovers import ExpertCopy
from fleet.requests.plans import MigrationAccepted, SwitchEstimate
from fleet.sharding import groups
from migration.config import MigrationConfig
from migration.engine_state.placement_registry import EngineEntry
from migration.handover.coordinator import HandoverSpec, OpenHandover
from migration.handover.rank_progress import HandoverFailure
from migration.model.plan import NO_LAYER, Handover, Plan, PlanStep
from migration.model.plan_log import PlanRun
from migration.model.plan_record import StepRecord
from migration.planning.plan_report import steps

MAX_DESCRIBED_STEPS = 16
"""Limit on the plan steps described in words in an answer."""
MAX_REASON = 1000
"""characters"""


class Grounds(NamedTuple):
    """Reason and predictions for a plan that the planner starts automatically."""

    policy: str
    before: LoopFigures | None = None
    """predicted figures without the plan; None: not computed"""
    after: LoopFigures | None = None
    """predicted figures with the plan"""
    traceparent: str = ""
    """W3C traceparent of the cause, e.g. the span of a demand shift; empty: the plan starts a new trace"""


def next_of(
    entry: EngineEntry, plan: Plan, number: int, placement: Placement, handover: int, config: MigrationConfig
) -> HandoverSpec:
    """Describe handover `number` of a plan. placement: its result; handover: its number among the engine's
    handovers."""
    what = plan.handovers[number]
    staged_bytes = 0 if entry.rearranges else _max_bytes(what, placement)
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
        copies=copies_of(what),
        copied=what.transfers,
        bytes=what.bytes,
        stage_seconds=config.stage_seconds + staged_bytes / config.stage_bytes_per_second,
        rearranges=entry.rearranges,
    )


def left_open(
    engine: str,
    left: OpenHandover,
    staged: MigrationStaged | None,
    entry: EngineEntry | None,
    config: MigrationConfig,
) -> HandoverSpec:
    """Describe a handover that a previous coordinator left open.

    staged: log entry of that handover; entry: of that incarnation of the engine. None: not in the log.
    """
    return HandoverSpec(
        engine=engine,
        worker_id=left.worker_id,
        ranks=left.ranks,
        handover=left.handover,
        plan=left.plan,
        number=left.number,
        last=left.last,
        epoch=left.epoch,
        placement=None if staged is None else _staged_placement(staged, entry),
        copied=left.copied,
        bytes=left.bytes,
        stage_seconds=config.stage_seconds,
        highest_assigned=left.highest_assigned,
        rearranges=entry is not None and entry.rearranges,
    )


def _staged_placement(staged: MigrationStaged, entry: EngineEntry | None) -> PlacementRecord:
    """Return a staged placement. Earlier releases recorded it without its attention, which does not change in
    an engine that moves its experts itself."""
    if entry is None or not entry.rearranges:
        return staged.placement
    return as_stated(staged.placement, AttentionLayout(kind=entry.placement.attention))


def found_on_ranks(
    entry: EngineEntry, handover: int, state: CoordinatorState, token: int, stored: OpenHandover | None
) -> OpenHandover:
    """Build the record for ending a handover that ranks have open but that is not in durable storage.

    stored: the record found in durable storage instead.
    """
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
        highest_assigned=0 if stored is None else stored.highest,
    )


def copies_of(handover: Handover) -> tuple[ExpertCopy, ...]:
    """Return the copies that ranks must make."""
    return tuple(
        ExpertCopy(layer=step.layer, expert=copy.expert, source=copy.source, slot=copy.slot)
        for step in handover.steps
        for copy in step.copies
        if copy.source is not None
    )


def received(handover: Handover, placement: Placement) -> list[int]:
    """Count the cells that each rank fills: one for each expert of a whole layer, or group of a sharded
    one."""
    counts = [0] * placement.ranks
    for step in handover.steps:
        for copy in step.copies:
            counts[copy.slot // placement.slots_per_rank] += 1
        if step.parts:
            counts = [sum(pair) for pair in zip(counts, _turned_cells(step, placement), strict=True)]
    return counts


def _turned_cells(step: PlanStep, placement: Placement) -> list[int]:
    """Count the cells that each rank fills when a layer turns over."""
    if step.kind == "shard":
        return [groups(placement.experts, placement.ranks)] * placement.ranks
    held: list[int] = (_row(step, placement) != EMPTY).sum(axis=1).tolist()
    return held


def _row(step: PlanStep, placement: Placement) -> SlotTable:
    """Return the experts of a layer that becomes whole: int16 [ranks, slots_per_rank]."""
    return np.frombuffer(step.slots, "<i2").astype(np.int16).reshape(placement.ranks, -1)


def _max_bytes(handover: Handover, placement: Placement) -> int:
    """Return the most bytes that any rank stages, those that it copies within its memory included."""
    taken = [0] * placement.ranks
    for step in handover.steps:
        for copy in step.copies:
            taken[copy.slot // placement.slots_per_rank] += copy.bytes
        if step.parts:
            size = sum(moved.bytes for moved in step.parts) // sum(moved.parts for moved in step.parts)
            parts = (
                [placement.experts] * placement.ranks
                if step.kind == "shard"
                else [placement.ranks * held for held in _turned_cells(step, placement)]
            )
            taken = [before + size * count for before, count in zip(taken, parts, strict=True)]
    return max(taken)


# Events and answers


def announced(
    entry: EngineEntry,
    plan: Plan,
    origin: Origin,
    blob: str,
    traceparent: str,
    grounds: Grounds | None = None,
    *,
    paced: bool = False,
) -> MigrationPlanned:
    """Announce that the plan is being carried out from now on. grounds: for plans started by the planner.
    paced: its handovers wait for the byte budget."""
    policy, before, after, _ = grounds or Grounds("")
    return MigrationPlanned(
        engine=entry.engine,
        worker_id=entry.worker_id,
        plan=plan.id,
        origin=origin,
        base_epoch=plan.base_epoch,
        handovers=len(plan.handovers),
        copies=plan.transfers,
        bytes=plan.bytes,
        reason=plan.reason[:MAX_REASON],
        blob=blob,
        traceparent=traceparent,
        before=before,
        after=after,
        policy=policy,
        to_sharded=plan.turned("shard"),
        to_whole=plan.turned("gather"),
        attention=plan.attention,
        paced=paced,
    )


def accepted(entry: EngineEntry, plan: Plan, switch: SwitchEstimate | None = None) -> MigrationAccepted:
    """Build the answer to the request that started the plan. switch: of a switch of layout."""
    return MigrationAccepted(
        engine=entry.engine,
        worker_id=entry.worker_id,
        plan=plan.id,
        handovers=len(plan.handovers),
        copies=plan.transfers,
        bytes=plan.bytes,
        switch=switch,
        what=tuple(map(_described, steps(plan)[:MAX_DESCRIBED_STEPS])),
    )


def _described(step: StepRecord) -> str:
    return step.what if step.layer == NO_LAYER else f"layer {step.layer}: {step.what}"


def dropped(run: PlanRun, failure: HandoverFailure) -> MigrationAborted:
    """Report that the rest of a plan is abandoned, with no handover open."""
    planned = run.planned
    return MigrationAborted(
        engine=planned.engine,
        worker_id=planned.worker_id,
        plan=planned.plan,
        handover=0,
        number=run.progress.next,
        epoch=planned.base_epoch + run.progress.next + 1,
        reason=failure.reason,
        fault=failure.fault,
        rank=failure.rank,
    )
