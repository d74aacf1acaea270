"""Cost and benefit of feedback: bookings, the hooks of a request, the price of distinct experts, and the time
to learn a wrong speed.

Bookings: a table of 64 and of 512 ranks with 100 open bookings each. Request: one decision at 64 ranks as the
service books it, with every engine's speed measured, compared with the same without; the difference is the
median over short rounds of both. Distinct experts: the mixes of 8 engines of a model of 58 x 256 experts,
over 32 clusters. Speeds: an engine three times slower than it states, whose first tokens vary by a fifth
(log-normal).

    python -m benchmarks.feedback --quick
"""

import os
import time
from collections.abc import Callable

import numpy as np
import typer

from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, median
from bus.memory import MemoryBroker
from fleet.facts.engines import Capabilities, EngineJoined
from fleet.signatures import ClusterModel
from router.config import RouterConfig
from router.evaluation.distinct_experts import ReadingGroup, read
from router.fleet_state.reservations import Reservations
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.booking_observer import BookedRequest
from router.scheduling.routing_request import RoutingRequest
from router.scheduling.speed_correction import PREFILL_SPEED, SpeedCorrection
from router.scheduling.target_speeds import TargetSpeeds
from router.service import RouterService

OPEN_PER_RANK = 100
ENGINES, RANKS = 8, 8
LAYERS, EXPERTS, TOP_K, CLUSTERS = 58, 256, 8, 32
BOOKING_LIMIT, LOAD_LIMIT, ADDED_LIMIT, READ_LIMIT, REQUESTS_LIMIT = 6.0, 3.0, 5.0, 10.0, 40.0
"""microseconds, three times; milliseconds; requests"""
SLOWNESS, SCATTER, WITHIN = 3.0, 0.2, 0.15


def microseconds(work: Callable[[], object], repeats: int) -> float:
    """Return the mean of one round."""
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return 1e6 * (time.perf_counter() - began) / repeats


