"""One routing decision compared with Dynamo's SelectionService: the same ranks of a 58 x 256 model, the same
lists of token ids, alternating in one run.

Roost: hashing, prefix index, prediction (tables of 300,000 blocks, 50,000 tokens, 32 clusters, loaded), the
whole cost, booking, and the release of an older booking. Dynamo: `select`, which books nothing. `nothing
cached`: no blocks are indexed on either side. `half cached`, `all cached`: identical blocks are indexed on
both, in Roost by its KV events, in Dynamo by vLLM's over ZMQ; both must report the same overlap. Ids are new
lists for each decision, as a tokenizer returns them.

    python -m benchmarks.decision --quick
"""

import asyncio
import gc
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import typer

from benchmarks.rig.decisions import (
    CLUSTERS,
    EXPERTS,
    KNOWN_BLOCKS,
    LAYERS,
    OUTPUT,
    RANKS,
    SHAPE,
    VOCABULARY,
    Prompts,
    Roost,
    clusters,
    fresh,
    prompts,
    tables,
)
from benchmarks.rig.kv_router import KvRouter
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, median, percentile
from benchmarks.rig.selection import Selection
from fleet.layout import EP
from fleet.placement import Placement
from fleet.signatures import ClusterModel
from router import kernels
from router.fleet_state.dispatch_cost import locality
from router.scheduling import scheduler

FLEETS = (8, 64, 512)
"""ranks"""
SHARES = {"nothing": 0.0, "half": 0.5, "all": 1.0}
RATIOS = {1024: 0.7, 4096: 0.5, 16_384: 0.35}
"""by prompt length: highest ratio of Roost's p50 to Dynamo's; for p99 the limit is always 1"""
TURN = 32
"""decisions of one side before the other side's turn"""
SCORING_LIMITS = {64: 40.0, 512: 70.0}
RATE_LIMIT, ADDED_LIMIT, PRICING_LIMIT = 5000.0, 60.0, 100.0
"""decisions per second; microseconds; milliseconds for an engine of 16 ranks"""


class Taken(NamedTuple):
    """Microseconds of each decision."""

    ours: list[float]
    theirs: list[float]

    def at(self, share: float) -> tuple[float, float]:
        return percentile(self.ours, share), percentile(self.theirs, share)

    def ratio(self, share: float) -> float:
        ours, theirs = self.at(share)
        return ours / theirs

    @property
    def warm(self) -> "Taken":
        """The same without the first of each turn, which finds the other side's memory in the caches."""
        return Taken(*([one for at, one in enumerate(side) if at % TURN] for side in self))


