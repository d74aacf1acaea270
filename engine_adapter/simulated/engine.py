"""The simulated engine: all ranks of one engine in one event loop, stepping together on the time model.

The embedded engine runs a process per rank because torch computes there. Nothing is computed here. So P ranks
are P sets of state (KV cache, queue, answers), and one task performs the steps: it plans every rank, waits as
long as `fleet.timing` predicts for the slowest rank, and updates the state. A rank without work takes part.
When no rank has work, the engine sleeps.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from engine_adapter.engine import EngineFailed
from engine_adapter.initial_placement import fitting_or, initial
from engine_adapter.serving.fact_log import DecodeSteps
from engine_adapter.simulated.handover import AdoptionRun
from engine_adapter.simulated.link_model import SimulatedLinks
from engine_adapter.simulated.model.config import PLACEMENTS, SimulatedConfig
from engine_adapter.simulated.model.dispatch_model import DispatchModel, StepTraffic
from engine_adapter.simulated.model.faults import FaultOrder, Faults
from engine_adapter.simulated.model.layout_times import layout_times
from engine_adapter.simulated.model.routing_model import RoutingModel, place
from engine_adapter.simulated.model.step_time import StepPlan, seconds, tokens_of_row
from engine_adapter.simulated.model.step_totals import StepTotals
from engine_adapter.simulated.model.text import WordTokenizer
from engine_adapter.simulated.rank import SimulatedRank
from fleet.placement import Placement, PlacementRecord

_CLOCK_SECONDS = 1e-4
"""A timer may fire this much too early. The loop does not wait again for the rest."""
_LAG_SECONDS = 0.25
"""Maximum lag behind the clock. Time lost beyond it on a busy machine is not caught up."""

log = logging.getLogger(__name__)


class EngineDied(EngineFailed):
    """The engine was ordered to die without notice."""


class SimulatedEngine:
    """An engine of several ranks. All methods are for one event loop."""

    def __init__(
        self,
        config: SimulatedConfig,
        placement: Placement | None = None,
        last: PlacementRecord | None = None,
        name: str = "",
    ) -> None:
        """placement: None for the configured one. ValueError when it is not of the model's shape and the
        engine's ranks.

        last: the last epoch of the engine's previous incarnation. It is served if it fits the first
        placement. name: engines with different names draw different random numbers, even with the same seed.
        """
        self.config = config
        self.failure: EngineFailed | None = None
        self.faults = Faults(config.ranks)
        self.routing = RoutingModel(config)
        self.tokenizer = WordTokenizer()
        first = self._first() if placement is None else placement
        self.placement = fitting_or(first, lambda: last, config.unshardable)
        self.at_death: Callable[[], None] = _ignore
        """Called when the engine is ordered to die, before its open requests fail."""
        self.steps = 0
        """Steps since the engine started."""
        if (self.placement.layers, self.placement.experts, self.placement.ranks) != (
            self.routing.shape.layers,
            self.routing.shape.experts,
            config.ranks,
        ):
            raise ValueError(
                f"simulated engine: {self.placement!r} is not of {self.routing.shape} on {config.ranks} ranks"
            )
        self.routes = self._routes_of(self.placement)
        self.layout_times = layout_times(config, self.routing, self.placement)
        """Of the layouts that the engine can change to."""
        self.totals = self._no_steps()
        self.adoptions = AdoptionRun(config.ranks, self._routes_of, self.wake)
        self.links = SimulatedLinks(config, self.faults, self.chance)
        self._random = np.random.default_rng((config.seed, xxhash.xxh3_64_intdigest(name.encode())))
        self._decoding = DecodeSteps()
        self._wake = asyncio.Event()
        self._alarm = asyncio.Event()
        self._over = asyncio.Event()
        self.ranks = tuple(SimulatedRank(self, number) for number in range(config.ranks))

    def _routes_of(self, placement: Placement) -> DispatchModel:
        return DispatchModel(self.routing, placement, self.config.node_of_rank, cover=self.config.covers)

    def _no_steps(self) -> StepTotals:
        return StepTotals.none(self.placement.layers, self.placement.ranks)

    def _first(self) -> Placement:
        """Return the configured placement as epoch 0. ValueError when its file cannot be read or is for
        another model."""
        config, shape = self.config, self.routing.shape
        if config.placement in PLACEMENTS:
            return place(self.routing, config)
        return initial(
            Path(config.placement),
            layers=shape.layers,
            experts=shape.experts,
            ranks=config.ranks,
            slots_per_rank=config.slots_per_rank,
            unshardable=config.unshardable,
        )

    @property
    def now(self) -> float:
        """Time of the event loop's clock in seconds."""
        return asyncio.get_running_loop().time()

    @property
    def step_seconds(self) -> float | None:
        """Median duration of recent decode-only steps in real seconds. None: there were none recently."""
        return self._decoding.median(self.now)

    def order(self, order: FaultOrder) -> None:
        """Start a fault (`faults`). ValueError states what is wrong with the order."""
        self.faults.order(order, self.now)
        if order.fault == "die":
            self.at_death()
            self._fail(EngineDied("the engine was ordered to die"))
        self._alarm.set()
        for rank in self.ranks:
            rank.report_changes()

    def chance(self, share: float) -> bool:
        """Return True with this probability."""
        return bool(self._random.random() < share)

    def draw(self, bound: int) -> int:
        """Draw uniformly from 0 to most - 1."""
        return int(self._random.integers(bound))

    def wake(self) -> None:
        """Wake the step loop, because there is work."""
        self._wake.set()

    def refuse_if_failed(self) -> None:
        """EngineFailed once the engine has ended."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    async def serve(self, rank: int) -> None:
        """Serve one rank: rank 0 steps for all, the others wait. Cancelling any of them ends the engine."""
        try:
            if rank == 0:
                await self._step()
            else:
                await self._over.wait()
        except asyncio.CancelledError:
            self._fail(EngineFailed(f"rank {rank} is stopping"))
            raise
        except Exception as error:
            log.exception("the simulated engine failed")
            self._fail(EngineFailed(f"rank {rank}: {error}"))
        self.refuse_if_failed()

    async def _step(self) -> None:
        """Step until the engine has failed."""
        due = self.now
        while self.failure is None:
            self._flip()
            plans = [rank.plan() for rank in self.ranks]
            if not any(one.parts for one in plans):
                await self._sleep()
                due = self.now
                continue
            began = self.now
            by_row = np.stack([tokens_of_row(one.parts, self.routing.rows) for one in plans])
            caused = self.routes.traffic(by_row)
            lasts = self._seconds(plans, caused)
            due = max(due, began - _LAG_SECONDS) + lasts
            await self._until(due)
            self._book(plans, by_row, caused, max(lasts, self.now - began))

    def _flip(self) -> None:
        """Switch to the placement that all ranks are ready for, if there is one."""
        prepared = self.adoptions.due(self.placement.epoch)
        if prepared:
            if len({one.placement.digest for one in prepared}) > 1:
                raise ValueError(
                    f"the ranks have different placements of epoch {prepared[0].placement.epoch}; the engine"
                    " must be restarted"
                )
            for rank in self.ranks:
                rank.count()
            self.placement, self.routes = prepared[0].placement, prepared[0].routes
            self.totals = self._no_steps()
            for rank, one in zip(self.ranks, prepared, strict=True):
                rank.experts.cells, rank.counted = one.cells, self.totals
                rank.report_changes()
            self.adoptions.done()

    def _seconds(self, plans: Sequence[StepPlan], caused: StepTraffic) -> float:
        needed = seconds(self.config.speed, plans, caused)
        slow = [self.faults.factor("slow", rank, self.now) for rank in range(self.config.ranks)]
        return self.config.time_scale * float((needed * slow).max())

    async def _sleep(self) -> None:
        """Sleep until there is work. Check the ranks' state first."""
        for rank in self.ranks:
            rank.check_idle()
        self._wake.clear()
        await self._wake.wait()

    async def _until(self, due: float) -> None:
        """Wait until the step is over, including delays by faults, or until the engine fails. Always yields
        to other tasks."""
        await asyncio.sleep(0)
        while (
            self.failure is None
            and (end := max(due, self.faults.held_until(self.now))) > self.now + _CLOCK_SECONDS
        ):
            self._alarm.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(end if end < float("inf") else None):
                    await self._alarm.wait()

    def _book(
        self, plans: Sequence[StepPlan], by_row: NDArray[np.int64], caused: StepTraffic, lasted: float
    ) -> None:
        """Record a completed step. A step in which the engine failed has no results. lasted: the simulated
        duration, or longer on a busy machine."""
        if self.failure is not None:
            return
        self.steps += 1
        if not any(one.prefill_tokens for one in plans):
            self._decoding.note(self.now, lasted)
        planned = list(by_row)
        booked = [rank.book(done, rows) for rank, done, rows in zip(self.ranks, plans, planned, strict=True)]
        if any(one is not other for one, other in zip(booked, planned, strict=True)):
            caused = self.routes.traffic(np.stack(booked))
        self.totals = self.totals.after(lasted, caused.served)

    def _fail(self, failure: EngineFailed) -> None:
        """Fail the engine and all open requests. Only the first failure counts."""
        if self.failure is not None:
            return
        self.failure = failure
        for rank in self.ranks:
            rank.fail(failure)
        self.adoptions.fail(failure)
        for event in (self._wake, self._alarm, self._over):
            event.set()


def _ignore() -> None:
    """Do nothing: the default for `at_death`."""
