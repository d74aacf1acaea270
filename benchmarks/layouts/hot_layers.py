"""Time to find the single layers worth sharding, and to plan their change, for 94 layers on 8 ranks.

python -m benchmarks.layouts.hot_layers --quick
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import typer

from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, median
from fleet.arrays import FloatArray
from fleet.experts import ModelShape
from fleet.placement import Placement, linear, with_rows
from fleet.timing import EngineSpeed
from migration.config import MigrationConfig
from migration.layouts.hot_layers import hot_layers
from migration.layouts.layer_traffic import expected_traffic
from migration.model.engine_view import Demand, EngineView
from migration.planning.findings import Infeasible
from migration.planning.layer_turns import TurnedLayers, turned_layers
from migration.planning.problem import LayerTurning, PlanningProblem, PlanningQuestion, prepare

SHAPE = ModelShape(layers=94, experts=128, top_k=8, hidden=4096, expert_intermediate=1536)
RANKS = 8
STEP_TOKENS = 256.0
PAIRS = 4e6
"""of a window, in each layer"""
MILLISECONDS = 20.0
SPEED = EngineSpeed(step=1e-3, dispatch=0.0, expert_pair=2e-7, expert_read=4e-6, gather_byte=3e-12)
TURNING = LayerTurning(even_gain=-5e-5)
HOT = 4
"""layers of which one expert has a third of the pairs"""


def window(share: FloatArray, dice: np.random.Generator) -> Demand:
    """Draw a window of a demand [layers, experts] that is alike on all ranks."""
    counts = dice.poisson(PAIRS / RANKS * np.broadcast_to(share, (RANKS, *share.shape))).astype(np.float64)
    return Demand.of(counts / 60.0, counts.sum(axis=2).mean(axis=1), 60.0)


def problem(share: FloatArray, placement: Placement, dice: np.random.Generator) -> PlanningProblem:
    """Prepare an engine that serves this demand."""
    view = EngineView(
        engine="e",
        worker_id=1,
        model="m",
        shape=SHAPE,
        placement=placement,
        node=np.zeros(RANKS, np.intp),
        speed=SPEED,
        demand=window(share, dice),
        later=window(share, dice),
        running=np.full(RANKS, STEP_TOKENS / RANKS),
    )
    return prepare(view, PlanningQuestion("roost", 1 << 40), MigrationConfig())


def found_by(problem: PlanningProblem) -> TurnedLayers | None:
    """Return what is found about single layers."""
    try:
        return turned_layers(problem, TURNING)
    except Infeasible:
        return None


def milliseconds(call: Callable[[], Any], times: int) -> float:
    """Return the median duration of a call."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - begin))
    return median(taken)


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Time an answer for even layers, with hot ones, and with sharded ones that have cooled."""
    times = 5 if quick else 50
    dice = np.random.default_rng(1)
    even = np.full((SHAPE.layers, SHAPE.experts), 1.0 / SHAPE.experts)
    hot = even.copy()
    hot[:HOT] *= 2 / 3
    hot[:HOT, 0] += 1 / 3
    whole = linear(layers=SHAPE.layers, experts=SHAPE.experts, ranks=RANKS)
    sharded = with_rows(whole, dict.fromkeys(range(HOT)), epoch=1)
    nothing, some, cooled = (
        problem(even, whole, dice),
        problem(hot, whole, dice),
        problem(even, sharded, dice),
    )
    demand, terms = np.asarray(some.view.demand.rates, np.float64), some.terms
    one_window = milliseconds(lambda: hot_layers(expected_traffic(whole, demand, terms), SPEED, SHAPE), times)
    report = Report("single layers worth sharding", ["94 layers, 8 ranks", "median ms"])
    report.add("layers priced in one window of demand", one_window)
    report.add("even layers: nothing found", milliseconds(lambda: found_by(nothing), times))
    report.add(f"{HOT} hot layers found and planned", milliseconds(lambda: found_by(some), times))
    report.add(f"{HOT} cooled layers found and planned", milliseconds(lambda: found_by(cooled), times))
    for name, one in (("hot", some), ("cooled", cooled)):
        turned = found_by(one)
        text = "none" if turned is None else f"{len(turned.gains)}; the first: {turned.gains[0]}"
        report.notes.append(f"{name} layers found: {text}")
    report.targets.append(Target("layers priced", one_window, MILLISECONDS, at_least=False, unit=" ms"))
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
