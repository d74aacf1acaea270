"""An engine of a few ranks without steps, whose experts lie in real cells and can be handed over; and a
coordinator that says what a test says.

A rank's part is the product's (`HandoverAgent` over a bus and transfers through memory); only the engine
behind it is made up: a placement, a table of cells, and one moment at which all ranks go over, once all have
adopted.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from engine_adapter.agent.copy_runner import Staging
from engine_adapter.agent.handover_agent import HandoverAgent
from engine_adapter.agent.memory_audit import resident_checksums
from engine_adapter.config import TransferConfig
from engine_adapter.engine import EngineDescription
from engine_adapter.reporting.rank_context import RankContext
from engine_adapter.transfer.in_process import MemoryFabric, MemoryTransfer
from engine_adapter.transfer.mapped_memory import MappedCells, laid_out
from engine_adapter.transfer.parts import CellFormat
from fleet.experts import ModelShape
from fleet.facts.engines import Capabilities
from fleet.handover import RankState
from fleet.placement import EMPTY, Placement
from fleet.requests.handovers import (
    AbortHandover,
    CommitHandover,
    DescribeHandover,
    ExpertCopy,
    HandoverDescribed,
    ProposeHandover,
)
from fleet.sharding import group_of, turned

SUBJECTS = Subjects()
WORKER = 7
TENSORS = laid_out((("gate", "<f4", (12, 8)), ("scale", "<f4", (12,))))
SCALE = TENSORS[1].offset
"""of a byte of it, in a cell"""
LEASE = 3.0
CONFIG = TransferConfig(lease_seconds=LEASE, retries=2, quarantine_cells=1)


class Inline(Executor):
    """Runs what it is given at once: virtual time knows no threads."""

    def submit(self, work: Any, /, *arguments: Any, **named: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments, **named))
        except Exception as error:  # noqa: BLE001, an executor passes on whatever it was
            done.set_exception(error)
        return done


class NoChecksums(Inline):
    """Never computes checksums: a rank that does not know its own grants no lease."""

    def submit(self, work: Any, /, *arguments: Any, **named: Any) -> "Future[Any]":
        return Future() if work is resident_checksums else super().submit(work, *arguments, **named)


class LateChecksums(Inline):
    """Computes checksums once it is released, as a rank of large experts that has just started."""

    def __init__(self) -> None:
        self._held: list[tuple[Future[Any], Any, Any]] | None = []

    def submit(self, work: Any, /, *arguments: Any, **named: Any) -> "Future[Any]":
        if work is not resident_checksums or self._held is None:
            return super().submit(work, *arguments, **named)
        self._held.append((Future(), work, arguments))
        return self._held[-1][0]

    def release(self) -> None:
        held, self._held = self._held or [], None
        for future, work, arguments in held:
            future.set_result(work(*arguments))


def weights(layer: int, expert: int) -> NDArray[np.uint8]:
    """What a whole cell holds of an expert: uint8 [bytes of its tensors], unlike any other's."""
    size = max(one.offset + one.bytes for one in TENSORS)
    return np.random.default_rng([layer, expert]).integers(0, 256, size, np.uint8)


@dataclass(frozen=True, eq=False)
class Adopted:
    placement: Placement
    cells: NDArray[np.int32]


