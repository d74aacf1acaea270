"""The demo model: a small byte-level Qwen3-MoE with real routing skew, and its data.

This package contains only paths, so importing it loads no torch, transformers or numpy. The modules beside it
(`corpus`, `architecture`, `train`, `evaluate`, `record_routings`) regenerate everything these paths point to;
they need the extra `train`.
"""

from pathlib import Path

__all__ = ["CONTEXT_LENGTH", "DOMAINS", "checkpoint_path", "heldout_path", "routings_path"]

CONTEXT_LENGTH = 2048
"""Longest sequence the model accepts, in tokens (one token is one byte)."""

DOMAINS = ("python", "c", "perl", "en", "de", "fr", "ru", "ja", "html")
"""The domains of text the model was trained on; `routings_path` numbers them in this order."""

_HERE = Path(__file__).resolve().parent


def checkpoint_path() -> Path:
    """Return the folder of the Hugging Face checkpoint (config, bf16 safetensors, tokenizer, model card)."""
    return _HERE / "checkpoint"


def heldout_path() -> Path:
    """Return the folder of held-out documents; `manifest.json` in it names file, domain, licence and source
    of each."""
    return _HERE / "heldout"


def routings_path() -> Path:
    """Return the recorded routings (`.npz`; its arrays are described in `record_routings`)."""
    return _HERE / "routings.npz"
