"""The router inside a Dynamo deployment (`roost router --dynamo`)."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from bus.nats.foreign import ForeignSubjects
from bus.protocol.subjects import KV_EVENTS, KV_METRICS
from deploy.parts.dynamo import planes
from deploy.parts.part_tasks import PartTasks
from engine_adapter.batching.tokenizer_archive import archived
from router.dynamo.config import DynamoConfig
from router.dynamo.follower import WorkerFollower
from router.dynamo.parts import DynamoParts
from router.dynamo.ports import EventFeed, RecordStore
from router.dynamo.runtime import DynamoRuntime, RuntimePlanes
from router.dynamo.serving import DynamoFrontDoor
from router.dynamo.stores import EtcdStore, FileStore
from router.dynamo.workers import RoutedWorker
from router.dynamo.zmq_events import ZmqFeed
from router.service import RouterService
from router.tokenization.tokenizer import BadTokenizer

log = logging.getLogger(__name__)

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_LEAVE_SECONDS = 1.0
"""Time for frontends to notice that the router has left discovery; until then it accepts requests."""


class NatsFeed:
    """See `router.dynamo.ports.EventFeed`: events over NATS, whose subjects need no addresses."""

    def __init__(self, subjects: ForeignSubjects) -> None:
        self._subjects = subjects

    def follow(self, addresses: set[str]) -> None:
        """Do nothing."""

    async def receive(self) -> list[bytes]:
        """Return the next message as its only frame."""
        return [await self._subjects.receive()]


class RouterInDynamo:
    """Way of a router into Dynamo: opened before the router listens, left before it stops."""

    def __init__(
        self,
        service: RouterService,
        config: DynamoConfig,
        runtime: DynamoRuntime,
        store: RecordStore,
        feed: EventFeed,
    ) -> None:
        self._config = config
        self._service = service
        self._runtime = runtime
        self._follower = WorkerFollower(service, config, store, feed, runtime)
        self._door = DynamoFrontDoor(DynamoParts(service, config, self._follower, runtime))

    @classmethod
    async def open(
        cls, tasks: PartTasks, service: RouterService, config: DynamoConfig, environment: Mapping[str, str]
    ) -> "RouterInDynamo":
        """Connect to Dynamo's runtime, and start to follow its workers. Raises OSError, ValueError or
        BusError when it cannot be reached."""
        chosen = planes(environment)
        store, feed = (
            await _store(chosen.discovery, environment),
            await _feed(tasks, chosen.events, config, environment),
        )
        runtime = await DynamoRuntime.open(RuntimePlanes(chosen.discovery, chosen.requests, chosen.events))
        tasks.callback(runtime.shutdown)
        side = cls(service, config, runtime, store, feed)
        await tasks.start(side._follower.run(), "follow Dynamo's workers")
        tasks.push_async_callback(side._drained)
        return side

    async def serve(self) -> None:
        """Serve frontends once there is a worker, until cancelled. OSError when Dynamo's runtime ends, or the
        model's files are not here."""
        name, found = self._config.own_endpoint, self._follower.found
        log.info("waiting for workers in Dynamo's namespace %s", self._config.namespace)
        await found.wait()
        worker = self._follower.offered(self._config.model)
        while worker is None:
            await asyncio.sleep(self._config.poll_seconds)
            worker = self._follower.offered(self._config.model)
        await self._load_tokenizer(worker)
        await self._runtime.prepare(worker)
        serving = asyncio.ensure_future(self._runtime.serve(name, self._door.handle))
        await self._runtime.offer(name, worker.card, worker.joined.model, worker.card.surfaces)
        log.info(
            "Dynamo's frontends with --namespace %s find %s at %s",
            name.namespace,
            worker.joined.model,
            name.path,
        )
        await serving
        raise OSError("Dynamo's runtime ended, e.g. because it lost its lease in discovery")

    async def _load_tokenizer(self, worker: RoutedWorker) -> None:
        """Load the tokenizer from the folder that a worker's card names, for callers of /v1/route who send
        text. Without it the router serves frontends all the same. An engine of Roost's fleet publishes its
        tokenizer on the bus."""
        if worker.in_fleet:
            return
        folder, digest = Path(worker.card.source_path), worker.joined.tokenizer
        try:
            files = {name: (folder / name).read_bytes() for name in _TOKENIZER if (folder / name).is_file()}
            if digest is not None:
                await self._service.tokenizers.add(digest, archived(files))
        except (OSError, BadTokenizer) as error:
            log.warning("/v1/route takes no text: the tokenizer in %s cannot be used: %s", folder, error)

    async def leave(self) -> None:
        """Leave discovery, so that frontends send nothing more, and give them time to notice."""
        await self._runtime.withdraw()
        await asyncio.sleep(_LEAVE_SECONDS)

    async def _drained(self) -> None:
        """Wait until the open requests are answered, for at most `drain_seconds`."""
        try:
            async with asyncio.timeout(self._service.config.drain_seconds):
                await self._door.drained()
        except TimeoutError:
            log.warning("requests of Dynamo's frontends were still open after the drain, and break off")
        await self._runtime.withdraw_model()


async def _store(discovery: str, environment: Mapping[str, str]) -> RecordStore:
    if discovery == "file":
        folder = environment.get("DYN_FILE_KV")
        if not folder:
            raise ValueError("DYN_FILE_KV must name the folder that Dynamo's processes share")
        return FileStore(Path(folder))
    if discovery == "etcd":
        return EtcdStore(environment.get("ETCD_ENDPOINTS", "http://127.0.0.1:2379").split(",")[0])
    raise ValueError(f"DYN_DISCOVERY_BACKEND={discovery}: the router reads file and etcd")


async def _feed(
    tasks: PartTasks, events: str, config: DynamoConfig, environment: Mapping[str, str]
) -> EventFeed:
    if events == "zmq":
        return await tasks.enter_async_context(ZmqFeed())
    if events == "nats":
        scope = f"namespace.{config.namespace}.component.*.endpoint.*"
        subjects = await ForeignSubjects.open(
            environment.get("NATS_SERVER", "nats://127.0.0.1:4222"),
            f"{scope}.{KV_EVENTS}",
            f"{scope}.{KV_METRICS}",
        )
        tasks.push_async_callback(subjects.close)
        return NatsFeed(subjects)
    raise ValueError(f"DYN_EVENT_PLANE={events}: the router reads zmq and nats")
