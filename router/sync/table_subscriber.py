"""Replication of the tracker's tables and clusters: apply published versions, and request missed ones.

Tables are published as a snapshot, or as a delta to one version. A delta to another version than the local
one means that something was missed, and a snapshot is requested. Deltas that arrive meanwhile are held back.
If no tracker answers, the request is repeated with growing pauses, and there is no prediction until then. One
lock orders all updates, so that none overtakes a newer one.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from bus import Bus, BusError, Subscription
from bus.keyed_queue import RetryQueue
from bus.protocol.subjects import Subjects
from fleet.facts.demand import ClustersPublished, TablesPublished
from fleet.requests.demand import DescribeClusters, DescribeTables
from fleet.signatures import ClusterModel
from router.prediction.predictor import Predictor
from router.prediction.table_replica import SLICE, ChangeVerdict, TableChange, read
from router.telemetry.metrics import RouterMetrics

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 20.0
_FIRST_PAUSE_SECONDS = 1.0
_MAX_PAUSE_SECONDS = 30.0
_LATE_CHANGES = 16
"""Deltas held back until a model's snapshot arrives; beyond this the oldest are dropped, and the version
numbers reveal the gap.
"""
_INLINE_BYTES = 64 * 1024
"""Longer messages are decoded in a thread."""
_MAX_MODELS = 256

Given = TypeVar("Given")
Found = TypeVar("Found")


@dataclass(slots=True)
class _Feed:
    """Feed of one model. `late`: deltas held back until a snapshot arrives; None: the replica is in step."""

    late: deque[TablesPublished] | None = field(default_factory=lambda: deque(maxlen=_LATE_CHANGES))
    clusters: bool = False
    """some cluster model is known"""
    answered: bool = False
    """the tracker has answered (with tables or not), or the request failed"""
    taken_at: float = 0.0
    """time of the last table update, seconds on the router's clock"""


