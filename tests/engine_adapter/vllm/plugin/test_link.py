"""The connection of a worker to its agent, over real sockets."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from roost_vllm import wire as worker_side
from roost_vllm.link import Link
from roost_vllm.settings import Settings

from engine_adapter.vllm import wire
from tests.vllm.worker_agent import WorkerAgent, framed

SECRET = b"known to both"
TABLE = np.array([[0, 1, 1, 0]], np.int16)


class Parrot:
    """A worker that answers everything with its status."""

    link: Link

    def __init__(self) -> None:
        self.welcomes: list[worker_side.AgentWelcome] = []
        self.heard: list[worker_side.FromAgent] = []
        self.failures = 0
        """messages that it fails at from now on"""

    def hello(self, *, proof: bytes, nonce: bytes) -> worker_side.WorkerHello:
        return worker_side.WorkerHello(
            protocol=worker_side.PROTOCOL, proof=proof, nonce=nonce, plugin="0", engine="0", instance="i",
            pid=1, rank=0, ranks=1, target=0, targets=1, model="m", layers=1, experts=2, slots=4, top_k=1,
            expert_bytes=4, all2all="naive", dtype="float32", map=TABLE.tobytes(),
        )  # fmt: skip

    @property
    def status(self) -> worker_side.MapStatus:
        return worker_side.MapStatus(state="idle", handover=3, digest="", served="ab", flipped=3, epoch=7)

    def welcomed(self, welcome: worker_side.AgentWelcome) -> None:
        self.welcomes.append(welcome)
        self.link.send(self.status)

    def receive(self, message: worker_side.FromAgent) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("what no one expects")
        self.heard.append(message)
        self.link.send(self.status)


@contextlib.asynccontextmanager
async def linked(
    port: int, secret: bytes = SECRET, worker: Parrot | None = None
) -> AsyncIterator[tuple[Link, Parrot]]:
    worker = worker or Parrot()
    worker.link = link = Link(Settings("127.0.0.1", port, secret), worker)
    link.start()
    try:
        yield link, worker
    finally:
        link.stop()
        await asyncio.to_thread(link.join, 10)
        assert not link.is_alive()


async def test_a_worker_introduces_itself_and_tells_its_state_first() -> None:
    async with WorkerAgent(SECRET, epoch=5).serving() as agent, linked(agent.port) as (link, worker):
        await agent.until(lambda: bool(agent.statuses()))
        assert agent.workers[0].hello.map == TABLE.tobytes()
        assert agent.statuses()[0].epoch == 7
        assert worker.welcomes[0].epoch == 5
        assert link.alone_seconds() == 0


async def test_messages_are_answered_and_reports_are_sent() -> None:
    async with WorkerAgent(SECRET).serving() as agent, linked(agent.port) as (link, worker):
        await agent.until(lambda: bool(agent.statuses()))
        agent.workers[0].send(wire.PermitVote(handover=9))
        await agent.until(lambda: bool(worker.heard))
        assert worker.heard == [worker_side.PermitVote(handover=9)]
        link.send(worker_side.MapMoved(handover=3, map=TABLE.tobytes(), received=2, seconds=0.5))
        await agent.until(lambda: bool(agent.workers[0].moved))
        assert agent.workers[0].moved[0].received == 2


async def test_a_message_of_an_unknown_type_is_answered_with_an_error() -> None:
    class Strange(msgspec.Struct, tag="strange"):
        """No message of this protocol."""

    async with WorkerAgent(SECRET).serving() as agent, linked(agent.port):
        await agent.until(lambda: bool(agent.statuses()))
        agent.workers[0].writer.write(framed(Strange()))
        await agent.until(lambda: bool(agent.workers[0].errors))
        assert "strange" in agent.workers[0].errors[0]


async def test_a_worker_connects_again_when_the_agent_is_gone() -> None:
    async with WorkerAgent(SECRET).serving() as agent, linked(agent.port) as (link, worker):
        for connections in (1, 2, 3):
            await agent.until(lambda: bool(agent.statuses()))
            assert len(worker.welcomes) == connections
            agent.forget()
            link.send(worker.status)  # may be lost, and must not hurt


async def test_a_worker_introduces_itself_anew_when_what_it_says_has_changed() -> None:
    async with WorkerAgent(SECRET).serving() as agent, linked(agent.port) as (link, worker):
        await agent.until(lambda: bool(agent.statuses()))
        link.introduce_again()
        await agent.until(lambda: len(worker.welcomes) == 2)


async def test_a_failure_that_no_one_expects_ends_the_connection_and_not_the_link() -> None:
    async with WorkerAgent(SECRET).serving() as agent, linked(agent.port) as (link, worker):
        await agent.until(lambda: bool(agent.statuses()))
        worker.failures = 1
        agent.workers[0].send(wire.DescribeWorker())
        await agent.until(lambda: len(worker.welcomes) == 2)
        assert link.is_alive()
        await agent.until(lambda: bool(agent.statuses()))
        agent.workers[0].send(wire.DescribeWorker())
        await agent.until(lambda: worker.heard == [worker_side.DescribeWorker()])


@pytest.fixture
def many_files() -> Iterator[None]:
    """More files are open than `select` can tell apart, as in a server of many requests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    with contextlib.ExitStack() as files:
        for _ in range(1100):
            files.enter_context(Path("/dev/null").open())
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
async def test_a_worker_with_more_than_a_thousand_open_files_connects() -> None:
    async with WorkerAgent(SECRET).serving() as agent, linked(agent.port) as (_, worker):
        await agent.until(lambda: bool(agent.statuses()))
        agent.workers[0].send(wire.PermitVote(handover=9))
        await agent.until(lambda: bool(worker.heard))
        assert len(worker.welcomes) == 1


