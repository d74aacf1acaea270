"""A small explicit-state model checker: every state that can be reached, breadth first, so that a counterexample is as short as any.

A model says where it starts, what may happen next, and what must never be. What may happen is of three kinds, which matter for the question
whether everything ends: what must happen at last unless something else does (DUE), what may or may not happen (MAY), and faults (FAULT).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

State = TypeVar("State")
Told = tuple[str, tuple[object, ...]]
"""A sentence with its gaps, filled only when somebody reads it."""


class Kind(IntEnum):
    DUE = 0
    MAY = 1
    FAULT = 2


class Step(NamedTuple, Generic[State]):
    """One thing that may happen."""

    kind: Kind
    told: Told
    after: State


class Model(Protocol[State]):
    def start(self) -> State: ...

    def steps(self, state: State) -> Iterator[Step[State]]:
        """Everything that may happen, once each."""
        ...

    def wrong(self, state: State) -> str:
        """Which promise does not hold in a state; empty: all do."""
        ...

    def wrong_step(self, before: State, after: State) -> str:
        """Which promise does not hold from one state to the next; empty: all do."""
        ...

    def ended(self, state: State) -> bool:
        """Whether nothing needs to happen any more."""
        ...

    def canonical(self, state: State) -> State:
        """The one of all states that differ from this one only by names."""
        ...


class Broken(Exception):
    """A promise does not hold; the text is the promise and how it comes to that."""

    def __init__(self, promise: str, story: list[str]) -> None:
        super().__init__("\n".join([promise, *(f"{number:3}. {sentence}" for number, sentence in enumerate(story, 1))]))
        self.promise = promise
        self.story = story


class TooLarge(Exception):
    """There are more states than allowed."""


@dataclass(slots=True)
class Explored(Generic[State]):
    """What was found."""

    states: int = 0
    steps: int = 0
    ends: int = 0
    deepest: int = 0


def explore(model: Model[State], *, most: int) -> Explored[State]:
    """Walk through everything. Broken at the first promise that does not hold; that is one of the model's own, or one of these two:

    - Where nothing is due any more, everything has ended: so from every state an end is reached by what is due alone.
    - Nothing goes in circles: so every run ends, whatever happens in it.
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
                raise Broken("something is left open, and nothing that is due will ever end it", _story(model, order, parent, at))
            found.ends += 1
        successors.append(onward)
        at += 1
    found.states, found.deepest = len(order), max(depth)
    circle = _in_circles(successors)
    if circle is not None:
        raise Broken("it can go in circles for ever", _story(model, order, parent, circle))
    return found


def _in_circles(successors: list[list[int]]) -> int | None:
    """A state on a circle, or behind one; None: there is none (Kahn 1962)."""
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
    """How it came to a state, in one run with the same names throughout."""
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