class StandingExperts:
    """`engine_adapter.engine.Experts` of one rank."""

    def __init__(self, group: "Group", rank: int) -> None:
        placement = group.placement
        layers, slots = placement.on_rank(rank).shape
        self.memory = MappedCells(TENSORS, (layers + 1) * slots, placement.ranks)
        self.cells = np.arange(layers * slots, dtype=np.int32).reshape(layers, slots)
        self.ready: Adopted | None = None
        self.prepared = 0
        self.forgotten = 0
        self.refusal: Exception | None = None
        """raised by the next `prepare`"""
        self._group = group
        self.rank = rank
        for (layer, slot), expert in np.ndenumerate(placement.on_rank(rank)):
            if expert != EMPTY:
                self.memory.cell(int(self.cells[layer, slot]))[: len(weights(0, 0))] = weights(
                    layer, int(expert)
                )
        for _, _, here, part in self._parts():
            here[:] = part

    async def prepare(self, placement: Placement, cells: NDArray[np.int32]) -> Adopted:
        self.prepared += 1
        if self.refusal is not None:
            raise self.refusal
        await asyncio.sleep(0.001)
        return Adopted(placement, cells.copy())

    def forget(self, adoption: Adopted) -> None:
        self.forgotten += 1

    async def adopt(self, adoption: Adopted) -> None:
        self.ready = adoption
        await self._group.flip_when_ready()

    def check(self) -> None:
        """Every slot's cell holds what the placement says."""
        for layer, expert, here, part in self._parts():
            assert (here == part).all(), f"rank {self.rank} lacks its part of expert {layer}/{expert}"
        for (layer, slot), expert in np.ndenumerate(self._group.placement.on_rank(self.rank)):
            if expert != EMPTY:
                found = self.memory.cell(int(self.cells[layer, slot]))[: len(weights(0, 0))]
                assert (found == weights(layer, int(expert))).all(), (
                    f"rank {self.rank} layer {layer} slot {slot} does not hold expert {expert}"
                )

    def _parts(self) -> Iterator[tuple[int, int, NDArray[np.uint8], NDArray[np.uint8]]]:
        """(layer, expert, memory, what shall lie there) of each tensor of the rank's parts of sharded
        layers."""
        placement, form = self._group.placement, CellFormat.of(self.memory)
        for layer in placement.sharded:
            for expert in range(placement.experts):
                group, piece = group_of(expert, placement.ranks)
                cell, whole = self.memory.cell(int(self.cells[layer, group])), weights(layer, expert)
                places = form.ranges(piece, sharded=True), form.ranges(self.rank, sharded=False)
                for (to, size), (of, _) in zip(*places, strict=True):
                    yield layer, expert, cell[to : to + size], whole[of : of + size]


class StandingRank:
    """As much of `engine_adapter.engine.Engine` as a desk asks for."""

    def __init__(self, group: "Group", rank: int) -> None:
        placement = group.placement
        shape = ModelShape(
            layers=placement.layers, experts=placement.experts, top_k=1, hidden=8, expert_intermediate=4
        )
        self.description = EngineDescription(
            model="m", rank=rank, ranks=placement.ranks, block_size=16, kv_blocks=64, max_context=512, max_batch_tokens=128,
            capabilities=Capabilities(), shape=shape,
        )  # fmt: skip
        self.experts = StandingExperts(group, rank)
        self._group = group

    @property
    def placement(self) -> Placement:
        return self._group.placement


@dataclass(eq=False)
class Group:
    """All ranks, and the coordinator's side of the bus."""

    placement: Placement
    broker: MemoryBroker
    config: TransferConfig = CONFIG
    fabric: MemoryFabric = field(default_factory=MemoryFabric)
    ranks: list[StandingRank] = field(default_factory=list)
    transfers: list[MemoryTransfer] = field(default_factory=list)
    agents: list[HandoverAgent] = field(default_factory=list)
    running: list["asyncio.Task[None]"] = field(default_factory=list)
    """of the agents; a test that expects one to end takes it out"""
    token: int = 1
    handover: int = 0
    _flip: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.bus = MemoryBus(self.broker)

    # as an engine

    async def flip_when_ready(self) -> None:
        """All ranks go over at one moment, when the last is ready."""
        flip = self._flip
        if all(rank.experts.ready is not None for rank in self.ranks):
            for rank in self.ranks:
                adopted, rank.experts.ready = rank.experts.ready, None
                assert adopted is not None
                self.placement, rank.experts.cells = adopted.placement, adopted.cells
            self._flip = asyncio.Event()
            flip.set()
        await flip.wait()

    # as a coordinator

    def proposal(
        self,
        rank: int,
        placement: Placement,
        copies: Sequence[ExpertCopy] | None = None,
        deadline: float = 30.0,
    ) -> ProposeHandover:
        """Of the present handover. copies: None: from the first holder each."""
        return ProposeHandover(
            engine="a", worker_id=WORKER, rank=rank, token=self.token, handover=self.handover, plan="p", placement=placement.record(),
            copies=tuple(copies_to(self.placement, placement) if copies is None else copies), deadline_seconds=deadline, traceparent="t",
        )  # fmt: skip

    async def tell(self, rank: int, command: Any) -> HandoverDescribed:
        answer = await self.bus.request(SUBJECTS.handover("a", WORKER, rank), command)
        assert isinstance(answer, HandoverDescribed)
        return answer

    async def propose(
        self, placement: Placement, copies: Sequence[ExpertCopy] | None = None, deadline: float = 30.0
    ) -> list[HandoverDescribed]:
        """A new handover, to every rank."""
        self.handover += 1
        return [
            await self.tell(rank, self.proposal(rank, placement, copies, deadline))
            for rank in range(placement.ranks)
        ]

    async def commit(self, rank: int) -> HandoverDescribed:
        return await self.tell(
            rank, CommitHandover(worker_id=WORKER, rank=rank, token=self.token, handover=self.handover)
        )

    async def abort(self, rank: int, handover: int | None = None) -> HandoverDescribed:
        number = self.handover if handover is None else handover
        return await self.tell(
            rank,
            AbortHandover(
                worker_id=WORKER, rank=rank, token=self.token, handover=number, reason="a test wants it"
            ),
        )

    async def describe(self, rank: int) -> HandoverDescribed:
        return await self.tell(rank, DescribeHandover(worker_id=WORKER, rank=rank))

    async def until(
        self, rank: int, expected: Callable[[HandoverDescribed], bool], seconds: float = 60.0
    ) -> HandoverDescribed:
        """Look until a rank says something like that; time is virtual."""
        async with asyncio.timeout(seconds):
            while True:
                if expected(described := await self.describe(rank)):
                    return described
                await asyncio.sleep(0.01)

    async def reaches(self, rank: int, state: RankState) -> HandoverDescribed:
        return await self.until(rank, lambda described: described.state == state)

    async def hand_over(
        self, placement: Placement, copies: Sequence[ExpertCopy] | None = None
    ) -> list[HandoverDescribed]:
        """The whole of it; where every rank is then."""
        await self.propose(placement, copies)
        for rank in range(placement.ranks):
            await self.reaches(rank, RankState.STAGED)
        for rank in range(placement.ranks):
            await self.commit(rank)
        return [
            await self.until(rank, lambda described: described.served == placement.epoch)
            for rank in range(placement.ranks)
        ]

    def check(self) -> None:
        """Every rank's books agree, and every slot holds what it shall."""
        for rank, handovers in zip(self.ranks, self.agents, strict=True):
            handovers.protocol.cell_table.check_integrity()
            rank.experts.check()
            assert (handovers.protocol.cell_table.table == rank.experts.cells).all()

    @property
    def free(self) -> list[int]:
        """Cells that are free on each rank, when nothing is under way."""
        return [self.placement.slots_per_rank] * self.placement.ranks


