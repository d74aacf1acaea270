"""Fields that change an answer: refused by name by engines that do not serve them, forwarded unchanged to
engines that declare them.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from engine_adapter.serving.checkpoint_tokenizer import CheckpointTokenizer
from fleet.completions import ApiError, Logprobs
from fleet.facts.engines import Capabilities
from router.openai_api.request_schema import RequestDecoder, sampling
from router.openai_api.response_format import ChatLogprobs, token_bytes
from tests.router.router_fixture import House, MockRank, Serve, chat

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PASSING = Capabilities(kv_events=False, passes_fields=True)
REFUSED: dict[str, Any] = {
    "structured_outputs": {"choice": ["red", "green"]},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": "root",
    "json_schema": "{}",
    "regex": "a+",
    "ebnf": "root",
    "repetition_penalty": 1.2,
    "min_p": 0.1,
    "min_tokens": 4,
    "stop_token_ids": [2],
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 5,
    "use_beam_search": True,
    "logit_bias": {"5": 1},
    "frequency_penalty": 0.5,
    "vllm_xargs": {"a": 1},
    "response_format": {"type": "json_object"},
}
OF_CHATS: dict[str, Any] = {
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "reasoning_effort": "high",
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy"},
    "documents": [{"text": "x"}],
    "chat_template": "{{ messages }}",
    "continue_final_message": True,
    "add_generation_prompt": False,
    "return_token_ids": True,
    "web_search_options": {},
}
NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0,
    "min_p": 0.0,
    "min_tokens": 0,
    "stop_token_ids": [],
    "skip_special_tokens": True,
    "guided_json": None,
    "response_format": {"type": "text"},
    "logit_bias": {},
    "tools": [],
    "tool_choice": "auto",
    "modalities": ["text"],
    "add_generation_prompt": True,
    "continue_final_message": False,
    "echo": False,
}
HARMLESS: dict[str, Any] = {
    "metadata": {"a": "1"},
    "store": True,
    "service_tier": "auto",
    "user": "u",
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "data_parallel_rank": 1,
    "something_of_a_gateway": [1, {"x": None}],
}


def refusal(body: Mapping[str, Any], **engine: bool) -> ApiError | None:
    try:
        sampling(RequestDecoder().either(json.dumps(body).encode()), 128, **engine)
    except ApiError as error:
        return error
    return None


def text(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "a", **more}


@pytest.mark.parametrize("field", REFUSED | OF_CHATS)
def test_a_field_of_a_chat_that_changes_the_answer_is_refused_by_name(field: str) -> None:
    error = refusal(chat(**{field: (REFUSED | OF_CHATS)[field]}))
    assert error is not None
    assert (error.status, error.param, error.code) == (400, field, "unsupported_parameter")
    assert field in error.message


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_of_a_completion_that_changes_the_answer_is_refused_by_name(field: str) -> None:
    error = refusal(text(**{field: REFUSED[field]}))
    assert error is not None
    assert (error.param, error.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize("field", NEUTRAL | HARMLESS)
def test_a_value_that_asks_for_nothing_and_a_field_that_changes_nothing_are_served(field: str) -> None:
    assert refusal(chat(**{field: (NEUTRAL | HARMLESS)[field]})) is None


@pytest.mark.parametrize(
    "name", ["bos_token", "eos_token", "tools", "messages", "add_generation_prompt", "continue_final_message"]
)
def test_a_chat_template_is_given_no_special_tokens_and_no_tools_by_clients(name: str) -> None:
    error = refusal(chat(chat_template_kwargs={"enable_thinking": False, name: "x"}))
    assert error is not None
    assert (error.param, error.code) == (f"chat_template_kwargs.{name}", "unsupported_parameter")
    assert refusal(chat(chat_template_kwargs={"enable_thinking": False})) is None


async def test_an_engine_that_declares_it_is_given_unserved_and_unknown_fields_as_they_came(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("vllm", [rank.url], byte_archive, capabilities=PASSING)
    fields = (
        b'"structured_outputs": {"choice":["red",  "green"]}, "repetition_penalty": 1.50, "vendor": {"deep":'
        b' [1e2]}, "min_p": null'
    )
    body = (
        json.dumps(chat(metadata={"a": "1"})).encode()[:-1]
        + b", "
        + fields
        + b', "emitted": 7, "prompt": "smuggled"}'
    )
    assert (await house.post(CHAT, body)).status == 200
    assert b'"structured_outputs":{"choice":["red",  "green"]}' in rank.bodies[0]
    assert b'"repetition_penalty":1.50' in rank.bodies[0]
    sent = json.loads(rank.bodies[0])
    assert sent["vendor"] == {"deep": [100.0]}
    assert not {"min_p", "messages", "emitted"} & sent.keys()
    assert isinstance(sent["prompt"], list)


async def test_what_belongs_to_the_chat_template_is_refused_for_these_engines_too(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("vllm", [rank.url], byte_archive, capabilities=PASSING)
    answer = await house.post(CHAT, chat(tools=[{"type": "function"}]))
    assert (answer.status, answer.json["error"]["param"]) == (400, "tools")


async def test_a_request_with_such_a_field_goes_to_engines_that_serve_it_alone(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    ours, theirs = await serve_rank(MockRank(byte_archive)), await serve_rank(MockRank(byte_archive))
    await house.join("ours", [ours.url], byte_archive)
    await house.join("vllm", [theirs.url], byte_archive, capabilities=PASSING)
    for number in range(6):
        assert (await house.post(CHAT, chat(f"q{number}", min_p=0.1))).status == 200
    assert (len(ours.requests), len(theirs.requests)) == (0, 6)
    explained = (await house.post("/v1/route", chat(min_p=0.1))).json
    assert [(out["engine"], "fields" in out["reason"]) for out in explained["excluded"]] == [("ours", True)]
    assert (await house.post("/v1/route", chat(metadata={"a": "1"}))).json["excluded"] == []
    theirs.answer_status = 500
    assert (await house.post(CHAT, chat(metadata={"a": "1"}))).status == 200
    assert [b"metadata" in body for body in (ours.bodies[-1], theirs.bodies[-1])] == [False, True]


async def test_a_stream_with_such_a_field_is_not_continued_by_another_rank(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    for name in ("one", "two"):
        rank = await serve_rank(MockRank(byte_archive))
        rank.die_after = 3
        await house.join(name, [rank.url], byte_archive, capabilities=PASSING)
    answer = await house.post(CHAT, chat(stream=True, guided_regex="a+"))
    error = answer.events[-1]["error"]
    assert error["code"] == "upstream_failed"
    assert "guided_regex cannot be continued exactly" in error["message"]


async def test_up_to_a_hundred_and_twenty_eight_choices_are_served(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("alone", [rank.url], byte_archive)
    answer = await house.post(CHAT, chat(n=128, max_tokens=1))
    assert (answer.status, len(answer.json["choices"])) == (200, 128)
    assert (await house.post(CHAT, chat(n=129))).json["error"]["param"] == "n"


async def test_a_request_that_does_not_fit_is_refused_in_the_words_that_clients_look_for(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("alone", [rank.url], byte_archive, max_context=100)
    for path, body in (
        (CHAT, chat("x" * 200)),
        (CHAT, chat(max_tokens=99)),
        (TEXT, text(max_tokens=100)),
        (TEXT, text(prompt="x" * 200)),
    ):
        error = (await house.post(path, body)).json["error"]
        assert error["message"].startswith("This model's maximum context length is 100 tokens. However, ")
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("raw", [b"\xe2", b"\xe2\x82", b"\xff\xfe\x00", "é".encode(), b"bytes:", b"bytes:x"])
def test_log_probabilities_name_a_tokens_own_bytes(raw: bytes) -> None:
    class OneToken(CheckpointTokenizer):
        def __init__(self) -> None:
            self._bytes, self._special = [raw], set()

    name = OneToken().piece(0)
    assert bytes(token_bytes(name)) == raw
    given = Logprobs(tokens=[name], token_logprobs=[-0.5], top_logprobs=[{name: -0.5}], text_offset=[0])
    found = ChatLogprobs.of(given)
    assert found is not None
    assert bytes(found.content[0].bytes) == bytes(found.content[0].top_logprobs[0].bytes) == raw
