"""Ids that Roost requests beside a client's own fields: how they are asked for, and that only they leave the
answer again."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.foreign_api.continuation import Continuable
from router.foreign_api.prompt_fields import ChatPrompt, PlainPrompt, read_prompt
from router.foreign_api.returned_ids import IdsFilter, asking, prompt_of, without_ids

CHAT = "/v1/chat/completions"
TRICKY = st.sampled_from(
    [
        '"token_ids":[1,2]',
        '\\"token_ids\\":[1]',
        '"prompt_token_ids": [',
        "token_ids",
        '"',
        "\\",
        '":[1]',
        "é🐣",
    ]
)
TEXTS = st.lists(TRICKY | st.text(max_size=8), max_size=5).map("".join)
IDS = st.none() | st.lists(st.integers(0, 2**31), max_size=6)


def answer_of(texts: list[str], ids: list[int] | None, prompt: list[int] | None, spaces: bool) -> bytes:
    """A chat's whole answer with texts wherever texts may be."""
    choices = [
        {
            "index": at,
            "message": {"role": "assistant", "content": text},
            "stop_reason": text,
            "token_ids": ids,
        }
        for at, text in enumerate(texts)
    ]
    whole = {"id": "x", "choices": choices, "prompt_token_ids": prompt, "prompt_text": "".join(texts)}
    separators = (", ", ": ") if spaces else (",", ":")
    return json.dumps(whole, separators=separators, ensure_ascii=False).encode("utf-8", "surrogatepass")


@given(st.lists(TEXTS, max_size=3), IDS, IDS, st.booleans())
def test_only_ids_become_null(
    texts: list[str], ids: list[int] | None, prompt: list[int] | None, spaces: bool
) -> None:
    with_ids, plain = answer_of(texts, ids, prompt, spaces), answer_of(texts, None, None, spaces)
    assert json.loads(without_ids(with_ids)) == json.loads(plain)
    if not spaces:
        assert without_ids(with_ids) == plain


@settings(max_examples=300)
@given(st.lists(TEXTS, max_size=3), IDS, IDS, st.booleans(), st.lists(st.integers(1, 9), min_size=1))
def test_an_answer_that_arrives_in_pieces_is_stripped_alike(
    texts: list[str], ids: list[int] | None, prompt: list[int] | None, spaces: bool, cuts: list[int]
) -> None:
    whole, filtered, passed, at, turn = answer_of(texts, ids, prompt, spaces), IdsFilter(), b"", 0, 0
    while at < len(whole):
        passed += filtered.feed(whole[at : at + cuts[turn % len(cuts)]])
        at, turn = at + cuts[turn % len(cuts)], turn + 1
    assert passed + filtered.rest == without_ids(whole)


@given(st.dictionaries(st.text(max_size=9), st.none() | st.text() | st.integers(), min_size=1), st.booleans())
def test_asking_adds_one_field_and_changes_no_other_byte(fields: dict[str, Any], space: bool) -> None:
    fields.pop("return_token_ids", None)
    body = (b" \n" if space else b"") + json.dumps({"model": "m", **fields}).encode()
    asked = asking(body)
    assert json.loads(asked) == {"return_token_ids": True, "model": "m", **fields}
    assert asked.replace(b'"return_token_ids":true,', b"", 1) == body


def test_the_prompts_ids_are_found_in_both_forms_of_answers() -> None:
    assert prompt_of(b'{"choices":[{"token_ids":[7]}],"prompt_token_ids":[1,2]}') == [1, 2]
    assert prompt_of(b'{"choices":[{"token_ids":[7],"prompt_token_ids":[3]}]}') == [3]
    assert prompt_of(b'{"choices":[{"text":"x"}]}') is prompt_of(b"no json") is None


def chunk(**choice: Any) -> bytes:
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices = [{"index": 0, "logprobs": None, "finish_reason": None, **choice}]
    return b"data: " + json.dumps({**head, "choices": choices}, separators=(",", ":")).encode() + b"\n\n"


