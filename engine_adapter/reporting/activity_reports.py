"""Publish the experts that a rank's tokens activated (`fleet.facts.activity.ExpertsActivated`). A report
never mixes epochs."""

from engine_adapter.engine import Activations
from engine_adapter.reporting.rank_context import RankContext
from fleet.facts.activity import ExpertsActivated
from fleet.popularity import ExpertCounts


class ActivityReports:
    """Activity reports of one rank. All times are of one clock, in seconds."""

    def __init__(self, context: RankContext, interval: float, epoch: int) -> None:
        """interval: seconds between reports. A change of epoch ends an interval early."""
        self._context = context
        self._interval = interval
        self._epoch = epoch
        self._publisher = context.bus.publisher(context.subjects.experts(context.engine))
        self._activations: Activations | None = None
        self._since = float("-inf")
        self._polled_at = float("-inf")

    def begin(self, now: float) -> None:
        """Start the first interval."""
        self._since = self._polled_at = now

    @property
    def due(self) -> float:
        """Time of the next report."""
        return self._since + self._interval

    async def add(self, new: Activations | None, epoch: int, now: float) -> None:
        """Add the activations since the last call, under this epoch, and publish when due."""
        # A report covers one epoch, so the counts from before the flip are sent at once.
        if epoch != self._epoch:
            await self._publish(self._polled_at)
            self._epoch = epoch
        if new is not None:
            self._activations = new if self._activations is None else _sum(self._activations, new)
        self._polled_at = now
        if now >= self.due:
            await self._publish(now)

    async def _publish(self, until: float) -> None:
        seconds = until - self._since
        if seconds <= 0:
            return
        activations, self._activations, self._since = self._activations, None, until
        if (
            activations is not None
            and (activations.tokens or activations.cached_tokens)
            and self._context.about.capabilities.experts
        ):
            await self._publisher.publish(
                ExpertsActivated(
                    **self._context.sender,
                    epoch=self._epoch,
                    seconds=seconds,
                    tokens=activations.tokens,
                    cached_tokens=activations.cached_tokens,
                    counts=ExpertCounts.of(activations.counts),
                )
            )


def _sum(before: Activations, new: Activations) -> Activations:
    return Activations(
        counts=before.counts + new.counts,
        tokens=before.tokens + new.tokens,
        cached_tokens=before.cached_tokens + new.cached_tokens,
    )
