"""The real decision modules of both sides for an engine that moves its experts itself:
`migration.handover.coordinator` and `engine_adapter.handover.vote_protocol`.

The network between coordinators and agent, and the links between agent and workers, lose, repeat and reorder
messages. Workers vote as the plugin does, and drop maps on their own. Agent, coordinators and the engine die.
Everything around the modules is simulated, deterministically from a seed.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine_adapter.engine import WorkerMap
from engine_adapter.handover.vote_protocol import Drop, NotConnected, Nudge, Permit, Stage, VoteProtocol
from engine_adapter.initial_placement import epoch_above
from fleet.facts.placements import PlacementCommitted
from fleet.handover import CoordinatorState, passes
from fleet.placement import Placement
from fleet.requests.handovers import (
    AbortHandover,
    CommitHandover,
    DescribeHandover,
    ExpertCopy,
    HandoverDescribed,
    ProposeHandover,
)
from migration.engine_state.placement_registry import EngineEntry
from migration.handover.coordinator import Command, OpenHandover
from tests.handovers.handover_fake_memory import RANKS
from tests.handovers.handover_parties import Leader, World
from tests.voting_workers import Worker, digest

EXPERTS = 2 * RANKS
Message = Stage | Permit | Drop


def first(epoch: int) -> Placement:
    """Return the map that every start of the engine begins with: 3 slots per rank, the third redundant."""
    row = [expert for rank in range(RANKS) for expert in (2 * rank, 2 * rank + 1, (2 * rank + 2) % EXPERTS)]
    return Placement([row], experts=EXPERTS, ranks=RANKS, epoch=epoch)  # type: ignore[arg-type]


@dataclass(eq=False)
class _Seat:
    """What `World` asks a rank for."""

    protocol: VoteProtocol


@dataclass(eq=False)
class VoteWorld(World):
    """Complete world and its possible events."""

    bases: list[int] = field(default_factory=list)
    """epoch of the first map of each life"""
    maps: list[Placement] = field(default_factory=list)
    """every map that came into force, and the first one of each life"""
    workers: list[Worker] = field(default_factory=list)
    messages: list[tuple[int, Message]] = field(default_factory=list)
    """of the agent to workers, in transit"""
    heard: list[WorkerMap | None] = field(default_factory=list)
    """last status of each worker that the agent heard"""
    alive: bool = True
    refused: set[tuple[int, int]] = field(default_factory=set)
    """handovers that were aborted after the decision, by incarnation and number"""

    # Incarnations

    def begin_life(self) -> None:
        """Start the engine with its first map, under an epoch above every recorded one."""
        recorded = [one.placement.epoch for one in self.log if isinstance(one, PlacementCommitted)]
        left = self.open
        still_open = left is not None and left.state is not CoordinatorState.IDLE
        known = max([*recorded, *self.bases], default=None)
        epoch = epoch_above(known, left.epoch if left is not None and still_open else None)
        if any(epoch <= one.epoch for one in self.maps):
            raise self.unsafe(f"epoch {epoch} stands for two maps")
        self.life, self.alive, self.messages = self.life + 1, True, []
        self.bases.append(epoch)
        self.maps.append(first(epoch))
        self.workers = [self.worker(first(epoch)) for _ in range(RANKS)]
        self.begin_agent()
        self.tell(f"life {self.life} begins with epoch {epoch}")

    def worker(self, placement: Placement) -> Worker:
        """Return a new worker process, which serves this map."""
        return Worker(placement)

    def begin_agent(self) -> None:
        """Start an agent process, which has heard of no worker yet."""
        self.agent = VoteProtocol(worker_id=self.life, placement=self.workers[0].map)
        self.heard = [None] * RANKS
        self.seats = [_Seat(self.agent) for _ in range(RANKS)]  # type: ignore[misc]
        self.tell("an agent begins")

    @property
    def entry(self) -> EngineEntry:
        return EngineEntry("a", self.life, self.agent.placement)

    @property
    def whole(self) -> bool:
        return self.alive and all(status is not None for status in self.heard)

    # Coordinators

    def claim(self, value: OpenHandover, revision: int | None) -> bool:
        """Compare-and-set. A decided handover may still be aborted, if its map never comes into force."""
        if not self.accepts(revision):
            return False
        self.key, self.revision = msgspec.json.encode(value), self.revision + 1
        states = self.decided.setdefault((value.worker_id, value.handover), set())
        states.add(value.state)
        if {CoordinatorState.COMMITTING, CoordinatorState.ABORTING} <= states:
            self.refused.add((value.worker_id, value.handover))
        return True

    def survey(self, leader: Leader) -> list[HandoverDescribed]:
        if leader is self.leaders[-1] and leader.fenced != self.life:
            tokens = [self.agent.state(rank).token + 1 for rank in range(RANKS)]
            leader.token, leader.fenced = max(leader.token, *tokens), self.life
        for rank in range(RANKS):
            self.agent.status_requested(rank, leader.token)
        return [self.agent.describe(rank, self.now) for rank in range(RANKS)]

    def another(self, present: Placement) -> tuple[Placement, tuple[ExpertCopy, ...]]:
        """Return a map in which the redundant slots hold other experts."""
        table = first(0).expert_of_slot.copy()
        for rank in range(RANKS):
            others = [expert for expert in range(EXPERTS) if expert // 2 != rank]
            table[0, 3 * rank + 2] = self.dice.choice(others)
        return Placement(table, experts=EXPERTS, ranks=RANKS, epoch=present.epoch + 1), ()

    # The agent

    def deliver(self, leader: Leader, command: Command) -> None:
        """Deliver a command to the agent, if that incarnation still exists; its answer is then in transit."""
        if command.worker_id != self.life or not self.alive:
            return
        verdict = None
        try:
            match command:
                case ProposeHandover():
                    placement = Placement.from_record(command.placement)
                    verdict = self.agent.propose(command, placement, self.now)
                case CommitHandover():
                    verdict = self.agent.commit(command)
                case AbortHandover():
                    verdict = self.agent.abort(command)
                case DescribeHandover():
                    self.agent.status_requested(command.rank, command.token)
        except NotConnected:
            return
        if verdict is not None:
            self.tell(
                f"rank {command.rank}: {type(command).__name__} {command.handover} of coordinator"
                f" {command.token}: {verdict}"
            )
        asked = (
            leader.proceeding is not None
            and getattr(command, "handover", 0) == leader.proceeding.what.handover
        )
        self.answers.append((leader, self.agent.describe(command.rank, self.now, verdict if asked else None)))
        self.send()

    def send(self) -> None:
        """Put the agent's messages into transit."""
        for effect in self.agent.drain():
            if not isinstance(effect, Nudge):
                self.messages.append((effect.rank, effect))

    def listen(self, rank: int) -> None:
        """Let the agent hear the present status of a worker, and report it to the coordinators."""
        if not self.alive:
            return
        self.heard[rank] = self.workers[rank].status
        known = {status.served for status in self.heard if status is not None}
        if len(known) == 1:
            self.agent.placement = next(one for one in reversed(self.maps) if digest(one) in known)
        self.agent.update(self.heard, self.now)
        for leader in self.leaders:
            self.answers.append((leader, self.agent.describe(rank, self.now)))
        self.send()

    # Workers

    def receive(self, rank: int, message: Message) -> None:
        worker = self.workers[rank]
        match message:
            case Stage():
                worker.stage(message.handover, message.placement, digest(self.agent.placement))
            case Permit():
                worker.permit(message.handover)
            case Drop():
                worker.drop(message.handover, message.reason)

    def drop(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.held is not None:
            worker.drop(worker.handover, "on its own")
            self.tell(f"worker {rank} drops handover {worker.handover} on its own")

    def step(self) -> None:
        """Make one step of the engine, with a vote."""
        if not self.alive:
            return
        if self.passes():
            handover, placement = self.workers[0].handover, self.workers[0].held
            assert placement is not None
            for worker in self.workers:
                worker.carry_out()
            states = self.decided[self.life, handover]
            if CoordinatorState.COMMITTING not in states:
                raise self.unsafe(f"the map of handover {handover} is in force and was not decided")
            self.maps.append(placement)
            self.flips += 1
            self.tell(f"the map of handover {handover}, epoch {placement.epoch}, is in force")
        self.check_served()

    def passes(self) -> bool:
        return passes([worker.ballot for worker in self.workers])

    def check_served(self) -> None:
        """Check that all workers serve one map, which was not aborted."""
        if len({digest(worker.map) for worker in self.workers}) > 1:
            raise self.unsafe("the workers serve different maps in one step")
        forced = self.decided.get((self.life, self.workers[0].flipped), set())
        if CoordinatorState.ABORTING in forced:
            raise self.unsafe(f"handover {self.workers[0].flipped} is in force, and was aborted")

    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.alive:
            self.agent.tick(self.now)
            self.send()


class VoteWalk:
    """Random walk: first any events, then only those that must happen."""

    def __init__(self, seed: int, world: type[VoteWorld] = VoteWorld) -> None:
        dice = random.Random(seed)
        self.world, self._dice = world(dice), dice
        self._deaths = dice.choice((0.0, 0.002))
        self._agents = dice.choice((0.0, 0.01))
        self._leaders = dice.choice((0.0, 0.005))
        self._drops = dice.choice((0.0, 0.005, 0.02))
        self._again = dice.choice((0.1, 0.3))
        self._often = tuple(dice.choice((most, most, 1)) for most in (4, 6, 6, 6, 6, 2, 1))

    def whatever(self, pieces: int) -> None:
        world, dice = self.world, self._dice
        faults = (self._deaths, self._agents, self._leaders, self._drops)
        for _ in range(pieces):
            fault = dice.choices(("death", "agent", "leader", "drop", ""), (*faults, 1.0 - sum(faults)))[0]
            match fault:
                case "death" if world.alive:
                    world.alive, world.messages = False, []
                    world.tell("the engine dies")
                case "agent" if world.alive:
                    world.begin_agent()
                case "leader":
                    world.leaders = [*world.leaders[-2:], Leader(world.leaders[-1].token + 1)]
                    world.tell(f"coordinator {world.leaders[-1].token} takes over")
                case "drop" if world.alive:
                    world.drop(dice.randrange(RANKS))
                case _:
                    self._piece()
            world.check_served()

    def _piece(self) -> None:
        world, dice = self.world, self._dice
        possible = (True, world.commands, world.answers, world.messages, True, True, True)
        names = ("lead", "command", "answer", "message", "status", "step", "wait")
        chances = [often if can else 0 for often, can in zip(self._often, possible, strict=True)]
        match dice.choices(names, chances)[0]:
            case "lead":
                leader = dice.choice(world.leaders)
                if leader is world.leaders[-1] or leader.proceeding is not None:
                    world.lead(leader)
            case "command":
                world.deliver(*self._from_network(world.commands))
            case "answer":
                world.hear(*self._from_network(world.answers))
            case "message":
                world.receive(*self._from_network(world.messages))
            case "status":
                world.listen(dice.randrange(RANKS))
            case "step":
                world.step()
            case "wait":
                if not world.alive and dice.random() < 0.5:
                    world.begin_life()
                world.wait(dice.uniform(0.0, 0.25))

    def _from_network(self, messages: list[Any]) -> Any:
        """Take a message in transit. It may be repeated, and is lost if it waits too long."""
        while len(messages) > 40:
            messages.pop(self._dice.randrange(len(messages)))
        at = self._dice.randrange(len(messages))
        return messages[at] if self._dice.random() < self._again else messages.pop(at)

    def calm(self, rounds: int = 200) -> None:
        """Run without faults, with one coordinator, until everything has ended."""
        world = self.world
        world.faults = False
        if not world.alive:
            world.begin_life()
        world.leaders = [Leader(world.leaders[-1].token + 1)]
        world.commands, world.answers, world.messages = [], [], []
        for _ in range(rounds):
            world.lead(world.leaders[0])
            for command in (*world.commands,):
                world.deliver(*command)
            for message in (*world.messages,):
                world.receive(*message)
            world.messages = []
            for rank in range(RANKS):
                world.listen(rank)
            for answer in world.answers:
                world.hear(*answer)
            world.commands, world.answers = [], []
            world.step()
            world.wait(0.3)
            if self.at_rest:
                return
        standing = [str(self.world.agent.state(rank)) for rank in range(RANKS)]
        raise world.unsafe(f"it does not come to rest: the key says {world.open}; {standing}")

    @property
    def at_rest(self) -> bool:
        world = self.world
        return (
            (world.open is None or world.open.state is CoordinatorState.IDLE)
            and world.whole
            and all(world.agent.state(rank).handover == 0 for rank in range(RANKS))
            and all(worker.held is None for worker in world.workers)
        )
