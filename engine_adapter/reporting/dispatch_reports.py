"""Says on the bus where a rank's tokens were really sent (`fleet.events.DispatchMeasured`), never of two epochs at once."""

from bus import Bus
from bus.protocol.subjects import Subjects
from engine_adapter.engine import DispatchCounts, EngineDescription
from fleet.events import DispatchMeasured


class DispatchReports:
    """What one rank says. Moments are of one clock, in seconds."""

    def __init__(self, bus: Bus, subjects: Subjects, about: EngineDescription, engine: str, worker_id: int, interval: float) -> None:
        """interval: seconds of a report; shorter where the epoch changed."""
        self._publisher = bus.publisher(subjects.dispatched(engine))
        self._about = about
        self._engine, self._worker_id = engine, worker_id
        self._interval = interval
        self._sent: DispatchCounts | None = None
        self._since = float("-inf")

    def begin(self, now: float) -> None:
        """The first interval begins."""
        self._since = now

    async def hear(self, sent: tuple[DispatchCounts, ...], now: float) -> None:
        """What was sent since the last call. Of a flip is known here that it was before now; what was sent before it is said at once."""
        for one in sent:
            if self._sent is not None and self._sent.epoch != one.epoch:
                await self._say(now)
            self._sent = one if self._sent is None else self._sent.with_more(one)
        if now - self._since >= self._interval:
            await self._say(now)

    async def _say(self, now: float) -> None:
        sent, self._sent = self._sent, None
        seconds, self._since = now - self._since, now
        if sent is None:
            return
        await self._publisher.publish(
            DispatchMeasured(
                engine=self._engine,
                worker_id=self._worker_id,
                rank=self._about.rank,
                model=self._about.model,
                epoch=sent.epoch,
                seconds=max(seconds, sent.step_seconds),  # its first step may have begun before, and of two flips between two looks it had none
                steps=sent.steps,
                step_seconds=sent.step_seconds,
                tokens=sent.tokens,
                pairs=sent.pairs,
                remote_ranks=tuple(sent.remote_ranks.tolist()),
                local=tuple(sent.local.tolist()),
                served=tuple(sent.served.tolist()),
                balance=tuple(sent.balance.tolist()),
                communication_seconds=sent.communication_seconds,
            )
        )
