"""HTTP server of a simulated engine: every rank's completions API, on its own port, and fault injection.

POST /simulate takes a `faults.FaultOrder` as JSON, e.g. {"fault": "slow", "rank": 1, "seconds": 10, "factor":
4}. GET /simulate lists active faults. Faults of requests (rejected, failed, broken off) are injected here,
those of steps and reports in the engine.
"""

import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from engine_adapter.serving.authentication import RouterAuthentication
from engine_adapter.serving.http import (
    RankApp,
    RankTracing,
    Receive,
    Scope,
    Send,
    ServedModelInfo,
    read_body,
    refuse,
    respond,
)
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.model.faults import FaultOrder
from fleet.completions import ApiError
from fleet.completions.token_frames import HEADER as FRAMES_HEADER

_RETRY_SECONDS = 1.0
_DEATH_DELAY_SECONDS = 0.02
"""Delay of `die`, so that the response is sent first."""
_LATEST_BREAK = 16
"""Maximum number of response chunks before a connection breaks."""
_ORDERS = msgspec.json.Decoder(FaultOrder)


class ConnectionCut(Exception):
    """The connection must break now."""


class SimulatedHttp:
    """ASGI application of all ranks of an engine. ranks: the rank of each port. A connection is broken by
    returning in the middle of a response."""

    def __init__(
        self,
        engine: SimulatedEngine,
        ranks: Mapping[int, int],
        tracings: Mapping[int, RankTracing] | None,
        admission: RouterAuthentication,
    ) -> None:
        self._engine = engine
        self._ranks = dict(ranks)
        self._admission = admission
        served: list[ServedModelInfo] = list(engine.ranks)
        self._apps = [RankApp(one, (tracings or {}).get(rank)) for rank, one in enumerate(served)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._apps[0](scope, receive, send)
            return
        rank = self._ranks[scope["server"][1]]
        try:
            self._admission.check(scope["path"], scope["headers"])
            if scope["path"] == "/simulate":
                await self._simulate(scope, receive, send)
            elif scope["path"] == "/v1/completions":
                await self._complete(rank, scope, receive, send)
            else:
                await self._apps[rank](scope, receive, send)
        except ApiError as error:
            await refuse(send, error)

    async def _simulate(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "POST"):
            raise ApiError(405, f"/simulate takes GET and POST, not {scope['method']}")
        if scope["method"] == "POST":
            self._execute(_order(await read_body(scope, receive)))
        await respond(send, 200, msgspec.json.encode({"faults": self._active()}))

    def _execute(self, order: FaultOrder) -> None:
        try:
            self._engine.faults.check(order)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        if order.fault == "die":
            asyncio.get_running_loop().call_later(_DEATH_DELAY_SECONDS, self._engine.order, order)
        else:
            self._engine.order(order)

    def _active(self) -> list[dict[str, Any]]:
        now = self._engine.now
        return [
            {
                "fault": one.kind,
                "rank": one.rank,
                "share": one.share,
                "factor": one.factor,
                "seconds_left": None if math.isinf(one.until) else one.until - now,
            }
            for one in self._engine.faults.active(now)
        ]

    async def _complete(self, rank: int, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._engine.config
        if self._hit("refuse", rank, config.refuse_share):
            raise ApiError(
                503,
                f"rank {rank} was ordered to reject this request",
                code="overloaded",
                retry_after=_RETRY_SECONDS,
            )
        if self._hit("error", rank, config.error_share):
            raise ApiError(500, f"rank {rank} was ordered to fail this request", code="simulated_error")
        if not self._hit("break_stream", rank, config.break_share):
            await self._apps[rank](scope, receive, send)
            return
        alone = dict(scope)  # not in token frames, whose connection is not broken
        alone["headers"] = [field for field in scope["headers"] if field[0] != FRAMES_HEADER.encode()]
        with suppress(ConnectionCut):
            try:
                await self._apps[rank](alone, receive, _Breaking(send, self._engine.draw(_LATEST_BREAK)))
            except* ConnectionCut as cut:
                raise ConnectionCut from cut

    def _hit(self, kind: str, rank: int, configured: float) -> bool:
        share = max(configured, self._engine.faults.share(kind, rank, self._engine.now))
        return share > 0 and self._engine.chance(share)


class _Breaking:
    """ASGI `send` that forwards a limited number of response chunks and then breaks the connection."""

    def __init__(self, send: Send, pieces: int) -> None:
        self._send = send
        self._left = pieces

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            if self._left <= 0 or not message.get("more_body", False):
                raise ConnectionCut
            self._left -= 1
        await self._send(message)


def _order(body: bytes) -> FaultOrder:
    try:
        return _ORDERS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(
            400, f'{error}; expected e.g. {{"fault": "slow", "rank": 1, "seconds": 10, "factor": 4}}'
        ) from error
