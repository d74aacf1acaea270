"""Passthrough: requests that only the server can validate, headers in both directions, unchanged errors and
streams.
"""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.completions import ApiError
from router.foreign_api.event_stream import EventStream, error_event
from router.foreign_api.headers import to_client, to_server
from router.foreign_api.lenient_fields import read
from tests.router.foreign_servers import ForeignServer, in_front_of, saying, serving, streaming
from tests.router.router_fixture import OpenHouse, chat

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


# Bodies


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model": None},
        {"model": "demo", "max_tokens": 24.0},
        {"model": "demo", "max_tokens": "24"},
        {"model": "demo", "temperature": "0.0", "stream": 0},
        {"model": "demo", "stream_options": {"include_usage": None}, "user": 123, "priority": 1.5},
        {"model": "demo", "messages": [], "prompt_embeds": "AAAA"},
        {"model": "demo", "messages": [{"role": 7}], "n": "many"},
    ],
    ids=str,
)
async def test_what_a_server_may_accept_is_not_refused_and_reaches_it_byte_for_byte(
    open_house: OpenHouse, fields: dict[str, Any]
) -> None:
    async with serving(ForeignServer("one", saying({"id": "x"}))) as server:
        house = await in_front_of(open_house, server)
        body = b"  " + json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode() + b"\n"
        answer = await house.post(CHAT, body, headers={"content-type": "text/plain"})
        assert answer.status == 200
        assert [sent.body for sent in server.requests] == [body]
        assert server.requests[0].header("content-type") == "text/plain"


USUAL = {
    "model": st.sampled_from([None, "", "demo"]),
    "stream": st.sampled_from([None, True, False]),
    "max_tokens": st.none() | st.integers(),
    "max_completion_tokens": st.none() | st.integers(-1, 9),
    "messages": st.lists(
        st.fixed_dictionaries(
            {}, optional={"role": st.text(), "content": st.none() | st.text(), "name": st.text()}
        )
    ),
    "prompt": st.none() | st.text(),
    "tools": st.none() | st.lists(st.dictionaries(st.text(), st.integers())),
    "user": st.none() | st.text(),
    "safety_identifier": st.none() | st.text(),
    "priority": st.none() | st.text() | st.integers(-9, 9),
    "temperature": st.none() | st.integers(0, 2) | st.floats(0, 2),
    "cache_salt": st.none() | st.text(),
    "previous_response_id": st.none() | st.text(),
}


@given(st.fixed_dictionaries({}, optional=USUAL))
def test_one_field_of_an_unusual_type_changes_nothing_about_how_the_others_are_read(
    fields: dict[str, Any],
) -> None:
    alone, beside = (read(json.dumps({**fields, **more}).encode(), "") for more in ({}, {"top_p": "0.5"}))
    assert beside == msgspec.structs.replace(alone, top_p=0.5)


async def test_a_body_that_is_no_json_is_judged_by_the_server(open_house: OpenHouse) -> None:
    async with serving(
        ForeignServer("one", saying({"detail": "There was an error parsing the body"}, status=400))
    ) as server:
        house = await in_front_of(open_house, server)
        answer = await house.post(CHAT, b'{"model": "demo", ')
        assert (answer.status, answer.json) == (400, {"detail": "There was an error parsing the body"})


async def test_explaining_reads_a_body_as_leniently_as_serving_does(open_house: OpenHouse) -> None:
    async with serving(ForeignServer("one", saying({}))) as server:
        house = await in_front_of(open_house, server)
        explained = await house.post(
            "/v1/route", {"messages": [{"role": "user", "content": "x"}], "max_tokens": "7"}
        )
        assert explained.status == 200
        assert explained.json["expected_output_tokens"] == 7


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "model",
        "stream",
        "max_tokens",
        "messages",
        "prompt",
        "input",
        "tools",
        "user",
        "priority",
        "temperature",
        "system",
    ]
)


@settings(max_examples=50)
@given(
    st.binary()
    | st.dictionaries(NAMES | st.text(), JSON_VALUES).map(lambda fields: json.dumps(fields).encode())
)
def test_reading_a_body_never_fails(body: bytes) -> None:
    fields = read(body, "application/json")
    assert fields.model is None or fields.model
    assert fields.max_tokens is None or 1 <= fields.max_tokens <= 2**31


