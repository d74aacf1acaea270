"""A small agent for tests: it speaks `engine_adapter.vllm.wire` with the plugins, and loses, delays and
doubles messages when told to."""

import asyncio
import contextlib
import secrets
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_adapter.vllm import wire
from fleet.dispatch import row_copies

Table = NDArray[np.int16]
_decode: "msgspec.msgpack.Decoder[wire.FromWorker]" = msgspec.msgpack.Decoder(wire.FromWorker)


@dataclass
class Worker:
    """One worker that is connected, and what it said."""

    hello: wire.WorkerHello
    writer: asyncio.StreamWriter
    status: wire.MapStatus | None = None
    digests: wire.ExpertDigests | None = None
    moved: list[wire.MapMoved] = field(default_factory=list)
    demand: list[wire.WorkerDemand] = field(default_factory=list)
    routed: list[wire.RoutedRequest] = field(default_factory=list)
    mismatches: list[wire.SlotMismatch] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def send(self, message: wire.FromAgent) -> None:
        """Send a message."""
        self.writer.write(framed(message))

    @property
    def map(self) -> Table:
        """Map at the start of the connection."""
        table = np.frombuffer(self.hello.map, "<i2").reshape(self.hello.layers, -1)
        return table.astype(np.int16)

    def counted(self) -> NDArray[np.int64]:
        """Return the pairs by physical expert that it has told, [layers, slots of all ranks]."""
        told = [np.frombuffer(one.slots, "<i8").reshape(self.hello.layers, -1) for one in self.demand]
        return np.asarray(np.sum(told, axis=0), np.int64)


def framed(message: msgspec.Struct) -> bytes:
    """Return the frame of a message."""
    body = msgspec.msgpack.encode(message)
    return struct.pack(">I", len(body)) + body


async def _read(reader: asyncio.StreamReader) -> wire.FromWorker:
    (length,) = struct.unpack(">I", await reader.readexactly(4))
    return _decode.decode(await reader.readexactly(length))


class WorkerAgent:
    """Server for the workers of one vLLM. epoch: of the map in force when they start."""

    def __init__(self, secret: bytes, *, epoch: int = 1, vote_steps: int = 8) -> None:
        self.secret = secret
        self.epoch = epoch
        self.vote_steps = vote_steps
        self.workers: dict[int, Worker] = {}
        self.port = 0
        self._changed = asyncio.Event()
        self._handover = 0

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator["WorkerAgent"]:
        """Listen with the context."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for worker in self.workers.values():
                worker.writer.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = -1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            nonce = secrets.token_bytes(16)
            writer.write(framed(wire.AgentHello(protocol=wire.PROTOCOL, nonce=nonce)))
            hello = await _read(reader)
            assert isinstance(hello, wire.WorkerHello), hello
            if hello.proof != wire.proof(self.secret, "worker", nonce):
                raise ConnectionError("a worker that does not know the secret")
            writer.write(framed(self._welcome(hello)))
            rank = hello.rank
            self.workers[rank] = worker = Worker(hello, writer)
            while True:
                self._take(worker, await _read(reader))
        gone = self.workers.get(rank)
        if gone is not None and gone.writer is writer:
            del self.workers[rank]
        self._wake()
        writer.close()

    def forget(self) -> None:
        """Close all connections and forget what was told, as an agent that is killed."""
        for worker in self.workers.values():
            worker.writer.transport.abort()
        self.workers = {}

    def _welcome(self, hello: wire.WorkerHello) -> wire.AgentWelcome:
        return wire.AgentWelcome(
            proof=wire.proof(self.secret, "agent", hello.nonce),
            epoch=self.epoch,
            report_seconds=0.5,
            vote_steps=self.vote_steps,
        )

    def _take(self, worker: Worker, message: wire.FromWorker) -> None:
        match message:
            case wire.MapStatus():
                worker.status = message
            case wire.ExpertDigests():
                worker.digests = message
            case wire.MapMoved():
                worker.moved.append(message)
            case wire.WorkerDemand():
                worker.demand.append(message)
            case wire.RoutedRequest():
                worker.routed.append(message)
            case wire.SlotMismatch():
                worker.mismatches.append(message)
            case wire.LinkError():
                worker.errors.append(message.reason)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait until a condition holds; it is looked at after each message. TimeoutError when it does not."""
        async with asyncio.timeout(seconds):
            while not condition():
                await self._changed.wait()

    async def until_connected(self, ranks: int = 2, seconds: float = 30.0) -> None:
        """Wait for all workers, and for the digests of their experts."""
        await self.until(
            lambda: len(self.workers) == ranks and all(one.digests for one in self.workers.values()), seconds
        )

    def statuses(self) -> list[wire.MapStatus]:
        """Return the last status of each rank that told one, in the order of ranks."""
        told = [self.workers[rank].status for rank in sorted(self.workers)]
        return [status for status in told if status is not None]

    def states(self) -> dict[int, tuple[str, int]]:
        """Return state and handover number of each rank."""
        statuses = {rank: worker.status for rank, worker in self.workers.items()}
        return {rank: (one.state, one.handover) for rank, one in statuses.items() if one is not None}

    def in_force(self, digest: str) -> bool:
        """Return whether both ranks serve a map."""
        statuses = self.statuses()
        return len(statuses) == 2 and all(status.served == digest for status in statuses)

    def staging(self, table: Table) -> wire.StageMap:
        """Return the staging message of the next handover, for the map that rank 0 serves."""
        self._handover = max(self._handover, *(status.handover for status in self.statuses())) + 1
        self.epoch = max(self.epoch, *(status.epoch for status in self.statuses())) + 1
        served = self.statuses()[0].served
        return wire.StageMap(handover=self._handover, epoch=self.epoch, replaces=served, map=packed(table))

    def to_all(self, message: wire.FromAgent) -> None:
        """Send a message to every worker."""
        for worker in self.workers.values():
            worker.send(message)

    async def until_state(self, handover: int, state: str, seconds: float = 30.0) -> None:
        """Wait until all workers say that they are in a state of a handover."""
        await self.until(
            lambda: (
                len(self.statuses()) == 2
                and all((one.handover, one.state) == (handover, state) for one in self.statuses())
            ),
            seconds,
        )

    async def carry_out(self, table: Table, seconds: float = 60.0) -> float:
        """Bring a map into force on all ranks; return the seconds that it took."""
        loop = asyncio.get_running_loop()
        started, message = loop.time(), self.staging(table)
        self.to_all(message)
        await self.until_state(message.handover, "staged")
        self.to_all(wire.PermitVote(handover=message.handover))
        await self.until_in_force(table, seconds)
        return loop.time() - started

    async def until_in_force(self, table: Table, seconds: float = 60.0) -> None:
        """Wait until both ranks serve a map."""
        digest = wire.map_digest(table, self.workers[0].hello.experts)
        await self.until(lambda: self.in_force(digest), seconds)

    async def until_checked(self, table: Table, seconds: float = 60.0) -> None:
        """Wait until both ranks have checked the slots that a map changed."""
        digest = wire.map_digest(table, self.workers[0].hello.experts)
        workers = self.workers.values()
        await self.until(
            lambda: all(one.digests and one.digests.served == digest for one in workers), seconds
        )


