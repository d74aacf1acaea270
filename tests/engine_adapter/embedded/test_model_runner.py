"""The runner: what it refuses, what it taps, and that a sequence's bits do not depend on its batch."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine_adapter.embedded.attention import Rotary, SequenceSpan, plan_attention
from engine_adapter.embedded.checkpoint import Checkpoint
from engine_adapter.embedded.dispatch import CapacityError
from engine_adapter.embedded.model_runner import ModelRunner, SequenceWork, WorkError
from fleet.placement import linear
from tests.engine_adapter.layer_forms import FORMS, TORCH, computed_by

write_tiny = runpy.run_path(str(Path(__file__).parents[1] / "tiny_models.py"))["write_tiny"]
DEMO = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
TEXT = list(Path(__file__).read_bytes())
LENGTHS = [1, 15, 16, 17, 31, 33, 64, 127, 128, 129, 150, 190, 195, 200, 256, 300, 383, 390, 520, 700]


@pytest.fixture(scope="module", params=FORMS)
def runner(request):
    """Of every form that computes layers."""
    with computed_by(request.param), Checkpoint(DEMO) as checkpoint:
        placement = linear(layers=checkpoint.config.layers, experts=checkpoint.config.experts, ranks=1)
        yield ModelRunner(checkpoint, placement, kv_pages=600, max_tokens=1024)


@pytest.fixture(scope="module")
def decodes(runner):
    """Sequences of very different lengths, all but their last token computed."""
    free = iter(np.random.default_rng(1).permutation(runner.kv_pages).tolist())
    works = []
    for at, length in enumerate(LENGTHS):
        tokens = TEXT[at * 97 : at * 97 + length]
        pages = [next(free) for _ in range(-(-length // 16))]
        if length > 1:
            runner.forward([SequenceWork(tokens[:-1], 0, pages, needs_logits=False)])
        works.append(SequenceWork(tokens[-1:], length - 1, pages, needs_logits=True))
    return works


def test_a_decoding_sequence_has_the_same_bits_alone_and_in_any_batch(runner, decodes):
    alone = torch.cat([runner.forward([work]).logits for work in decodes])
    together = runner.forward(decodes)
    assert torch.equal(together.logits, alone)
    for size in (2, 3, 5, 9):
        for begin in range(0, len(decodes), size):
            assert torch.equal(
                runner.forward(decodes[begin : begin + size]).logits, alone[begin : begin + size]
            )
            assert torch.equal(
                runner.forward(decodes[begin : begin + size][::-1]).logits,
                alone[begin : begin + size].flip(0),
            ), "longest first"
    order = np.random.default_rng(2).permutation(len(decodes)).tolist()
    assert torch.equal(runner.forward([decodes[at] for at in order]).logits, alone[order])


def test_a_prefill_beside_decodes_changes_no_bit_of_either(runner, decodes):
    used = {page for work in decodes for page in work.pages}
    free = [page for page in range(runner.kv_pages) if page not in used][:5]
    prefill = SequenceWork(TEXT[:77], 0, free, needs_logits=True)
    alone = torch.cat([runner.forward([work]).logits for work in (decodes[9], prefill, decodes[13])])
    together = runner.forward([decodes[9], prefill, decodes[13]])
    assert torch.equal(together.logits, alone)


def test_the_tap_shows_the_experts_transformers_chose(runner):
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    prompts = [TEXT[:40], TEXT[300:317]]
    found = runner.forward(
        [
            SequenceWork(prompt, 0, list(range(at * 8, at * 8 + 8)), needs_logits=False)
            for at, prompt in enumerate(prompts)
        ]
    )
    assert found.routed.dtype == np.uint8
    assert found.routed.shape == (57, runner.config.layers, runner.config.top_k)
    assert found.logits.shape == (0, runner.config.vocabulary)
    begin = 0
    for prompt in prompts:
        with torch.no_grad():
            by_layer = model(torch.tensor([prompt]), output_router_logits=True).router_logits
        for layer, logits in enumerate(by_layer):
            ranked = logits.sort(dim=-1, descending=True)
            clear = (
                ranked.values[:, runner.config.top_k - 1] - ranked.values[:, runner.config.top_k] > 1e-4
            ).numpy()
            expected = np.sort(ranked.indices[:, : runner.config.top_k].numpy(), axis=1)
            ours = np.sort(found.routed[begin : begin + len(prompt), layer], axis=1)
            assert np.array_equal(ours[clear], expected[clear])
        begin += len(prompt)


def test_threads_share_large_steps_and_change_no_bit(runner, decodes):
    used = {page for work in decodes for page in work.pages}
    free = iter([page for page in range(runner.kv_pages) if page not in used])
    prompts = [
        SequenceWork(TEXT[at : at + length], 0, [next(free) for _ in range(-(-length // 16))], at % 2 == 0)
        for at, length in enumerate((130, 97, 16, 75, 201))
    ]
    work = [*decodes[:3], *prompts]
    with Checkpoint(DEMO) as checkpoint:
        shared = ModelRunner(
            checkpoint, runner.placement, kv_pages=runner.kv_pages, max_tokens=1024, threads=3
        )
    shared.kv_pool.values.copy_(runner.kv_pool.values)
    alone, together = runner.forward(work), shared.forward(work)
    shared.close()
    assert torch.equal(alone.logits, together.logits)
    assert np.array_equal(alone.routed, together.routed)
    assert torch.equal(runner.kv_pool.values, shared.kv_pool.values)


def test_a_step_without_work_is_empty(runner):
    found = runner.forward([])
    assert found.logits.shape == (0, runner.config.vocabulary)
    assert found.routed.shape == (0, runner.config.layers, runner.config.top_k)


def test_logits_come_in_the_order_of_the_works_that_want_them(runner, decodes):
    requested = [
        decodes[5],
        SequenceWork(decodes[7].tokens, decodes[7].start, decodes[7].pages, needs_logits=False),
        decodes[2],
    ]
    found = runner.forward(requested)
    assert torch.equal(found.logits, torch.cat([runner.forward([decodes[at]]).logits for at in (5, 2)]))


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (SequenceWork([], 0, [0], True), "a step computes at least one"),
        (SequenceWork([1], -1, [0], True), "positions -1 to -1"),
        (SequenceWork([1], 2048, range(200), True), "all below 2048"),
        (SequenceWork([1, 2], 15, [0], True), "1 pages do not cover the 17 positions"),
        (SequenceWork([256], 0, [0], True), "token ids 256 to 256; the vocabulary has 256"),
        (SequenceWork([-1], 0, [0], True), "token ids -1"),
        (SequenceWork([1], 0, [600], True), "pages 600 to 600; there are 600"),
    ],
)
def test_work_that_cannot_be_computed_is_refused_by_name(runner, work, message):
    with pytest.raises(WorkError, match=message):
        runner.forward([work])


def test_more_tokens_than_a_step_takes_are_refused(runner):
    with pytest.raises(CapacityError, match="1025 tokens"):
        runner.forward([SequenceWork([1] * 1025, 0, range(65), needs_logits=False)])


@pytest.mark.parametrize("wrong", [{"kv_pages": 0}, {"max_tokens": 0}, {"dtype": "float64"}, {"threads": 0}])
def test_impossible_settings_are_refused(wrong):
    with Checkpoint(DEMO) as checkpoint, pytest.raises(ValueError, match=r"^(runner|thread team): "):
        ModelRunner(checkpoint, linear(layers=4, experts=32, ranks=1), **wrong)


def test_a_placement_for_more_ranks_than_there_are_is_refused():
    with Checkpoint(DEMO) as checkpoint, pytest.raises(ValueError, match="does not fit 1 ranks"):
        ModelRunner(checkpoint, linear(layers=4, experts=32, ranks=2))


@computed_by(TORCH)
def test_by_torch_sequences_of_like_length_are_computed_as_one_batch_and_outliers_apart(runner):
    def batches(*lengths):
        spans = [SequenceSpan(1, length - 1, range(-(-length // 16))) for length in lengths]
        page_rows = np.zeros((4, 200), np.int64)
        plan = plan_attention(spans, max(4, len(spans)), page_rows, 16, Rotary(runner.config, torch.float32))
        return [batch.count for batch in plan.decodes]

    assert batches(100, 120, 140, 200) == [4]
    assert batches(*[20] * 15, 2000) == [15, 1]
    assert batches(5, 2000) == [1, 1]
    assert batches(*range(10, 250, 16)) == [15]


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "attention_bias": True}])
def test_the_stated_memory_is_that_of_every_tensor_beside_experts_and_of_the_kv_pages(tmp_path, changes):
    write_tiny(tmp_path, **changes)
    stored = load_file(tmp_path / "model.safetensors")
    if not changes:
        stored.pop("lm_head.weight", None)
    dense = {name: tensor.nbytes for name, tensor in stored.items() if ".experts." not in name}
    of_attention = sum(
        size for name, size in dense.items() if "self_attn" in name or "input_layernorm" in name
    )
    with Checkpoint(tmp_path) as checkpoint:
        config = checkpoint.config
        placement = linear(layers=config.layers, experts=config.experts, ranks=1)
        memory = ModelRunner(checkpoint, placement, kv_pages=24).memory
    # One norm per head in place of one for all queries and one for all keys, and sines and cosines.
    copies = config.layers * (config.heads + config.kv_heads - 2) * config.head_dim * 4
    table = 2 * config.max_positions * config.head_dim * 4
    assert memory.attention == of_attention + copies + table
    assert memory.other_weights == sum(dense.values()) - of_attention
    assert memory.kv_pool == 2 * config.layers * config.kv_heads * 24 * 16 * config.head_dim * 4
    assert (memory.communicators, memory.note) == (0, "")
