"""Outcome of one planning run: the plan or the reason for its absence, the record, and the homes. Pure."""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from migration.model.engine_view import PlannedHomes
from migration.model.plan import Plan
from migration.model.plan_record import PlanRecord
from migration.planning.demand_forecast import RoutingForecast
from migration.planning.evaluation import EvaluatedPlan, travel_costs
from migration.planning.findings import Finding, FindingCode
from migration.planning.joint_homes import effective_homes, published_homes
from migration.planning.layer_turns import TurnedLayers
from migration.planning.locality_report import no_homes
from migration.planning.plan_report import named_homes
from migration.planning.problem import PlanningProblem
from migration.planning.sentences import sentence
from migration.planning.strategies import PredictedEffect


class ReasonCode(StrEnum):
    """Reason for the absence of a plan."""

    SHARDED = "sharded"
    """Experts are sharded over all ranks: no rank is nearer to them than another."""
    DATA = "data"
    """Too few pairs were observed."""
    NOISE = "noise"
    """No gain exceeds sampling noise."""
    COST = "cost"
    """The possible gain is less than its cost."""
    UNABLE = "unable"
    """The policy cannot plan for this engine."""


REFUSALS = {
    FindingCode.SHARDED: ReasonCode.SHARDED,
    FindingCode.TOO_FEW_PAIRS: ReasonCode.DATA,
    FindingCode.AT_CEILING: ReasonCode.NOISE,
    FindingCode.BELOW_LEAST_GAIN: ReasonCode.NOISE,
    FindingCode.DOES_NOT_PAY: ReasonCode.COST,
    FindingCode.POLICY_UNABLE: ReasonCode.UNABLE,
    FindingCode.IMPOSSIBLE: ReasonCode.UNABLE,
}
"""Reason code of each finding that ends a run without a plan."""


class PlannerDecision(NamedTuple):
    """Outcome of one planning run.

    record: for people. plan: None where nothing is worth doing; `why` then holds the reason code. turned: the
    change of single layers that the plan makes, instead of moving experts.
    """

    record: PlanRecord
    homes: PlannedHomes
    """Homes that apply under the placement served now."""
    plan: Plan | None = None
    why: ReasonCode | None = None
    homes_after: PlannedHomes | None = None
    """Homes that apply from the plan's last epoch on, changed by the plan or not; None: there is no plan."""
    turned: TurnedLayers | None = None


def no_plan(record: PlanRecord, homes: PlannedHomes, reason: Finding) -> PlannerDecision:
    """Return the decision to do nothing. reason: one of `REFUSALS`."""
    if homes.share is not None:
        record = msgspec.structs.replace(record, homes=named_homes(homes.share), homes_note=homes.note)
    return PlannerDecision(
        msgspec.structs.replace(record, refused=sentence(reason)), homes, why=REFUSALS[reason.code]
    )


def with_homes(
    decided: PlannerDecision, found: PlanningProblem, best: EvaluatedPlan | None = None
) -> PlannerDecision:
    """Add the homes of clusters to a decision: those that hold now, and those that hold after the plan.

    best: the candidate that the plan carries out.
    """
    now, after = _homes(found, decided.plan, None if best is None else best.candidate.predicted)
    homes = now if after is None else after
    named = () if homes.share is None else named_homes(homes.share)
    return decided._replace(
        record=msgspec.structs.replace(decided.record, homes=named, homes_note=homes.note),
        homes=now,
        homes_after=after,
    )


def _homes(
    found: PlanningProblem, plan: Plan | None, predicted: PredictedEffect | None
) -> tuple[PlannedHomes, PlannedHomes | None]:
    """Return (homes now, homes after the plan). While a plan leads to other homes, the present ones stay."""
    if found.question.policy != "roost":
        reason = Finding.of(FindingCode.POLICY_WITHOUT_HOMES, policy=found.question.policy)
        now = no_homes(found.view, sentence(reason))
    elif not travel_costs(found):
        now = no_homes(found.view, sentence(Finding.of(FindingCode.CHEAP_DISPATCH)))
    elif predicted is not None:
        known = found.routing.known if isinstance(found.routing, RoutingForecast) else None
        now = published_homes(found, known, Finding.of(FindingCode.UNTIL_LAST_HANDOVER))
    else:
        now = published_homes(found, *effective_homes(found))
    if plan is None:
        return now, None
    last = found.view.placement.epoch + len(plan.handovers)
    if predicted is not None:
        return now, published_homes(found, predicted.homes, Finding.of(FindingCode.WITH_THE_PLACEMENT), last)
    return now, now._replace(epoch=last)