@given(st.binary(max_size=300), st.binary(max_size=60))
def test_reading_a_multipart_body_never_fails(body: bytes, boundary: bytes) -> None:
    read(b"--B\r\n" + body, f"multipart/form-data; boundary={boundary.decode('latin-1')}")
    read(b"--B\r\n" + body + b"\r\n--B--", "multipart/form-data; boundary=B")


def test_the_model_of_a_multipart_body_is_found_behind_a_file_that_looks_like_one() -> None:
    decoy = b'Content-Disposition: form-data; name="model"\r\n\r\nwrong'
    body = (
        b'--XY\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type:'
        b" audio/wav\r\n\r\n\x00\xff" + decoy + b"\r\n"
        b'--XY\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n'
        b"--XY\r\nContent-Disposition: form-data; name=stream\r\n\r\ntrue\r\n--XY--\r\n"
    )
    fields = read(body, 'multipart/form-data; charset=utf-8; boundary="XY"')
    assert (fields.model, fields.stream) == ("whisper-1", True)


# Headers


async def test_end_to_end_headers_pass_both_ways_and_hop_by_hop_ones_do_not(open_house: OpenHouse) -> None:
    answer_headers = {
        "openai_processing_ms": "12",
        "x_ratelimit_remaining": "3",
        "keep_alive": "timeout=5",
        "x_hop": "1",
        "connection": "x-hop",
    }
    async with serving(ForeignServer("one", saying({}, **answer_headers))) as server:
        house = await in_front_of(open_house, server)
        sent = {
            "x-data-parallel-rank": "5",
            "openai-organization": "org",
            "x-session-id": "talk",
            "baggage": "k=v",
            "cookie": "a=b",
            "authorization": "Bearer mine",
            "connection": "keep-alive, x-private",
            "x-private": "to the router",
            "te": "trailers",
            "x-roost-decision-id": "forged",
        }
        answer = await house.post(CHAT, chat(), headers=sent)
        came = server.requests[0]
        for name in (
            "x-data-parallel-rank",
            "openai-organization",
            "x-session-id",
            "baggage",
            "cookie",
            "authorization",
        ):
            assert came.header(name) == sent[name]
        assert came.header("x-private") is came.header("te") is None
        assert came.header("x-roost-decision-id") == answer.headers["x-roost-decision-id"] != "forged"
        assert came.header("x-request-id") == answer.headers["x-request-id"]
        assert (answer.headers["openai-processing-ms"], answer.headers["x-ratelimit-remaining"]) == (
            "12",
            "3",
        )
        assert "keep-alive" not in answer.headers
        assert "x-hop" not in answer.headers


async def test_repeated_headers_of_an_answer_all_pass(open_house: OpenHouse) -> None:
    async def answer(_: aiohttp.web.Request) -> aiohttp.web.Response:
        response = aiohttp.web.json_response({})
        response.headers.extend([("set-cookie", "a=1"), ("set-cookie", "b=2")])
        return response

    async with serving(ForeignServer("one", answer)) as server:
        house = await in_front_of(open_house, server)
        async with house.http.post(house.url + CHAT, json=chat()) as response:
            assert response.headers.getall("set-cookie") == ["a=1", "b=2"]


def test_a_clients_key_is_forwarded_only_to_a_server_that_validates_it() -> None:
    client = [
        (b"authorization", b"Bearer mine"),
        (b"x-api-key", b"mine"),
        (b"api-key", b"mine"),
        (b"accept", b"*/*"),
        (b"accept-encoding", b"gzip"),
    ]
    own = [(b"x-request-id", b"r")]
    assert to_server(client, own, credentials=True) == [*client[:4], *own]
    assert to_server(client, own, credentials=False) == [client[3], *own]
    assert to_server(client, [(b"authorization", b"Bearer router")], credentials=True)[-1] == (
        b"authorization",
        b"Bearer router",
    )
    assert (
        sum(
            name == b"authorization"
            for name, _ in to_server(client, [(b"authorization", b"Bearer router")], credentials=True)
        )
        == 1
    )


def test_headers_that_connection_names_stay_behind_in_any_spelling() -> None:
    server = [
        (b"Connection", b"X-One , x-two"),
        (b"connection", b"X-Three"),
        (b"X-ONE", b"1"),
        (b"x-Two", b"2"),
        (b"x-three", b"3"),
        (b"Date", b"now"),
    ]
    assert to_client(server, []) == [(b"date", b"now")]


