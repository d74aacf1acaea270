"""Router and experts: the choices of transformers' router, and results whose bits do not depend on the
company of a row."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from engine_adapter.embedded.checkpoint import Checkpoint
from engine_adapter.embedded.dispatch import GROUP_ROWS, group_by_slot
from engine_adapter.embedded.model_runner import ModelRunner
from engine_adapter.embedded.moe import GroupedMatrices, NonEmpty, route
from fleet.placement import linear
from tests.engine_adapter.layer_forms import TORCH, computed_by

DEMO = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
write_tiny = runpy.run_path(str(Path(__file__).parents[1] / "tiny_models.py"))["write_tiny"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def runner():
    with Checkpoint(DEMO) as checkpoint:
        placement = linear(layers=checkpoint.config.layers, experts=checkpoint.config.experts, ranks=1)
        return ModelRunner(checkpoint, placement, kv_pages=600)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_router_chooses_and_weighs_as_transformers_does(normalise):
    torch.manual_seed(5)
    theirs = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=48, num_experts=16, num_experts_per_tok=4, norm_topk_prob=normalise)
    )
    theirs.weight.data.normal_(0, 0.3)
    hidden = torch.randn(200, 48)
    with torch.no_grad():
        _, weights, experts = theirs(hidden)
    ours = route(hidden, theirs.weight.detach(), 4, normalise)
    assert np.array_equal(ours.experts, experts.numpy())
    assert (ours.weights - weights).abs().max() < 1e-6


@settings(deadline=None)
@given(st.lists(st.integers(0, 15), min_size=1, max_size=80), st.integers(0, 2**32 - 1))
@computed_by(TORCH)
def test_by_torch_grouped_products_are_those_of_grouped_mm_bit_for_bit(slots, seed):
    generator = torch.Generator().manual_seed(seed)
    arena = torch.randn(16, 3 * 24, 32, generator=generator)
    groups = group_by_slot(np.array(slots), 16)
    rows = torch.randn(len(groups.pair_of_row), 32, generator=generator)
    ends = torch.from_numpy(groups.ends)
    for matrices, given_rows in ((arena[:, :48].transpose(1, 2), rows), (arena[:, 48:], rows[:, :24])):
        found = GroupedMatrices(matrices.unbind()).product(given_rows, ends)
        assert torch.equal(found, torch.nn.functional.grouped_mm(given_rows, matrices, offs=ends))
        slot_of_row = np.searchsorted(groups.ends, np.arange(len(rows)), side="right")
        exact = torch.stack(
            [
                row.double() @ matrices[slot].double()
                for row, slot in zip(given_rows, slot_of_row, strict=True)
            ]
        )
        assert (found - exact).abs().max() < 1e-4


@settings(deadline=None)
@given(st.lists(st.integers(0, 15), max_size=40))
def test_the_non_empty_groups_are_listed(slots):
    groups = group_by_slot(np.array(slots, np.int64), 16)
    listed = NonEmpty.of(torch.from_numpy(groups.ends))
    assert listed.slots == sorted(set(slots))
    assert listed.sizes == [max(GROUP_ROWS, slots.count(slot)) for slot in listed.slots]


def block_of(runner, layer):
    return runner.prepare(runner.placement, runner.cells).layers[layer].block


def test_an_expert_computes_a_row_to_the_same_bits_in_any_company(runner):
    torch.manual_seed(6)
    block = block_of(runner, 1)
    rows = torch.randn(120, runner.config.hidden)
    for count in (4, 5, 7, 16, 33, 120):
        for slot in (0, 31):
            ends = torch.zeros(32, dtype=torch.int32)
            ends[slot:] = count
            assert torch.equal(
                block.compute(rows[:count], ends)[:4], block.compute(rows[:4], ends.clamp(max=4))
            )


def test_a_bf16_block_groups_as_fp32_does(tmp_path):
    write_tiny(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        placement = linear(layers=2, experts=6, ranks=1)
        blocks = [
            block_of(ModelRunner(checkpoint, placement, kv_pages=4, dtype=dtype), 0)
            for dtype in ("float32", "bfloat16")
        ]
    groups = group_by_slot(np.array([0, 5, 5, 2, 2, 2, 2, 2]), 6)
    rows = torch.randn(len(groups.pair_of_row), 32)
    exact, rough = (
        block.compute(rows.to(dtype), torch.from_numpy(groups.ends))
        for block, dtype in zip(blocks, (torch.float32, torch.bfloat16), strict=True)
    )
    assert ((exact - rough.float()).norm() / exact.norm()) < 0.02
