"""The view of Dynamo's workers, kept fresh: membership from discovery, blocks and loads from events."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from bus import BusError, Received
from fleet.facts.dynamo_kv import KvMetrics, RoutedKvEvent
from fleet.requests.engines import KvSnapshot, KvSnapshotRequested
from router.dynamo.config import DynamoConfig
from router.dynamo.envelopes import PublishedEvents, decode_nats, decode_zmq
from router.dynamo.ports import EventFeed, RecordStore, WorkerCalls
from router.dynamo.unbooked_load import UnbookedLoad, UsualRequest
from router.dynamo.wire.discovery import Record, decode_record
from router.dynamo.wire.malformed import Malformed
from router.dynamo.wire.recovery import Blocks, decode_dump
from router.dynamo.workers import (
    Roles,
    RoutedWorker,
    Workers,
    engine_name,
    roles_of,
    tokenizer_digest,
    workers_of,
)
from router.fleet_state.engine_state import EngineStatus
from router.fleet_state.target_table import RankKey, TargetTable
from router.service import RouterService

log = logging.getLogger(__name__)

_DUMP_DELAY_SECONDS = 0.1
"""Dynamo's own index receives the same events; by then it has applied those that have arrived here."""
_SUBJECT = "dynamo"
_NO_ROLES = Roles()


_NOT_HERE = "it does not serve in Dynamo's namespace {}"
_ABSURD_BLOCKS = 2**40
_NOT_HTTP = "it is reached over Dynamo alone"


class _Reach(NamedTuple):
    """Ways to the targets of a table."""

    table: TargetTable
    elsewhere: Mapping[RankKey, str]
    without_http: Mapping[RankKey, str]


class _Dump(NamedTuple):
    at: float
    blocks: Blocks


