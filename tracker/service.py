"""The tracker as a service: hears reports, joins and heartbeats, says profiles and demands, answers who asks."""

import asyncio
import logging
import time
from collections.abc import Callable

from bus import Bus, Message, Publisher, Received, Subscription
from bus.sequence import Order, Sequences
from bus.subjects import Subjects
from fleet.events import DescribeProfile, EngineHeartbeat, EngineJoined, EngineLeft, ExpertsActivated, ProfilePublished, RequestRefused
from tracker.activity import Activity, Refused
from tracker.config import TrackerConfig
from tracker.metrics import TrackerMetrics

logger = logging.getLogger(__name__)


class TrackerService:
    """Runs until cancelled. `ready` is set once it listens and knows the engines that are recorded as present.

    clock: seconds that never go back; the only time that decay knows.
    """

    def __init__(self, bus: Bus, subjects: Subjects, config: TrackerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.ready = asyncio.Event()
        self.metrics = TrackerMetrics()
        self._bus = bus
        self._subjects = subjects
        self._config = config
        self._clock = clock
        # Microseconds: a restarted tracker goes on above every version it gave before.
        self._activity = Activity(config, first_version=time.time_ns() // 1000)
        self._sequences = Sequences(limit=2 * config.most_ranks)
        self._profiles: Publisher = bus.publisher(subjects.profiles)
        self._demand: Publisher = bus.publisher(subjects.demand)

    async def run(self) -> None:
        """Listen, publish and answer. BusError when the bus cannot be reached at the start."""
        subjects = self._subjects
        async with (
            self._bus.subscribe(subjects.experts, subjects.heartbeats) as heard,
            self._bus.serve(subjects.describe_profile, self._describe),
        ):
            async for received in self._bus.replay(subjects.membership(), latest=True, follow=False):
                self._hear(received)
            self.ready.set()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(heard), name="hears reports and heartbeats")
                tasks.create_task(self._follow(), name="follows who joins and leaves")
                tasks.create_task(self._publish(heard), name="publishes profiles and demands")

    async def _listen(self, heard: Subscription) -> None:
        async for received in heard:
            self._hear(received)

    async def _follow(self) -> None:
        async for received in self._bus.replay(self._subjects.membership(), latest=True):
            self._hear(received)

    def _hear(self, received: Received) -> None:
        """One fact. What cannot be used is counted; it must not stop the listening."""
        now = self._clock()
        try:
            match received.message:
                case ExpertsActivated() as report:
                    self._report(received, report, now)
                case EngineHeartbeat() as beat:
                    self._activity.beat(beat.worker_id, now)
                case EngineJoined() as joined:
                    self._activity.joined(joined, now)
                case EngineLeft() as left:
                    self._activity.left(left.worker_id)
                case other:
                    self.metrics.rejected("kind")
                    logger.debug("a %s on %s means nothing here", type(other).__name__, received.subject)
        except Refused as refusal:
            self.metrics.rejected(refusal.fault.value)
            logger.warning("refused a %s: %s", type(received.message).__name__, refusal)

    def _report(self, received: Received, report: ExpertsActivated, now: float) -> None:
        verdict = self._sequences.observe(received.publisher_id, received.sequence)
        if not verdict.fresh:
            self.metrics.duplicates.inc()
            return
        if verdict.order is Order.GAP:
            self.metrics.lost.inc(verdict.missing)
        self._activity.report(report, now, lost=verdict.order in (Order.GAP, Order.LATE))
        self.metrics.reports.inc()

    async def _publish(self, heard: Subscription) -> None:
        while True:
            await asyncio.sleep(self._config.publish_seconds)
            now = self._clock()
            for worker_id in self._activity.forget_silent(now):
                logger.info("worker %d has been silent for %g s and is forgotten", worker_id, self._config.forget_seconds)
            for message in self._activity.changed(now):
                await (self._profiles if isinstance(message, ProfilePublished) else self._demand).publish(message)
                self.metrics.published.inc()
            self._measure(heard, now)

    def _measure(self, heard: Subscription, now: float) -> None:
        self.metrics.ranks.set(self._activity.ranks)
        self.metrics.ages(self._activity.ages(now))
        self.metrics.dropped.set(heard.dropped)
        for reason, count in self._bus.rejected.items():
            self.metrics.bus_rejected(reason, count)

    async def _describe(self, request: Message) -> Message:
        if not isinstance(request, DescribeProfile):
            return RequestRefused(reason=f"expected DescribeProfile, got {type(request).__name__}")
        profile = self._activity.profile(request.model, self._clock())
        if profile is None:
            return RequestRefused(reason=f"no engine with model {request.model!r} has joined or reported; ask again when one has")
        return profile
