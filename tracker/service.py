"""Tracker service: receives reports, request outcomes and memberships; publishes popularity, demand and
prediction tables.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from bus import Bus, BusError, Message, Received, Subscription
from bus.joins import verified_members
from bus.protocol.codec import LARGE
from bus.protocol.sequence import MessageOrder, Sequences
from bus.protocol.subjects import Subjects
from fleet.event import PROTOCOL
from fleet.facts.activity import CountsImported, ExpertsActivated, RequestsFinished, RequestsProfiled
from fleet.facts.demand import (
    ClustersPublished,
    DemandPublished,
    KeyedRows,
    PopularityShifted,
    ProfilePublished,
    TablesPublished,
    TrackerHeartbeat,
)
from fleet.facts.engines import EngineHeartbeat, EngineJoined, EngineLeft
from fleet.facts.placements import PlacementCommitted
from fleet.layout import Layout
from fleet.placement import PlacementRecord
from fleet.requests.demand import DescribeClusters, DescribePopularity, DescribeProfile, DescribeTables
from fleet.requests.refusal import RequestRefused
from tracker.activity.local_supply import LocalSupply
from tracker.activity.report_validation import InvalidReport, ReportFault
from tracker.clustering.online_clusters import OnlineClusters
from tracker.clustering.refit import Refit
from tracker.config import TrackerConfig
from tracker.metrics import TrackerMetrics
from tracker.model_store import AT_ONCE, ModelStore
from tracker.prediction.learners import LearntTables
from tracker.state_file import read, write
from tracker.tracing import ShiftTracing

logger = logging.getLogger(__name__)

WARN_SECONDS = 60.0
"""Minimum interval between two log lines about the same reason for rejection."""
_BEAT_SECONDS = 1.0
STOP_SECONDS = 5.0
"""Time limit for writing the state at shutdown."""
SNAPSHOT_SECONDS = 5.0
"""A model's snapshot answers all requests within this time, until the next version."""


def announced(tables: TablesPublished) -> TablesPublished:
    """Return the announcement of new tables: deltas and small snapshots unchanged, large snapshots without
    rows.

    A large snapshot is announced as a delta to itself. A router without this version detects a gap and
    requests the snapshot, which is sent in parts.
    """
    keyed = (tables.blocks, tables.sessions, tables.tenants)
    size = (
        len(tables.token_rows)
        + len(tables.token_ratios)
        + sum(len(part.keys) + len(part.rows) for part in keyed)
    )
    if tables.base is not None or size <= LARGE // 2:
        return tables
    nothing = {
        "token_rows": b"",
        "token_ratios": b"",
        "blocks": KeyedRows(),
        "sessions": KeyedRows(),
        "tenants": KeyedRows(),
    }
    return msgspec.structs.replace(tables, base=tables.version, **nothing)


