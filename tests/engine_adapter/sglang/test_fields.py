"""Fields that Roost does not read, as SGLang's sampling parameters."""

import re
from typing import Any

import pytest

from engine_adapter.sglang.fields import sampling_fields, stop_ids

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'


def test_penalties_and_ends_have_the_same_names() -> None:
    asked = {"presence_penalty": 0.5, "min_p": 0.1, "logit_bias": {"7": -3.0}, "stop_token_ids": [5, 6]}
    assert sampling_fields(asked) == asked
    assert sampling_fields({"min_tokens": 4}) == {"min_new_tokens": 4}
    assert stop_ids(asked) == {5, 6}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json_schema": AS_TEXT},
        ),
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
        ({"response_format": {"type": "text"}}, {}),
        ({"guided_json": SCHEMA}, {"json_schema": AS_TEXT}),
        ({"json_schema": AS_TEXT}, {"json_schema": AS_TEXT}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"regex": "a+", "response_format": {"type": "text"}}, {"regex": "a+"}),
        ({"guided_grammar": "root ::= x"}, {"ebnf": "root ::= x"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": AS_TEXT}),
        ({"structured_outputs": {"grammar": "g", "regex": None}}, {"ebnf": "g"}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": '{"type": "object"}'}),
    ],
)
def test_each_way_to_state_a_grammar_is_one_of_sglangs(fields: dict[str, Any], found: dict[str, Any]) -> None:
    assert sampling_fields(fields) == found


def test_a_choice_is_matched_letter_by_letter() -> None:
    for fields in ({"guided_choice": ["a.b", "c|d"]}, {"structured_outputs": {"choice": ["a.b", "c|d"]}}):
        pattern = sampling_fields(fields)["regex"]
        assert [bool(re.fullmatch(pattern, text)) for text in ("a.b", "c|d", "axb", "c")] == [
            True,
            True,
            False,
            False,
        ]


def test_what_asks_for_nothing_and_what_no_one_knows_is_left_out() -> None:
    harmless = {
        "use_beam_search": False,
        "skip_special_tokens": True,
        "vllm_xargs": {},
        "user": "u",
        "priority": 3,
    }
    assert sampling_fields(harmless) == {}


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"use_beam_search": True}, "use_beam_search is not served"),
        ({"bad_words": ["x"]}, "bad_words is not served"),
        ({"lora_path": "x"}, "lora_path is not served"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json, guided_regex: only one"),
        ({"regex": "a", "ebnf": "b"}, "regex, ebnf: only one"),
        ({"response_format": {"type": "json_schema"}}, "json_schema needs a schema"),
        ({"response_format": {"type": "yaml"}}, "the type 'yaml' is not known"),
        ({"response_format": "json"}, "the type None is not known"),
        ({"guided_choice": []}, "must be a list of texts"),
        ({"structured_outputs": {}}, "structured_outputs: needs one of json"),
        ({"structured_outputs": 5}, "structured_outputs: needs one of json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "not json, regex"),
        ({"structured_outputs": {"yaml": "a"}}, "not yaml"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        sampling_fields(fields)


@pytest.mark.parametrize("ids", [7, ["x"], [True]])
def test_ids_that_end_an_answer_are_ids(ids: Any) -> None:
    with pytest.raises(ValueError, match="must be a list of ids"):
        stop_ids({"stop_token_ids": ids})
