"""Requests to SGLang's native API, and its answers, event by event."""

import base64
from typing import Any

import msgspec
import numpy as np
import pytest

from engine_adapter.batching.detokenizer import TextStream
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.sampling import Sampling
from engine_adapter.serving.checkpoint_tokenizer import CheckpointTokenizer
from engine_adapter.sglang.generate import (
    AnswerReader,
    UnreadableAnswer,
    event_of,
    generate_body,
    routed_table,
)
from engine_adapter.sglang.model_shape import SglangModel, model_of
from fleet.routings import UNKNOWN
from tests.engine_adapter.sglang.fake_server import CONFIG, FOLDER

TOKENIZER = CheckpointTokenizer(FOLDER)
PROMPT = list(b"a prompt")


def asked(**about: Any) -> GenerationRequest:
    return GenerationRequest(**{"prompt": PROMPT, "max_tokens": 8, **about})


def reader(request: GenerationRequest, *, incremental: bool = True) -> AnswerReader:
    text = TextStream(TOKENIZER.detokenizer(), request.stop)
    text.resume(request.prompt[len(request.prompt) - request.emitted :])
    return AnswerReader(request, text, TOKENIZER.eos, incremental=incremental)


def event(ids: list[int], finish: dict[str, Any] | None = None, **about: Any) -> Any:
    meta = {"finish_reason": finish, "cached_tokens": 3, **about}
    return event_of(msgspec.json.encode({"text": None, "output_ids": ids, "meta_info": meta}))


def body(request: GenerationRequest, **about: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"parameters": {}, "rid": "r", "rank": None, "routed": False, **about}
    found: dict[str, Any] = msgspec.json.decode(generate_body(request, **values))
    return found


def test_a_plain_request_has_ids_and_what_it_asks_of_sampling() -> None:
    assert body(asked(ignore_eos=True)) == {
        "rid": "r",
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 8, "temperature": 0.0, "top_p": 1.0, "ignore_eos": True},
        "stream": True,
    }


def test_a_request_names_rank_salt_seed_and_what_it_wants_to_know() -> None:
    sampling = Sampling(temperature=0.5, top_k=7, top_p=0.9, seed=(1 << 63) + 5, logprobs=2)
    found = body(asked(salt="ours", sampling=sampling), rank=3, routed=True)
    assert (found["data_parallel_rank"], found["cache_salt"]) == (3, "ours")
    assert (found["return_logprob"], found["top_logprobs_num"]) == (True, 2)
    assert (found["return_routed_experts"], found["routed_experts_start_len"]) == (True, 0)
    assert found["sampling_params"]["sampling_seed"] == 5
    assert found["sampling_params"]["top_k"] == 7


def test_further_parameters_stand_behind_those_that_roost_reads() -> None:
    found = body(asked(), parameters={"min_p": 0.1, "max_new_tokens": 99})["sampling_params"]
    assert (found["min_p"], found["max_new_tokens"]) == (0.1, 8)


def test_stop_strings_stay_here() -> None:
    assert "stop" not in body(asked(stop=("x",)))["sampling_params"]


@pytest.mark.parametrize("incremental", [True, False])
def test_an_answer_grows_by_its_events(incremental: bool) -> None:
    reads = reader(asked(), incremental=incremental)
    first = reads.take(event(list(b"ab")))
    last = reads.take(event(list(b"c" if incremental else b"abc"), {"type": "length", "length": 3}))
    assert (first[0], first[1]) == (list(b"ab"), "ab")
    assert (last[0], last[1], reads.reason) == (list(b"c"), "c", "length")
    assert (reads.ids, reads.cached_tokens) == (list(b"abc"), 3)


def test_the_id_that_ends_an_answer_has_no_text() -> None:
    reads = reader(asked())
    eos = next(iter(TOKENIZER.eos))
    assert reads.take(event([*b"ab", eos], {"type": "stop", "matched": eos}))[:2] == ([*b"ab", eos], "ab")
    assert reads.reason == "stop"


def test_a_stop_string_ends_an_answer_before_sglang_does_also_across_a_break() -> None:
    reads = reader(asked(stop=("cd",)))
    assert reads.take(event(list(b"abc")))[1] == "ab"
    assert reads.take(event(list(b"dxyz")))[:2] == (list(b"d"), "")
    assert reads.reason == "stop"
    rest = reader(asked(prompt=[*PROMPT, *b"abc"], emitted=3, stop=("cd",)))
    rest.take(event(list(b"d")))
    assert rest.reason == "stop"


