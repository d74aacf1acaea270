"""The tracker as a service: hears reports, requests and who is there; says what is popular, what is learnt of it, and how good that is."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from bus import Bus, BusError, Message, Received, Subscription
from bus.joins import vouched
from bus.protocol.codec import LARGE
from bus.protocol.sequence import MessageOrder, Sequences
from bus.protocol.subjects import Subjects
from fleet.events import (
    ClustersPublished,
    CountsImported,
    DemandPublished,
    DescribeClusters,
    DescribePopularity,
    DescribeProfile,
    DescribeTables,
    EngineHeartbeat,
    EngineJoined,
    EngineLeft,
    ExpertsActivated,
    KeyedRows,
    PlacementCommitted,
    PopularityShifted,
    ProfilePublished,
    RequestRefused,
    RequestsFinished,
    RequestsProfiled,
    TablesPublished,
)
from fleet.layout import Layout
from fleet.placement import PlacementRecord
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
"""A reason to refuse something is logged so often at most."""
STOP_SECONDS = 5.0
"""for the state to be written at the end"""
WHOLE_SECONDS = 5.0
"""A model's whole tables answer everybody who asks within this time, and before the next version."""


def announced(tables: TablesPublished) -> TablesPublished:
    """What is published of new tables: changes and small tables as they are; of large whole ones only that there is a new version.

    That is a change to itself without rows. A router that has not got this version finds a gap, and asks for the whole, which comes in parts.
    """
    keyed = (tables.blocks, tables.sessions, tables.tenants)
    size = len(tables.token_rows) + len(tables.token_ratios) + sum(len(part.keys) + len(part.rows) for part in keyed)
    if tables.base is not None or size <= LARGE // 2:
        return tables
    nothing = {"token_rows": b"", "token_ratios": b"", "blocks": KeyedRows(), "sessions": KeyedRows(), "tenants": KeyedRows()}
    return msgspec.structs.replace(tables, base=tables.version, **nothing)


