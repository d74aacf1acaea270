"""Requests are read leniently, forwarded whole, and continued with the tokens that exist."""

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dynamo.wire.malformed import Malformed
from router.dynamo.wire.requests import (
    AnswerPiece,
    error_item,
    length_item,
    read_piece,
    read_request,
    take_joined,
    worker_request,
)

BODY: dict[str, Any] = {
    "model": "tiny",
    "token_ids": [5, 6, 7],
    "stop_conditions": {"max_tokens": 10, "min_tokens": 4, "stop": None, "stop_token_ids_hidden": [0]},
    "sampling_options": {"temperature": 0.0, "n": None, "guided_decoding": None, "presence_penalty": None},
    "output_options": {"logprobs": None},
    "eos_token_ids": [0],
    "mdc_sum": "abc",
    "annotations": [],
    "routing": {"cache_salt": "tenant-1", "expected_output_tokens": 12},
    "extra_args": {"nvext": {"extra_fields": ["timing"]}, "priority": 3},
}


def test_a_request_is_read() -> None:
    request = read_request(BODY)
    assert (request.model, request.token_ids, request.max_tokens, request.min_tokens) == (
        "tiny",
        [5, 6, 7],
        10,
        4,
    )
    assert (request.hints.cache_salt, request.hints.expected_output_tokens) == ("tenant-1", 12)
    assert (request.wants_experts, request.inexact) == (False, ())


@pytest.mark.parametrize(
    "body", [{"token_ids": [1]}, {"token_ids": [1], "routing": None, "stop_conditions": None}]
)
def test_a_request_of_nothing_but_ids_is_read(body: dict[str, Any]) -> None:
    assert read_request(body).max_tokens is None


@pytest.mark.parametrize(
    "body",
    [None, [], "x", {}, {"token_ids": []}, {"token_ids": [-1]}, {"token_ids": ["a"]}, {"token_ids": [2**32]},
     {"token_ids": [1], "stop_conditions": {"max_tokens": -3}}, {"token_ids": [1], "routing": {"dp_rank": "0"}}],
)  # fmt: skip
def test_what_is_no_request_is_malformed(body: object) -> None:
    with pytest.raises(Malformed, match="cannot be read"):
        read_request(body)


@pytest.mark.parametrize(
    ("field", "value"),
    [("guided_decoding", {"json": {}}), ("n", 2), ("presence_penalty", 0.5), ("frequency_penalty", 1.0)],
)
def test_options_that_depend_on_earlier_tokens_cannot_be_continued(field: str, value: object) -> None:
    assert read_request(BODY | {"sampling_options": {field: value}}).inexact == (field,)


def test_the_worker_gets_the_request_unchanged_but_for_its_own_address() -> None:
    sent = worker_request(read_request(BODY), 2**64 - 5, 1, [], experts=False)
    assert sent["routing"] == BODY["routing"] | {"backend_instance_id": 2**64 - 5, "dp_rank": 1}
    assert {name: sent[name] for name in BODY if name != "routing"} == {
        name: value for name, value in BODY.items() if name != "routing"
    }
    assert "backend_instance_id" not in BODY["routing"]


def test_a_continuation_asks_for_what_is_missing() -> None:
    sent = worker_request(read_request(BODY), 1, None, [8, 9, 10, 11, 12], experts=False)
    assert sent["token_ids"] == [5, 6, 7, 8, 9, 10, 11, 12]
    assert (sent["stop_conditions"]["max_tokens"], sent["stop_conditions"]["min_tokens"]) == (5, 0)
    assert sent["stop_conditions"]["stop_token_ids_hidden"] == [0]
    assert "dp_rank" not in sent["routing"]
    assert BODY["token_ids"] == [5, 6, 7]


def test_experts_are_asked_for_beside_what_the_client_wants() -> None:
    sent = worker_request(read_request(BODY), 1, None, [], experts=True)
    assert sent["extra_args"] == {"nvext": {"extra_fields": ["timing", "routed_experts"]}, "priority": 3}
    assert BODY["extra_args"]["nvext"]["extra_fields"] == ["timing"]


def test_experts_reach_only_clients_that_asked() -> None:
    item = {"token_ids": [1], "engine_data": {"routed_experts": "AAAA", "prompt_logprobs": []}}
    found = read_piece(item, 0, 3, wants_experts=False)
    assert (found.experts, found.item["engine_data"]) == ("AAAA", {"prompt_logprobs": []})
    assert read_piece(item, 0, 3, wants_experts=True).item is item
    alone = read_piece({"token_ids": [], "engine_data": {"routed_experts": []}}, 0, 3, wants_experts=False)
    assert alone.item["engine_data"] is None


def test_usage_after_a_continuation_is_that_of_the_whole_answer() -> None:
    usage = {
        "prompt_tokens": 8,
        "completion_tokens": 5,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 7},
    }
    found = read_piece(
        {"token_ids": [1], "completion_usage": usage, "finish_reason": "stop"}, 5, 3, wants_experts=False
    )
    assert found.item["completion_usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 3,
        "completion_tokens": 10,
        "total_tokens": 13,
        "prompt_tokens_details": None,
    }
    assert (found.finished, found.cached_tokens) == (True, 3)


@pytest.mark.parametrize(
    ("reason", "finished", "failed"),
    [
        (None, False, False),
        ("stop", True, False),
        ("length", True, False),
        ({"error": "no memory"}, True, True),
        ("error: x", True, True),
    ],
)
def test_finish_reasons(reason: object, finished: bool, failed: bool) -> None:
    found = read_piece({"token_ids": [], "finish_reason": reason}, 0, 3, wants_experts=False)
    assert (found.finished, found.failure is not None) == (finished, failed)


