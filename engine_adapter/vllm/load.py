"""Load of one rank of vLLM, from two readings of its metrics. Pure."""

from engine_adapter.engine import RankLoad
from engine_adapter.vllm.metrics_text import RankLoadReading

_TYPICAL_PROMPT = 512
"""Tokens of a waiting prompt before any request has ended."""


def rank_load(
    now: RankLoadReading, before: RankLoadReading | None, *, kv_blocks: int, cached_blocks: int
) -> RankLoad:
    """Return the load of a rank. before: the previous reading. cached_blocks: blocks that its KV events name.

    vLLM reports no outstanding prefill: it is the number of waiting requests times the mean prefill of the
    requests that have ended. The time of a step is the mean time between tokens since the previous reading.
    """
    held = min(round(now.kv_usage * kv_blocks), kv_blocks)
    mean = now.prefilled_tokens / now.prefilled_requests if now.prefilled_requests else _TYPICAL_PROMPT
    return RankLoad(
        running=now.running,
        waiting=now.waiting,
        prefill_tokens=round(now.waiting * mean),
        decode_blocks=held,
        used_blocks=max(held, min(cached_blocks, kv_blocks)),
        step_seconds=None if before is None else _step_seconds(now, before),
    )


def _step_seconds(now: RankLoadReading, before: RankLoadReading) -> float | None:
    gaps = now.token_gaps - before.token_gaps
    seconds = now.token_seconds - before.token_seconds
    return seconds / gaps if gaps > 0 and seconds > 0 else None
