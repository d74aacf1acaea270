"""Whether another placement would be better under what is wanted now: the question after a plan that seems to have done harm. Pure."""

from typing import NamedTuple

from fleet.placement import Placement
from migration.config import MigrationConfig
from migration.model.engine_view import View
from migration.planning.problem import Question, from_layer, situation


class Regret(NamedTuple):
    """seconds: by which a step would be shorter under the other placement; below 0: longer. least: below which that is noise."""

    seconds: float
    least: float


def regret(view: View, placement: Placement, config: MigrationConfig) -> Regret:
    """By the demand that plans are judged on, as they are judged. ValueError when the placement is of another shape, or nothing is wanted."""
    there = (placement.layers, placement.experts, placement.ranks)
    here = (view.placement.layers, view.placement.experts, view.placement.ranks)
    if there != here:
        raise ValueError(f"a placement of (layers, experts, ranks) {there}; the engine has {here}")
    if not view.judged.rates.any():
        raise ValueError("nothing is wanted at present")
    found = situation(view, Question(config.policy, 0), config)
    gained = found.before.seconds - found.judge(from_layer(placement, found.first)).seconds
    return Regret(float(gained.sum()), config.least_gain * found.even_step)
