"""Experts of a rank, as handovers use them: the event-loop side of a switch to another epoch."""

import asyncio

import numpy as np
from numpy.typing import NDArray

from engine_adapter.embedded.model_runner import PreparedEpoch
from engine_adapter.embedded.setup import MovableExperts
from engine_adapter.embedded.step_loop import StepLoop
from engine_adapter.engine import Adoption, EngineFailed, ExpertMemory
from fleet.placement import Placement


class RankExperts:
    """`engine_adapter.engine.Experts` of one rank, for the lifetime of its engine. All methods are for the
    event loop."""

    def __init__(self, experts: MovableExperts, steps: StepLoop) -> None:
        self._experts = experts
        self._steps = steps
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
        return await asyncio.to_thread(self._experts.prepare, placement, cells)

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

    def _begin(self, adoption: Adoption) -> tuple[PreparedEpoch, "asyncio.Future[None]"]:
        served = self._steps.placement.epoch
        if not isinstance(adoption, PreparedEpoch):
            raise TypeError(f"experts: {adoption!r} was not prepared by this engine")
        if adoption.placement.epoch != served + 1:
            raise ValueError(f"experts: epoch {adoption.placement.epoch} cannot follow epoch {served}")
        self._steps.adopt(adoption)
        return adoption, asyncio.get_running_loop().create_future()
