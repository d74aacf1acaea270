"""Tokenizers and templates, request formats, server-sent events, and keys: the small pure parts of the HTTP
layer.
"""

import io
import json
import zipfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from fleet.completions import ApiError, Choice, Completion, Usage
from router.http.server_sent_events import EventSplitter
from router.openai_api.completion_state import CompletionState
from router.openai_api.request_schema import RequestDecoder, sampling
from router.openai_api.response_format import (
    ChatFormat,
    ResponseHead,
    StreamedResponse,
    TextFormat,
    answer_for,
)
from router.tokenization.tokenizer import LARGEST_FILE, BadTokenizer, ModelTokenizer
from router.upstream.rank_client import api_error
from tests.router.router_fixture import TEMPLATE, archive, bpe, chat

HELLO = [{"role": "user", "content": "hi"}]


def tokenizer(template: Any = TEMPLATE, **settings: Any) -> ModelTokenizer:
    return ModelTokenizer.from_archive(
        archive(bpe(300), {"eos_token": "<eos>", "chat_template": template, **settings})
    )


def test_a_conversation_is_rendered_and_encoded_without_further_special_tokens() -> None:
    model = tokenizer()
    assert model.render(HELLO) == "user: hi\nassistant: "
    assert model.decode(model.encode_rendered(model.render(HELLO))) == "user: hi\nassistant: "


def test_special_tokens_written_by_the_template_become_single_ids() -> None:
    model = tokenizer(
        "{{ eos_token }}{{ messages[0]['content'] }}", eos_token={"content": "<eos>", "lstrip": False}
    )
    ids = model.encode_rendered(model.render(HELLO))
    assert ids[0] == 0
    assert model.decode(ids) == "hi"


@pytest.mark.parametrize(
    ("settings", "post_processor", "expected"),
    [
        ({"add_bos_token": True, "bos_token": "<eos>"}, False, True),
        ({"add_bos_token": True, "bos_token": "<eos>"}, True, True),
        ({"bos_token": "<eos>"}, True, True),
        ({"bos_token": "<eos>"}, False, False),
        ({"add_bos_token": False, "bos_token": "<eos>"}, True, False),
    ],
)
def test_a_bare_prompt_begins_with_the_bos_token_once_where_the_model_wants_it(
    settings: dict[str, Any], post_processor: bool, expected: bool
) -> None:
    own = bpe(300)
    if post_processor:
        own.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    model = ModelTokenizer.from_archive(archive(own, settings))
    assert [at for at, token in enumerate(model.encode_prompt("hi")) if token == 0] == (
        [0] if expected else []
    )


def test_templates_may_use_what_transformers_gives_them() -> None:
    written = (
        "{% generation %}{{ messages | length }}{% endgeneration %}{% for message in messages %}{% if"
        " loop.index > 1 %}{% break %}{% endif %}{% endfor %} {{ {'a': 'é'} | tojson }} {{ strftime_now('%Y')"
        " | length }} {{ tools is none }} {{ flag }}"
    )
    assert tokenizer(written).render(HELLO, {"flag": "on"}) == '1 {"a": "é"} 4 True on'


def test_the_default_of_several_named_templates_is_taken() -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert tokenizer(named).render(HELLO) == "D"


def test_a_template_in_a_file_of_its_own_is_found() -> None:
    packed = io.BytesIO(archive(bpe(300), {}))
    with zipfile.ZipFile(packed, "a") as files:
        files.writestr("chat_template.jinja", "apart")
    assert ModelTokenizer.from_archive(packed.getvalue()).render(HELLO) == "apart"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7]['content'] }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 // 0 }}",
        "{{ messages[0]['content'] + 1 }}",
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_a_400(template: str) -> None:
    with pytest.raises(ApiError) as refused:
        tokenizer(template).render(HELLO)
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "zip"),
        (b"PK\x03\x04garbage", "zip"),
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{}"}, "cannot be read"),
        ({"tokenizer.json": bpe(257).to_str(), "tokenizer_config.json": "[]"}, "cannot be read"),
        (
            {"tokenizer.json": bpe(257).to_str(), "tokenizer_config.json": '{"chat_template": "{% if %}"}'},
            "cannot be compiled",
        ),
    ],
)
def test_an_archive_without_a_usable_tokenizer_says_what_is_wrong(content: Any, complaint: str) -> None:
    if isinstance(content, dict):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as files:
            for name, text in content.items():
                files.writestr(name, text)
        content = packed.getvalue()
    with pytest.raises(BadTokenizer, match=complaint):
        ModelTokenizer.from_archive(content)


def test_a_file_that_unpacks_to_too_much_is_not_unpacked() -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as files:
        files.writestr("tokenizer.json", b"0" * (LARGEST_FILE + 1))
    with pytest.raises(BadTokenizer, match="at most"):
        ModelTokenizer.from_archive(packed.getvalue())


# Requests


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_make_the_decoder_fall_over(body: bytes) -> None:
    for decode in (RequestDecoder().chat, RequestDecoder().text, RequestDecoder().either):
        with pytest.raises(ApiError) as refused:
            decode(body)
        assert refused.value.status == 400


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_value_in_any_field_is_served_or_refused_by_name(value: Any) -> None:
    for field in (
        "messages",
        "max_tokens",
        "temperature",
        "stop",
        "n",
        "seed",
        "stream_options",
        "logit_bias",
        "response_format",
        "chat_template_kwargs",
    ):
        error = refusal(json.dumps(chat(**{field: value})).encode())
        assert error is None or (
            error.status == 400 and (error.param is None or error.param.startswith(field))
        )


