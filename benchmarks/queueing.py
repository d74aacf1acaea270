"""Queueing: its cost for requests that need not wait, for waiting requests, and for the event loop; and the
benefit of batch assignment.

The fleet's engines have eight ranks each, of two speeds; loads are random. Requests are turns of
conversations whose beginning is in the cache of one or two ranks. The number of waiting requests equals the
number of free places. Orders are compared by predicted time: each request's cost at its turn, summed; arrival
order is the mean of several shuffles.

    python -m benchmarks.queueing --quick
"""

import asyncio
import gc
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import typer

from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, median
from bus.memory import MemoryBroker
from fleet.blocks import local_hashes, sequence_hashes
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvEvent, KvStored, RoutedKvEvent
from fleet.facts.engines import Capabilities, EngineJoined
from fleet.timing import EngineSpeed
from router.config import RouterConfig
from router.fleet_state.reservations import Booking
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.batch_assignment import order_of
from router.scheduling.filters import SaturationLimits
from router.scheduling.routing_request import FIRST_TRY, RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog

RANKS, MODEL, DIGEST, BLOCK_SIZE = 8, "m", "f" * 64, 16
SPEEDS = (
    EngineSpeed(prefill_token=2e-5, decode_sequence=5e-5, decode_block=2e-7),
    EngineSpeed(prefill_token=4e-5, decode_sequence=8e-5, decode_block=3e-7),
)
BATCHES = ((8, 64), (32, 64), (64, 64), (200, 64), (32, 512))
"""(requests, ranks)"""
PLACES, SHUFFLES = 64, 5
"""per rank"""
MAX_MS, MAX_ADDED_US, MAX_TURN_MS = 20.0, 3.0, 50.0


