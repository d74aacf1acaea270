"""Passthrough routes: inference by model, objects by id, administration by right and configuration; and
routes that do not pass.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from hypothesis import given
from hypothesis import strategies as st

from bus.protocol.subjects import Subjects
from router.access.api_keys import key_line, parse_rights
from router.api.app import create_app
from router.config import RouterConfig
from router.foreign_api.object_locations import MAX_OBJECTS, ObjectLocation, ObjectLocations, object_id
from router.foreign_api.routes import RouteKind, route_of
from router.service import RouterService
from tests.router.foreign_servers import ForeignServer, in_front_of, saying, serving, streaming
from tests.router.router_fixture import Answered, House, MockRank, OpenHouse, Serve


async def echo(http: web.Request) -> web.Response:
    return web.json_response({"path": http.path_qs, "method": http.method})


INFERENCE = [
    *(
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
    ),
    *(
        "/pooling",
        "/classify",
        "/v1/audio/speech",
        "/v1/images/generations",
        "/v1/moderations",
        "/tokenize",
        "/detokenize",
    ),
]


async def call(
    house: House, method: str, path: str, headers: dict[str, str] | None = None, **more: Any
) -> Answered:
    async with house.http.request(method, house.url + path, headers=headers, **more) as response:
        return await read(response)


async def read(response: ClientResponse) -> Answered:
    return Answered(
        response.status,
        {name.lower(): value for name, value in response.headers.items()},
        await response.read(),
    )


async def test_routes_of_inference_go_to_the_servers_of_their_model(open_house: OpenHouse) -> None:
    async with (
        serving(ForeignServer("one", echo, ("chat",))) as one,
        serving(ForeignServer("two", echo, ("embedder",))) as two,
    ):
        house = await in_front_of(open_house, one, two)
        for path in INFERENCE:
            body = b'{ "model":"embedder", "input": ["abc"] }'
            answer = await house.post(f"{path}?api-version=3", body)
            assert answer.json == {"path": f"{path}?api-version=3", "method": "POST"}
            assert two.requests[-1].body == body
        assert not one.requests
        unknown = await house.post("/v1/embeddings", {"model": "nobody's", "input": "abc"})
        assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")


async def test_an_upload_goes_by_the_model_in_its_multipart_field(open_house: OpenHouse) -> None:
    async with (
        serving(ForeignServer("one", echo, ("chat",))) as one,
        serving(ForeignServer("two", echo, ("whisper",))) as two,
    ):
        house = await in_front_of(open_house, one, two)
        audio = b"\x00\xff" * 50_000
        body = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + audio
        body += b'\r\n--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--B--\r\n'
        answer = await house.post(
            "/v1/audio/transcriptions", body, headers={"content-type": "multipart/form-data; boundary=B"}
        )
        assert answer.status == 200
        assert [request.body for request in two.requests] == [body]
        assert two.requests[0].header("content-type") == "multipart/form-data; boundary=B"


async def test_streams_of_other_apis_pass_and_end_in_their_own_form_of_error(open_house: OpenHouse) -> None:
    event = b'event: message_start\ndata: {"type":"message_start"}\n\n'
    async with serving(ForeignServer("one", streaming(event, b"event: x\nda", broken=True))) as server:
        house = await in_front_of(open_house, server)
        answer = await house.post("/v1/messages", {"model": "demo", "stream": True, "messages": []})
        first, last = answer.body.split(b"\n\n")[:2]
        assert first + b"\n\n" == event
        assert last.startswith(b'event: error\ndata: {"type":"error"')
        assert b"[DONE]" not in answer.body


class ObjectServer:
    """Server that creates objects and has only its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.made: list[str] = []

    async def answer(self, http: web.Request) -> web.StreamResponse:
        if http.method == "POST" and http.path in ("/v1/responses", "/v1/files", "/v1/batches"):
            body = await http.read()
            made = f"{'resp' if 'responses' in http.path else 'obj'}_{self.name}{len(self.made)}"
            self.made.append(made)
            if b'"stream": true' in body:
                events = [
                    b'event: response.created\ndata: {"type":"response.created","response":{"id":"'
                    + made.encode()
                    + b'"}}\n\n',
                    b"data: {}\n\n",
                ]
                return await streaming(*events)(http)
            return web.json_response({"id": made, "from": self.name})
        if http.path.split("/")[3] in self.made:
            return web.json_response({"from": self.name, "method": http.method})
        return web.json_response({"error": {"message": f"{self.name} has no {http.path}"}}, status=404)


