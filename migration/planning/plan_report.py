"""Convert plans and figures to records. Pure."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.placement import Placement
from migration.model.cost_model import Figures
from migration.model.engine_view import EngineView
from migration.model.plan import Plan, PlanStep
from migration.model.plan_record import Measures, MemoryPoint, PlanRecord, StepRecord
from migration.planning.evaluation import EvaluatedPlan, changeable_slots, travel_costs
from migration.planning.layer_turns import TurnedLayers
from migration.planning.locality_report import dispatch_saved
from migration.planning.problem import PlanningProblem, PlanningQuestion
from migration.planning.sentences import step_text
from migration.planning.slots_vs_kv_cache import TradeOffPoint, best, curve
from migration.solvers.full_placement import bound

MIN_HOME_SHARE = 0.02
"""Least share of a cluster for which a rank is listed as its home."""
MAX_STEPS = 4096
"""Most steps in a record; a plan may have more."""
_MAX_FURTHER_SLOTS = 12
"""Further slots per rank on the memory curve."""


def run_record(view: EngineView, question: PlanningQuestion) -> PlanRecord:
    """Return the parts of a record that are known before planning."""
    return PlanRecord(
        engine=view.engine,
        worker_id=str(view.worker_id),
        model=view.model,
        epoch=view.placement.epoch,
        policy=question.policy,
        plan_discount=question.plan_discount,
        tokens_per_second=view.evaluation.tokens_per_second(view.shape.top_k),
        pairs=float(view.demand.pairs.sum()),
        judged_pairs=float(view.evaluation.pairs.sum()),
        next_window=view.later is not None,
    )


def problem_record(found: PlanningProblem, placement: Placement) -> PlanRecord:
    """Return the parts of a record that do not depend on the outcome. placement: at the end of the plan."""
    near = dispatch_saved(found, placement) if found.question.bounds and travel_costs(found) else (None, None)
    balance_bound = bound(
        found.load, found.ranks, found.placement.slots_per_rank, found.limits.max_replicas
    ).mean()
    return msgspec.structs.replace(
        run_record(found.view, found.question),
        saved=near[0],
        saved_bound=near[1],
        before=measures(found, found.before.figures),
        balance_bound=float(balance_bound),
        step_ceiling=found.before.figures.step_ceiling,
        specialisation=found.gate.divergence - found.gate.floor,
        memory=_memory(found) if found.question.memory else (),
    )


def with_moves(record: PlanRecord, found: PlanningProblem, best: EvaluatedPlan, plan: Plan) -> PlanRecord:
    """Add a plan that moves experts to a record. best: the candidate that it carries out."""
    return msgspec.structs.replace(
        _with_plan(record, best, plan),
        after=measures(found, best.after.figures),
        copies=best.copies,
        copied_share=best.copies / max(changeable_slots(found), 1),
        copied_bytes=best.payback.bytes,
    )


def with_turned_layers(record: PlanRecord, turned: TurnedLayers, plan: Plan) -> PlanRecord:
    """Add a plan that changes the form of single layers to a record."""
    return msgspec.structs.replace(
        _with_plan(record, turned, plan),
        copies=plan.transfers,
        copied_share=len(turned.gains) / turned.goal.layers,
        copied_bytes=plan.bytes,
    )


def _with_plan(record: PlanRecord, worth: EvaluatedPlan | TurnedLayers, plan: Plan) -> PlanRecord:
    """Add what every plan has to a record. worth: what the plan carries out, with its gain and cost."""
    paid = worth.payback
    return msgspec.structs.replace(
        record,
        id=plan.id,
        handovers=len(plan.handovers),
        gain_seconds=worth.gain_seconds,
        gain_per_second=paid.gain_per_second,
        cost_seconds=paid.cost_seconds,
        net_seconds=worth.net_seconds,
        payback_seconds=paid.after_seconds,
        transfer_seconds=paid.transfer_seconds,
        steps=steps(plan),
    )


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


def _memory(found: PlanningProblem) -> tuple[MemoryPoint, ...]:
    """Convert the curve of redundant slots to records. Empty: the engine says too little of its cache."""
    if found.cache is None:
        return ()
    fewest, present = found.fewest_slots, found.placement.slots_per_rank
    points = curve(
        found.evaluation,
        found.terms,
        found.cache,
        range(fewest, max(present, fewest) + _MAX_FURTHER_SLOTS + 1),
        present=present,
        expert_bytes=found.view.shape.expert_bytes,
        sharded=len(found.view.placement.sharded),
    )
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
