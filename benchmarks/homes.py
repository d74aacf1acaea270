"""Effect and cost of homes: recorded requests of the demo model under a closed load of 4 to 6 requests a
rank, decided by the router's pure code on a clock of the time model (`benchmarks.rig.homes`).

Three routers with the same placement, which follows the homes that the planner finds for nine domains on four
ranks of ten slots: one ignores experts, one prices them as far as prediction has earned, and one uses homes
as well. The cost of a sequence in a step differs between machines and decides how much a home may cost, so it
is varied.

    python -m benchmarks.homes --quick
"""

from typing import NamedTuple

import msgspec
import numpy as np
import typer

from benchmarks.demo_model import routings_path
from benchmarks.rig.homes import RANKS, SPEED, LoadResult, Setting, World, run_load, world
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target

SLOTS, GAIN = 10, 0.9
SEQUENCE_SECONDS = (2e-4, 5e-4, 1e-3)
FEWER, TOKENS = 0.08, 0.99
"""Least mean reduction of distinct remote ranks by homes and prices against a router without experts; least
ratio of tokens per second. Balance of sequences has no target: it is included in tokens per second."""
COLUMNS = (
    "s per sequence",
    "users",
    "router",
    "at home",
    "remote ranks",
    "tokens/s",
    "first token s",
    "balance",
    "term sets apart ms",
)


class _Router(NamedTuple):
    name: str
    gain: float
    given: bool


ROUTERS = (
    _Router("blind", 0.0, False),
    _Router("priced", GAIN, False),
    _Router("homes alone", 0.0, True),
    _Router("priced, homes", GAIN, True),
)


def recorded() -> World:
    """Return the demo model's recorded requests, by domain."""
    with np.load(routings_path()) as file:
        fit = (file["part"] == 0) & ~file["sampled"]
        experts, domain = file["experts"][fit], file["domain"][fit]
    return world(experts, domain, width=int(experts.max()) + 1, slots=SLOTS)


def measured(before: World, router: _Router, users: int, sequence: float, *, quick: bool) -> LoadResult:
    """Return the mean over orders of requests, with answers of one length and of several."""
    speed = msgspec.structs.replace(SPEED, decode_sequence=sequence)
    settings = [
        Setting(users, router.gain, router.given, speed=speed, varies=varies, seed=seed)
        for varies in (0.0, 0.5)
        for seed in range(1 if quick else 5)
    ]
    return LoadResult(
        *np.mean([run_load(before, setting, 300 if quick else 1200) for setting in settings], axis=0).tolist()
    )


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Measure requests at home, distinct remote ranks, tokens per second and balance, by router."""
    report, before = (
        Report("steering under a closed load, four ranks that step together", COLUMNS),
        recorded(),
    )
    fewer: list[float] = []
    tokens: list[float] = []
    for sequence in SEQUENCE_SECONDS:
        for users in (4 * RANKS, 6 * RANKS):
            found = {
                router.name: measured(before, router, users, sequence, quick=quick) for router in ROUTERS
            }
            for name, one in found.items():
                report.add(f"{sequence:g}", users, name, *one)
            blind, both = found["blind"], found["priced, homes"]
            tokens.append(both.tokens_per_second / blind.tokens_per_second)
            fewer.append(1.0 - both.remote_ranks / blind.remote_ranks)
    at_home = float((before.remote * before.share[before.domain]).sum(axis=1).mean())
    report.notes.append(
        f"distinct remote ranks were all at home: {at_home:.3f}; anywhere: {before.remote.mean():.3f}"
    )
    report.targets += [
        Target("distinct remote ranks saved by steering, mean", float(np.mean(fewer)), FEWER, unit=""),
        Target("tokens per second over those of a blind router, worst", min(tokens), TOKENS),
    ]
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
