"""Routes of the dashboard: the page, its files, its feed, and what it asks for besides.

The page and its files hold nothing of the fleet and are served to all. Everything else needs the right
`admin`.
"""

from collections.abc import AsyncIterator, Callable

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse

from fleet.completions import ApiError
from router.access.api_keys import ADMIN
from router.dashboard.bundle import INDEX, StaticFile, read_bundle
from router.dashboard.decisions_topic import DecisionsTopic
from router.dashboard.experts_topic import ExpertsTopic
from router.dashboard.feed import MAX_PAGES, DashboardFeed, end_frame
from router.dashboard.fleet_topic import FleetTopic
from router.dashboard.layouts_topic import LayoutsTopic
from router.dashboard.loop_topic import LoopTopic
from router.dashboard.views.decisions import DecisionFilter
from router.service import RouterService

_JSON = "application/json"
_SECURITY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self';"
        " frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}
TOPICS = (FleetTopic.name, DecisionsTopic.name, ExpertsTopic.name, LoopTopic.name, LayoutsTopic.name)
_UNCACHED = {"cache-control": "no-store", "x-accel-buffering": "no"}


def add_dashboard(app: FastAPI, service: RouterService) -> None:
    """Add the routes to an application. The files are read now: OSError if they cannot be."""
    files = read_bundle()
    decisions, experts = DecisionsTopic(service), ExpertsTopic(service)
    topics = (FleetTopic(service), decisions, experts, LoopTopic(service), LayoutsTopic(service))
    _add_files(app, files)
    _add_feed(app, service, DashboardFeed(topics, lambda: service.refusing))
    _add_decisions(app, service, decisions)
    _add_experts(app, service, experts)


def _admit(request: Request, service: RouterService) -> None:
    """Refuse callers without the right. ApiError 401 without a valid key, 403 for a key without the right."""
    service.credentials.caller(request.headers.get("authorization")).require(ADMIN)


def _add_files(app: FastAPI, files: dict[str, StaticFile]) -> None:
    @app.get("/dashboard", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _file(request, files[INDEX])

    @app.get("/dashboard/static/{name:path}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"the dashboard has no file {name[:64]!r}", code="not_found")
        return _file(request, files[name])


def _file(request: Request, file: StaticFile) -> Response:
    headers = {**_SECURITY, "etag": file.etag, "cache-control": "no-cache"}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


def _add_feed(app: FastAPI, service: RouterService, feed: DashboardFeed) -> None:
    @app.get("/dashboard/feed", response_class=StreamingResponse, include_in_schema=False)
    async def events(request: Request) -> Response:
        """Stream the views of these topics, each whenever it changes."""
        _admit(request, service)
        names = request.query_params.get("topics", "").split(",")
        for name in names:
            if name not in feed.topics:
                message = f"there is no topic {name[:64]!r}; there are {', '.join(feed.topics)}"
                raise ApiError(400, message, param="topics", code="invalid_value")
        if feed.open_pages >= MAX_PAGES:
            message = f"{MAX_PAGES} pages read from this router already; close one"
            raise ApiError(429, message, code="too_many_readers", retry_after=10.0)
        authorization = request.headers.get("authorization")
        body = _events(feed, names, lambda: ADMIN in service.credentials.rights(authorization))
        return StreamingResponse(body, media_type="text/event-stream", headers={**_SECURITY, **_UNCACHED})


async def _events(
    feed: DashboardFeed, names: list[str], may_read: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Return the body of the feed. may_read: false once the page's key has lost its right."""
    with feed.page(names) as page:
        yield b": views follow\n\n"
        while not page.over:
            piece = await page.next()
            if not may_read():
                yield end_frame("the key has lost its right to the dashboard")
                return
            yield piece


def _add_decisions(app: FastAPI, service: RouterService, decisions: DecisionsTopic) -> None:
    @app.get("/dashboard/decisions", include_in_schema=False)
    async def search(request: Request) -> Response:
        """Return the newest decisions of a tenant, a model or an engine."""
        _admit(request, service)
        query = request.query_params
        wanted = DecisionFilter(
            tenant=query.get("tenant", ""), model=query.get("model", ""), engine=query.get("engine", "")
        )
        return _json(msgspec.json.encode(decisions.search(wanted)))

    @app.get("/dashboard/decisions/{decision_id}", include_in_schema=False)
    async def decision(request: Request, decision_id: str) -> Response:
        """Return a recent decision of any router, with every candidate and every cost term."""
        _admit(request, service)
        return _json(await service.decision(decision_id))


def _add_experts(app: FastAPI, service: RouterService, experts: ExpertsTopic) -> None:
    @app.get("/dashboard/experts/{engine}", include_in_schema=False)
    async def maps(request: Request, engine: str) -> Response:
        """Return the maps of one engine."""
        _admit(request, service)
        return _json(msgspec.json.encode(await experts.maps(engine)))


def _json(content: bytes) -> Response:
    return Response(content, media_type=_JSON, headers={**_SECURITY, "cache-control": "no-store"})
