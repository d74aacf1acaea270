"""Two workers with the plugin's mailboxes behind connections that delay and lose messages: what the agent
believes of them."""

import random
from collections import deque
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from roost_vllm import wire as worker_side

from engine_adapter.vllm import wire
from engine_adapter.vllm.worker_maps import WorkerMaps
from tests.engine_adapter.vllm.plugin_workers import PluginWorker, placement


class Connection:
    """Both directions of one connection, and the worker behind it. Nothing arrives before `deliver`."""

    def __init__(self, worker: PluginWorker) -> None:
        self.worker = worker
        self.to_worker: deque[Any] = deque()
        self.to_agent: deque[Any] = deque()
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def send(self, message: wire.FromAgent) -> None:
        self.to_worker.append(message)

    def answer(self) -> None:
        """The worker takes one message."""
        if self.to_worker:
            raw = msgspec.msgpack.encode(self.to_worker.popleft())
            self.to_agent.append(self.worker.answer(worker_side.decode(raw)))

    def carry_out(self) -> None:
        held = self.worker.mailbox.pass_vote()
        self.worker.mailbox.come_into_force(held.table)
        content = held.table.astype("<i2").tobytes()
        moved = worker_side.MapMoved(handover=held.handover, map=content, received=1, seconds=0.1)
        self.to_agent += [moved, self.worker.mailbox.status()]


class World:
    """The agent's view, the workers, and the coordinator's numbers."""

    def __init__(self) -> None:
        self.workers = [PluginWorker(0), PluginWorker(1)]
        self.maps = WorkerMaps(self.hello(0), 4)
        self.links: list[Connection | None] = [None, None]
        """As the workers see it."""
        self.believed: list[Connection | None] = [None, None]
        """As the agent sees it: it may not have noticed yet that a connection has ended."""
        self.ended: list[list[Connection]] = [[], []]
        """Connections that have ended, whose last messages may still reach the agent."""
        self.handover = 0
        self.epoch = 4
        self.proposed = placement(0, 4)
        for rank in range(2):
            self.connect(rank)

    def hello(self, rank: int) -> wire.WorkerHello:
        raw = msgspec.msgpack.encode(self.workers[rank].hello(proof=b"", nonce=b""))
        return msgspec.msgpack.decode(raw, type=wire.WorkerHello)

    def connect(self, rank: int) -> None:
        if self.links[rank] is not None:
            return
        link = Connection(self.workers[rank])
        self.maps.join(self.hello(rank), link)
        self.workers[rank].mailbox.epoch = self.workers[rank].mailbox.epoch or self.maps.epoch
        link.to_agent.append(self.workers[rank].mailbox.status())
        self.links[rank] = self.believed[rank] = link

    def cut(self, rank: int) -> None:
        """A worker loses its connection, and what was on the way to it."""
        link = self.links[rank]
        if link is not None:
            link.to_worker.clear()
            self.ended[rank].append(link)
            self.links[rank] = None

    def notice(self, rank: int) -> None:
        """The agent sees the end of a connection: nothing more comes over it."""
        if self.ended[rank]:
            link = self.ended[rank].pop(0)
            self.maps.leave(rank, link)
            if self.believed[rank] is link:
                self.believed[rank] = None

    def hear(self, rank: int, link: Connection | None) -> None:
        """The agent takes one message of a connection."""
        if link is not None and link.to_agent:
            raw = msgspec.msgpack.encode(link.to_agent.popleft())
            self.maps.receive(rank, link, msgspec.msgpack.decode(raw, type=wire.FromWorker))

    def catch_up(self, rank: int) -> None:
        """The agent takes all messages of a worker's connection."""
        link = self.links[rank]
        while link is not None and link.to_agent:
            self.hear(rank, link)

    def propose(self, shift: int) -> None:
        self.handover += 1
        self.epoch = max(worker.mailbox.epoch for worker in self.workers) + 1
        self.proposed = placement(shift % 6, self.epoch)

    def prepare(self, shift: int) -> None:
        """End the last handover, and do most of another: chance alone rarely gets as far as a vote."""
        for rank, link in enumerate(self.links):
            self.maps.drop(rank, self.handover, "over")
            while link is not None and link.to_worker:
                link.answer()
            self.catch_up(rank)
        self.propose(shift)
        for rank, link in enumerate(self.links):
            self.maps.stage(rank, self.handover, self.proposed)
            self.maps.permit(rank, self.handover)
            while link is not None and link.to_worker:
                link.answer()

    def step(self, what: str, rank: int, shift: int) -> None:
        link = self.links[rank]
        match what:
            case "propose":
                self.propose(shift)
            case "stage":
                self.maps.stage(rank, self.handover, self.proposed)
            case "permit":
                self.maps.permit(rank, self.handover)
            case "drop":
                self.maps.drop(rank, self.handover, "over")
            case "worker" if link is not None:
                link.answer()
            case "agent":
                self.hear(rank, link)
            case "caught up":
                self.catch_up(rank)
            case "late" if self.ended[rank]:
                self.hear(rank, self.ended[rank][0])
            case "cut":
                self.cut(rank)
            case "notice":
                self.notice(rank)
            case "connect":
                self.connect(rank)
            case "prepare":
                self.prepare(shift)
            case "vote":
                self.vote()

    def vote(self) -> None:
        held = [worker.mailbox.proposal() for worker in self.workers]
        first, second = held
        if (
            first is None
            or second is None
            or (first.digest, first.handover) != (second.digest, second.handover)
        ):
            return
        for rank, worker in enumerate(self.workers):
            link = self.links[rank]
            (link or Connection(worker)).carry_out()

    def settle(self) -> None:
        """All connections work, and everything arrives, that of ended ones last."""
        for rank in range(2):
            self.connect(rank)
            link = self.links[rank]
            while link is not None and (link.to_worker or link.to_agent):
                link.answer()
                self.hear(rank, link)
            for old in tuple(self.ended[rank]):
                while old.to_agent:
                    self.hear(rank, old)
                self.notice(rank)


