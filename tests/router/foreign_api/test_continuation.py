"""Streams of foreign servers that return ids: after any failure the client's stream equals an unbroken one,
or ends with the reason.
"""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.foreign_api.continuation import Continuable, InexactContinuation
from router.foreign_api.event_stream import EventStream
from tests.router.foreign_servers import ForeignServer, in_front_of, serving, streaming
from tests.router.router_fixture import House, OpenHouse
from tests.router.vllm_like import PROMPT, TOKENIZER, Asked, VllmLike, settled, summary, unbroken

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EXACT = {"model": "demo", "stream": True, "temperature": 0, "max_tokens": 40}


def request_of(path: str, **more: Any) -> bytes:
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    )
    return json.dumps({**prompt, **EXACT, **more}).encode()


def continued(
    path: str, body: bytes, deaths: list[int], sizes: list[int], cuts: int, *, detokenizes: bool
) -> bytes:
    """Return the stream of a client whose servers die one after another, after these numbers of events.
    InexactContinuation as raised.
    """
    continuable = Continuable(path, body, 4096)
    got, ask, at = b"", continuable.body(), path
    for death in [*deaths, 10_000]:
        stream = EventStream(1 << 20)
        events = list(Asked(at, ask).events(sizes))
        came = b"".join(events[:death])
        if death < len(events):
            came += events[death][: len(events[death]) // 2]  # half an event is lost with its server
        for start in range(0, len(came), cuts):
            got += continuable.take(stream.feed(came[start : start + cuts]))
        if death >= len(events):
            return got
        if not continuable.begun:
            continuable, got, ask, at = Continuable(path, body, 4096), b"", continuable.body(), path
            continue
        if continuable.why_not() is not None:
            raise InexactContinuation(continuable.why_not())
        if detokenizes:
            before = TOKENIZER.decode(continuable.context_of(0))
            any(
                continuable.fits(ids, before, TOKENIZER.decode(continuable.context_of(ids)))
                for ids in continuable.positions()
            )
        rest = continuable.request()
        if rest is None:
            return got + continuable.ending()
        ask, at = rest, TEXT
    raise AssertionError("not reached")


STOPS = [None, "quack", ["and plain", "Turm"], "façade", ["ä", "🐣 b"]]


@settings(max_examples=100, deadline=None)
@given(
    path=st.sampled_from([CHAT, TEXT]),
    deaths=st.lists(st.integers(0, 30), max_size=4),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    cuts=st.integers(1, 400),
    stop=st.sampled_from(STOPS),
    asks_ids=st.sampled_from([None, True]),
    usage=st.booleans(),
    detokenizes=st.booleans(),
    count=st.integers(1, 70),
)
def test_a_greedy_stream_equals_an_unbroken_one_wherever_its_servers_die(
    path: str,
    deaths: list[int],
    sizes: list[int],
    cuts: int,
    stop: Any,
    asks_ids: bool | None,
    usage: bool,
    detokenizes: bool,
    count: int,
) -> None:
    more: dict[str, Any] = {
        "max_tokens": count,
        "stop": stop,
        "stream_options": {"include_usage": True} if usage else None,
    }
    body = request_of(path, **more, **({} if asks_ids is None else {"return_token_ids": asks_ids}))
    whole = summary(b"".join(Asked(path, body).events()))
    assert summary(continued(path, body, deaths, sizes, cuts, detokenizes=detokenizes)) == whole


@settings(max_examples=50, deadline=None)
@given(
    death=st.integers(0, 45),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    stop=st.sampled_from(STOPS),
    detokenizes=st.booleans(),
)
def test_a_sampled_stream_is_continued_only_where_the_clients_text_is_that_of_whole_tokens(
    death: int, sizes: list[int], stop: Any, detokenizes: bool
) -> None:
    body = request_of(CHAT, temperature=0.7, stop=stop)
    continuable = Continuable(CHAT, body, 4096)
    events = list(Asked(CHAT, continuable.body()).events(sizes))[:death]
    for event in events:
        continuable.take(event)
    if not continuable.begun or continuable.finished:
        return
    if detokenizes:
        before = TOKENIZER.decode(continuable.context_of(0))
        any(
            continuable.fits(ids, before, TOKENIZER.decode(continuable.context_of(ids)))
            for ids in continuable.positions()
        )
    try:
        rest = continuable.request()
    except InexactContinuation:
        # Otherwise the ids of the client's text can always be found.
        assert stop is not None or not detokenizes
        return
    if rest is not None:
        emitted = json.loads(rest)["prompt"][len(PROMPT) :]
        assert TOKENIZER.decode(emitted) == continuable.text


def test_what_the_client_did_not_ask_for_is_put_back_to_null_byte_for_byte() -> None:
    for path in (CHAT, TEXT):
        plain = request_of(path, stream_options={"include_usage": True})
        continuable = Continuable(path, plain, 4096)
        assert continuable.body() != plain
        assert json.loads(continuable.body()) == {**json.loads(plain), "return_token_ids": True}
        assert b"".join(map(continuable.take, Asked(path, continuable.body()).events())) == b"".join(
            Asked(path, plain).events()
        )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "n "),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"never_heard_of": 1}, "never_heard_of"),
        ({"seed": 1, "temperature": 0.5}, "seed"),
        ({"seed": 1, "temperature": None}, "seed"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "more than text",
        ),
        ({"max_tokens": "24"}, "unusual"),
    ],
    ids=str,
)
def test_what_would_not_be_exact_has_a_reason_and_its_body_stays_as_it_came(
    fields: dict[str, Any], why: str
) -> None:
    body = request_of(CHAT, **fields)
    continuable = Continuable(CHAT, body, 4096)
    assert why in (continuable.why_not() or "")
    assert continuable.body() == body


