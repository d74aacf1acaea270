"""Topic `fleet`: the view *Fleet* of a router process."""

from router.dashboard.topic import Topic
from router.dashboard.views.fleet import FleetPicture, ModelNow, RouterNow, fleet_picture
from router.service import RouterService


class FleetTopic(Topic):
    """Everything comes from the router's own state."""

    name = "fleet"

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def view(self) -> FleetPicture:
        service = self._service
        engines = list(service.view.engines())
        models = {model: self._model(model) for model in {state.joined.model for state in engines}}
        unheard = {name: url for name, url, _, state in service.backends.known() if state is None}
        return fleet_picture(self._router(), engines, models, unheard)

    def _router(self) -> RouterNow:
        service = self._service
        return RouterNow(
            tag=service.tag,
            ready=service.ready,
            missing=service.missing,
            bus_silent=service.bus_silent,
            stopping=service.draining or service.refusing,
            in_flight=service.metrics.in_flight,
            waiting=len(service.wait_queue),
            models=service.view.models(live=True),
        )

    def _model(self, model: str) -> ModelNow:
        scheduler, now = self._service.scheduler, self._service.clock()
        table = self._service.view.target_table(model)
        load = scheduler.reservations.load(table.rows, now)
        return ModelNow(
            table=table,
            load=load,
            saturated=scheduler.saturated(table, load, now),
            exclusions=scheduler.health.exclusions(table, now),
            stale=frozenset(
                target.key for target in table.targets if scheduler.reservations.is_stale(target.key, now)
            ),
        )
