"""Workers of a vLLM without vLLM: the plugin's own connection and mailbox, and a vote that the test calls."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray
from roost_vllm.link import Link
from roost_vllm.mailbox import Mailbox
from roost_vllm.settings import Settings
from roost_vllm.wire import (
    AgentWelcome,
    DropMap,
    ExpertDigests,
    FromAgent,
    FromWorker,
    MapMoved,
    PermitVote,
    SlotMismatch,
    StageMap,
    WorkerHello,
)

from engine_adapter.vllm.worker_server import WorkerServer
from fleet.placement import Placement

SECRET = b"a secret of the agent"
LAYERS, EXPERTS, SLOTS, TOP_K = 2, 6, 4, 2
EXPERT_BYTES = 1200


def table(shift: int = 0, ranks: int = 2) -> NDArray[np.int16]:
    """A map [layers, slots]: each layer holds the experts in turn, moved on by `shift`."""
    row = (np.arange(ranks * SLOTS) + shift) % EXPERTS
    return np.tile(row, (LAYERS, 1)).astype(np.int16)


def placement(shift: int, epoch: int, ranks: int = 2) -> Placement:
    return Placement(table(shift, ranks), experts=EXPERTS, ranks=ranks, epoch=epoch, duplicates=True)


class PluginWorker:
    """One expert rank. Its methods for the link are called from the link's thread, as in the plugin."""

    def __init__(self, rank: int, ranks: int = 2, targets: int = 2, instance: str = "start 1") -> None:
        self.rank, self.ranks, self.targets, self.instance = rank, ranks, targets, instance
        self.mailbox = Mailbox(table(0, ranks), EXPERTS)
        self.missing: tuple[str, ...] = ()
        self.mismatches: list[SlotMismatch] = []
        self.protocol = 1
        self.slots = SLOTS
        self.welcomes: list[AgentWelcome] = []
        self.received: list[FromAgent] = []
        self.deaf = False
        """it loses every message"""
        self.link: Link | None = None

    def connect(self, address: tuple[str, int], secret: bytes = SECRET) -> None:
        self.link = Link(Settings(*address, secret), self)
        self.link.start()

    def send(self, message: FromWorker) -> None:
        """Send a message over a connection that the server has welcomed: its thread learns that a moment
        later, and loses messages until then."""
        assert self.link is not None
        deadline = time.monotonic() + 5
        while self.link.alone_seconds():
            assert time.monotonic() < deadline, "the worker is not connected"
            time.sleep(0.001)
        self.link.send(message)

    def hello(self, *, proof: bytes, nonce: bytes) -> WorkerHello:
        status = self.mailbox.status()
        return WorkerHello(
            protocol=self.protocol,
            proof=proof,
            nonce=nonce,
            plugin="test",
            engine="0.32.0",
            missing=self.missing,
            refuses=self.mailbox.refusal,
            instance=self.instance,
            pid=1000 + self.rank,
            rank=self.rank,
            ranks=self.ranks,
            target=self.rank * self.targets // self.ranks,
            targets=self.targets,
            model="small",
            layers=LAYERS,
            experts=EXPERTS,
            slots=self.slots,
            top_k=TOP_K,
            expert_bytes=EXPERT_BYTES,
            all2all="allgather_reducescatter",
            dtype="float32",
            map=self.mailbox.table.astype("<i2").tobytes(),
            state=status.state,
            handover=status.handover,
            flipped=status.flipped,
            epoch=status.epoch,
        )

    def welcomed(self, welcome: AgentWelcome) -> None:
        assert self.link is not None
        self.welcomes.append(welcome)
        self.mailbox.epoch = self.mailbox.epoch or welcome.epoch
        for message in (self.mailbox.status(), self.digests(), *self.mismatches):
            self.link.send(message)

    def find_mismatch(self) -> None:
        """Notice that a slot holds other weights than its map says, and take no map from then on."""
        found = SlotMismatch(layer=1, slot=3, expert=3, expected="a", found="b")
        self.mailbox.refusal = "slot 3 of layer 1 does not hold expert 3"
        self.mismatches.append(found)
        self.send(found)

    def digests(self, wrong: tuple[int, int] | None = None) -> ExpertDigests:
        """Digests of what this rank holds. wrong: (layer, slot) whose weights are others."""
        own = self.mailbox.table[:, self.rank * SLOTS : (self.rank + 1) * SLOTS]
        texts = [[f"{layer}/{expert}" for expert in row] for layer, row in enumerate(own.tolist())]
        if wrong is not None:
            texts[wrong[0]][wrong[1]] = "other weights"
        return ExpertDigests(served=self.mailbox.served, digests=tuple(map(tuple, texts)))

    def receive(self, message: FromAgent) -> None:
        assert self.link is not None
        self.received.append(message)
        if not self.deaf:
            self.link.send(self.answer(message))

    def answer(self, message: FromAgent) -> FromWorker:
        match message:
            case StageMap():
                return self.mailbox.stage(message)
            case PermitVote():
                return self.mailbox.permit(message)
            case DropMap():
                return self.mailbox.drop(message)
            case _:
                return self.mailbox.status()

    def carry_out(self) -> None:
        held = self.mailbox.pass_vote()
        self.mailbox.come_into_force(held.table)
        content = held.table.astype("<i2").tobytes()
        self.send(MapMoved(handover=held.handover, map=content, received=3, seconds=0.25 + self.rank))
        self.send(self.mailbox.status())


def vote(workers: Sequence[PluginWorker]) -> bool:
    """One vote of all ranks: they move together, or none does."""
    held = [worker.mailbox.proposal() for worker in workers]
    first = held[0]
    if any(one is None or first is None or one.digest != first.digest for one in held):
        return False
    for worker in workers:
        worker.carry_out()
    return True


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 what it waits for happens in threads
        await asyncio.sleep(0.005)


@asynccontextmanager
async def connected(server: WorkerServer, *workers: PluginWorker) -> AsyncIterator[None]:
    """These workers connect to a listening server while the context lasts."""
    host, port = server.address
    for worker in workers:
        worker.connect((host, port))
    try:
        yield
    finally:
        for worker in workers:
            await disconnect(worker)


async def disconnect(worker: PluginWorker) -> None:
    if worker.link is not None:
        worker.link.stop()
        await asyncio.to_thread(worker.link.join)
        worker.link = None
