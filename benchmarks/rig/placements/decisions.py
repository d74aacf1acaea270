"""Rows of the placement benchmark: whole decisions of the planner, of full size, and their time.

Requests fall into clusters of different experts, and the engine reports the experts of some of their tokens.
There are no homes yet: every rank serves all of them alike.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.rig.placements.cases import Row, timed
from benchmarks.rig.placements.popularity import domains, load, sampled
from benchmarks.rig.report import Target
from fleet.experts import ModelShape
from fleet.placement import Placement
from fleet.routings import SAMPLED_TOKENS
from fleet.signatures import ClusterModel
from fleet.timing import EngineSpeed
from migration.config import MigrationConfig
from migration.engine_state.token_samples import MAX_REQUESTS
from migration.model.engine_view import CacheUse, Demand, EngineView
from migration.planning.planner import decide
from migration.planning.problem import PlanningQuestion
from migration.solvers.full_placement import full_placement

PART = "whole decisions of the planner, policy roost; nodes of 8 ranks"
LAYERS, EXPERTS, TOP_K, DOMAINS, WINDOW_PAIRS = 58, 256, 8, 8, 200_000.0
SHAPE = ModelShape(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, hidden=7168, expert_intermediate=2048)
SPEED = EngineSpeed(step=5e-3, decode_sequence=1e-5, expert_pair=1e-8, dispatch=1e-8, dispatch_node=4e-8)
PAIRS_PER_SECOND, BYTES = 50_000.0 * TOP_K, 1 << 42
HOMES_MS, WIDE_MS = 500.0, 250.0
"""at 64 ranks with homes; at 256 ranks of two slots, without"""


def rows(quick: bool) -> list[Row]:
    """Return one row for each number of ranks, without and with clusters of requests."""
    sizes = (
        ((64, 5, True), (256, 2, False))
        if quick
        else (
            *(
                (ranks, slots, homes)
                for ranks, slots in ((8, 40), (32, 9), (64, 5))
                for homes in (False, True)
            ),
            (256, 2, False),
        )
    )
    return [_row(ranks, slots, homes, 1 if quick else 3) for ranks, slots, homes in sizes]


def _row(ranks: int, slots: int, homes: bool, times: int) -> Row:
    seen = engine(ranks, slots, homes)
    question, config = PlanningQuestion("roost", BYTES), MigrationConfig()
    found, ms = timed(lambda: decide(_unread(seen), question, config), times)
    figures: dict[str, float | str] = {
        "copies": str(0 if found.plan is None else len(found.plan.copies)),
        "gain, us a step": 1e6 * found.record.gain_seconds,
        "ms": ms,
    }
    held: tuple[Target, ...] = ()
    if ranks == 64 and homes:
        held = (Target("a decision with homes at 64 ranks", ms, HOMES_MS, at_least=False, unit=" ms"),)
    if ranks == 256:
        held = (Target("a decision at 256 ranks of 2 slots", ms, WIDE_MS, at_least=False, unit=" ms"),)
    case = f"{LAYERS} x {EXPERTS}, {ranks} ranks x {slots} slots{', clusters' if homes else ''}"
    return Row(PART, case, figures, held)


def engine(ranks: int, slots: int, homes: bool) -> EngineView:
    """Return an engine with the placement of another demand; homes: its clusters of requests are known."""
    dice = np.random.default_rng(ranks)
    clusters = max(16, ranks)
    kinds = domains("topheavy", DOMAINS, 0.5, LAYERS, EXPERTS, dice)
    profiles = np.stack(
        [
            0.75 * kinds[at % DOMAINS] + 0.25 * load("topheavy", LAYERS, EXPERTS, dice)
            for at in range(clusters)
        ]
    )
    shares = dice.dirichlet(np.full(clusters, 3.0))
    truth = np.tensordot(shares, profiles, 1)
    before = full_placement(0.7 * truth + 0.3 * kinds[0], ranks, slots)
    windows = [_window(truth, ranks, dice) for _ in range(2)]
    model = ClusterModel(1, profiles.astype(np.float32), shares.astype(np.float32), 1.0) if homes else None
    return EngineView(
        engine="e",
        worker_id=1,
        model="m",
        shape=SHAPE,
        placement=Placement(before, experts=EXPERTS, ranks=ranks),
        node=np.arange(ranks) // 8,
        speed=SPEED,
        demand=windows[0],
        later=windows[1],
        running=np.full(ranks, 128.0),
        waiting=np.zeros(ranks),
        cache=CacheUse(10_000, np.full(ranks, 4_000.0), 16, 65_536),
        clusters=model,
        predictability=0.9 if homes else 0.0,
        tokens=_tokens(profiles, shares, dice) if homes else None,
    )


def _tokens(
    profiles: NDArray[np.float64], shares: NDArray[np.float64], dice: np.random.Generator
) -> NDArray[np.uint16]:
    """Return sampled tokens of as many requests as the planner keeps, [requests, SAMPLED_TOKENS, LAYERS,
    TOP_K]: different experts of each layer, drawn by the profile of the request's cluster.
    """
    cluster = dice.choice(len(shares), MAX_REQUESTS, p=shares)
    likely = np.log(profiles / profiles.sum(axis=2, keepdims=True) + 1e-12)
    tokens = np.empty((MAX_REQUESTS, SAMPLED_TOKENS, LAYERS, TOP_K), np.uint16)
    for layer in range(LAYERS):
        drawn = likely[cluster, None, layer] + dice.gumbel(size=(MAX_REQUESTS, SAMPLED_TOKENS, EXPERTS))
        tokens[:, :, layer] = np.argpartition(-drawn, TOP_K, axis=2)[:, :, :TOP_K]
    return tokens


def _unread(seen: EngineView) -> EngineView:
    """Return the view with windows whose sums are not known yet, as every decision of a planner finds
    them."""
    later = None if seen.later is None else replace(seen.later)
    return replace(seen, demand=replace(seen.demand), later=later)


def _window(truth: NDArray[np.float64], ranks: int, dice: np.random.Generator) -> Demand:
    by_rank = np.broadcast_to(truth / truth.sum(axis=1, keepdims=True) / ranks, (ranks, *truth.shape))
    counts = sampled(by_rank, WINDOW_PAIRS * ranks, dice)
    return Demand.of(counts * (PAIRS_PER_SECOND / WINDOW_PAIRS), counts.sum(axis=2).mean(axis=1), 60.0)