async def in_turns(
    roost: Roost, select: Callable[[list[int]], Awaitable[None]], asked: Prompts, rounds: int
) -> Taken:
    """Decide on the same prompts on both sides, TURN of them at a time."""
    taken = Taken([], [])
    count, clock = len(asked.ids), time.perf_counter
    for turn in range(-1, rounds * count // TURN):
        part = [asked.ids[(turn * TURN + at) % count] for at in range(TURN)]
        ours, theirs = [], []
        for ids in map(fresh, part):
            began = clock()
            roost.decide(ids)
            ours.append(1e6 * (clock() - began))
        for ids in map(fresh, part):
            began = clock()
            await select(ids)
            theirs.append(1e6 * (clock() - began))
        if turn >= 0:
            taken.ours.extend(ours)
            taken.theirs.extend(theirs)
    return taken


async def cached(roost: Roost, selection: Selection, asked: Prompts) -> None:
    """Publish the same blocks to both sides. Raises RuntimeError if their indices differ."""
    held = list(asked.held(roost.engines))
    for one in held:
        roost.hold(one)
        selection.hold(one)
    for some in (held[-1:], held[1::7]):
        for one in some:
            expected = roost.overlap(one.ids)
            if not await selection.settled(one.ids, expected):
                raise RuntimeError(
                    f"SelectionService was told of {len(expected)} ranks' blocks and knows"
                    f" {len(await selection.overlap(one.ids))}"
                )


def rate(roost: Roost, asked: Prompts, seconds: float) -> float:
    """Return sequential decisions per second on one core."""
    done, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < seconds:
        for ids in asked.ids:
            roost.decide(ids)
        done += len(asked.ids)
    return done / taken


def scoring(roost: Roost, asked: Prompts, turns: int) -> float:
    """Return the median microseconds of `router.scheduling.decision.decide` alone: hashes, overlaps and
    signature are given."""
    given: list[tuple[Any, Any]] = []
    decide = scheduler.decide  # type: ignore[attr-defined]

    def listening(*positional: Any, **named: Any) -> Any:
        given.append((positional, named))
        return decide(*positional, **named)

    scheduler.decide = listening  # type: ignore[assignment, attr-defined]
    for ids in asked.ids:
        roost.decide(ids)
    scheduler.decide = decide  # type: ignore[attr-defined]
    taken = []
    for turn in range(turns):
        positional, named = given[turn % len(given)]
        began = time.perf_counter()
        decide(*positional, **named)
        taken.append(1e6 * (time.perf_counter() - began))
    return median(taken)


def added(roost: Roost, asked: Prompts, turns: int) -> float:
    """Return the microseconds that prediction adds to the median decision."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(turns):
        on = bool(turn % 2)
        roost.predict(on=on)
        for ids in map(fresh, asked.ids[:TURN]):
            began = time.perf_counter()
            roost.decide(ids)
            taken[on].append(1e6 * (time.perf_counter() - began))
    roost.predict(on=True)
    return median(taken[True]) - median(taken[False])


def in_python(roost: Roost, asked: Prompts) -> float:
    """Return the median microseconds of a decision where no library was compiled."""
    taken = []
    with kernels.python_form():
        for ids in map(fresh, asked.ids):
            began = time.perf_counter()
            roost.decide(ids)
            taken.append(1e6 * (time.perf_counter() - began))
    return median(taken)


def pricing(model: ClusterModel, ranks: int, extra: int) -> float:
    """Return the milliseconds to price all clusters for an engine whose ranks hold `extra` random replicas
    each."""
    chance = np.random.default_rng(1)
    own = EXPERTS // ranks
    slots = np.full((LAYERS, ranks, own + extra), -1, np.int16)
    for layer in range(LAYERS):
        slots[layer, :, :own] = chance.permutation(EXPERTS).reshape(ranks, own)
        for rank in range(ranks):
            slots[layer, rank, own:] = chance.choice(
                np.setdiff1d(np.arange(EXPERTS), slots[layer, rank, :own]), extra, replace=False
            )
    placement = Placement(slots.reshape(LAYERS, -1), experts=EXPERTS, ranks=ranks)
    began = time.perf_counter()
    locality(tuple(rank // RANKS for rank in range(ranks)), SHAPE, EP, placement, model)
    return 1e3 * (time.perf_counter() - began)


class Measured:
    """Measurements of one run."""

    def __init__(self, quick: bool) -> None:
        chance = np.random.default_rng(0)
        self.rounds = 4 if quick else 64
        self.turns = 400 if quick else 4000
        self.seconds = 0.5 if quick else 3.0
        counts = {1024: 64, 4096: 64, 16_384: 32}
        self.asked = {
            (name, length): prompts(chance, length, share, counts[length])
            for name, share in SHARES.items()
            for length in RATIOS
        }
        self.model = clusters(chance)
        self.foretold = tables(chance, list(self.asked.values()))
        self.report = Report(
            "one decision, us",
            [
                "ranks, cached, prompt",
                "ours p50",
                "p99",
                "SelectionService p50",
                "p99",
                "p50 ratio",
                "p99 ratio",
            ],
        )
        self.taken: dict[tuple[int, str, int], Taken] = {}
        self.rates: dict[str, float] = {}
        self.scored: dict[int, float] = {}
        self.adds: dict[str, float] = {}

    async def run(self) -> None:
        for ranks in FLEETS:
            roost, selection = Roost(ranks, self.model, self.foretold), Selection(ranks)
            await selection.start()
            await asyncio.sleep(2.0)  # a subscriber that has not connected yet misses messages
            roost.settle(self.asked["nothing", 1024].ids[0])
            try:
                for name in SHARES:
                    await self._setting(ranks, name, roost, selection)
            finally:
                selection.close()
        await self.beside_kv_router()

    async def _setting(self, ranks: int, name: str, roost: Roost, selection: Selection) -> None:
        for length in RATIOS:
            if name != "nothing":
                await cached(roost, selection, self.asked[name, length])
        gc.collect()
        gc.freeze()  # as a router does after its start
        for length in RATIOS:
            taken = self.taken[ranks, name, length] = await in_turns(
                roost, selection.select, self.asked[name, length], self.rounds
            )
            (ours, theirs), (ours_99, theirs_99) = taken.at(0.5), taken.at(0.99)
            self.report.add(
                f"{ranks}, {name}, {length} tokens",
                ours,
                ours_99,
                theirs,
                theirs_99,
                taken.ratio(0.5),
                taken.ratio(0.99),
            )
        if ranks == 64:
            self.rates[name] = rate(roost, self.asked[name, 4096], self.seconds)
            self.adds[name] = added(
                roost, self.asked[name, 1024 if name == "nothing" else 4096], self.turns // TURN
            )
            self.report.notes.append(
                f"64 ranks, {name} cached, 4,096 tokens, the Python form:"
                f" {in_python(roost, self.asked[name, 4096]):.0f} us"
            )
        if name == "half":
            self.scored[ranks] = scoring(roost, self.asked[name, 4096], self.turns)

    async def beside_kv_router(self, ranks: int = 64) -> None:
        """Compare with KvRouter, with nothing cached: a note without a target."""
        roost, peer = Roost(ranks, self.model, self.foretold), KvRouter(ranks)
        try:
            await peer.start()
            for length in RATIOS:
                taken = await in_turns(roost, peer.best_worker, self.asked["nothing", length], self.rounds)
                (ours, theirs), (ours_99, theirs_99) = taken.at(0.5), taken.at(0.99)
                said = f"ours {ours:.0f} / {ours_99:.0f}, theirs {theirs:.0f} / {theirs_99:.0f} us"
                self.report.notes.append(
                    f"KvRouter.best_worker, {ranks} ranks, nothing cached, {length} tokens, p50 / p99: {said}"
                )
        except TimeoutError:
            self.report.notes.append(
                "KvRouter.best_worker: its workers did not register here in time, and it is left out"
            )
        finally:
            peer.close()

    def conclude(self) -> Report:
        """Return the measurements and their targets."""
        report = self.report
        report.notes += list(self._notes())
        for name in SHARES:
            for length, limit in RATIOS.items():
                worst, ranks = max((self.taken[ranks, name, length].ratio(0.5), ranks) for ranks in FLEETS)
                said = f"p50 over SelectionService's, {name} cached, {length} tokens, worst ({ranks} ranks)"
                report.targets.append(Target(said, worst, limit, at_least=False))
        worst, said = max(
            (taken.ratio(0.99), f"{ranks} ranks, {name} cached, {length} tokens")
            for (ranks, name, length), taken in self.taken.items()
        )
        report.targets.append(
            Target(f"p99 over SelectionService's, worst ({said})", worst, 1.0, at_least=False)
        )
        report.targets += [
            Target(f"scoring alone, {ranks} ranks", self.scored[ranks], limit, at_least=False, unit=" us")
            for ranks, limit in SCORING_LIMITS.items()
        ]
        report.targets.append(
            Target(
                "prediction adds to a cold decision of 1,024 tokens",
                self.adds["nothing"],
                ADDED_LIMIT,
                at_least=False,
                unit=" us",
            )
        )
        report.targets.append(
            Target(
                "decisions per second, 64 ranks, 4,096 tokens, half cached",
                self.rates["half"],
                RATE_LIMIT,
                unit="/s",
            )
        )
        return report

    def _notes(self) -> Iterator[str]:
        warm, said = max(
            (taken.warm.ratio(0.99), f"{ranks} ranks, {name} cached, {length} tokens")
            for (ranks, name, length), taken in self.taken.items()
        )
        yield (
            f"p99 over SelectionService's without the first decision of each turn of {TURN}, worst ({said}):"
            f" {warm:.2f}x"
        )
        yield (
            "decisions per second at 64 ranks and 4,096 tokens:"
            f" {', '.join(f'{name} cached {found:,.0f}' for name, found in self.rates.items())}"
        )
        yield (
            f"prediction adds, 64 ranks: {self.adds['nothing']:.0f} us to a cold prompt of 1,024 tokens,"
            f" {self.adds['half']:.0f} to one of 4,096 half cached"
        )
        yield (
            "scoring alone:"
            f" {', '.join(f'{found:.0f} us at {ranks} ranks' for ranks, found in self.scored.items())}"
        )
        for ranks, extra in ((16, 0), (16, 4), (64, 4)):
            taken = min(pricing(self.model, ranks, extra) for _ in range(3))
            yield f"pricing {CLUSTERS} clusters for {ranks} ranks with {extra} replicas each: {taken:.0f} ms"
        yield (
            f"tables of {KNOWN_BLOCKS:,} blocks and {VOCABULARY:,} tokens:"
            f" {self.foretold.stored_bytes / 1e6:.0f} MB; {OUTPUT} tokens expected; garbage collection on,"
            f" start-up frozen; load average {os.getloadavg()[0]:.1f}"
        )


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Measure the decision time by number of ranks, prompt length and cached share, beside Dynamo's
    SelectionService."""
    measured = Measured(quick)
    with_quiet_stderr(lambda: asyncio.run(measured.run()))
    measured.conclude().finish(as_json=as_json, check=check)


def with_quiet_stderr(work: Callable[[], None]) -> None:
    """Redirect stderr: Dynamo writes to it regardless of its log settings."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        work()
    finally:
        os.dup2(kept, 2)
        os.close(kept)


if __name__ == "__main__":
    typer.run(main)
