"""Bursty load on the embedded engine, with real switches of layout: Roost's policy beside all statics and the
threshold rule.

One live fleet of two ranks of the demo model serves the same schedule under each policy in turn: a quiet
level of single requests, and bursts of many at once. A *stand-in* emulates a network (`engine.link_seconds`
per dispatched token and `engine.collective_seconds` per exchange between ranks, paid by all layouts), so that
layouts cross within the load. With --without-stand-in nothing is emulated.

Printed for each policy: seconds until everything is answered, mean latency, p99 of the time to the first
token, and switches. The deciding ratio is Roost's mean latency over that of the better static layout.

    python -m benchmarks.layouts.bursts --quick
"""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import typer

from benchmarks.rig.live.fleet import LiveFleet, live_fleet, merged
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target

ENGINE = "engine-0"
STAND_IN: dict[str, Any] = {"link_seconds": 5e-5, "collective_seconds": 0.0}
"""A network on which a dispatched token takes 50 us: ep and tp cross between 7 and 18 sequences."""
PLANNER: dict[str, Any] = {
    "layout_policy": "static",
    "cycle_seconds": 600.0,
    "evaluation_seconds": 15.0,
    "settle_seconds": 1.0,
    "cooldown_seconds": 10.0,
    "budget_bytes": 8_000_000_000,
    "budget_seconds": 60.0,
}
QUIET_PER_SECOND, QUIET_TOKENS = 2.0, 64
BURST, BURST_TOKENS = 64, 96
PROMPT = 64
"""tokens"""
WARM_SECONDS = 3.0
RATIO = 1.03
"""Largest mean latency over that of the better static layout."""


class Arrival(NamedTuple):
    """A request of the schedule."""

    at: float
    """seconds from the beginning"""
    prompt: list[int]
    tokens: int


class Policy(NamedTuple):
    """A policy, and the layout in which it begins."""

    name: str
    settings: dict[str, Any]
    begins: str


POLICIES = (
    Policy("static ep", {"layout_policy": "static"}, "ep"),
    Policy("static experts-tp", {"layout_policy": "static"}, "experts-tp"),
    Policy("static tp", {"layout_policy": "static"}, "tp"),
    Policy("threshold", {"layout_policy": "threshold", "layout_threshold": 24.0}, "ep"),
    Policy("roost", {"layout_policy": "regret"}, "ep"),
)


class Answers(NamedTuple):
    """Answers of one run: seconds, float64 [requests] each, by request."""

    first: np.ndarray[Any, np.dtype[np.float64]]
    latency: np.ndarray[Any, np.dtype[np.float64]]
    completion: float
    """seconds until everything was answered"""
    switches: int
    lost: int


def schedule(seconds: float, bursts: int, seed: int = 1) -> list[Arrival]:
    """Return requests of a quiet level, and bursts evenly spaced over the time."""
    dice = np.random.default_rng(seed)

    def prompt() -> list[int]:
        return [int(one) for one in dice.integers(32, 127, PROMPT)]

    quiet = np.cumsum(dice.exponential(1.0 / QUIET_PER_SECOND, int(seconds * QUIET_PER_SECOND)))
    arrivals = [Arrival(float(at), prompt(), QUIET_TOKENS) for at in quiet if at < seconds]
    for number in range(bursts):
        at = seconds * (number + 0.5) / bursts
        arrivals += [Arrival(at, prompt(), BURST_TOKENS) for _ in range(BURST)]
    return sorted(arrivals, key=lambda one: one.at)


