"""Answers of successful requests: chat and completions, streamed and unstreamed, usage, choices, logprobs,
headers.
"""

import json
import logging
import tracemalloc
from contextlib import AsyncExitStack
from functools import reduce
from operator import add
from typing import Any

import pytest

from tests.router.router_fixture import Answered, House, MockRank, OpenHouse, Serve, chat, rendered, until


@pytest.fixture
async def rank(house: House, serve_rank: Serve, bpe_archive: bytes) -> MockRank:
    """Return the only rank of the only engine."""
    rank = await serve_rank(MockRank(bpe_archive))
    await house.join("alone", [rank.url], bpe_archive)
    return rank


def streamed_text(answer: Answered, index: int = 0) -> str:
    choices = [choice for event in answer.events for choice in event["choices"] if choice["index"] == index]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices
    )


async def test_an_unstreamed_chat_answer_has_the_ranks_text_and_the_clients_usage(
    house: House, rank: MockRank
) -> None:
    rank.cached_tokens = 3
    answer = await house.post("/v1/chat/completions", chat())
    prompt = rank.tokenizer.encode_rendered(rendered("hello there"))
    assert (answer.status, answer.json["object"], answer.json["model"]) == (200, "chat.completion", "demo")
    choice = answer.json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": rank.text(prompt, 5, 12), "refusal": None}
    assert choice["finish_reason"] == "length"
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": 12,
        "total_tokens": len(prompt) + 12,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert answer.json["usage"] == usage
    assert rank.requests[0].prompt == prompt
    assert rank.requests[0].return_token_ids


async def test_a_streamed_chat_answer_names_the_role_once_and_keeps_one_id(
    house: House, rank: MockRank
) -> None:
    answer = await house.post("/v1/chat/completions", chat(stream=True))
    prompt = rank.tokenizer.encode_rendered(rendered("hello there"))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert streamed_text(answer) == rank.text(prompt, 5, 12)
    assert [event["choices"][0]["delta"].get("role") for event in answer.events].count("assistant") == 1
    assert len({event["id"] for event in answer.events}) == 1
    assert {event["object"] for event in answer.events} == {"chat.completion.chunk"}
    assert [event["choices"][0]["finish_reason"] for event in answer.events].count("length") == 1
    assert all("usage" not in event for event in answer.events)


async def test_include_usage_adds_one_last_chunk_and_null_elsewhere(house: House, rank: MockRank) -> None:
    for path, body in (
        ("/v1/chat/completions", chat()),
        ("/v1/completions", {"model": "demo", "prompt": "abc", "max_tokens": 5, "seed": 1}),
    ):
        events = (
            await house.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        ).events
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == body["max_tokens"]
        assert all(event["usage"] is None for event in events[:-1])


async def test_completions_take_text_and_ids_and_default_to_sixteen_tokens(
    house: House, rank: MockRank
) -> None:
    ids = rank.tokenizer.encode_prompt("some prompt")
    whole = await house.post("/v1/completions", {"model": "demo", "prompt": "some prompt", "seed": 2})
    same = await house.post(
        "/v1/completions", {"model": "demo", "prompt": ids, "seed": 2, "return_token_ids": True}
    )
    assert whole.json["object"] == "text_completion"
    assert whole.json["choices"][0]["text"] == same.json["choices"][0]["text"] == rank.text(ids, 2, 16)
    assert same.json["choices"][0]["token_ids"] == rank.ids(ids, 2, 16)
    assert "token_ids" not in whole.json["choices"][0]
    streamed = await house.post(
        "/v1/completions", {"model": "demo", "prompt": "some prompt", "seed": 2, "stream": True}
    )
    assert streamed_text(streamed) == rank.text(ids, 2, 16)


async def test_n_choices_are_independent_runs_with_consecutive_seeds(house: House, rank: MockRank) -> None:
    prompt = rank.tokenizer.encode_rendered(rendered("hello there"))
    whole = await house.post("/v1/chat/completions", chat(n=3))
    streamed = await house.post(
        "/v1/chat/completions", chat(n=3, stream=True, stream_options={"include_usage": True})
    )
    for index in range(3):
        assert whole.json["choices"][index]["index"] == index
        assert whole.json["choices"][index]["message"]["content"] == rank.text(prompt, 5 + index, 12)
        assert streamed_text(streamed, index) == rank.text(prompt, 5 + index, 12)
    assert whole.json["usage"]["prompt_tokens"] == len(prompt)
    assert whole.json["usage"]["completion_tokens"] == streamed.events[-1]["usage"]["completion_tokens"] == 36
    roles = [
        event["choices"][0]["index"]
        for event in streamed.events
        if event["choices"] and "role" in event["choices"][0]["delta"]
    ]
    assert sorted(roles) == [0, 1, 2]


