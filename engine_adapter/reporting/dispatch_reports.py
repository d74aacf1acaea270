"""Publish where a rank's tokens were actually sent (`fleet.facts.activity.DispatchMeasured`). A report never
mixes epochs."""

from engine_adapter.engine import DispatchCounts
from engine_adapter.reporting.rank_context import RankContext
from fleet.facts.activity import DispatchMeasured


class DispatchReports:
    """Dispatch reports of one rank. All times are of one clock, in seconds."""

    def __init__(self, context: RankContext, interval: float) -> None:
        """interval: seconds between reports. A change of epoch ends an interval early."""
        self._publisher = context.bus.publisher(context.subjects.dispatched(context.engine))
        self._context = context
        self._interval = interval
        self._sent: DispatchCounts | None = None
        self._since = float("-inf")

    def begin(self, now: float) -> None:
        """Start the first interval."""
        self._since = now

    async def add(self, sent: tuple[DispatchCounts, ...], now: float) -> None:
        """Add the counts since the last call, and publish when due. The exact time of a flip is unknown, so
        counts from before it are published at once."""
        for one in sent:
            if self._sent is not None and self._sent.epoch != one.epoch:
                await self._publish(now)
            self._sent = one if self._sent is None else self._sent.with_more(one)
        if now - self._since >= self._interval:
            await self._publish(now)

    async def _publish(self, now: float) -> None:
        sent, self._sent = self._sent, None
        seconds, self._since = now - self._since, now
        if sent is None:
            return
        await self._publisher.publish(
            DispatchMeasured(
                **self._context.sender,
                epoch=sent.epoch,
                # The first step may have begun before the interval. When two flips fall between two calls,
                # the interval of the second is empty.
                seconds=max(seconds, sent.step_seconds),
                steps=sent.steps,
                step_seconds=sent.step_seconds,
                tokens=sent.tokens,
                pairs=sent.pairs,
                remote_ranks=tuple(sent.remote_ranks.tolist()),
                local=tuple(sent.local.tolist()),
                served=tuple(sent.served.tolist()),
                balance=tuple(sent.balance.tolist()),
                communication_seconds=sent.communication_seconds,
                rearrangements=sent.rearrangements,
            )
        )
