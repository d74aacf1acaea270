"""Coordinators of the handover models: what they make durable, decide, record and send. See `handover_model`
and `vote_model`.
"""

from collections.abc import Iterator
from typing import Any

from fleet.handover import CONDUCTING, CoordinatorEvent, CoordinatorState, next_state
from tests.handovers.exploration import Kind, Told
from tests.handovers.handover_world import (
    ABORT,
    ABORTED_BIT,
    COMMIT,
    COMMITTED_BIT,
    FLIPPED,
    GIVEN_UP,
    PROPOSE,
    STAGED,
    Rules,
    World,
    fact_of,
)

_COMMANDS = {
    CoordinatorState.PROPOSING: PROPOSE,
    CoordinatorState.COMMITTING: COMMIT,
    CoordinatorState.ABORTING: ABORT,
}


class Coordinators(Rules):
    """Steps of all coordinators, and the world that they share. handovers: how many they begin at most."""

    def __init__(self, handovers: int) -> None:
        self._handovers = handovers
        self.worlds: list[World] = []
        self._number_of_world: dict[World, int] = {}
        self.known: dict[tuple[object, ...], Any] = {}
        """cache: parts of the state are equal in most states"""

    def begun(self, world: World, epoch: int) -> tuple[Told, World]:
        handover = len(world.handovers) + 1
        begun = world._replace(handovers=(*world.handovers, (world.life, epoch)), decided=(*world.decided, 0))
        told = "a coordinator makes handover {} to epoch {} durable, and proposes it", (handover, epoch)
        return told, self._stored(
            begun, next_state(CONDUCTING, CoordinatorState.IDLE, CoordinatorEvent.BEGIN), handover
        )

    def coordinators_steps(self, world: World, said: int) -> Iterator[tuple[Kind, Told, World]]:
        """Yield steps of coordinators. said: the facts that all ranks have reported."""
        if world.left.leaders:
            left = world.left._replace(leaders=world.left.leaders - 1)
            told = (
                "coordinator {} takes over; the one before has crashed, or does not know it yet",
                (world.coordinators + 1,),
            )
            yield (
                Kind.FAULT,
                told,
                self._sending(
                    world._replace(coordinators=world.coordinators + 1, left=left), world.coordinators + 1
                ),
            )
        state, handover = world.key
        if state is not CoordinatorState.IDLE:
            yield from ((Kind.DUE, told, after) for told, after in self._next(world, said, state, handover))
        for earlier in range(1, len(world.handovers) + 1):
            if (state, handover) != (CoordinatorState.PROPOSING, earlier):
                yield from ((Kind.MAY, told, after) for told, after in self._belated(world, said, earlier))

    def _next(
        self, world: World, said: int, state: CoordinatorState, handover: int
    ) -> Iterator[tuple[Told, World]]:
        """Yield steps of a coordinator that knows the durable state."""
        gone = self.gone(world, handover)
        if (
            state is CoordinatorState.PROPOSING
            and said & fact_of(STAGED, handover)
            and not world.staged & 1 << handover
        ):
            yield self._recording(world, handover)
        if (
            state is CoordinatorState.COMMITTING
            and (said & fact_of(FLIPPED, handover) or gone)
            and world.placed < handover
        ):
            yield (
                ("a coordinator records the placement of handover {}", (handover,)),
                world._replace(placed=handover),
            )
        for cue in self._cues(world, said, state, handover, gone):
            after = next_state(CONDUCTING, state, cue)
            told = (
                "a coordinator, {} handover {}: {}; it makes durable: {}",
                (state.value, handover, cue.value, after.value),
            )
            yield told, self._stored(self._decided(world, handover, state, cue), after, handover)

    def _belated(self, world: World, said: int, handover: int) -> Iterator[tuple[Told, World]]:
        """Yield steps of a coordinator with outdated knowledge, for which this handover is still proposed."""
        if not said & fact_of(STAGED, handover):
            return
        if not world.staged & 1 << handover:
            (text, gaps), after = self._recording(world, handover)
            yield (text + ", late", gaps), after
        if self.decides_blindly:
            told = (
                "a coordinator that was asleep since handover {} was proposed decides to commit it",
                (handover,),
            )
            yield (
                told,
                self._stored(
                    self._decided(world, handover, CoordinatorState.PROPOSING, CoordinatorEvent.ALL_STAGED),
                    CoordinatorState.COMMITTING,
                    handover,
                ),
            )

    def _recording(self, world: World, handover: int) -> tuple[Told, World]:
        return ("a coordinator records that handover {} is staged", (handover,)), world._replace(
            staged=world.staged | 1 << handover
        )

    def _cues(
        self, world: World, said: int, state: CoordinatorState, handover: int, gone: bool
    ) -> Iterator[CoordinatorEvent]:
        recorded = (
            world.staged & 1 << handover if state is CoordinatorState.PROPOSING else world.placed >= handover
        )
        match state:
            case CoordinatorState.PROPOSING:
                if said & fact_of(STAGED, handover) and recorded:
                    yield CoordinatorEvent.ALL_STAGED
                yield CoordinatorEvent.FAILED
            case CoordinatorState.COMMITTING:
                if said & fact_of(FLIPPED, handover) and recorded:
                    yield CoordinatorEvent.ALL_SERVING
                if self.refused_by_all(said, handover) and not recorded:
                    yield CoordinatorEvent.ALL_REFUSED
            case CoordinatorState.ABORTING if self.silence_ends_aborts or said & fact_of(GIVEN_UP, handover):
                yield CoordinatorEvent.ALL_ABORTED
        if gone and (recorded or state is not CoordinatorState.COMMITTING):
            yield CoordinatorEvent.ENGINE_GONE

    def _decided(self, world: World, handover: int, state: CoordinatorState, cue: CoordinatorEvent) -> World:
        bit = 0
        if cue is CoordinatorEvent.ALL_STAGED:
            bit = COMMITTED_BIT
        elif state is CoordinatorState.PROPOSING or cue is CoordinatorEvent.ALL_REFUSED:
            bit = ABORTED_BIT
        decided = list(world.decided)
        decided[handover - 1] |= bit
        return world._replace(decided=tuple(decided))

    def _stored(self, world: World, state: CoordinatorState, handover: int) -> World:
        world = world._replace(key=(state, handover))
        for token in range(1, world.coordinators + 1):
            world = self._sending(world, token)
        return world

    def _sending(self, world: World, token: int) -> World:
        """Send the commands that follow from the durable state, and abort earlier handovers found open."""
        (state, handover), sent = world.key, world.sent
        if state is not CoordinatorState.IDLE:
            sent |= 1 << self._bit(_COMMANDS[state], token, handover)
        for over in range(1, (handover + (state is CoordinatorState.IDLE)) if self.clears_strays else 0):
            sent |= 1 << self._bit(ABORT, token, over)
        return world._replace(sent=sent)

    def _bit(self, kind: int, token: int, handover: int) -> int:
        return (token * (self._handovers + 1) + handover) * 3 + kind

    def _when(self, world: World, kind: int, token: int, handover: int) -> Kind:
        """Return DUE for the commands that the newest coordinator repeats until they are answered."""
        repeated = (_COMMANDS.get(world.key[0]), world.key[1]) == (kind, handover)
        stray = self.clears_strays and kind == ABORT
        return Kind.DUE if token == world.coordinators and (repeated or stray) else Kind.MAY

    def letters(self, number: int) -> list[tuple[Kind, int, int, int, int]]:
        """Yield commands that may be delivered: when, what, token, handover, epoch."""
        known = self.known.get(("letters", number))
        if known is None:
            world = self.worlds[number]
            newest = world.coordinators
            known = self.known["letters", number] = [
                (self._when(world, kind, token, handover), kind, token, handover, epoch)
                for handover, (_, epoch) in enumerate(world.handovers, 1)
                for token in range(1, newest + 1)
                for kind in (PROPOSE, COMMIT, ABORT)
                if world.sent >> self._bit(kind, token, handover) & 1
                and self.addressed(world, kind, handover)
            ]
        return known

    def world_number(self, world: World) -> int:
        number = self._number_of_world.get(world)
        if number is None:
            number = self._number_of_world[world] = len(self.worlds)
            self.worlds.append(world)
        return number
