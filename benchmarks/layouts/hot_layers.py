"""Time to find the layers worth sharding, from the measured traffic of 94 layers on 8 ranks.

python -m benchmarks.layouts.hot_layers --quick
"""

import time
from collections.abc import Callable

import numpy as np
import typer

from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, median
from fleet.experts import ModelShape
from fleet.placement import linear
from fleet.timing import EngineSpeed
from migration.layouts.hot_layers import HotLayerWatch, hot_layers
from migration.layouts.layer_traffic import LayerTraffic, expected_reads, expected_traffic
from migration.model.cost_model import CostTerms

SHAPE = ModelShape(layers=94, experts=128, top_k=8, hidden=4096, expert_intermediate=1536)
RANKS = 8
STEP_TOKENS = 256.0
STEPS = 100
MILLISECONDS = 20.0
SPEED = EngineSpeed(step=1e-3, dispatch=1e-8, expert_pair=2e-7, expert_read=4e-6, gather_byte=3e-12)


def skewed(dice: np.random.Generator) -> LayerTraffic:
    """Draw traffic in which some layers are much less even than others."""
    placement = linear(layers=SHAPE.layers, experts=SHAPE.experts, ranks=RANKS)
    evenness = dice.choice([0.05, 1.0, 10.0], (SHAPE.layers, 1))
    demand = dice.gamma(np.broadcast_to(evenness, (SHAPE.layers, SHAPE.experts))) + 1e-9
    demand /= demand.sum(axis=1, keepdims=True)
    pairs = STEP_TOKENS * SHAPE.top_k
    served = STEPS * pairs * demand.reshape(SHAPE.layers, RANKS, -1).sum(axis=2)
    remote = STEPS * STEP_TOKENS / RANKS * dice.uniform(2.0, 5.0, served.shape)
    return LayerTraffic(
        steps=STEPS,
        tokens=STEPS * STEP_TOKENS,
        pairs=STEPS * pairs,
        whole=np.ones(SHAPE.layers, np.bool_),
        served=served,
        remote_ranks=remote,
        balance=STEPS * served.mean(axis=1) / served.max(axis=1),
        reads=expected_reads(placement, np.broadcast_to(demand / RANKS, (RANKS, *demand.shape)), pairs),
        hottest=demand.max(axis=1),
    )


def milliseconds(call: Callable[[], object], times: int) -> float:
    """Return the median duration of a call."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - begin))
    return median(taken)


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Time the parts of an answer."""
    times = 20 if quick else 200
    dice = np.random.default_rng(1)
    traffic = skewed(dice)
    watch = HotLayerWatch(SPEED, SHAPE)
    watch.of(traffic)
    all_of_it = milliseconds(lambda: hot_layers(skewed(dice), SPEED, SHAPE), times)
    placement = linear(layers=SHAPE.layers, experts=SHAPE.experts, ranks=RANKS)
    demand = dice.gamma(0.5, 1.0, (RANKS, SHAPE.layers, SHAPE.experts))
    terms = CostTerms(speed=SPEED, node=np.zeros(RANKS, np.intp), top_k=SHAPE.top_k, step_tokens=STEP_TOKENS)
    by_demand = milliseconds(
        lambda: hot_layers(expected_traffic(placement, demand, terms), SPEED, SHAPE), times
    )
    report = Report("layers worth sharding", ["94 layers, 8 ranks", "median ms"])
    report.add("expected reads, traffic and answer", all_of_it)
    report.add("expected traffic of a demand, and answer", by_demand)
    report.add("answer", milliseconds(lambda: hot_layers(traffic, SPEED, SHAPE), times))
    report.add("nothing changed", milliseconds(lambda: watch.of(traffic), times))
    found = hot_layers(traffic, SPEED, SHAPE)
    report.notes.append(f"{len(found)} of {SHAPE.layers} layers gain; the first: {found[0]}")
    report.targets.append(
        Target("everything", max(all_of_it, by_demand), MILLISECONDS, at_least=False, unit=" ms")
    )
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
