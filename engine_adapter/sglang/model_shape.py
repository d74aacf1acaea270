"""Shape of a model's experts from its config.json, and the layers that have experts. Pure.

SGLang numbers all layers of a model, Roost those with experts only."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fleet.experts import BYTES_PER_VALUE, ModelShape

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token")
_WIDTH = ("moe_intermediate_size", "intermediate_size")


class SglangModel(NamedTuple):
    """Experts of a model as SGLang counts its layers."""

    shape: ModelShape
    all_layers: int
    expert_layers: tuple[int, ...]
    """Numbers of the layers with experts, among all."""


def model_of(config: Mapping[str, Any]) -> SglangModel | None:
    """Read a config.json in Hugging Face's form. None: the model has no experts, or does not say how many."""
    inner = config.get("text_config")
    raw = inner if isinstance(inner, Mapping) else config
    experts, top_k, width = (_first(raw, names) for names in (_EXPERTS, _TOP_K, _WIDTH))
    layers, hidden = _first(raw, ("num_hidden_layers",)), _first(raw, ("hidden_size",))
    if not (experts and top_k and width and layers and hidden):
        return None
    sparse = tuple(layer for layer in range(layers) if _has_experts(raw, layer))
    if not sparse or top_k > experts:
        return None
    dtype = str(raw.get("torch_dtype") or raw.get("dtype") or "")
    stored = "float8_e4m3fn" if raw.get("quantization_config") else dtype
    shape = ModelShape(
        layers=len(sparse),
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        expert_intermediate=width,
        dtype=stored if stored in BYTES_PER_VALUE else "bfloat16",
    )
    return SglangModel(shape, layers, sparse)


def _first(raw: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((raw[name] for name in names if type(raw.get(name)) is int and raw[name] > 0), 0)


def _has_experts(raw: Mapping[str, Any], layer: int) -> bool:
    """Return True for a layer with experts: DeepSeek's models begin with dense ones, Qwen's may list them or
    have experts in each n-th layer only."""
    dense = raw.get("mlp_only_layers")
    listed = dense if isinstance(dense, list) else []
    every = _first(raw, ("decoder_sparse_step", "moe_layer_freq")) or 1
    first = _first(raw, ("first_k_dense_replace",))
    offset = 0 if "moe_layer_freq" in raw else 1
    return layer >= first and layer not in listed and (layer + offset) % every == 0
