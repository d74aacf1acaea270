"""Dimensions of models whose layouts are compared before there is an engine: bundled ones, and those of a
config.json in Hugging Face's form. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleet.experts import ModelShape
from fleet.layout import sharding_refusal, tp_refusal
from fleet.layout_times import LayoutName

MXFP4_BITS = 4.25
"""bits of a weight in MXFP4: 4, and a scale of 8 bits for every 32 weights"""
_ATTENTION_BYTES = 2
_STATE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Dimensions of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    query_rank: int
    latent: int
    rope: int
    """dimensions of a head that carry its position; their keys are shared by all heads"""
    nope: int
    """dimensions of a head's queries and keys without a position"""
    value: int

    @property
    def cached(self) -> int:
        """Values kept per token and layer: the latent, and the shared keys with positions."""
        return self.latent + self.rope


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsideredModel:
    """Dimensions of an MoE model. Biases and norms are left out: below 0.1 % of the weights."""

    name: str
    layers: int
    """all layers: each has attention"""
    moe_layers: int
    experts: int
    top_k: int
    expert_intermediate: int
    hidden: int
    heads: int
    kv_heads: int
    """0: latent attention, whose cache has no heads"""
    head_dim: int
    vocabulary: int
    expert_bits: float = 16.0
    scale_block: int = 0
    """intermediate rows that share a quantisation scale; 0: not quantised by block"""
    dense_bits: float = 16.0
    """bits of a weight of attention, shared experts and dense layers"""
    latent: LatentAttention | None = None
    shared_intermediate: int = 0
    """intermediate size of the shared experts of a layer, together"""
    dense_intermediate: int = 0
    """intermediate size of a layer without experts"""
    window: int = 0
    """tokens that every second layer attends to; 0: all layers attend to all tokens"""

    def __post_init__(self) -> None:
        for name in ("layers", "moe_layers", "experts", "top_k", "expert_intermediate", "hidden", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"model {self.name}: {name} must be at least 1, not {getattr(self, name)}")
        if self.top_k > self.experts or self.moe_layers > self.layers:
            raise ValueError(
                f"model {self.name}: {self.top_k} of {self.experts} experts per token, and {self.moe_layers}"
                f" MoE layers of {self.layers}: neither may exceed the whole"
            )
        if self.latent is None and self.kv_heads < 1:
            raise ValueError(
                f"model {self.name}: kv_heads must be at least 1 for attention without a latent, not"
                f" {self.kv_heads}"
            )

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert of one layer: gate, up and down, with the scales of MXFP4, without those of
        FP8 blocks (0.02 %)."""
        return 3 * self.expert_intermediate * self.hidden * self.expert_bits / 8

    @property
    def layer_bytes(self) -> float:
        """Bytes of all routed experts of a layer, in all ranks together."""
        return self.experts * self.expert_bytes

    @property
    def cached_token_bytes(self) -> int:
        """Bytes of KV of one token in all layers, 16 bits a value, each head once. A sliding window needs
        less for long contexts: layers with one are counted in full."""
        values = 2 * self.kv_heads * self.head_dim if self.latent is None else self.latent.cached
        return self.layers * values * _ATTENTION_BYTES

    @property
    def state_bytes(self) -> int:
        """Bytes of one token's hidden state between ranks."""
        return self.hidden * _STATE_BYTES

    def refusal(self, layout: LayoutName, ranks: int) -> str:
        """Return why the model cannot be served in this layout by the ranks; empty: it can."""
        if layout == "ep":
            return (
                f"{self.experts} experts are fewer than {ranks} ranks; use fewer ranks"
                if self.experts < ranks
                else ""
            )
        shape = self._shape()
        return sharding_refusal(shape, ranks) or (tp_refusal(shape, ranks) if layout == "tp" else "")

    def _shape(self) -> ModelShape:
        """Return the shape as `fleet.layout` judges it. Weights below 8 bits are judged as 8 bits: their
        blocks are what limits them."""
        dtype = "bfloat16" if self.expert_bits >= 16 else "float8_e4m3fn"
        return ModelShape(
            layers=self.moe_layers,
            experts=self.experts,
            top_k=self.top_k,
            hidden=self.hidden,
            expert_intermediate=self.expert_intermediate,
            dtype=dtype,
            scale_block=self.scale_block,
            heads=self.heads,
            kv_heads=self.kv_heads,
        )