async def test_what_changes_while_the_agent_is_welcomed_is_told() -> None:
    moved = worker_side.MapMoved(handover=3, map=TABLE.tobytes(), received=2, seconds=0.5)

    class Moving(Parrot):
        def welcomed(self, welcome: worker_side.AgentWelcome) -> None:
            self.link.send(moved)  # from the stepping thread, which does not wait
            super().welcomed(welcome)

    async with WorkerAgent(SECRET).serving() as agent, linked(agent.port, worker=Moving()):
        await agent.until(lambda: bool(agent.statuses()))
        assert [one.received for one in agent.workers[0].moved] == [2]


async def test_a_worker_that_waits_for_an_agent_says_how_long() -> None:
    async with linked(1) as (link, worker):
        await asyncio.sleep(0.1)
        assert link.alone_seconds() >= 0.1
        assert worker.welcomes == []


async def handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *answers: msgspec.Struct
) -> str:
    """Send what an agent would send, and return the reason that the worker gives."""
    reasons = []
    for answer in answers:
        writer.write(framed(answer))
        length = int.from_bytes(await reader.readexactly(4), "big")
        message = msgspec.msgpack.decode(await reader.readexactly(length), type=wire.FromWorker)
        reasons = [message.reason] if isinstance(message, wire.LinkError) else reasons
    return reasons[0]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([wire.AgentHello(protocol=99, nonce=b"n")], "speaks protocol 1, the agent 99"),
        ([wire.DescribeWorker()], "instead of hello"),
        (
            [
                wire.AgentHello(protocol=wire.PROTOCOL, nonce=b"n"),
                wire.AgentWelcome(proof=b"wrong", epoch=1, report_seconds=1, vote_steps=8),
            ],
            "does not know the secret",
        ),
    ],
)
async def test_an_agent_of_another_protocol_or_secret_is_told_so(
    answers: list[msgspec.Struct], words: str
) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            told.put_nowait(await handshake(reader, writer, *answers))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with linked(server.sockets[0].getsockname()[1]) as (_, worker):
        assert words in await asyncio.wait_for(told.get(), 20)
        assert worker.welcomes == []
    server.close()


async def test_a_worker_without_the_secret_is_not_let_in() -> None:
    async with WorkerAgent(SECRET).serving() as agent, linked(agent.port, b"another") as (_, worker):
        await asyncio.sleep(0.5)
        assert agent.workers == {}
        assert worker.welcomes == []