async def test_several_prompts_become_several_choices(house: House, rank: MockRank) -> None:
    answer = await house.post(
        "/v1/completions", {"model": "demo", "prompt": ["one", "two"], "n": 2, "seed": 9, "max_tokens": 4}
    )
    ids = [rank.tokenizer.encode_prompt(prompt) for prompt in ("one", "two")]
    assert [choice["text"] for choice in answer.json["choices"]] == [
        rank.text(prompt, seed, 4) for prompt in ids for seed in (9, 10)
    ]
    assert answer.json["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_logprobs_come_in_the_form_of_each_api(house: House, rank: MockRank) -> None:
    in_chat = await house.post("/v1/chat/completions", chat(logprobs=True, top_logprobs=2, max_tokens=2))
    content = in_chat.json["choices"][0]["logprobs"]["content"]
    assert len(content) == 2
    assert content[0]["logprob"] == -0.5
    assert content[0]["top_logprobs"][1] == {"token": "é", "logprob": -2.0, "bytes": [195, 169]}
    assert content[0]["bytes"] == list(content[0]["token"].encode())
    plain = await house.post(
        "/v1/completions", {"model": "demo", "prompt": "abc", "max_tokens": 2, "logprobs": 2}
    )
    assert set(plain.json["choices"][0]["logprobs"]) == {
        "tokens",
        "token_logprobs",
        "top_logprobs",
        "text_offset",
    }
    streamed = await house.post("/v1/chat/completions", chat(logprobs=True, max_tokens=2, stream=True))
    assert (
        sum(
            len(event["choices"][0]["logprobs"]["content"])
            for event in streamed.events
            if event["choices"][0].get("logprobs")
        )
        == 2
    )
    assert rank.requests[0].logprobs == 2
    assert rank.requests[2].logprobs == 0


async def test_settings_reach_the_rank_and_a_seed_is_drawn_when_none_is_given(
    house: House, rank: MockRank
) -> None:
    settings = {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "stop": ["X", "Y"], "ignore_eos": True}
    await house.post("/v1/chat/completions", {**chat(**settings), "seed": None, "max_completion_tokens": 3})
    await house.post("/v1/chat/completions", {**chat(), "seed": None})
    first, second = rank.requests
    assert (first.temperature, first.top_p, first.top_k, first.stop, first.ignore_eos, first.max_tokens) == (
        0.3,
        0.5,
        7,
        ["X", "Y"],
        True,
        3,
    )
    assert first.seed is not None
    assert first.seed != second.seed


async def test_chat_without_max_tokens_may_fill_the_context(house: House, rank: MockRank) -> None:
    body = chat(stream=True)
    del body["max_tokens"]
    rank.hold_after = 1
    async with house.http.post(house.url + "/v1/chat/completions", json=body):
        assert rank.requests[0].max_tokens + len(rank.requests[0].prompt) == 4096


async def test_a_body_is_not_kept_while_its_answer_lasts(house: House, rank: MockRank) -> None:
    rank.hold_after = 1
    body = json.dumps(chat(stream=True)).encode() + b" " * 100_000
    async with AsyncExitStack() as stack:

        async def ask() -> None:
            url = house.url + "/v1/chat/completions"
            answer = await stack.enter_async_context(house.http.post(url, data=body))
            assert await answer.content.readline()

        await ask()  # the first of all makes what is made once
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10):
            await ask()
        held = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert held < 10 * len(body)


async def test_parts_of_text_are_joined_and_template_settings_passed_on(house: House, rank: MockRank) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {
        **chat(),
        "messages": [{"role": "user", "content": parts}],
        "chat_template_kwargs": {"vendor": "x"},
    }
    assert (await house.post("/v1/chat/completions", body)).status == 200
    assert rank.requests[0].prompt == rank.tokenizer.encode_rendered(rendered("one\ntwo"))


async def test_long_prompts_give_the_same_ids_off_the_event_loop(house: House, rank: MockRank) -> None:
    text = "words in a row " * 700
    assert (await house.post("/v1/chat/completions", chat(text))).status == 200
    assert rank.requests[0].prompt == rank.tokenizer.encode_rendered(rendered(text))


