"""Topic `experts`: demand for experts, as the tracker knows it, against their placement."""

import asyncio

from bus import Bus, BusError, NobodyThere
from fleet.completions import ApiError
from fleet.requests.demand import DescribePopularity, PopularityDescribed
from router.dashboard.topic import Topic
from router.dashboard.views.experts import (
    ExpertMaps,
    ExpertsPicture,
    PlacedEngine,
    Popularity,
    Replicas,
    expert_maps,
    experts_picture,
    maps_version,
)
from router.fleet_state.engine_state import EngineStatus
from router.service import RouterService

ANSWER_SECONDS = 5.0
_PAUSE_SECONDS = 4.0
"""The tracker publishes changes every 2 s by default, and its answer holds two tables of the model."""
_GONE = (EngineStatus.LEFT, EngineStatus.DEAD)


class ExpertsTopic(Topic):
    """The tracker's answers about each model, and the placements that the router knows."""

    name = "experts"

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._popularity: dict[str, Popularity] = {}
        """by model; empty while no page watches"""
        self._replicas: dict[int, Replicas] = {}
        """by worker_id"""
        self._maps: dict[str, ExpertMaps] = {}
        """last maps by engine"""

    def view(self) -> ExpertsPicture:
        engines = self._present()
        self._replicas = {one.joined.worker_id: self._replicas_of(one) for one in engines}
        return experts_picture(engines, self._popularity, self._replicas)

    def _present(self) -> list[PlacedEngine]:
        """Return the engines with experts that have not left."""
        return [
            PlacedEngine(state.joined, state.placement, state.nodes)
            for state in self._service.view.engines()
            if state.placement is not None and state.status not in _GONE
        ]

    def _replicas_of(self, engine: PlacedEngine) -> Replicas:
        known = self._replicas.get(engine.joined.worker_id)
        if known is not None and known.epoch == engine.placement.epoch:
            return known
        return Replicas.of(engine.placement)

    async def maps(self, name: str) -> ExpertMaps:
        """Return the maps of an engine, computed in a thread. ApiError 404 if there is no such engine with
        experts.
        """
        present = self._present()
        engine = next((one for one in present if one.joined.engine == name), None)
        if engine is None:
            message = f"there is no engine {name[:64]!r} that reports experts"
            raise ApiError(404, message, code="engine_not_found")
        popularity = self._popularity.get(engine.joined.model, Popularity())
        known = self._maps.get(name)
        if known is not None and known.maps == maps_version(engine, popularity):
            return known
        found = await asyncio.get_running_loop().run_in_executor(
            self._service.threads, expert_maps, engine, popularity
        )
        names = {one.joined.engine for one in present}
        self._maps = {other: maps for other, maps in self._maps.items() if other in names} | {name: found}
        return found

    async def follow(self) -> None:
        """Ask the tracker about every model in turn, until cancelled."""
        try:
            while (bus := self._service.bus) is not None:
                models = {one.joined.model for one in self._present()}
                self._popularity = {
                    model: await self._asked(bus, model, self._popularity.get(model, Popularity()))
                    for model in sorted(models)
                }
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            self._popularity, self._maps = {}, {}

    async def _asked(self, bus: Bus, model: str, known: Popularity) -> Popularity:
        subject = self._service.subjects.describe_profile
        try:
            answer = await bus.request(subject, DescribePopularity(model=model), ANSWER_SECONDS)
        except NobodyThere:
            return known._replace(silence="no tracker is running")
        except BusError as error:
            return known._replace(silence=f"the tracker does not answer: {error}")
        if not isinstance(answer, PopularityDescribed):
            return known._replace(silence=f"the tracker answered with {type(answer).__name__}")
        try:
            return known.answered(answer)
        except ValueError as error:
            return known._replace(silence=f"the tracker's answer cannot be used: {error}")
