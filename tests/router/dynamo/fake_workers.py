"""Workers of Dynamo without Dynamo: discovery, events and calls in this process, with scripted tokens."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from fleet.completions import ApiError
from router.config import RouterConfig
from router.dynamo.config import DynamoConfig
from router.dynamo.follower import WorkerFollower
from router.dynamo.parts import DynamoParts
from router.dynamo.serving import DynamoFrontDoor
from router.dynamo.workers import RoutedWorker
from router.health.attempt_failures import AttemptFailure
from router.service import RouterService
from router.upstream.rank_client import UpstreamFailed
from tests.router.dynamo.recorded import RECORDED
from tests.router.router_fixture import running, until

SETTINGS = DynamoConfig(namespace="dynamo", poll_seconds=0.01)


def expected(prompt: list[int], count: int) -> list[int]:
    """What an unbroken answer has: each token depends on all before it."""
    ids = list(prompt)
    for _ in range(count):
        ids.append((sum(ids) * 31 + len(ids)) % 251)
    return ids[len(prompt) :]


HANDLE = {"kv_transfer_params": {"remote_block_ids": [3, 1, 2], "remote_engine_id": "x"}}
"""What fake prefill workers say of the KV."""


def records_of(
    instance: int, *, ranks: int = 1, limits: dict[str, Any] | None = None, **card: Any
) -> dict[str, bytes]:
    """Discovery's records of one worker: an endpoint and a card. limits: of its `runtime_config`."""
    own = {"instance_id": instance}
    endpoint = next(
        one for one in RECORDED["records"] if one.get("endpoint") == "generate" and one["type"] == "Endpoint"
    )
    model = next(one for one in RECORDED["records"] if one["type"] == "Model")
    config = model["card_json"]["runtime_config"] | {"data_parallel_size": ranks} | (limits or {})
    stated = model["card_json"] | {"runtime_config": config} | card
    return {
        f"instances/{instance}": json.dumps(endpoint | own).encode(),
        f"mdc/{instance}": json.dumps(model | own | {"card_json": stated}).encode(),
    }


@dataclass
class FakeContext:
    """Context of a request, as the frontend sends it."""

    name: str = "request-1"
    headers: dict[str, str] | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    stopped: bool = False

    def id(self) -> str:
        return self.name

    def is_stopped(self) -> bool:
        return self.stopped

    def trace_headers(self) -> dict[str, str] | None:
        return self.headers


class FakeStore:
    """Discovery. State: records by key, and when they were renewed."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.now = 2.0
        self.readings = 0
        self.stale: set[int] = set()
        """instances that no longer renew their records"""

    async def read(self) -> dict[str, tuple[float, bytes]]:
        self.readings += 1
        stale = tuple(f"/{one}" for one in self.stale)
        return {
            key: (0.0 if key.endswith(stale) else self.now, record) for key, record in self.records.items()
        }


class FakeFeed:
    """Event plane: messages put into `messages` arrive."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.addresses: set[str] = set()

    def follow(self, addresses: set[str]) -> None:
        self.addresses = addresses

    async def receive(self) -> list[bytes]:
        return await self.messages.get()


@dataclass
class Served:
    """One call of a worker."""

    instance: int
    body: dict[str, Any]
    metadata: dict[str, str]