def taking_turns(works: dict[str, Callable[[], object]], repeats: int, rounds: int) -> dict[str, float]:
    """Return the median microseconds of each over alternating rounds."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(microseconds(work, repeats))
    return {name: median(values) for name, values in found.items()}


def difference(without: Callable[[], object], beside: Callable[[], object], rounds: int) -> float:
    """Return the added microseconds of the second: median over short rounds, each of both in both orders."""
    found: list[float] = []
    for _ in range(rounds):
        first, second, third, fourth = (microseconds(work, 10) for work in (without, beside, beside, without))
        found.append((second + third - first - fourth) / 2)
    return median(found)


def bookings(ranks: int, repeats: int, rounds: int) -> dict[str, float]:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=1e9)
    rows = np.array([reservations.add_rank((1, rank)) for rank in range(ranks)])
    for rank in range(ranks):
        for _ in range(OPEN_PER_RANK):
            reservations.book((1, rank), (0, 1, 40, 100), 0.0)
        reservations.report((1, rank), (100, OPEN_PER_RANK, 4000, 6400), 1.0)
    running = reservations.book((1, 0), (0, 1, 40, 10**9), 1.0)
    moment = [1.0]

    def report() -> None:
        moment[0] += 1e-3
        reservations.report((1, int(1e3 * moment[0]) % ranks), (100, OPEN_PER_RANK, 4000, 6400), moment[0])

    works: dict[str, Callable[[], object]] = {
        "book and release": lambda: reservations.release(
            reservations.book((1, 3), (500, 1, 40, 100), moment[0])
        ),
        "load": lambda: reservations.load(rows, moment[0]),
        "16 tokens emitted": lambda: reservations.emitted(running, 16),
        "report": report,
    }
    return taking_turns(works, repeats, rounds)


def request(repeats: int, rounds: int) -> dict[str, float]:
    service = RouterService(
        None, MemoryBroker().subjects, RouterConfig(max_requests_per_rank=10**6, max_queue_seconds=1e9)
    )
    for engine in range(ENGINES):
        urls = tuple(f"http://engine-{engine}:{9000 + rank}" for rank in range(RANKS))
        service.view.join(
            EngineJoined(
                engine=f"e{engine}",
                worker_id=engine + 1,
                model="m",
                node="n",
                urls=urls,
                block_size=16,
                kv_blocks=10**6,
                max_context=10**6,
                max_batch_tokens=8192,
                capabilities=Capabilities(kv_events=True),
            ),
            service.clock(),
        )
        service.view.sign_of_life(engine + 1, service.clock())
    need = RoutingRequest("m", TokenPrompt(list(range(1024))), 1152, 128, None)
    scheduler, feedback, plain = service.scheduler, service.feedback, TargetSpeeds(1.0)
    measured = scheduler.speeds
    for engine in range(ENGINES):
        for rank in range(RANKS):
            for _ in range(20):
                measured.stepped(
                    (engine + 1, rank),
                    int(scheduler.target_table("m").rows[RANKS * engine + rank]),
                    0.01,
                    0.02,
                    pool=None,
                )
    measured.refresh(0.0)
    decision = scheduler.decide(need, "d", 1, service.clock())
    booking = scheduler.book(decision, need.prompt, service.clock())
    feedback.booked(BookedRequest(decision, booking, need.prompt))  # the booking that feedback compares later

    def decided(speeds: TargetSpeeds) -> None:
        scheduler.speeds = speeds
        scheduler.decide(need, "d", 1, service.clock())

    def watched(*, first: bool) -> None:
        feedback.booked(BookedRequest(decision, booking, need.prompt))
        if first:
            feedback.first_token(booking, booking.booked_at + 0.3)
            feedback.learn()
        feedback.released(booking)

    works: dict[str, Callable[[], object]] = {
        "decide, nothing measured": lambda: decided(plain),
        "decide, corrected": lambda: decided(measured),
        "watch a booking": lambda: watched(first=False),
        "watch it to its first token": lambda: watched(first=True),
        "count a decision": lambda: service.metrics.decided(decision, 1e-4),
        "make factors of 64 ranks": lambda: measured.refresh(0.0),
    }
    found = taking_turns(works, repeats, rounds)
    return found | {
        "added by correction": difference(
            works["decide, nothing measured"], works["decide, corrected"], 20 * rounds
        )
    }


def distinct(rounds: int) -> tuple[float, float]:
    """Return milliseconds to prepare the clusters, once per version, and to price the mixes of all
    engines."""
    chance = np.random.default_rng(0)
    profiles = chance.dirichlet(np.full(EXPERTS, 0.3), size=(CLUSTERS, LAYERS)).astype(np.float32)
    reading = ReadingGroup(
        ClusterModel(1, profiles, np.full(CLUSTERS, 1 / CLUSTERS, np.float32), 0.1),
        TOP_K,
    )
    misses = reading.misses()
    mixes = [20 * chance.dirichlet(np.full(CLUSTERS, 0.2)) for _ in range(ENGINES)]
    prepared = median([microseconds(reading.misses, 1) for _ in range(rounds)])
    return (
        prepared / 1000,
        median([microseconds(lambda: read(misses, mixes), 3) for _ in range(rounds)]) / 1000,
    )


def learnt(seed: int) -> int:
    """Return the number of requests after which the factor is right, and stays so for as many further
    requests."""
    speeds, chance = SpeedCorrection(4.0), np.random.default_rng(seed)
    wrong = 0
    for number in range(200):
        speeds.prefilled(
            (1, 0), 0, 0.1, 0.01, 0.1 * SLOWNESS * float(np.exp(chance.normal(0, SCATTER))) + 0.01
        )
        speeds.refresh(0.0)
        if abs(speeds.factors(np.zeros(1, np.intp))[PREFILL_SPEED, 0] / SLOWNESS - 1) > WITHIN:
            wrong = number + 1
    return wrong + 1


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    repeats, rounds = (300, 15) if quick else (2000, 41)
    report = Report("Looking back", ["what", "ranks", "microseconds"])
    booked = {ranks: bookings(ranks, repeats, rounds) for ranks in (64, 512)}
    for ranks, found in booked.items():
        for name, value in found.items():
            report.add(name, ranks, value)
    asked = request(repeats, rounds)
    for name, value in asked.items():
        report.add(name, ENGINES * RANKS, value)
    prepared, priced = distinct(5 if quick else 21)
    report.add(f"prepare {CLUSTERS} clusters of {LAYERS} x {EXPERTS}, once", "", 1000 * prepared)
    report.add(f"distinct experts of {ENGINES} engines", "", 1000 * priced)
    requests = sorted(learnt(seed) for seed in range(20 if quick else 200))
    report.notes.append(
        f"requests until the speed of an engine {SLOWNESS:g}x as slow is known within {WITHIN:.0%}: median"
        f" {median(requests):g}, worst {requests[-1]}"
    )
    added = asked["added by correction"] + asked["watch a booking"]
    report.targets += [
        Target(
            "book and release, 512 ranks",
            booked[512]["book and release"],
            BOOKING_LIMIT,
            at_least=False,
            unit=" us",
        ),
        Target("load, 64 ranks", booked[64]["load"], LOAD_LIMIT, at_least=False, unit=" us"),
        Target(
            "distinct experts of 8 engines, off the event loop",
            priced,
            READ_LIMIT,
            at_least=False,
            unit=" ms",
        ),
        Target(
            "requests until a wrong speed is known, 9 of 10 cases",
            float(requests[int(0.9 * len(requests))]),
            REQUESTS_LIMIT,
            at_least=False,
            unit="",
        ),
        Target("added to a decision, 64 ranks", added, ADDED_LIMIT, at_least=False, unit=" us"),
    ]
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