async def test_the_decision_of_an_answer_can_be_read_back(house: House, rank: MockRank) -> None:
    answer = await house.post("/v1/chat/completions", chat(), headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    record = (await house.get(f"/v1/decisions/{answer.headers['x-roost-decision-id']}")).json
    assert record["request_id"] == "mine-1"
    assert record["chosen"] == "alone/0"
    assert record["runner_up"] is None
    candidate = record["candidates"][0]
    assert candidate["score"] == reduce(add, candidate["terms_ms"].values())
    assert candidate["worker_id"].isdigit()
    missing = await house.get("/v1/decisions/none")
    assert (missing.status, missing.json["error"]["code"]) == (404, "decision_not_found")


async def test_an_explained_decision_equals_the_one_that_is_made(house: House, rank: MockRank) -> None:
    explained = (await house.post("/v1/route", chat())).json
    assert not rank.requests
    assert house.service.scheduler.reservations.open_bookings == 0
    served = await house.post("/v1/chat/completions", chat())
    record = (await house.get(f"/v1/decisions/{served.headers['x-roost-decision-id']}")).json
    for field in (
        "chosen",
        "runner_up",
        "margin",
        "candidates",
        "excluded",
        "epochs",
        "prompt_tokens",
        "expected_output_tokens",
        "weights",
    ):
        assert explained[field] == record[field], field
    by_text = await house.post("/v1/route", {"model": "demo", "prompt": "abc"})
    assert by_text.json["prompt_tokens"] == len(rank.tokenizer.encode_prompt("abc"))


async def test_models_health_ready_and_metrics_can_be_read(house: House, rank: MockRank) -> None:
    assert [model["id"] for model in (await house.get("/v1/models")).json["data"]] == ["demo"]
    assert (await house.get("/v1/models/demo")).json["max_model_len"] == 4096
    assert (await house.get("/health")).status == 200
    await until(lambda: house.service.readiness.over)
    assert (await house.get("/ready")).json == {"ready": True, "models": ["demo"], "missing": []}
    await house.post("/v1/chat/completions", chat())
    text = (await house.get("/metrics")).body.decode()
    assert 'roost_router_requests_total{model="demo",outcome="answered"} 1.0' in text
    assert "roost_router_overhead_seconds_bucket" in text


async def test_the_openapi_document_describes_the_hot_routes_too(house: House) -> None:
    document = (await house.get("/openapi.json")).json
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/route",
        "/v1/models",
        "/v1/decisions/{decision_id}",
    } <= set(document["paths"])
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert "messages" in document["components"]["schemas"][body["$ref"].rsplit("/", 1)[-1]]["required"]


async def test_ready_is_503_until_an_engine_lives(open_house: OpenHouse) -> None:
    house = await open_house()
    ready = await house.get("/ready")
    assert (ready.status, ready.json["ready"]) == (503, False)
    assert (await house.get("/health")).status == 200
    answer = await house.post("/v1/chat/completions", chat())
    assert (answer.status, answer.json["error"]["code"]) == (503, "no_engine")


async def test_every_request_writes_one_json_line(
    house: House, rank: MockRank, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="roost.access")
    answer = await house.post("/v1/chat/completions", chat(), headers={"x-request-id": "mine-2"})
    await house.post("/v1/chat/completions", b"{")
    await until(lambda: len(lines(caplog)) == 2)
    good, bad = lines(caplog)
    assert good["request_id"] == "mine-2"
    assert good["decision_id"] == answer.headers["x-roost-decision-id"]
    assert (good["model"], good["worker"], good["rank"], good["status"], good["outcome"]) == (
        "demo",
        "alone",
        0,
        200,
        "answered",
    )
    assert good["output_tokens"] == 12
    assert 0 < good["ttft_ms"] <= good["total_ms"]
    assert (bad["status"], bad["outcome"], bad["worker"]) == (400, "refused", None)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "roost.access"]


async def test_a_clients_trace_context_is_passed_on_untouched_when_nothing_is_traced(
    house: House, rank: MockRank
) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await house.post("/v1/chat/completions", chat(), headers={"traceparent": parent, "tracestate": "a=b"})
    sent = {name.lower(): value for name, value in rank.headers[0].items()}
    assert (sent["traceparent"], sent["tracestate"]) == (parent, "a=b")