class FakeCalls:
    """Request plane. `faults`: called with each item number of each call, may raise; `extra`: added to items."""

    def __init__(self) -> None:
        self.served: list[Served] = []
        self.down: set[int] = set()
        self.fault: Callable[[int, int], None] = lambda call, item: None
        self.extra: dict[str, Any] = {}
        self.prefilled: dict[str, Any] = {"disaggregated_params": HANDLE}
        """added to the item of a prefill worker"""
        self.after_prefill: asyncio.Event | None = None
        """the answers of prefill workers end when it is set"""
        self.dumped = b"[]"
        self.dumps = 0
        self.hold: asyncio.Event | None = None

    async def call(self, worker: RoutedWorker, body: dict[str, Any], context: Any) -> AsyncIterator[Any]:
        if worker.instance_id in self.down:
            raise UpstreamFailed(AttemptFailure.CONNECT, "nobody listens")
        self.served.append(Served(worker.instance_id, body, dict(context.metadata)))
        items = self._prefill if worker.prefills else self._items
        return items(len(self.served), body)

    async def _prefill(self, call: int, body: dict[str, Any]) -> AsyncIterator[Any]:
        assert body["stop_conditions"]["max_tokens"] == 1
        self.fault(call, 0)
        yield {"token_ids": [7], "finish_reason": "length"} | self.prefilled
        if self.after_prefill is not None:
            await self.after_prefill.wait()

    async def _items(self, call: int, body: dict[str, Any]) -> AsyncIterator[Any]:
        count = body["stop_conditions"]["max_tokens"]
        for item, token in enumerate(expected(body["token_ids"], count)):
            self.fault(call, item)
            if self.hold is not None:
                await self.hold.wait()
            last = item == count - 1
            yield {"token_ids": [token], "finish_reason": "length" if last else None} | self.extra
        self.fault(call, count)

    def refusal(self, error: ApiError) -> Exception:
        return error

    async def dump(self, worker: RoutedWorker) -> str:
        self.dumps += 1
        return self.dumped.decode()


@dataclass
class DynamoFleet:
    """A router between a frontend, which the test plays, and fake workers."""

    service: RouterService
    store: FakeStore
    feed: FakeFeed
    calls: FakeCalls
    follower: WorkerFollower
    door: DynamoFrontDoor
    bus: MemoryBus
    subjects: Subjects

    async def join(self, *instances: int, **more: Any) -> None:
        for instance in instances:
            self.store.records |= records_of(instance, **more)
        await until(lambda: all(one in self.follower.workers for one in instances))

    async def polled(self) -> None:
        """Wait until discovery has been read once more, from begin to end."""
        begun = self.store.readings
        await until(lambda: self.store.readings >= begun + 2)

    async def ask(
        self, tokens: list[int], count: int = 8, context: FakeContext | None = None, **more: Any
    ) -> list[Any]:
        """The items of a whole answer."""
        body = {"model": "tiny", "token_ids": tokens, "stop_conditions": {"max_tokens": count}} | more
        return [item async for item in self.door.handle(body, context or FakeContext())]


def ids_of(items: list[Any]) -> list[int]:
    return [one for item in items for one in item["token_ids"]]


def envelope(
    worker: int, sequence: int, content: Any, topic: str = "kv-events", publisher: int = 77
) -> list[bytes]:
    """A message as it comes from NATS."""
    fields = {
        "publisher_id": publisher,
        "sequence": sequence,
        "published_at": 0,
        "topic": topic,
        "payload": msgspec.msgpack.encode(content),
    }
    return [msgspec.msgpack.encode(fields)]


@contextlib.asynccontextmanager
async def dynamo_fleet(
    *instances: int,
    config: RouterConfig | None = None,
    settings: DynamoConfig = SETTINGS,
    calls: FakeCalls | None = None,
    **more: Any,
) -> AsyncIterator[DynamoFleet]:
    """A router with these workers, already discovered. calls: to their endpoints."""
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    service = RouterService(bus, broker.subjects, config or RouterConfig())
    store, feed, calls = FakeStore(), FakeFeed(), calls or FakeCalls()
    follower = WorkerFollower(service, settings, store, feed, calls)
    fleet = DynamoFleet(
        service,
        store,
        feed,
        calls,
        follower,
        DynamoFrontDoor(DynamoParts(service, settings, follower, calls)),
        bus,
        broker.subjects,
    )
    async with running(service), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(follower.run())
        try:
            await fleet.join(*instances, **more)
            yield fleet
        finally:
            task.cancel()
    await bus.close()
