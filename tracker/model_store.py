"""All that the tracker knows, and whose it is.

Windows and placements (`EngineActivity`) and change detection (`DriftDetector`) belong to the event loop. Clusters and tables (`Learners`) belong to
one thread: nothing touches them but functions handed to `learning`. A second thread (`aside`) runs what is long and pure on values
that never change: fitting clusters, reading placements, writing files.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from fleet.events import PopularityDescribed, PopularityShifted, RankPopularity
from tracker.activity.engine_activity import EngineActivity, ReportedCounts
from tracker.config import TrackerConfig
from tracker.drift.detector import DriftDetector
from tracker.prediction.learners import Learners, LearntTables
from tracker.state_file import SavedState

logger = logging.getLogger(__name__)
T = TypeVar("T")

AT_ONCE = 16
"""Ranks looked at before the event loop turns."""


class ModelStore:
    """Made and used on one event loop. Its time is that of `clock`, moved so that it goes on across restarts.

    clock: seconds that never go back. first_version: of everything that will be said, above all that was said before.
    learning, fitting: run functions one at a time; None: threads of its own, ended by `close`.
    """

    def __init__(
        self, config: TrackerConfig, clock: Callable[[], float], first_version: int, learning: Executor | None = None, fitting: Executor | None = None
    ) -> None:
        self.activity = EngineActivity(config, first_version)
        self.drifts: dict[str, DriftDetector] = {}
        self.lessons = Learners(config, first_version)
        """for functions in the learning thread only"""
        self.config = config
        self._clock = clock
        self._ahead = 0.0
        self._first_version = first_version
        self._learning = learning or ThreadPoolExecutor(1, "learns")
        self._fitting = fitting or ThreadPoolExecutor(1, "fits")
        self._own_threads = [thread for thread, given in ((self._learning, learning), (self._fitting, fitting)) if given is None]

    def now(self) -> float:
        return self._clock() + self._ahead

    async def learning(self, work: Callable[..., T], *arguments: object) -> T:
        """In the thread that owns what is learnt."""
        return await asyncio.get_running_loop().run_in_executor(self._learning, work, *arguments)

    async def aside(self, work: Callable[..., T], *arguments: object) -> T:
        """In the thread for what is long and pure."""
        return await asyncio.get_running_loop().run_in_executor(self._fitting, work, *arguments)

    def close(self) -> None:
        """End the threads, without waiting for what they are at."""
        for thread in self._own_threads:
            thread.shutdown(wait=False, cancel_futures=True)

    # The present

    def observe(self, seen: ReportedCounts, now: float) -> None:
        """Let the change detection of a model see a report."""
        drift = self.drifts.get(seen.model)
        if drift is None or (drift.layers, drift.experts) != seen.counts.shape:
            drift = self.drifts[seen.model] = DriftDetector(self.config, *seen.counts.shape)
        drift.observe(seen.counts, seen.tokens, now)

    def judge(self, now: float) -> list[PopularityShifted]:
        """What shifted or settled since the last call."""
        for name in self.drifts.keys() - self.activity.shapes.keys():
            del self.drifts[name]
        found = [(name, shift) for name, drift in self.drifts.items() if (shift := drift.judge(now)) is not None]
        return [PopularityShifted(model=name, version=self.activity.next_version(), **shift._asdict()) for name, shift in found]

    async def follow(self) -> None:
        """Learn about the models that are followed, and no others."""
        await self.learning(self.lessons.follow, self.activity.shapes)

    async def asked(self, about: Callable[[str], T], name: str) -> T:
        """What `lessons` knows of a model; one that has just been named is followed at once."""
        await self.follow()
        return await self.learning(about, name)

    async def popularity(self, name: str) -> PopularityDescribed | None:
        """Everything about a model, for people; None for a model nobody named."""
        learnt, now = await self.asked(self.lessons.learnt, name), self.now()
        slow, fast, drift = self.activity.profile(name, now), self.activity.fast_profile(name, now), self.drifts.get(name)
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
        """Figures of each model."""
        found: dict[str, dict[str, float | None]] = {name: {"profile_age_seconds": age} for name, age in self.activity.ages(now).items()}
        for name, drift in self.drifts.items():
            found.setdefault(name, {}).update(divergence=drift.divergence, shifted=float(drift.shifted))
        for name, known in learnt.items():
            figures = known._asdict() | {"clusters": len(known.clusters)}
            del figures["sources"]
            found.setdefault(name, {}).update(figures)
        return found

    # Across restarts

    async def state(self, wall_now: float) -> SavedState:
        """Everything. wall_now: the wall clock, seconds."""
        pieces = []
        for number, piece in enumerate(self.activity.state(), start=1):
            pieces.append(piece)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        return SavedState(
            saved_at=wall_now,
            now=self.now(),
            meaning_from=self.lessons.meaning_from,
            activity=tuple(pieces),
            learnt=await self.learning(self.lessons.state),
            drifts={name: drift.state() for name, drift in self.drifts.items()},
        )

    async def restore(self, saved: SavedState, wall_now: float) -> None:
        """Go on where `state` stood, before anything was heard; the time in between counts. A part that cannot be used begins afresh."""
        self._ahead = saved.now + max(0.0, wall_now - saved.saved_at) - self._clock()
        activity = EngineActivity(self.config, self._first_version)
        try:
            activity.restore(saved.activity)
        except ValueError as error:
            logger.warning("what was active is not known any more: %s", error)
            return
        self.activity = activity
        self.lessons.meaning_from = min(self.lessons.meaning_from, saved.meaning_from)
        for name, shape in activity.shapes.items():
            await self._restore_model(name, shape, saved)

    async def _restore_model(self, name: str, shape: tuple[int, int], saved: SavedState) -> None:
        try:
            if name in saved.learnt:
                await self.learning(self.lessons.restore, name, shape, saved.learnt[name])
        except ValueError as error:
            logger.warning("what was learnt of %s is not known any more: %s", name, error)
        try:
            if name in saved.drifts:
                self.drifts[name] = _drift(self.config, shape, saved.drifts[name])
        except ValueError as error:
            logger.warning("what was usual for %s is not known any more: %s", name, error)


def _drift(config: TrackerConfig, shape: tuple[int, int], state: dict[str, Any]) -> DriftDetector:
    drift = DriftDetector.restore(config, state)
    if (drift.layers, drift.experts) != shape:
        raise ValueError(f"it is of {drift.layers} x {drift.experts} experts, the model has {shape[0]} x {shape[1]}")
    return drift
