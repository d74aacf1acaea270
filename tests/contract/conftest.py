"""The implementations under one contract, each with its way to break and to disturb it."""

import asyncio
import itertools
import runpy
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import nats
import nats.js.errors
import pytest

from bus import Bus
from bus.config import BusConfig
from bus.memory import MemoryBroker, MemoryBus
from bus.nats import NatsBus
from bus.nats.link import Link
from bus.protocol.subjects import Subjects

CONFIG = BusConfig(
    request_seconds=1.0,
    record_seconds=2.0,
    reconnect_max_seconds=0.2,
    queue_bytes=4_000_000,
    stream_bytes=8_000_000,
    stream_messages_per_subject=500,
    claims_bytes=100_000,
    blobs_bytes=8_000_000,
    parcels_bytes=8_000_000,
)
"""Small limits: every test has a namespace of its own on one server."""

_numbers = itertools.count()


class House(Protocol):
    """One implementation: clients of one broker, and what a stranger or an accident can do to it."""

    subjects: Subjects
    config: BusConfig

    async def client(self, config: BusConfig = CONFIG) -> Bus: ...

    async def disturb(self, subject: str, raw: bytes) -> None:
        """Put raw bytes on a subject."""
        ...

    async def damage(self, digest: str) -> None:
        """Change the stored content of a blob or parcel."""
        ...

    def lose(self, loses: Callable[[bytes], bool]) -> None:
        """From now on answers of which `loses` is true get lost on their way."""
        ...

    async def parcels(self) -> int:
        """How many messages, or pieces of them, lie in the bucket for passing messages."""
        ...

    async def fail(self) -> None:
        """Take the broker away; returns when every client has noticed."""
        ...

    async def recover(self) -> None:
        """Bring it back with all it had stored; returns when every client is connected."""
        ...

    async def close(self) -> None: ...


class MemoryHouse:
    config = CONFIG

    def __init__(self) -> None:
        self.subjects = Subjects()
        self._broker = MemoryBroker(self.subjects, CONFIG)

    async def client(self, config: BusConfig = CONFIG) -> Bus:
        self._broker.config = config
        return MemoryBus(self._broker)

    async def disturb(self, subject: str, raw: bytes) -> None:
        self._broker.deliver(subject, raw)

    async def damage(self, digest: str) -> None:
        if digest in self._broker.blobs:
            self._broker.blobs[digest] = b"?" + self._broker.blobs[digest][1:]
        else:
            when, content = self._broker.parcels[digest]
            self._broker.parcels[digest] = (when, b"?" + content[1:])

    def lose(self, loses: Callable[[bytes], bool]) -> None:
        self._broker.loses = loses

    async def parcels(self) -> int:
        return len(self._broker.parcels)

    async def fail(self) -> None:
        self._broker.reachable = False

    async def recover(self) -> None:
        self._broker.reachable = True

    async def close(self) -> None:
        """Nothing is left behind."""


class NatsHouse:
    config = CONFIG

    def __init__(self, server: Any, url: str) -> None:
        self.subjects = Subjects(f"contract{next(_numbers)}")
        self.server = server
        self.url = url
        self._clients: list[NatsBus] = []
        self._patch = pytest.MonkeyPatch()

    async def client(self, config: BusConfig = CONFIG) -> Bus:
        bus = await NatsBus.connect(self.url, self.subjects, config)
        self._clients.append(bus)
        return bus

    @asynccontextmanager
    async def stranger(self) -> AsyncIterator[nats.NATS]:
        connection = await nats.connect(self.url)
        try:
            yield connection
        finally:
            await connection.close()

    async def disturb(self, subject: str, raw: bytes) -> None:
        async with self.stranger() as connection:
            await connection.publish(subject, raw)
            for _ in range(2):  # the first ping may overtake the message
                await connection.flush()

    async def damage(self, digest: str) -> None:
        async with self.stranger() as connection:
            js = connection.jetstream()
            for bucket in (f"{self.subjects.namespace}-blobs", f"{self.subjects.namespace}-parcels"):
                store = await js.object_store(bucket)
                try:
                    info = await store.get_info(digest)
                except nats.js.errors.ObjectNotFoundError:
                    continue
                chunks = f"$O.{bucket}.C.{info.nuid}"
                await js.purge_stream(f"OBJ_{bucket}", subject=chunks)
                await js.publish(chunks, b"?" * info.size if info.size < 1_000_000 else b"?")

    def lose(self, loses: Callable[[bytes], bool]) -> None:
        send = Link.send

        async def lossy(link: Link, subject: str, raw: bytes) -> None:
            if not (subject.startswith("_INBOX") and loses(raw)):
                await send(link, subject, raw)

        self._patch.setattr(Link, "send", lossy)

    async def parcels(self) -> int:
        async with self.stranger() as connection:
            return int(
                (
                    await connection.jetstream().stream_info(f"OBJ_{self.subjects.namespace}-parcels")
                ).state.messages
            )

    async def fail(self) -> None:
        self.server.stop(signal.SIGKILL)
        await self._until(False)

    async def recover(self) -> None:
        await asyncio.to_thread(self.server.start)
        await self._until(True)

    async def _until(self, connected: bool) -> None:
        async with asyncio.timeout(10):
            while any(client.connected is not connected for client in self._clients):  # noqa: ASYNC110 the port has no event for it
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        self._patch.undo()
        for client in self._clients:
            await client.close()


@pytest.fixture(params=["memory", "nats"])
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    """Each implementation, undisturbed."""
    built: House = (
        MemoryHouse() if request.param == "memory" else NatsHouse(None, request.getfixturevalue("nats_url"))
    )
    yield built
    await built.close()


@pytest.fixture(params=["memory", "nats"])
async def shaky_house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    """Each implementation, with a broker that may fail."""
    server = None if request.param == "memory" else request.getfixturevalue("nats_server")
    built: House = MemoryHouse() if server is None else NatsHouse(server, server.url)
    yield built
    await built.close()


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that speaks bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny = runpy.run_path(str(ROOT / "tests/engine_adapter/tiny_models.py"))
    tiny["write_tiny"](folder, vocab_size=256, eos_token_id=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "deploy/demo_model/checkpoint" / name, folder)
    return folder