class TrackerService:
    """Runs until cancelled, once. `ready` is set once it listens and knows the engines that are recorded as present.

    clock: seconds that never go back; the only time that decay knows. wall_clock: tells how long a restart took.
    learning, fitting: see `ModelStore`.
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
        # Microseconds: a restarted tracker goes on above every version it gave before.
        self._knows = ModelStore(config, clock, time.time_ns() // 1000, learning, fitting)
        self._sequences = Sequences(limit=4 * config.most_ranks)
        self._learnt: dict[str, LearntTables] = {}
        self._whole: dict[str, TablesPublished] = {}
        """tables as they are published at present, by model, for as long as routers ask for them"""
        self._versions: dict[str, int] = {}
        """of the tables that were published last, by model"""
        self._warned: dict[ReportFault, float] = {}
        """when the log last told of a refusal"""
        self.reports = 0
        """taken into account so far"""
        self._measured = 0
        """of them, in the metrics"""
        self._publishers = {
            ProfilePublished: bus.publisher(subjects.profiles),
            DemandPublished: bus.publisher(subjects.demand),
            ClustersPublished: bus.publisher(subjects.clusters),
            TablesPublished: bus.publisher(subjects.tables),
            PopularityShifted: bus.publisher(subjects.shifts),
        }

    async def run(self) -> None:
        """Listen, learn, publish and answer. BusError when the bus cannot be reached at the start."""
        subjects = self._subjects
        async with (
            self._keeping(),
            self._bus.subscribe(subjects.experts(), subjects.heartbeats()) as heard,
            self._bus.subscribe(subjects.requests_profiled(), subjects.requests_read, subjects.requests_finished, subjects.imports) as told,
            self._bus.serve(subjects.describe_profile, self.describe),
        ):
            for stored in (subjects.membership(), subjects.placements()):
                async for received in self._counted(stored, follow=False):
                    await self._hear_stored(received)
            await self._knows.follow()
            self.ready.set()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(heard), name="hears reports and heartbeats")
                tasks.create_task(self._listen_to_requests(told), name="hears requests and imports")
                tasks.create_task(self._follow(subjects.membership()), name="follows who joins and leaves")
                tasks.create_task(self._follow(subjects.placements()), name="follows placements")
                tasks.create_task(self._publish(heard, told), name="publishes profiles, demands and shifts")
                tasks.create_task(self._teach(), name="publishes clusters and tables")
                tasks.create_task(self._fit(), name="fits clusters anew")
                if self._state_file is not None:
                    tasks.create_task(self._save_regularly(self._state_file), name="writes the state")

    # Hearing

    async def _listen(self, heard: Subscription) -> None:
        async for received in heard:
            if self._speaks_for_itself(received):
                self._hear(received)

    def _speaks_for_itself(self, received: Received) -> bool:
        """Whether a message names no worker of another engine than its own: only the name is vouched for (by subject, and by claim)."""
        named, known = getattr(received.message, "engine", None), self._knows.activity.engine_of(getattr(received.message, "worker_id", -1))
        if named in (None, known) or known is None:
            return True
        self._refuse(ReportFault.SPEAKER, f"a {type(received.message).__name__} of engine {named!r}: its worker is engine {known!r}")
        return False

    async def _listen_to_requests(self, told: Subscription) -> None:
        async for received in told:
            if self._speaks_for_itself(received) and self._is_fresh(received):
                await self._hear_request(received)

    async def _hear_request(self, received: Received) -> None:
        lessons, now = self._knows.lessons, self._knows.now()
        match received.message:
            case RequestsProfiled() as profiled:
                self.metrics.profiled.inc(len(profiled.requests))
                refused = await self._knows.learning(lessons.profiled, profiled, now)
            case RequestsFinished() as finished:
                self.metrics.finished.inc(len(finished.requests))
                refused = await self._knows.learning(lessons.finished, finished, now)
            case _:
                return self._hear(received)
        for reason, count in refused.items():
            self.metrics.rejected(reason, count)
            logger.debug("%d requests of a %s cannot be used: %s", count, type(received.message).__name__, reason)

    async def _follow(self, subject: str) -> None:
        async for received in self._counted(subject, follow=True):
            await self._hear_stored(received)

    def _counted(self, subject: str, *, follow: bool) -> AsyncIterator[Received]:
        """What is stored; of joins, those that hold their engine's name."""
        stored = self._bus.replay(subject, latest=True, follow=follow)
        return vouched(self._bus, self._subjects, stored) if subject == self._subjects.membership() else stored

    async def _hear_stored(self, received: Received) -> None:
        if not self._speaks_for_itself(received):
            return
        match received.message:
            case PlacementCommitted(worker_id=worker_id, placement=placement, layout=layout):
                await self._place(worker_id, placement, layout)
            case EngineJoined(worker_id=worker_id, placement=PlacementRecord() as placement, layout=layout):
                self._hear(received)
                await self._place(worker_id, placement, layout)
            case _:
                self._hear(received)

    async def _place(self, worker_id: int, placement: PlacementRecord, layout: Layout | None) -> None:
        try:
            self._knows.activity.placed(worker_id, await self._knows.aside(LocalSupply.of, placement, layout))
        except InvalidReport as refusal:
            self._refuse(refusal.fault, f"a placement of worker {worker_id}: {refusal}")
        except ValueError as error:
            self._refuse(ReportFault.PLACEMENT, f"a placement of worker {worker_id}: {error}")

    def _hear(self, received: Received) -> None:
        """One fact. What cannot be used is counted; it must not stop the listening."""
        activity, now = self._knows.activity, self._knows.now()
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
                    (self.metrics.imports if activity.imported(imported, now) else self.metrics.duplicates).inc()
                case other:
                    self.metrics.rejected("kind")
                    logger.debug("a %s on %s means nothing here", type(other).__name__, received.subject)
        except InvalidReport as refusal:
            self._refuse(refusal.fault, f"a {type(received.message).__name__}: {refusal}")

    def _refuse(self, fault: ReportFault, what: str) -> None:
        """Counted always; in the log now and then, whoever it is that says so much nonsense."""
        self.metrics.rejected(fault.value)
        now = self._knows.now()
        if now - self._warned.get(fault, -WARN_SECONDS) >= WARN_SECONDS:
            self._warned[fault] = now
            logger.warning("refused %s; others of this kind are only counted for %g s", what, WARN_SECONDS)

    def _report(self, received: Received, report: ExpertsActivated, now: float) -> None:
        if self._is_fresh(received):
            seen = self._knows.activity.report(report, now, received.publisher_id, received.sequence)
            self._knows.observe(seen, now)
            self.reports += 1

    def _is_fresh(self, received: Received) -> bool:
        """Whether a message is heard for the first time."""
        verdict = self._sequences.observe(received.publisher_id, received.sequence)
        if not verdict.fresh:
            self.metrics.duplicates.inc()
        elif verdict.order is MessageOrder.GAP:
            self.metrics.lost.inc(verdict.missing)
        return verdict.fresh

    # Saying

    async def _say(self, message: ProfilePublished | DemandPublished | ClustersPublished | TablesPublished | PopularityShifted) -> None:
        try:
            await self._publishers[type(message)].publish(message)
        except BusError as error:  # too large for any bus: everything else goes on
            logger.warning("a %s of model %s cannot be said: %s", type(message).__name__, message.model, error)
        else:
            self.metrics.published.inc()

    async def _publish(self, *subscriptions: Subscription) -> None:
        # Drift wants to be judged more often than every quarter of the fast time constant.
        pause = min(self._config.publish_seconds, self._config.fast_seconds / 5)
        while True:
            await asyncio.sleep(pause)
            now = self._knows.now()
            for worker_id in self._knows.activity.forget_silent(now):
                logger.info("worker %d has been silent for %g s and is forgotten", worker_id, self._config.forget_seconds)
            for number, message in enumerate(self._knows.activity.changed(now), start=1):
                await self._say(message)
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)
            for shift in self._knows.judge(now):
                self.metrics.shifts.inc(not shift.settled)
                logger.info("popularity of %s %s (%.4g nats)", shift.model, "has settled" if shift.settled else "is shifting", shift.divergence)
                with self._tracing.saying(shift) as said:
                    await self._say(said)
            self._measure(now, sum(subscription.dropped for subscription in subscriptions))

    async def _teach(self) -> None:
        """Says clusters when they changed, and what changed in the tables."""
        while True:
            await self._knows.follow()
            for message in await self._knows.learning(self._knows.lessons.news):
                if isinstance(message, TablesPublished):
                    self._versions[message.model] = message.version
                    self._whole.pop(message.model, None)
                    message = announced(message)
                await self._say(message)
            self._learnt = await self._knows.learning(self._knows.lessons.all_learnt)
            await asyncio.sleep(self._config.publish_seconds)

    async def _fit(self) -> None:
        while True:
            await asyncio.sleep(self._config.publish_seconds)
            for name, clusters, job in await self._knows.learning(self._knows.lessons.due, self._knows.now()):
                await self._fit_one(name, clusters, job)

    async def _fit_one(self, name: str, clusters: OnlineClusters, job: Refit | None) -> None:
        fitted = None
        if job is not None:
            with self.metrics.refits.time():
                fitted = await self._knows.aside(job.run)
        await self._knows.learning(self._knows.lessons.adopt, name, clusters, fitted, self._knows.now())

    def _measure(self, now: float, dropped: int) -> None:
        self.metrics.reports.inc(self.reports - self._measured)
        self._measured = self.reports
        self.metrics.ranks.set(self._knows.activity.ranks)
        self.metrics.window_bytes.set(self._knows.activity.stored_bytes)
        self.metrics.models(self._knows.measures(self._learnt, now))
        self.metrics.dropped.set(dropped)
        for reason, count in self._bus.rejected.items():
            self.metrics.bus_rejected(reason, count)
        for store, count in self._bus.full.items():
            self.metrics.bus_full(store, count)

    # Answering

    async def describe(self, request: Message) -> Message:
        """The answer to a question about a model."""
        knows = self._knows
        match request:
            case DescribeProfile(model=name):
                answer: Message | None = knows.activity.profile(name, knows.now())
            case DescribeClusters(model=name):
                answer = await knows.asked(knows.lessons.clusters, name)
            case DescribeTables(model=name):
                answer = await self._tables(name)
            case DescribePopularity(model=name):
                answer = await knows.popularity(name)
            case other:
                wanted = "DescribeProfile, DescribeClusters, DescribeTables or DescribePopularity"
                return RequestRefused(reason=f"expected {wanted}, got {type(other).__name__}")
        return answer or RequestRefused(reason=f"no engine with model {name!r} has joined or reported; ask again when one has")

    async def _tables(self, name: str) -> TablesPublished | None:
        """One object for everybody who asks before the next version, so that it is encoded and kept once."""
        if name in self._whole:
            return self._whole[name]
        tables = await self._knows.asked(self._knows.lessons.tables, name)
        if tables is not None and tables.version == self._versions.get(name):
            self._whole[name] = tables
            asyncio.get_running_loop().call_later(WHOLE_SECONDS, self._forget_whole, tables)
        return tables

    def _forget_whole(self, tables: TablesPublished) -> None:
        if self._whole.get(tables.model) is tables:
            del self._whole[tables.model]

    # Keeping what is known across restarts

    @asynccontextmanager
    async def _keeping(self) -> AsyncIterator[None]:
        """Go on where the state file ends, and write it at the end of the context."""
        path = self._state_file
        try:
            if path is not None:
                await self._recall(path)
            try:
                yield
            finally:
                if path is not None:
                    await self._save_at_the_end(path)
        finally:
            self._knows.close()

    async def _recall(self, path: Path) -> None:
        saved = await self._knows.aside(read, path)
        if saved is not None:
            await self._knows.restore(saved, self._wall_clock())
            for publisher, newest in self._knows.activity.heard():
                self._sequences.cover(publisher, newest)

    async def _save_regularly(self, path: Path) -> None:
        while True:
            await asyncio.sleep(self._config.state_seconds)
            await self._save(path)

    async def _save_at_the_end(self, path: Path) -> None:
        """Within a bound, and although this task is being cancelled."""
        saving = asyncio.ensure_future(self._save(path))
        _, late = await asyncio.wait([saving], timeout=STOP_SECONDS)
        if late:
            saving.cancel()
            logger.warning("the last state could not be written within %g s; %s has the one before", STOP_SECONDS, path)
        elif (error := saving.exception()) is not None:
            logger.error("the last state could not be written; %s has the one before", path, exc_info=error)

    async def _save(self, path: Path) -> None:
        try:
            self.metrics.state_bytes.set(await self._knows.aside(write, path, await self._knows.state(self._wall_clock())))
        except OSError as error:
            self.metrics.saved("failed")
            logger.warning("the state cannot be written to %s: %s", path, error)
        else:
            self.metrics.saved("written")
