"""Figures of the benchmarks of a real vLLM: ideal prefix hits, intervals of ratios, the requests of a run."""

import numpy as np
import pytest

from benchmarks.real_vllm.overhead import interval
from benchmarks.real_vllm.prefix import Answer, Conversation, shared, streamed
from benchmarks.rig.live.document_traffic import Texts
from benchmarks.rig.vllm.load import Plenty, halves, requests

BLOCK = 32


@pytest.mark.parametrize(
    ("prompt", "computed", "tokens"),
    [
        (range(100), range(100), 96),
        (range(97), range(96), 96),
        (range(96), range(200), 64),  # the last token is always computed
        (range(100), [*range(40), -1, *range(41, 100)], 32),
        (range(100), [-1], 0),
        (range(20), range(20), 0),
    ],
)
def test_a_prompt_takes_over_full_blocks_but_never_its_last_token(
    prompt: range, computed: list[int], tokens: int
) -> None:
    assert shared(list(prompt), list(computed)) == tokens


def test_the_last_token_of_an_answer_was_never_computed() -> None:
    talk = Conversation(["a", "b", "c"])
    assert talk.heard(0, Answer(list(range(60)), [60, 61, 62, 63], "x")) == 0
    # 63 tokens are computed: one full block, although the new prompt shares 64
    assert talk.heard(1, Answer(list(range(90)), [90], "y")) == BLOCK
    assert talk.heard(2, Answer(list(range(97)), [1], "z")) == 2 * BLOCK
    assert [message["content"] for message in talk.messages] == ["a", "x", "b", "y", "c", "z"]


def test_a_stream_is_read_as_one_answer() -> None:
    events = (
        'data: {"prompt_token_ids": [1, 2], "choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        'data: {"choices": [{"delta": {"content": "a"}, "token_ids": [7]}]}',
        'data: {"choices": [{"delta": {"content": "b"}, "token_ids": [8, 9]}]}',
        "data: [DONE]",
    )
    assert streamed("\n\n".join(events)) == Answer([1, 2], [7, 8, 9], "ab")


def test_the_interval_of_equal_ratios_is_a_point() -> None:
    found = interval([0.98] * 6)
    assert (found.mean, found.width) == (pytest.approx(0.98), pytest.approx(0.0))


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    dice = np.random.default_rng(0)
    several = [interval(np.exp(dice.normal(0.0, 0.1, 12)).tolist()) for _ in range(400)]
    assert 0.92 < np.mean([one.low < 1.0 < one.high for one in several]) < 0.98


def test_the_domains_change_in_the_middle_and_a_seed_names_the_requests() -> None:
    documents = {name: [[at] * 200] for at, name in enumerate("abcde")}
    traffic, much = Texts(documents, "made up"), Plenty(40, 4, 64, 8)
    assert halves(traffic) == (["a", "b", "c"], ["d", "e"])
    asked = requests(traffic, much, seed=1)
    assert {one.domain for one in asked[:20]} == {"a", "b", "c"}
    assert {one.domain for one in asked[20:]} == {"d", "e"}
    assert asked == requests(traffic, much, seed=1) != requests(traffic, much, seed=2)
