"""Servers that Roost does not run, for tests: real HTTP servers whose answers a test writes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.router.router_fixture import House, OpenHouse, until
from tests.web_server import listening

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Asked:
    """One request as it reached a server."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


@dataclass
class ForeignServer:
    """Lists `models`, and answers everything else with `answer`."""

    name: str
    answer: Handler
    models: tuple[str, ...] = ("demo",)
    owned_by: str = "someone"
    max_model_len: int = 4096
    requests: list[Asked] = field(default_factory=list)
    url: str = ""
    listing: asyncio.Event = field(default_factory=asyncio.Event)
    """set: its list of models is answered"""
    refusing: Callable[[], Awaitable[None]] | None = None

    async def refuse_connections(self) -> None:
        """Listen no longer; open connections stay."""
        assert self.refusing is not None
        await self.refusing()

    async def list(self, _: web.Request) -> web.Response:
        await self.listing.wait()
        data = [
            {"id": model, "max_model_len": self.max_model_len, "owned_by": self.owned_by}
            for model in self.models
        ]
        return web.json_response({"object": "list", "data": data})

    async def handle(self, http: web.Request) -> web.StreamResponse:
        headers = [(name.decode(), value.decode()) for name, value in http.raw_headers]
        self.requests.append(Asked(http.method, http.path_qs, headers, await http.read()))
        return await self.answer(http)


@contextlib.asynccontextmanager
async def serving(server: ForeignServer, port: int = 0) -> AsyncIterator[ForeignServer]:
    """The server on a port of its own; fills in its url."""
    app = web.Application(client_max_size=2**30)
    app.router.add_get("/v1/models", server.list)
    app.router.add_route("*", "/{path:.*}", server.handle)
    server.listing.set()
    async with listening(app, port) as listener:
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"

        async def refuse() -> None:
            listener.close()

        server.refusing = refuse
        yield server


def saying(body: Any, status: int = 200, **headers: str) -> Handler:
    """The same JSON answer each time (bytes as they are)."""

    async def answer(_: web.Request) -> web.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=data, status=status, headers={"content-type": "application/json", **named})

    return answer


def streaming(*pieces: bytes, broken: bool = False) -> Handler:
    """A stream of server-sent events in these pieces; broken: the connection is cut afterwards."""

    async def answer(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        for piece in pieces:
            await response.write(piece)
        if broken:
            assert http.transport is not None
            http.transport.close()  # what was written still arrives
        return response

    return answer


async def in_front_of(open_house: OpenHouse, *servers: ForeignServer, **settings: Any) -> House:
    """A router before these servers, once it knows what they serve."""
    house = await open_house(
        bus=False, backends=tuple(server.url for server in servers), **({"probe_seconds": 0.05} | settings)
    )
    wanted = {(server.url, model) for server in servers for model in server.models}

    def known() -> bool:
        view = house.service.view
        return {
            (target.url, model)
            for model in view.models(live=True)
            for target in view.target_table(model).targets
        } >= wanted

    await until(known)
    return house
