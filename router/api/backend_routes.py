"""Operator routes of static backends, which are not on the bus: `GET /v1/backends`, and draining."""

from fleet.completions import ApiError
from router.api.backend_record import BackendSpeed, BackendStatus, DrainRequest
from router.fleet_state.engine_state import EngineState
from router.fleet_state.reservations import PREFILL, SEQUENCES
from router.service import RouterService


def backend_statuses(service: RouterService) -> list[BackendStatus]:
    """Return the status of every static backend, in the order of the settings."""
    return [_status(service, *about) for about in service.backends.known()]


def drain_backend(service: RouterService, name: str, request: DrainRequest) -> BackendStatus:
    """Stop sending new requests to a backend, or resume (draining: False); requests running there continue.

    The drain lasts until it is undone or this router process ends. ApiError 404 for an unknown name, 409 when
    the server has never answered.
    """
    about = next((about for about in service.backends.known() if about[0] == name), None)
    if about is None:
        names = ", ".join(known for known, *_ in service.backends.known()) or "none"
        raise ApiError(
            404, f"no backend {name[:256]!r}; backends of this router: {names}", code="backend_not_found"
        )
    if about[3] is None:
        raise ApiError(
            409, f"backend {name} has not answered yet, so that it gets no requests anyway", code="not_ready"
        )
    worker_id, health = about[2], service.scheduler.health
    if request.draining:
        health.drain(worker_id, None, request.reason)
    else:
        health.undrain(worker_id, None)
        service.wait_queue.wake()
    return _status(service, *about)


def _status(
    service: RouterService, name: str, url: str, worker_id: int, state: EngineState | None
) -> BackendStatus:
    limit = service.config.max_requests_per_rank
    if state is None:
        nothing = BackendSpeed(
            source="not measured", prompt_tokens_per_second=None, output_tokens_per_second=None
        )
        return BackendStatus(
            name=name,
            url=url,
            state="has not answered yet",
            models=[],
            requests=0,
            prefill_tokens=0,
            max_requests=limit,
            speed=nothing,
        )
    now, key = service.clock(), (worker_id, 0)
    table = service.view.target_table(state.joined.model)
    load = service.scheduler.reservations.load(table.rows, now)
    at = table.index.get(key)
    exclusion = None if at is None else service.scheduler.health.exclusions(table, now).every.get(key)
    return BackendStatus(
        name=name,
        url=url,
        state=state.obstacle or exclusion or "live",
        models=sorted(state.contexts),
        requests=0 if at is None else int(load[SEQUENCES, at]),
        prefill_tokens=0 if at is None else int(load[PREFILL, at]),
        max_requests=min(limit, state.joined.max_requests or limit),
        speed=_speed(service, state, at),
        isolates_tenants=state.joined.capabilities.isolates_tenants,
    )


def _speed(service: RouterService, state: EngineState, at: int | None) -> BackendSpeed:
    if at is None:  # it is unavailable: its measured speed applies again when it returns
        speed, factors, known = (
            state.speed,
            (1.0, 1.0),
            (state.stated_speed is not None,) * 2,
        )
    else:
        table = service.view.target_table(state.joined.model)
        measured = service.scheduler.speeds.known(table).measured
        speed, factors = table.targets[at].speed, service.scheduler.speeds.of(table, at)
        known = (True, True) if measured is None else (bool(measured[0, at]), bool(measured[1, at]))
    return BackendSpeed(
        source="stated" if state.stated_speed is not None else "measured" if any(known) else "not measured",
        prompt_tokens_per_second=_per_second(speed.prefill_token * factors[0]) if known[0] else None,
        output_tokens_per_second=(
            _per_second((speed.step + speed.decode_sequence) * factors[1]) if known[1] else None
        ),
    )


def _per_second(seconds: float) -> float | None:
    return 1.0 / seconds if seconds else None