def test_steps_that_are_sent_only_because_ids_were_requested_do_not_reach_the_client() -> None:
    """vLLM leaves out a step whose text its tool parser holds back, unless ids are requested."""
    body = json.dumps(
        {"model": "m", "messages": [], "stream": True, "tools": [{"type": "function"}]}
    ).encode()
    continuable = Continuable(CHAT, body, 4096, asks=True)
    assert json.loads(continuable.body())["return_token_ids"] is True
    tool = {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}
    role = {"role": "assistant", "content": ""}
    came = [
        (chunk(delta=role), True),
        (chunk(delta={}, token_ids=[5]), False),
        (chunk(delta={}, token_ids=[6]), False),
        (chunk(delta=tool, token_ids=[7]), True),
        (chunk(delta={}, token_ids=[8], logprobs={"content": []}), True),
        (chunk(delta={}, token_ids=[9], finish_reason="tool_calls"), True),
    ]
    for event, passes in came:
        assert continuable.take(event) == (without_ids(event) if passes else b"")
    assert continuable.other_ids == 5


def test_a_client_that_requested_ids_itself_gets_every_step() -> None:
    body = json.dumps({"model": "m", "messages": [], "stream": True, "return_token_ids": True}).encode()
    continuable = Continuable(CHAT, body, 4096, asks=True)
    assert continuable.body() == body
    event = chunk(delta={}, token_ids=[5])
    assert continuable.take(event) == event


# What a body says of its prompt


def chat_of(**fields: Any) -> ChatPrompt | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
    found = read_prompt(json.dumps(body).encode(), chat=True)
    assert found is None or isinstance(found.prompt, ChatPrompt)
    return None if found is None else found.prompt  # type: ignore[return-value]


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ messages }}"},
        {"truncate_prompt_tokens": 5},
        {"add_special_tokens": True},
        {"add_generation_prompt": True, "continue_final_message": True},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": 5, "content": "x"}]},
        {"messages": "x"},
    ],
    ids=str,
)
def test_prompts_that_the_server_may_make_otherwise_are_not_known(fields: dict[str, Any]) -> None:
    assert chat_of(**fields) is None


def test_tool_calls_reach_the_template_with_arguments_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    odd = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "no json"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call, odd], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}, "b"]},
    ]
    found = chat_of(
        messages=messages, tools=[{"type": "function", "function": {"strict": None, "name": "f"}}]
    )
    assert found is not None
    first, second = found.messages(in_parts=True)
    assert [one["function"]["arguments"] for one in first["tool_calls"]] == [{"a": [1]}, {}]
    assert (first["content"], first["reasoning_content"]) == ([], "hm")
    assert second == {"role": "tool", "tool_call_id": "1", "content": "a\nb"}
    assert found.variables["tools"] == [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
    ]


def test_a_continued_message_ends_the_prompt_where_the_message_ends() -> None:
    found = chat_of(
        messages=[{"role": "user", "content": "hi "}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert found is not None
    assert found.cut("<user>hi <end>") == "<user>hi "
    assert found.cut("<user>hi<end>") == "<user>hi"
    assert found.cut("<user>ho<end>") is None


@given(
    st.binary(max_size=80)
    | st.dictionaries(st.text(max_size=9), st.integers()).map(json.dumps).map(str.encode)
)
def test_reading_the_prompt_of_any_body_never_fails(body: bytes) -> None:
    for chat in (True, False):
        read_prompt(body, chat=chat)


@pytest.mark.parametrize(
    ("fields", "asks"), [({}, True), ({"echo": True}, False), ({"return_token_ids": False}, False)], ids=str
)
def test_ids_are_not_requested_where_that_would_change_the_answer(fields: dict[str, Any], asks: bool) -> None:
    found = read_prompt(json.dumps({"prompt": "x", **fields}).encode(), chat=False)
    assert found is not None
    assert found.prompt == PlainPrompt("x", special=True)
    assert found.asks is asks
