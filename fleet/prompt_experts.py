"""Experts that a prompt activated, from the prefill worker that computed it to the router that chooses the
decode worker. Pure.

It travels in the answer of a prefill worker, under `PROMPT_EXPERTS` of its `engine_data`.
"""

import msgspec

from fleet.popularity import ExpertCounts

PROMPT_EXPERTS = "prompt_experts"


class PromptExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Routed pairs of the prompt's tokens that the worker computed. Tokens from its KV cache activated no
    expert there, so `tokens` may be fewer than the prompt has.
    """

    tokens: int
    counts: ExpertCounts
