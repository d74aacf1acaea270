"""The simulated engine beside a plain simulation of one step after the other."""

from dataclasses import dataclass

import numpy as np
import pytest

from benchmarks.rig.layout_loads.engine import SimulatedEngine, Turn
from benchmarks.rig.layout_loads.engine_model import EngineModel
from benchmarks.rig.layout_loads.loads import Lengths, rollout
from fleet.layout_times import LayoutName
from migration.layouts.costs import KV_FILL, LayoutLimits, SwitchCost
from tests.benchmarks.layout_builders import FREE, engine_model, random_model, random_turns, straight


@dataclass
class Sequence:
    number: int
    arrived: float
    to_compute: int
    held: int
    left: int
    order: int = 0


def plain_ends(
    model: EngineModel, turns: list[Turn], layout: LayoutName, switches: dict[float, LayoutName]
) -> list[float]:
    """End of each turn, by one step after the other. switches: target by the time of the decision."""
    at, order = 0.0, 0
    coming = sorted((turn.at, number) for number, turn in enumerate(turns) if turn.after < 0)
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    ends: dict[int, float] = {}
    target: LayoutName | None = None
    turned = 0.0
    computing: Sequence | None = None
    decisions = sorted(switches.items())

    def reserved() -> int:
        return sum(one.held for one in running) + (computing.held if computing else 0)

    while len(ends) < len(turns):
        while decisions and decisions[0][0] <= at:
            wish = decisions.pop(0)[1]
            if target is None and wish != layout and model.limits[wish].holds(len(running), reserved()):
                target, turned = wish, at + model.switches[layout, wish].seconds(reserved())
        if target is not None and at >= turned:
            at += model.switches[layout, target].pause
            layout, target = target, None
            continue
        while coming and coming[0][0] <= at:
            when, number = coming.pop(0)
            turn = turns[number]
            waiting.append(Sequence(number, when, turn.prompt, turn.cached + turn.prompt, turn.output))
        limits = [model.limits[one] for one in (layout, target) if one is not None]
        most, room = min(one.max_running for one in limits), min(one.kv_tokens for one in limits)
        budget, joining = model.chunk, []
        while budget:
            if computing is None:
                if not waiting or len(running) + len(joining) >= most:
                    break
                if reserved() + sum(one.held for one in joining) + waiting[0].held > KV_FILL * room:
                    break
                computing = waiting.pop(0)
            share = min(budget, computing.to_compute)
            budget -= share
            computing.to_compute -= share
            if computing.to_compute == 0:
                joining.append(computing)
                computing = None
        tokens = model.chunk - budget
        held = reserved() + sum(one.held for one in joining)
        while len(running) > 1 and held + len(running) > room:
            last = max(running, key=lambda one: one.order)
            running.remove(last)
            waiting.insert(0, Sequence(last.number, last.arrived, last.held, last.held, last.left + 1))
            held -= last.held
        if not tokens and not running:
            at = min(
                [time for time, _ in coming[:1]]
                + [time for time, _ in decisions[:1]]
                + ([turned] if target else [])
            )
            continue
        times = model.times[layout]
        seconds = (
            times.decode[len(running)]
            + times.prefill_token * tokens
            + (times.kv_token * held if running else 0.0)
        )
        at += seconds * (1.0 + (model.switches[layout, target].slowdown if target else 0.0))
        for one in running:
            one.left -= 1
            one.held += 1
        for one in [one for one in running if one.left == 0]:
            running.remove(one)
            ends[one.number] = at
            coming += [
                (at + turn.at, number) for number, turn in enumerate(turns) if turn.after == one.number
            ]
            coming.sort()
        for one in joining:
            order += 1
            one.order, one.left = order, one.left - 1
            running.append(one)
    return [ends[number] for number in range(len(turns))]


def served(model: EngineModel, turns: list[Turn], switches: dict[float, LayoutName]) -> SimulatedEngine:
    engine = SimulatedEngine(model, turns, "ep")
    for at, target in sorted(switches.items()):
        engine.advance(at)
        engine.switch(target)
    engine.advance(1e9)
    return engine