def refusal(body: bytes) -> ApiError | None:
    try:
        sampling(RequestDecoder().chat(body), 16)
    except ApiError as error:
        return error
    return None


def test_fields_that_are_not_read_do_no_harm() -> None:
    request = RequestDecoder().chat(
        json.dumps(chat(metadata={"a": 1}, store=True, parallel_tool_calls=False)).encode()
    )
    assert sampling(request, 4).max_tokens == 12


# Events


@settings(deadline=None)
@given(
    st.lists(st.text(alphabet="abc{}\"', é"), max_size=8),
    st.lists(st.integers(1, 7), min_size=1),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_are_the_same_however_the_bytes_are_cut(texts: list[str], cuts: list[int], end: str) -> None:
    payloads = [text.strip().encode() for text in texts]
    stream = b"".join(b"data: " + payload + (end * 2).encode() for payload in payloads)
    splitter, found, at, turn = EventSplitter(10_000), [], 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        found += splitter.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    assert found == payloads


def test_comments_other_fields_and_several_data_lines_are_understood() -> None:
    assert EventSplitter(100).feed(b": ping\n\nevent: x\ndata: one\ndata: two\n\nid: 3\n\n") == [b"one\ntwo"]


def test_an_endless_event_is_an_error() -> None:
    splitter = EventSplitter(100)
    assert splitter.feed(b"data: " + b"x" * 90) == []
    with pytest.raises(ValueError, match="exceeds 100 bytes"):
        splitter.feed(b"x" * 90)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"m","code":5}}', "m"),
        (b'{"error":"plain"}', "plain"),
        (b'{"detail":"d"}', "d"),
        (b"oops", "oops"),
        (b"", "HTTP 418"),
    ],
)
def test_foreign_errors_are_read_as_far_as_possible(body: bytes, message: str) -> None:
    assert api_error(418, body).message == message


# Completion state


def state(max_tokens: int = 10) -> CompletionState:
    return CompletionState(
        0, [1, 2, 3], sampling(RequestDecoder().chat(json.dumps(chat()).encode()), 1), max_tokens, 5, "demo"
    )


def chunk(ids: list[int] | None, text: str, finish: str | None = None) -> Completion:
    return Completion(
        id="x", model="m", created=0, choices=[Choice(text=text, token_ids=ids, finish_reason=finish)]
    )


def test_a_course_asks_for_what_is_missing() -> None:
    one = state()
    one.take(chunk([7, 8], "ab"))
    one.take(chunk([9], ""))
    request = one.request()
    assert (request.prompt, request.emitted, request.max_tokens, request.seed) == (
        [1, 2, 3, 7, 8, 9],
        3,
        7,
        5,
    )


def test_a_completion_refuses_more_than_requested_and_text_without_ids() -> None:
    with pytest.raises(ValueError, match="3 tokens came, 2 were requested"):
        state(2).take(chunk([1, 2, 3], "x"))
    with pytest.raises(ValueError, match="without token ids"):
        state().take(chunk(None, "x"))
    with pytest.raises(ValueError, match="not a number of 32 bits"):
        state().take(chunk([2**32], "x"))


def test_nothing_is_taken_after_the_finish_reason() -> None:
    one = state()
    assert one.take(chunk([1], "a", "stop")) is not None
    assert one.take(chunk([2], "b")) is None
    assert list(one.emitted) == [1]


def test_an_exhausted_course_gives_out_what_was_held_back() -> None:
    one = state(2)
    one.take(chunk([1], "he"))
    one.take(chunk([2], ""))
    assert one.exhausted
    assert one.finish_with("hey").text == "y"
    assert one.finish_reason == "length"


def test_chat_deltas_have_one_role_and_no_empty_chunks() -> None:
    request = RequestDecoder().chat(json.dumps(chat(stream=True)).encode())
    answer = answer_for(request, ResponseHead(id="i", model="m", created=1), 1)
    chunks = [answer.add(0, Choice(text=text)) for text in ("", "", "a", "")] + [
        answer.add(0, Choice(finish_reason="stop"))
    ]
    assert [event.count(b"data: ") for event in chunks] == [1, 0, 1, 0, 1]
    assert b"usage" not in b"".join(chunks)
    assert answer.end(Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)) == b"data: [DONE]\n\n"


@given(
    text=st.text(max_size=20), model=st.text(max_size=20), usage=st.booleans(), kind=st.sampled_from("ctT")
)
def test_tokens_alone_are_written_as_any_other_output(text: str, model: str, usage: bool, kind: str) -> None:
    form = ChatFormat() if kind == "c" else TextFormat(token_ids=kind == "T")
    head = ResponseHead(id="the text", model=model, created=7)
    one, two = (StreamedResponse(form, head, usage) for _ in range(2))
    for index, said in ((0, "first"), (2, "x"), (0, text), (2, text), (0, ""), (0, text)):
        choice = Choice(index=index, text=said, token_ids=[1, 2])
        assert one.add_tokens(index, [1, 2], said) == two.add(index, choice)
