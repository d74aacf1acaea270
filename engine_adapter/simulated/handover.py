"""Switch of a simulated engine's ranks to another placement: each rank becomes ready, and all flip at the
first step at which all are ready.

The ranks of the embedded engine agree on this through step headers. Here the single step loop of all ranks
knows it directly.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine import Adoption, EngineFailed
from engine_adapter.simulated.model.dispatch_model import DispatchModel
from engine_adapter.simulated.model.memory import SimulatedCells
from fleet.handover import flips
from fleet.placement import Placement


class SimulatedEpoch(NamedTuple):
    """A placement that one rank has prepared to serve (`engine_adapter.engine.Adoption`)."""

    placement: Placement
    cells: NDArray[np.int32]
    """Cells of this rank's slots."""
    routes: DispatchModel


class AdoptionRun:
    """Pending switches of the engine's ranks. wake: called when a rank becomes ready, because a sleeping
    engine must then take a step."""

    def __init__(
        self, ranks: int, routes: Callable[[Placement], DispatchModel], wake: Callable[[], None]
    ) -> None:
        """routes: computes the dispatch model in a thread, which takes a second for many experts and
        ranks."""
        self._routes = routes
        self._wake = wake
        self._ready: list[tuple[SimulatedEpoch, asyncio.Future[None]] | None] = [None] * ranks
        self._coming: tuple[Placement, asyncio.Future[DispatchModel]] | None = None

    async def routes(self, placement: Placement) -> DispatchModel:
        """Return the dispatch model of a placement. Computed once for all ranks."""
        if self._coming is None or self._coming[0] != placement:
            self._coming = (
                placement,
                asyncio.get_running_loop().run_in_executor(None, self._routes, placement),
            )
        return await asyncio.shield(self._coming[1])

    async def adopt(self, rank: int, prepared: SimulatedEpoch) -> None:
        """Mark a rank as ready, and return once the placement is served."""
        served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready[rank] = prepared, served
        self._wake()
        await served

    def due(self, served: int) -> Sequence[SimulatedEpoch]:
        """Return the epochs to switch to at this step, by rank. Empty if no switch is due."""
        ready = [None if one is None else one[0] for one in self._ready]
        complete = [one for one in ready if one is not None]
        return (
            complete
            if len(complete) == len(ready) and flips(served, tuple(one.placement.epoch for one in complete))
            else ()
        )

    def done(self) -> None:
        """Complete the switch of all ranks."""
        for rank, one in enumerate(self._ready):
            if one is not None and not one[1].done():
                one[1].set_result(None)
            self._ready[rank] = None
        self._coming = None

    def fail(self, failure: EngineFailed) -> None:
        """Fail all pending switches, because there is no next step."""
        for one in self._ready:
            if one is not None and not one[1].done():
                one[1].set_exception(type(failure)(str(failure)))


class HandoverGroup(Protocol):
    """The engine, as the experts of one of its ranks see it."""

    placement: Placement
    adoptions: AdoptionRun

    def refuse_if_failed(self) -> None: ...


class SimulatedExperts:
    """Handover operations of one rank (`engine_adapter.engine.Experts`)."""

    def __init__(self, engine: HandoverGroup, rank: int, *, parts: int, spare_layers: int) -> None:
        """parts, spare_layers: as in `SimulatedCells`."""
        per, layers = engine.placement.slots_per_rank, engine.placement.layers
        self.memory = SimulatedCells(engine.placement, rank, parts, spare_layers)
        self.cells = np.arange(layers * per, dtype=np.int32).reshape(layers, per)
        self._engine = engine
        self._rank = rank

    async def prepare(self, placement: Placement, cells: NDArray[np.int32]) -> SimulatedEpoch:
        """Prepare a placement. ValueError when the placement is of another engine, or a slot's cell does not
        hold its expert, or its group of a sharded layer."""
        now = self._engine.placement
        if (placement.layers, placement.experts, placement.ranks, placement.slots_per_rank) != (
            now.layers,
            now.experts,
            now.ranks,
            now.slots_per_rank,
        ):
            raise ValueError(f"simulated engine: {placement!r} does not follow {now!r}")
        wrong = self.memory.misplaced(placement, cells)
        if wrong is not None:
            raise ValueError(
                f"simulated engine: the cell of layer {wrong[0]} slot {wrong[1]} on rank {self._rank} does"
                " not hold that slot's expert or group"
            )
        return SimulatedEpoch(placement, cells.copy(), await self._engine.adoptions.routes(placement))

    def forget(self, adoption: Adoption) -> None:
        """Do nothing: a prepared placement holds nothing."""

    async def adopt(self, adoption: Adoption) -> None:
        if not isinstance(adoption, SimulatedEpoch):
            raise TypeError(f"simulated engine: {adoption!r} was not prepared by it")
        self._engine.refuse_if_failed()
        await self._engine.adoptions.adopt(self._rank, adoption)
