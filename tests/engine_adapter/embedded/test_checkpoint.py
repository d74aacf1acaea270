"""Checkpoint folders: every form that transformers writes is read, and every damage is named."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_adapter.embedded.checkpoint import Checkpoint, CheckpointError, read_config
from engine_adapter.embedded.model_runner import ModelRunner, SequenceWork
from fleet.placement import linear

write_tiny = runpy.run_path(str(Path(__file__).parents[1] / "tiny_models.py"))["write_tiny"]
QUERY = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.0.mlp.experts.5.down_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


@pytest.fixture
def folder(pristine, tmp_path):
    return Path(shutil.copytree(pristine, tmp_path / "checkpoint"))


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def logits_of(folder, tokens, dtype="float32"):
    with Checkpoint(folder) as checkpoint:
        placement = linear(layers=checkpoint.config.layers, experts=checkpoint.config.experts, ranks=1)
        runner = ModelRunner(checkpoint, placement, kv_pages=64, dtype=dtype)
    work = [
        SequenceWork(tokens[: end + 1], 0, [2 * end, 2 * end + 1], needs_logits=True)
        for end in range(len(tokens))
    ]
    return runner.forward(work).logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"norm_topk_prob": False},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"shard": "20KB"},
        {"num_experts": 300, "num_experts_per_tok": 8, "hidden_size": 16},
    ],
    ids=lambda changes: next(iter(changes), "as-is"),
)
def test_every_variant_computes_what_transformers_computes(tmp_path, changes):
    model = write_tiny(tmp_path, **changes)
    tokens = torch.randint(0, 61, (24,)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    assert (logits_of(tmp_path, tokens) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_computed_in_fp32_unless_told_otherwise(tmp_path, stored):
    model = write_tiny(tmp_path, stored)
    tokens = list(range(20, 40))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    assert (logits_of(tmp_path, tokens) - expected).abs().max() < 1e-4


def test_a_bf16_run_stays_near_the_fp32_one(pristine):
    tokens = list(range(20, 40))
    exact, rough = logits_of(pristine, tokens), logits_of(pristine, tokens, "bfloat16")
    assert rough.dtype == torch.float32
    # near ties of the router may pick another expert in bf16, so the typical distance is compared, not the
    # largest
    assert (exact - rough).abs().median() < 0.03 * exact.abs().median()


def test_shards_are_found_through_the_index(tmp_path):
    write_tiny(tmp_path, shard="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.expert(1, 5, torch.float32).down.shape == (32, 16)


def test_a_missing_shard_is_named(tmp_path):
    write_tiny(tmp_path, shard="20KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        Checkpoint(tmp_path)


def test_configs_of_transformers_4_are_read(folder):
    raw = json.loads((folder / "config.json").read_text())
    change_config(
        folder,
        rope_parameters=...,
        rope_theta=5000.0,
        rope_scaling=None,
        dtype=...,
        torch_dtype="float32",
        num_local_experts=...,
        num_experts=6,
    )
    assert "rope_parameters" in raw
    assert read_config(folder).rope_theta == 5000.0
    assert read_config(folder).experts == 6


@pytest.mark.parametrize("window", [0, None, False])
def test_a_sliding_window_that_is_off_is_no_window(folder, window):
    change_config(folder, sliding_window=window, use_sliding_window=True)
    assert read_config(folder).layers == 2


def test_the_generation_config_knows_what_ends_an_answer(folder):
    assert read_config(folder).eos_ids == (3,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert read_config(folder).eos_ids == (7, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "disagree: num_experts=8, num_local_experts=6"),
        ({"num_local_experts": ...}, "no expert count"),
        ({"mlp_only_layers": [1]}, "every layer|all must be sparse"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"sliding_window": 128, "use_sliding_window": True}, "sliding_window=128"),
        ({"model_type": "llama"}, "'llama'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is None"),
        ({"num_key_value_heads": 3}, "multiple of 3"),
        ({"num_experts_per_tok": 7}, "7 experts per token"),
        ({"vocab_size": 62}, r"embed_tokens.weight has shape \[61, 32\]; expected \[62, 32\]"),
        ({"num_hidden_layers": 3}, "model.layers.2.* is missing"),
        ({"num_hidden_layers": 1}, "unexpected tensor model.layers.1"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder)


def test_a_folder_without_a_config_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="is this a checkpoint folder"):
        Checkpoint(tmp_path)


def test_a_config_that_is_not_json_is_named(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not JSON"):
        Checkpoint(folder)


@pytest.mark.parametrize("name", [QUERY, EXPERT, "model.norm.weight"])
def test_a_missing_tensor_is_named_with_the_shape_it_should_have(folder, name):
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"{name} is missing; expected shape \["):
        Checkpoint(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes_and_its_file(folder):
    change_tensors(folder, lambda tensors: tensors.update({EXPERT: torch.zeros(16, 32)}))
    with pytest.raises(
        CheckpointError,
        match=rf"model.safetensors: tensor {EXPERT} has shape \[16, 32\]; expected \[32, 16\]",
    ):
        Checkpoint(folder)


def test_a_tensor_of_a_dtype_that_is_not_supported_is_named(folder):
    change_tensors(folder, lambda tensors: tensors.update({QUERY: tensors[QUERY].to(torch.float8_e4m3fn)}))
    with pytest.raises(
        CheckpointError, match=f"{QUERY} is stored as F8_E4M3; expected one of F32, BF16, F16"
    ):
        Checkpoint(folder)


def test_a_tensor_nobody_would_read_is_refused(folder):
    change_tensors(folder, lambda tensors: tensors.update({QUERY.replace("weight", "bias"): torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=r"unexpected tensor model\.layers\.1\.self_attn\.q_proj\.bias"):
        Checkpoint(folder)


@pytest.mark.parametrize("kept", [0.0, 0.00005, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused(folder, kept):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(
        CheckpointError,
        match=(
            r"model.safetensors: (tensor model\S+ ends at byte \d+ .* cut off|its header is damaged|not a"
            r" safetensors)"
        ),
    ):
        Checkpoint(folder)


def test_a_file_of_something_else_is_refused(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        Checkpoint(folder)


def test_an_index_may_not_lead_out_of_the_folder(folder):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {QUERY: "../model.safetensors"}})
    )
    with pytest.raises(CheckpointError, match="a file of the checkpoint folder itself"):
        Checkpoint(folder)


def test_an_index_that_names_the_wrong_file_is_refused(folder):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.absent": "model.safetensors"}})
    )
    with pytest.raises(
        CheckpointError, match=r"tensor model.absent is not in model.safetensors, where the index places it"
    ):
        Checkpoint(folder)


def digest_of(folder, dtype="float32"):
    with Checkpoint(folder) as checkpoint:
        return checkpoint.digest(dtype)


def test_equal_weights_have_one_digest_wherever_they_lie(pristine, folder):
    assert digest_of(pristine) == digest_of(folder)


def test_one_changed_number_of_one_tensor_is_another_digest(folder):
    before = digest_of(folder)

    def change(tensors):
        tensors[EXPERT].view(-1)[-1] += 1.0

    change_tensors(folder, change)
    assert digest_of(folder) != before


def test_another_dtype_and_another_number_of_the_config_are_other_digests_but_a_writers_version_is_not(
    folder,
):
    before = digest_of(folder)
    assert digest_of(folder, "bfloat16") != before
    change_config(folder, transformers_version="99.0")
    assert digest_of(folder) == before
    change_config(folder, rms_norm_eps=2e-6)
    assert digest_of(folder) != before


def test_a_file_that_changes_while_its_weights_are_served_changes_nothing(folder):
    """The weights are served in the type in which they are stored, so that they could stay where they are."""
    file = folder / "model.safetensors"
    with Checkpoint(folder) as checkpoint:
        placement = linear(layers=checkpoint.config.layers, experts=checkpoint.config.experts, ranks=1)
        runner = ModelRunner(checkpoint, placement, kv_pages=4)
    work = [SequenceWork([5, 7, 11], 0, [0], needs_logits=True)]
    before = runner.forward(work).logits
    assert str(file) not in Path("/proc/self/maps").read_text(), "the whole file stays in memory"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert torch.equal(runner.forward(work).logits, before)
