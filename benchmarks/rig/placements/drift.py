"""Rows of the placement benchmark: gain recovered on the next window after a drift by few copies or by new
weights, compared with a full re-placement."""

from collections.abc import Sequence
from itertools import groupby
from statistics import mean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.rig.placements.cases import (
    DRIFTS,
    Case,
    Drifting,
    Row,
    Table,
    balance,
    cases,
    split_shares,
    timed,
)
from benchmarks.rig.placements.popularity import SKEWS
from benchmarks.rig.report import Target
from fleet.placement import Placement, Split
from migration.model.placement_changes import copies_between, made
from migration.model.sampling_noise import LoadNoise
from migration.solvers.even_split_copies import even_split_copies
from migration.solvers.full_placement import full_placement
from migration.solvers.rank_relabelling import relabelled
from migration.solvers.split_copies import split_copies
from migration.solvers.split_weights import reweight

EVEN = (
    "after a drift, replicas share evenly: balance on the next window (of a decode step), copies in % of"
    " slots"
)
SPLIT = (
    "after a drift, with split weights: balance on the next window (of a decode step), copies in % of slots"
)
GAIN, STEP_LOSS = 95.0, 0.01
EVEN_COPIES = {
    "drift": {8: 4.0, 32: 12.0, 64: 16.0},
    "full change": {8: 4.0, 32: 15.0, 64: 20.0},
    "full change, Zipf": {8: 4.0, 32: 23.0, 64: 29.0},
}
SPLIT_COPIES = {8: 1.0, 32: 3.0, 64: 4.0}
QUICKLY_MS, LATER_MS, REWEIGHT_MS = 20.0, 60.0, 5.0
QUICK_SKEWS, QUICK_DRIFTS = ("zipf", "lognormal"), ("noise", "jitter10", "mix25", "full")

Values = NDArray[np.float64]


class _Way(NamedTuple):
    """One reaction to a drift, scored on the following window: [layers] each, except the last two."""

    balance: Values
    step: Values
    """of a decode step, mean over steps"""
    copies: float = 0.0
    """in % of slots"""
    ms: float = 0.0


class _Answers(NamedTuple):
    keep: _Way
    full: _Way
    even: _Way
    split: _Way
    weights: _Way


def rows(quick: bool) -> list[Row]:
    """Return one row for each shape, number of ranks, skew and drift; seeds combined."""
    seeds, skews, drifts = (1, QUICK_SKEWS, QUICK_DRIFTS) if quick else (3, SKEWS, DRIFTS)
    found: list[tuple[Row, Row]] = []
    for _, group in groupby(cases(seeds=seeds, skews=skews), key=str):
        of_seed = list(group)
        found += [
            _rows(of_seed[0], drift, [_answers(Drifting(case, drift), 1 if quick else 3) for case in of_seed])
            for drift in drifts
        ]
    return [row for row, _ in found] + [row for _, row in found]


def _answers(drifting: Drifting, times: int) -> _Answers:
    case, now = drifting.case, drifting.now
    size, noise = (case.ranks, case.experts), LoadNoise(now.sum(axis=1))
    before = full_placement(drifting.before, case.ranks, case.per_rank)
    anew = relabelled(before, full_placement(now, case.ranks, case.per_rank), case.ranks)
    goal = balance(anew, now, case.ranks)
    changes, few_ms = timed(lambda: even_split_copies(before, now, case.ranks, goal=goal, noise=noise), times)
    plan, plan_ms = timed(lambda: split_copies(before, now, *size, goal=goal, noise=noise), times)
    split, split_ms = timed(lambda: reweight(before, now, *size, pairs=now.sum(axis=1)), times)
    return _Answers(
        keep=_scored(drifting, before, before),
        full=_scored(drifting, before, anew),
        even=_scored(drifting, before, made(before, changes))._replace(ms=few_ms),
        split=_scored(drifting, before, plan.table, plan.split)._replace(ms=plan_ms),
        weights=_scored(drifting, before, before, split)._replace(ms=split_ms),
    )


def _scored(drifting: Drifting, before: Table, table: Table, split: Split | None = None) -> _Way:
    case = drifting.case
    share = split_shares(Placement(table, experts=case.experts, ranks=case.ranks, split=split))
    now, steps = (balance(table, demand, case.ranks, share) for demand in (drifting.next, drifting.steps))
    return _Way(now, steps.mean(axis=0), 100.0 * copies_between(before, table, case.ranks) / table.size)


def _rows(case: Case, drift: str, seeds: Sequence[_Answers]) -> tuple[Row, Row]:
    name = f"{case}, {drift}"
    return Row(EVEN, name, _even_figures(seeds), _even_held(case, drift, seeds)), Row(
        SPLIT, name, _split_figures(seeds), _split_held(case, drift, seeds)
    )


