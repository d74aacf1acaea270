"""All parties of a handover in an engine that moves its experts itself, as a model for
`exploration.explore`. Rules and tables are those of `fleet.handover`; the world around them is defined here.

The world: coordinators, store and commands are those of `handover_model`. The rest is modelled as follows.

- *Workers.* Each holds at most one map, and knows the highest number that it held, dropped or carried out.
- *The agent* is one process for all ranks. All that it knows of a worker is the last status that it heard,
  which may be arbitrarily old, but never older than an earlier one. It dies alone, and its successor begins
  with nothing.
- *Messages* from agent to workers are in a set that only grows, and may be received at any time, many times
  or never. Those of a dead agent may still arrive, but need not.
- *Votes.* All ballots are cast, gathered and carried out in one step of the engine. A few votes take place
  piece by piece: each worker casts its ballot and learns the result at its own time. Between the two it
  handles no message. Votes that fail change nothing, and need no steps here.
- *Deaths.* When one worker dies the whole engine does. It restarts as a new incarnation with its first map.

Ranks are interchangeable: states that differ only by their order are one state.
"""

from collections.abc import Iterator
from typing import NamedTuple

from fleet.handover import (
    Ballot,
    CommandVerdict,
    CoordinatorState,
    ProtocolState,
    RankState,
    aborted,
    committed,
    flipped,
    passes,
    proposed,
    refused,
    staged,
    with_token,
)
from tests.handovers.exploration import Kind, Step, Told
from tests.handovers.handover_coordinators import Coordinators
from tests.handovers.handover_world import (
    ABORTED_BIT,
    COMMIT,
    COMMITTED_BIT,
    FLIPPED,
    GIVEN_UP,
    NAMES,
    PROPOSE,
    STAGED,
    Faults,
    State,
    World,
    fact_of,
)

STAGE, PERMIT, DROP = range(3)
MESSAGES = ("the map", "the permission", "the request to drop the map")
NONE, HOLDS, VOTES = range(3)


class VoteSize(NamedTuple):
    ranks: int
    handovers: int
    faults: Faults


class Worker(NamedTuple):
    """One worker process."""

    hold: int = NONE
    handover: int = 0
    """of the map that is held, was dropped or was carried out last: the highest number it knows"""
    made: int = 0
    """handover that brought the map in force; 0: the first map of this life"""
    ballot: int = -1
    """cast in a vote that takes place piece by piece; -1: none"""
    told: bool = False
    """True: it knows the result of that vote"""


class Expert(NamedTuple):
    """One expert rank: its worker, and what the agent knows of it."""

    worker: Worker | None
    """None: dead"""
    heard: Worker | None = None
    """last status that the agent heard; None: none yet"""
    state: ProtocolState | None = None
    """as the agent describes it; None: it has heard nothing yet"""
    aborting: bool = False
    """the agent has passed on an abort of the open handover"""
    sent: int = 0
    """bits: messages of the present agent"""
    late: int = 0
    """bits: messages of agents before"""
    said: int = 0
    """bits: which fact of which handover"""


class Engine(NamedTuple):
    """The engine as a whole."""

    agent: bool = True
    bases: tuple[int, ...] = (0,)
    """epoch of the first map of each life"""
    forced: int = 0
    """bits: handovers whose map came into force"""