async def _serve(router: str, arrivals: Sequence[Arrival]) -> Answers:
    """Send the requests at their times, and wait for all answers."""
    began = time.monotonic()
    first, latency = np.full(len(arrivals), np.nan), np.full(len(arrivals), np.nan)

    async def ask(http: aiohttp.ClientSession, number: int, one: Arrival) -> None:
        await asyncio.sleep(max(one.at - (time.monotonic() - began), 0.0))
        sent, text = time.monotonic(), bytearray()
        body = {
            "model": "roost-demo",
            "prompt": one.prompt,
            "max_tokens": one.tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        async with http.post("/v1/completions", json=body) as answer:
            async for chunk in answer.content.iter_any():
                if np.isnan(first[number]):
                    first[number] = time.monotonic() - sent
                text += chunk
        if b"data: [DONE]" in text and b'"error"' not in text:
            latency[number] = time.monotonic() - sent

    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(router, timeout=timeout, connector=connector) as http:
        async with asyncio.TaskGroup() as tasks:
            for number, one in enumerate(arrivals):
                tasks.create_task(ask(http, number, one))
    return Answers(first, latency, time.monotonic() - began, 0, int(np.isnan(latency).sum()))


async def _layout(fleet: LiveFleet) -> dict[str, Any]:
    shown = json.loads(await fleet.command("layout", ENGINE, "--json", "--nats", fleet.nats))
    return dict(shown[ENGINE])


async def _begin_in(fleet: LiveFleet, layout: str) -> None:
    """Bring the engine into a layout."""
    now = await _layout(fleet)
    sharded, dp = len(now["sharded"]) == now["layers"], now["attention"] == "dp"
    name = "tp" if not dp else ("experts-tp" if sharded else "ep")
    if name != layout:
        await fleet.command("layout", ENGINE, "--set", layout, "--now", "--nats", fleet.nats)


async def measure(
    engine: dict[str, Any], seconds: float, bursts: int, rounds: int
) -> dict[str, list[Answers]]:
    """Serve the schedule under every policy in every round, on one fleet."""
    settings = merged(
        {"engine": {"ranks": 2, **engine}, "worker": {"name": "engine"}, "planner": PLANNER},
    )
    found: dict[str, list[Answers]] = {policy.name: [] for policy in POLICIES}
    async with live_fleet(settings) as fleet:
        for number in range(rounds):
            for policy in POLICIES:
                await fleet.reload(merged(settings, {"planner": {"layout_policy": "static"}}))
                await _begin_in(fleet, policy.begins)
                await fleet.reload(merged(settings, {"planner": policy.settings}))
                await asyncio.sleep(WARM_SECONDS)
                before = await _switches(fleet)
                answers = await _serve(fleet.router, schedule(seconds, bursts, seed=number))
                switches = await _switches(fleet) - before
                found[policy.name].append(answers._replace(switches=switches))
                typer.echo(
                    f"round {number + 1} of {rounds}, {policy.name}: {_said(found[policy.name][-1])}",
                    err=True,
                )
        typer.echo(await fleet.command("layout", ENGINE, "--nats", fleet.nats), err=True)
    return found


async def _switches(fleet: LiveFleet) -> int:
    """Return the number of automatic switches of layout so far, from the log of plans."""
    since = ("--kind", "MigrationPlanned", "--since", "2h", "--no-follow", "--json")
    lines = (await fleet.command("events", *since, "--nats", fleet.nats)).splitlines()
    return sum("layout: " in line for line in lines)


def _said(one: Answers) -> str:
    return (
        f"{one.completion:.1f} s, latency {np.nanmean(one.latency):.3f} s, p99 TTFT"
        f" {np.nanpercentile(one.first, 99):.3f} s, {one.switches} switches, {one.lost} lost"
    )


def main(
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    without: bool = typer.Option(False, "--without-stand-in", help="emulate no network between the ranks"),
    link: float = typer.Option(STAND_IN["link_seconds"], help="engine.link_seconds of the stand-in"),
    collective: float = typer.Option(
        STAND_IN["collective_seconds"], help="engine.collective_seconds of the stand-in"
    ),
    seconds: float = typer.Option(60.0, help="length of the schedule"),
    rounds: int = typer.Option(5, help="repeats of every policy"),
) -> None:
    """Serve bursts under every layout policy, with real switches."""
    engine = {} if without else {"link_seconds": link, "collective_seconds": collective}
    length, bursts, repeats = (6.0, 1, 1) if quick else (seconds, 3, rounds)
    found = asyncio.run(measure(engine, length, bursts, repeats))
    report = Report(
        f"Layout policies under bursts, {'no stand-in' if without else f'stand-in {engine}'}",
        ["policy", "completed in s", "mean latency s", "p99 TTFT s", "switches", "lost"],
    )
    for policy in POLICIES:
        runs = found[policy.name]
        report.add(
            policy.name,
            float(np.median([one.completion for one in runs])),
            _latency(runs),
            float(np.median([np.nanpercentile(one.first, 99) for one in runs])),
            sum(one.switches for one in runs),
            sum(one.lost for one in runs),
        )
    lost = sum(one.lost for runs in found.values() for one in runs)
    statics = {name: _latency(runs) for name, runs in found.items() if name.startswith("static")}
    best = min(statics, key=lambda name: statics[name])
    report.notes.append(f"better static layout: {best}")
    report.targets.append(Target("requests lost", float(lost), 0.0, False, ""))
    if without:
        switches = sum(one.switches for one in found["roost"])
        report.targets.append(
            Target("switches of Roost's policy without a crossing", float(switches), 0.0, False)
        )
    report.targets.append(
        Target(
            f"mean latency, roost over {best}", _latency(found["roost"]) / statics[best], RATIO, False, "x"
        )
    )
    report.finish(as_json=as_json, check=check)


def _latency(runs: Sequence[Answers]) -> float:
    return float(np.median([np.nanmean(one.latency) for one in runs]))


if __name__ == "__main__":
    typer.run(main)
