"""A view made ready for planning: numbers that every candidate is made from and judged by. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.placement import Placement, Split
from migration.config import MigrationConfig, Policy
from migration.limits import Limits
from migration.objective import Figures, Links, Terms, figures
from migration.view import View

Rates = NDArray[np.float64]
"""float64 [ranks, layers, experts], (token, k) pairs per second"""


class Question(NamedTuple):
    """What a plan is asked for."""

    policy: Policy
    budget_bytes: int
    memory: bool = False
    dead: tuple[int, ...] = ()
    """ranks that count as lost"""
    layers: tuple[int, ...] = ()
    """only these may change; empty: all"""


@dataclass(frozen=True, eq=False, kw_only=True)
class Situation:
    """One engine and one question. Layers below the layout's boundary are sharded over the ranks: they are left out of everything here, so
    that layer 0 of these numbers is layer `first` of the model."""

    view: View
    question: Question
    first: int
    placement: Placement
    """of the layers that hold whole experts"""
    fit: Rates
    """what plans are made from"""
    judged: Rates
    """what they are judged on"""
    pairs: float
    """behind each layer of `fit`, all ranks together"""
    judged_pairs: float
    terms: Terms
    steps_per_second: float
    links: Links
    limits: Limits
    before: Figures

    @property
    def load(self) -> Rates:
        """float64 [layers, experts]: of `fit`, over all ranks."""
        return np.asarray(self.fit.sum(axis=0))

    @property
    def expert_bytes(self) -> int:
        return self.view.shape.expert_bytes

    def figures(self, placement: Placement, memory_seconds: float = 0.0) -> Figures:
        """Of a placement, under the demand that plans are judged on."""
        return figures(placement, self.judged, self.terms, memory_seconds)


def situation(view: View, question: Question, config: MigrationConfig, limits: Limits) -> Situation:
    """Make a view ready. The layout must hold whole experts in some layer."""
    first = view.layout.boundary
    placement = from_layer(view.placement, first)
    fit, judged = (np.asarray(demand.rates[:, first:], np.float64) for demand in (view.demand, view.judged))
    step_tokens = tokens_of_a_step(view)
    terms = Terms(speed=view.speed, node=view.node, top_k=view.shape.top_k, step_tokens=step_tokens)
    return Situation(
        view=view,
        question=question,
        first=first,
        placement=placement,
        fit=fit,
        judged=judged,
        pairs=float(view.demand.pairs.sum()),
        judged_pairs=float(view.judged.pairs.sum()),
        terms=terms,
        steps_per_second=view.judged.tokens_per_second(view.shape.top_k) / step_tokens,
        links=Links(same_node=config.rank_bytes_per_second, cross_node=config.node_bytes_per_second, contention=config.contention),
        limits=limits,
        before=figures(placement, judged, terms),
    )


def from_layer(placement: Placement, first: int) -> Placement:
    """The layers of a placement from one on."""
    if not first:
        return placement
    split = None if placement.even else Split(*(part[first:] for part in placement.split))
    return Placement(placement.expert_of_slot[first:], experts=placement.experts, ranks=placement.ranks, epoch=placement.epoch, split=split)


def tokens_of_a_step(view: View) -> float:
    """Tokens of one step of the engine, all ranks together: as many as sequences decode; where nobody says, or nothing decodes at the moment, as
    many as come in while a step lasts, which grows with them: t = T * (step + decode_sequence * t / ranks)."""
    running = 0.0 if view.running is None else float(view.running.sum())
    if running >= 1.0:
        return running
    come, ranks = view.judged.tokens_per_second(view.shape.top_k), len(view.node)
    busy = min(come * view.speed.decode_sequence / ranks, 0.9)
    return max(1.0, come * view.speed.step / (1.0 - busy))
