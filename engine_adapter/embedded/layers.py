"""Decoder layers of a rank, and their weights from a checkpoint."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine_adapter.embedded.attention import Attention, Projection
from engine_adapter.embedded.checkpoint import Checkpoint
from engine_adapter.embedded.moe import CellMatrices, SparseBlock


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention and experts of one layer, each behind a norm."""

    attention_norm: torch.Tensor
    attention: Attention
    block_norm: torch.Tensor
    block: SparseBlock

    def with_cells(self, matrices: CellMatrices, cells: NDArray[np.int32], *, sharded: bool) -> "Layer":
        """Return the layer with its experts, or parts of them, in these cells."""
        gate_up, down = matrices.of_layer(cells, sharded=sharded)
        return replace(self, block=replace(self.block, gate_up=gate_up, down=down, sharded=sharded))


def load_layer(
    checkpoint: Checkpoint,
    number: int,
    dtype: torch.dtype,
    matrices: CellMatrices,
    cells: NDArray[np.int32],
    *,
    sharded: bool,
) -> Layer:
    """Load a layer, except for its experts, which are in `cells` already. CheckpointError as for
    `Checkpoint.tensor`."""
    config, prefix = checkpoint.config, f"model.layers.{number}"

    def read(name: str) -> torch.Tensor:
        return checkpoint.tensor(f"{prefix}.{name}", dtype)

    attention = Attention(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_eps=config.rms_eps,
        qkv=(
            Projection(
                torch.cat([read(f"self_attn.{name}_proj.weight") for name in "qkv"]),
                torch.cat([read(f"self_attn.{name}_proj.bias") for name in "qkv"])
                if config.attention_bias
                else None,
            ),
        ),
        qk_norm=torch.cat(
            [
                read("self_attn.q_norm.weight").expand(config.heads, -1),
                read("self_attn.k_norm.weight").expand(config.kv_heads, -1),
            ]
        ),
        out=Projection(
            read("self_attn.o_proj.weight"),
            read("self_attn.o_proj.bias") if config.attention_bias else None,
        ),
    )
    gate_up, down = matrices.of_layer(cells, sharded=sharded)
    block = SparseBlock(
        layer=number,
        gate=read("mlp.gate.weight"),
        gate_up=gate_up,
        down=down,
        top_k=config.top_k,
        normalise=config.normalise_top_k,
        sharded=sharded,
    )
    return Layer(read("input_layernorm.weight"), attention, read("post_attention_layernorm.weight"), block)
