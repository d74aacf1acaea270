"""Loop behaviour under a sudden traffic change, under homogeneous traffic, and under alternating traffic."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.rig.live.document_traffic import Texts
from benchmarks.rig.live.figures import Sent
from benchmarks.rig.live.run import DELIVERY_SECONDS, LOOP, Live, Plenty, Tap
from benchmarks.rig.report import Target

FLIP_SECONDS, BEFORE_SECONDS, BASELINE_SECONDS = 240.0, 120.0, 30.0
HOMOGENEOUS_SECONDS, FILLING_SECONDS = 600.0, 90.0
ALTERNATING_SECONDS, EVERY_SECONDS = 360.0, 30.0
BACK = 0.9
"""share of the steady gain that counts as recovered"""
BACK_SECONDS = 120.0
WIDTH = 10.0
"""averaging window of dispatch figures, seconds"""


@dataclass
class Findings:
    notes: list[str] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    """targets for runs of any length"""
    lasting: list[Target] = field(default_factory=list)
    """targets for runs of the stated length only"""
    course: Any = None


def halves(traffic: Texts, seed: int) -> tuple[Texts, Texts]:
    """Draw two kinds of traffic without a common domain."""
    order = np.random.default_rng(seed).permutation(traffic.domains).tolist()
    middle = len(order) // 2
    return traffic.some(order[:middle]), traffic.some(order[middle:])


def value(sent: Sent) -> float:
    return sent.remote_ranks


async def baseline(live: Live, traffic: Texts, much: Plenty, seed: int, seconds: float) -> float:
    """Return the remote ranks per token of a traffic under the first placement and KV-only routing."""
    await live.reset()
    async with live.loaded(traffic.requests(much.prompt, seed, live.offset), much.concurrency, much.output):
        await asyncio.sleep(3.0)
        begin = time.monotonic()
        await asyncio.sleep(seconds)
        end = time.monotonic()
    return live.watcher.sent(begin, end).remote_ranks


async def flip(live: Live, traffic: Texts, much: Plenty, seed: int, scale: float) -> Findings:
    """Replace all domains at once. The gain is the loop's saving against the first placement with KV-only
    routing under the same traffic."""
    before, after = halves(traffic, seed)
    plain = [
        await baseline(live, one, much, seed, max(BASELINE_SECONDS * scale, 5.0)) for one in (before, after)
    ]
    await live.reset()
    await live.use(LOOP)
    tap = Tap(before.requests(much.prompt, seed, live.offset))
    began = time.monotonic()
    async with live.loaded(tap, much.concurrency, much.output) as load:
        await asyncio.sleep(BEFORE_SECONDS * scale)
        flipped = time.monotonic()
        tap.source = after.requests(much.prompt, seed + 1, live.offset)
        await asyncio.sleep(FLIP_SECONDS * scale)
        end = time.monotonic()
    await asyncio.sleep(DELIVERY_SECONDS)
    return flip_findings(live, plain, (before.domains, after.domains), began, flipped, end, len(load.lost))


def flip_findings(
    live: Live,
    plain: list[float],
    domains: tuple[list[str], list[str]],
    began: float,
    flipped: float,
    end: float,
    lost: int,
) -> Findings:
    watcher = live.watcher
    steady = plain[1] - watcher.sent(end - (end - flipped) / 3, end).remote_ranks
    first = plain[0] - watcher.sent(flipped - (flipped - began) / 3, flipped).remote_ranks
    moments = [
        (at - flipped, plain[1] - watcher.sent(at - WIDTH, at).remote_ranks)
        for at in np.arange(flipped + WIDTH, end, 1.0).tolist()
    ]
    back = next((at for at, gain in moments if gain >= BACK * steady), float("inf"))
    moved = watcher.bytes_moved(flipped, end)
    budget, seconds = live.settings["planner"]["budget_bytes"], live.settings["planner"]["budget_seconds"]
    allowed = budget * (1 + int((end - flipped) // seconds))
    shifts = [
        received - flipped
        for received, one in watcher.shifts
        if flipped < received <= end and not one.settled
    ]
    reported = f"after {', '.join(f'{at:.0f} s' for at in shifts)}" if shifts else "never"
    notes = [
        (
            f"flip: {', '.join(domains[0])} -> {', '.join(domains[1])};"
            f" remote ranks per token without the loop"
            f" {plain[0]:.3f} and {plain[1]:.3f}; the loop"
            f" saves {first:.3f} before and {steady:.3f} in the end;"
            f" back to {BACK:.0%} of that {back:.0f} s after the flip"
            f" (mean of the {WIDTH:g} s before);"
            f" {moved / 1e6:.1f} MB in {watcher.handovers(flipped, end)} handovers of"
            f" {len(watcher.plans(flipped, end))} plans; the popularity shift was reported {reported}"
        )
    ]
    targets = [
        Target("flip: requests lost", lost, 0, at_least=False, unit=""),
        Target("flip: bytes moved, of the budget", moved / allowed, 1.0, at_least=False),
    ]
    lasting = [
        Target(
            "flip: gain in the end, of the remote ranks without the loop",
            100 * steady / plain[1],
            20.0,
            unit=" %",
        ),
        Target(
            f"flip: seconds until {BACK:.0%} of the gain is back",
            back,
            BACK_SECONDS,
            at_least=False,
            unit=" s",
        ),
    ]
    return Findings(
        notes,
        targets,
        lasting,
        {
            "began": 0.0,
            "flipped": flipped - began,
            "plain": plain,
            "course": watcher.course(began, end)._asdict(),
        },
    )


async def homogeneous(live: Live, traffic: Texts, much: Plenty, seed: int, scale: float) -> Findings:
    """Send homogeneous prompts: routing and migration have nothing to gain, so nothing moves.

    The first placement leaves slots empty. Filling them gains under any traffic, so it gets time at first and
    is reported.
    """
    findings = Findings(course={})
    for name, source in (
        ("all domains shuffled within each prompt", traffic.shuffled(much.prompt, seed, live.offset)),
        (
            f"one domain ({traffic.domains[0]})",
            traffic.some(traffic.domains[:1]).requests(much.prompt, seed, live.offset),
        ),
    ):
        await live.reset()
        await live.use(LOOP)
        began = time.monotonic()
        async with live.loaded(source, much.concurrency, much.output) as load:
            await asyncio.sleep(FILLING_SECONDS * max(scale, 0.25))
            begin = time.monotonic()
            await asyncio.sleep(HOMOGENEOUS_SECONDS * scale)
            end = time.monotonic()
        await asyncio.sleep(DELIVERY_SECONDS)
        watcher = live.watcher
        filled, moved, found = (
            watcher.bytes_moved(began, begin),
            watcher.bytes_moved(begin, end),
            watcher.sent(begin, end),
        )
        findings.notes.append(
            f"homogeneous, {name}: {end - begin:.0f} s, {moved:,} bytes in {len(watcher.plans(begin, end))}"
            f" plans, and {filled / 1e6:.1f} MB into empty slots in the {begin - began:.0f} s before;"
            f" {len(load.answered)} requests; remote ranks per token {found.remote_ranks:.3f}, balance"
            f" {found.balance:.3f}"
        )
        findings.targets.append(
            Target(f"homogeneous, {name}: requests lost", len(load.lost), 0, at_least=False, unit="")
        )
        findings.lasting.append(
            Target(f"homogeneous, {name}: bytes moved", moved, 0, at_least=False, unit="")
        )
        findings.course[name] = watcher.course(began, end)._asdict()
    return findings


async def alternating(live: Live, traffic: Texts, much: Plenty, seed: int, scale: float) -> Findings:
    """Alternate two kinds of traffic faster than experts can follow: bytes stay within the budget, and most
    of it is unused."""
    kinds = [one.requests(much.prompt, seed, live.offset) for one in halves(traffic, seed)]
    await live.reset()
    await live.use(LOOP)
    tap, turns = Tap(kinds[0]), max(2, round(ALTERNATING_SECONDS * scale / EVERY_SECONDS))
    began = time.monotonic()
    async with live.loaded(tap, much.concurrency, much.output) as load:
        for turn in range(turns):
            tap.source = kinds[turn % 2]
            await asyncio.sleep(EVERY_SECONDS * min(1.0, scale * 10))
        end = time.monotonic()
    await asyncio.sleep(DELIVERY_SECONDS)
    watcher, middle = live.watcher, (began + end) / 2
    moved, later = watcher.bytes_moved(began, end), watcher.bytes_moved(middle, end)
    budget = live.settings["planner"]["budget_bytes"] * (
        1 + int((end - began) // live.settings["planner"]["budget_seconds"])
    )
    return Findings(
        [
            (
                f"alternating every {EVERY_SECONDS:g} s for {end - began:.0f} s: {moved / 1e6:.1f} MB in"
                f" {len(watcher.plans(began, end))} plans,"
                f" {later / 1e6:.1f} MB of it in the second half; remote"
                f" ranks per token {watcher.sent(middle, end).remote_ranks:.3f} in the second half"
            )
        ],
        [
            Target("alternating: requests lost", len(load.lost), 0, at_least=False, unit=""),
            Target("alternating: bytes moved, of the budget", moved / budget, 1.0, at_least=False),
        ],
        [],
        {"every": EVERY_SECONDS, "course": watcher.course(began, end)._asdict()},
    )
