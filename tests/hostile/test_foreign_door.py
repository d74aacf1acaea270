"""Clients and servers that mean harm at the door to foreign servers: what they can reach, hide or hold."""

import json
from pathlib import Path

import pytest

from router.access.api_keys import key_line, parse_rights
from router.foreign_api.continuation import MAX_IDS, Continuable
from router.foreign_api.lenient_fields import read
from tests.router.foreign_servers import ForeignServer, in_front_of, saying, serving
from tests.router.router_fixture import OpenHouse, chat

CHAT = "/v1/chat/completions"


async def test_a_client_cannot_take_the_routers_own_headers_away_by_naming_them_in_connection(
    open_house: OpenHouse, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("routers-own")
    async with serving(ForeignServer("one", saying({}))) as server:
        house = await in_front_of(open_house, server, backend_key_file=key)
        headers = {
            "connection": "authorization, x-request-id, x-roost-decision-id, content-length, host",
            "authorization": "Bearer mine",
        }
        assert (await house.post(CHAT, chat(), headers=headers)).status == 200
        came = server.requests[0]
        assert came.header("authorization") == "Bearer routers-own"
        assert came.header("x-request-id")
        assert came.header("x-roost-decision-id")
        assert json.loads(came.body) == chat()


async def test_a_chunked_body_reaches_the_server_with_one_length_and_no_other_framing(
    open_house: OpenHouse,
) -> None:
    async def pieces():  # type: ignore[no-untyped-def]
        yield b'{"model": "demo", "messages": []'
        yield b"}\r\n0\r\n\r\nGET /sleep HTTP/1.1\r\n\r\n"

    async with serving(ForeignServer("one", saying({}))) as server:
        house = await in_front_of(open_house, server)
        async with house.http.post(house.url + CHAT, data=pieces()) as response:
            await response.read()
        assert [request.target for request in server.requests] == [CHAT]
        assert server.requests[0].header("transfer-encoding") is None
        assert server.requests[0].body.endswith(b"GET /sleep HTTP/1.1\r\n\r\n")


async def test_a_tenant_cannot_pose_as_another_one_before_the_server(
    open_house: OpenHouse, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("secret", "acme", None, parse_rights("infer")))
    async with serving(ForeignServer("one", saying({}))) as server:
        house = await in_front_of(open_house, server, api_key_file=keys)
        await house.post(
            CHAT,
            chat(),
            headers={"authorization": "Bearer secret", "x-tenant-id": "bolt", "x-api-key": "secret"},
        )
        came = server.requests[0]
        assert [value for name, value in came.headers if name.lower() == "x-tenant-id"] == ["acme"]
        assert came.header("authorization") is came.header("x-api-key") is None


PATHS = [
    "/v1/files/..",
    "/v1/files/%2e%2e/sleep",
    "/v1/files/a%2f..%2f..%2fsleep",
    "/v1/responses/a/../../sleep",
    "/v1/files/a%0d%0ax",
]


@pytest.mark.parametrize("path", PATHS)
async def test_no_path_of_an_object_leads_to_another_route(open_house: OpenHouse, path: str) -> None:
    async with serving(ForeignServer("one", saying({}))) as server:
        house = await in_front_of(open_house, server)
        async with house.http.get(house.url + path) as response:
            assert response.status == 404
        assert not server.requests


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":' + b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"model":"' + b"\xff" * 1000 + b'"}',
        b'{"max_tokens":1e999999}',
        b'{"max_tokens":"' + b"9" * 9000 + b'"}',
    ],
    ids=["deep list", "deep object", "no UTF-8", "huge number", "huge digits"],
)
async def test_bodies_made_to_break_a_reader_are_the_servers_to_refuse(
    open_house: OpenHouse, body: bytes
) -> None:
    read(body, "application/json")
    async with serving(ForeignServer("one", saying({"detail": "bad"}, 400))) as server:
        house = await in_front_of(open_house, server)
        assert (await house.post(CHAT, body)).status == 400
        assert [request.body for request in server.requests] == [body]


def test_a_server_that_never_stops_sending_ids_fills_no_memory() -> None:
    continuable = Continuable(
        CHAT, json.dumps({**chat(), "stream": True, "temperature": 0, "max_tokens": 10}).encode(), 4096
    )
    many = json.dumps(
        {
            "choices": [{"index": 0, "delta": {"content": "x" * 1000}, "token_ids": [1] * 1000}],
            "prompt_token_ids": [1],
        }
    ).encode()
    for _ in range(50):
        continuable.take(b"data: " + many + b"\n\n")
    assert "more tokens" in (continuable.why_not() or "")
    assert len(continuable.ids) <= 1000 < MAX_IDS