class TrackerService:
    """The service. `run` it once; it runs until cancelled.

    `ready` is set when it receives messages and knows all recorded engines. clock: monotonic seconds, the
    only time used for decay. wall_clock: measures the duration of restarts. learning, fitting: see
    `ModelStore`.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        config: TrackerConfig,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        learning: Executor | None = None,
        fitting: Executor | None = None,
    ) -> None:
        self.ready = asyncio.Event()
        self.metrics = TrackerMetrics()
        self._bus = bus
        self._subjects = subjects
        self._config = config
        self._state_file = None if config.state_file is None else Path(config.state_file)
        self._wall_clock = wall_clock
        self._tracing = ShiftTracing()
        # Microseconds: versions of a restarted tracker continue above all earlier versions.
        self._store = ModelStore(config, clock, time.time_ns() // 1000, learning, fitting)
        self._sequences = Sequences(limit=4 * config.max_ranks)
        self._learnt: dict[str, LearntTables] = {}
        self._snapshots: dict[str, TablesPublished] = {}
        """published snapshots by model, cached while routers request them"""
        self._versions: dict[str, int] = {}
        """version of the last published tables, by model"""
        self._warned: dict[ReportFault, float] = {}
        """time of the last log line about a rejection"""
        self.reports = 0
        """accepted so far"""
        self._measured = 0
        """part of `reports` already in the metrics"""
        self._publishers = {
            ProfilePublished: bus.publisher(subjects.profiles),
            DemandPublished: bus.publisher(subjects.demand),
            ClustersPublished: bus.publisher(subjects.clusters),
            TablesPublished: bus.publisher(subjects.tables),
            PopularityShifted: bus.publisher(subjects.shifts),
        }
        self._heartbeat = bus.publisher(subjects.tracker_heartbeat)

    async def run(self) -> None:
        """Receive, learn, publish and answer. BusError if the bus is unreachable at the start."""
        subjects = self._subjects
        async with (
            self._persisted(),
            self._bus.subscribe(subjects.experts(), subjects.heartbeats()) as telemetry,
            self._bus.subscribe(
                subjects.requests_profiled(),
                subjects.requests_read,
                subjects.requests_finished,
                subjects.imports,
            ) as requests,
            self._bus.serve(subjects.describe_profile, self.describe),
        ):
            for stored in (subjects.membership(), subjects.placements()):
                async for received in self._counted(stored, follow=False):
                    await self._receive_stored(received)
            await self._store.follow()
            self.ready.set()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(telemetry), name="receives reports and heartbeats")
                tasks.create_task(self._listen_to_requests(requests), name="receives requests and imports")
                tasks.create_task(self._follow(subjects.membership()), name="follows memberships")
                tasks.create_task(self._follow(subjects.placements()), name="follows placements")
                tasks.create_task(
                    self._publish(telemetry, requests), name="publishes profiles, demands and shifts"
                )
                tasks.create_task(self._beat(), name="publishes heartbeats")
                tasks.create_task(self._publish_learnt(), name="publishes clusters and tables")
                tasks.create_task(self._fit(), name="refits clusters")
                if self._state_file is not None:
                    tasks.create_task(self._save_regularly(self._state_file), name="writes the state")

    # Receiving

    async def _listen(self, telemetry: Subscription) -> None:
        async for received in telemetry:
            if self._names_own_worker(received):
                self._receive(received)

    def _names_own_worker(self, received: Received) -> bool:
        """Return False for a message that names the worker of an engine other than its own.

        Only the engine's name is authenticated (by subject and by claim).
        """
        named, known = (
            getattr(received.message, "engine", None),
            self._store.activity.engine_of(getattr(received.message, "worker_id", -1)),
        )
        if named in (None, known) or known is None:
            return True
        self._refuse(
            ReportFault.SPEAKER,
            f"a {type(received.message).__name__} of engine {named!r}: its worker is engine {known!r}",
        )
        return False

    async def _listen_to_requests(self, requests: Subscription) -> None:
        async for received in requests:
            if self._names_own_worker(received) and self._is_fresh(received):
                await self._receive_request(received)

    async def _receive_request(self, received: Received) -> None:
        learners, now = self._store.learners, self._store.now()
        match received.message:
            case RequestsProfiled() as profiled:
                self.metrics.profiled.inc(len(profiled.requests))
                refused = await self._store.learning(learners.profiled, profiled, now)
            case RequestsFinished() as finished:
                self.metrics.finished.inc(len(finished.requests))
                refused = await self._store.learning(learners.finished, finished, now)
            case _:
                return self._receive(received)
        for reason, count in refused.items():
            self.metrics.rejected(reason, count)
            logger.debug(
                "%d requests of a %s cannot be used: %s", count, type(received.message).__name__, reason
            )

    async def _follow(self, subject: str) -> None:
        async for received in self._counted(subject, follow=True):
            await self._receive_stored(received)

    def _counted(self, subject: str, *, follow: bool) -> AsyncIterator[Received]:
        """Return stored messages; of joins only those that hold their engine's name."""
        stored = self._bus.replay(subject, latest=True, follow=follow)
        return (
            verified_members(self._bus, self._subjects, stored)
            if subject == self._subjects.membership()
            else stored
        )

    async def _receive_stored(self, received: Received) -> None:
        if not self._names_own_worker(received):
            return
        match received.message:
            case PlacementCommitted(worker_id=worker_id, served=placement, layout=layout):
                await self._place(worker_id, placement, layout)
            case EngineJoined(worker_id=worker_id, served=PlacementRecord() as placement, layout=layout):
                self._receive(received)
                await self._place(worker_id, placement, layout)
            case _:
                self._receive(received)

    async def _place(self, worker_id: int, placement: PlacementRecord, layout: Layout | None) -> None:
        try:
            self._store.activity.placed(worker_id, await self._store.aside(LocalSupply.of, placement, layout))
        except InvalidReport as refusal:
            self._refuse(refusal.fault, f"a placement of worker {worker_id}: {refusal}")
        except ValueError as error:
            self._refuse(ReportFault.PLACEMENT, f"a placement of worker {worker_id}: {error}")

    def _receive(self, received: Received) -> None:
        """Process one event. Invalid events are counted and never stop the subscription."""
        activity, now = self._store.activity, self._store.now()
        try:
            match received.message:
                case ExpertsActivated() as report:
                    self._report(received, report, now)
                case EngineHeartbeat() as beat:
                    activity.beat(beat.worker_id, now)
                case EngineJoined() as joined:
                    activity.joined(joined, now)
                case EngineLeft() as left:
                    activity.left(left.worker_id)
                case CountsImported() as imported:
                    (
                        self.metrics.imports if activity.imported(imported, now) else self.metrics.duplicates
                    ).inc()
                case other:
                    self.metrics.rejected("kind")
                    logger.debug("a %s on %s means nothing here", type(other).__name__, received.subject)
        except InvalidReport as refusal:
            self._refuse(refusal.fault, f"a {type(received.message).__name__}: {refusal}")

    def _refuse(self, fault: ReportFault, what: str) -> None:
        """Count a rejection, and log it at most once per interval."""
        self.metrics.rejected(fault.value)
        now = self._store.now()
        if now - self._warned.get(fault, -WARN_SECONDS) >= WARN_SECONDS:
            self._warned[fault] = now
            logger.warning("refused %s; others of this kind are only counted for %g s", what, WARN_SECONDS)

    def _report(self, received: Received, report: ExpertsActivated, now: float) -> None:
        if self._is_fresh(received):
            seen = self._store.activity.report(report, now, received.publisher_id, received.sequence)
            self._store.observe(seen, now)
            self.reports += 1

    def _is_fresh(self, received: Received) -> bool:
        """Return True if the message is received for the first time."""
        verdict = self._sequences.observe(received.publisher_id, received.sequence)
        if not verdict.fresh:
            self.metrics.duplicates.inc()
        elif verdict.order is MessageOrder.GAP:
            self.metrics.lost.inc(verdict.missing)
        return verdict.fresh

    # Publishing

    async def _send(
        self,
        message: ProfilePublished | DemandPublished | ClustersPublished | TablesPublished | PopularityShifted,
    ) -> None:
        try:
            await self._publishers[type(message)].publish(message)
        except BusError as error:  # too large for any bus: everything else continues
            logger.warning(
                "cannot publish a %s of model %s: %s", type(message).__name__, message.model, error
            )
        else:
            self.metrics.published.inc()

    async def _publish(self, *subscriptions: Subscription) -> None:
        # Shifts must be judged more often than every quarter of the fast time constant.
        pause = min(self._config.publish_seconds, self._config.fast_seconds / 5)
        while True:
            await asyncio.sleep(pause)
            now = self._store.now()
            for worker_id in self._store.activity.forget_silent(now):
                logger.info(
                    "worker %d has been silent for %g s and is forgotten",
                    worker_id,
                    self._config.forget_seconds,
                )
            for number, message in enumerate(self._store.activity.changed(now), start=1):
                await self._send(message)
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)
            for shift in self._store.evaluate(now):
                self.metrics.shifts.inc(not shift.settled)
                logger.info(
                    "popularity of %s %s (%.4g nats)",
                    shift.model,
                    "has settled" if shift.settled else "is shifting",
                    shift.divergence,
                )
                with self._tracing.saying(shift) as traced:
                    await self._send(traced)
            self._measure(now, sum(subscription.dropped for subscription in subscriptions))

    async def _beat(self) -> None:
        """Tell programs and `roost doctor` that this tracker is alive, and its protocol."""
        while True:
            await self._heartbeat.publish(TrackerHeartbeat(protocol=PROTOCOL, reports=self.reports))
            await asyncio.sleep(_BEAT_SECONDS)

    async def _publish_learnt(self) -> None:
        """Publish changed clusters, and the changes of the tables."""
        while True:
            await self._store.follow()
            for message in await self._store.learning(self._store.learners.changes):
                if isinstance(message, TablesPublished):
                    self._versions[message.model] = message.version
                    self._snapshots.pop(message.model, None)
                    message = announced(message)
                await self._send(message)
            self._learnt = await self._store.learning(self._store.learners.all_learnt)
            await asyncio.sleep(self._config.publish_seconds)

    async def _fit(self) -> None:
        while True:
            await asyncio.sleep(self._config.publish_seconds)
            for name, clusters, job in await self._store.learning(
                self._store.learners.due, self._store.now()
            ):
                await self._fit_one(name, clusters, job)

    async def _fit_one(self, name: str, clusters: OnlineClusters, job: Refit | None) -> None:
        fitted = None
        if job is not None:
            with self.metrics.refits.time():
                fitted = await self._store.aside(job.run)
        await self._store.learning(self._store.learners.adopt, name, clusters, fitted, self._store.now())

    def _measure(self, now: float, dropped: int) -> None:
        self.metrics.reports.inc(self.reports - self._measured)
        self._measured = self.reports
        self.metrics.ranks.set(self._store.activity.ranks)
        self.metrics.window_bytes.set(self._store.activity.stored_bytes)
        self.metrics.models(self._store.measures(self._learnt, now))
        self.metrics.dropped.set(dropped)
        for reason, count in self._bus.rejected.items():
            self.metrics.bus_rejected(reason, count)
        for store, count in self._bus.refusals.items():
            self.metrics.store_refusals(store, count)

    # Answers

    async def describe(self, request: Message) -> Message:
        """Answer a request about a model."""
        store = self._store
        match request:
            case DescribeProfile(model=name):
                answer: Message | None = store.activity.profile(name, store.now())
            case DescribeClusters(model=name):
                answer = await store.query(store.learners.clusters, name)
            case DescribeTables(model=name):
                answer = await self._tables(name)
            case DescribePopularity(model=name):
                answer = await store.popularity(name)
            case other:
                expected = "DescribeProfile, DescribeClusters, DescribeTables or DescribePopularity"
                return RequestRefused(reason=f"expected {expected}, got {type(other).__name__}")
        return answer or RequestRefused(
            reason=f"no engine with model {name!r} has joined or reported; ask again when one has"
        )

    async def _tables(self, name: str) -> TablesPublished | None:
        """Return one object to all requesters until the next version, so that it is encoded and stored
        once."""
        if name in self._snapshots:
            return self._snapshots[name]
        tables = await self._store.query(self._store.learners.tables, name)
        if tables is not None and tables.version == self._versions.get(name):
            self._snapshots[name] = tables
            asyncio.get_running_loop().call_later(SNAPSHOT_SECONDS, self._forget_snapshot, tables)
        return tables

    def _forget_snapshot(self, tables: TablesPublished) -> None:
        if self._snapshots.get(tables.model) is tables:
            del self._snapshots[tables.model]

    # State file

    @asynccontextmanager
    async def _persisted(self) -> AsyncIterator[None]:
        """Restore the state file, and write it at the end of the context."""
        path = self._state_file
        try:
            if path is not None:
                await self._restore(path)
            try:
                yield
            finally:
                if path is not None:
                    await self._save_at_the_end(path)
        finally:
            self._store.close()

    async def _restore(self, path: Path) -> None:
        saved = await self._store.aside(read, path)
        if saved is not None:
            await self._store.restore(saved, self._wall_clock())
            for publisher, newest in self._store.activity.last_sequences():
                self._sequences.cover(publisher, newest)

    async def _save_regularly(self, path: Path) -> None:
        while True:
            await asyncio.sleep(self._config.state_seconds)
            await self._save(path)

    async def _save_at_the_end(self, path: Path) -> None:
        """Save within a time limit, although this task is being cancelled."""
        saving = asyncio.ensure_future(self._save(path))
        _, late = await asyncio.wait([saving], timeout=STOP_SECONDS)
        if late:
            saving.cancel()
            logger.warning(
                "the last state could not be written within %g s; %s has the one before", STOP_SECONDS, path
            )
        elif (error := saving.exception()) is not None:
            logger.error("the last state could not be written; %s has the one before", path, exc_info=error)

    async def _save(self, path: Path) -> None:
        try:
            self.metrics.state_bytes.set(
                await self._store.aside(write, path, await self._store.state(self._wall_clock()))
            )
        except OSError as error:
            self.metrics.saved("failed")
            logger.warning("the state cannot be written to %s: %s", path, error)
        else:
            self.metrics.saved("written")
