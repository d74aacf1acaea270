"""Search for the best schedule of layouts when the whole load is known: an upper bound of the optimum.

1. *Beam*: serve the load once, slot by slot, with a few states per layout; each state continues in its layout
and in every other. States of one slot are compared by the cost until now less the value of the work done.
2. *Local search* from the best of the beam's schedule, the static ones and those given: switches are moved,
removed, inserted in pairs, and turned to other layouts, as long as the objective improves. A changed schedule
is served from the slot of its first change on, and given up once it is worse for certain.

The answer is never worse than any schedule given. It is not proven optimal; the tests compare it with an
exhaustive search of short loads and with the dynamic programme of rollouts.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from benchmarks.rig.layout_loads.engine import SimulatedEngine
from benchmarks.rig.layout_loads.schedule import LayoutScenario, Schedule
from fleet.layout_times import LayoutName


class Found(NamedTuple):
    """Best schedule found."""

    cost: float
    """seconds: the objective"""
    schedule: Schedule
    served: int
    """schedules served, in whole or in part"""


def clairvoyant(
    scenario: LayoutScenario, given: Iterable[Schedule] = (), width: int = 3, most: int = 600
) -> Found:
    """Return the best schedule found. width: states of the beam per layout. most: schedules that local search
    tries."""
    starts = [*given, *(Schedule(layout) for layout in scenario.model.layouts)]
    beam = beam_schedule(scenario, width)
    if beam is not None:
        starts.append(beam)
    search = _LocalSearch(scenario, most)
    for schedule in starts:
        search.try_start(schedule)
    return search.improved()


# Beam


class _Branch(NamedTuple):
    """State of the beam."""

    engine: SimulatedEngine
    schedule: Schedule


def beam_schedule(scenario: LayoutScenario, width: int) -> Schedule | None:
    """Return the best schedule of a beam search; None if the scenario has one layout."""
    layouts = scenario.model.layouts
    branches = [_Branch(scenario.engine(layout), Schedule(layout)) for layout in layouts]
    if len(layouts) < 2:
        return None
    best, found, slot = inf, None, 0
    while branches:
        grown = []
        for engine, (first, switches) in branches:
            for target in layouts:
                other = engine.copy()
                if other.switch(target):
                    grown.append(_Branch(other, Schedule(first, (*switches, (slot, target)))))
            grown.append(_Branch(engine, Schedule(first, switches)))
        slot += 1
        going = []
        for branch in grown:
            branch.engine.advance(scenario.until(slot, branch.engine))
            cost = scenario.cost(branch.engine)
            if branch.engine.done and cost < best:
                best, found = cost, branch.schedule
            elif not branch.engine.done:
                going.append(branch)
        branches = _kept(scenario, [one for one in going if scenario.cost(one.engine) < best], width)
    return found


def _kept(scenario: LayoutScenario, branches: Sequence[_Branch], width: int) -> list[_Branch]:
    """Return the `width` best states of every layout and switch under way."""
    if not branches:
        return []
    model = scenario.model
    inside = max(1.0, sum(one.engine.running + one.engine.waiting for one in branches) / len(branches))
    batch = max(1.0, sum(one.engine.running for one in branches) / len(branches))
    context = sum(one.engine.kv for one in branches) / (len(branches) * batch)
    token = min(times.seconds(batch, context) for times in model.times.values()) / batch
    prompt = min(times.prefill_token for times in model.times.values())

    def rank(one: _Branch) -> float:
        engine = one.engine
        work = token * engine.emitted + prompt * engine.prefilled
        if scenario.rollout:
            return engine.at - work
        return engine.latency + engine.pending_latency() - inside * work

    groups: dict[tuple[LayoutName, LayoutName | None], list[_Branch]] = {}
    for one in sorted(branches, key=rank):
        group = groups.setdefault((one.engine.layout, one.engine.target), [])
        if len(group) < width:
            group.append(one)
    return [one for group in groups.values() for one in group]


# Local search


class _LocalSearch:
    """Best schedule until now, with the states of the engine on its way."""

    def __init__(self, scenario: LayoutScenario, most: int) -> None:
        self._scenario = scenario
        self._left = most
        self._served = 0
        self._best = Found(inf, Schedule(scenario.start), 0)
        self._states: list[tuple[int, SimulatedEngine]] = []
        self._slots = 0

    def try_start(self, schedule: Schedule) -> None:
        """Serve a whole schedule and keep it if it is the best."""
        self._try(schedule, 0)

    def improved(self) -> Found:
        """Improve the best schedule until no neighbour is better, or all tries are used."""
        states_of = None
        while self._left > 0:
            if states_of != self._best.schedule:
                self._remember_states()
                states_of = self._best.schedule
            base = self._best.schedule
            if not any(self._better(base, other) for other in neighbours(self._scenario, base, self._slots)):
                break
        return self._best._replace(served=self._served)

    def _better(self, base: Schedule, other: Schedule) -> bool:
        """Try a neighbour of the best schedule; True ends the round: it is better, or no try is left."""
        if self._left <= 0:
            return True
        self._left -= 1
        return self._try(other, _first_change(base, other))

    def _remember_states(self) -> None:
        """Keep the engine's state at every eighth slot of the best schedule, and count its slots."""
        self._states = []
        self._slots = self._serve(self._best.schedule, 0, keep=True)[1]

    def _try(self, schedule: Schedule, change: int) -> bool:
        """Serve a schedule that equals the best one before the slot `change`; True: it is better."""
        self._served += 1
        cost, _, happened = self._serve(schedule, change)
        if cost >= self._best.cost:
            return False
        self._best = Found(cost, happened, 0)
        return True

    def _serve(self, schedule: Schedule, change: int, keep: bool = False) -> tuple[float, int, Schedule]:
        """Return objective, slots and the schedule as it happened; infinity once it is worse than the best.
        keep: remember states, and serve to the end."""
        scenario, planned = self._scenario, dict(schedule.switches)
        slot, engine = 0, scenario.engine(schedule.first)
        if change:
            slot, state = max((one for one in self._states if one[0] <= change), key=lambda one: one[0])
            engine = state.copy()
        happened = [one for one in schedule.switches if one[0] < slot]
        while not engine.done:
            if keep and slot % 8 == 0:
                self._states.append((slot, engine.copy()))
            target = planned.get(slot)
            if target is not None and engine.switch(target):
                happened.append((slot, target))
            slot += 1
            engine.advance(scenario.until(slot, engine))
            if not keep and scenario.cost(engine) >= self._best.cost:
                return inf, slot, schedule
        return scenario.cost(engine), slot, Schedule(schedule.first, tuple(happened))


