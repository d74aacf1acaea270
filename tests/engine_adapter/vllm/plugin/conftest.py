"""The plugin is a distribution of its own and is not installed here: its tests import it by path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4] / "engine_adapter" / "vllm" / "plugin"))
