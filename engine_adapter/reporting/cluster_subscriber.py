"""Subscriber to the tracker's cluster model of one served model: receives publications, and requests the
current model at the start and after a disconnect of the bus.

Without a tracker there is no cluster model, and everything else works without it. Messages from the bus are
not trusted: an unusable model is rejected, and the previous one stays.
"""

import asyncio
import logging

from bus import Bus, BusError, Received
from bus.keyed_queue import RetryQueue
from bus.protocol.subjects import Subjects
from fleet.experts import ModelShape
from fleet.facts.demand import ClustersPublished
from fleet.requests.demand import DescribeClusters
from fleet.signatures import ClusterModel, ClusterRecord

UNREAD = 4
"""Publications that may be queued. Only the newest matters."""
LONGEST_PAUSE = 30.0
"""Longest pause between requests to a tracker that does not respond, in seconds. Publications arrive without
delay."""

log = logging.getLogger(__name__)


class ClusterSubscriber:
    """Subscriber to the clusters of `model` for an engine of this shape, while `run` runs."""

    def __init__(
        self, bus: Bus, subjects: Subjects, model: str, shape: ModelShape, look_seconds: float
    ) -> None:
        """look_seconds: interval of checks for a bus disconnect, and first pause between two requests."""
        self._bus = bus
        self._subjects = subjects
        self._name = model
        self._shape = shape
        self._look_seconds = look_seconds
        self._model: ClusterModel | None = None
        self._publisher: int | None = None
        self._requests: RetryQueue[str] = RetryQueue(self._request, 1, look_seconds, LONGEST_PAUSE)
        self._warning = ""
        self._turn = asyncio.Lock()  # Replies and publications are processed one at a time.

    @property
    def model(self) -> ClusterModel | None:
        """The newest usable cluster model. None before the first."""
        return self._model

    async def run(self) -> None:
        """Follow publications until cancelled."""
        async with (
            self._bus.subscribe(self._subjects.clusters, limit=UNREAD) as publications,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._requests.run(), name=f"request the clusters of {self._name}")
            tasks.create_task(self._request_after_disconnects(), name="watch for disconnects of the bus")
            async for received in publications:
                await self._receive(received)

    async def _receive(self, received: Received) -> None:
        message = received.message
        if isinstance(message, ClustersPublished) and message.model == self._name:
            restarted = received.publisher_id != self._publisher
            self._publisher = received.publisher_id
            await self._adopt(message.record, whatever_version=restarted)

    async def _request_after_disconnects(self) -> None:
        connected = False
        while True:
            if self._bus.connected and not connected:
                self._requests.ask(self._name)
            connected = self._bus.connected
            await asyncio.sleep(self._look_seconds)

    async def _request(self, model: str) -> bool:
        """Request the clusters. True when the tracker replied."""
        try:
            message = await self._bus.request(self._subjects.describe_profile, DescribeClusters(model=model))
        except BusError as error:
            log.debug("no clusters of %s yet: %s", self._name, error)
            return False
        if isinstance(message, ClustersPublished) and message.model == self._name:
            await self._adopt(message.record)
        return True

    async def _adopt(self, record: ClusterRecord, *, whatever_version: bool = False) -> None:
        """Use the record if its version is newer. whatever_version: use any other version, since it comes
        from a new tracker."""
        async with self._turn:
            known = None if self._model is None else self._model.version
            if known == record.version or not (known is None or whatever_version or record.version > known):
                return
            try:
                self._model = await asyncio.to_thread(_usable, record, self._shape)
                self._warning = ""
            except ValueError as error:
                self._warn(str(error))

    def _warn(self, warning: str) -> None:
        if warning != self._warning:
            log.warning("the clusters published for %s are not used: %s", self._name, warning)
        self._warning = warning


def _usable(record: ClusterRecord, shape: ModelShape) -> ClusterModel:
    """Build the model of a record, which takes milliseconds for a large one. ValueError when the record is
    invalid or of another shape."""
    if (record.layers, record.experts) != (shape.layers, shape.experts):
        raise ValueError(
            f"they have {record.layers} layers of {record.experts} experts, this engine {shape.layers} of"
            f" {shape.experts}"
        )
    return ClusterModel.from_record(record)
