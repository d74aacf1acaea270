"""A small explicit-state model checker: breadth-first search over all reachable states, so that
counterexamples are shortest.

A model defines its start, its possible steps and its invariants. Steps are of three kinds, which matter for
termination: steps that must happen eventually unless another one does (DUE), optional steps (MAY), and faults
(FAULT).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

State = TypeVar("State")
Told = tuple[str, tuple[object, ...]]
"""A sentence with placeholders, formatted only when it is read."""


class Kind(IntEnum):
    DUE = 0
    MAY = 1
    FAULT = 2


class Step(NamedTuple, Generic[State]):
    """One possible step."""

    kind: Kind
    told: Told
    after: State


class Model(Protocol[State]):
    def start(self) -> State: ...

    def steps(self, state: State) -> Iterator[Step[State]]:
        """Return all possible steps, once each."""
        ...

    def wrong(self, state: State) -> str:
        """Return the invariant that a state violates; empty: none."""
        ...

    def wrong_step(self, before: State, after: State) -> str:
        """Return the invariant that a transition violates; empty: none."""
        ...

    def ended(self, state: State) -> bool:
        """Return True if nothing has to happen any more."""
        ...

    def canonical(self, state: State) -> State:
        """Return the representative of all states that differ from this one only by names."""
        ...


class Broken(Exception):
    """An invariant is violated. The text gives the invariant and the counterexample."""

    def __init__(self, promise: str, story: list[str]) -> None:
        super().__init__(
            "\n".join([promise, *(f"{number:3}. {sentence}" for number, sentence in enumerate(story, 1))])
        )
        self.promise = promise
        self.story = story


class TooLarge(Exception):
    """There are more states than allowed."""


@dataclass(slots=True)
class Explored(Generic[State]):
    """Result of an exploration."""

    states: int = 0
    steps: int = 0
    ends: int = 0
    deepest: int = 0


def explore(model: Model[State], *, most: int) -> Explored[State]:
    """Explore all states. Broken at the first violated invariant: one of the model's own, or one of these
    two:

    - If no step is due any more, everything has ended: so an end is reachable from every state by due steps
      alone.
    - There is no cycle: so every run ends, whatever happens in it.
    """
    first = model.canonical(model.start())
    number = {first: 0}
    parent, depth = [-1], [0]
    order = [first]
    successors: list[list[int]] = []
    found: Explored[State] = Explored()
    at = 0
    while at < len(order):
        state = order[at]
        due = False
        onward: list[int] = []
        for step in model.steps(state):
            found.steps += 1
            due = due or step.kind is Kind.DUE
            promise = model.wrong_step(state, step.after)
            if promise:
                raise Broken(promise, [*_story(model, order, parent, at), _sentence(step.told)])
            after = model.canonical(step.after)
            index = number.get(after)
            if index is None:
                index = number[after] = len(order)
                if index >= most:
                    raise TooLarge(f"more than {most} states: allow fewer faults")
                order.append(after)
                parent.append(at)
                depth.append(depth[at] + 1)
                promise = model.wrong(after)
                if promise:
                    raise Broken(promise, _story(model, order, parent, index))
            onward.append(index)
        if not due:
            if not model.ended(state):
                raise Broken(
                    "something is left open, and nothing that is due will ever end it",
                    _story(model, order, parent, at),
                )
            found.ends += 1
        successors.append(onward)
        at += 1
    found.states, found.deepest = len(order), max(depth)
    circle = _in_circles(successors)
    if circle is not None:
        raise Broken("it can go in circles for ever", _story(model, order, parent, circle))
    return found


def _in_circles(successors: list[list[int]]) -> int | None:
    """Return a state on a cycle, or behind one; None: there is none (Kahn 1962)."""
    waiting = [0] * len(successors)
    for onward in successors:
        for index in onward:
            waiting[index] += 1
    free = [index for index, count in enumerate(waiting) if count == 0]
    left = len(successors)
    while free:
        left -= 1
        for index in successors[free.pop()]:
            waiting[index] -= 1
            if waiting[index] == 0:
                free.append(index)
    return next((index for index, count in enumerate(waiting) if count), None) if left else None


def _story(model: Model[State], order: list[State], parent: list[int], at: int) -> list[str]:
    """Return the path to a state as one run, with the same names throughout."""
    path = []
    while at > 0:
        path.append(order[at])
        at = parent[at]
    state = model.start()
    story = []
    for wanted in reversed(path):
        step = next(step for step in model.steps(state) if model.canonical(step.after) == wanted)
        story.append(_sentence(step.told))
        state = step.after
    return story


def _sentence(told: Told) -> str:
    text, gaps = told
    return text.format(*gaps)
