"""Tiny Qwen3-MoE checkpoints written by transformers itself. Tests load this by `runpy`."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "tie_word_embeddings": True,
    "eos_token_id": 3,
}


def write_tiny(folder, dtype=torch.float32, shard="1GB", **changes):
    """Save a random model into `folder`, with every weight (router, norms, biases) away from zero and one;
    returns it as transformers reads it, in fp32."""
    torch.manual_seed(11)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(TINY | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_experts_implementation("eager")
    return model.eval()