_MODELS = (
    ConsideredModel(
        name="qwen3-235b",
        layers=94,
        moe_layers=94,
        expert_intermediate=1536,
        hidden=4096,
        heads=64,
        experts=128,
        top_k=8,
        kv_heads=4,
        head_dim=128,
        vocabulary=151_936,
    ),
    ConsideredModel(
        name="qwen3-30b",
        layers=48,
        moe_layers=48,
        expert_intermediate=768,
        hidden=2048,
        heads=32,
        experts=128,
        top_k=8,
        kv_heads=4,
        head_dim=128,
        vocabulary=151_936,
    ),
    ConsideredModel(
        name="deepseek-v3",
        layers=61,
        moe_layers=58,
        experts=256,
        top_k=8,
        expert_intermediate=2048,
        hidden=7168,
        heads=128,
        kv_heads=0,
        head_dim=0,
        vocabulary=129_280,
        expert_bits=8.0,
        scale_block=128,
        dense_bits=8.0,
        latent=LatentAttention(query_rank=1536, latent=512, rope=64, nope=128, value=128),
        shared_intermediate=2048,
        dense_intermediate=18_432,
    ),
    ConsideredModel(
        name="gpt-oss-120b",
        layers=36,
        moe_layers=36,
        experts=128,
        top_k=4,
        expert_intermediate=2880,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        vocabulary=201_088,
        expert_bits=MXFP4_BITS,
        scale_block=32,
        window=128,
    ),
    ConsideredModel(
        name="mixtral-8x7b",
        layers=32,
        moe_layers=32,
        expert_intermediate=14_336,
        hidden=4096,
        heads=32,
        vocabulary=32_000,
        experts=8,
        top_k=2,
        kv_heads=8,
        head_dim=128,
    ),
    ConsideredModel(
        name="mixtral-8x22b",
        layers=56,
        moe_layers=56,
        expert_intermediate=16_384,
        hidden=6144,
        heads=48,
        vocabulary=32_768,
        experts=8,
        top_k=2,
        kv_heads=8,
        head_dim=128,
    ),
)
MODELS: Mapping[str, ConsideredModel] = {one.name: one for one in _MODELS}
"""Bundled models, by name, after their public config.json."""


def model_of_config(name: str, raw: Mapping[str, Any]) -> ConsideredModel:
    """Read a config.json in Hugging Face's form. ValueError names what is missing or not known."""

    def number(*keys: str, default: int | None = None) -> int:
        for key in keys:
            value = raw.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        if default is None:
            raise ValueError(f"{name}: needs a whole number for {' or '.join(keys)}")
        return default

    layers, heads, hidden = (
        number(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    expert_width = number("moe_intermediate_size", "intermediate_size")
    dense = number("first_k_dense_replace", default=0) + len(raw.get("mlp_only_layers") or ())
    bits, block, dense_bits = _quantisation(name, raw.get("quantization_config"))
    latent = None
    if raw.get("kv_lora_rank"):
        latent = LatentAttention(
            query_rank=number("q_lora_rank"),
            latent=number("kv_lora_rank"),
            rope=number("qk_rope_head_dim"),
            nope=number("qk_nope_head_dim"),
            value=number("v_head_dim"),
        )
    return ConsideredModel(
        name=name,
        layers=layers,
        moe_layers=layers - dense,
        experts=number("num_experts", "num_local_experts", "n_routed_experts"),
        top_k=number("num_experts_per_tok", "experts_per_token"),
        expert_intermediate=expert_width,
        hidden=hidden,
        heads=heads,
        kv_heads=0 if latent else number("num_key_value_heads"),
        head_dim=0 if latent else number("head_dim", default=hidden // heads),
        vocabulary=number("vocab_size"),
        expert_bits=bits,
        scale_block=block,
        dense_bits=dense_bits,
        latent=latent,
        shared_intermediate=number("shared_expert_intermediate_size", default=0)
        or number("n_shared_experts", default=0) * expert_width,
        dense_intermediate=number("intermediate_size", default=0) if dense else 0,
    )


def _quantisation(name: str, stated: Mapping[str, Any] | None) -> tuple[float, int, float]:
    """Return bits of an expert's weight, rows that share a scale, and bits of other weights."""
    if not stated:
        return 16.0, 0, 16.0
    method = stated.get("quant_method")
    if method == "mxfp4":
        return MXFP4_BITS, 32, 16.0
    if method == "fp8":
        return 8.0, int((stated.get("weight_block_size") or (0,))[0]), 8.0
    raise ValueError(
        f"{name}: quantisation {method!r} is not known here, and a shuffled format cannot be cut; state fp8"
        " or mxfp4, or remove quantization_config to compare in 16 bits"
    )
