"""Compare the served placement with another one under present demand: the check after a plan that seems
harmful. Pure."""

from typing import NamedTuple

from fleet.placement import Placement
from migration.config import MigrationConfig
from migration.model.engine_view import EngineView
from migration.planning.problem import PlanningQuestion, of_layers, prepare


class Counterfactual(NamedTuple):
    """Result of the comparison.

    seconds: step time saved under the other placement; below 0: time lost. least: smaller differences are
    noise.
    """

    seconds: float
    least: float


def counterfactual_gain(view: EngineView, placement: Placement, config: MigrationConfig) -> Counterfactual:
    """Return the gain from serving `placement` instead, under the demand and the costs of plan evaluation.

    ValueError when the placement has another shape, or there is no demand.
    """
    there = (placement.layers, placement.experts, placement.ranks)
    here = (view.placement.layers, view.placement.experts, view.placement.ranks)
    if there != here:
        raise ValueError(f"a placement of (layers, experts, ranks) {there}; the engine has {here}")
    if not view.evaluation.rates.any():
        raise ValueError("there is no demand at present")
    found = prepare(view, PlanningQuestion(config.policy, 0), config)
    gained = found.before.seconds - found.price(of_layers(placement, found.layers)).seconds
    return Counterfactual(float(gained.sum()), config.min_gain * found.even_step)