async def test_objects_are_found_on_the_server_that_made_them(open_house: OpenHouse) -> None:
    shelves = ObjectServer("a"), ObjectServer("b")
    async with (
        serving(ForeignServer("a", shelves[0].answer)) as a,
        serving(ForeignServer("b", shelves[1].answer)) as b,
    ):
        house = await in_front_of(open_house, a, b, policy="round_robin")
        for number in range(12):
            path = ("/v1/responses", "/v1/files", "/v1/batches")[number % 3]
            await house.post(path, {"model": "demo", "stream": number % 2 == 0})
        assert all(server.made for server in shelves)
        before = len(a.requests) + len(b.requests)
        for server in shelves:
            for made in server.made:
                kind = "responses" if made.startswith("resp") else "files"
                assert (await call(house, "GET", f"/v1/{kind}/{made}")).json["from"] == server.name
        assert len(a.requests) + len(b.requests) == before + 12  # no server was queried in vain


async def test_an_object_made_through_another_router_is_found_by_asking_every_server(
    open_house: OpenHouse,
) -> None:
    shelves = ObjectServer("a"), ObjectServer("b")
    async with (
        serving(ForeignServer("a", shelves[0].answer)) as a,
        serving(ForeignServer("b", shelves[1].answer)) as b,
    ):
        house, other = await in_front_of(open_house, a, b), await in_front_of(open_house, a, b)
        for _ in range(8):
            await house.post("/v1/responses", {"model": "demo"})
        for server in shelves:
            for made in server.made:
                assert (await call(other, "DELETE", f"/v1/responses/{made}")).json == {
                    "from": server.name,
                    "method": "DELETE",
                }
        missing = await call(other, "GET", "/v1/responses/resp_none")
        assert (missing.status, "has no /v1/responses/resp_none" in missing.json["error"]["message"]) == (
            404,
            True,
        )


async def test_what_follows_a_response_goes_to_its_server_however_loaded(open_house: OpenHouse) -> None:
    shelves = ObjectServer("a"), ObjectServer("b")
    async with (
        serving(ForeignServer("a", shelves[0].answer)) as a,
        serving(ForeignServer("b", shelves[1].answer)) as b,
    ):
        house, other = await in_front_of(open_house, a, b), await in_front_of(open_house, a, b)
        first = (await house.post("/v1/responses", {"model": "demo"})).json
        for router in (house, other):
            follow = [
                (
                    await router.post("/v1/responses", {"model": "demo", "previous_response_id": first["id"]})
                ).json["from"]
                for _ in range(4)
            ]
            assert follow == [first["from"]] * 4
        lost = await house.post("/v1/responses", {"model": "demo", "previous_response_id": "resp_none"})
        assert (lost.status, lost.json["error"]["code"]) == (404, "not_found")


async def test_making_a_file_is_never_repeated_elsewhere(open_house: OpenHouse) -> None:
    async with (
        serving(ForeignServer("one", saying({"error": "disk"}, 500))) as one,
        serving(ForeignServer("two", saying({"error": "disk"}, 500))) as two,
    ):
        house = await in_front_of(open_house, one, two)
        answer = await house.post(
            "/v1/files", b"x", headers={"content-type": "multipart/form-data; boundary=B"}
        )
        assert (answer.status, answer.json) == (500, {"error": "disk"})
        assert len(one.requests) + len(two.requests) == 1


async def test_administration_passes_only_where_configured_to_the_server_that_is_named(
    open_house: OpenHouse,
) -> None:
    async with serving(ForeignServer("one", echo)) as one, serving(ForeignServer("two", echo)) as two:
        house = await in_front_of(open_house, one, two, passthrough_admin=("/v1/load_lora_adapter", "/sleep"))
        named = {"x-roost-server": two.url.removeprefix("http://")}
        assert (await call(house, "POST", "/sleep?level=1", named)).json == {
            "path": "/sleep?level=1",
            "method": "POST",
        }
        assert (len(one.requests), len(two.requests)) == (0, 1)
        assert two.requests[0].header("x-roost-server") is None
        unnamed = await call(house, "POST", "/sleep")
        assert unnamed.status == 400
        assert named["x-roost-server"] in unnamed.json["error"]["message"]
        for path in ("/collective_rpc", "/v1/unload_lora_adapter", "/reset_prefix_cache"):
            assert (await call(house, "POST", path, named)).status == 404
        assert len(two.requests) == 1


