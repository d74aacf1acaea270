"""Model shapes that can be simulated, and what their work costs on a GPU. Pure."""

from typing import NamedTuple

from fleet.experts import ModelShape
from fleet.timing import EngineSpeed

HBM_BYTES_PER_SECOND = 2.7e12
"""what reading weights and caches gets out of an H100 SXM's 3.35 TB/s"""
FLOPS = 8e14
"""what dense fp8 work gets out of its 1,979 TFLOPS: 40 %"""
ATTENTION_FLOPS = 4e14
"""what attention gets out of its 989 TFLOPS in bf16: 40 %"""
NVLINK_BYTES_PER_SECOND = 450e9
"""NVLink 4, one direction"""
RDMA_BYTES_PER_SECOND = 50e9
"""one 400 Gbit/s port per GPU"""
_PAIR_FLOPS = 2 * 3
"""of a (token, expert) pair, per number of an expert's matrix: a product and a sum, in each of three matrices"""
LAYER_SECONDS = 6e-5
"""two collectives of a MoE layer that carry next to nothing: tens of microseconds each"""


class Preset(NamedTuple):
    """A model as far as its time matters. Bytes and operations are those of one rank where every rank has the whole of attention."""

    shape: ModelShape
    active_flops: float
    """per token: twice the active parameters"""
    dense_bytes: float
    """weights that every decode step reads whatever the batch: all but routed experts"""
    cache_token_bytes: float
    """KV cache of a token"""
    pair_flops: float
    """of attention, per pair of a computed token and one that it attends to"""


PRESETS = {
    "deepseek-v3": Preset(
        # its gate takes 4 of 8 groups; the simulated one draws experts freely, so the shape says nothing of groups
        ModelShape(layers=58, experts=256, top_k=8, hidden=7168, expert_intermediate=2048, dtype="float8_e4m3fn"),
        active_flops=74e9,
        dense_bytes=17e9,
        cache_token_bytes=70_272,
        pair_flops=2 * 61 * 128 * (192 + 128),
    ),
    "qwen3-235b": Preset(
        ModelShape(layers=94, experts=128, top_k=8, hidden=4096, expert_intermediate=1536, dtype="float8_e4m3fn"),
        active_flops=44e9,
        dense_bytes=8e9,
        cache_token_bytes=2 * 94 * 4 * 128 * 2,
        pair_flops=2 * 94 * 64 * (128 + 128),
    ),
}
DEMO_SHAPE = ModelShape(layers=4, experts=32, top_k=4, hidden=192, expert_intermediate=64, dtype="bfloat16")
DEMO_CACHE_TOKEN_BYTES = 4 * 2 * 2 * 32 * 2
SHAPES = {name: preset.shape for name, preset in PRESETS.items()} | {"demo": DEMO_SHAPE}


def speed_of(name: str, block_size: int) -> EngineSpeed:
    """The speeds of a rank of this model on an H100 of an 8-GPU machine; of the demo model: a small CPU engine's.

    After the constants of Roost's cost model: KV bytes / HBM bandwidth per token read, expert bytes / HBM bandwidth per distinct expert, and per
    (token, destination) H bytes of fp8 with a scale per 128 out and 2H of bf16 back, over NVLink within a machine and RDMA between
    machines. Arithmetic runs at 40 % of the peak, also that of what a rank serves above the mean. A decode step's fixed part is the dense
    weights and two small collectives per layer.
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
    )


def cache_token_bytes(name: str) -> int:
    """Bytes of KV cache that a token of this model takes, with all layers."""
    return int(PRESETS[name].cache_token_bytes) if name in PRESETS else DEMO_CACHE_TOKEN_BYTES
