"""Publish the load of a rank: at once when it has changed, and from time to time when it has not."""

from engine_adapter.engine import RankLoad
from engine_adapter.reporting.rank_context import RankContext
from fleet.facts.dynamo_kv import KvMetrics


class LoadReports:
    """Load reports of one rank. interval: longest time between two of them, in seconds."""

    def __init__(self, context: RankContext, interval: float) -> None:
        self._context = context
        self._interval = interval
        self._publisher = context.bus.publisher(context.subjects.kv_metrics)
        self._load: RankLoad | None = None
        self._published_at = float("-inf")

    @property
    def due(self) -> float:
        """Time of the next report, if the load does not change before."""
        return self._published_at + self._interval

    async def update(self, load: RankLoad, now: float) -> None:
        """Publish the load if it has changed or a report is due."""
        due = now >= self.due
        if self._context.about.capabilities.load and (due or load != self._load):
            await self._publisher.publish(
                KvMetrics(
                    worker_id=self._context.worker_id,
                    dp_rank=self._context.rank,
                    active_decode_blocks=load.decode_blocks,
                    active_prefill_tokens=load.prefill_tokens,
                    kv_used_blocks=load.used_blocks,
                    running=load.running,
                    waiting=load.waiting,
                    step_seconds=load.step_seconds,
                )
            )
            due = True
        if due:
            self._load, self._published_at = load, now
