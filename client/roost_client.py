"""Asynchronous client of a router."""

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import aiohttp
import msgspec

from client.event_parser import EventParser, MissedEvents, ReceivedEvent, StreamEnd
from migration.model.plan_record import PlanRecord
from router.api.fleet_record import FleetRecord
from router.api.loop_record import LoopRecord
from router.scheduling.decision_record import DecisionRecord
from router.scheduling.external_reservations import ReleaseRecord, ReservedRecord

log = logging.getLogger(__name__)

MIGRATION_KINDS = (
    "MigrationPlanned",
    "MigrationStaged",
    "MigrationCommitted",
    "MigrationAborted",
    "PlanEvaluated",
    "PlacementCommitted",
)
"""Kinds that tell the course of migrations."""
SILENCE_SECONDS = 35.0
"""A stream without even a comment for this time is broken: routers send one every 10 s."""
_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 30.0
_TRANSIENT = (429, 502, 503, 504)
"""Statuses after which a stream is asked for again."""
T = TypeVar("T")
Body = bytes | Mapping[str, Any]
"""A chat or completions request, as JSON bytes or as the object before encoding."""


class RoostError(Exception):
    """A router's refusal, or no answer. status: of HTTP; 0: no router answered. code: e.g. `saturated`."""

    def __init__(self, status: int, message: str, code: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after
        """seconds after which to ask again; None: not said"""


class CallerIdentity(TypedDict, total=False):
    """Identity of a request; every field is optional. Headers are those of the router's default settings."""

    session: str
    tenant: str
    priority: str
    """one of the router's classes"""
    request_id: str
    traceparent: str
    """W3C trace context: the parent of the decision's span"""


_HEADERS = {
    "session": "x-session-id",
    "tenant": "x-tenant-id",
    "priority": "x-priority",
    "request_id": "x-request-id",
    "traceparent": "traceparent",
}


class RoostClient:
    """Client of one router, or of several behind one address. Use it as an async context manager, on one
    event loop. Every method may raise `RoostError`.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        seconds: float = 30.0,
    ) -> None:
        """Create the client. url: with or without a trailing /v1. tls: for an https:// router whose
        certificate the system does not trust. seconds: time limit of each request; streams of events have
        none.
        """
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._tls: ssl.SSLContext | bool = True if tls is None else tls
        self._limit = aiohttp.ClientTimeout(total=seconds)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            headers=self._headers, connector=aiohttp.TCPConnector(ssl=self._tls), trust_env=False
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    # Decisions

    async def decide(
        self,
        body: Body,
        *,
        without: Sequence[str] = (),
        gone: Sequence[str] = (),
        **identity: Unpack[CallerIdentity],
    ) -> DecisionRecord:
        """Return the decision that a request would get now; nothing is booked.

        without: terms to leave out of the cost. gone: ranks ("engine/rank") or engines to treat as absent.
        """
        query = [("without", name) for name in without] + [("gone", name) for name in gone]
        return await self._post("/v1/route", body, DecisionRecord, query, identity)

    async def reserve(
        self, body: Body, *, wait: bool = False, **identity: Unpack[CallerIdentity]
    ) -> ReservedRecord:
        """Decide and book the load of a request, which the program then sends to the record's `url`.

        wait: when every rank is saturated, wait in turn instead of a RoostError 429.
        """
        query = [("wait", "true")] if wait else []
        return await self._post("/v1/route/reserve", body, ReservedRecord, query, identity)

    async def release(self, decision_id: str, *, first_token: bool = False) -> ReleaseRecord:
        """End a reservation, or (first_token) report that its prompt is computed. Idempotent; an unknown id
        is no error.
        """
        body = {"id": decision_id, "first_token": first_token}
        return await self._post("/v1/route/release", body, ReleaseRecord, [], {})

    @asynccontextmanager
    async def reserved(
        self, body: Body, *, wait: bool = False, **identity: Unpack[CallerIdentity]
    ) -> AsyncIterator[ReservedRecord]:
        """Reserve while the context lasts, and release at its end, whatever the end is."""
        chosen = await self.reserve(body, wait=wait, **identity)
        try:
            yield chosen
        finally:
            try:
                await self.release(chosen.id)
            except RoostError as error:  # it expires by itself; the request's own outcome matters more
                log.warning("reservation %s was not released: %s", chosen.id, error)

    async def decision(self, decision_id: str) -> DecisionRecord:
        """Return a recent decision of any router, by the id in an answer's header x-roost-decision-id."""
        return await self._get(f"/v1/decisions/{quote(decision_id, safe='')}", DecisionRecord)

    # The fleet

    async def status(self) -> FleetRecord:
        """Return the fleet as the router sees it (right `metrics`)."""
        return await self._get("/v1/status", FleetRecord)

    async def plan(self, engine: str, *, policy: str = "", budget_bytes: int | None = None) -> PlanRecord:
        """Return the plan that the planner would make for an engine now (right `admin`). Nothing is moved.

        RoostError 409 with the planner's reason when it cannot plan for the engine, 503 without a planner.
        """
        query = {"policy": policy} if policy else {}
        if budget_bytes is not None:
            query["budget_bytes"] = str(budget_bytes)
        return await self._get(f"/v1/engines/{quote(engine, safe='')}/plan", PlanRecord, query)

    async def loop(self) -> LoopRecord:
        """Return the state of the automatic control loop (right `admin`). RoostError 503 without a
        planner."""
        return await self._get("/v1/loop", LoopRecord)

    async def pause_loop(self, reason: str = "") -> LoopRecord:
        """Pause automatic planning until `resume_loop` (right `admin`); running plans are completed.

        RoostError 503 without a planner. After a RoostError 504 the planner may still apply the request.
        """
        return await self._pause({"paused": True, "reason": reason})

    async def resume_loop(self) -> LoopRecord:
        """Resume automatic planning. Raises as `pause_loop`."""
        return await self._pause({"paused": False})

    async def _pause(self, body: Mapping[str, Any]) -> LoopRecord:
        return await self._post("/v1/loop/pause", body, LoopRecord, [], {})

    # Events

    def migrations(
        self, engine: str | None = None, *, since: str | None = None, after: int | None = None
    ) -> AsyncGenerator[ReceivedEvent | MissedEvents, None]:
        """Yield the events of migrations, as `events` does."""
        return self.events(MIGRATION_KINDS, engine, since=since, after=after)

    async def events(
        self,
        kinds: Iterable[str] = (),
        engine: str | None = None,
        *,
        since: str | None = None,
        after: int | None = None,
    ) -> AsyncGenerator[ReceivedEvent | MissedEvents, None]:
        """Yield events of the fleet without end (right `admin`): each stored one exactly once, across broken
        connections and other routers.

        kinds: none means all stored ones. since: first those of e.g. the last "15m". after: first those
        behind the position of an event. Neither: only new ones. RoostError when the router refuses the key or
        the query; while no router answers, it keeps trying.
        """
        query = {"kind": ",".join(kinds)} | ({"engine": engine} if engine is not None else {})
        pause = first = _RETRY_SECONDS
        while True:
            begin = query if since is None or after is not None else query | {"since": since}
            parser = EventParser(after)
            try:
                async with aclosing(self._stream(begin, parser)) as stream:
                    async for event in stream:
                        pause = first
                        yield event
            except RoostError as error:
                if error.status not in (0, *_TRANSIENT):
                    raise
                pause = max(pause, error.retry_after or 0.0)
                log.warning("events are interrupted: %s; asking again in %g s", error, pause)
            after, first = parser.position, parser.retry_seconds or first
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_RETRY_SECONDS)

    async def _stream(
        self, query: dict[str, str], parser: EventParser
    ) -> AsyncGenerator[ReceivedEvent | MissedEvents, None]:
        """Yield the events of one connection. RoostError 0 when it breaks."""
        headers = {} if parser.position is None else {"last-event-id": str(parser.position)}
        limit = aiohttp.ClientTimeout(total=None, sock_connect=self._limit.total, sock_read=SILENCE_SECONDS)
        try:
            async with self._session.get(
                f"{self._url}/v1/events",
                params={name: value for name, value in query.items() if value},
                headers=headers,
                timeout=limit,
            ) as answer:
                if answer.status != 200:
                    raise _refusal(answer, await answer.read())
                async for piece in answer.content.iter_any():
                    for event in parser.feed(piece):
                        if isinstance(event, StreamEnd):
                            log.info("the router ends its events: %s", event.reason)
                        else:
                            yield event
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise RoostError(0, f"{self._url}: {error or type(error).__name__}") from error

    # HTTP

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RuntimeError("use the client as a context manager: async with RoostClient(url) as roost")
        return self._http

    async def _post(
        self,
        path: str,
        body: Body,
        answer: type[T],
        query: Sequence[tuple[str, str]],
        identity: Mapping[str, Any],
    ) -> T:
        headers = {_HEADERS[name]: str(value) for name, value in identity.items() if value}
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        headers["content-type"] = "application/json"
        return await self._asked("POST", path, answer, params=list(query), data=data, headers=headers)

    async def _get(self, path: str, answer: type[T], query: Mapping[str, str] | None = None) -> T:
        return await self._asked("GET", path, answer, params=dict(query or {}))

    async def _asked(self, method: str, path: str, kind: type[T], **about: Any) -> T:
        """Return the decoded answer to a request."""
        try:
            async with self._session.request(
                method, self._url + path, timeout=self._limit, **about
            ) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RoostError(
                0, f"no answer of the router at {self._url}: {error or type(error).__name__}"
            ) from error
        if answer.status != 200:
            raise _refusal(answer, content)
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError as error:
            message = f"{path}: the answer is not understood: {error}; is the router of another version?"
            raise RoostError(answer.status, message) from error


class _Refused(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _RefusalBody(msgspec.Struct):
    error: _Refused = msgspec.field(default_factory=_Refused)


def _refusal(answer: aiohttp.ClientResponse, content: bytes) -> RoostError:
    """Return the error of an answer in OpenAI's form, or in any other."""
    found = _Refused(content[:300].decode("utf-8", "replace"))
    with suppress(msgspec.DecodeError):
        found = msgspec.json.decode(content, type=_RefusalBody).error
    after = answer.headers.get("retry-after", "")
    return RoostError(
        answer.status,
        f"{answer.status}: {found.message}",
        found.code or "",
        float(after) if after.isdigit() else None,
    )