class Votes(Coordinators):
    """The model."""

    hears_refusals = True
    """False: the agent does not tell the others when one worker has dropped the map"""
    ignores_past = True
    """True: messages that a worker ignores because of their number need not be kept"""

    def __init__(self, size: VoteSize) -> None:
        super().__init__(size.handovers)
        self.size = size
        self._engines: list[Engine] = []
        self._number_of_engine: dict[Engine, int] = {}
        self._experts: list[Expert] = []
        self._number_of_expert: dict[Expert, int] = {}

    # --- rules that may be broken ---

    def takes(self, worker: Worker, message: int, handover: int) -> Worker:
        """Return a worker after a message of the agent."""
        if message == STAGE and handover > worker.handover and worker.hold != VOTES:
            return worker._replace(hold=HOLDS, handover=handover)
        if message == PERMIT and handover == worker.handover and worker.hold == HOLDS:
            return worker._replace(hold=VOTES)
        if message == DROP and handover == worker.handover:
            return worker._replace(hold=NONE)
        if message == DROP and handover > worker.handover and worker.hold == NONE:
            return worker._replace(handover=handover)
        return worker

    def hears(self, worker: Worker) -> bool:
        """Return True if a worker handles messages now: not between its ballot and the result."""
        return worker.ballot < 0 or worker.told

    def moves_alone(self, worker: Worker) -> bool:
        """Return True if a worker carries out its map without a vote."""
        return False

    def concludes(self, state: ProtocolState, token: int, handover: int) -> ProtocolState:
        """Return what the agent says when it has passed on an abort: nothing new before the worker has."""
        return state

    def base(self, world: World, engine: Engine) -> int:
        """Return the epoch under which a restarted engine joins."""
        state, number = world.key
        known = [engine.bases[-1]]
        if world.placed:
            known.append(world.handovers[world.placed - 1][1])
        if state is not CoordinatorState.IDLE:
            known.append(world.handovers[number - 1][1])
        return max(known) + 1

    def ballot(self, worker: Worker) -> int:
        return worker.handover if worker.hold == VOTES else 0

    # --- the model's interface ---

    def start(self) -> State:
        world = World((CoordinatorState.IDLE, 0), (), 1, 0, 0, 0, (), 1, self.size.faults)
        expert = Expert(Worker(), Worker(), ProtocolState(RankState.SERVING, 0))
        return (
            self.world_number(world),
            self._engine(Engine()),
            *[self._expert(expert)] * self.size.ranks,
        )

    def canonical(self, state: State) -> State:
        world, engine, *experts = state
        return (world, engine, *sorted(experts))

    def ended(self, state: State) -> bool:
        world, engine, experts = self._parts(state)
        return (
            world.key[0] is CoordinatorState.IDLE
            and engine.agent
            and all(
                one.worker is not None
                and one.worker == one.heard
                and one.worker.hold == NONE
                and one.worker.ballot < 0
                and one.state is not None
                and one.state.state is RankState.SERVING
                for one in experts
            )
        )

    def steps(self, state: State) -> Iterator[Step[State]]:
        world, engine, experts = self._parts(state)
        yield from self._conducted(state, world, experts)
        for at, one in enumerate(experts):
            if one.worker is not None:
                if engine.agent:
                    yield from self._commanded(state, at, experts)
                    yield from self._agent_alone(state, at, experts)
                yield from self._worker_alone(state, at, experts, world)
        yield from self._voting(state, world, engine, experts)
        yield from self._dying(state, world, engine, experts)

    # --- coordinators and commands ---

    def _conducted(self, state: State, world: World, experts: list[Expert]) -> Iterator[Step[State]]:
        said = experts[0].said
        for one in experts[1:]:
            said &= one.said
        key = ("conducted", state[0], said)
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = [
                (kind, told, self.world_number(after))
                for kind, told, after in self.coordinators_steps(world, said)
            ]
        for kind, told, after in known:
            yield Step(kind, told, (after, *state[1:]))
        free = world.key[0] is CoordinatorState.IDLE and len(world.handovers) < self.size.handovers
        # A survey of all ranks precedes; the engine may have died since.
        served = experts[0].state
        if free and served is not None:
            told, begun = self.begun(world, served.served + 1)
            yield Step(Kind.MAY, told, (self.world_number(begun), *state[1:]))

    def _commanded(self, state: State, at: int, experts: list[Expert]) -> Iterator[Step[State]]:
        one = experts[at]
        if one.state is None:
            return
        for due, kind, token, handover, epoch in self.letters(state[0]):
            after = self._obeyed(at, experts, kind, token, handover, epoch)
            if self._expert(after) != state[2 + at]:
                told = (
                    "rank {} hears {} of handover {} from coordinator {}",
                    (at, NAMES[kind], handover, token),
                )
                yield Step(due, told, self._with(state, at, after))

    def _obeyed(
        self, at: int, experts: list[Expert], kind: int, token: int, handover: int, epoch: int
    ) -> Expert:
        one = experts[at]
        assert one.state is not None
        verdict = self.heed(one.state, kind, token, handover, epoch)
        one = one._replace(state=with_token(one.state, token))
        assert one.state is not None
        if verdict is not CommandVerdict.TAKE:
            return one
        if kind == PROPOSE:
            return self._sending_to(one._replace(state=proposed(one.state, token, handover)), STAGE, handover)
        if kind == COMMIT:
            hopeless = self.hears_refusals and self._hopeless(experts, handover)
            return self._sending_to(one, DROP if hopeless else PERMIT, handover)
        one = self._sending_to(
            one._replace(aborting=one.aborting or one.state.handover == handover), DROP, handover
        )
        assert one.state is not None
        return self._followed(one._replace(state=self.concludes(one.state, token, handover)))

    def _sending_to(self, one: Expert, message: int, handover: int) -> Expert:
        return one._replace(sent=one.sent | 1 << (3 * handover + message))

    def _hopeless(self, experts: list[Expert], handover: int) -> bool:
        """Return True if a worker is known to have dropped the map, so that no vote passes any more."""
        return any(
            one.heard is not None
            and one.heard.handover >= handover
            and one.heard.made < handover
            and not (one.heard.hold and one.heard.handover == handover)
            for one in experts
        )

    # --- the agent ---

    def _agent_alone(self, state: State, at: int, experts: list[Expert]) -> Iterator[Step[State]]:
        one = experts[at]
        assert one.worker is not None
        if one.worker != one.heard:
            # A vote that is not over yet is none of the agent's business.
            now = one.worker._replace(ballot=-1, told=False)
            if now != one.heard:
                told: Told = ("the agent hears from worker {}", (at,))
                after = self._followed(one._replace(heard=now), self._epoch(state, now.made))
                yield Step(Kind.DUE, told, self._with(state, at, after))
        if one.state is None:
            return
        if one.state.state is RankState.STAGING:
            late = one._replace(state=staged(one.state, failed=True))
            yield Step(Kind.MAY, ("rank {} has not staged in time", (at,)), self._with(state, at, late))
        number = one.state.handover
        if (
            one.state.state is RankState.READY
            and self.hears_refusals
            and self._hopeless(experts, number)
            and not one.sent >> (3 * number + DROP) & 1
        ):
            yield Step(
                Kind.DUE,
                ("the agent asks worker {} to drop the map, because another has", (at,)),
                self._with(state, at, self._sending_to(one, DROP, number)),
            )

    def _epoch(self, state: State, made: int) -> int:
        """Return the epoch of a map of this life. Workers keep it."""
        world = self.worlds[state[0]]
        return world.handovers[made - 1][1] if made else self._engines[state[1]].bases[-1]

    def _followed(self, one: Expert, epoch: int = -1) -> Expert:
        """Return a rank as the agent describes it, after a status of its worker. epoch: that of its map."""
        heard = one.heard
        assert heard is not None
        if one.state is None:
            return self._saying(one._replace(state=self._recovered(heard, epoch)))
        state, number = one.state, one.state.handover
        if number and heard.hold and heard.handover == number:
            if state.state is RankState.STAGING:
                state = staged(state)
            if heard.hold == VOTES and state.state is RankState.STAGED:
                state = committed(state, state.token)
        elif number and heard.handover >= number:
            state = self._over(state, heard, aborting=one.aborting)
        over = heard.handover - 1 if heard.hold else heard.handover
        state = state._replace(concluded=max(state.concluded, over, heard.made))
        aborting = one.aborting and state.handover == number != 0
        return self._saying(one._replace(state=state, aborting=aborting))

    def _over(self, state: ProtocolState, heard: Worker, *, aborting: bool) -> ProtocolState:
        """Return the state of a rank whose worker does not hold the map of its open handover any more."""
        if heard.made == state.handover:
            if state.state is RankState.STAGING:
                state = staged(state)
            if state.state is RankState.STAGED:
                state = committed(state, state.token)
            return flipped(state)
        if aborting and state.state in (RankState.STAGING, RankState.FAILED):
            return aborted(state, state.token, state.handover)
        if state.state is RankState.STAGING:
            return staged(state, failed=True)
        return state if state.state is RankState.FAILED else refused(state)

    def _recovered(self, heard: Worker, epoch: int) -> ProtocolState:
        """Return what a new agent knows of a rank."""
        state = {NONE: RankState.SERVING, HOLDS: RankState.STAGED, VOTES: RankState.READY}[heard.hold]
        number = heard.handover if heard.hold else 0
        concluded = heard.handover - 1 if heard.hold else heard.handover
        return ProtocolState(state, epoch, 0, number, concluded, heard.made)

    def _saying(self, one: Expert) -> Expert:
        """Add the facts that the agent's description of a rank contains."""
        state, said = one.state, one.said
        assert state is not None
        if state.state is RankState.STAGED:
            said |= fact_of(STAGED, state.handover)
        if state.flipped:
            said |= fact_of(FLIPPED, state.flipped)
        for number in range(1, state.concluded + 1):
            if number != state.handover and not said & fact_of(FLIPPED, number):
                said |= fact_of(GIVEN_UP, number)
        return one._replace(said=said)

    # --- workers ---

    def _when_sent(
        self, one: Expert, message: int, handover: int, world: World, experts: list[Expert]
    ) -> Kind:
        """Return DUE for the messages that the agent repeats: a proposal by itself, the others with the
        coordinator's commands, and a request to drop a map that another worker has dropped by itself."""
        if one.state is None or not one.sent >> (3 * handover + message) & 1:
            return Kind.MAY
        mine = one.state.handover == handover
        hopeless = self.hears_refusals and self._hopeless(experts, handover)
        decided = world.key == (CoordinatorState.COMMITTING, handover)
        votes = mine and one.state.state is RankState.READY
        last = world.key[1] + (world.key[0] is CoordinatorState.IDLE)
        aborts = world.key == (CoordinatorState.ABORTING, handover) or (
            self.clears_strays and handover < last
        )
        repeated = {
            STAGE: mine and one.state.state is RankState.STAGING and not one.aborting,
            PERMIT: decided and not hopeless,
            DROP: aborts or (hopeless and (decided or votes)),
        }[message]
        return Kind.DUE if repeated else Kind.MAY

    def _worker_alone(
        self, state: State, at: int, experts: list[Expert], world: World
    ) -> Iterator[Step[State]]:
        one = experts[at]
        worker = one.worker
        assert worker is not None
        if self.moves_alone(worker):
            after = worker._replace(hold=NONE, made=worker.handover)
            told: Told = ("worker {} carries out its map", (at,))
            yield Step(Kind.DUE, told, self._forced(state, {at: one._replace(worker=after)}, worker.handover))
        if not self.hears(worker):
            return
        for bit in range(3, 3 * (len(world.handovers) + 1)):
            if (one.sent | one.late) >> bit & 1:
                handover, message = divmod(bit, 3)
                after = self.takes(worker, message, handover)
                if after != worker:
                    told = ("worker {} receives {} of handover {}", (at, MESSAGES[message], handover))
                    yield Step(
                        self._when_sent(one, message, handover, world, experts),
                        told,
                        self._with(state, at, one._replace(worker=after)),
                    )
        if worker.hold and world.left.drops:
            left = self.world_number(world._replace(left=world.left._replace(drops=world.left.drops - 1)))
            after = one._replace(worker=worker._replace(hold=NONE))
            told = ("worker {} drops its map on its own", (at,))
            yield Step(Kind.FAULT, told, (left, *self._with(state, at, after)[1:]))

    # --- votes ---

    def _voting(
        self, state: State, world: World, engine: Engine, experts: list[Expert]
    ) -> Iterator[Step[State]]:
        workers = [one.worker for one in experts if one.worker is not None]
        if len(workers) < len(experts):
            return
        cast = [worker.ballot >= 0 for worker in workers]
        if not any(cast):
            ballots = [self.ballot(worker) for worker in workers]
            if self._passes(workers, ballots):
                after = {at: self._carried_out(one, ballots[at]) for at, one in enumerate(experts)}
                told: Told = ("all workers vote for handover {}, and carry it out", (ballots[0],))
                yield Step(Kind.DUE, told, self._forced(state, after, ballots[0]))
            if world.left.votes and any(ballots):
                less = world._replace(left=world.left._replace(votes=world.left.votes - 1))
                yield from self._casting((self.world_number(less), *state[1:]), Kind.FAULT, experts)
        elif not all(cast):
            yield from self._casting(state, Kind.DUE, experts)
        else:
            yield from self._learning(state, experts, workers)

    def _passes(self, workers: list[Worker], ballots: list[int]) -> bool:
        return passes(
            [
                Ballot(number, str(number), str(worker.made))
                for worker, number in zip(workers, ballots, strict=True)
            ]
        )

    def _casting(self, state: State, kind: Kind, experts: list[Expert]) -> Iterator[Step[State]]:
        for at, one in enumerate(experts):
            if one.worker is not None and one.worker.ballot < 0:
                after = one._replace(worker=one.worker._replace(ballot=self.ballot(one.worker)))
                yield Step(kind, ("worker {} casts its ballot", (at,)), self._with(state, at, after))

    def _learning(self, state: State, experts: list[Expert], workers: list[Worker]) -> Iterator[Step[State]]:
        ballots = [worker.ballot for worker in workers]
        # A worker that knows the result has another map in force; what it voted under is that of the others.
        before = [worker for worker in workers if not worker.told]
        passed = len(set(ballots)) == 1 and ballots[0] > 0 and len({one.made for one in before}) == 1
        for at, one in enumerate(experts):
            worker = one.worker
            if worker is None or worker.told:
                continue
            after = worker._replace(told=True)
            if passed and worker.hold == VOTES and worker.handover == worker.ballot:
                after = after._replace(hold=NONE, made=worker.ballot)
            changed = {at: one._replace(worker=after)}
            if len(before) == 1:
                changed = {
                    other: found._replace(worker=found.worker._replace(ballot=-1, told=False))
                    for other, found in enumerate([*experts[:at], changed[at], *experts[at + 1 :]])
                    if found.worker is not None
                }
            word = "passed" if passed else "failed"
            told: Told = ("worker {} learns that the vote has " + word, (at,))
            yield Step(Kind.DUE, told, self._forced(state, changed, ballots[0] if passed else 0))

    def _carried_out(self, one: Expert, number: int) -> Expert:
        assert one.worker is not None
        return one._replace(worker=one.worker._replace(hold=NONE, made=number))

    # --- deaths ---

    def _dying(
        self, state: State, world: World, engine: Engine, experts: list[Expert]
    ) -> Iterator[Step[State]]:
        if experts[0].worker is None:
            yield self._restarted(state, world, engine, experts)
        elif world.left.deaths:
            left = self.world_number(world._replace(left=world.left._replace(deaths=world.left.deaths - 1)))
            dead = [self._expert(one._replace(worker=None, sent=0, late=0)) for one in experts]
            yield Step(Kind.FAULT, ("a worker dies, and so does the engine", ()), (left, state[1], *dead))
        if not engine.agent:
            there = self._engine(engine._replace(agent=True))
            yield Step(Kind.DUE, ("another agent begins", ()), (state[0], there, *state[2:]))
        elif world.left.agents:
            left = self.world_number(world._replace(left=world.left._replace(agents=world.left.agents - 1)))
            without = [
                self._expert(
                    one._replace(heard=None, state=None, aborting=False, sent=0, late=one.late | one.sent)
                )
                for one in experts
            ]
            gone = self._engine(engine._replace(agent=False))
            yield Step(Kind.FAULT, ("the agent dies", ()), (left, gone, *without))

    def _restarted(self, state: State, world: World, engine: Engine, experts: list[Expert]) -> Step[State]:
        epoch = self.base(world, engine)
        born = [
            self._expert(
                Expert(Worker(), Worker(), ProtocolState(RankState.SERVING, epoch), said=one.said)
                if engine.agent
                else Expert(Worker(), said=one.said)
            )
            for one in experts
        ]
        life = self.world_number(world._replace(life=world.life + 1))
        told: Told = ("the engine begins a new life with its first map, as epoch {}", (epoch,))
        return Step(
            Kind.DUE, told, (life, self._engine(engine._replace(bases=(*engine.bases, epoch))), *born)
        )

    # --- invariants ---

    def wrong(self, state: State) -> str:
        world, engine, experts = self._parts(state)
        workers = [one.worker for one in experts if one.worker is not None]
        if len({worker.made for worker in workers}) > 1 and all(worker.ballot < 0 for worker in workers):
            return "ranks serve different maps in one step"
        for number, bits in enumerate(world.decided, 1):
            if bits & ABORTED_BIT and (engine.forced >> number & 1 or world.placed == number):
                return "a handover is both committed and aborted"
            if engine.forced >> number & 1 and not bits & COMMITTED_BIT:
                return "a map is in force that was never decided"
        return self._wrong_epochs(world, engine)

    def _wrong_epochs(self, world: World, engine: Engine) -> str:
        for number, (life, epoch) in enumerate(world.handovers, 1):
            reached = engine.forced >> number & 1 or world.placed == number
            if reached and any(epoch >= base for base in engine.bases[life:]):
                return "an epoch stands for two maps, or went back"
        return ""

    def wrong_step(self, before: State, after: State) -> str:
        if self.worlds[before[0]].life != self.worlds[after[0]].life:
            return ""
        for one, other in zip(self._parts(before)[2], self._parts(after)[2], strict=True):
            if one.worker is not None and other.worker is not None and other.worker.made < one.worker.made:
                return "within a life, an older map came back into force"
        return ""

    # --- parts of a state ---

    def _parts(self, state: State) -> tuple[World, Engine, list[Expert]]:
        return (
            self.worlds[state[0]],
            self._engines[state[1]],
            [self._experts[number] for number in state[2:]],
        )

    def _with(self, state: State, at: int, after: Expert) -> State:
        return (*state[: 2 + at], self._expert(after), *state[3 + at :])

    def _forced(self, state: State, changed: dict[int, Expert], number: int) -> State:
        """Return the state with some ranks changed, after the map of a handover came into force (0: none)."""
        engine = self._engines[state[1]]
        if number:
            engine = engine._replace(forced=engine.forced | 1 << number)
        experts = list(state[2:])
        for at, one in changed.items():
            experts[at] = self._expert(one)
        return (state[0], self._engine(engine), *experts)

    # --- numbers for values, so that states are small ---

    def _engine(self, engine: Engine) -> int:
        number = self._number_of_engine.get(engine)
        if number is None:
            number = self._number_of_engine[engine] = len(self._engines)
            self._engines.append(engine)
        return number

    def _expert(self, one: Expert) -> int:
        if one.worker is not None and self.ignores_past:
            relevant = -1 << (3 * one.worker.handover + PERMIT)
            one = one._replace(sent=one.sent & relevant, late=one.late & relevant)
        number = self._number_of_expert.get(one)
        if number is None:
            number = self._number_of_expert[one] = len(self._experts)
            self._experts.append(one)
        return number
