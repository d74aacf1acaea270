"""A rank's experts, as handovers use them: the event loop's side of going over to another epoch."""

import asyncio

import numpy as np
from numpy.typing import NDArray

from engine_adapter.embedded.model_runner import PreparedEpoch
from engine_adapter.embedded.setup import MovableExperts
from engine_adapter.embedded.step_loop import StepLoop
from engine_adapter.engine import Adoption, EngineFailed, ExpertMemory
from fleet.placement import Placement


class RankExperts:
    """`engine_adapter.engine.Experts` of one rank, from its start to its end. All methods are for the event loop."""

    def __init__(self, experts: MovableExperts, steps: StepLoop) -> None:
        self._experts = experts
        self._steps = steps
        self._open: tuple[PreparedEpoch, asyncio.Future[None]] | None = None
        """what the step thread goes over to as soon as every rank is ready, and who waits for it"""
        self._failure: EngineFailed | None = None

    @property
    def memory(self) -> ExpertMemory:
        return self._experts.arena

    @property
    def cells(self) -> NDArray[np.int32]:
        """int32 [layers, slots_per_rank], of the epoch that is served; not to be written to."""
        return self._experts.cells

    async def prepare(self, placement: Placement, cells: NDArray[np.int32]) -> PreparedEpoch:
        """As the port says; ValueError when the placement or the cells do not fit what is served."""
        return await asyncio.to_thread(self._experts.prepare, placement, cells)

    async def adopt(self, adoption: Adoption) -> None:
        """As the port says, also when nobody waits for it any more. ValueError for any epoch but the one after that which is served, or
        while another is waited for; TypeError for what was not prepared here."""
        if self._failure is not None:
            raise EngineFailed(str(self._failure)) from self._failure
        if self._open is None:
            self._open = self._begin(adoption)
        if self._open[0] is not adoption:
            raise ValueError(f"experts: epoch {self._open[0].placement.epoch} is still waited for; adopt one after the other")
        await asyncio.shield(self._open[1])

    def flipped(self, prepared: PreparedEpoch) -> None:
        """The step thread has gone over to it."""
        if self._open is not None and self._open[0] is prepared:
            self._open[1].set_result(None)
            self._open = None

    def fail(self, failure: EngineFailed) -> None:
        """The engine ends; whoever waits hears of it."""
        self._failure = failure
        if self._open is not None:
            self._open[1].set_exception(EngineFailed(str(failure)))
            self._open[1].exception()  # perhaps nobody waits any more
            self._open = None

    def _begin(self, adoption: Adoption) -> tuple[PreparedEpoch, "asyncio.Future[None]"]:
        served = self._steps.placement.epoch
        if not isinstance(adoption, PreparedEpoch):
            raise TypeError(f"experts: {adoption!r} was not prepared by this engine")
        if adoption.placement.epoch != served + 1:
            raise ValueError(f"experts: epoch {adoption.placement.epoch} cannot follow epoch {served}")
        self._steps.adopt(adoption)
        return adoption, asyncio.get_running_loop().create_future()
