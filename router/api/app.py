"""The router's HTTP server: a FastAPI application whose hot routes are raw ASGI."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse
from starlette.routing import Match, Route

from fleet.completions import PROTOCOL_HEADER, UNREADABLE, ApiError
from fleet.event import PROTOCOL
from router.access.api_keys import ADMIN, DOCS, INFER, METRICS, ROUTE, Caller
from router.api.backend_record import DrainRequest
from router.api.backend_routes import backend_statuses, drain_backend
from router.api.event_routes import event_stream, selection, start
from router.api.fleet_routes import fleet_record, planned
from router.api.loop_record import PauseRequest
from router.api.loop_routes import loop_record, pause_loop
from router.api.model_record import model_list, model_record
from router.api.openapi import completed
from router.api.routes import RELEASE_PATH, RESERVE_PATH, ROUTE_PATH, HotRoutes
from router.dashboard.routes import add_dashboard
from router.http.asgi_response import AsgiResponse, Receive, Scope, Send, error_headers
from router.openai_api.request_schema import CHAT_PATH, TEXT_PATH
from router.service import RouterService
from router.telemetry.tracing import Provider, RouterTracing

log = logging.getLogger(__name__)

_JSON = "application/json"
_SMALL_BYTES = 4096
_TITLE = "Roost router"
_DOCUMENT = "/openapi.json"
_UNCACHED = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""Headers that keep proxies from holding a stream back."""


Serve = Callable[[Scope, Receive, Send], Awaitable[None]]


class _Hot:
    """Raw ASGI callable in the form that Starlette routes to without wrapping it."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send)


class RouterApp(FastAPI):
    """FastAPI application whose hot routes bypass its middleware and its list of routes, which saves some 30
    microseconds per request.
    """

    hot: dict[str, Serve]
    edge: HotRoutes

    def openapi(self) -> dict[str, Any]:
        """Return the document served at /openapi.json."""
        if self.openapi_schema is None:
            self.openapi_schema = completed(super().openapi())
        return self.openapi_schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serve = self.hot.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if serve is not None:
            await serve(scope, receive, send)
            return
        if (
            scope["type"] == "http"
            and (route := self.edge.passes(scope["method"], scope["path"])) is not None
            and not self._is_own(scope)
        ):
            await self.edge.pass_on(route, scope, receive, send)
            return
        if scope["type"] == "http" and _requests_websocket(scope):
            await _refuse_websocket(scope, send)
            return
        await super().__call__(scope, receive, send)

    def _is_own(self, scope: Scope) -> bool:
        """True when the path is one of Roost's own routes, which take precedence over any other server's."""
        return any(route.matches(scope)[0] is not Match.NONE for route in self.router.routes)


def _requests_websocket(scope: Scope) -> bool:
    return any(name == b"upgrade" and value.lower() == b"websocket" for name, value in scope["headers"])


async def _refuse_websocket(scope: Scope, send: Send) -> None:
    message = (
        f"{scope['path']}: WebSocket connections are not passed on; ask over HTTP, with stream: true"
        " for a stream"
    )
    refusal = ApiError(501, message, code="websocket_unsupported")
    await AsgiResponse(send, lambda: None).error(refusal, [(b"connection", b"close")])


def create_app(service: RouterService, *, tracer_provider: Provider | None = None) -> FastAPI:
    """Create the application over a service that the caller runs. tracer_provider: None means the process's
    own, looked up now.
    """
    edge = HotRoutes(service, RouterTracing.create(tracer_provider))
    # `router.telemetry.tracing` makes the spans; FastAPI's own would trace every request a second time.
    app = RouterApp(
        title=_TITLE, openapi_url=None, telemetry={"tracing": False, "metrics": False, "logs": False}
    )
    app.edge = edge
    app.hot = {
        CHAT_PATH: edge.chat,
        TEXT_PATH: edge.text,
        ROUTE_PATH: edge.route,
        RESERVE_PATH: edge.reserve,
        RELEASE_PATH: edge.release,
    }
    for path, serve in app.hot.items():  # so that other methods are answered 405
        app.router.routes.append(Route(path, _Hot(serve), methods=["POST"]))
    for add_routes in (
        _add_model_routes,
        _add_decision_route,
        _add_backend_routes,
        _add_loop_routes,
        _add_status_routes,
        _add_documentation,
    ):
        add_routes(app, service)
    if service.config.dashboard:
        add_dashboard(app, service)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    return app


def _admit(request: Request, service: RouterService, right: str) -> Caller:
    """Return the caller. ApiError 401 without a valid key, 403 for a key without the right."""
    caller = service.credentials.caller(request.headers.get("authorization"))
    caller.require(right)
    return caller


def _add_documentation(app: FastAPI, service: RouterService) -> None:
    """Serve the documentation pages, which FastAPI would show to everyone, to callers with the right
    `docs`."""

    @app.get(_DOCUMENT, include_in_schema=False)
    async def document(request: Request) -> Response:
        _admit(request, service, DOCS)
        return _json(app.openapi())

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        _admit(request, service, DOCS)
        return get_swagger_ui_html(openapi_url=_DOCUMENT, title=_TITLE)

    @app.get("/redoc", include_in_schema=False)
    async def redoc(request: Request) -> Response:
        _admit(request, service, DOCS)
        return get_redoc_html(openapi_url=_DOCUMENT, title=_TITLE)


def _add_model_routes(app: FastAPI, service: RouterService) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """List the models that a live engine serves, in OpenAI's form."""
        _admit(request, service, INFER)
        return _json(model_list(service))

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        """Return one model; 404 names those that exist."""
        _admit(request, service, INFER)
        service.scheduler.target_table(name)
        return _json(model_record(service, name))


