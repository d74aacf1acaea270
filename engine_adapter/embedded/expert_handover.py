"""Experts of a rank, as handovers use them: the event-loop side of a switch to another epoch."""

import asyncio
import logging

import numpy as np
from numpy.typing import NDArray

from engine_adapter.embedded.model_runner import PreparedEpoch
from engine_adapter.embedded.setup import MovableExperts
from engine_adapter.embedded.step_loop import StepLoop
from engine_adapter.engine import Adoption, EngineFailed, ExpertMemory
from fleet.layout import AttentionKind
from fleet.placement import Placement

log = logging.getLogger(__name__)


class RankExperts:
    """`engine_adapter.engine.Experts` of one rank, for the lifetime of its engine. All methods are for the
    event loop."""

    def __init__(self, experts: MovableExperts, steps: StepLoop, copy_ahead_seconds: float) -> None:
        self._experts = experts
        self._steps = steps
        self._copy_ahead_seconds = copy_ahead_seconds
        self._caught_up = asyncio.Event()
        self._open: tuple[PreparedEpoch, asyncio.Future[None]] | None = None
        """Epoch that the step thread switches to once every rank is ready, and the future of the waiting
        caller."""
        self._failure: EngineFailed | None = None

    @property
    def memory(self) -> ExpertMemory:
        return self._experts.arena

    @property
    def cells(self) -> NDArray[np.int32]:
        """int32 [layers, slots_per_rank] of the served epoch. Read-only."""
        return self._experts.cells

    async def prepare(self, placement: Placement, cells: NDArray[np.int32]) -> PreparedEpoch:
        """Implement the port. ValueError when the placement or the cells do not fit the served epoch, or when
        the open requests would not fit its layout of attention."""
        self._steps.check(placement)
        prepared = await asyncio.to_thread(self._experts.prepare, placement, cells)
        if placement.attention != self._steps.placement.attention and self._copy_ahead_seconds:
            await self._copy_ahead(placement.attention)
        return prepared

    def forget(self, adoption: Adoption) -> None:
        """Implement the port. Pages that were copied ahead for it are dropped."""
        self._steps.copy_ahead(None)

    async def adopt(self, adoption: Adoption) -> None:
        """Implement the port. The switch completes even if the caller is cancelled. ValueError for any epoch
        but the next one, or while another is pending. TypeError for an adoption that was not prepared here.
        """
        if self._failure is not None:
            raise EngineFailed(str(self._failure)) from self._failure
        if self._open is None:
            self._open = self._begin(adoption)
        if self._open[0] is not adoption:
            raise ValueError(
                f"experts: epoch {self._open[0].placement.epoch} is still pending; adopt one after the other"
            )
        await asyncio.shield(self._open[1])

    def caught_up(self) -> None:
        """Complete the copies ahead of a switch of attention, for now."""
        self._caught_up.set()

    def flipped(self, prepared: PreparedEpoch) -> None:
        """Complete the pending switch. Called after the step thread has switched."""
        if self._open is not None and self._open[0] is prepared:
            self._open[1].set_result(None)
            self._open = None

    def fail(self, failure: EngineFailed) -> None:
        """Fail the pending switch, because the engine ends."""
        self._failure = failure
        if self._open is not None:
            self._open[1].set_exception(EngineFailed(str(failure)))
            self._open[1].exception()  # Retrieve the exception, in case the caller was cancelled.
            self._open = None

    async def _copy_ahead(self, to: AttentionKind) -> None:
        """Copy KV pages for this layout, until all were copied that there are, or it takes too long."""
        self._caught_up.clear()
        self._steps.copy_ahead(to)
        try:
            await asyncio.wait_for(self._caught_up.wait(), self._copy_ahead_seconds)
        except TimeoutError:
            log.info(
                "not all KV pages could be copied ahead within %g s (copy_ahead_seconds); the step that"
                " switches copies the rest",
                self._copy_ahead_seconds,
            )
        except asyncio.CancelledError:
            self._steps.copy_ahead(None)
            raise

    def _begin(self, adoption: Adoption) -> tuple[PreparedEpoch, "asyncio.Future[None]"]:
        served = self._steps.placement.epoch
        if not isinstance(adoption, PreparedEpoch):
            raise TypeError(f"experts: {adoption!r} was not prepared by this engine")
        if adoption.placement.epoch != served + 1:
            raise ValueError(f"experts: epoch {adoption.placement.epoch} cannot follow epoch {served}")
        self._steps.adopt(adoption)
        return adoption, asyncio.get_running_loop().create_future()
