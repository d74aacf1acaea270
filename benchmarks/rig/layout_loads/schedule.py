"""Schedules of layouts, and their replay: the load and engine of a scenario, with decisions at slots."""

from collections.abc import Callable, Sequence
from math import inf, nextafter
from typing import NamedTuple

from benchmarks.rig.layout_loads.engine import SimulatedEngine, Turn
from benchmarks.rig.layout_loads.engine_model import EngineModel
from fleet.layout_times import LayoutName


class LayoutScenario(NamedTuple):
    """Load on an engine, and the objective."""

    name: str
    model: EngineModel
    turns: Sequence[Turn]
    start: LayoutName
    """layout that policies find at the start"""
    rollout: bool
    """objective: the makespan. False: the mean end-to-end latency"""
    report: float = 0.5
    """seconds between decision points: slot k is the end of the first step that ends at `k * report` or
    later. 0: every step is a decision point
    """

    def engine(self, layout: LayoutName) -> SimulatedEngine:
        """Return the engine before the load, in this layout."""
        return SimulatedEngine(self.model, self.turns, layout)

    def until(self, slot: int, engine: SimulatedEngine) -> float:
        """Return the time up to which the engine computes before it decides at this slot."""
        return slot * self.report if self.report else nextafter(engine.at, inf)

    def cost(self, engine: SimulatedEngine) -> float:
        """Return the objective, seconds, of an engine that is done. Before that: a lower bound of it."""
        if self.rollout:
            return engine.last_end if engine.done else engine.at
        return (engine.latency + engine.pending_latency()) / len(self.turns)


class Schedule(NamedTuple):
    """Layout at the start, and the switches that follow."""

    first: LayoutName
    switches: tuple[tuple[int, LayoutName], ...] = ()
    """slot and target, ascending. A switch that the engine refuses at its slot does not happen"""


class Played(NamedTuple):
    """A load that was served: objective in seconds, the switches that happened, and the engine at the end."""

    cost: float
    schedule: Schedule
    engine: SimulatedEngine


Decide = Callable[[SimulatedEngine], LayoutName | None]
"""Decision at a slot: the layout to switch to, or None."""


def play(scenario: LayoutScenario, decide: Decide, first: LayoutName | None = None) -> Played:
    """Serve the load with decisions at every slot, beginning in layout `first`, or else in the scenario's."""
    engine = scenario.engine(first or scenario.start)
    begun, switches, slot = engine.layout, [], 0
    while not engine.done:
        target = decide(engine)
        if target is not None and engine.switch(target):
            switches.append((slot, target))
        slot += 1
        engine.advance(scenario.until(slot, engine))
    return Played(scenario.cost(engine), Schedule(begun, tuple(switches)), engine)


def replay(scenario: LayoutScenario, schedule: Schedule) -> Played:
    """Serve the load by a schedule."""
    slot, planned = -1, dict(schedule.switches)

    def decide(engine: SimulatedEngine) -> LayoutName | None:
        nonlocal slot
        slot += 1
        return planned.get(slot)

    return play(scenario, decide, schedule.first)
