"""The closed loop on one live fleet: four ranks of the demo model, NATS, router, tracker, planner, expert
transfer over NIXL.

Policies alternate on the same fleet by rewriting roost.toml and `roost reload`. Before each policy the fleet
is reset: the first placement (by a rollback), a tracker and a planner without state, prompts that are in no
cache. All policies get the same requests in the same order, except for an offset of a few tokens: windows of
held-out documents, domains mixed at random.

- static + KV-only: experts stay; the router uses cached prefixes and load.
- EPLB + KV-only: the published algorithm places experts for balance; same router.
- joint routing, static placement: the router prices expert traffic; experts stay.
- full loop: the planner migrates experts and publishes homes, the router routes to them.

Beside them stands an oracle (`rig.live.oracle`): the best alternation of homes and placement on the recorded
routings of the measured requests, and the best homes under the placement in which the full loop ended. The
distance between the two is the placement's, the rest is the routing's. What hindsight costs is seen by
running the same requests on the clock of the time model (`rig.live.oracle_clock`), with the speeds that the
engine measured: every request at its home, and by the router's prices with true destinations.

The deciding figures are the ranks' dispatch reports (`DispatchMeasured`) and client-side measurements.
Further parts (--only): flip, homogeneous, alternating.

--quick runs only the two compared policies, for seconds, without hash dispatch, as a functional check. A loop
takes minutes to close, so such a run prints its figures but has only two targets: no request is lost, and the
byte budget is kept.

    python -m benchmarks.closed_loop --quick
"""

import asyncio
import statistics
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import typer

from benchmarks.rig.live.client import Lengths
from benchmarks.rig.live.document_traffic import Texts, texts
from benchmarks.rig.live.oracle import best_alternation, best_ranks, recorded
from benchmarks.rig.live.oracle_clock import LOSES, ClockFigures, ClosedLoad, OnTheClock, on_the_clock
from benchmarks.rig.live.parts import alternating, flip, homogeneous
from benchmarks.rig.live.run import (
    CADENCE,
    EPLB,
    LINK_SECONDS,
    LOOP,
    MEASURED_SEED,
    POLICIES,
    RANKS,
    SLOTS,
    STATIC,
    Live,
    Phase,
    Plenty,
    Policy,
    hashed,
    live,
    phase,
)
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from fleet.timing import EngineSpeed

FEWER, BALANCE, PARTS = 0.20, 0.08, ("policies", "flip", "homogeneous", "alternating")
SPEED = 0.97
"""least ratio of tokens per second: "no worse" within the noise of a shared machine, which is printed"""
COMPARED = (EPLB, LOOP)
_COLUMNS = [
    "policy",
    "remote ranks per token",
    "remote %",
    "balance, steps",
    "balance, all",
    "tokens/s",
    "TTFT p50 ms",
    "p99 ms",
    "MB moved",
    "of it measured",
    "plans",
    "step ms",
]


Traffic = typer.Option(
    None,
    help="folder with a text file, or a folder of text files, per domain; default: the held-out documents",
)
Plot = typer.Option(None, help="folder for plots")


@dataclass
class LiveReport(Report):
    """Report with the data for plots."""

    courses: dict[str, Any] = field(default_factory=dict)
    setup: dict[str, Any] = field(default_factory=dict)


def row(name: str, phases: list[Phase]) -> list[str | float | int]:
    """Return medians over the rounds."""

    def middle(values: list[float]) -> float:
        return statistics.median(values)

    return [
        name,
        middle([one.sent.remote_ranks for one in phases]),
        100 * middle([one.sent.remote for one in phases]),
        middle([one.sent.step_balance for one in phases]),
        middle([one.sent.balance for one in phases]),
        middle([one.tokens_per_second for one in phases]),
        1e3 * middle([one.first_p50 for one in phases]),
        1e3 * middle([one.first_p99 for one in phases]),
        middle([one.bytes / 1e6 for one in phases]),
        middle([one.late_bytes / 1e6 for one in phases]),
        round(middle([one.plans for one in phases])),
        1e3 * middle([one.sent.step_seconds for one in phases]),
    ]


