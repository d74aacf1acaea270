"""What there is to place on, and how much of what sending tokens costs a placement saves: what the planner says of locality. Pure."""

from fleet.placement import Placement
from migration.model.engine_view import EngineView, PlannedHomes
from migration.planning.problem import PlanningProblem
from migration.solvers.locality_placement import LocalityPrices, LocalityProblem, bound, measured


def room_of(found: PlanningProblem) -> LocalityProblem:
    """What there is to place on, at the prices that tokens pay for being sent."""
    prices = LocalityPrices.of(found.terms.speed, found.terms.top_k, found.node)
    return LocalityProblem(node=found.node, slots=found.placement.slots_per_rank, prices=prices, most=found.limits.most_replicas)


def none(view: EngineView, note: str) -> PlannedHomes:
    """Nobody has a home, for this reason."""
    return PlannedHomes(None, 0, view.placement.epoch, note, view.now)


def as_before(view: EngineView, note: str) -> PlannedHomes:
    """The homes that hold stay, since when they do, as nothing was seen that speaks against them; nobody has one where none fit the kinds of requests and
    the placement that there are."""
    said, kinds = view.homes, view.clusters
    if said is None or said.share is None or said.epoch > view.placement.epoch or said.share.shape[1] != len(view.node):
        return none(view, note)
    if kinds is not None and kinds.clusters != len(said.share):
        return none(view, note)
    return said._replace(clusters=said.clusters if kinds is None else kinds.version, note=f"{note}; the homes of before stay")


def saved(found: PlanningProblem, placement: Placement) -> tuple[float, float]:
    """(part of what dispatch would cost were nothing local that a placement saves, the most that any could save), mean over the layers of the bound."""
    room = room_of(found)
    layers, most = bound(found.judged, room)
    reached = measured(placement.expert_of_slot, placement.split, found.judged, room).saved[layers]
    return float(reached.mean()), float(most.mean())