class House(NamedTuple):
    """Router and requests for it."""

    service: RouterService
    needs: list[RoutingRequest]

    def request_log(self) -> RequestLog:
        made = RequestLog("r", "d", "/v1/completions", self.service.clock())
        made.priority, made.urgency = "normal", 1
        return made

    @classmethod
    def of(cls, ranks: int, requests: int, *, places: int = 100_000, seed: int = 1) -> "House":
        chance = np.random.default_rng(seed)
        config = RouterConfig(
            max_requests_per_rank=places, queue_requests=10_000, queue_bytes=1 << 40, queue_wait_seconds=1e6
        )
        service = RouterService(None, MemoryBroker().subjects, config)
        for engine in range(1, ranks // RANKS + 1):
            service.view.join(
                EngineJoined(
                    engine=f"e{engine}",
                    worker_id=engine,
                    model=MODEL,
                    node=f"n{engine}",
                    urls=tuple(f"http://h{engine}:{rank}" for rank in range(RANKS)),
                    block_size=BLOCK_SIZE,
                    kv_blocks=100_000,
                    max_context=100_000,
                    max_batch_tokens=8192,
                    tokenizer=DIGEST,
                    speed=SPEEDS[engine % 2],
                    capabilities=Capabilities(),
                ),
                0.0,
            )
            service.view.sign_of_life(engine, 0.0)
        needs = []
        for at in range(requests):
            ids = chance.integers(0, 50_000, int(chance.integers(50, 3000))).tolist()
            for _ in range(int(chance.integers(1, 3))):
                service.scheduler.kv.apply(
                    [_stored(ids[: int(chance.integers(0, len(ids)))], int(chance.integers(ranks)), at)]
                )
            needs.append(
                RoutingRequest(MODEL, TokenPrompt(ids), len(ids) + 200, int(chance.integers(10, 400)), DIGEST)
            )
        return cls(service, needs)

    def load(self, places: int, requests: int, seed: int) -> None:
        """Load every rank so that of `places` per rank, `requests` are left in total."""
        chance = np.random.default_rng(seed)
        targets = self.service.view.target_table(MODEL).targets
        free = np.bincount(chance.integers(0, len(targets), requests), minlength=len(targets))
        for target, left in zip(targets, free.tolist(), strict=True):
            running = places - left
            amounts = (
                int(chance.integers(0, 6000)),
                running,
                running * int(chance.integers(10, 120)),
                running * int(chance.integers(1, 200)),
            )
            self.service.scheduler.reservations.report(target.key, amounts, self.service.clock())


def _stored(ids: list[int], rank: int, number: int) -> RoutedKvEvent:
    """Return the event of a rank that holds the beginning of a prompt."""
    local = local_hashes(ids, BLOCK_SIZE)
    blocks = tuple(KvBlock(*pair) for pair in zip(sequence_hashes(local), local, strict=True))
    event = KvEvent(
        event_id=number,
        dp_rank=rank % RANKS,
        data=KvChange(stored=KvStored(blocks=blocks)) if blocks else "cleared",
    )
    return RoutedKvEvent(worker_id=1 + rank // RANKS, event=event)


def timed_ms(repeats: int, action: Callable[[], object]) -> float:
    """Return the median milliseconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - started))
    return median(times)


def assigning(quick: bool) -> tuple[Report, float, float]:
    """Measure the time to find an order, and its benefit."""
    report = Report(
        "assigning many at once",
        ["requests x ranks", "to find the order, ms", "cost in that order / as they came"],
    )
    slowest, worst = 0.0, 0.0
    for requests, ranks in BATCHES:
        house = House.of(ranks, requests, places=PLACES)
        house.load(PLACES, requests, seed=7)
        service, now = house.service, house.service.clock()
        decisions = [service.decide(need, "d") for need in house.needs]
        load = service.scheduler.reservations.load(service.view.target_table(MODEL).rows, now)
        limits = SaturationLimits(PLACES, 60.0)
        taken = timed_ms(
            3 if quick else 15,
            lambda decisions=decisions, load=load, limits=limits: order_of(decisions, load, limits),
        )  # type: ignore[misc]
        shuffles = [np.random.default_rng(seed).permutation(requests).tolist() for seed in range(SHUFFLES)]
        worth = booked(house, order_of(decisions, load, limits)) / float(
            np.mean([booked(house, order) for order in shuffles])
        )
        report.add(f"{requests} x {ranks}", taken, worth)
        slowest, worst = max(slowest, taken if ranks == 64 else 0.0), max(worst, worth)
    return report, slowest, worst


def booked(house: House, order: list[int]) -> float:
    """Return the total cost in ms of deciding and booking in sequence; all bookings are released."""
    cost, bookings = 0.0, []
    for at in order:
        decision, booking = house.service.book(house.request_log(), house.needs[at], "", FIRST_TRY)
        cost += float(decision.scores.total[decision.chosen])
        bookings.append(booking)
    for booking in bookings:
        house.service.release(booking)
    return cost


async def passing(requests: int) -> tuple[float, float]:
    """Return microseconds of a decision with booking and release: directly, and through the wait queue while
    places are free."""
    house = House.of(64, requests)
    service, request_log = house.service, house.request_log()
    direct, through = [], []
    for _ in range(2):  # the first round is warm-up
        for need in house.needs:
            started = time.perf_counter()
            _, booking = service.book(request_log, need, "", FIRST_TRY)
            service.release(booking)
            direct.append(1e6 * (time.perf_counter() - started))
            started = time.perf_counter()
            _, booking = await service.wait_queue.admit(request_log, need, "", FIRST_TRY, begun=False)
            service.release(booking)
            through.append(1e6 * (time.perf_counter() - started))
    return median(direct[requests:]), median(through[requests:])


class Crowd:
    """Requests that wait while 64 ranks are full."""

    def __init__(self, house: House, places: int) -> None:
        self.house = house
        self.running: list[Booking] = []
        self.places = places

    async def __aenter__(self) -> "Crowd":
        service, request_log = self.house.service, self.house.request_log()
        for at in range(64 * self.places):
            _, booking = service.book(
                request_log, self.house.needs[at % len(self.house.needs)], "", FIRST_TRY
            )
            self.running.append(booking)
        self.tasks = [
            asyncio.create_task(self._admitted(need), name="waits for a place") for need in self.house.needs
        ]
        while len(service.wait_queue) < len(self.tasks):  # noqa: ASYNC110 no time passes
            await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self.tasks)

    async def _admitted(self, need: RoutingRequest) -> None:
        _, booking = await self.house.service.wait_queue.admit(
            self.house.request_log(), need, "", FIRST_TRY, begun=False
        )
        self.running.append(booking)


async def one_by_one(requests: int) -> float:
    """Return microseconds from a release to the next booking, with many waiting."""
    async with Crowd(House.of(64, requests, places=1), 1) as crowd:
        waiting = crowd.house.service.wait_queue
        started = time.perf_counter()
        while len(waiting):
            crowd.house.service.release(crowd.running.pop(0))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return 1e6 * (time.perf_counter() - started) / requests


async def all_at_once(requests: int) -> tuple[float, float]:
    """Return milliseconds until all get a place that became free at once, and the longest turn of the event
    loop meanwhile."""
    async with Crowd(House.of(64, requests, places=16), 16) as crowd:
        service, longest = crowd.house.service, 0.0
        for booking in crowd.running:
            service.scheduler.reservations.release(booking)
        service.wait_queue.wake()
        gc.collect()
        started = time.perf_counter()
        while len(service.wait_queue):
            turn = time.perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, time.perf_counter() - turn)
        return 1e3 * (time.perf_counter() - started), 1e3 * longest


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Measure admission, queueing and batch assignment."""
    count = 300 if quick else 1000
    report, slowest, worst = assigning(quick)
    direct, through = asyncio.run(passing(count))
    single = asyncio.run(one_by_one(count))
    whole, longest = asyncio.run(all_at_once(count))
    report.notes += [
        (
            f"deciding, booking and releasing at 64 ranks: {direct:.1f} us directly, {through:.1f} us through"
            " the waiting room while there is room"
        ),
        f"{count} wait at 64 ranks: {single:.0f} us from each release to the next booking",
        (
            f"{count} get places at once: {whole:.0f} ms for all, longest turn of the event loop"
            f" {longest:.1f} ms; load average {os.getloadavg()[0]:.1f}"
        ),
    ]
    report.targets += [
        Target(
            "what the waiting room adds where there is room",
            through - direct,
            MAX_ADDED_US,
            at_least=False,
            unit=" us",
        ),
        Target("longest turn of the event loop", longest, MAX_TURN_MS, at_least=False, unit=" ms"),
        Target("cost in the order found / as they came, worst", worst, 1.0, at_least=False),
        Target("slowest order at 64 ranks", slowest, MAX_MS, at_least=False, unit=" ms"),
    ]
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