async def policies(
    fleet: Live,
    traffic: Texts,
    much: Plenty,
    rounds: int,
    seed: int,
    plot: Path | None,
    several: tuple[Policy, ...],
) -> dict[str, list[Phase]]:
    """Run every policy in every round; each round begins with another policy. Adds hash dispatch after EPLB
    where all policies run, and heat maps after the loop."""
    found: dict[str, list[Phase]] = {}
    for number in range(rounds):
        for policy in several[number % len(several) :] + several[: number % len(several)]:
            one = await phase(fleet, policy, traffic, much, seed + number)
            found.setdefault(one.policy, []).append(one)
            if policy is EPLB and several is POLICIES:
                some = Plenty(much.warm / 10, much.count // 2, much.concurrency, much.prompt, much.output)
                other = await hashed(fleet, traffic, some, seed + number)
                found.setdefault(other.policy, []).append(other)
            if policy is LOOP and plot is not None:
                await fleet.draw(plot)
    return found


def judge(report: LiveReport, found: dict[str, list[Phase]], *, quick: bool) -> None:
    """Add rows, and the ratios of each round: both sides of a ratio were measured within minutes. quick: set
    no targets for them."""
    for name, phases in found.items():
        report.add(*row(name, phases))
        rounds = [
            {**one._asdict(), "sent": one.sent._asdict(), "course": one.course._asdict()} for one in phases
        ]
        report.courses.setdefault("policies", {})[name] = rounds
    pairs = list(zip(found[LOOP.name], found[EPLB.name], strict=True))
    fewer = [1 - loop.sent.remote_ranks / eplb.sent.remote_ranks for loop, eplb in pairs]
    steps = [eplb.sent.step_balance - loop.sent.step_balance for loop, eplb in pairs]
    whole = [eplb.sent.balance - loop.sent.balance for loop, eplb in pairs]
    speed = [loop.tokens_per_second / eplb.tokens_per_second for loop, eplb in pairs]
    lost = sum(one.lost for phases in found.values() for one in phases)
    report.notes.append(
        "full loop against EPLB + KV-only by round: remote ranks"
        f" {spread([-100 * one for one in fewer], '%')}; balance of steps {spread([-one for one in steps])},"
        f" of all {spread([-one for one in whole])}; tokens/s {spread(speed, 'x')}"
    )
    report.targets.append(Target("requests lost", lost, 0, at_least=False, unit=""))
    if quick:
        return
    if STATIC.name in found:
        static = [
            1 - loop.sent.remote_ranks / other.sent.remote_ranks
            for loop, other in zip(found[LOOP.name], found[STATIC.name], strict=True)
        ]
        report.notes.append(
            f"full loop against static + KV-only: remote ranks {spread([-100 * one for one in static], '%')}"
        )
    report.targets += [
        Target(
            "full loop: balance of steps below EPLB + KV-only's by",
            statistics.median(steps),
            BALANCE,
            at_least=False,
            unit="",
        ),
        Target(
            "full loop: balance of the whole below EPLB + KV-only's by",
            statistics.median(whole),
            BALANCE,
            at_least=False,
            unit="",
        ),
        Target("full loop: tokens/s beside EPLB + KV-only", statistics.median(speed), SPEED),
        Target(
            "full loop: distinct remote ranks per token fewer than EPLB + KV-only's by",
            100 * statistics.median(fewer),
            100 * FEWER,
            unit=" %",
        ),
    ]


def add_oracle(
    report: LiveReport, found: dict[str, list[Phase]], live: Live, traffic: Texts, much: Plenty, seed: int
) -> None:
    """Add rows of what hindsight would have reached, and of its cost on the clock of the time model."""
    torch.set_num_threads(1)  # waiting threads of tiny products cost more than they compute
    several, clocked = [], []
    load = ClosedLoad(much.concurrency, much.prompt, much.output.mean)
    for number, (eplb_ended, ended) in enumerate(
        zip(live.ended[EPLB.name], live.ended[LOOP.name], strict=True)
    ):
        requests = traffic.requests(much.prompt, seed + number + MEASURED_SEED, 0)
        routings = recorded(islice(requests, much.count), much.output)
        best = best_alternation(routings, ranks=RANKS, slots=SLOTS)
        several.append((best.remote_ranks, best_ranks(routings, ended).remote_ranks))
        clocked.append(on_the_clock(routings, eplb_ended, best, load, live.joined.speed or EngineSpeed()))
    (best_of_all, best_there), blank = np.median(several, axis=0), [""] * (len(_COLUMNS) - 2)
    report.add("oracle: homes and placement in hindsight", float(best_of_all), *blank)
    report.add("oracle: homes in hindsight, the loop's placement", float(best_there), *blank)
    loop, eplb = (
        statistics.median(one.sent.remote_ranks for one in found[policy.name]) for policy in (LOOP, EPLB)
    )
    report.notes.append(
        "oracle: of the remote ranks that EPLB + KV-only reaches, hindsight saves"
        f" {1 - best_of_all / eplb:.1%}"
        f" and the full loop {1 - loop / eplb:.1%}; of the distance, {best_there - best_of_all:.3f} is the"
        f" placement's and {loop - best_there:.3f} the routing's"
    )
    add_clock(report, clocked)


def add_clock(report: LiveReport, clocked: list[OnTheClock]) -> None:
    """Add rows of the clock, and what hindsight itself loses of the balance of steps."""
    eplb, at_home, priced = (
        ClockFigures(*np.median([row[at] for row in clocked], axis=0).tolist())
        for at in range(len(OnTheClock._fields))
    )
    for name, one in (
        ("clock: EPLB's placement, emptiest rank", eplb),
        ("clock: the oracle, every request at home", at_home),
        ("clock: the oracle's placement, priced", priced),
    ):
        figures = [one.step_balance, one.balance, one.tokens_per_second, 1e3 * one.first_token_seconds]
        report.add(name, one.remote_ranks, "", *figures, *[""] * (len(_COLUMNS) - 7))
    report.notes.append(
        "on the clock, against EPLB's placement: every request at the oracle's home:"
        f" {beside(at_home, eplb)}; by the router's prices with true destinations, at most {LOSES:.0%} of the"
        f" tokens/s below the fastest weight of sending: {beside(priced, eplb)}"
    )


def beside(one: ClockFigures, eplb: ClockFigures) -> str:
    """Return the differences of two runs on the clock."""
    return (
        f"remote ranks {100 * (one.remote_ranks / eplb.remote_ranks - 1):+.1f} %, balance of steps"
        f" {one.step_balance - eplb.step_balance:+.3f} (without those that compute a prompt"
        f" {one.decode_balance - eplb.decode_balance:+.3f}), tokens/s"
        f" {one.tokens_per_second / eplb.tokens_per_second:.3f}x"
    )


def spread(values: list[float], unit: str = "") -> str:
    """Return the median, and the range if there are several values."""
    middle = f"{statistics.median(values):+.3g}{unit}" if unit != "x" else f"{statistics.median(values):.3f}x"
    return middle if len(values) < 2 else f"{middle} ({min(values):.3g} to {max(values):.3g})"


async def run(
    report: LiveReport,
    parts: list[str],
    traffic: Texts,
    much: Plenty,
    rounds: int,
    seed: int,
    link_seconds: float,
    scale: float,
    plot: Path | None,
    several: tuple[Policy, ...],
    *,
    quick: bool,
) -> None:
    """Measure the parts one after another on one fleet, into the report. quick: only targets that a short run
    can meet."""
    async with live(link_seconds) as fleet:
        report.setup |= {"speed": msgspec.to_builtins(fleet.joined.speed), "settings": fleet.settings}
        report.notes += setting(fleet, much, traffic)
        if "policies" in parts:
            report.notes.append(
                f"{much.warm:g} s of each policy to get going, then {much.count} requests measured"
            )
            found = await policies(fleet, traffic, much, rounds, seed, plot, several)
            judge(report, found, quick=quick)
        for name, part in (("flip", flip), ("homogeneous", homogeneous), ("alternating", alternating)):
            if name in parts:
                told = await part(fleet, traffic, much, seed, scale)
                report.notes += told.notes
                report.targets += told.targets if quick else [*told.targets, *told.lasting]
                report.courses[name] = told.course
        report.notes += fleet.notes
        if quick:
            report.notes.append(
                "a quick run is too short for the loop to close: it shows that everything works, and its"
                " figures are held to no target"
            )
    if "policies" in parts:
        add_oracle(report, found, fleet, traffic, much, seed)


def setting(fleet: Live, much: Plenty, traffic: Texts) -> list[str]:
    """Return the conditions of all measurements."""
    speed = fleet.joined.speed or EngineSpeed()
    cadence = ", ".join(
        f"{section}.{key} {value:g}" for section, keys in CADENCE.items() for key, value in keys.items()
    )
    return [
        (
            f"engine: {RANKS} ranks, {SLOTS} slots per rank and layer, split dispatch, NIXL;"
            f" engine.link_seconds {fleet.settings['engine']['link_seconds']:g}: so much longer, really, a"
            f" token takes to another rank of a layer and back (with it {speed.dispatch:.3g} s); it measured"
            f" {1e3 * speed.step:.1f} ms a step, {1e6 * speed.prefill_token:.0f} us a prompt token"
        ),
        (
            f"load: {much.concurrency} requests at once of {much.prompt} + {much.output} tokens, greedy;"
            f" {traffic.source} ({', '.join(traffic.domains)})"
        ),
        f"cadence, for all policies: {cadence}",
    ]


def main(
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    only: str = typer.Option("policies", help=f"parts, with commas between: {', '.join(PARTS)}; or all"),
    traffic: Path = Traffic,
    rounds: int = typer.Option(None, help="of all policies"),
    warm: float = typer.Option(None, help="seconds of warm-up per policy"),
    count: int = typer.Option(None, help="measured requests per policy"),
    concurrency: int = typer.Option(32, help="concurrent requests"),
    prompt: int = typer.Option(192, help="tokens"),
    output: int = typer.Option(48, help="tokens"),
    vary: float = typer.Option(
        0.0,
        min=0.0,
        max=1.0,
        help="largest relative deviation of an answer's length; 0: all have the same length",
    ),
    seed: int = typer.Option(0, help="seed of the order of domains and documents"),
    link_seconds: float = typer.Option(
        LINK_SECONDS,
        help="added seconds per layer for a token to another rank and back; 0: the links of this machine",
    ),
    scale: float = typer.Option(None, help="factor for the times of the long parts"),
    compared: bool = typer.Option(False, "--compared", help="only the two policies that the targets compare"),
    plot: Path = Plot,
) -> None:
    """Measure the four policies on one live fleet, and the loop under changing and homogeneous traffic."""
    parts = list(PARTS) if only == "all" else only.split(",")
    if unknown := set(parts) - set(PARTS):
        raise typer.BadParameter(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    much = Plenty(
        warm or (3.0 if quick else 120.0),
        count or (24 if quick else 250),
        concurrency,
        prompt,
        Lengths(output, vary),
    )
    if plot is not None:
        plot = plot.absolute()
        plot.mkdir(parents=True, exist_ok=True)
    report = LiveReport("The closed loop: policies on one live fleet", _COLUMNS)
    rounds, scale = rounds or (1 if quick else 2), scale or (0.1 if quick else 1.0)
    several, texts_of = COMPARED if quick or compared else POLICIES, texts(traffic, prompt)
    asyncio.run(
        run(report, parts, texts_of, much, rounds, seed, link_seconds, scale, plot, several, quick=quick)
    )
    if plot is not None:
        from benchmarks.rig.live.plots import draw_all

        draw_all(report.courses, plot)
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
