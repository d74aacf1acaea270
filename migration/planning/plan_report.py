"""Convert plans and figures to records. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from migration.model.cost_model import Figures
from migration.model.plan import Plan, PlanStep
from migration.model.plan_record import Measures, MemoryPoint, StepRecord
from migration.planning.problem import PlanningProblem
from migration.planning.sentences import step_text
from migration.planning.slots_vs_kv_cache import TradeOffPoint, best

MIN_HOME_SHARE = 0.02
"""Least share of a cluster for which a rank is listed as its home."""
MAX_STEPS = 4096
"""Most steps in a record; a plan may have more."""


def measures(found: PlanningProblem, figures: Figures) -> Measures:
    """Convert a placement's figures to a record."""
    seconds = figures.seconds
    return Measures(
        balance_mean=figures.balance,
        balance_min=figures.least_balance,
        local_share=figures.local,
        remote_ranks=figures.remote_ranks,
        remote_nodes=figures.remote_nodes,
        step_seconds=found.step_seconds(seconds),
        expert_seconds=seconds.experts,
        dispatch_seconds=seconds.dispatch,
        memory_seconds=seconds.memory,
    )


def steps(plan: Plan) -> tuple[StepRecord, ...]:
    """Return records of the plan's first steps."""
    numbered = (
        (number, step) for number, handover in enumerate(plan.handovers, start=1) for step in handover.steps
    )
    return tuple(
        _step(number, step, plan.slots_per_rank)
        for _, (number, step) in zip(range(MAX_STEPS), numbered, strict=False)
    )


def _step(number: int, step: PlanStep, per: int) -> StepRecord:
    return StepRecord(
        number=number,
        kind=step.kind,
        layer=step.layer,
        copies=step.transfers,
        bytes=step.bytes,
        gain_seconds=step.gain,
        what=step_text(step, per),
        why=step.why,
    )


def memory(found: PlanningProblem, points: Sequence[TradeOffPoint]) -> tuple[MemoryPoint, ...]:
    """Convert the curve of redundant slots to records."""
    chosen = best(points, found.config.min_gain)
    return tuple(_point(found, point, point is chosen) for point in points)


def _point(found: PlanningProblem, point: TradeOffPoint, chosen: bool) -> MemoryPoint:
    return MemoryPoint(
        slots_per_rank=point.slots_per_rank,
        redundant_slots=point.slots_per_rank - found.fewest_slots,
        bytes_per_rank=point.bytes_per_rank,
        kv_blocks=point.kv_blocks,
        balance=point.figures.balance,
        local_share=point.figures.local,
        step_seconds=point.step_seconds,
        waiting_seconds=point.waiting_seconds,
        total_seconds=point.total_seconds,
        present=point.slots_per_rank == found.placement.slots_per_rank,
        best=chosen,
    )


def named_homes(share: NDArray[np.float32]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return (cluster, its ranks, largest share first) for shares [K, ranks], without clusters that have no
    home."""
    order = np.argsort(-share, axis=1, kind="stable")
    return tuple(
        (cluster, tuple(rank for rank in order[cluster].tolist() if row[rank] >= MIN_HOME_SHARE))
        for cluster, row in enumerate(share)
        if row.any()
    )
