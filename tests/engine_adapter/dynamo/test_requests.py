"""Requests of Dynamo's request plane: read, converted, and refused by name."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.sampling import Sampling
from engine_adapter.dynamo.requests import (
    TokenStops,
    UnservableRequest,
    generation_request,
    parse,
    served_rank,
    token_stops,
)
from tests.engine_adapter.dynamo.request_builders import request

VOCABULARY, CONTEXT = 1000, 256


def converted(**changes: Any) -> GenerationRequest:
    return generation_request(parse(request(**changes)), vocabulary=VOCABULARY, max_context=CONTEXT, seed=7)


def test_null_values_are_the_engines_defaults() -> None:
    plain = converted(max_tokens=None, ignore_eos=None, temperature=None)
    assert plain.max_tokens == CONTEXT - 40, "as many as the context has room for"
    assert plain.sampling == Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=7, logprobs=None)
    assert (plain.ignore_eos, plain.salt) == (False, "")


def test_options_reach_the_engine() -> None:
    full = converted(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        seed=11,
        logprobs=2,
        ignore_eos=True,
        cache_salt="tenant",
    )
    assert full.max_tokens == 9
    assert full.sampling == Sampling(temperature=0.5, top_k=0, top_p=0.9, seed=11, logprobs=2)
    assert (full.ignore_eos, full.salt) == (True, "tenant")


def test_an_answer_longer_than_the_context_is_cut_there() -> None:
    assert converted(max_tokens=10_000).max_tokens == CONTEXT - 40


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("best_of", 2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("min_p", 0.1),
        ("use_beam_search", True),
        ("guided_decoding", {"json": {}}),
        ("allowed_token_ids", [1]),
        ("bad_words_token_ids", [[1]]),
        ("min_tokens", 3),
        ("max_thinking_tokens", 3),
        ("prompt_logprobs", 0),
        ("lora_name", "adapter"),
        ("multi_modal_data", {"image_url": []}),
        ("prompt_embeds", "AAAA"),
        ("bootstrap_info", {}),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnservableRequest, match=f"^{name}: "):
        parse(request(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 1), ("presence_penalty", 0.0), ("repetition_penalty", 1.0), ("min_p", 0.0), ("min_tokens", 0)],
)
def test_neutral_values_are_no_feature(name: str, value: Any) -> None:
    assert converted(**{name: value}) == converted()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokens": []}, "token_ids: is empty"),
        ({"tokens": [1, VOCABULARY]}, "token_ids: has the id 1000"),
        ({"tokens": [1] * CONTEXT}, "token_ids: has 256 tokens"),
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"temperature": 3.0}, "temperature: 3.0"),
        ({"top_p": 0.0}, "top_p: 0.0"),
        ({"top_k": -2}, "top_k: -2"),
        ({"logprobs": 21}, "logprobs: 21"),
        ({"cache_salt": "x" * 2000}, "cache_salt: has 2000 characters"),
    ],
)
def test_values_out_of_range_are_refused_by_name(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnservableRequest, match=f"^{complaint}"):
        converted(**changes)


def test_end_tokens_stay_in_the_answer_and_the_clients_own_stop_tokens_do_not() -> None:
    stops = request(stop_token_ids=[5, 9], stop_token_ids_hidden=[9], ignore_eos=False)
    assert token_stops(parse(stops)) == TokenStops(frozenset({9}), frozenset({5}))
    visible = request(stop_token_ids=[5, 9], stop_token_ids_visible=[5], ignore_eos=False)
    assert token_stops(parse(visible)) == TokenStops(frozenset({5}), frozenset({9}))
    ignoring = request(stop_token_ids=[5], stop_token_ids_hidden=[9], ignore_eos=True)
    assert token_stops(parse(ignoring)) == TokenStops(frozenset(), frozenset({5}))


def test_a_rank_that_is_not_here_is_refused() -> None:
    assert served_rank(parse(request(dp_rank=3)), (2, 3)) == 3
    assert served_rank(parse(request()), (2, 3)) is None
    assert served_rank(parse(request(routing=None)), (2, 3)) is None
    with pytest.raises(
        UnservableRequest, match=r"^dp_rank: 1 is not served here; this worker has the ranks 2 to 3"
    ):
        served_rank(parse(request(dp_rank=1)), (2, 3))


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in _places(part, (*path, key)))]


_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(2**70), max_value=2**70),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


@given(st.sampled_from([place for place in _places(request()) if place]), _ODD, st.booleans())
def test_a_mutated_request_is_served_or_refused_and_nothing_else(
    place: tuple[Any, ...], odd: Any, removed: bool
) -> None:
    mutated = copy.deepcopy(request())
    inner: Any = mutated
    for key in place[:-1]:
        inner = inner[key]
    if removed:
        del inner[place[-1]]
    else:
        inner[place[-1]] = odd
    try:
        parsed = parse(mutated)
        served_rank(parsed, (0, 1))
        token_stops(parsed)
        found = generation_request(parsed, vocabulary=VOCABULARY, max_context=CONTEXT, seed=7)
    except UnservableRequest:
        return
    found.check_bounds(max_context=CONTEXT, vocabulary=VOCABULARY)


@given(_ODD)
def test_anything_else_is_refused(odd: Any) -> None:
    with pytest.raises(UnservableRequest, match="not a request of Dynamo's form"):
        parse(odd)