def _add_decision_route(app: FastAPI, service: RouterService) -> None:
    @app.get("/v1/decisions/{decision_id}")
    async def decision(request: Request, decision_id: str) -> Response:
        """Return a recent decision of any router about a request of the caller's tenant, with every candidate
        and every cost term.
        """
        caller = _admit(request, service, ROUTE)
        return Response(await service.decision(decision_id, caller.sees), media_type=_JSON)


def _add_backend_routes(app: FastAPI, service: RouterService) -> None:
    @app.get("/v1/backends")
    async def backends(request: Request) -> Response:
        """Return the static backends as this router process sees them: models, load, speed, and why one gets
        no requests.
        """
        _admit(request, service, METRICS)
        return _json({"data": backend_statuses(service)})

    @app.post("/v1/backends/{name}/drain")
    async def drain(request: Request, name: str) -> Response:
        """Stop sending new requests to a static backend, or resume: {"draining": true, "reason": ""}."""
        _admit(request, service, ADMIN)
        try:
            drain_request = msgspec.json.decode(await _small_body(request), type=DrainRequest)
        except UNREADABLE as error:
            raise ApiError(
                400, f'the body must be {{"draining": true, "reason": ""}}: {error}', code="invalid_value"
            ) from error
        return _json(drain_backend(service, name, drain_request))


def _add_loop_routes(app: FastAPI, service: RouterService) -> None:
    @app.get("/v1/loop")
    async def loop(request: Request) -> Response:
        """Return the state of the automatic control loop."""
        _admit(request, service, ADMIN)
        return _json(await loop_record(service))

    @app.post("/v1/loop/pause")
    async def pause(request: Request) -> Response:
        """Pause the automatic control loop, or resume it: {"paused": true, "reason": ""}."""
        _admit(request, service, ADMIN)
        try:
            pause_request = msgspec.json.decode(await _small_body(request), type=PauseRequest)
        except UNREADABLE as error:
            raise ApiError(
                400, f'the body must be {{"paused": true, "reason": ""}}: {error}', code="invalid_value"
            ) from error
        return _json(await pause_loop(service, pause_request))


def _add_status_routes(app: FastAPI, service: RouterService) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Report that the process is alive."""
        answer = _json({"status": "alive"})
        answer.headers[PROTOCOL_HEADER] = str(PROTOCOL)
        return answer

    @app.get("/ready")
    async def ready(request: Request) -> Response:
        """Return 200 once the initial state is complete and at least one live engine can be used; 503 before.
        Callers with the right `metrics` also see the models served and the conditions still missing.
        """
        status: dict[str, Any] = {"ready": service.ready}
        if METRICS in service.credentials.rights(request.headers.get("authorization")):
            status |= {"models": service.view.models(live=True), "missing": service.missing}
        return _json(status, 200 if service.ready else 503)

    @app.get("/v1/status")
    async def status(request: Request) -> Response:
        """Return the fleet as this router process sees it."""
        _admit(request, service, METRICS)
        return _json(fleet_record(service))

    @app.get("/v1/engines/{engine}/plan")
    async def plan(request: Request, engine: str) -> Response:
        """Return the plan that the planner would make for an engine now. Nothing is moved."""
        _admit(request, service, ADMIN)
        query = request.query_params
        record = await planned(service, engine, query.get("policy", ""), query.get("budget_bytes"))
        return Response(record, media_type=_JSON)

    @app.get("/v1/events", response_class=StreamingResponse)
    async def events(request: Request) -> Response:
        """Stream the events of the fleet."""
        authorization = request.headers.get("authorization")
        _admit(request, service, ADMIN)
        query = request.query_params
        body = await event_stream(
            service,
            selection(query.getlist("kind"), query.get("engine")),
            start(request.headers.get("last-event-id"), query.get("since")),
            lambda: ADMIN in service.credentials.rights(authorization),
        )
        return StreamingResponse(body, media_type="text/event-stream", headers=_UNCACHED)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Return the metrics as Prometheus text."""
        _admit(request, service, METRICS)
        return Response(service.metrics.exposition(), media_type=service.metrics.content_type)


async def _small_body(request: Request) -> bytes:
    """Read the body of an operator's request. ApiError 413 when it is longer than one can be."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _SMALL_BYTES:
            raise ApiError(413, f"the body exceeds {_SMALL_BYTES} bytes", code="body_too_large")
    return body or b"{}"


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type=_JSON)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error.body(), error.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods in the same form as every other error."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return Response(
        ApiError(error.status_code, message).body(), error.status_code, error.headers, media_type=_JSON
    )