def test_a_continuation_that_had_ended_is_over() -> None:
    eos = next(iter(TOKENIZER.eos))
    assert reader(asked(prompt=[*PROMPT, *b"ab", eos], emitted=3)).is_over
    assert not reader(asked(prompt=[*PROMPT, *b"ab", eos], emitted=3, ignore_eos=True)).is_over
    assert not reader(asked(prompt=[*PROMPT, eos], emitted=0)).is_over


@pytest.mark.parametrize("incremental", [True, False])
def test_log_probabilities_belong_to_the_new_tokens(incremental: bool) -> None:
    reads = reader(asked(sampling=Sampling(temperature=0.0, logprobs=1)), incremental=incremental)
    every = [[-0.1, 97, None], [-0.2, 98, None], [None, 99, None]]
    top = [[[-0.1, 97, None]], [[-0.05, 65, None]], None]
    reads.take(event([97], output_token_logprobs=every[:1], output_top_logprobs=top[:1]))
    first = 1 if incremental else 0
    about = {"output_token_logprobs": every[first:], "output_top_logprobs": top[first:]}
    _, _, scored = reads.take(event([97, 98, 99][first:], {"type": "length"}, **about))
    assert [(one.token, one.offset) for one in scored] == [(98, 1), (99, 2)]
    assert [one.logprobs.chosen for one in scored] == [-0.2, float("-inf")]
    assert [one.logprobs.top for one in scored] == [((65, -0.05),), ()]


def test_log_probabilities_that_are_missing_are_no_answer() -> None:
    reads = reader(asked(sampling=Sampling(temperature=0.0, logprobs=1)))
    with pytest.raises(UnreadableAnswer, match="0 log-probabilities for 1"):
        reads.take(event([97]))


@pytest.mark.parametrize(
    ("events", "incremental"),
    [
        ([[1, 2], [1]], False),
        ([[1] * 9], True),
        ([[-1]], True),
        ([[1 << 31]], True),
        ([[1] * 5, [1] * 5], True),
    ],
)
def test_an_answer_that_contradicts_itself_is_none(events: list[list[int]], incremental: bool) -> None:
    reads = reader(asked(), incremental=incremental)
    *before, last = events
    for one in before:
        reads.take(event(one))
    with pytest.raises(UnreadableAnswer, match="ids"):
        reads.take(event(last))


# Experts

MODEL = model_of(CONFIG)
DENSE = model_of(
    {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 5,
        "hidden_size": 6,
        "torch_dtype": "float16",
    }
)


def encoded(table: Any) -> str:
    return base64.b64encode(np.asarray(table, "<i4").tobytes()).decode()


def test_a_model_says_which_layers_have_experts() -> None:
    assert MODEL is not None
    assert DENSE is not None
    shape = MODEL.shape
    assert (shape.layers, shape.experts, shape.top_k) == (4, 32, 4)
    assert (DENSE.all_layers, DENSE.expert_layers, DENSE.shape.layers) == (4, (1, 2, 3), 3)
    assert DENSE.shape.dtype == "float16"
    qwen = {"num_hidden_layers": 6, "num_experts": 4, "num_experts_per_tok": 1, "hidden_size": 1}
    every = {**qwen, "moe_intermediate_size": 1, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    found = model_of({"text_config": every})
    assert found is not None
    assert found.expert_layers == (1, 5)
    assert model_of({"num_hidden_layers": 4, "hidden_size": 8, "intermediate_size": 9}) is None


def test_dense_layers_and_reused_positions_are_left_out() -> None:
    assert isinstance(DENSE, SglangModel)
    table = np.arange(3 * 4 * 2).reshape(3, 4, 2) % 8
    table[2, 3, 1] = -1
    found = routed_table(encoded(table), DENSE, positions=4, cached=1)
    assert (found[0] == UNKNOWN).all()
    assert found[1].tolist() == table[1, 1:].tolist()
    assert found[2, 2, 1] == UNKNOWN


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("%%%%", "base64"),
        (encoded(np.zeros(7)), "no multiple"),
        (encoded(np.full((2, 4, 2), 8)), "expert 8, of 8"),
        (encoded(np.zeros((5, 4, 2))), "characters"),
    ],
)
def test_experts_of_another_shape_are_refused(text: str, wrong: str) -> None:
    assert DENSE is not None
    with pytest.raises(UnreadableAnswer, match=wrong):
        routed_table(text, DENSE, positions=3, cached=0)
