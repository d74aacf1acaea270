"""Complete state of the tracker, with its ownership by threads.

Windows and placements (`EngineActivity`) and change detection (`DriftDetector`) belong to the event loop.
Clusters and tables (`Learners`) belong to one thread: only functions passed to `learning` access them. A
second thread (`aside`) runs long, pure work on immutable values: fitting clusters, decoding placements,
writing files.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from fleet.facts.demand import PopularityShifted
from fleet.requests.demand import PopularityDescribed, RankPopularity
from tracker.activity.engine_activity import EngineActivity, ReportedCounts
from tracker.config import TrackerConfig
from tracker.drift.detector import DriftDetector
from tracker.prediction.learners import Learners, LearntTables
from tracker.state_file import SavedState

logger = logging.getLogger(__name__)
T = TypeVar("T")

AT_ONCE = 16
"""Ranks processed before control returns to the event loop."""


class ModelStore:
    """The tracker's state. Create and use it on one event loop.

    clock: monotonic seconds. The store's own time continues across restarts. first_version: of everything
    published, above all versions published before. learning, fitting: run functions one at a time; None: own
    threads, ended by `close`.
    """

    def __init__(
        self,
        config: TrackerConfig,
        clock: Callable[[], float],
        first_version: int,
        learning: Executor | None = None,
        fitting: Executor | None = None,
    ) -> None:
        self.activity = EngineActivity(config, first_version)
        self.drifts: dict[str, DriftDetector] = {}
        self.learners = Learners(config, first_version)
        """only for functions in the learning thread"""
        self.config = config
        self._clock = clock
        self._ahead = 0.0
        self._first_version = first_version
        self._learning = learning or ThreadPoolExecutor(1, "learns")
        self._fitting = fitting or ThreadPoolExecutor(1, "fits")
        self._own_threads = [
            thread
            for thread, given in ((self._learning, learning), (self._fitting, fitting))
            if given is None
        ]

    def now(self) -> float:
        return self._clock() + self._ahead

    async def learning(self, work: Callable[..., T], *arguments: object) -> T:
        """Run work in the thread that owns the learnt state."""
        return await asyncio.get_running_loop().run_in_executor(self._learning, work, *arguments)

    async def aside(self, work: Callable[..., T], *arguments: object) -> T:
        """Run long, pure work in the second thread."""
        return await asyncio.get_running_loop().run_in_executor(self._fitting, work, *arguments)

    def close(self) -> None:
        """End the threads without waiting for their current work."""
        for thread in self._own_threads:
            thread.shutdown(wait=False, cancel_futures=True)

    # Present state

    def observe(self, seen: ReportedCounts, now: float) -> None:
        """Pass a report to the change detection of its model."""
        drift = self.drifts.get(seen.model)
        if drift is None or (drift.layers, drift.experts) != seen.counts.shape:
            drift = self.drifts[seen.model] = DriftDetector(self.config, *seen.counts.shape)
        drift.observe(seen.counts, seen.tokens, now)

    def evaluate(self, now: float) -> list[PopularityShifted]:
        """Return the shifts that started or settled since the last call."""
        for name in self.drifts.keys() - self.activity.shapes.keys():
            del self.drifts[name]
        found = [
            (name, shift) for name, drift in self.drifts.items() if (shift := drift.evaluate(now)) is not None
        ]
        return [
            PopularityShifted(model=name, version=self.activity.next_version(), **shift._asdict())
            for name, shift in found
        ]

    async def follow(self) -> None:
        """Learn about exactly the tracked models."""
        await self.learning(self.learners.follow, self.activity.shapes)

    async def query(self, about: Callable[[str], T], name: str) -> T:
        """Query `learners` about a model. A model named for the first time is tracked at once."""
        await self.follow()
        return await self.learning(about, name)

    async def popularity(self, name: str) -> PopularityDescribed | None:
        """Return the complete state of a model, for display; None for a model that was never named."""
        learnt, now = await self.query(self.learners.learnt, name), self.now()
        slow, fast, drift = (
            self.activity.profile(name, now),
            self.activity.fast_profile(name, now),
            self.drifts.get(name),
        )
        if learnt is None or slow is None or fast is None:
            return None
        ranks = await self._ranks(name, now)
        return PopularityDescribed(
            model=name,
            tokens=slow.tokens,
            tokens_per_second=sum(rank.tokens_per_second for rank in ranks),
            fast=fast,
            slow=slow.profile,
            ranks=ranks,
            shifted=drift is not None and drift.shifted,
            divergence=None if drift is None else drift.divergence,
            threshold=None if drift is None else drift.threshold,
            **learnt._asdict(),
        )

    async def _ranks(self, name: str, now: float) -> tuple[RankPopularity, ...]:
        found = []
        for number, key in enumerate(self.activity.rank_keys(name), start=1):
            if (rank := self.activity.rank_popularity(key, now)) is not None:
                found.append(rank)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        return tuple(found)

    def measures(self, learnt: dict[str, LearntTables], now: float) -> dict[str, dict[str, float | None]]:
        """Return the gauges of each model."""
        found: dict[str, dict[str, float | None]] = {
            name: {"profile_age_seconds": age} for name, age in self.activity.ages(now).items()
        }
        for name, drift in self.drifts.items():
            found.setdefault(name, {}).update(divergence=drift.divergence, shifted=float(drift.shifted))
        for name, known in learnt.items():
            figures = known._asdict() | {"clusters": len(known.clusters)}
            del figures["sources"]
            found.setdefault(name, {}).update(figures)
        return found

    # Restarts

    async def state(self, wall_now: float) -> SavedState:
        """Return the complete state. wall_now: wall clock, seconds."""
        pieces = []
        for number, piece in enumerate(self.activity.state(), start=1):
            pieces.append(piece)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        return SavedState(
            saved_at=wall_now,
            now=self.now(),
            meaning_from=self.learners.meaning_from,
            activity=tuple(pieces),
            learnt=await self.learning(self.learners.state),
            drifts={name: drift.state() for name, drift in self.drifts.items()},
        )

    async def restore(self, saved: SavedState, wall_now: float) -> None:
        """Continue from a saved state. Call before the first message. The time in between counts.

        A part that cannot be restored starts empty.
        """
        self._ahead = saved.now + max(0.0, wall_now - saved.saved_at) - self._clock()
        activity = EngineActivity(self.config, self._first_version)
        try:
            activity.restore(saved.activity)
        except ValueError as error:
            logger.warning("the saved activity cannot be restored: %s", error)
            return
        self.activity = activity
        self.learners.meaning_from = min(self.learners.meaning_from, saved.meaning_from)
        for name, shape in activity.shapes.items():
            await self._restore_model(name, shape, saved)

    async def _restore_model(self, name: str, shape: tuple[int, int], saved: SavedState) -> None:
        try:
            if name in saved.learnt:
                await self.learning(self.learners.restore, name, shape, saved.learnt[name])
        except ValueError as error:
            logger.warning("the learnt state of %s cannot be restored: %s", name, error)
        try:
            if name in saved.drifts:
                self.drifts[name] = _drift(self.config, shape, saved.drifts[name])
        except ValueError as error:
            logger.warning("the drift state of %s cannot be restored: %s", name, error)


def _drift(config: TrackerConfig, shape: tuple[int, int], state: dict[str, Any]) -> DriftDetector:
    drift = DriftDetector.restore(config, state)
    if (drift.layers, drift.experts) != shape:
        raise ValueError(
            f"it is of {drift.layers} x {drift.experts} experts, the model has {shape[0]} x {shape[1]}"
        )
    return drift