# Errors


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b'{"error": {"message": "too long", "type": "BadRequestError", "param": null, "code": 400}}'),
        (
            400,
            (
                b'{"object":"error","message":"longer than the model\'s'
                b' context","type":"invalid_request_error","param":null,"code":400}'
            ),
        ),
        (404, b"plain words"),
        (422, b'{"detail": [{"loc": ["body"]}]}'),
        (403, b'{"error": "policy"}'),
    ],
)
async def test_an_error_of_the_server_passes_unchanged_and_without_a_retry(
    open_house: OpenHouse, status: int, body: bytes
) -> None:
    async with (
        serving(ForeignServer("one", saying(body, status, x_vendor="kept"))) as one,
        serving(ForeignServer("two", saying(body, status, x_vendor="kept"))) as two,
    ):
        house = await in_front_of(open_house, one, two, breaker_failures=1)
        answer = await house.post(CHAT, chat())
        assert (answer.status, answer.body, answer.headers["x-vendor"]) == (status, body, "kept")
        assert len(one.requests) + len(two.requests) == 1
        assert (await house.post("/v1/route", chat())).json["excluded"] == []  # no breaker opened


async def test_a_busy_servers_own_retry_after_reaches_the_client(open_house: OpenHouse) -> None:
    async with serving(
        ForeignServer(
            "one",
            saying({"error": {"message": "slow down", "type": "rate", "code": 429}}, 429, retry_after="17"),
        )
    ) as server:
        house = await in_front_of(open_house, server, queue_requests=0)
        answer = await house.post(CHAT, chat())
        assert (answer.status, answer.headers["retry-after"]) == (429, "17")
        assert answer.json == {"error": {"message": "slow down", "type": "rate", "code": 429}}


async def test_a_401_is_the_clients_when_its_own_key_was_judged(open_house: OpenHouse) -> None:
    async with (
        serving(
            ForeignServer("one", saying({"error": "who are you"}, 401, www_authenticate="Bearer"))
        ) as one,
        serving(
            ForeignServer("two", saying({"error": "who are you"}, 401, www_authenticate="Bearer"))
        ) as two,
    ):
        house = await in_front_of(open_house, one, two)
        answer = await house.post(CHAT, chat(), headers={"authorization": "Bearer wrong"})
        assert (answer.status, answer.json, answer.headers["www-authenticate"]) == (
            401,
            {"error": "who are you"},
            "Bearer",
        )
        assert len(one.requests) + len(two.requests) == 1


async def test_a_401_to_the_routers_own_key_is_the_servers_fault_and_names_the_setting(
    open_house: OpenHouse, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("routers-own")
    async with (
        serving(ForeignServer("one", saying({"error": "who are you"}, 401))) as refusing,
        serving(ForeignServer("two", saying({"id": "two"}))) as willing,
    ):
        house = await in_front_of(open_house, refusing, willing, policy="round_robin", backend_key_file=key)
        answers = [await house.post(CHAT, chat(f"question {number}")) for number in range(8)]
        assert [answer.json.get("id") for answer in answers] == ["two"] * 8
        assert refusing.requests
        assert len(refusing.requests) <= house.service.config.breaker_failures
        assert {sent.header("authorization") for sent in [*refusing.requests, *willing.requests]} == {
            "Bearer routers-own"
        }


# Streams


EVENTS = [
    b'data: {"n":1}\n\n',
    b": keep-alive\n\n",
    b"event: x\r\ndata: two\r\n\r\n",
    b"data: a\ndata: b\n\n",
    b"data: [DONE]\n\n",
]


@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.lists(st.integers(1, 12), max_size=40))
def test_only_complete_events_come_out_and_nothing_is_lost_wherever_pieces_end(
    events: list[bytes], sizes: list[int]
) -> None:
    whole = b"".join(events)
    stream, out, at = EventStream(1000), b"", 0
    ends = {0}
    for event in events:
        ends.add(max(ends) + len(event))
    for size in [*sizes, len(whole) + 1]:
        out += stream.feed(whole[at : at + size])
        at += size
        assert len(out) in ends
        assert out + stream.rest == whole[:at]
    assert stream.separator() == b""
    assert stream.rest == b""