@pytest.mark.parametrize(
    "item",
    [
        None,
        3,
        "x",
        [],
        {"token_ids": "abc"},
        {"token_ids": [1.5]},
        {"token_ids": [-1]},
        {"token_ids": [True]},
    ],
)
def test_what_is_no_item_is_malformed(item: object) -> None:
    with pytest.raises(Malformed):
        read_piece(item, 0, 3, wants_experts=False)


def test_items_of_our_own_are_items() -> None:
    assert read_piece(length_item(), 0, 3, wants_experts=False).finished
    assert read_piece(error_item("why"), 0, 3, wants_experts=False).failure == "why"


def pieces_of(items: list[dict[str, Any]]) -> deque[AnswerPiece]:
    return deque(read_piece(item, 0, 3, wants_experts=True) for item in items)


def joined(*items: dict[str, Any]) -> list[dict[str, Any]]:
    """The items that the frontend gets of items that wait together."""
    waiting, found = pieces_of(list(items)), list[dict[str, Any]]()
    while waiting:
        piece = take_joined(waiting)
        assert piece.token_ids == piece.item["token_ids"]
        found.append(piece.item)
    return found


MOCKER = {"tokens": None, "text": None, "log_probs": None, "index": 0, "completion_usage": None}
"""Fields of the items of Dynamo's mocker beside tokens and finish reason."""


def test_items_of_nothing_but_tokens_are_joined_with_the_next_one() -> None:
    usage = {"completion_usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    last = MOCKER | {"token_ids": [4], "finish_reason": "length"} | usage
    items = [MOCKER | {"token_ids": ids, "finish_reason": None} for ids in ([1], [2, 3], [])]
    assert joined(*items, last) == [last | {"token_ids": [1, 2, 3, 4]}]
    assert joined(*items) == [MOCKER | {"token_ids": [1, 2, 3], "finish_reason": None}]


@pytest.mark.parametrize(
    "more",
    [{"log_probs": [-0.5]}, {"text": "a"}, {"tokens": ["a"]}, {"finish_reason": "stop"}, {"index": 1},
     {"engine_data": {"routed_experts": "..."}}, {"disaggregated_params": {}}, {"something": {"new": 1}}],
)  # fmt: skip
def test_an_item_that_says_more_is_passed_on_as_it_is(more: dict[str, Any]) -> None:
    telling = MOCKER | {"token_ids": [1]} | more
    assert joined(telling, MOCKER | {"token_ids": [2]}) == [telling, MOCKER | {"token_ids": [2]}]


def test_scores_stay_with_their_tokens() -> None:
    items = [{"token_ids": [1], "log_probs": [-0.1]}, {"token_ids": [2], "log_probs": [-0.1]}]
    assert joined(*items) == items
    assert joined({"token_ids": [1]}, items[1]) == [{"token_ids": [1]}, items[1]]


_FIELDS = st.fixed_dictionaries(
    {"token_ids": st.lists(st.integers(0, 9), max_size=3)},
    optional={
        "index": st.sampled_from([None, 0, 1]),
        "finish_reason": st.sampled_from([None, "stop"]),
        "log_probs": st.sampled_from([None, [0.0]]),
        "stop_reason": st.sampled_from([None, 7, "x"]),
        "engine_data": st.sampled_from([None, {"a": 1}]),
    },
)


@given(st.lists(_FIELDS, min_size=1, max_size=8))
def test_no_token_and_no_field_is_lost(items: list[dict[str, Any]]) -> None:
    found = joined(*items)
    assert [one for item in found for one in item["token_ids"]] == [
        one for item in items for one in item["token_ids"]
    ]
    for name in ("finish_reason", "log_probs", "engine_data"):
        told = [one[name] for one in items if one.get(name) is not None]
        assert [one[name] for one in found if one.get(name) is not None] == told
    for name in ("index", "stop_reason"):
        assert {one[name] for one in found if one.get(name) is not None} == {
            one[name] for one in items if one.get(name) is not None
        }
    assert found[-1] == items[-1] | {"token_ids": found[-1]["token_ids"]}


@pytest.mark.parametrize(("stop", "joinable"), [(None, True), ([], True), (["\n"], False)])
def test_items_are_not_joined_where_the_frontend_looks_for_a_stop_text(stop: object, joinable: bool) -> None:
    assert read_request(BODY | {"stop_conditions": {"stop": stop}}).joinable is joinable


def scrambled(value: Any, chance: random.Random) -> Any:
    """The value with some of its parts replaced by others."""
    if chance.random() < 0.08:
        return chance.choice(
            [None, -1, 2**70, 1.5, "x", b"", [], {}, [None], {"nvext": 1}, True, float("nan")]
        )
    if isinstance(value, dict):
        return {name: scrambled(one, chance) for name, one in value.items()}
    return [scrambled(one, chance) for one in value] if isinstance(value, list) else value


def test_a_thousand_scrambled_requests_and_items_are_read_or_malformed() -> None:
    chance, requests, items = random.Random(4), 0, 0
    details = {"cached_tokens": 1}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": details}
    data = {"routed_experts": [[[1]]]}
    item = {"token_ids": [1, 2], "finish_reason": None, "completion_usage": usage, "engine_data": data}
    for _ in range(1000):
        try:
            worker_request(read_request(scrambled(BODY, chance)), 1, 0, [3], experts=True)
        except Malformed:
            requests += 1
        try:
            read_piece(scrambled(item, chance), 3, 3, wants_experts=False)
        except Malformed:
            items += 1
    assert 0 < requests < 1000
    assert 0 < items < 1000
