"""Differences between greedy answers: a tie that rounding decides, or a real one.

vLLM adds the products of a token's experts by rank, so another map adds them in another order, and the last
bits of the logits differ. Where the two best tokens are as close as that, either may be chosen.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.sections import DEMO_CHECKPOINT

TIE = 1e-4
"""difference of two logits, in nats, that rounding explains: fp32 logits of the demo model differ by up to
1.5e-5 between batch sizes"""


class Judge:
    """transformers' forward pass of the demo model, in fp32 on one thread. A byte is a token of it."""

    def __init__(self, checkpoint: Path = DEMO_CHECKPOINT) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def is_tie(self, prompt: Sequence[int], one: str, other: str) -> bool:
        """Return whether the first tokens that differ are as good as each other. Bytes that are no text
        before them hide what was said: then it is no tie."""
        mine, its = one.encode(), other.encode()
        at = next((at for at, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b), None)
        if at is None or "\ufffd" in mine[: at + 4].decode(errors="ignore"):
            return False
        with self._torch.no_grad():
            logits = self._model(self._torch.tensor([[*prompt, *mine[:at]]])).logits[0, -1]
        return abs(float(logits[mine[at]] - logits[its[at]])) < TIE