def packed(table: Table) -> bytes:
    """Return a map as messages carry it."""
    return table.astype("<i2").tobytes()


def random_map(rng: np.random.Generator, layers: int, slots: int, experts: int) -> Table:
    """Return a map in which every expert has a slot, and the other slots hold random copies."""
    rows = [
        rng.permutation(np.concatenate([np.arange(experts), rng.integers(0, experts, slots - experts)]))
        for _ in range(layers)
    ]
    return np.stack(rows).astype(np.int16)


def slots_by_rows(table: Table, request: wire.RoutedRequest) -> NDArray[np.int64]:
    """Return the pairs by physical expert, [layers, slots], of a request that ran alone, by the planner's rule
    (`fleet.dispatch.ROW_HASH`). Its prompt was one step, whose rows are its positions from the first that was
    not cached; every later token was row 0 of a step of its own."""
    layers, slots = table.shape
    routed = np.frombuffer(request.experts, "<i2").reshape(request.positions, layers, request.top_k)
    rows = np.zeros(request.positions, np.int64)
    prompt = request.prompt_tokens - request.first
    rows[:prompt] = np.arange(prompt)
    found = []
    for layer, of_slot in enumerate(table):
        holders = [np.flatnonzero(of_slot == expert) for expert in range(of_slot.max() + 1)]  # lowest first
        copies = np.array([len(held) for held in holders])
        chosen = row_copies(rows[:, None], copies[routed[:, layer]])
        pairs = zip(routed[:, layer].ravel().tolist(), chosen.ravel().tolist(), strict=True)
        found.append(np.bincount([holders[expert][nth] for expert, nth in pairs], minlength=slots))
    return np.array(found, np.int64)


def wrong_slots(agent: WorkerAgent, table: Table) -> list[tuple[int, int]]:
    """Return the (layer, slot) whose weights are not those of the expert in the map: compared with the
    digests that the ranks told, of which each expert must have one."""
    told = [agent.workers[rank].digests for rank in sorted(agent.workers)]
    rows = [sum((one.digests[layer] for one in told if one), ()) for layer in range(len(table))]
    digests = np.array(rows)
    wrong = []
    for layer in range(len(table)):
        for expert in np.unique(table[layer]):
            slots = np.flatnonzero(table[layer] == expert)
            if len(set(digests[layer, slots])) > 1:
                wrong += [(layer, int(slot)) for slot in slots]
        if len(set(digests[layer])) != len(np.unique(table[layer])):
            wrong.append((layer, -1))
    return wrong
