"""Requests for one particular server, without a decision: objects by id, lists, administration."""

import math

import msgspec

from fleet.completions import ApiError
from router.access.api_keys import ADMIN, METRICS, Caller
from router.fleet_state.engine_state import EngineState, EngineStatus
from router.foreign_api.headers import length_of, own_headers, to_client, to_server, value_of
from router.foreign_api.object_locations import ObjectLocation, ObjectLocations
from router.foreign_api.routes import ForeignRoute, RouteKind
from router.http.asgi_response import AsgiResponse, Headers
from router.service import RouterService
from router.telemetry.request_log import RequestLog
from router.upstream.rank_client import Call, Patience, UpstreamFailed, UpstreamRequest

SERVER_HEADER = "x-roost-server"
"""Header that names the server of such a request, if there are several."""
MAX_QUERIED = 64
"""Most servers that are queried for an object of unknown location."""
_QUERY_SECONDS = 10.0
"""timeout of each of these queries"""


class DirectRequests:
    """Forwarder of requests that belong to one server."""

    def __init__(self, service: RouterService, located: ObjectLocations) -> None:
        self._service = service
        self._located = located

    async def run(
        self,
        route: ForeignRoute,
        request_log: RequestLog,
        reply: AsgiResponse,
        headers: Headers,
        sent: UpstreamRequest,
    ) -> None:
        """Forward a request. sent: without a URL. ApiError 404 for an object that no server has, 400 when a
        server must be named, 503 when the server is unavailable.
        """
        if route.kind is RouteKind.OBJECT:
            place = self.place_of(route.object_id, request_log)
            if place is None:
                await self._ask_all(route, request_log, reply, headers, sent)
                return
            server = self._server_at(place, route.object_id)
        else:
            server = self._named(
                value_of(request_log.client_headers, SERVER_HEADER.encode()), request_log.caller
            )
        call = self._call(server, request_log, sent)
        try:
            async with call:
                await self._pass(call, reply, headers)
        except UpstreamFailed as failed:
            raise _failed(server, failed) from failed

    def place_of(self, object_id: str, request_log: RequestLog) -> ObjectLocation | None:
        """Return the known location of an object. ApiError 404 when it is another tenant's."""
        place = self._located.find(object_id)
        if place is not None and request_log.caller.tenant not in ("", place.tenant):
            raise _no_object(object_id)
        return place

    async def find(self, object_id: str, path: str, request_log: RequestLog) -> ObjectLocation:
        """Return the location of an object, querying every server if it is unknown. path: a path that the
        right server answers with 200. ApiError 404 when no server has the object.
        """
        place = self.place_of(object_id, request_log)
        if place is not None:
            return place
        for server in self._servers():
            try:
                async with self._call(
                    server, request_log, UpstreamRequest("GET", "", path, [], b""), _QUERY_SECONDS
                ) as call:
                    if call.status == 200:
                        return ObjectLocation((server.joined.worker_id, 0), request_log.caller.tenant)
            except (UpstreamFailed, ApiError):
                continue
        raise _no_object(object_id)

    async def _ask_all(
        self,
        route: ForeignRoute,
        request_log: RequestLog,
        reply: AsgiResponse,
        headers: Headers,
        sent: UpstreamRequest,
    ) -> None:
        """Forward the answer of the first server that neither answers 404 nor fails."""
        servers = self._servers()
        for number, server in enumerate(servers, 1):
            try:
                async with self._call(server, request_log, sent, _QUERY_SECONDS) as call:
                    if (call.status != 404 and call.status < 500) or number == len(servers):
                        await self._pass(call, reply, headers)
                        return
            except UpstreamFailed as failed:
                if reply.status or number == len(servers):
                    raise _failed(server, failed) from failed
        raise _no_object(route.object_id)

    def _servers(self) -> list[EngineState]:
        """Return the live servers that speak text, at most MAX_QUERIED."""
        live = (
            state
            for state in self._service.view.engines()
            if state.dialect == "text" and state.obstacle is None
        )
        return sorted(live, key=lambda state: state.joined.engine)[:MAX_QUERIED]

    def _named(self, name: str, caller: Caller) -> EngineState:
        servers = self._servers()
        found = [state for state in servers if state.joined.engine == name] if name else servers
        if len(found) == 1:
            return found[0]
        if not servers:
            raise ApiError(503, "no server that takes this is live", code="no_engine", retry_after=2.0)
        problem = f"there is no live server {name[:64]!r}" if name else "this goes to one server"
        names = ", ".join(state.joined.engine for state in servers)
        sees = caller.rights & {METRICS, ADMIN}  # server names are often addresses
        raise ApiError(
            400,
            f"{problem}: name it in the header {SERVER_HEADER}" + (f"; there are {names}" if sees else ""),
            param=SERVER_HEADER,
            code="server_needed",
        )

    def _server_at(self, place: ObjectLocation, object_id: str) -> EngineState:
        state = self._service.view.engine(place.rank[0])
        if state is None or state.status is not EngineStatus.LIVE:
            raise ApiError(
                503,
                f"the server that has {object_id!r} does not answer at present",
                code="no_engine",
                retry_after=2.0,
            )
        return state

    def _call(
        self,
        server: EngineState,
        request_log: RequestLog,
        sent: UpstreamRequest,
        seconds: float | None = None,
    ) -> Call:
        """Prepare the upstream call. seconds: timeout of the complete answer; None: the timeout of any
        unstreamed answer.
        """
        credentials, url = self._service.credentials, server.joined.urls[0]
        key = credentials.backend_key_of(url)
        own = own_headers(request_log.pass_on, request_log.request_id, key=key)
        if request_log.caller.tenant:
            own.append((self._service.config.tenant_header.encode(), request_log.caller.tenant.encode()))
        headers = to_server(
            request_log.client_headers, own, credentials=key is None and credentials.clients is None
        )
        patience = None if seconds is None else Patience(math.inf, seconds, seconds)
        return self._service.upstream.forward(
            msgspec.structs.replace(sent, url=url, headers=headers), stream=False, patience=patience
        )

    async def _pass(self, call: Call, reply: AsgiResponse, headers: Headers) -> None:
        """Pass the answer on piece by piece, as it arrives."""
        await reply.start(call.status, to_client(call.headers, [*headers, *length_of(call.headers)]))
        while data := await call.read():
            await reply.write(data)
        call.whole()
        await reply.end()


def _failed(server: EngineState, failed: UpstreamFailed) -> ApiError:
    return ApiError(
        502,
        f"the server {server.joined.engine} did not answer to the end ({failed.how.value})",
        code="upstream_failed",
    )


def _no_object(object_id: str) -> ApiError:
    return ApiError(404, f"no server behind this router has {object_id!r}", code="not_found")
