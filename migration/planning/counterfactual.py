"""Whether another placement would be better under what is wanted now: the question after a plan that seems to have done harm. Pure."""

from typing import NamedTuple

from fleet.placement import Placement
from migration.config import MigrationConfig
from migration.model.engine_view import EngineView
from migration.planning.problem import PlanningQuestion, from_layer, situation


class Counterfactual(NamedTuple):
    """seconds: by which a step would be shorter under the other placement; below 0: longer. least: below which that is noise."""

    seconds: float
    least: float


def regret(view: EngineView, placement: Placement, config: MigrationConfig) -> Counterfactual:
    """By the demand that plans are judged on, as they are judged. ValueError when the placement is of another shape, or nothing is wanted."""
    there = (placement.layers, placement.experts, placement.ranks)
    here = (view.placement.layers, view.placement.experts, view.placement.ranks)
    if there != here:
        raise ValueError(f"a placement of (layers, experts, ranks) {there}; the engine has {here}")
    if not view.judged.rates.any():
        raise ValueError("nothing is wanted at present")
    found = situation(view, PlanningQuestion(config.policy, 0), config)
    gained = found.before.seconds - found.judge(from_layer(placement, found.first)).seconds
    return Counterfactual(float(gained.sum()), config.least_gain * found.even_step)
