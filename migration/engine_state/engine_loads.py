"""Load of an engine as a whole, from the reports of its targets. Pure."""

from typing import NamedTuple

from fleet.facts.dynamo_kv import KvMetrics
from fleet.timing import MAX_SECONDS


class _Reported(NamedTuple):
    """Last report of a target."""

    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    decode_blocks: int = 0
    used_blocks: int = 0


_NOTHING = _Reported()


class MeasuredStep(NamedTuple):
    """A decode step that the engine measured."""

    sequences: int
    context: float
    """mean tokens per sequence"""
    seconds: float


class EngineLoads:
    """Sums over the targets of an engine, kept report by report, so that a report costs the same for any
    number of targets. `reset` when the targets change."""

    def __init__(self, block_size: int) -> None:
        self.running = 0
        """decoding sequences"""
        self.waiting = 0
        """requests that are not admitted yet"""
        self.prefill_tokens = 0
        """prompt tokens to be computed"""
        self.decode_blocks = 0
        """KV blocks that running sequences hold"""
        self.used_blocks = 0
        """KV blocks that they hold, or that are kept for reuse"""
        self.prefilled = 0
        """prompt tokens computed so far: by how much `prefill_tokens` of a target fell. Prompts that arrive
        between two reports hide as many, and cached or cancelled ones count as computed
        """
        self._block_size = block_size
        self._by_target: dict[int, _Reported] = {}

    def reset(self) -> None:
        """Forget all reports: there are other targets now."""
        self.running = self.waiting = self.prefill_tokens = self.decode_blocks = self.used_blocks = 0
        self._by_target.clear()

    def apply(self, report: KvMetrics) -> MeasuredStep | None:
        """Apply the report of a target. Returns the decode step that it measured; None: none, or not at this
        load, since a report states the median of the last steps."""
        target = report.dp_rank
        before = self._by_target.get(target, _NOTHING)
        now = _Reported(
            max(report.running or 0, 0),
            max(report.waiting or 0, 0),
            max(report.active_prefill_tokens or 0, 0),
            max(report.active_decode_blocks or 0, 0),
            max(report.kv_used_blocks or 0, 0),
        )
        self._by_target[target] = now
        self.running += now.running - before.running
        self.waiting += now.waiting - before.waiting
        self.prefill_tokens += now.prefill_tokens - before.prefill_tokens
        self.prefilled += max(before.prefill_tokens - now.prefill_tokens, 0)
        self.decode_blocks += now.decode_blocks - before.decode_blocks
        self.used_blocks += now.used_blocks - before.used_blocks
        changed = now.running != before.running or now.prefill_tokens or now.waiting
        if changed or not self.running or not 0 < (report.step_seconds or 0.0) <= MAX_SECONDS:
            return None
        return MeasuredStep(self.running, self.context, report.step_seconds or 0.0)

    @property
    def targets(self) -> int:
        """Targets that have reported."""
        return len(self._by_target)

    @property
    def context(self) -> float:
        """Mean tokens of a running sequence; 0: none runs."""
        return self.decode_blocks * self._block_size / self.running if self.running else 0.0
