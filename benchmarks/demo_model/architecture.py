"""Shape of the demo model, its byte tokenizer, and the writer of its checkpoint."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from deploy.demo_model import CONTEXT_LENGTH

__all__ = [
    "EOS_ID",
    "build_config",
    "build_model",
    "load_model",
    "router_outputs",
    "set_expert_kernel",
    "tokenizer_definition",
    "write_checkpoint",
]

ROUTER_STANDARD_DEVIATION = 0.02
EOS_ID = 0
VOCABULARY = 256

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ message['role'] + ': ' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}"
    "{{ '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"
)


def build_config() -> Qwen3MoeConfig:
    """Return the configuration: 5.29 M parameters, 4 layers of 32 experts with 4 active, 8 query heads over 2
    KV heads.

    8 query heads make tensor parallelism over 4 ranks legal, and 2 KV heads make it replicate KV heads there.
    """
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=None,
        router_aux_loss_coef=0.01,
        use_cache=True,
    )


def build_model(seed: int) -> Qwen3MoeForCausalLM:
    """Return a freshly initialised fp32 model; the same seed gives the same weights.

    transformers allocates router weights as zeros, which would tie every expert, so they are drawn here.
    """
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(build_config())
    with torch.no_grad():
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.mlp.gate.weight, std=ROUTER_STANDARD_DEVIATION)
    return model


def set_expert_kernel(model: Qwen3MoeForCausalLM, kernel: str) -> None:
    """Choose how transformers runs the experts: `grouped_mm` is fast, `eager` is the reference."""
    model.set_experts_implementation(kernel)


def load_model(folder: Path) -> Qwen3MoeForCausalLM:
    """Return a checkpoint's model for evaluation: its bf16 weights, computed in fp32 with the reference
    expert kernel."""
    model: Qwen3MoeForCausalLM = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    set_expert_kernel(model, "eager")
    return model.eval()


@contextmanager
def router_outputs(model: Qwen3MoeForCausalLM) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Collect what the routers decide in the forward passes made inside.

    Yields:
        A list that gets, per layer and pass, (router logits [tokens, experts], chosen experts [tokens, k] by
        falling weight).
    """
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    handles = [
        layer.mlp.gate.register_forward_hook(
            lambda _module, _inputs, output: seen.append((output[0], output[2]))
        )
        for layer in model.model.layers
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def write_checkpoint(model: Qwen3MoeForCausalLM, folder: Path) -> None:
    """Write `model` to `folder` in the Hugging Face layout, rounded to bf16, with the tokenizer beside it.

    The model card is not touched. `model` itself keeps its fp32 weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copy = Qwen3MoeForCausalLM(build_config())
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    _write_json(folder / "generation_config.json", {"eos_token_id": EOS_ID})
    _write_json(folder / "tokenizer.json", tokenizer_definition())
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())


def tokenizer_definition() -> dict[str, Any]:
    """Return `tokenizer.json`: 256 tokens, id == byte, no merges, byte 0 as end of sequence.

    The end-of-sequence token is spelt as the character U+0000 itself. Were it spelt as byte 0's stand-in in
    the byte-level alphabet (the letter A with macron), that letter in a text would be taken for the special
    token. Byte 0 only ever occurs in UTF-8 as U+0000, which is split off before the byte-level step, so the
    alphabet needs no entry for it.
    """
    vocabulary = {letter: byte for byte, letter in enumerate(_byte_letters())} | {"\x00": EOS_ID}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": EOS_ID, "content": "\x00", **flags}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(sorted(vocabulary.items(), key=lambda entry: entry[1])),
            "merges": [],
        },
    }


def _byte_letters() -> list[str]:
    """Return the byte-level alphabet: for each byte 0..255 the printable letter that stands for it (byte 0:
    left to the caller)."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    stand_ins = iter(range(256, 512))
    letters = [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(VOCABULARY)]
    letters[EOS_ID] = "\x00"
    return letters


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "eos_token": "\x00",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=True) + "\n", encoding="ascii")
