"""Load of one rank of SGLang, from two readings. Pure."""

from engine_adapter.engine import RankLoad
from engine_adapter.sglang.server import RankReading


def rank_load(
    now: RankReading, before: RankReading | None, *, block_size: int, kv_blocks: int, cached_blocks: int
) -> RankLoad:
    """Return the load of a rank. before: the previous reading. cached_blocks: blocks that its KV events
    name."""
    held = min(-(-max(now.num_used_tokens, 0) // block_size), kv_blocks)
    return RankLoad(
        running=max(now.num_running_reqs, 0),
        waiting=max(now.num_waiting_reqs, 0),
        prefill_tokens=max(now.num_waiting_uncached_tokens, 0),
        decode_blocks=held,
        used_blocks=max(held, min(cached_blocks, kv_blocks)),
        step_seconds=None if before is None else _step_seconds(now, before),
    )


def _step_seconds(now: RankReading, before: RankReading) -> float | None:
    """Return the mean duration of the decode steps between two readings. None: there was none."""
    new, old = now.decode_moments or (), before.decode_moments or (0.0, 0.0, 0.0)
    if len(new) < 3 or len(old) < 3:
        return None
    steps, microseconds = new[0] - old[0], new[2] - old[2]
    return microseconds / steps * 1e-6 if steps > 0 and microseconds > 0 else None
