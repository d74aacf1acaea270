"""Checkpoint of a random Qwen3-MoE of any size, with the demo model's tokenizer. Its weights are float32, so
that an engine serves the very bytes of the file."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from deploy.demo_model import checkpoint_path
from engine_adapter.embedded.checkpoint import expected_tensors, read_config
from fleet.experts import ModelShape


class Heads(NamedTuple):
    """Heads of attention."""

    query: int = 8
    kv: int = 2
    size: int = 64


FEW_HEADS = Heads()


def write_model(folder: Path, shape: ModelShape, heads: Heads = FEW_HEADS, seed: int = 5) -> Path:
    """Write the checkpoint into an empty folder, and return the folder."""
    demo = checkpoint_path()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo / name, folder / name)
    config = json.loads((demo / "config.json").read_text()) | {
        "dtype": "float32",
        "hidden_size": shape.hidden,
        "head_dim": heads.size,
        "num_attention_heads": heads.query,
        "num_key_value_heads": heads.kv,
        "intermediate_size": shape.expert_intermediate,
        "moe_intermediate_size": shape.expert_intermediate,
        "num_hidden_layers": shape.layers,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
    }
    (folder / "config.json").write_text(json.dumps(config))
    dice = torch.Generator().manual_seed(seed)
    # A projection of n inputs keeps the size of its values if its weights are about 1 / sqrt(n).
    tensors = {
        name: torch.ones(size) if "norm" in name else torch.randn(size, generator=dice) / size[-1] ** 0.5
        for name, size in expected_tensors(read_config(folder))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def expert_bytes(shape: ModelShape, layer: int, expert: int) -> NDArray[np.uint8]:
    """Return random float32 weights of one expert, uint8 [shape.expert_bytes], the same in every process."""
    values = np.random.default_rng([layer, expert]).standard_normal(
        shape.expert_bytes // np.dtype(np.float32).itemsize, np.float32
    )
    return values.view(np.uint8)