def _first_change(one: Schedule, other: Schedule) -> int:
    """Return the first slot at which the schedules differ; 0 if their first layouts do."""
    if one.first != other.first:
        return 0
    return min((slot for slot, _ in set(one.switches) ^ set(other.switches)), default=0)


ALL_INTERVALS = 24
"""Slots up to which every interval is tried with every layout."""
SHIFTS = (1, 2, 4, 8, 16, 32)


def neighbours(scenario: LayoutScenario, base: Schedule, slots: int) -> Iterator[Schedule]:
    """Yield changed schedules, the most promising kinds first. slots: of the schedule when it was served."""
    layouts = scenario.model.layouts
    switches = base.switches
    for at, (slot, target) in enumerate(switches):
        rest = (*switches[:at], *switches[at + 1 :])
        for shift in SHIFTS:
            for moved in (slot - shift, slot + shift):
                if moved >= 0:
                    yield _ordered(base.first, (*rest, (moved, target)))
        yield Schedule(base.first, rest)
        yield Schedule(base.first, (*switches[:at], *switches[at + 2 :]))
        for layout in layouts:
            if layout != target:
                yield Schedule(base.first, (*switches[:at], (slot, layout), *switches[at + 1 :]))
    for layout in layouts:
        if layout != base.first:
            yield Schedule(layout, switches)
            yield Schedule(layout, switches[1:])
    for begin, end in _intervals(slots):
        for layout in layouts:
            yield with_interval(base, begin, end, layout)


def _intervals(slots: int) -> Iterator[tuple[int, int]]:
    """Yield slots between which another layout is tried: all of a short load, of a long one a sample."""
    if slots <= ALL_INTERVALS:
        yield from ((begin, end) for begin in range(slots) for end in range(begin + 1, slots + 1))
        return
    for parts in (4, 12, 24):
        length = max(2, slots // parts)
        for begin in range(0, slots, length):
            yield begin, begin + length
            if parts == 24:
                yield 0, begin + length
                yield begin, slots


def with_interval(base: Schedule, begin: int, end: int, layout: LayoutName) -> Schedule:
    """Return the schedule with this layout from slot `begin` to slot `end`, and its own again after that."""
    after = base.first
    for slot, target in base.switches:
        if slot <= end:
            after = target
    inside = ((begin, layout), (end, after))
    outside = tuple(one for one in base.switches if not begin <= one[0] <= end)
    return _ordered(base.first if begin else layout, (*outside, *inside))


def _ordered(first: LayoutName, switches: Sequence[tuple[int, LayoutName]]) -> Schedule:
    """Return a schedule with one switch per slot, the later one given, and none to the layout in force."""
    found, now = [], first
    for slot, target in sorted(dict(switches).items()):
        if target != now:
            found.append((slot, target))
            now = target
    return Schedule(first, tuple(found))
