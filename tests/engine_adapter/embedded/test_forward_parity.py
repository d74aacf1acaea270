"""The embedded engine computes what transformers computes: one process, two and four, however the work is
cut."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_adapter.embedded.checkpoint import Checkpoint
from engine_adapter.embedded.model_runner import ModelRunner, SequenceWork
from engine_adapter.embedded.paged_attention import PAGE_TOKENS
from fleet.placement import linear
from tests.fleet.splits import random_split

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]
DEMO = ROOT / "deploy" / "demo_model" / "checkpoint"
DRIVER = runpy.run_path(str(HERE / "rank_process.py"))
TEXT = (ROOT / "LICENSE").read_bytes() + (HERE / "conftest.py").read_bytes()
LENGTHS = [1, 2, 3, 15, 16, 17, 18, 31, 32, 33, 40, 47, 48, 49, 64, 80, 97, 128, 150, 177]
PROMPTS = [list(TEXT[at * 531 : at * 531 + length]) for at, length in enumerate(LENGTHS)]
TOLERANCE = 1e-4
SAFE_MARGIN = 1e-3
"""Tokens are compared where the best logit leads by more than this; closer calls are rounding, not
correctness."""


@pytest.fixture(scope="module")
def oracle():
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model.set_experts_implementation("eager")
    return model.eval()


def make_runner(**settings):
    with Checkpoint(DEMO) as checkpoint:
        config = checkpoint.config
        placement = linear(layers=config.layers, experts=config.experts, ranks=1)
        return ModelRunner(checkpoint, placement, **{"kv_pages": 400, **settings})


@pytest.fixture(scope="module")
def runner():
    return make_runner()


@pytest.fixture(scope="module")
def alone(runner):
    """Tokens and logits of the 20 prompts batched together on one rank."""
    return DRIVER["greedy"](runner, PROMPTS, 64)


def expected_logits(oracle, tokens):
    with torch.no_grad():
        return oracle(torch.tensor([tokens])).logits[0].numpy()


def assert_continues_like(oracle, prompts, tokens, logits):
    """By induction over positions: with the same tokens before it, each next token is the oracle's, so the
    greedy continuation is."""
    for prompt, continuation, found in zip(prompts, tokens, logits, strict=True):
        expected = expected_logits(oracle, prompt + continuation.tolist())[len(prompt) - 1 : -1]
        assert np.abs(found - expected).max() < TOLERANCE
        best_two = np.sort(expected, axis=1)[:, -2:]
        clear = best_two[:, 1] - best_two[:, 0] > SAFE_MARGIN
        assert np.array_equal(continuation[clear], expected.argmax(axis=1)[clear])


def test_logits_of_every_prompt_position_are_those_of_transformers(oracle, runner):
    for prompt in PROMPTS[:15:2]:
        pages = [list(range(at * 4, at * 4 + 4)) for at in range(len(prompt))]
        prefixes = [
            SequenceWork(prompt[: at + 1], 0, pages[at], needs_logits=True) for at in range(len(prompt))
        ]
        found = np.concatenate(
            [runner.forward(prefixes[at : at + 32]).logits.numpy() for at in range(0, len(prompt), 32)]
        )
        assert np.abs(found - expected_logits(oracle, prompt)).max() < TOLERANCE


def test_twenty_prompts_batched_together_continue_for_64_tokens_as_transformers_does(oracle, alone):
    assert_continues_like(oracle, PROMPTS, *alone)


def test_transformers_own_greedy_generation_writes_the_same_text(oracle, alone):
    tokens, logits = alone
    for at in (4, 12, 19):
        found = oracle.generate(
            torch.tensor([PROMPTS[at]]),
            attention_mask=torch.ones(1, LENGTHS[at]),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
        )
        best_two = np.sort(logits[at, :24], axis=1)[:, -2:]
        assert (best_two[:, 1] - best_two[:, 0]).min() > SAFE_MARGIN, (
            "choose another prompt: this one's text hangs on rounding"
        )
        assert found[0, LENGTHS[at] :].tolist() == tokens[at, :24].tolist()


@pytest.mark.parametrize("chunk", [1, 7, 16, 200])
def test_a_prompt_in_chunks_is_the_prompt_at_once(alone, chunk):
    runner = make_runner()
    tokens, logits = DRIVER["greedy"](runner, [PROMPTS[at] for at in (2, 9, 17)], 8, chunk=chunk)
    assert np.abs(logits - alone[1][[2, 9, 17], :8]).max() < 1e-4
    assert np.array_equal(tokens, alone[0][[2, 9, 17], :8])


def test_sequences_may_share_the_pages_of_a_common_prefix(runner):
    prompt, shared = PROMPTS[18], 4
    tails = [prompt[shared * PAGE_TOKENS :], PROMPTS[10]]
    free = DRIVER["shuffled_pages"](runner.kv_pages)
    first = DRIVER["Sequence"](prompt[: shared * PAGE_TOKENS], 1, free, 200)
    DRIVER["run_sequences"](runner, [first])
    whole = [DRIVER["Sequence"](prompt[: shared * PAGE_TOKENS] + tail, 12, free, 200) for tail in tails]
    prefix = first.pages[:shared]
    reusing = [
        DRIVER["Sequence"](prompt[: shared * PAGE_TOKENS] + tail, 12, free, 200, shared * PAGE_TOKENS, prefix)
        for tail in tails
    ]
    DRIVER["run_sequences"](runner, whole + reusing)
    for one, other in zip(whole, reusing, strict=True):
        assert one.tokens == other.tokens
        assert np.abs(np.stack(one.logits) - np.stack(other.logits)).max() < 1e-5


def run_ranks(folder, ranks, **job):
    job = {
        "do": "generate",
        "checkpoint": str(DEMO),
        "ranks": ranks,
        "kv_pages": 400,
        "step_timeout_s": 60,
        "prompts": PROMPTS,
        "count": 64,
        **job,
    }
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, str(HERE / "rank_process.py"), str(folder / "job.json")]
    processes = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [np.load(folder / f"{rank}.npz") for rank in range(ranks)]
    tokens = np.empty((len(PROMPTS), job["count"]), np.int64)
    logits = np.empty((len(PROMPTS), job["count"], found[0]["logits"].shape[2]), np.float32)
    for rank, arrays in enumerate(found):
        tokens[rank::ranks], logits[rank::ranks] = arrays["tokens"], arrays["logits"]
    return tokens, logits, found


@pytest.mark.timeout(
    300
)  # about 70 steps of four processes: seconds on four free cores, a minute on two busy ones
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_in_processes_of_their_own_compute_the_same_bits_as_one(tmp_path, oracle, alone, ranks):
    tokens, logits, found = run_ranks(tmp_path, ranks)
    assert_continues_like(oracle, PROMPTS, tokens, logits)
    assert np.array_equal(tokens, alone[0])
    assert np.array_equal(logits, alone[1])
    assert all(0 < arrays["pair_seconds"] < 1e-2 for arrays in found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(None, marks=pytest.mark.slow),
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.slow),
    ],
    ids=["even", "uneven-and-by-whole-tokens", "nodes-too"],
)
def test_replicas_scattered_experts_and_how_they_share_tokens_change_no_bit(tmp_path, alone, seed):
    random = np.random.default_rng(3)
    rows = [np.concatenate([random.permutation(32)[:24], [-1] * 4]) for _ in range(4)]
    slots = np.array(
        [
            np.concatenate(
                [
                    row,
                    random.permutation(
                        np.concatenate([np.setdiff1d(np.arange(32), row), row[:16], [-1] * 4])
                    ),
                ]
            )
            for row in rows
        ],
        np.int16,
    )
    random = np.random.default_rng(seed)
    split = (
        None if seed is None else [part.tolist() for part in random_split(random, slots, 32, nodes=seed == 2)]
    )
    tokens, logits, _ = run_ranks(tmp_path, 2, slots=slots.tolist(), split=split, cover=seed == 1, count=16)
    assert np.array_equal(tokens, alone[0][:, :16])
    assert np.array_equal(logits, alone[1][:, :16])