def copies_to(before: Placement, after: Placement) -> list[ExpertCopy]:
    """What has to be copied, from the first holder each."""
    copies = []
    for layer, slot in np.argwhere(before.expert_of_slot != after.expert_of_slot).tolist():
        if layer in turned(before, after):
            continue
        expert = int(after.expert_of_slot[layer, slot])
        rank = slot // after.slots_per_rank
        if expert == EMPTY or expert in before.on_rank(rank)[layer]:
            continue
        source = int(np.flatnonzero(before.expert_of_slot[layer] == expert)[0])
        copies.append(ExpertCopy(layer=layer, expert=expert, source=source, slot=slot))
    return copies


def after(placement: Placement, *changes: tuple[int, int, int]) -> Placement:
    """The next epoch, with (layer, slot, expert) written."""
    table = placement.expert_of_slot.copy()
    for layer, slot, expert in changes:
        table[layer, slot] = expert
    return Placement(
        table,
        experts=placement.experts,
        ranks=placement.ranks,
        epoch=placement.epoch + 1,
        sharded=placement.sharded,
    )


@asynccontextmanager
async def standing(
    placement: Placement,
    config: TransferConfig = CONFIG,
    *,
    tracing: Any = None,
    executors: Mapping[int, Executor] = MappingProxyType({}),
) -> AsyncIterator[Group]:
    """A group whose agents serve until the block ends; then nothing of them is left."""
    group = Group(placement, MemoryBroker(SUBJECTS), config)
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        for rank in range(placement.ranks):
            one = StandingRank(group, rank)
            group.ranks.append(one)
            stack.callback(one.experts.memory.close)
            way = group.fabric.join(one.experts.memory)
            stack.push_async_callback(way.close)
            group.transfers.append(way)
        for one, way in zip(group.ranks, group.transfers, strict=True):
            staging = Staging(
                transfers=(way,),
                config=config,
                tracing=tracing,
                executor=executors.get(one.description.rank, Inline()),
            )
            context = RankContext(MemoryBus(group.broker), SUBJECTS, "a", WORKER, one.description)
            group.agents.append(HandoverAgent(context, one, staging))  # type: ignore[arg-type]
        running = [
            asyncio.create_task(handovers.run(), name=f"agent of rank {rank}")
            for rank, handovers in enumerate(group.agents)
        ]
        stack.push_async_callback(_stop, running)
        group.running = running
        await asyncio.sleep(0.01)
        yield group
    assert asyncio.all_tasks() <= before


async def _stop(running: Sequence["asyncio.Task[None]"]) -> None:
    for task in running:
        task.cancel()
    async with asyncio.timeout(5):
        for ended in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended
