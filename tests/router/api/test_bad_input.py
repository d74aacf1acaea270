"""Errors of requests that cannot be served: OpenAI's error form, the field's name, the right status."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.access.api_keys import ALL_RIGHTS, key_line
from tests.router.router_fixture import (
    House,
    MockRank,
    OpenHouse,
    Serve,
    archive,
    bpe,
    chat,
    engine_joined,
    until,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture
async def rank(house: House, serve_rank: Serve, byte_archive: bytes) -> MockRank:
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("alone", [rank.url], byte_archive)
    return rank


BAD: dict[str, tuple[str, Any, int, str | None, str]] = {
    "no body": (CHAT, b"", 400, None, "invalid_json"),
    "malformed JSON": (CHAT, b'{"model": "demo", ', 400, None, "invalid_json"),
    "not an object": (CHAT, b"[]", 400, None, "invalid_type"),
    "invalid UTF-8": (
        CHAT,
        b'{"model":"demo","messages":[{"role":"user","content":"\xff\xfe"}]}',
        400,
        None,
        "invalid_utf8",
    ),
    "a lone surrogate": (
        CHAT,
        b'{"model":"demo","messages":[{"role":"user","content":"\\ud800"}]}',
        400,
        None,
        "invalid_json",
    ),
    "a deep nest": (CHAT, b'{"model":"demo","messages":' + b"[" * 50_000, 400, "messages[0]", "invalid_type"),
    "a deep nest in a field that may hold anything": (
        CHAT,
        b'{"model":"demo","messages":[{"role":' + b"[" * 50_000,
        400,
        None,
        "invalid_json",
    ),
    "a deep nest in an unknown field": (CHAT, b'{"vendor":' + b"[" * 50_000, 400, None, "invalid_json"),
    "no model": (CHAT, {"messages": [{"role": "user", "content": "x"}]}, 400, "model", "missing_field"),
    "a model of a wrong type": (CHAT, chat(model=3), 400, "model", "invalid_type"),
    "an unknown model": (CHAT, chat(model="nobody"), 404, "model", "model_not_found"),
    "no messages": (CHAT, {"model": "demo"}, 400, "messages", "missing_field"),
    "empty messages": (CHAT, chat(messages=[]), 400, "messages", "invalid_value"),
    "messages of a wrong type": (CHAT, chat(messages="hello"), 400, "messages", "invalid_type"),
    "a message that is no object": (CHAT, chat(messages=["hello"]), 400, "messages[0]", "invalid_type"),
    "a message without a role": (
        CHAT,
        chat(messages=[{"content": "x"}]),
        400,
        "messages[0].role",
        "invalid_value",
    ),
    "content of a wrong type": (
        CHAT,
        chat(messages=[{"role": "user", "content": 5}]),
        400,
        "messages[0].content",
        "invalid_value",
    ),
    "an image": (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        400,
        "messages[0].content[0]",
        "unsupported_content",
    ),
    "a part without text": (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "text"}]}]),
        400,
        "messages[0].content[0].text",
        "invalid_type",
    ),
    "max_tokens of a wrong type": (CHAT, chat(max_tokens="many"), 400, "max_tokens", "invalid_type"),
    "max_tokens 0": (CHAT, chat(max_tokens=0), 400, "max_tokens", "invalid_value"),
    "negative max_completion_tokens": (
        CHAT,
        chat(max_completion_tokens=-1),
        400,
        "max_completion_tokens",
        "invalid_value",
    ),
    "absurd max_tokens": (CHAT, chat(max_tokens=10**9), 400, "max_tokens", "context_length_exceeded"),
    "max_tokens beyond every integer": (
        CHAT,
        chat(max_tokens=10**15),
        400,
        "max_tokens",
        "context_length_exceeded",
    ),
    "a prompt longer than the context": (CHAT, chat("x" * 5000), 400, "messages", "context_length_exceeded"),
    "temperature out of range": (CHAT, chat(temperature=2.5), 400, "temperature", "invalid_value"),
    "temperature of a wrong type": (CHAT, chat(temperature="hot"), 400, "temperature", "invalid_type"),
    "top_p 0": (CHAT, chat(top_p=0), 400, "top_p", "invalid_value"),
    "top_k negative": (CHAT, chat(top_k=-2), 400, "top_k", "invalid_value"),
    "n 0": (CHAT, chat(n=0), 400, "n", "invalid_value"),
    "too many choices": (CHAT, chat(n=1000), 400, "n", "invalid_value"),
    "a seed too large": (CHAT, chat(seed=2**63), 400, "seed", "invalid_value"),
    "too many stops": (CHAT, chat(stop=["x"] * 5), 400, "stop", "invalid_value"),
    "an empty stop": (CHAT, chat(stop=[""]), 400, "stop", "invalid_value"),
    "an empty stop among others": (CHAT, chat(stop=["a", ""]), 400, "stop", "invalid_value"),
    "stop of a wrong type": (CHAT, chat(stop=[1]), 400, "stop[0]", "invalid_type"),
    "top_logprobs without logprobs": (CHAT, chat(top_logprobs=2), 400, "top_logprobs", "invalid_value"),
    "too many top_logprobs": (
        CHAT,
        chat(logprobs=True, top_logprobs=21),
        400,
        "top_logprobs",
        "invalid_value",
    ),
    "include_usage of a wrong type": (
        CHAT,
        chat(stream_options={"include_usage": "yes"}),
        400,
        "stream_options.include_usage",
        "invalid_type",
    ),
    "tools": (CHAT, chat(tools=[{"type": "function"}]), 400, "tools", "unsupported_parameter"),
    "a JSON response format": (
        CHAT,
        chat(response_format={"type": "json_object"}),
        400,
        "response_format",
        "unsupported_parameter",
    ),
    "a penalty": (CHAT, chat(presence_penalty=1), 400, "presence_penalty", "unsupported_parameter"),
    "an empty prompt": (TEXT, {"model": "demo", "prompt": ""}, 400, "prompt", "invalid_value"),
    "no prompt": (TEXT, {"model": "demo"}, 400, "prompt", "missing_field"),
    "a prompt of a wrong type": (TEXT, {"model": "demo", "prompt": 5}, 400, "prompt", "invalid_type"),
    "a mixed prompt": (TEXT, {"model": "demo", "prompt": ["a", 5]}, 400, "prompt", "invalid_type"),
    "an empty prompt among others": (
        TEXT,
        {"model": "demo", "prompt": ["a", ""]},
        400,
        "prompt",
        "invalid_value",
    ),
    "a negative id": (TEXT, {"model": "demo", "prompt": [-1]}, 400, "prompt", "invalid_type"),
    "an id outside the vocabulary": (
        TEXT,
        {"model": "demo", "prompt": [100_000]},
        400,
        "prompt",
        "invalid_value",
    ),
    "echo": (TEXT, {"model": "demo", "prompt": "a", "echo": True}, 400, "echo", "unsupported_parameter"),
    "more prompts than choices": (
        TEXT,
        {"model": "demo", "prompt": ["a"] * 129},
        400,
        "prompt",
        "invalid_value",
    ),
    "logprobs out of range": (
        TEXT,
        {"model": "demo", "prompt": "a", "logprobs": 50},
        400,
        "logprobs",
        "invalid_value",
    ),
    "nothing to route": ("/v1/route", {"model": "demo"}, 400, "prompt", "missing_field"),
    "garbage to route": ("/v1/route", b"\x00\x01", 400, None, "invalid_json"),
}


async def test_bad_input_is_answered_with_the_fields_name(house: House, rank: MockRank) -> None:
    for case, (path, body, status, param, code) in BAD.items():
        answer = await house.post(path, body)
        assert answer.status == status, (case, answer.body)
        error = answer.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, case
        assert (error["param"], error["code"]) == (param, code), case
        assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error"), case
        assert not rank.requests, case
    assert house.service.scheduler.reservations.open_bookings == 0


async def test_the_error_of_an_unknown_model_lists_the_known_ones(house: House, rank: MockRank) -> None:
    assert "demo" in (await house.post(CHAT, chat(model="gpt-unheard-of"))).json["error"]["message"]


async def test_a_body_beyond_the_limit_is_refused_before_it_is_read(open_house: OpenHouse) -> None:
    house = await open_house(max_body_bytes=1000)
    announced = await house.post(CHAT, chat("x" * 2000))

    async def trickle() -> Any:
        for _ in range(40):
            yield b" " * 100

    async with house.http.post(house.url + CHAT, data=trickle()) as chunked:
        assert chunked.status == 413
    assert announced.status == 413
    assert announced.json["error"]["code"] == "body_too_large"


async def test_unknown_paths_and_methods_answer_in_the_same_form(house: House) -> None:
    missing = await house.get("/v2/nothing")
    assert (missing.status, set(missing.json["error"])) == (404, {"message", "type", "param", "code"})
    assert (await house.get(CHAT)).status == 405
    assert (await house.post("/v1/models", b"")).status == 405


async def test_without_a_live_engine_the_answer_is_503_with_retry_after(
    open_house: OpenHouse, byte_archive: bytes
) -> None:
    house = await open_house(no_engine_wait_seconds=0)
    joined = engine_joined("silent", ["http://127.0.0.1:1"], await house.bus.put_blob(byte_archive))
    await house.bus.record(house.subjects.membership("silent"), joined)
    await until(lambda: house.service.view.engine(joined.worker_id))
    answer = await house.post(CHAT, chat())
    assert (answer.status, answer.json["error"]["code"]) == (503, "no_engine")
    assert int(answer.headers["retry-after"]) >= 1
    assert "no heartbeat" in answer.json["error"]["message"]


async def test_saturated_ranks_answer_429_with_retry_after(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(max_requests_per_rank=1, queue_requests=0)
    rank = await serve_rank(MockRank(byte_archive))
    rank.hold_after = 1
    await house.join("alone", [rank.url], byte_archive)
    async with house.http.post(house.url + CHAT, json=chat(stream=True)) as first:
        assert first.status == 200
        second = await house.post(CHAT, chat())
    assert (second.status, second.json["error"]["code"], second.json["error"]["type"]) == (
        429,
        "saturated",
        "rate_limit_error",
    )
    assert int(second.headers["retry-after"]) >= 1


async def test_a_ranks_refusal_reaches_the_client_unchanged(house: House, rank: MockRank) -> None:
    rank.answer_status = 400
    answer = await house.post(CHAT, chat())
    assert answer.status == 400
    assert answer.json["error"] == {
        "message": "mock says no",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "mock",
    }
    assert len(rank.requests) == 1


async def test_api_keys_are_required_if_a_file_lists_any(
    open_house: OpenHouse, tmp_path: Path, serve_rank: Serve, byte_archive: bytes
) -> None:
    keys = tmp_path / "keys"
    lines = [key_line(key, "ours", None, ALL_RIGHTS) for key in ("secret-one", "secret-two")]
    keys.write_text("# ours\n\n" + "\n".join(lines))
    house = await open_house(api_key_file=keys)
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("alone", [rank.url], byte_archive)
    for header in (
        None,
        {"authorization": "Bearer wrong"},
        {"authorization": "secret-one"},
        {"authorization": "Basic secret-one"},
    ):
        refused = await house.post(CHAT, chat(), headers=header)
        assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
        models = await house.get("/v1/models", headers=header)
        assert (models.status, models.headers["www-authenticate"], models.headers["connection"]) == (
            401,
            "Bearer",
            "close",
        )
        assert (refused.headers["www-authenticate"], refused.headers["connection"]) == ("Bearer", "close")
        assert (await house.get("/v1/decisions/x", headers=header)).status == 401
    for key in ("secret-one", "secret-two"):
        assert (await house.post(CHAT, chat(), headers={"authorization": f"Bearer {key}"})).status == 200
    await until(lambda: house.service.ready)
    assert (await house.get("/health")).status == (await house.get("/ready")).status == 200
    assert all("authorization" not in {name.lower() for name in headers} for headers in rank.headers)


async def test_an_empty_key_file_is_refused_at_the_start(open_house: OpenHouse, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# nothing\n")
    with pytest.raises(ValueError, match="no API key"):
        await open_house(api_key_file=keys)


async def test_a_model_without_a_chat_template_says_where_to_go(house: House, serve_rank: Serve) -> None:
    packed = archive(bpe(257), {})
    rank = await serve_rank(MockRank(packed))
    await house.join("alone", [rank.url], packed)
    answer = await house.post(CHAT, chat())
    assert (answer.status, answer.json["error"]["code"]) == (400, "no_chat_template")
    assert (await house.post(TEXT, msgspec.json.encode({"model": "demo", "prompt": "abc"}))).status == 200