class WorkerFollower:
    """State: workers by instance id, and by target. `refused` counts records and messages that could not be
    read.

    A worker that serves ranks of an engine of Roost's fleet adds nothing to the view: engine, blocks, loads
    and signs of life arrive on Roost's own bus. Until that engine has joined there, and once it is forgotten,
    the worker is an engine of its own.
    """

    def __init__(
        self,
        service: RouterService,
        config: DynamoConfig,
        store: RecordStore,
        feed: EventFeed,
        calls: WorkerCalls,
    ) -> None:
        """Raise ValueError when the service has no bus (`bus.memory` will do) or the config no namespace."""
        if service.fleet_subscriber is None or config.namespace is None:
            raise ValueError("a router inside Dynamo needs a bus, if only one in memory, and a namespace")
        self.workers: dict[int, RoutedWorker] = {}
        self.serving: dict[RankKey, RoutedWorker] = {}
        """by target, the worker that serves it"""
        self.refused: Counter[str] = Counter()
        self.found = asyncio.Event()
        """set once there is a worker"""
        self._service = service
        self._subscriber = service.fleet_subscriber
        self._config = config
        self._namespace = config.namespace
        self._store = store
        self._feed = feed
        self._calls = calls
        self._records: dict[str, tuple[bytes, Record | None]] = {}
        self._discovered = Workers({}, {}, {})
        """what the records say"""
        self._owners: dict[str, int] = {}
        """by record, the instance that renews it"""
        self._unreachable_since: dict[int, float] = {}
        """by worker, the renewal of its record at which a connection to it failed"""
        self._publishers: dict[tuple[int, int], int] = {}
        """by rank, publisher of its last message"""
        self._dump: dict[str, _Dump] = {}
        self._dumping = asyncio.Lock()
        self._warned: set[int] = set()
        self._unbooked = UnbookedLoad(service.scheduler.reservations, service.config.stale_load_seconds)
        self._reach: _Reach | None = None
        service.other_runtime = self
        self._roles: dict[str, Roles] = {}

    def roles(self, model: str) -> Roles:
        """Return the workers of a model by their roles."""
        return self._roles.get(model, _NO_ROLES)

    def offered(self, model: str | None) -> RoutedWorker | None:
        """Return a worker that answers requests for a model (None: for any), the longest present one; None:
        there is none.
        """
        answering = (one for one in self.workers.values() if not one.prefills)
        return next((one for one in answering if model in (None, one.joined.model)), None)

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="follows Dynamo's discovery")
            tasks.create_task(self._listen(), name="listens to the events of Dynamo's workers")

    async def _follow(self) -> None:
        while True:
            try:
                self.update(await self._store.read())
            except OSError as error:
                log.warning("Dynamo's discovery cannot be read at present: %s", error)
            await asyncio.sleep(self._config.poll_seconds)

    async def _listen(self) -> None:
        while True:
            self.take(await self._feed.receive())

    def update(self, stored: dict[str, tuple[float, bytes]]) -> None:
        """Apply the content of discovery: records by key, with the time of their last renewal. That is all
        that most readings change.
        """
        if self._decode(stored):
            self._discover()
        renewed: dict[int, float] = {}
        for key, instance in self._owners.items():
            renewed[instance] = max(renewed.get(instance, 0.0), stored[key][0])
        for worker in self._resolved(self._discovered.serving.values()):
            self._present(worker, renewed.get(worker.instance_id, 0.0))
        self._serve(renewed)
        self._estimate_load()

    def _discover(self) -> None:
        """Read the changed records."""
        records = {key: record for key, (_, record) in self._records.items() if record is not None}
        self._owners = {
            key: instance
            for key, record in records.items()
            if (instance := getattr(record, "instance_id", None)) is not None
        }
        self._discovered = found = workers_of(
            records.values(), self._namespace, self._config.own_endpoint, self._config.shape
        )
        for instance, reason in found.unusable.items():
            self._warn(instance, reason)
        for instance in self.workers.keys() - found.serving.keys():
            self._gone(instance)
        self._feed.follow({address for one in found.channels.values() if (address := one.address)})

    def _warn(self, instance: int, reason: str) -> None:
        """Log once why a worker is not used."""
        if instance not in self._warned:
            self._warned.add(instance)
            log.warning("a worker of Dynamo is not used: %s", reason)

    def _resolved(self, found: Iterable[RoutedWorker]) -> list[RoutedWorker]:
        """Return the workers with the engines whose ranks they serve. Those with the same tokenizer as an
        engine of Roost's fleet get its digest, so that they serve the same requests.
        """
        workers = [self._of_fleet(worker) for worker in found]
        digests = {tokenizer_digest(one.card): one.joined.tokenizer for one in workers if one.in_fleet}
        return [one if one.in_fleet else _with_tokenizer(one, digests) for one in workers]

    def _of_fleet(self, worker: RoutedWorker) -> RoutedWorker:
        named = worker.card.runtime_config.fleet_engine
        state = None if named is None else self._service.view.engine(named.worker_id)
        return worker if state is None else worker.of_fleet(state.joined)

    def _serve(self, renewed: Mapping[int, float]) -> None:
        """Update `serving`. Of two workers with the same rank, the one that renewed its record last serves
        it: the other is a connection that was lost.
        """
        by_age = sorted(self.workers.values(), key=lambda one: renewed.get(one.instance_id, 0.0))
        serving = {key: worker for worker in by_age for key in worker.keys}
        if serving != self.serving:
            self.serving, self._reach = serving, None

    def elsewhere(self, table: TargetTable) -> Mapping[RankKey, str]:
        """Return the targets of a table that no worker here serves, with the reason: engines of Roost's fleet
        that are not in Dynamo.
        """
        return self._reached(table).elsewhere

    def without_http(self, table: TargetTable) -> Mapping[RankKey, str]:
        """See `router.context.OtherRuntime`: workers that are no members of Roost's fleet."""
        return self._reached(table).without_http

    def _reached(self, table: TargetTable) -> _Reach:
        if self._reach is None or self._reach.table is not table:
            here = _NOT_HERE.format(self._namespace)
            self._reach = _Reach(
                table,
                {one.key: here for one in table.targets if one.key not in self.serving},
                {one.key: _NOT_HTTP for one in table.targets if not one.url.startswith("http")},
            )
        return self._reach

    def headers(self, target: RankKey) -> Mapping[str, str]:
        """See `router.context.OtherRuntime`."""
        worker = self.serving.get(target)
        if worker is None:
            return {}
        dp_rank = worker.dp_rank(target[1])
        named = {"x-dynamo-worker-instance-id": str(worker.instance_id)}
        return named if dp_rank is None else {**named, "x-dynamo-dp-rank": str(dp_rank)}

    def _decode(self, stored: dict[str, tuple[float, bytes]]) -> bool:
        """Decode what has changed. False: nothing has."""
        gone = self._records.keys() - stored.keys()
        for key in gone:
            del self._records[key]
        changed = bool(gone)
        for key, (_, content) in stored.items():
            known = self._records.get(key)
            if known is None or known[0] != content:
                self._records[key] = content, self._decoded(key, content)
                changed = True
        return changed

    def _decoded(self, key: str, content: bytes) -> Record | None:
        try:
            return decode_record(content)
        except Malformed as error:
            self.refused["record"] += 1
            log.warning("a record of Dynamo's discovery is ignored: %s: %s", key, error)
            return None

    def _present(self, worker: RoutedWorker, renewed: float) -> None:
        """Add a worker, or record that it is alive."""
        if self.workers.get(worker.instance_id) is not worker and not self._admit(worker):
            return
        if not worker.in_fleet and self._may_live(worker.instance_id, renewed):
            self._service.view.sign_of_life(worker.instance_id, self._service.clock())
            self._service.wait_queue.wake()

    def _admit(self, worker: RoutedWorker) -> bool:
        """Add a worker, or replace what was known of it. False: it cannot be used."""
        instance, how = worker.instance_id, "joined"
        known = self.workers.get(instance)
        if known is not None and known.keys != worker.keys:
            self._gone(instance)
            known = None
        if worker.in_fleet:
            how = f"serves engine {worker.joined.engine} of this fleet"
        elif known is None or known.joined != worker.joined:
            try:
                self._subscriber.joined(worker.joined, self._snapshot)
            except ValueError as error:
                self._warn(instance, str(error))
                return False
        self.workers[instance] = worker
        self._roles = roles_of(self.workers.values())
        if known is None:
            name = engine_name(worker.endpoint, instance)
            log.info("worker %s of Dynamo %s, with %d ranks", name, how, worker.ranks)
            self.found.set()
        return True

    def _may_live(self, instance: int, renewed: float) -> bool:
        """Return True unless a connection failed since the worker last renewed its record: records of a dead
        worker stay until its lease ends.
        """
        state = self._service.view.engine(instance)
        if state is not None and state.status is EngineStatus.UNREACHABLE:
            return renewed > self._unreachable_since.setdefault(instance, renewed)
        if instance in self._unreachable_since and renewed <= self._unreachable_since[instance]:
            return False
        self._unreachable_since.pop(instance, None)
        return True

    def _gone(self, instance: int) -> None:
        worker = self.workers.pop(instance)
        self._roles = roles_of(self.workers.values())
        self._unreachable_since.pop(instance, None)
        for rank in range(worker.ranks):
            self._publishers.pop((instance, rank), None)
        log.info("worker %s of Dynamo has left", engine_name(worker.endpoint, instance))
        if not worker.in_fleet:
            self._service.view.leave(instance)
            self._service.forget_worker(instance)

    def take(self, frames: list[bytes]) -> None:
        """Apply one message of a worker. What cannot be read is counted."""
        try:
            found = decode_nats(frames[0]) if len(frames) == 1 else decode_zmq(frames)
        except Malformed as error:
            self.refused["message"] += 1
            log.debug("a message of Dynamo's workers is ignored: %s", error)
            return
        if found is None:
            return
        if isinstance(found.content, KvMetrics):
            self._take_load(found.content)
        elif found.content:
            self._take_blocks(found, found.content)

    def _take_load(self, load: KvMetrics) -> None:
        worker, used = self.workers.get(load.worker_id), load.kv_used_blocks
        if worker is None or worker.in_fleet or used is None or not 0 <= used < _ABSURD_BLOCKS:
            return
        rank = load.worker_id, load.dp_rank - worker.first_rank
        self._unbooked.reported(rank, used, worker.joined.block_size, self._service.clock())

    def _estimate_load(self) -> None:
        """Book what other routers have sent to the workers."""
        config = self._service.config
        usual = UsualRequest(
            tokens=2 * config.expected_output_tokens,
            steps_left=self._service.scheduler.expected_steps_left,
            at_most=config.max_requests_per_rank // 2,
        )
        self._unbooked.refresh(usual, self._service.clock())

    def _take_blocks(self, found: PublishedEvents, events: tuple[RoutedKvEvent, ...]) -> None:
        """Hand a message to the KV feeds, with ranks counted from the worker's first."""
        worker = self.workers.get(events[0].worker_id)
        if worker is None or worker.in_fleet:
            # of another namespace, or not discovered yet: its blocks are recovered when it joins
            return
        if worker.first_rank:
            events = tuple(_from_rank(one, worker.first_rank) for one in events)
        rank = worker.instance_id, events[0].event.dp_rank
        self._publishers[rank] = found.publisher_id
        self._subscriber.kv.receive(
            Received(_SUBJECT, found.publisher_id, found.sequence, found.published_at, events)
        )

    async def _snapshot(self, request: KvSnapshotRequested) -> KvSnapshot:
        """Return the blocks of a rank from Dynamo's own index, which recovers them from the workers.

        Messages that the dump already contains are applied again after it, which changes nothing.
        """
        worker = self.workers.get(request.worker_id)
        if worker is None:
            raise BusError(f"worker {request.worker_id} has left")
        rank = request.worker_id, request.rank
        asked = self._service.clock()
        await asyncio.sleep(_DUMP_DELAY_SECONDS)
        blocks = await self._blocks(worker, asked)
        return KvSnapshot(
            worker_id=rank[0],
            rank=rank[1],
            publisher_id=self._publishers.get(rank, 0),
            sequence=-1 if request.after is None else request.after,
            events=blocks.get((worker.instance_id, worker.first_rank + request.rank), ()),
        )

    async def _blocks(self, worker: RoutedWorker, asked: float) -> Blocks:
        """Return the blocks of all ranks of an endpoint, as they were after `asked`. BusError when they are
        not known.
        """
        path = worker.endpoint.path
        async with self._dumping:
            known = self._dump.get(path)
            if known is None or known.at < asked:
                began = self._service.clock()
                try:
                    self._dump[path] = known = _Dump(began, decode_dump(await self._calls.dump(worker)))
                except (OSError, Malformed) as error:
                    raise BusError(f"Dynamo's index of {path} cannot be read: {error}") from error
        return known.blocks


def _with_tokenizer(worker: RoutedWorker, digests: Mapping[str, str | None]) -> RoutedWorker:
    """Return the worker with the digest that an engine of the fleet states of its tokenizer. digests: by
    that of the card.
    """
    tokenizer = digests.get(worker.joined.tokenizer or "")
    if tokenizer is None:
        return worker
    return worker._replace(joined=msgspec.structs.replace(worker.joined, tokenizer=tokenizer))


def _from_rank(one: RoutedKvEvent, first: int) -> RoutedKvEvent:
    event = msgspec.structs.replace(one.event, dp_rank=one.event.dp_rank - first)
    return msgspec.structs.replace(one, event=event)
