"""What to do with one engine, in the order in which things are worth trying: nothing, new shares, few copies, locality, everything anew. Pure."""

from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from migration.config import MigrationConfig
from migration.limits import Limits
from migration.plan import Plan
from migration.record import PlanRecord
from migration.situation import Question, Situation, situation
from migration.telling import measures
from migration.view import View


class Why(StrEnum):
    """Why there is no plan."""

    SHARDED = "sharded"
    """experts are sharded over all ranks: no rank is nearer to them than another"""
    DATA = "data"
    """too little was seen"""
    NOISE = "noise"
    """nothing is to be gained beyond sampling noise"""
    COST = "cost"
    """what could be gained is not worth its cost"""


class Homes(NamedTuple):
    """share: float32 [K, ranks], how much of a cluster's traffic belongs on which rank; clusters: version of the cluster model."""

    share: NDArray[np.float32]
    clusters: int


class Decided(NamedTuple):
    """record: for people. plan: None where nothing is worth doing, and `why` says the reason in a word. homes: None: nobody has one; note: why."""

    record: PlanRecord
    plan: Plan | None = None
    why: Why | None = None
    homes: Homes | None = None
    homes_note: str = ""


def decide(view: View, question: Question, config: MigrationConfig) -> Decided:
    """A plan, or why there is none. Equal views give equal answers."""
    if view.layout.attention == "tp" or view.layout.boundary >= view.shape.layers:
        return _refused(view, question, Why.SHARDED, "experts are sharded over all ranks in this layout: no placement is better than another")
    seen, needed = float(view.demand.pairs.sum()), config.least_pairs * view.shape.experts
    if seen < needed:
        return _refused(view, question, Why.DATA, f"insufficient data: {seen:,.0f} pairs per layer of {needed:,.0f}")
    found = situation(view, question, config, Limits())
    return _refused(view, question, Why.NOISE, "no gain beyond sampling noise", found)


def _refused(view: View, question: Question, why: Why, sentence: str, found: Situation | None = None) -> Decided:
    top_k = view.shape.top_k
    record = PlanRecord(
        engine=view.engine,
        worker_id=str(view.worker_id),
        model=view.model,
        epoch=view.placement.epoch,
        policy=question.policy,
        refused=sentence,
        tokens_per_second=view.judged.tokens_per_second(top_k),
        pairs=float(view.demand.pairs.sum()),
        judged_pairs=float(view.judged.pairs.sum()),
        next_window=view.later is not None,
        before=None if found is None else measures(found.before),
    )
    return Decided(record, why=why)
