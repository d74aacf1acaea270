"""Published results of the Moebius paper beside predictions for the same model and machine. Pure.

arXiv 2606.26607, as retold by a public review: 8 x H200 SXM, Qwen3-235B-A22B in 16 bits, SGLang 0.5.5, at
most 2,048 requests, memory fraction 0.85.
"""

from collections.abc import Iterator
from typing import NamedTuple

from fleet.layout_times import LayoutName
from migration.hardware.machines import MACHINES
from migration.hardware.memory import kv_capacity, memory_table
from migration.hardware.models import MODELS
from migration.hardware.prices import PublishedPrices, PublishedSteps
from migration.hardware.rollouts import lognormal_lengths, rollout_seconds
from migration.hardware.sizes import expert_sizes, kv_sizes

MODEL, MACHINE, RANKS = MODELS["qwen3-235b"], MACHINES["h200-nvl"], 8
WEIGHTS_SECONDS, LOW_KV_SECONDS, HIGH_KV_SECONDS = 0.152, 0.215, 0.434
EXTRA_BYTES = 2.8e9
TPOT_EP, TPOT_TP = 0.052, 0.037
QUIET = (16, 128)
"""sequences assumed in quiet hours: about 5 requests/s, of unpublished length"""
PROMPTS, TOKEN_LIMIT = 2048, 32_768
PROMPT_TOKENS = 256
MEDIANS, SPREAD = (1000, 2000, 4000, 8000), 1.0
"""of the log-normal lengths assumed for rollouts; those of the paper are not published"""


class PublishedResult(NamedTuple):
    """A published figure, its prediction, and why they differ."""

    item: str
    published: str
    predicted: str
    why: str


class RolloutGain(NamedTuple):
    """Makespan of a static layout over that with one switch."""

    median: int
    over_better: float
    over_worse: float


def _steps(prices: PublishedPrices) -> PublishedSteps:
    steps = prices.find(MODEL, MACHINE.name, RANKS, "sglang")
    if steps is None:
        raise ValueError(f"published prices: {MODEL.name} on {MACHINE.name} with sglang is missing")
    return steps


def weights_seconds() -> tuple[float, float]:
    """Return the predicted time of the weights at line rate, and at the rate measured with NCCL."""
    moved = expert_sizes(MODEL, RANKS).moved
    return moved / MACHINE.nvlink, moved / (MACHINE.nccl or MACHINE.nvlink)


def kv_seconds_at_most() -> tuple[float, float]:
    """Return the same for KV to TP, of as many tokens as TP has room for."""
    tokens = kv_capacity(MODEL, memory_table(MODEL, MACHINE, RANKS), RANKS, "tp").engine
    moved = tokens * kv_sizes(MODEL, RANKS).moved_to_tp / RANKS
    return moved / MACHINE.nvlink, moved / (MACHINE.nccl or MACHINE.nvlink)


def quiet_ratios(prices: PublishedPrices) -> tuple[float, float]:
    """Return step time of EP over that of TP at the most and at the fewest of `QUIET` sequences."""
    steps = _steps(prices)
    few, many = (steps.seconds("ep", one, 1024) / steps.seconds("tp", one, 1024) for one in QUIET)
    return many, few


def rollout_gains(prices: PublishedPrices) -> Iterator[RolloutGain]:
    """Yield the gain of one switch from EP to TP for each assumed median length."""
    steps, table = _steps(prices), memory_table(MODEL, MACHINE, RANKS)
    layouts: tuple[LayoutName, ...] = ("ep", "tp")
    capacity = {layout: kv_capacity(MODEL, table, RANKS, layout).engine for layout in layouts}
    for median in MEDIANS:
        lengths = lognormal_lengths(PROMPTS, median, SPREAD, TOKEN_LIMIT)

        def seconds(*chosen: LayoutName, lengths: list[int] = lengths) -> float:
            return rollout_seconds(lengths, PROMPT_TOKENS, steps.seconds, capacity, chosen, WEIGHTS_SECONDS)

        switched, static = seconds("ep", "tp"), (seconds("ep"), seconds("tp"))
        yield RolloutGain(median, min(static) / switched, max(static) / switched)


def moebius_results(prices: PublishedPrices) -> Iterator[PublishedResult]:
    """Yield the published table with predictions."""
    line, nccl = weights_seconds()
    kv_line, kv_nccl = kv_seconds_at_most()
    rate = expert_sizes(MODEL, RANKS).moved / WEIGHTS_SECONDS
    yield PublishedResult(
        "switch, weights only",
        _ms(WEIGHTS_SECONDS),
        f"{_ms(line)} at {MACHINE.nvlink / 1e9:.0f} GB/s line rate; {_ms(nccl)} at"
        f" {(MACHINE.nccl or 0) / 1e9:.0f} GB/s measured with NCCL",
        f"152 ms are {rate / 1e9:.0f} GB/s, {rate / MACHINE.nvlink:.0%} of the line rate: NCCL's speed on the"
        " wire without passes to pack and unpack, which a fused kernel leaves out",
    )
    yield PublishedResult(
        "switch with little / much KV",
        f"{_ms(LOW_KV_SECONDS)} / {_ms(HIGH_KV_SECONDS)}",
        f"{_ms(line)} to {_ms(line + kv_line)} at line rate; {_ms(nccl)} to {_ms(nccl + kv_nccl)} at NCCL's,"
        " from no KV to all that TP holds",
        f"tokens in flight are not published. {_ms(HIGH_KV_SECONDS - WEIGHTS_SECONDS)} for KV are"
        f" {(HIGH_KV_SECONDS - WEIGHTS_SECONDS) / kv_nccl:.1f} times the need of the largest legal switch at"
        " NCCL's rate: pages and launches limit it, not bytes",
    )
    extra = memory_table(MODEL, MACHINE, RANKS).for_switching
    yield PublishedResult(
        "extra memory of a GPU",
        f"{EXTRA_BYTES / 1e9:.1f} GB",
        f"{extra / 1e9:.2f} GB: second shard of attention, one spare layer, communicators of TP",
        "captured graphs are unknown, and would come on top",
    )
    low, high = quiet_ratios(prices)
    yield PublishedResult(
        "TPOT in quiet hours, EP / TP",
        f"{_ms(TPOT_EP)} / {_ms(TPOT_TP)}, ratio {TPOT_EP / TPOT_TP:.2f}",
        f"ratio {low:.2f} to {high:.2f} from {QUIET[1]} to {QUIET[0]} sequences of 1,024 tokens",
        "only the ratio is predicted: kernels alone take"
        f" {_ms(_steps(prices).seconds('tp', 64, 1024))} in TP at 64 sequences, and the host, prefill in"
        " between and the batch are not published",
    )
    yield PublishedResult(
        "TTFT in bursts, TP / Moebius",
        "mean 9.9 / 3.1 s, p99 90 / 6.0 s",
        "unknown",
        "it is queueing: admission limits and lengths of prompts and answers are not published",
    )
    gains = list(rollout_gains(prices))
    yield PublishedResult(
        "rollout, over the better / worse static layout",
        "1.16 to 1.25 / at most 1.31",
        "; ".join(
            f"median {one.median:,} tokens: {one.over_better:.2f} / {one.over_worse:.2f}" for one in gains
        ),
        "lengths are not published: log-normal ones are assumed. One switch, decoding alone, admission by KV"
        " room. Longer rollouts are bound by KV room, which EP has twice as much of, so TP alone loses more",
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"