def test_an_event_longer_than_the_bound_passes_in_pieces_and_is_closed_before_another() -> None:
    stream = EventStream(10)
    assert stream.feed(b"data: 0123") == b""
    assert stream.feed(b"456789") == b"data: 0123456789"
    assert stream.separator() == b"\n\n"
    assert stream.feed(b"x\n\n") == b"x\n\n"
    assert stream.separator() == b""


@pytest.mark.parametrize("cut", range(1, 24))
async def test_a_stream_broken_anywhere_in_an_event_ends_in_an_error_that_clients_parse(
    open_house: OpenHouse, cut: int
) -> None:
    first, second = b'data: {"choices":[]}\n\n', b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'
    async with serving(ForeignServer("one", streaming(first, second[:cut], broken=True))) as server:
        house = await in_front_of(open_house, server)
        answer = await house.post(CHAT, chat(stream=True))
        assert answer.events[0] == {"choices": []}
        assert [event["error"]["code"] for event in answer.events[1:]] == ["upstream_failed"]
        assert answer.body.endswith(b"}\n\ndata: [DONE]\n\n")


async def test_a_stream_broken_in_an_event_too_long_to_be_held_back_ends_in_an_error_that_clients_parse(
    open_house: OpenHouse,
) -> None:
    first, second = b'data: {"choices":[]}\n\n', b'data: {"choices":[{"delta":{"content":"' + b"x" * 8192
    async with serving(ForeignServer("one", streaming(first, second, broken=True))) as server:
        house = await in_front_of(open_house, server, max_event_bytes=4096)
        answer = await house.post(CHAT, chat(stream=True))
        begun, long, error, done, end = answer.body.split(b"\n\n")
        assert (begun + b"\n\n", long, done, end) == (first, second, b"data: [DONE]", b"")
        assert b'"upstream_failed"' in error
        assert error.startswith(b'data: {"error":')


async def test_a_stream_that_breaks_behind_its_end_is_complete(open_house: OpenHouse) -> None:
    pieces = (b'data: {"choices":[]}\n\n', b": ping\n\n", b"data: [DONE]\n\n")
    async with serving(ForeignServer("one", streaming(*pieces, broken=True))) as server:
        house = await in_front_of(open_house, server)
        assert (await house.post(CHAT, chat(stream=True))).body == b"".join(pieces)


async def test_an_unstreamed_answer_longer_than_the_limit_passes_as_it_arrives(open_house: OpenHouse) -> None:
    body = json.dumps({"data": "x" * 300_000}).encode()
    async with serving(ForeignServer("one", saying(body))) as server:
        house = await in_front_of(open_house, server, max_event_bytes=100_000)
        answer = await house.post(CHAT, chat())
        assert answer.body == body
        assert answer.headers["content-length"] == str(len(body))


async def test_a_long_unstreamed_answer_that_breaks_off_is_visibly_truncated(open_house: OpenHouse) -> None:
    async def answer(http: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        response = aiohttp.web.StreamResponse(
            headers={"content-type": "application/json", "content-length": "500000"}
        )
        await response.prepare(http)
        await response.write(b"x" * 300_000)
        assert http.transport is not None
        http.transport.close()
        return response

    async with serving(ForeignServer("one", answer)) as server:
        house = await in_front_of(open_house, server, max_event_bytes=100_000)
        with pytest.raises(aiohttp.ClientPayloadError):
            await house.post(CHAT, chat())


@pytest.mark.parametrize(
    ("path", "last"),
    [
        (
            CHAT,
            (
                b'data: {"error":{"message":"gone","type":"server_error","param":null,"code":"c"}}\n\ndata:'
                b" [DONE]\n\n"
            ),
        ),
        (
            "/v1/messages",
            b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"gone"}}\n\n',
        ),
        (
            "/v1/responses",
            b'event: error\ndata: {"type":"error","code":"c","message":"gone","param":null}\n\n',
        ),
    ],
)
def test_an_error_event_has_the_form_of_its_api(path: str, last: bytes) -> None:
    assert error_event(path, ApiError(502, "gone", code="c")) == last


async def test_many_streams_cut_by_the_server_leave_nothing_booked(open_house: OpenHouse) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            serving(ForeignServer("one", streaming(b"data: {}\n\n", broken=True)))
        )
        house = await in_front_of(open_house, server, breaker_failures=100)
        await asyncio.gather(*(house.post(CHAT, chat(f"{number}", stream=True)) for number in range(20)))
        assert house.service.scheduler.reservations.open_bookings == 0