@pytest.mark.parametrize(
    "fields",
    [
        {
            "n": 1,
            "presence_penalty": 0.0,
            "frequency_penalty": 0,
            "logprobs": False,
            "tools": None,
            "response_format": {"type": "text"},
        },
        {
            "seed": 5,
            "top_p": 0.5,
            "top_k": 3,
            "stop_token_ids": [3],
            "ignore_eos": True,
            "user": "u",
            "metadata": {"a": "b"},
        },
        {"temperature": 0.8},
        {"temperature": None},
    ],
    ids=str,
)
def test_what_changes_nothing_keeps_no_stream_from_being_continued(fields: dict[str, Any]) -> None:
    assert Continuable(CHAT, request_of(CHAT, **fields), 4096).obstacle is None


def test_reasoning_and_tool_calls_in_an_answer_keep_it_from_being_continued() -> None:
    for delta in ({"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}, {"reasoning_content": "hm"}):
        continuable = Continuable(CHAT, request_of(CHAT), 4096)
        continuable.take(
            b'data: {"choices":[{"index":0,"delta":'
            + json.dumps(delta).encode()
            + b',"token_ids":[1]}],"prompt_token_ids":[1]}\n\n'
        )
        assert next(iter(delta)) in (continuable.why_not() or "")


# Through the router


async def asked(house: House, path: str, **more: Any) -> dict[str, Any]:
    return summary((await house.post(path, request_of(path, **more))).body)


async def test_streams_of_a_server_that_dies_are_finished_by_another_one(open_house: OpenHouse) -> None:
    """Either of two servers dies after any event, for chat and text, with stops and usage."""
    dying, living = VllmLike((1, 2, 3)), VllmLike((2, 1))
    async with (
        serving(ForeignServer("one", dying.answer, owned_by="vllm")) as one,
        serving(ForeignServer("two", living.answer, owned_by="vllm")) as two,
    ):
        house = await in_front_of(
            open_house,
            one,
            two,
            policy="round_robin",
            breaker_failures=1000,
            min_retries=1000,
            dead_after_seconds=60.0,
        )
        for path in (CHAT, TEXT):
            for stop in (None, "and plain"):
                more = {"stop": stop, "stream_options": {"include_usage": True}}
                whole = summary(b"".join(Asked(path, request_of(path, **more)).events()))
                for death in range(0, 12, 2):
                    dying.die_after = death
                    found = await asyncio.gather(*(asked(house, path, **more) for _ in range(4)))
                    assert found == [whole] * 4
        assert any(isinstance(body.get("prompt"), list) for body in living.bodies)
        assert house.service.scheduler.reservations.open_bookings == 0


async def test_a_continuation_is_another_attempt_of_the_same_decision_and_its_usage_is_summed(
    open_house: OpenHouse,
) -> None:
    dying, living = VllmLike(), VllmLike()
    dying.die_after = 9
    async with (
        serving(ForeignServer("one", dying.answer, owned_by="vllm")) as one,
        serving(ForeignServer("two", living.answer, owned_by="vllm")) as two,
    ):
        house = await in_front_of(open_house, one, two, policy="round_robin")
        while not dying.bodies:
            answer = await asked(house, CHAT, stream_options={"include_usage": True})
        assert answer["usage"] == {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": 40,
            "total_tokens": len(PROMPT) + 40,
        }
        last = living.bodies[-1]
        emitted = last["prompt"][len(PROMPT) :]
        assert emitted == unbroken(PROMPT, len(emitted))
        assert last["max_tokens"] == 40 - len(emitted)
        assert settled(emitted) == TOKENIZER.decode(emitted)


async def test_a_stream_that_cannot_be_continued_says_why(open_house: OpenHouse) -> None:
    dying = VllmLike()
    dying.die_after = 6
    async with (
        serving(ForeignServer("one", dying.answer, owned_by="vllm")) as one,
        serving(ForeignServer("two", dying.answer, owned_by="vllm")) as two,
    ):
        house = await in_front_of(open_house, one, two, policy="round_robin", breaker_failures=1000)
        for more, why in (
            ({"seed": 3, "temperature": 0.5}, "random numbers"),
            ({"tools": [{"type": "function"}]}, "tools"),
            ({"min_tokens": 2}, "min_tokens"),
        ):
            answer = await asked(house, CHAT, **more)
            assert why in answer["error"]["message"]
            assert answer["done"]


async def test_when_no_server_is_left_to_continue_the_stream_ends_with_an_error(
    open_house: OpenHouse,
) -> None:
    dying = VllmLike()
    dying.die_after = 6
    async with serving(ForeignServer("one", dying.answer, owned_by="vllm")) as one:
        house = await in_front_of(
            open_house,
            one,
            max_attempts=2,
            queue_wait_seconds=0.2,
            no_engine_wait_seconds=0.01,
            min_retries=1000,
        )
        dying.sizes = (1,)
        answer = await asked(house, CHAT, max_tokens=400)
        assert answer["error"]["code"] == "upstream_failed" or answer["finish"] == "length"
        assert answer["text"] == settled(unbroken(PROMPT, 400))[: len(answer["text"])]


async def test_a_server_that_computes_another_text_does_not_continue_the_stream(
    open_house: OpenHouse,
) -> None:
    """The first server merges ids, and no server can turn ids into text. So the rest is computed again, and
    differs.
    """
    dying = VllmLike((3,), detokenizes=False)
    dying.die_after = 6
    strange = (
        b"data:"
        b' {"id":"y","choices":[{"index":0,"text":"strange","finish_reason":null,"token_ids":[1,2]}]}\n\n'
    )
    async with (
        serving(ForeignServer("one", dying.answer, owned_by="vllm")) as one,
        serving(ForeignServer("two", streaming(strange, b"data: [DONE]\n\n"), owned_by="vllm")) as two,
    ):
        house = await in_front_of(open_house, one, two, policy="round_robin", breaker_failures=1000)
        answers = [await asked(house, TEXT) for _ in range(6)]
        broken = [answer for answer in answers if answer["error"] is not None and answer["text"]]
        assert broken
        assert all("computes text that differs" in answer["error"]["message"] for answer in broken)
        assert all("strange" not in answer["text"] for answer in broken)


async def test_ids_are_requested_only_from_servers_known_to_return_them(open_house: OpenHouse) -> None:
    plain = VllmLike()
    async with serving(ForeignServer("one", plain.answer, owned_by="someone")) as one:
        house = await in_front_of(open_house, one)
        await asked(house, CHAT)
        assert "return_token_ids" not in plain.bodies[0]


async def test_an_error_event_does_not_end_a_stream_that_another_server_can_continue(
    open_house: OpenHouse,
) -> None:
    living = VllmLike()
    events = list(Asked(CHAT, request_of(CHAT, return_token_ids=True)).events())[:6]
    failing = streaming(
        *events,
        b'data: {"error":{"message":"EngineDead","type":"InternalServerError","code":500}}\n\n',
        b"data: [DONE]\n\n",
    )
    async with (
        serving(ForeignServer("one", failing, owned_by="vllm")) as one,
        serving(ForeignServer("two", living.answer, owned_by="vllm")) as two,
    ):
        house = await in_front_of(open_house, one, two, policy="round_robin", breaker_failures=1000)
        whole = summary(b"".join(Asked(CHAT, request_of(CHAT)).events()))
        assert [await asked(house, CHAT) for _ in range(6)] == [whole] * 6
        assert one.requests