class TableSubscriber:
    """Subscriber to one tracker. `learnt` is called with a model's new clusters, for pricing."""

    def __init__(
        self,
        predictor: Predictor,
        bus: Bus,
        subjects: Subjects,
        metrics: RouterMetrics,
        threads: ThreadPoolExecutor,
        clock: Callable[[], float],
        learnt: Callable[[str, ClusterModel], None],
    ) -> None:
        self._predictor = predictor
        self._bus = bus
        self._subjects = subjects
        self._metrics = metrics
        self._threads = threads
        self._clock = clock
        self._learnt = learnt
        self._feeds: dict[str, _Feed] = {}
        self._due: RetryQueue[str] = RetryQueue(
            self._ask, _MAX_MODELS, _FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS
        )
        self._order = asyncio.Lock()

    def add(self, model: str) -> None:
        """Add the model of an engine that joined, and request its tables."""
        if model not in self._feeds and len(self._feeds) < _MAX_MODELS:
            self._feeds[model] = _Feed()
            self._due.ask(model)

    def keep_only(self, models: set[str]) -> None:
        """Drop all models except those of known engines."""
        for model in [model for model in self._feeds if model not in models]:
            del self._feeds[model]
        self._predictor.keep_only(models)
        self._metrics.forget_replicas(models)

    def in_step(self, model: str) -> bool:
        """True when the replica contains everything published so far."""
        feed = self._feeds.get(model)
        return feed is not None and feed.late is None

    def unanswered(self) -> set[str]:
        """Models for which the tracker has not answered yet, and its absence is not known either."""
        return {model for model, feed in self._feeds.items() if not feed.answered}

    async def listen(self, published: Subscription) -> None:
        """Apply published tables and clusters until cancelled."""
        async for received in published:
            message = received.message
            if isinstance(message, TablesPublished):
                await self._tables(message)
            elif isinstance(message, ClustersPublished):
                await self._clusters(message)
            else:
                self._metrics.bus_refused.inc()

    async def run(self) -> None:
        """Request missing tables and clusters until cancelled."""
        await self._due.run()

    def measure(self) -> None:
        """Update the metrics of the replicas."""
        for model, replica in self._predictor.models().items():
            feed = self._feeds.get(model)
            if feed is not None and replica.tables is not None:
                self._metrics.replica(
                    model, replica.tables, replica.stored_bytes, self._clock() - feed.taken_at
                )

    async def _ask(self, model: str) -> bool:
        """Request what is missing of a model. True when nothing is missing, or the model is forgotten."""
        feed = self._feeds.get(model)
        if feed is None:
            return True
        describe = self._subjects.describe_profile
        try:
            if not feed.clusters:
                clusters = await self._bus.request(describe, DescribeClusters(model=model), _ANSWER_SECONDS)
                if isinstance(clusters, ClustersPublished):
                    await self._clusters(clusters)
            if feed.late is not None:
                tables = await self._bus.request(describe, DescribeTables(model=model), _ANSWER_SECONDS)
                if isinstance(tables, TablesPublished) and tables.base is None:
                    await self._tables(tables, requested=True)
        except BusError as error:
            log.debug("no prediction tables of model %s yet: %s", model, error)
        feed.answered = True
        return (feed.late is None and feed.clusters) or self._feeds.get(model) is not feed

    async def _clusters(self, published: ClustersPublished) -> None:
        async with self._order:
            feed = self._feeds.get(published.model)
            if feed is None:
                return
            try:
                clusters = await self._off_loop(
                    len(published.record.profiles), ClusterModel.from_record, published.record
                )
            except ValueError as error:
                self._refuse(published.model, error)
                return
            feed.clusters = True
            self._learnt(published.model, clusters)

    async def _tables(self, published: TablesPublished, *, requested: bool = False) -> None:
        """Apply tables. Invalid ones are refused and counted; the next delta reveals the gap they leave."""
        async with self._order:
            feed = self._feeds.get(published.model)
            waiting = deque([] if feed is None else [published])
            while feed is not None and waiting:
                one = waiting.popleft()
                try:
                    change = await self._off_loop(_size(one), read, one)
                    if change.base is None:
                        waiting += await self._whole(feed, one.model, change, requested=requested)
                    else:
                        await self._changed(feed, one, change)
                except ValueError as error:
                    self._refuse(one.model, error)

    async def _whole(
        self, feed: _Feed, model: str, change: TableChange, *, requested: bool
    ) -> Iterable[TablesPublished]:
        """Apply a snapshot, and return the deltas that were held back for it.

        The answer to the router's own request is taken with any version: its tracker may have been reset.
        """
        known = self._predictor.replica(model)
        if known is not None and not requested and known.check(change) is ChangeVerdict.OLD:
            return ()
        replica = await self._off_loop(_INLINE_BYTES * change.rows, self._predictor.prepare, change)
        if self._feeds.get(model) is not feed:
            return ()  # forgotten meanwhile
        self._predictor.replace(model, replica)
        feed.taken_at = self._clock()
        late, feed.late = feed.late or (), None
        return late

    async def _changed(self, feed: _Feed, published: TablesPublished, change: TableChange) -> None:
        replica = self._predictor.replica(published.model)
        if feed.late is not None or replica is None:
            feed.late = feed.late or deque(maxlen=_LATE_CHANGES)
            feed.late.append(published)
            return
        match replica.check(change):
            case ChangeVerdict.TAKEN:
                if replica.crowded_by(change):
                    replica = await self._off_loop(replica.stored_bytes, replica.grown, change)
                    if self._feeds.get(published.model) is not feed:
                        return  # forgotten meanwhile
                    self._predictor.replace(published.model, replica)
                for at in range(0, max(change.rows, 1), SLICE):
                    replica.take(change, at)
                    if at + SLICE < change.rows:
                        await asyncio.sleep(0)
                feed.taken_at = self._clock()
            case ChangeVerdict.GAP:
                log.info(
                    "tables of model %s: a delta to version %s, which is not the local one; asking for a"
                    " snapshot",
                    published.model,
                    change.base,
                )
                feed.late = deque([published], maxlen=_LATE_CHANGES)
                self._metrics.table_requests.inc()
                self._due.ask(published.model)
            case ChangeVerdict.OLD:
                pass

    def _refuse(self, model: str, error: ValueError) -> None:
        log.warning("a message of the tracker about model %s cannot be used: %s", model, error)
        self._metrics.bus_refused.inc()

    async def _off_loop(self, size: int, work: Callable[[Given], Found], given: Given) -> Found:
        """Run work in a thread if its input is large (size in bytes)."""
        if size <= _INLINE_BYTES:
            return work(given)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, given)


def _size(published: TablesPublished) -> int:
    keyed = (published.blocks, published.sessions, published.tenants)
    return len(published.token_ratios) + sum(len(part.keys) + len(part.rows) for part in keyed)
