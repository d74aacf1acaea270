"""Sizes, memory and switch times of considered models: the arithmetic of published dimensions, and laws that
hold for every model."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.layout import head_groups
from migration.hardware.machines import MACHINES, machine_named
from migration.hardware.memory import kv_capacity, memory_table
from migration.hardware.models import MODELS, ConsideredModel, model_of_config
from migration.hardware.sizes import attention_bytes, expert_sizes, kv_sizes
from migration.hardware.switch_times import switch_times

KIB = 1024
H200 = MACHINES["h200-nvl"]

FLOORS = [
    # GB per GPU, GB moved, ms at 450 GB/s, s over one 400G port per GPU and per node, MB of a spare layer
    ("qwen3-235b", 56.77, 49.68, 110, 0.99, 7.95, 604),
    ("deepseek-v3", 81.74, 71.52, 159, 1.43, 11.4, 1409),
    ("qwen3-30b", 7.25, 6.34, 14.1, 0.127, 1.01, 151),
    ("gpt-oss-120b", 7.61, 6.66, 14.8, 0.133, 1.07, 212),
    ("mixtral-8x7b", 11.27, 9.87, 21.9, 0.197, 1.58, 352),
    ("mixtral-8x22b", 33.82, 29.60, 65.8, 0.592, 4.74, 604),
]
KV = [
    # KiB per token in EP, in TP, moved to TP, moved to EP, and ranks with the same head
    ("qwen3-235b", 188, 376, 329, 141, 2),
    ("qwen3-30b", 96, 192, 168, 72, 2),
    ("deepseek-v3", 68.6, 549, 480, 0, 8),
    ("gpt-oss-120b", 72, 72, 63, 63, 1),
    ("mixtral-8x7b", 128, 128, 112, 112, 1),
    ("mixtral-8x22b", 224, 224, 196, 196, 1),
]


@pytest.mark.parametrize(("name", "gpu", "moved", "nvlink", "port", "node", "spare"), FLOORS)
def test_experts_and_their_floors_are_those_of_the_published_dimensions(
    name: str, gpu: float, moved: float, nvlink: float, port: float, node: float, spare: float
) -> None:
    model = MODELS[name]
    sizes = expert_sizes(model, 8)
    assert (sizes.total / 1e9, sizes.moved / 1e9) == pytest.approx((gpu, moved), rel=2e-3)
    assert sizes.layer / 1e6 == pytest.approx(spare, rel=3e-3)
    times = {time.rate.name: time.weights for time in switch_times(model, H200, 8)}
    assert times["NVLink, line rate"] == pytest.approx(nvlink / 1e3, rel=5e-3)
    assert times["InfiniBand, one 400G port per GPU"] == pytest.approx(port, rel=7e-3)
    assert times["InfiniBand, one 400G port per node"] == pytest.approx(node, rel=7e-3)


@pytest.mark.parametrize(("name", "ep", "tp", "to_tp", "to_ep", "copies"), KV)
def test_kv_of_a_token_by_layout_and_direction(
    name: str, ep: float, tp: float, to_tp: float, to_ep: float, copies: int
) -> None:
    kv = kv_sizes(MODELS[name], 8)
    found = (kv.ep / KIB, kv.tp / KIB, kv.moved_to_tp / KIB, kv.moved_to_ep / KIB)
    assert found == pytest.approx((ep, tp, to_tp, to_ep), abs=0.5)
    assert kv.copies == copies
    assert (kv.moved("tp"), kv.moved("ep")) == (kv.moved_to_tp, kv.moved_to_ep)


@given(
    heads=st.sampled_from([1, 2, 4, 8, 16]),
    ranks=st.sampled_from([2, 4, 8, 16]),
    owner=st.integers(0, 15),
    reader=st.integers(0, 15),
)
def test_moved_kv_is_what_ranks_lack_counted_one_by_one(
    heads: int, ranks: int, owner: int, reader: int
) -> None:
    """Oracle: the head groups that each rank must hold, beside those that it holds."""
    model = ConsideredModel(
        name="m", layers=1, moe_layers=1, experts=16, top_k=2, expert_intermediate=64, hidden=64,
        heads=16, kv_heads=heads, head_dim=8, vocabulary=10,
    )  # fmt: skip
    kv, groups = kv_sizes(model, ranks), head_groups(ranks, heads)
    unit = kv.ep / groups
    held = [rank * groups // ranks for rank in range(ranks)]
    to_tp = sum(1 for rank in range(ranks) if rank != owner % ranks)
    to_ep = sum(1 for group in range(groups) if group != held[reader % ranks])
    assert (kv.moved_to_tp, kv.moved_to_ep) == pytest.approx((to_tp * unit, to_ep * unit))
    assert kv.tp == pytest.approx(ranks * unit)
    assert kv.copies == ranks // groups


@pytest.mark.parametrize("name", MODELS)
def test_memory_adds_up_and_half_the_kv_fits_where_two_ranks_hold_the_same_head(name: str) -> None:
    model, table = MODELS[name], memory_table(MODELS[name], H200, 8)
    assert sum(line.bytes or 0 for line in table.lines) + table.kv_pool == pytest.approx(0.85 * 141e9)
    ep, tp = (kv_capacity(model, table, 8, layout) for layout in ("ep", "tp"))
    assert tp.engine / ep.engine == pytest.approx(1 / kv_sizes(model, 8).copies, rel=1e-4)
    assert ep.request == ep.engine // 8
    assert kv_capacity(model, table, 8, "experts-tp") == ep
    spare = expert_sizes(model, 8).layer
    assert memory_table(model, H200, 8, spare_layers=3).kv_pool == pytest.approx(table.kv_pool - 2 * spare)


def test_both_copies_of_attention_are_listed() -> None:
    model = MODELS["qwen3-235b"]
    assert attention_bytes(model) / 1e9 == pytest.approx(13.40, abs=0.01)
    assert attention_bytes(model, 8) / 1e9 == pytest.approx(1.774, abs=1e-3), "a KV head is on two ranks"
    assert memory_table(model, H200, 8).for_switching / 1e9 == pytest.approx(2.79, abs=0.01)


@given(name=st.sampled_from(sorted(MODELS)), ranks=st.sampled_from([2, 4, 8]))
def test_more_ranks_hold_less_each_and_slower_links_take_longer(name: str, ranks: int) -> None:
    model = MODELS[name]
    few, many = expert_sizes(model, ranks), expert_sizes(model, 2 * ranks)
    assert many.total <= few.total
    assert many.moved / many.total >= few.moved / few.total
    times = [(time.rate.bytes_per_second, time.weights) for time in switch_times(model, H200, ranks)]
    known = sorted((rate, seconds) for rate, seconds in times if rate is not None and seconds is not None)
    assert [seconds for _, seconds in known] == sorted((seconds for _, seconds in known), reverse=True)


def test_between_two_nodes_half_of_the_experts_cross_the_network() -> None:
    times = {time.rate.name: time.weights for time in switch_times(MODELS["qwen3-235b"], H200, 16)}
    assert times["InfiniBand, one 400G port per GPU"] == pytest.approx(0.284, rel=2e-3), "14.2 GB"
    assert times["NVLink, line rate"] == pytest.approx(0.0276, rel=2e-3), "the rest, at the same time"


def test_a_rate_without_a_published_figure_gives_no_time() -> None:
    times = {time.rate.name: time for time in switch_times(MODELS["qwen3-30b"], MACHINES["b200"], 8)}
    measured = times["NVLink, measured with NCCL"]
    assert (measured.weights, measured.kv_to_tp, measured.kv_to_ep) == (None, None, None)
    assert times["NVLink, line rate"].weights is not None


def test_quantisation_blocks_and_heads_refuse_layouts() -> None:
    config = {
        "num_hidden_layers": 94, "num_attention_heads": 64, "hidden_size": 4096, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936,
    }  # fmt: skip
    assert model_of_config("qwen3-235b", config) == MODELS["qwen3-235b"]
    blocks = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    fp8 = model_of_config("fp8", config | blocks)
    assert [fp8.refusal("tp", ranks) == "" for ranks in (2, 4, 8)] == [True, True, False]
    assert "a part of 192" in fp8.refusal("experts-tp", 8)
    assert fp8.refusal("ep", 8) == ""
    assert fp8.expert_bytes * 2 == MODELS["qwen3-235b"].expert_bytes
    assert "32 rows" in MODELS["gpt-oss-120b"].refusal("tp", 8)
    assert MODELS["gpt-oss-120b"].refusal("tp", 2) == ""
    assert all(not MODELS["deepseek-v3"].refusal("tp", ranks) for ranks in (2, 4, 8))
    assert "64 attention heads" in model_of_config("m", config).refusal("tp", 96)
    assert "fewer than 256 ranks" in model_of_config("m", config).refusal("ep", 256)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"num_experts": None}, "num_experts or num_local_experts"),
        ({"num_experts_per_tok": 200}, "200 of 128 experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq' is not known"),
        ({"num_key_value_heads": 0}, "kv_heads must be at least 1"),
    ],
)
def test_a_config_that_cannot_be_read_says_what_is_wrong(wrong: dict[str, object], names: str) -> None:
    config = {
        "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 64, "num_key_value_heads": 4, "vocab_size": 100,
    }  # fmt: skip
    with pytest.raises(ValueError, match=names):
        model_of_config("m", {**config, **wrong})


def test_unknown_hardware_names_what_is_known() -> None:
    with pytest.raises(ValueError, match="'v100' is not known; use one of h200-nvl"):
        machine_named("v100")


def test_latent_attention_is_cached_once_per_rank() -> None:
    model = MODELS["deepseek-v3"]
    assert model.cached_token_bytes == 61 * 576 * 2
    assert math.isclose(attention_bytes(model) / 61, 187.1e6, rel_tol=1e-2), (
        "weights of a layer, one byte each"
    )
