"""Switches of attention under load: an engine in EXPERTS_TP takes up tensor-parallel attention and gives it
up again, to and fro, while long answers stream and short requests come.

The run is cut into *stretches*. Each begins with new long answers, whose prompts fill the wanted part of the
KV pages, as far as a switch permits. Then comes a time without switches, and then switches to and fro. Before
each, kept prefixes fill the pages up to the wanted part. The number of switches in a stretch is odd, so that
the layout in which stretches begin alternates.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.rig.engine_ranks import Diaries, Window
from benchmarks.rig.report import Report, Target, median
from benchmarks.rig.turns.figures import Gaps
from benchmarks.rig.turns.kv_figures import (
    AROUND_SECONDS,
    NEAR_SECONDS,
    Flip,
    first_tokens,
    flips_of,
    least_bytes,
    pauses,
    quiet_moments,
    tokens_per_second,
)
from benchmarks.rig.turns.kv_rank import Hold, Keep, Order, Save
from benchmarks.rig.turns.random_model import Heads
from benchmarks.rig.turns.turning_engine import RANKS, Rig, turning_engine
from fleet.blocks import BLOCK_SIZE
from fleet.experts import ModelShape
from fleet.layout import AttentionKind, head_groups, held_limit

HEADS = Heads(query=16, kv=8, size=128)
"""A page of a layer is 128 KiB, as in large models."""
GROUPS = head_groups(HEADS.kv, RANKS)
PAGES = 256
"""`kv_blocks`"""
FILLINGS = (0.1, 0.5, 0.9)
HELD = 0.88 * held_limit(RANKS, GROUPS)
"""Part of the KV pages that long answers hold in the middle of their lives, at most."""
ANSWERS = 2
"""Long ones, at a time per rank."""
GROWTH = 120
"""Tokens of a long answer in the middle of its life."""
ARMS: Mapping[str, Mapping[str, Any]] = {
    "with pre-copy": {},
    "without pre-copy": {"copy_ahead_seconds": 0.0},
}
"""By name: settings of the engine."""


class Course(NamedTuple):
    """Course of a run."""

    stretches: int
    switches: int
    """Of a stretch; odd."""
    static_seconds: float
    """Of a stretch, without switches."""
    beside_seconds: float
    """Before and after each switch, in which nothing is ordered; more than AROUND_SECONDS."""


FULL_COURSE = Course(40, 5, 2.0, 0.5)
QUICK_COURSE = Course(2, 3, 1.0, 0.35)


class KvRun(NamedTuple):
    """A run at one filling."""

    filling: float
    static: Mapping[AttentionKind, Sequence[Window]]
    """Times without switches, by attention, in order."""
    diaries: Diaries


async def kv_switches(
    shape: ModelShape, checkpoint: Path, filling: float, settings: Mapping[str, Any], course: Course
) -> KvRun:
    """Run an engine at a filling of its KV pages. settings: of `EmbeddedConfig`."""
    static: dict[AttentionKind, list[Window]] = {"dp": [], "tp": []}
    async with turning_engine(
        shape,
        checkpoint,
        {"backend": "shared"},
        settings={"kv_blocks": PAGES, **settings},
        program="benchmarks.rig.turns.kv_rank",
    ) as rig:
        await rig.switch(shape.layers, sharded=True)
        for _ in range(course.stretches):
            await _order(rig, Hold(ANSWERS, prompt_tokens(filling), 2 * GROWTH))
            await asyncio.sleep(course.beside_seconds)
            began = time.monotonic()
            await asyncio.sleep(course.static_seconds)
            static[rig.asking.placement.attention].append(Window(began, time.monotonic()))
            for _ in range(course.switches):
                is_dp = rig.asking.placement.attention == "dp"
                await _order(rig, Keep(round(filling * PAGES) * (1 if is_dp else GROUPS)))
                await asyncio.sleep(course.beside_seconds)
                await rig.switch(shape.layers, sharded=True, attention="tp" if is_dp else "dp")
                await asyncio.sleep(course.beside_seconds)
        await _order(rig, Save())
        return KvRun(filling, static, await rig.ranks.diaries())


async def _order(rig: Rig, order: Order) -> None:
    await rig.ranks.obey(msgspec.json.encode(order))


def prompt_tokens(filling: float) -> int:
    """Return the tokens of a long answer's prompt with which the answers of a rank hold a part of its pages
    in the middle of their lives."""
    return round(min(filling, HELD) * PAGES * BLOCK_SIZE / ANSWERS) - GROWTH


def unit_bytes(shape: ModelShape) -> int:
    """Return the size of a KV unit of this model with HEADS, float32."""
    return 2 * HEADS.kv // GROUPS * HEADS.size * BLOCK_SIZE * 4 * shape.layers


# Judgement


def judge_kv(report: Report, shape: ModelShape, arm: str, run: KvRun) -> None:
    """Add rows, notes and the target of a run. arm: names its settings."""
    flips, name = flips_of(run.diaries), f"{run.filling:.0%} of KV, {arm}"
    found = [pause for flip in flips for pause in pauses(run.diaries, flip.window)]
    limit, steps = _limit(run, flips)
    for to in ("tp", "dp"):
        some = [flip for flip in flips if flip.to == to]
        _add_direction(report, shape, run, some, f"to {to}, {name}")
    quiet = _quiet_pauses(run)
    felt, usual = _p99_ms(found), _p99_ms(quiet)
    report.notes += [
        f"{name}: p99 of {len(found)} pauses {felt:.1f} ms; of {len(quiet)} without a switch {usual:.1f} ms",
        f"{name}: p99 between tokens without switches: {steps}",
        f"{name}: pages in use at the switch {_filling(flips, 'tp')} to tp, {_filling(flips, 'dp')} to dp",
    ]
    report.targets.append(
        Target(
            f"p99 of pauses at {name}: two p99 steps of the slower layout and the copying",
            felt,
            1e3 * limit,
            False,
            " ms",
        )
    )


def _add_direction(report: Report, shape: ModelShape, run: KvRun, flips: Sequence[Flip], name: str) -> None:
    """Add rows and a note of the switches of one direction."""
    windows, static = [flip.window for flip in flips], [one for some in run.static.values() for one in some]
    felt = [pause for one in windows for pause in pauses(run.diaries, one)]
    reading, moved = sum(flip.reading_seconds for flip in flips), sum(flip.bytes for flip in flips)
    least = sum(least_bytes(flip, RANKS, GROUPS, unit_bytes(shape)) for flip in flips)
    ahead = sum(flip.ahead_bytes for flip in flips)
    speed = moved / RANKS / reading / 1e9 if moved else ""
    pause = (1e3 * median(felt), 1e3 * max(felt))
    report.add(f"{name}: pause; bytes over the least", len(felt), *pause, speed, (moved + ahead) / least)
    first = 1e3 * first_tokens(run.diaries, windows, NEAR_SECONDS)
    usual = 1e3 * first_tokens(run.diaries, static, 0.0)
    if len(first) and len(usual):
        middle, longest = float(np.median(first)), float(first.max())
        ratio = middle / float(np.median(usual))
        report.add(f"{name}: first token; over static", len(first), middle, longest, "", ratio)
    rate, static_rate = (
        float(np.mean(tokens_per_second(run.diaries, some, margin)))
        for some, margin in ((windows, AROUND_SECONDS), (static, 0.0))
    )
    step = median([one.end - one.begin for one in windows])
    report.notes.append(
        f"{name}: {len(flips)} switches, whose step takes {1e3 * step:.1f} ms (median), the copying of"
        f" {moved / len(flips) / 1e6:.2f} MB {1e3 * reading / len(flips):.2f} ms (mean), after"
        f" {ahead / len(flips) / 1e6:.2f} MB ahead; tokens per second"
        f" within {AROUND_SECONDS:g} s over static {rate / static_rate:.3f}; first token static:"
        f" {len(usual)}, longest {float(usual.max(initial=0.0)):.1f} ms"
    )


def _limit(run: KvRun, flips: Sequence[Flip]) -> tuple[float, str]:
    """Return the longest pause that is aimed at, in seconds, and the steps that it is made of in words."""
    every = {attention: windows for attention, windows in run.static.items() if windows}
    halves = {
        f"{attention}, {half} half": windows[begin::2]
        for attention, windows in every.items()
        for begin, half in enumerate(("one", "other"))
        if len(windows) > 1
    }
    gaps = Gaps.of(run.diaries, {**every, **halves})
    p99 = {kind: gaps.p99(kind) for kind in gaps.by_kind}
    copying = float(np.percentile([flip.reading_seconds for flip in flips], 99))
    words = ", ".join(f"{kind} {1e3 * seconds:.1f} ms" for kind, seconds in p99.items())
    return 2 * max(p99[attention] for attention in every) + copying, words


def _quiet_pauses(run: KvRun) -> list[float]:
    static = [one for some in run.static.values() for one in some]
    moments = quiet_moments(static, 2 * NEAR_SECONDS)
    return [pause for one in moments for pause in pauses(run.diaries, one)]


def _filling(flips: Sequence[Flip], to: AttentionKind) -> str:
    """Return the mean part of all pages that was in use before switches, in words."""
    pages = PAGES * (RANKS if to == "tp" else GROUPS)
    return f"{np.mean([flip.pages_before for flip in flips if flip.to == to]) / pages:.0%}"


def _p99_ms(seconds: Sequence[float]) -> float:
    return 1e3 * float(np.percentile(seconds, 99)) if seconds else float("nan")
