"""Model shapes for simulation, and the cost of their work on a GPU. Pure."""

from typing import NamedTuple

from fleet.experts import ModelShape
from fleet.timing import EngineSpeed

HBM_BYTES_PER_SECOND = 2.7e12
"""Achieved bandwidth for weights and caches, of an H100 SXM's 3.35 TB/s."""
FLOPS = 8e14
"""Achieved rate of dense fp8 work: 40 % of 1,979 TFLOPS."""
ATTENTION_FLOPS = 4e14
"""Achieved rate of attention in bf16: 40 % of 989 TFLOPS."""
NVLINK_BYTES_PER_SECOND = 450e9
"""NVLink 4, one direction."""
RDMA_BYTES_PER_SECOND = 50e9
"""One 400 Gbit/s port per GPU."""
_PAIR_FLOPS = 2 * 3
"""Operations of a (token, expert) pair per element of an expert's matrix: a product and a sum in each of
three matrices."""
LAYER_SECONDS = 6e-5
"""Two nearly empty collectives of a MoE layer, at tens of microseconds each."""


class Preset(NamedTuple):
    """Cost-relevant properties of a model. Bytes and operations are those of one rank when every rank holds
    all attention weights."""

    shape: ModelShape
    active_flops: float
    """Operations per token: twice the active parameters."""
    dense_bytes: float
    """Bytes of weights that every decode step reads, whatever the batch: all but routed experts."""
    cache_token_bytes: float
    """Bytes of KV cache per token."""
    pair_flops: float
    """Operations of attention per pair of a computed token and a token that it attends to."""


PRESETS = {
    "deepseek-v3": Preset(
        # The model's gate selects 4 of 8 groups. The simulated gate draws experts freely, so the shape has no
        # groups.
        ModelShape(
            layers=58, experts=256, top_k=8, hidden=7168, expert_intermediate=2048, dtype="float8_e4m3fn"
        ),
        active_flops=74e9,
        dense_bytes=17e9,
        cache_token_bytes=70_272,
        pair_flops=2 * 61 * 128 * (192 + 128),
    ),
    "qwen3-235b": Preset(
        ModelShape(
            layers=94, experts=128, top_k=8, hidden=4096, expert_intermediate=1536, dtype="float8_e4m3fn"
        ),
        active_flops=44e9,
        dense_bytes=8e9,
        cache_token_bytes=2 * 94 * 4 * 128 * 2,
        pair_flops=2 * 94 * 64 * (128 + 128),
    ),
}
DEMO_SHAPE = ModelShape(layers=4, experts=32, top_k=4, hidden=192, expert_intermediate=64, dtype="bfloat16")
DEMO_CACHE_TOKEN_BYTES = 4 * 2 * 2 * 32 * 2
SHAPES = {name: preset.shape for name, preset in PRESETS.items()} | {"demo": DEMO_SHAPE}


def speed_of(name: str, block_size: int, *, several_machines: bool = False) -> EngineSpeed:
    """Return the speeds of a rank of this model on an H100 in an 8-GPU machine. The demo model has those of a
    small CPU engine.

    Follows the constants of Roost's cost model. Token reads cost KV bytes / HBM bandwidth. Distinct experts
    cost expert bytes / HBM bandwidth. Each (token, destination) sends H bytes of fp8 with a scale per 128 and
    returns 2H bytes of bf16, over NVLink within a machine and RDMA between machines. Collectives of sharded
    layers move their bytes over the slowest of these links. Arithmetic runs at 40 %
    of the peak, including a rank's load above the mean. The fixed part of a decode step is the dense weights
    and two small collectives per layer.
    """
    if name not in PRESETS:
        return EngineSpeed()
    about = PRESETS[name]
    hidden = about.shape.hidden
    copy_bytes = hidden + 4 * hidden // 128 + 2 * hidden
    token = about.active_flops / FLOPS
    return EngineSpeed(
        prefill_token=token,
        prefill_pair=about.pair_flops / ATTENTION_FLOPS,
        step=about.dense_bytes / HBM_BYTES_PER_SECOND + about.shape.layers * LAYER_SECONDS,
        decode_sequence=token,
        decode_block=block_size * about.cache_token_bytes / HBM_BYTES_PER_SECOND,
        dispatch=copy_bytes / NVLINK_BYTES_PER_SECOND,
        dispatch_node=copy_bytes / RDMA_BYTES_PER_SECOND,
        expert_read=about.shape.expert_bytes / HBM_BYTES_PER_SECOND,
        expert_pair=_PAIR_FLOPS * hidden * about.shape.expert_intermediate / FLOPS,
        gather_byte=1.0 / (RDMA_BYTES_PER_SECOND if several_machines else NVLINK_BYTES_PER_SECOND),
    )


def cache_token_bytes(name: str) -> int:
    """Bytes of KV cache per token of this model, over all layers."""
    return int(PRESETS[name].cache_token_bytes) if name in PRESETS else DEMO_CACHE_TOKEN_BYTES