WHAT = (
    *("propose", "stage", "permit", "drop", "prepare", "prepare", "vote", "vote"),
    *("worker", "worker", "agent", "agent", "caught up", "cut", "connect", "connect", "late", "notice"),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(WHAT), st.integers(0, 1), st.integers(0, 5)), min_size=10, max_size=80
)


@given(STEPS)
def test_the_agent_believes_only_what_all_workers_serve(steps: list[tuple[str, int, int]]) -> None:
    world = World()
    served = {(4, world.workers[0].mailbox.served)}
    for what, rank, shift in steps:
        before = world.maps.placement.epoch
        world.step(what, rank, shift)
        for worker in world.workers:
            served.add((worker.mailbox.epoch or 4, worker.mailbox.served))
        now = world.maps.placement
        digest = wire.map_digest(now.expert_of_slot, now.experts)
        assert now.epoch >= before
        assert (now.epoch, digest) in served
        if now.epoch > before:
            statuses = [world.maps.status(at) for at in range(2)]
            assert all(status is not None and status.served == digest for status in statuses)
        for at in range(2):
            assert (world.maps.status(at) is None) == (world.believed[at] is None)
    world.settle()
    first, second = (worker.mailbox for worker in world.workers)
    assert first.served == second.served, "a vote moves both or none"
    assert (world.maps.placement.expert_of_slot == first.table).all()
    assert world.maps.placement.epoch == first.epoch == second.epoch
    for rank, worker in enumerate(world.workers):
        status = world.maps.status(rank)
        assert status is not None
        mine = worker.mailbox.status()
        assert (status.state, status.handover, status.flipped) == (mine.state, mine.handover, mine.flipped)
    assert not world.maps.replaced
    assert not world.maps.fault


def test_the_random_steps_reach_new_maps_and_late_messages() -> None:
    """The property above is empty unless maps come into force, and ended connections still bring something."""
    flips = late = 0
    for seed in range(60):
        dice, world = random.Random(seed), World()
        for _ in range(60):
            what, rank = dice.choice(WHAT), dice.randrange(2)
            late += what == "late" and any(link.to_agent for link in world.ended[rank][:1])
            epoch = world.maps.placement.epoch
            world.step(what, rank, dice.randrange(6))
            flips += world.maps.placement.epoch > epoch
    assert flips >= 60
    assert late >= 30


def test_slots_that_are_not_checked_yet_fail_nothing_and_are_compared_once_they_are() -> None:
    """An agent that connects while the plugin checks a new map hears empty digests first."""
    world = World()
    hear(world, *(one.digests() for one in world.workers))
    world.prepare(1)
    world.vote()
    world.settle()
    assert world.maps.placement == world.proposed
    checked = [one.digests() for one in world.workers]
    unchecked = [msgspec.structs.replace(one, digests=(("",) * 4, one.digests[1])) for one in checked]
    hear(world, *unchecked)
    assert not world.maps.fault
    hear(world, *checked)
    assert not world.maps.fault
    hear(world, world.workers[0].digests(wrong=(0, 2)))
    # rank 0 holds experts 1, 2, 3, 4 in its slots
    assert world.maps.fault.startswith("the copy of expert 3 of layer 0 in slot 2 of expert rank 0")


def hear(world: World, *digests: worker_side.ExpertDigests) -> None:
    """The agent hears the digests of rank 0, then those of rank 1."""
    for rank, one in enumerate(digests):
        link = world.links[rank]
        assert link is not None
        link.to_agent.append(one)
        world.hear(rank, link)