@pytest.mark.parametrize("seed", range(40))
def test_jumps_over_steps_give_the_times_of_single_steps(seed: int) -> None:
    dice = np.random.default_rng(seed)
    model = random_model(dice)
    if seed % 3:
        turns = random_turns(dice, 3.0, 40)
    else:
        turns = rollout(dice, 20, Lengths(40, 60, 0.8), turns=3, tool_seconds=0.5)
        turns = [turn._replace(output=min(turn.output, 300), prompt=min(turn.prompt, 100)) for turn in turns]
        model = model._replace(limits=dict.fromkeys(model.limits, LayoutLimits(12, 4000)))
    switches = {
        float(at): model.layouts[int(dice.integers(len(model.layouts)))] for at in dice.uniform(0, 4, 5)
    }
    engine = served(model, turns, switches)
    ends = plain_ends(model, turns, "ep", switches)
    arrivals = [turn.at if turn.after < 0 else ends[turn.after] + turn.at for turn in turns]
    assert engine.done
    assert engine.last_end == pytest.approx(max(ends), rel=1e-9)
    assert engine.latency == pytest.approx(sum(ends) - sum(arrivals), rel=1e-9)
    assert len(engine.first_tokens) == len(turns)
    assert engine.kv == 0
    assert engine.waiting == engine.running == 0


def test_where_the_loads_stop_does_not_change_the_times() -> None:
    dice = np.random.default_rng(3)
    model, turns = random_model(dice), random_turns(dice, 3.0, 40)
    often = SimulatedEngine(model, turns, "ep")
    while not often.done:
        often.advance(often.at + 0.05)
    assert often.last_end == pytest.approx(served(model, turns, {}).last_end, rel=1e-9)


def test_a_copy_continues_on_its_own() -> None:
    dice = np.random.default_rng(4)
    engine = SimulatedEngine(random_model(dice), random_turns(dice, 3.0, 40), "ep")
    engine.advance(1.0)
    other = engine.copy()
    other.advance(1e9)
    assert (engine.done, other.done) == (False, True)
    engine.advance(1e9)
    assert (engine.last_end, engine.latency) == (other.last_end, other.latency)


def test_a_switch_slows_steps_pauses_and_then_serves_the_other_layout() -> None:
    cost = SwitchCost(weights_seconds=0.1, kv_token_seconds=0.0, pause=0.5, slowdown=1.0)
    model = engine_model(
        {"ep": straight(0.02, 0.0, prefill=1e-9), "tp": straight(0.01, 0.0, prefill=1e-9)}, cost
    )
    engine = SimulatedEngine(model, [Turn(0.0, 1, 11)], "ep")
    assert engine.switch("tp")
    assert not engine.switch("ep")  # one is under way
    engine.advance(1e9)
    # The prompt takes no time; three steps of 40 ms outlast the copies; seven steps follow in the new layout.
    assert engine.at == pytest.approx(3 * 0.04 + 0.5 + 7 * 0.01, abs=1e-6)
    assert engine.layout == "tp"


def test_a_layout_that_cannot_hold_what_runs_is_refused() -> None:
    times = {"ep": straight(0.02, 0.0), "tp": straight(0.01, 0.0)}
    roomy = LayoutLimits(64, 10_000)
    for few in (LayoutLimits(3, 10_000), LayoutLimits(64, 300)):
        model = engine_model(times, FREE, {"ep": roomy, "tp": few})
        engine = SimulatedEngine(model, [Turn(0.0, 100, 50)] * 4, "ep")
        engine.advance(0.1)
        assert engine.running == 4
        assert not engine.switch("tp")


def test_a_full_layout_makes_requests_wait() -> None:
    times = {"ep": straight(0.02, 0.0), "tp": straight(0.02, 0.0)}
    model = engine_model(times, FREE, {"ep": LayoutLimits(2, 10_000), "tp": LayoutLimits(64, 10_000)})
    engine = SimulatedEngine(model, [Turn(0.0, 10, 50)] * 5, "ep")
    engine.advance(0.1)
    assert (engine.running, engine.waiting, engine.waiting_tokens) == (2, 3, 30)
    engine.switch("tp")
    engine.advance(0.3)
    assert (engine.running, engine.waiting) == (5, 0)
