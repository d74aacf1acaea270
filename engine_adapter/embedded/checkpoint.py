"""Open a Hugging Face Qwen3-MoE checkpoint folder and read typed tensors. Everything is validated before the
first tensor is read."""

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from fleet.experts import ModelShape

RUN_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Compute dtypes of weights, by the name used in `ModelShape.dtype`."""

_DIGEST_PIECE = 64 * 1024 * 1024
"""Bytes hashed at a time. The GIL is released meanwhile."""

_STORED_DTYPES = ("F32", "BF16", "F16")
_EXPERT_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")
_MAX_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class CheckpointError(Exception):
    """The checkpoint cannot be served. The text names the file, the expected and the actual content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig:
    """Values of a Qwen3-MoE `config.json` that the forward pass needs. Every layer is sparse."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_intermediate: int
    normalise_top_k: bool
    """True if the k routing weights are divided by their sum."""
    rms_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    """True if the output projection is the embedding."""
    attention_bias: bool
    eos_ids: tuple[int, ...]

    def shape(self, dtype: str = "float32") -> ModelShape:
        """Return the shape for placement and cost models, for weights computed (and moved) as `dtype`."""
        return ModelShape(
            layers=self.layers,
            experts=self.experts,
            top_k=self.top_k,
            hidden=self.hidden,
            expert_intermediate=self.expert_intermediate,
            dtype=dtype,
            heads=self.heads,
            kv_heads=self.kv_heads,
        )


class StoredTensor(NamedTuple):
    """Location of a tensor: its file, shape, and dtype in safetensors' spelling."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class ExpertWeights(NamedTuple):
    """One expert in Hugging Face's layout: gate [I, H], up [I, H], down [H, I]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Checkpoint:
    """An open checkpoint folder: its config, and its tensors by name, each read on demand.

    A context manager. The files stay mapped while it is open.
    """

    def __init__(self, folder: Path) -> None:
        """Read the config and every file's header, and validate all names, shapes and dtypes. CheckpointError
        when anything is wrong."""
        self.folder = folder
        self.config = read_config(folder)
        self._stored = _stored_tensors(folder)
        _check_tensors(self.config, self._stored, folder)
        self._files: dict[Path, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._open.close()

    def digest(self, dtype: str) -> str:
        """Return the `weights_digest` of weights computed as `dtype`. CheckpointError when a file can
        no longer be read."""
        try:
            return weights_digest(
                {stored.file for stored in self._stored.values()},
                f"{self.config} computed as {dtype}, not quantised",
            )
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot read all weights: {error}") from error

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read one tensor, converted to `dtype`, into memory of its own: a view would keep the whole file
        mapped, and would change with it. CheckpointError when the file can no longer be read."""
        return self._read(name).to(dtype, copy=True)

    def expert(self, layer: int, expert: int, dtype: torch.dtype) -> ExpertWeights:
        """Read the three projections of one expert. They may be views of the file. CheckpointError as for
        `tensor`."""
        return ExpertWeights(*(self._read(name).to(dtype) for name in expert_tensor_names(layer, expert)))

    def _read(self, name: str) -> torch.Tensor:
        """Return a view of a tensor in its file."""
        stored = self._stored[name]
        try:
            if stored.file not in self._files:
                self._files[stored.file] = self._open.enter_context(safe_open(stored.file, framework="pt"))
            found: torch.Tensor = self._files[stored.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{stored.file}: cannot read tensor {name}: {error}") from error
        return found


def expert_tensor_names(layer: int, expert: int) -> tuple[str, str, str]:
    """Return the names of an expert's gate, up and down projections."""
    prefix = f"model.layers.{layer}.mlp.experts.{expert}"
    return f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight", f"{prefix}.down_proj.weight"


def expected_tensors(config: Qwen3MoeConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Iterate over (name, shape) of every tensor that a checkpoint with this config must have."""
    yield "model.embed_tokens.weight", (config.vocabulary, config.hidden)
    yield "model.norm.weight", (config.hidden,)
    if not config.tied:
        yield "lm_head.weight", (config.vocabulary, config.hidden)
    for layer in range(config.layers):
        yield from _expected_attention(config, f"model.layers.{layer}")
        yield f"model.layers.{layer}.mlp.gate.weight", (config.experts, config.hidden)
        for expert in range(config.experts):
            gate, up, down = expert_tensor_names(layer, expert)
            yield gate, (config.expert_intermediate, config.hidden)
            yield up, (config.expert_intermediate, config.hidden)
            yield down, (config.hidden, config.expert_intermediate)


def _expected_attention(config: Qwen3MoeConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.input_layernorm.weight", (config.hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (config.hidden,)
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    widths = {
        "q_proj": (queries, config.hidden),
        "k_proj": (keys, config.hidden),
        "v_proj": (keys, config.hidden),
        "o_proj": (config.hidden, queries),
    }
    for name, shape in widths.items():
        yield f"{prefix}.self_attn.{name}.weight", shape
        if config.attention_bias:
            yield f"{prefix}.self_attn.{name}.bias", shape[:1]
    yield f"{prefix}.self_attn.q_norm.weight", (config.head_dim,)
    yield f"{prefix}.self_attn.k_norm.weight", (config.head_dim,)


def expert_count(raw: Mapping[str, Any]) -> int:
    """Return the number of experts of a config, under any of its three names. CheckpointError when none is
    present or two disagree."""
    found = {name: raw[name] for name in _EXPERT_COUNT_NAMES if raw.get(name) is not None}
    if not found:
        raise CheckpointError(
            f"config.json: no expert count; expected one of {', '.join(_EXPERT_COUNT_NAMES)}"
        )
    if len(set(found.values())) > 1:
        raise CheckpointError(
            "config.json: the expert counts disagree:"
            f" {', '.join(f'{name}={value}' for name, value in found.items())}"
        )
    return _whole(raw, next(iter(found)))


def read_config(folder: Path) -> Qwen3MoeConfig:
    """Read the config of a checkpoint folder, as written by transformers 4 or 5. CheckpointError names the
    field."""
    raw = _read_json(folder / "config.json")
    if raw.get("model_type") != "qwen3_moe":
        raise CheckpointError(
            f"config.json: model_type is {raw.get('model_type')!r}; this engine serves 'qwen3_moe'"
        )
    _refuse_unsupported(raw)
    hidden, heads = _whole(raw, "hidden_size"), _whole(raw, "num_attention_heads")
    config = Qwen3MoeConfig(
        vocabulary=_whole(raw, "vocab_size"),
        hidden=hidden,
        layers=_whole(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=_whole(raw, "num_key_value_heads"),
        head_dim=_whole(raw, "head_dim", hidden // heads),
        experts=expert_count(raw),
        top_k=_whole(raw, "num_experts_per_tok"),
        expert_intermediate=_whole(raw, "moe_intermediate_size"),
        normalise_top_k=bool(raw.get("norm_topk_prob", False)),
        rms_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(raw),
        max_positions=_whole(raw, "max_position_embeddings"),
        tied=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        eos_ids=_eos_ids(raw, folder),
    )
    _check_proportions(config)
    return config


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    dense, sparse_step = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step", 1)
    if dense or sparse_step != 1:
        raise CheckpointError(
            f"config.json: mlp_only_layers={dense}, decoder_sparse_step={sparse_step}; dense layers are not"
            " supported, all must be sparse"
        )
    if raw.get("use_sliding_window") and raw.get("sliding_window"):
        raise CheckpointError(
            f"config.json: sliding_window={raw['sliding_window']}; windows are not supported, only full"
            " attention"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json: hidden_act={raw['hidden_act']!r}; only 'silu' is supported")
    if raw.get("quantization_config"):
        raise CheckpointError(
            "config.json: quantization_config is set; quantised checkpoints are not supported, give the bf16,"
            " fp16 or fp32 one"
        )


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """Read the RoPE base. transformers 5 writes rope_parameters, and 4 wrote rope_theta and rope_scaling at
    the top level."""
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise CheckpointError(
            f"config.json: rope_type is {kind!r}; only 'default' is supported, remove the scaling to serve"
            " the original context"
        )
    return _number(rope, "rope_theta") if "rope_theta" in rope else _number(raw, "rope_theta", 10_000.0)


def _eos_ids(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """Read the end-of-sequence IDs. generation_config.json, if present, takes precedence over config.json."""
    path = folder / "generation_config.json"
    ids = (_read_json(path) if path.exists() else {}).get("eos_token_id")
    ids = raw.get("eos_token_id") if ids is None else ids
    listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(one, int) for one in listed):
        raise CheckpointError(f"{folder}: eos_token_id is {ids!r}; expected a token id or a list of them")
    return tuple(listed)


def _check_proportions(config: Qwen3MoeConfig) -> None:
    if config.heads % config.kv_heads:
        raise CheckpointError(
            f"config.json: {config.heads} attention heads are not a multiple of {config.kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise CheckpointError(
            f"config.json: head_dim {config.head_dim} is odd; rotary positions need an even one"
        )
    if config.top_k > config.experts:
        raise CheckpointError(
            f"config.json: {config.top_k} experts per token, but a layer has {config.experts}"
        )


def _whole(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name} is {value!r}; expected a whole number of at least 1")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"config.json: {name} is {value!r}; expected a number above 0")
    return float(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror}; is this a checkpoint folder?"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Find all tensors of the folder, using the index if there is one."""
    if not (folder / _INDEX).exists():
        return _read_header(folder / _SINGLE)
    named = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise CheckpointError(f"{folder / _INDEX}: weight_map must map tensor names to file names")
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(named.values())):
        if Path(file).name != file:
            raise CheckpointError(
                f"{folder / _INDEX}: weight_map names {file!r}; expected a file of the checkpoint folder"
                " itself"
            )
        stored |= _read_header(folder / file)
    for name, file in named.items():
        if name not in stored or stored[name].file.name != file:
            raise CheckpointError(
                f"{folder / _INDEX}: tensor {name} is not in {file}, where the index places it"
            )
    return stored


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Read names, shapes and dtypes of one safetensors file. Check that the file is long enough for all its
    tensors."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= _MAX_HEADER_BYTES else None
            size = path.stat().st_size - 8 - length
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: its header is damaged or cut off: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: not a safetensors file (a header of {length} bytes is claimed)")
    return {name: _entry(path, name, entry, size) for name, entry in header.items() if name != "__metadata__"}


def _entry(path: Path, name: str, entry: Any, size: int) -> StoredTensor:
    try:
        shape, dtype, (_, end) = tuple(entry["shape"]), str(entry["dtype"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header entry of tensor {name} is damaged: {entry!r}") from error
    if end > size:
        raise CheckpointError(
            f"{path}: tensor {name} ends at byte {end} of the data, but the file holds {size}; it is cut off,"
            " fetch it again"
        )
    return StoredTensor(path, shape, dtype)


def _check_tensors(config: Qwen3MoeConfig, stored: Mapping[str, StoredTensor], folder: Path) -> None:
    expected = dict(expected_tensors(config))
    for name, shape in expected.items():
        found = stored.get(name)
        if found is None:
            raise CheckpointError(f"{folder}: tensor {name} is missing; expected shape {list(shape)}")
        if found.shape != shape:
            raise CheckpointError(
                f"{found.file}: tensor {name} has shape {list(found.shape)}; expected {list(shape)} from"
                " config.json"
            )
        if found.dtype not in _STORED_DTYPES:
            raise CheckpointError(
                f"{found.file}: tensor {name} is stored as {found.dtype}; expected one of"
                f" {', '.join(_STORED_DTYPES)}"
            )
    for name, found in stored.items():
        if name not in expected and not _harmless(name):
            raise CheckpointError(
                f"{found.file}: unexpected tensor {name} of shape {list(found.shape)}; a Qwen3-MoE of this"
                " config.json has none"
            )


def _harmless(name: str) -> bool:
    """True for tensors that some writers add and that change nothing: a tied output projection, and tables
    computed from the config."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def weights_digest(files: Iterable[Path], settings: str) -> str:
    """Return the xxh3-128 digest (32 hexadecimal digits) of whole safetensors files, ordered by name, and of
    the settings that change the results.

    settings: the config's values, the compute dtype, and the quantization. All bytes of the files count, so
    an edited tensor gives another digest. Equal weights in other shards also give another digest. That only
    costs a continuation and never confuses two models. The digest distinguishes checkpoints. It does not
    protect against a malicious author of checkpoints. OSError when a file cannot be read.
    """
    digest = xxhash.xxh3_128(settings.encode())
    for path in sorted(files, key=lambda path: path.name):
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            digest.update(len(path.name).to_bytes(8) + path.name.encode() + len(view).to_bytes(8))
            for start in range(0, len(view), _DIGEST_PIECE):
                with view[start : start + _DIGEST_PIECE] as piece:
                    digest.update(piece)
    return digest.hexdigest()
