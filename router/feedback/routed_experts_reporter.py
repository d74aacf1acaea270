"""Reports on behalf of engines that do not report experts: the routing in their answers is counted in a
thread and published to the tracker.
"""

import asyncio
import logging
from typing import NamedTuple

import numpy as np

from bus import Bus, BusError
from fleet.experts import ModelShape
from fleet.facts.activity import CountsImported, RequestProfile, RequestsProfiled, SampledProfile
from fleet.popularity import ExpertCounts
from fleet.signatures import ClusterModel, pack
from router.context import RouterContext
from router.foreign_api.routed_experts_parser import RoutedCounts, RoutedExpertsParser, TokenUsage, counted
from router.scheduling.decision import Decision

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Answers that may wait to be counted; further ones are dropped."""
MAX_BYTES = 64 * 1024 * 1024
"""memory limit of these answers"""
WHOLE_PROFILES_PER_SECOND = 2.0
"""Rate of requests whose complete profile is published, for clustering; of the others only the signature is.
"""


class _Passed(NamedTuple):
    decision: Decision
    routing: list[bytes]
    size: int
    usage: TokenUsage


class RoutedExpertsReporter:
    """Queue of answers with expert routing. `tap` and `note` are for the hot path; `run` counts and
    publishes. The queue is bounded; what does not fit is dropped and counted.
    """

    def __init__(self, bus: Bus, context: RouterContext, max_event_bytes: int) -> None:
        self._imports = bus.publisher(context.subjects.imports)
        self._profiles = bus.publisher(context.subjects.requests_read)
        self._view = context.scheduler.view
        self._metrics = context.metrics
        self._threads = context.threads
        self._max_event_bytes = max_event_bytes
        self._waiting: asyncio.Queue[_Passed] = asyncio.Queue(MAX_WAITING)
        self._bytes = 0
        self._allowance = WHOLE_PROFILES_PER_SECOND
        self._allowed_at: float | None = None

    def tap(self, decision: Decision) -> RoutedExpertsParser | None:
        """Return a parser for an answer; None if the engine reports on its own account, or its model's
        experts are unknown.
        """
        engine = decision.target.engine
        return (
            None
            if engine.shape is None or engine.capabilities.experts
            else RoutedExpertsParser(self._max_event_bytes)
        )

    def note(self, decision: Decision, tap: RoutedExpertsParser, usage: TokenUsage) -> bool:
        """Queue the routing of a completed answer. True when it contained any and will be reported."""
        found = tap.found()
        if tap.too_long:
            self._metrics.routings("too_long")
        if not found:
            return False
        size = sum(map(len, found))
        if self._waiting.full() or self._bytes + size > MAX_BYTES:
            self._metrics.routings("dropped")
            return False
        self._bytes += size
        self._waiting.put_nowait(_Passed(decision, found, size, usage))
        return True

    async def run(self) -> None:
        """Count and publish until cancelled."""
        while True:
            passed = await self._waiting.get()
            try:
                await self._publish(passed)
            finally:
                self._bytes -= passed.size

    async def _publish(self, passed: _Passed) -> None:
        engine = passed.decision.target.engine
        assert engine.shape is not None
        clusters, loop = self._view.clusters(engine.model), asyncio.get_running_loop()
        work = (passed, engine.shape, clusters, self._may_sample(loop.time()))
        try:
            reports = await loop.run_in_executor(self._threads, _reports, *work)
        except ValueError as error:
            log.warning("an answer of engine %s is not counted: %s", engine.engine, error)
            self._metrics.routings("bad")
            return
        if reports is None:
            self._metrics.routings("empty")
            return
        try:
            await self._imports.publish(reports[0])
            await self._profiles.publish(reports[1])
        except BusError as error:
            log.warning(
                "the experts that engine %s activated could not be reported: %s", engine.engine, error
            )
            self._metrics.routings("dropped")
        else:
            self._metrics.routings("told")

    def _may_sample(self, now: float) -> bool:
        """Take a token from a bucket that holds one second's worth."""
        passed = 0.0 if self._allowed_at is None else now - self._allowed_at
        self._allowance = min(WHOLE_PROFILES_PER_SECOND, self._allowance + passed * WHOLE_PROFILES_PER_SECOND)
        self._allowed_at = now
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True


def _reports(
    passed: _Passed, shape: ModelShape, clusters: ClusterModel | None, sampled: bool
) -> tuple[CountsImported, RequestsProfiled] | None:
    """Return the reports of one answer; None when nothing was computed. Pure, and slow enough for a thread.
    ValueError as in `counted`.
    """
    found = counted(passed.routing, shape, passed.usage)
    if found is None or found.tokens < 1:
        return None
    decision = passed.decision
    worker_id, rank = decision.target.key
    engine = decision.target.engine
    counts = ExpertCounts.of(found.prompt + found.completion)
    imported = CountsImported(
        model=engine.model, digest=f"answer {decision.id}", tokens=found.tokens, counts=counts
    )
    fits = clusters is not None and clusters.profiles.shape[1:] == (shape.layers, shape.experts)
    profile = RequestProfile(
        decision=decision.id,
        tokens=found.tokens,
        cached_tokens=found.cached,
        signature=_signature(found, clusters if fits else None),
        sample=(
            SampledProfile(prompt=ExpertCounts.of(found.prompt), completion=ExpertCounts.of(found.completion))
            if sampled
            else None
        ),
    )
    version = clusters.version if clusters is not None and fits else 0
    return imported, RequestsProfiled(
        engine=engine.engine,
        worker_id=worker_id,
        rank=rank,
        model=engine.model,
        epoch=0,
        clusters=version,
        requests=(profile,),
    )


def _signature(found: RoutedCounts, clusters: ClusterModel | None) -> bytes:
    """Return the packed signature; without clusters a neutral one."""
    weights = (
        np.zeros(1, np.float32) if clusters is None else clusters.signature(found.prompt + found.completion)
    )
    return pack(weights).tobytes()
