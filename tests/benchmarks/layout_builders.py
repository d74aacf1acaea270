"""Small engines and loads for the tests of layout policies."""

import numpy as np

from benchmarks.rig.layout_loads.engine import Turn
from benchmarks.rig.layout_loads.engine_model import EngineModel, StepTimes
from benchmarks.rig.layout_loads.schedule import LayoutScenario
from fleet.layout_times import LayoutName
from migration.layouts.costs import LayoutLimits, SwitchCost

FREE = SwitchCost(weights_seconds=0.0, kv_token_seconds=0.0, pause=0.0, slowdown=0.0)
ROOMY = LayoutLimits(max_running=64, kv_tokens=1_000_000)


def straight(
    first: float, each: float, kv_token: float = 0.0, prefill: float = 1e-5, most: int = 64
) -> StepTimes:
    """Step times that grow by the same with every sequence."""
    return StepTimes([0.0, *(first + each * number for number in range(1, most + 1))], kv_token, prefill)


def engine_model(
    times: dict[LayoutName, StepTimes],
    cost: SwitchCost = FREE,
    limits: dict[LayoutName, LayoutLimits] | None = None,
    chunk: int = 512,
) -> EngineModel:
    switches = {(one, other): cost for one in times for other in times if one != other}
    return EngineModel(times, limits or dict.fromkeys(times, ROOMY), switches, chunk)


def random_model(dice: np.random.Generator, limited: bool = True) -> EngineModel:
    """Two or three layouts that cross at about 8 sequences, with limits or without."""
    names: list[LayoutName] = ["ep", "tp", "experts-tp"][: int(dice.integers(2, 4))]  # type: ignore[assignment]
    times = {"ep": straight(0.020, dice.uniform(2e-4, 6e-4), 1e-8)}
    for name in names[1:]:
        times[name] = straight(
            dice.uniform(0.008, 0.016), dice.uniform(8e-4, 2e-3), 1e-8, dice.uniform(1e-5, 3e-5)
        )
    limits = {
        name: LayoutLimits(int(dice.choice([6, 64])), int(dice.choice([2500, 50_000]))) for name in names
    }
    cost = SwitchCost(
        dice.uniform(0.005, 0.4), dice.uniform(0, 1e-5), dice.uniform(0.005, 0.05), dice.uniform(0, 0.5)
    )
    return engine_model(times, cost, limits if limited else None)  # type: ignore[arg-type]


def random_turns(dice: np.random.Generator, seconds: float, count: int) -> list[Turn]:
    """Requests of which half arrive at once, in a burst."""
    times = np.sort(np.where(dice.random(count) < 0.5, dice.uniform(0, seconds, count), 0.3 * seconds))
    return [Turn(float(at), int(dice.integers(5, 200)), int(dice.integers(2, 150))) for at in times]


def random_scenario(seed: int, slots: int) -> LayoutScenario:
    """Short load with about that many decision points."""
    dice = np.random.default_rng(seed)
    model, rollout = random_model(dice), bool(dice.random() < 0.3)
    turns = random_turns(dice, 0.0 if rollout else 4.0, int(dice.integers(8, 40)))
    scenario = LayoutScenario(f"random {seed}", model, turns, "ep", rollout)
    last = 0.0
    for layout in model.layouts:
        engine = scenario.engine(layout)
        engine.advance(1e9)
        last = max(last, engine.last_end)
    return scenario._replace(report=last / slots)
