"""Values of vLLM's /metrics (Prometheus text format), by data-parallel rank. Pure."""

import re
from collections import defaultdict
from typing import NamedTuple

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_STARTED = "process_start_time_seconds"
_CONFIG = "vllm:cache_config_info"


class RankLoadReading(NamedTuple):
    """Load of one data-parallel rank at one moment. The sums are totals since the start."""

    running: int
    waiting: int
    kv_usage: float
    """Share of the KV blocks that running sequences hold, 0 to 1."""
    prefilled_tokens: float
    """Prompt tokens computed for requests that have ended."""
    prefilled_requests: float
    token_seconds: float
    """Total time between tokens, over all requests."""
    token_gaps: float
    """Number of these times."""
    cached_tokens: float
    """Prompt tokens reused from the KV cache."""


class MetricsReading:
    """One answer of /metrics."""

    def __init__(self, text: str) -> None:
        """ValueError for a line that is no sample. Only vLLM's own metrics and the start time are kept."""
        self._values: dict[tuple[str, int], float] = defaultdict(float)
        self._cache: dict[int, dict[str, str]] = {}
        created: list[float] = []
        start: float | None = None
        for line in text.splitlines():
            if line.startswith(_STARTED):
                start = _sample(line)[2]
            elif line.startswith("vllm:") and "_bucket{" not in line:
                name, labels, value = _sample(line)
                if name.endswith("_created"):
                    created.append(value)
                rank = labels.get("engine", "")
                if rank.isdigit():
                    self._values[name, int(rank)] += value
                    if name == _CONFIG:
                        self._cache[int(rank)] = labels
        self.started = start if start is not None else min(created, default=None)
        """Time at which the server started, by its clock. None: it does not say."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Data-parallel ranks that the server reports on, ascending."""
        return tuple(sorted({rank for name, rank in self._values if name == "vllm:num_requests_running"}))

    def load(self, rank: int) -> RankLoadReading:
        """Return the load of a rank. Missing metrics are 0."""
        return RankLoadReading(
            running=int(self._value("num_requests_running", rank)),
            waiting=int(self._value("num_requests_waiting", rank)),
            kv_usage=self._value("kv_cache_usage_perc", rank),
            prefilled_tokens=self._value("request_prefill_kv_computed_tokens_sum", rank),
            prefilled_requests=self._value("request_prefill_kv_computed_tokens_count", rank),
            token_seconds=self._value("inter_token_latency_seconds_sum", rank),
            token_gaps=self._value("inter_token_latency_seconds_count", rank),
            cached_tokens=self._value("prompt_tokens_cached_total", rank),
        )

    def block_size(self, rank: int) -> int | None:
        """Return the tokens of a KV block. None: not reported."""
        return self._number("block_size", rank)

    def kv_blocks(self, rank: int) -> int:
        """Return the KV blocks of one rank; 0: not reported.

        `num_gpu_blocks` is the sum over the data-parallel ranks of a server (0.32), `kv_cache_size_tokens` is
        of one."""
        tokens, block_size = self._number("kv_cache_size_tokens", rank), self.block_size(rank)
        if tokens and block_size:
            return tokens // block_size
        return (self._number("num_gpu_blocks", rank) or 0) // max(len(self._cache), 1)

    def _value(self, name: str, rank: int) -> float:
        return self._values.get((f"vllm:{name}", rank), 0.0)

    def _number(self, label: str, rank: int) -> int | None:
        text = self._cache.get(rank, {}).get(label, "")
        return int(text) if text.isdigit() else None


def _sample(line: str) -> tuple[str, dict[str, str], float]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise ValueError(f"no Prometheus sample: {line[:200]!r}")
    name, labels, value = found.groups()
    return name, dict(_LABEL.findall(labels or "")), float(value)