async def test_administration_needs_the_right(open_house: OpenHouse, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    lines = [
        key_line("plain", "acme", None, parse_rights("infer")),
        key_line("root", "ops", None, parse_rights("infer,admin")),
    ]
    keys.write_text("\n".join(lines))
    async with serving(ForeignServer("one", echo)) as server:
        house = await in_front_of(open_house, server, passthrough_admin=("/sleep",), api_key_file=keys)
        statuses = {
            key: (await call(house, "POST", "/sleep", {"authorization": f"Bearer {key}"})).status
            for key in ("plain", "root", "wrong")
        }
        assert statuses == {"plain": 403, "root": 200, "wrong": 401}
        assert server.requests[0].header("authorization") is None
        assert (
            await call(house, "GET", "/v1/files", {"authorization": "Bearer plain"})
        ).status == 403  # a list of all tenants' files


async def test_the_names_of_servers_are_shown_to_those_with_a_right_to_see_them(
    open_house: OpenHouse, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    rights = {"route": False, "metrics": True, "admin": True}
    keys.write_text(
        "\n".join(key_line(right, "acme", None, parse_rights(f"infer,{right}")) for right in rights)
    )
    async with serving(ForeignServer("one", echo)) as one, serving(ForeignServer("two", echo)) as two:
        house = await in_front_of(open_house, one, two, api_key_file=keys)
        for right, shown in rights.items():
            answer = await call(house, "GET", "/version", {"authorization": f"Bearer {right}"})
            assert answer.status == 400
            assert "x-roost-server" in answer.json["error"]["message"]
            assert (two.url.removeprefix("http://") in answer.json["error"]["message"]) is shown


async def test_a_tenant_does_not_reach_another_ones_objects(open_house: OpenHouse, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n".join(key_line(name, name, None, parse_rights("infer")) for name in ("acme", "bolt")))
    objects = ObjectServer("a")
    async with serving(ForeignServer("a", objects.answer)) as server:
        house = await in_front_of(open_house, server, api_key_file=keys)
        await house.post("/v1/responses", {"model": "demo"}, headers={"authorization": "Bearer acme"})
        for key, status in (("acme", 200), ("bolt", 404)):
            assert (
                await call(
                    house, "GET", f"/v1/responses/{objects.made[0]}", {"authorization": f"Bearer {key}"}
                )
            ).status == status


async def test_websockets_are_refused_by_name(open_house: OpenHouse) -> None:
    async with serving(ForeignServer("one", echo)) as server:
        house = await in_front_of(open_house, server)
        upgrade = {
            "connection": "upgrade",
            "upgrade": "websocket",
            "sec-websocket-version": "13",
            "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
        }
        answer = await call(house, "GET", "/v1/realtime?model=demo", upgrade)
        assert (answer.status, answer.json["error"]["code"]) == (501, "websocket_unsupported")


async def test_own_engines_say_which_routes_they_serve(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("ours", [rank.url], byte_archive)
    assert (await house.post("/v1/embeddings", {"model": "demo", "input": "abc"})).status == 404


def test_no_route_of_roost_is_one_that_passes() -> None:
    app = create_app(RouterService(None, Subjects("t"), RouterConfig()))
    own = [(method, route.path) for route in app.routes for method in getattr(route, "methods", ())]
    assert ("GET", "/v1/models") in own
    assert [(method, path) for method, path in own if route_of(method, path, ()) is not None] == []


@given(
    st.sampled_from(["GET", "POST", "DELETE", "PUT"]),
    st.text(max_size=60).map(lambda text: "/v1/files/" + text),
)
def test_only_an_id_and_a_known_part_make_the_path_of_an_object(method: str, path: str) -> None:
    route = route_of(method, path, ())
    assert route is None or (
        route.kind is RouteKind.OBJECT and ".." not in path and "%" not in path and path.count("/") <= 4
    )


@pytest.mark.parametrize("path", ["/v1/load lora", "relative", "/a/../b", "/v1/x?y=1"])
def test_a_path_of_administration_that_cannot_be_one_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="passthrough_admin"):
        RouterConfig(passthrough_admin=(path,))


def test_the_oldest_places_make_room() -> None:
    located = ObjectLocations()
    for number in range(MAX_OBJECTS + 1):
        located.note(f"resp_{number}", ObjectLocation((1, 0), ""))
        located.find("resp_0")
    assert located.find("resp_0") is not None
    assert located.find("resp_1") is None
    assert located.find(f"resp_{MAX_OBJECTS}") is not None


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (json.dumps({"id": "file-1", "object": "file"}).encode(), "file-1"),
        (
            b'event: response.created\ndata: {"response":{"id":"resp_1"}}\n\ndata: {"id":"later"}\n\n',
            "resp_1",
        ),
        (b': ping\n\ndata: {"id":"x"}\n\n', "x"),
        (b'{"id": 7}', None),
        (b"no json", None),
        (b"", None),
    ],
)
def test_the_id_of_a_created_object_is_read_from_unstreamed_answers_and_streams(
    answer: bytes, found: str | None
) -> None:
    assert object_id(answer) == found
