"""Report locality for the planner: the problem to place on, and the part of dispatch cost that a placement
saves. Pure."""

from fleet.placement import Placement
from migration.model.engine_view import EngineView, PlannedHomes
from migration.planning.problem import PlanningProblem
from migration.solvers.locality_placement import LocalityPrices, LocalityProblem, bound, measured


def locality_problem(found: PlanningProblem) -> LocalityProblem:
    """Return the slots and links to place on, at the prices of sending tokens."""
    prices = LocalityPrices.of(found.terms.speed, found.terms.top_k, found.node)
    return LocalityProblem(
        node=found.node, slots=found.placement.slots_per_rank, prices=prices, most=found.limits.max_replicas
    )


def no_homes(view: EngineView, note: str) -> PlannedHomes:
    """Return no homes, with the reason."""
    return PlannedHomes(None, 0, view.placement.epoch, note, view.now)


def present_homes(view: EngineView, note: str) -> PlannedHomes:
    """Keep the present homes and their start time, as no observation speaks against them.

    Return no homes where they no longer fit the tracker's clusters or the placement.
    """
    homes, kinds = view.homes, view.clusters
    if (
        homes is None
        or homes.share is None
        or homes.epoch > view.placement.epoch
        or homes.share.shape[1] != len(view.node)
    ):
        return no_homes(view, note)
    if kinds is not None and kinds.clusters != len(homes.share):
        return no_homes(view, note)
    return homes._replace(
        clusters=homes.clusters if kinds is None else kinds.version, note=f"{note}; the present homes stay"
    )


def dispatch_saved(found: PlanningProblem, placement: Placement) -> tuple[float, float]:
    """Return (saved, bound): parts of the dispatch cost with nothing local. Both are means over the layers of
    the bound.

    saved: by this placement. bound: the most that any placement could save.
    """
    room = locality_problem(found)
    layers, most = bound(found.evaluation, room)
    reached = measured(placement.expert_of_slot, placement.split, found.evaluation, room).saved[layers]
    return float(reached.mean()), float(most.mean())
