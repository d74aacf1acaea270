"""Rows of the placement benchmark: changes turned into plans. Number of handovers, superfluous copies,
planning time and migration time."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.rig.placements.cases import Case, Drifting, Row, Table, balance, cases, timed
from benchmarks.rig.report import Target
from fleet.placement import Placement
from fleet.timing import EngineSpeed
from migration.model.constraints import Constraints
from migration.model.cost_model import CostTerms, LinkSpeeds, priced, transfer_seconds
from migration.model.placement_changes import PlacementChanges, copies_between, made
from migration.model.plan import planned, replay
from migration.model.sampling_noise import LoadNoise
from migration.planning.handover_batching import ordered, transfers
from migration.planning.rank_loss import critical, recover
from migration.planning.staging_capacity import StagingRoom
from migration.solvers.even_split_copies import even_split_copies
from migration.solvers.full_placement import full_placement
from migration.solvers.rank_relabelling import relabelled
from migration.solvers.table_diff import between, shortened

PLANS = (
    "changes made into plans: experts of 44 MB, one spare layer block for staging, 8 ranks a node, 50 and"
    " 12.5 GB/s"
)
LOSS = (
    "one rank is lost; one in 32 experts must have two holders; at most 5 % of slots are copied for balance"
)
PRICE = "what judging one placement takes"
EXPERT_BYTES, RANKS_OF_A_NODE = 44_040_192, 8
LINKS = LinkSpeeds(same_node=50e9, cross_node=12.5e9)
IN_VAIN = 10.0
"""most copies beyond those that the target needs, in % of these"""


def rows(quick: bool) -> list[Row]:
    """Return rows for few copies and a full re-placement after a drift; the loss of a rank; the objective."""
    skews, drifts = (("zipf",), ("mix25",)) if quick else (("mild", "zipf"), ("mix25", "full"))
    driftings = [
        Drifting(case, drift)
        for case in cases(skews=skews, seeds=1)
        if case.experts == 256
        for drift in drifts
    ]
    plans = [row for drifting in driftings for row in _plans(drifting)]
    first = [drifting for drifting in driftings if drifting.drift == drifts[0]]
    return plans + [_loss(drifting) for drifting in first] + [_price(drifting) for drifting in first]


def _plans(drifting: Drifting) -> Iterator[Row]:
    case, now = drifting.case, drifting.now
    before, anew = (full_placement(load, case.ranks, case.per_rank) for load in (drifting.before, now))
    changes = even_split_copies(
        before, now, case.ranks, goal=balance(anew, now, case.ranks), noise=LoadNoise(now.sum(axis=1))
    )
    yield _plan(f"{drifting}, few copies", case, before, changes)
    yield _plan(
        f"{drifting}, all anew",
        case,
        before,
        between(before, relabelled(before, anew, case.ranks), case.ranks),
    )


def _plan(name: str, case: Case, before: Table, changes: PlacementChanges) -> Row:
    start, node = _placement(before, case), _nodes(case)
    room = StagingRoom(node, EXPERT_BYTES)
    short, short_ms = timed(lambda: shortened(before, changes, case.ranks), 1)
    handovers, order_ms = timed(lambda: ordered(start, short, room), 1)
    plan = planned(start, handovers)
    epochs, replay_ms = timed(lambda: replay(start, plan), 1)
    moved = transfers(handovers, case.per_rank)
    arrived = np.bincount(moved.destination, minlength=case.ranks).max(initial=0)
    need = copies_between(before, made(before, changes), case.ranks)
    vain = 100.0 * (len(plan.copies) - need) / max(need, 1)
    figures: dict[str, float | str] = {
        "steps": str(len(plan.steps)),
        "copies": str(len(plan.copies)),
        "in vain %": vain,
        "GB": plan.bytes / 1e9,
        "across nodes %": (
            100.0 * sum(copy.link == "cross-node" for copy in plan.copies) / max(len(plan.copies), 1)
        ),
        "handovers": f"{len(epochs)} of {-(-int(arrived) // case.per_rank)} at least",
        "seconds": transfer_seconds(moved, node, LINKS),
        "ms to shorten": short_ms,
        "ms to order": order_ms,
        "ms to replay": replay_ms,
    }
    return Row(
        PLANS,
        name,
        figures,
        (Target("copies beyond what the end needs", vain, IN_VAIN, at_least=False, unit=" %"),),
    )


def _loss(drifting: Drifting) -> Row:
    case, load, node = drifting.case, drifting.before, _nodes(drifting.case)
    start = _placement(full_placement(load, case.ranks, case.per_rank), case)
    dead = np.arange(case.ranks) == case.ranks // 2
    found, ms = timed(
        lambda: recover(
            start,
            dead,
            load,
            node,
            critical(load, case.experts // 32),
            max_copies=start.expert_of_slot.size // 20,
        ),
        1,
    )
    plan = planned(
        start, ordered(start, found.changes, StagingRoom(node, EXPERT_BYTES), limits=Constraints(live=~dead))
    )
    replay(start, plan)
    figures: dict[str, float | str] = {
        "lost": str(len(found.lost)),
        "from storage": str(sum(copy.source is None for copy in plan.copies)),
        "slots missing": str(int(found.missing.sum())),
        "short": str(len(found.short)),
        "handovers": str(len(plan.handovers)),
        "copies": str(len(plan.copies)),
        "best balance": (
            float(
                balance(full_placement(load, case.ranks, case.per_rank, live=~dead), load, case.ranks).mean()
            )
            * case.ranks
            / (case.ranks - 1)
        ),
        "balance": float(balance(found.table, load, case.ranks).mean()) * case.ranks / (case.ranks - 1),
        "ms": ms,
    }
    return Row(LOSS, str(case), figures)


def _price(drifting: Drifting) -> Row:
    case = drifting.case
    demand = np.repeat(drifting.now[None], case.ranks, axis=0)
    held = _placement(full_placement(drifting.before, case.ranks, case.per_rank), case)
    terms = CostTerms(
        EngineSpeed(expert_pair=1e-8, dispatch=1e-9, dispatch_node=4e-9),
        _nodes(case),
        8,
        step_tokens=128.0 * case.ranks,
    )
    found, ms = timed(lambda: priced(held, demand, terms), 5)
    parts = found.figures
    figures: dict[str, float | str] = {
        "remote ranks": parts.remote_ranks,
        "remote nodes": parts.remote_nodes,
        "ms": ms,
    }
    return Row(PRICE, str(case), figures)


def _placement(table: Table, case: Case) -> Placement:
    return Placement(table, experts=case.experts, ranks=case.ranks)


def _nodes(case: Case) -> NDArray[np.intp]:
    return np.arange(case.ranks) // RANKS_OF_A_NODE