def _even_figures(seeds: Sequence[_Answers]) -> dict[str, float | str]:
    return {
        "keep": _both([one.keep for one in seeds]),
        "full": _both([one.full for one in seeds]),
        "copies": _copies([one.full for one in seeds]),
        "few": _both([one.even for one in seeds]),
        "least": min(float(one.even.balance.min()) for one in seeds),
        "% of gain": _gain(seeds, [one.even for one in seeds]),
        "copies ": _copies([one.even for one in seeds]),
        "ms": median(one.even.ms for one in seeds),
    }


def _split_figures(seeds: Sequence[_Answers]) -> dict[str, float | str]:
    return {
        "keep": _both([one.keep for one in seeds]),
        "full": _both([one.full for one in seeds]),
        "weights alone": _both([one.weights for one in seeds]),
        "% of gain": _gain(seeds, [one.weights for one in seeds]),
        "ms": median(one.weights.ms for one in seeds),
        "and copies": _both([one.split for one in seeds]),
        "% of gain ": _gain(seeds, [one.split for one in seeds]),
        "copies": _copies([one.split for one in seeds]),
        "ms ": median(one.split.ms for one in seeds),
    }


def _even_held(case: Case, drift: str, seeds: Sequence[_Answers]) -> tuple[Target, ...]:
    ways = [one.even for one in seeds]
    copies = _copies(ways)
    if drift == "noise":
        return (
            Target("few, only noise: copies", copies, 0.0, at_least=False, unit=" %"),
            _steps("few", seeds, ways),
            _time("few", case, drift, ways),
        )
    kind = _kind(drift) + (", Zipf" if drift == "full" and case.skew == "zipf" else "")
    return (
        Target(f"few, {_kind(drift)}: part of the gain", _gain(seeds, ways), GAIN, unit=" %"),
        Target(
            f"few, {kind}, {case.ranks} ranks: copies",
            copies,
            EVEN_COPIES[kind][case.ranks],
            at_least=False,
            unit=" %",
        ),
        _steps("few", seeds, ways),
        _time("few", case, drift, ways),
    )


def _split_held(case: Case, drift: str, seeds: Sequence[_Answers]) -> tuple[Target, ...]:
    ways, weights = [one.split for one in seeds], [one.weights for one in seeds]
    reweighing = Target(
        "weights alone: time", median(one.ms for one in weights), REWEIGHT_MS, at_least=False, unit=" ms"
    )
    timely = (_time("split", case, drift, ways), reweighing)
    if drift == "full":
        return timely
    if drift == "noise":
        return (
            Target("split, only noise: copies", _copies(ways), 0.0, at_least=False, unit=" %"),
            _steps("split", seeds, ways),
            *timely,
        )
    return (
        Target(f"split, {_kind(drift)}: part of the gain", _gain(seeds, ways), GAIN, unit=" %"),
        Target(
            f"split, {_kind(drift)}, {case.ranks} ranks: copies",
            _copies(ways),
            SPLIT_COPIES[case.ranks],
            at_least=False,
            unit=" %",
        ),
        _steps("split", seeds, ways),
        *timely,
    )


def _kind(drift: str) -> str:
    return "full change" if drift == "full" else "drift"


def _steps(name: str, seeds: Sequence[_Answers], ways: Sequence[_Way]) -> Target:
    lost = mean(float((one.full.step - way.step).mean()) for one, way in zip(seeds, ways, strict=True))
    return Target(
        f"{name}: balance of a step below a full re-placement's", lost, STEP_LOSS, at_least=False, unit=""
    )


def _time(name: str, case: Case, drift: str, ways: Sequence[_Way]) -> Target:
    quick = case.ranks <= 32 and drift != "full"
    limit, what = (QUICKLY_MS, "8 to 32 ranks, drift") if quick else (LATER_MS, "64 ranks or full change")
    return Target(f"{name}, {what}: time", median(one.ms for one in ways), limit, at_least=False, unit=" ms")


def _gain(seeds: Sequence[_Answers], ways: Sequence[_Way]) -> float:
    """Return the percentage of a full re-placement's gain, all layers together."""
    won = sum(float((way.balance - one.keep.balance).sum()) for one, way in zip(seeds, ways, strict=True))
    there = sum(float((one.full.balance - one.keep.balance).sum()) for one in seeds)
    return 100.0 * won / there if there > 0 else 100.0


def _copies(ways: Sequence[_Way]) -> float:
    return mean(way.copies for way in ways)


def _both(ways: Sequence[_Way]) -> str:
    return (
        f"{mean(float(way.balance.mean()) for way in ways):.3f}"
        f" ({mean(float(way.step.mean()) for way in ways):.3f})"
    )
