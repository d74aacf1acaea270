"""Training, evaluation and data of the demo model (`deploy.demo_model`): benchmarks and tests replay its
recorded routings.

The package itself contains only paths, so importing it loads no torch, transformers or numpy. The modules
(`corpus`, `architecture`, `train`, `evaluate`, `record_routings`) regenerate everything these paths and the
checkpoint's point to; they need the extra `train`.
"""

from pathlib import Path

__all__ = ["DOMAINS", "heldout_path", "routings_path"]

DOMAINS = ("python", "c", "perl", "en", "de", "fr", "ru", "ja", "html")
"""The domains of text the model was trained on; `routings_path` numbers them in this order."""

_HERE = Path(__file__).resolve().parent


def heldout_path() -> Path:
    """Return the folder of held-out documents; `manifest.json` in it names file, domain, licence and source
    of each."""
    return _HERE / "heldout"


def routings_path() -> Path:
    """Return the recorded routings (`.npz`; its arrays are described in `record_routings`)."""
    return _HERE / "routings.npz"
