"""Cost and reaction time of the tracker: reports through NATS per second, one report, memory, one prediction,
drift.

(a) Rank reports come from a separate process through a real NATS server into the real service, decoding
included. The sender never has more in flight than fits, so a lost report is a failure. Sender, server and
tracker share this machine's cores. (b) One report of 58 x 256 in the tracker alone, and the memory of 512
ranks. (c) `fleet.prediction.predict` on a router's replica with every source present. (d) An hour of the demo
model's recorded requests arriving at random, in virtual time, then a sudden change of the domain mix.

    python -m benchmarks.tracker_speed --quick
"""

import asyncio
import contextlib
import mmap
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import typer
import uvloop

from benchmarks.rig.flow import EXPERTS, LAYERS, Flow, Mix, mix
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, percentile
from benchmarks.rig.report_publisher import report
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.local.nats_server import answers, binary
from engine_adapter.batching.kv_cache import identify
from engine_adapter.batching.profile_signatures import request_profiles
from engine_adapter.batching.routed_experts import RoutedTrace
from engine_adapter.engine import EndedRequest
from fleet.facts.activity import RequestOutcome, RequestProfile
from fleet.placement import linear
from fleet.prediction import MAX_TOKENS, Query, Tables, predict
from fleet.signatures import ClusterModel, pack
from router.prediction.table_replica import TableReplica, read
from tracker.activity.decay_window import BATCH
from tracker.activity.engine_activity import EngineActivity
from tracker.config import TrackerConfig
from tracker.drift.detector import DriftDetector
from tracker.prediction.model_learner import ModelLearner
from tracker.service import TrackerService

ROOT = Path(__file__).resolve().parents[1]
RATE, REPORT_MICROSECONDS, MEMORY_GB, PREDICT_MICROSECONDS, SILENCES = 5000.0, 300.0, 1.0, 60.0, 3.0
"""Targets: reports per second, microseconds of one, GB of 512 ranks, microseconds of a prediction, fast time
constants to a detection."""
RANKS, UNDER_WAY = 64, 1024
SHAPES = ((4, 32, 40_000), (58, 256, 20_000))
"""layers, experts, messages of a round"""
PUBLISH_SECONDS = 1.0
CLUSTERS, BLOCK, KNOWN = 32, 16, 64
"""KNOWN: prompts in the tables"""
PROMPTS, ROUNDS = (1024, 4096, 16384), 10
HOUR, AFTER = 3600, 300
CODE = {"python": 1.0, "c": 1.0, "perl": 1.0, "html": 1.0}
TEXT = {"en": 1.0, "de": 1.0, "fr": 1.0, "ru": 1.0, "ja": 1.0}


class Ingested(NamedTuple):
    """One round: reports per second, processor microseconds of the tracker's process per report, and the
    number lost or refused."""

    rate: float
    microseconds: float
    lost: int


# (a) Reports through NATS


@contextlib.asynccontextmanager
async def nats(folder: str) -> AsyncIterator[int]:
    """Run a server with JetStream; yield its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    arguments = ["-js", "-sd", folder, "-a", "127.0.0.1", "-p", str(port)]
    server = await asyncio.create_subprocess_exec(
        binary(), *arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(30):
            await answers(port)
        yield port
    finally:
        server.terminate()
        await server.wait()


@contextlib.asynccontextmanager
async def tracker(port: int, subjects: Subjects) -> AsyncIterator[TrackerService]:
    bus = await NatsBus.connect(f"nats://127.0.0.1:{port}", subjects)
    service = TrackerService(bus, subjects, TrackerConfig(publish_seconds=PUBLISH_SECONDS))
    running = asyncio.create_task(service.run(), name="the tracker")
    try:
        await service.ready.wait()
        yield service
    finally:
        running.cancel()
        await asyncio.wait([running])
        await bus.close()


def counted(service: TrackerService) -> dict[str, float]:
    """Return the tracker's own counters."""
    lines = [
        line.rpartition(" ")
        for line in service.metrics.exposition().decode().splitlines()
        if not line.startswith("#")
    ]
    return {name: float(value) for name, _, value in lines}


async def ingest(layers: int, experts: int, messages: int) -> Ingested:
    """Run one round at the tracker's full speed."""
    with tempfile.TemporaryDirectory() as folder:
        subjects, counter = Subjects("bench"), Path(folder) / "counter"
        counter.write_bytes(bytes(8))
        async with nats(folder) as port, tracker(port, subjects) as service:
            arguments = [port, subjects.namespace, counter, messages, layers, experts, RANKS, UNDER_WAY]
            with counter.open("r+b") as file, mmap.mmap(file.fileno(), 8) as told:
                sender = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "benchmarks.rig.report_publisher", *map(str, arguments), cwd=ROOT
                )
                try:
                    return await _taken(service, told, messages, sender)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        sender.kill()
                    await sender.wait()


async def _taken(
    service: TrackerService, told: mmap.mmap, messages: int, sender: asyncio.subprocess.Process
) -> Ingested:
    while not (first := service.reports):  # noqa: ASYNC110, an event for every report would cost what is measured
        await asyncio.sleep(0.001)
    began, used = time.perf_counter(), time.process_time()
    while (taken := service.reports) < messages and sender.returncode is None:
        struct.pack_into("<Q", told, 0, taken)
        await asyncio.sleep(0.001)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    struct.pack_into("<Q", told, 0, messages)
    await asyncio.sleep(2 * PUBLISH_SECONDS)  # until the tracker has published its own counters
    figures = counted(service)
    missing = (
        messages
        - taken
        + sum(value for name, value in figures.items() if name.startswith("roost_tracker_rejected_total"))
    )
    return Ingested(
        (taken - first) / seconds,
        1e6 * used / (taken - first),
        int(missing + figures["roost_tracker_lost_total"]),
    )


def measure_ingest(out: Report, rounds: int, share: float) -> list[Target]:
    targets = []
    for layers, experts, messages in SHAPES:
        found = [uvloop.run(ingest(layers, experts, int(share * messages))) for _ in range(rounds)]
        rate, cost = (
            statistics.median(each.rate for each in found),
            statistics.median(each.microseconds for each in found),
        )
        size = len(report(layers, experts, 0).counts.values)
        out.add(
            f"reports/s through NATS, {layers} x {experts}",
            rate,
            f"{cost:.0f} us of processor each, {size:,} B of counts, best round {max(found).rate:,.0f}/s",
        )
        targets.append(
            Target(
                f"rank-reports/s through NATS at {layers} x {experts}, decoding included",
                rate,
                RATE,
                unit="/s",
            )
        )
        targets.append(
            Target(
                f"reports lost or refused at {layers} x {experts}",
                sum(each.lost for each in found),
                0,
                at_least=False,
                unit="",
            )
        )
    return targets


# (b) One report, and many ranks


def measure_reports(out: Report, repeats: int) -> list[Target]:
    layers, experts, ranks = 58, 256, 512
    activity, reports = (
        EngineActivity(TrackerConfig()),
        [report(layers, experts, rank) for rank in range(ranks)],
    )
    took, most = [], 0
    for turn in range(BATCH * (1 + repeats)):
        began = time.perf_counter_ns()
        for rank, said in enumerate(reports):
            activity.report(said, float(turn), rank, turn)
        took.append((time.perf_counter_ns() - began) / ranks / 1e3)
        most = max(most, activity.stored_bytes)
    # Reports are added up in batches of BATCH, so only as many turns together show the whole cost.
    cost = statistics.median(statistics.mean(took[at : at + BATCH]) for at in range(BATCH, len(took), BATCH))
    out.add(
        "us for one report of 58 x 256",
        cost,
        f"{ranks} ranks in turn; both time constants, of the rank and of the model",
    )
    out.add(
        "GB for 512 ranks of 58 x 256",
        most / 1e9,
        f"at most; {activity.stored_bytes / 1e9:.3f} when all is added up",
    )
    return [
        Target(
            "microseconds for one report of 58 x 256", cost, REPORT_MICROSECONDS, at_least=False, unit=" us"
        ),
        Target("memory of 512 ranks of 58 x 256", most / 1e9, MEMORY_GB, at_least=False, unit=" GB"),
    ]


# (c) One prediction


def prompt(number: int, tokens: int) -> Query:
    """Return a prompt whose first half is in the tables, with a known session and tenant."""
    random = np.random.default_rng((number, tokens))
    prefix = random.integers(1, 1 << 63, tokens // BLOCK).tolist()
    return Query(
        prefix=prefix,
        tokens=random.integers(0, 150_000, tokens).tolist(),
        block_size=BLOCK,
        session=number + 1,
        tenant=number % 8 + 1,
    )


def tables(prompts: list[Query]) -> Tables:
    """Return the state of a router's replica after the tracker has seen requests like these."""
    random = np.random.default_rng(1)
    profiles = random.dirichlet(np.full(256, 0.5), (CLUSTERS, 58)).astype(np.float32)
    model = ClusterModel(1, profiles, random.dirichlet(np.full(CLUSTERS, 4.0)).astype(np.float32), 0.01)
    learning = ModelLearner(TrackerConfig())
    learning.adopt(model, [])
    for number, query in enumerate(prompts):
        known = query.prefix[: len(query.prefix) // 2]
        signatures = pack(random.dirichlet(np.full(CLUSTERS, 0.1), len(known) + 1))
        ids = np.array(query.tokens[:MAX_TOKENS], "<u4").tobytes()
        profile = RequestProfile(
            decision=f"{number}",
            tokens=len(query.tokens),
            cached_tokens=0,
            signature=signatures[0].tobytes(),
            blocks=np.array(known, "<u8").tobytes(),
            block_signatures=signatures[1:].tobytes(),
            block_size=BLOCK,
        )
        outcome = RequestOutcome(
            decision=f"{number}",
            worker_id=1,
            rank=0,
            prefix=0,
            tokens=ids,
            session=query.session,
            tenant=query.tenant,
            predicted=signatures[0].tobytes(),
            predicted_local=None,
            prior_local=None,
        )
        learning.profiled(profile, 1, float(number))
        learning.finished(outcome, float(number))
    found = TableReplica(256 << 20).prepare(read(learning.snapshot("model"))).tables
    assert found is not None
    return found


def predictions(known: Tables, prompts: list[Query], repeats: int, *, guess: bool) -> list[float]:
    """Return microseconds of each prediction. guess: start at the end of the known KV prefix, as the router
    does; here some blocks off."""
    took = []
    for repeat in range(repeats):
        query = prompts[repeat % KNOWN]
        if guess:
            query = msgspec.structs.replace(query, guess=len(query.prefix) // 2 + repeat % 5 - 2)
        known.decoded.clear()  # row look-ups are cached; here every request is the first
        began = time.perf_counter_ns()
        predict(known, query)
        took.append((time.perf_counter_ns() - began) / 1e3)
    return took


def measure_predictions(out: Report, repeats: int) -> list[Target]:
    """Measure all sizes in turn, several times, so that disturbances of the machine affect all alike."""
    cases: dict[tuple[int, bool], list[float]] = {
        (tokens, guess): [] for tokens in PROMPTS for guess in (False, True)
    }
    made = {tokens: [prompt(number, tokens) for number in range(KNOWN)] for tokens in PROMPTS}
    learnt = {tokens: tables(prompts) for tokens, prompts in made.items()}
    for tokens, prompts in made.items():
        for query in prompts:
            said = predict(learnt[tokens], query).known
            assert all(said.evidence), f"a source has nothing to say: {said.evidence}"
            assert said.blocks == len(query.prefix) // 2
    for _ in range(ROUNDS):
        for (tokens, guess), took in cases.items():
            took += predictions(learnt[tokens], made[tokens], max(KNOWN, repeats // ROUNDS), guess=guess)
    for (tokens, guess), took in cases.items():
        note = f"p99 {percentile(took, 0.99):.0f} us, K = {CLUSTERS}, half of {tokens // BLOCK} blocks known"
        out.add(
            f"us for one prediction, prompt of {tokens:,}, {'cached prefix known' if guess else 'no guess'}",
            statistics.median(took),
            note,
        )
    return [
        Target(
            f"microseconds for one prediction, prompt of {tokens:,} tokens",
            statistics.median(cases[tokens, True]),
            PREDICT_MICROSECONDS,
            at_least=False,
            unit=" us",
        )
        for tokens in PROMPTS
    ]


def measure_profile(out: Report) -> None:
    """Measure the time of a rank, off its event loop, to profile a long prompt."""
    random = np.random.default_rng(1)
    profiles = random.dirichlet(np.full(256, 0.5), (CLUSTERS, 58)).astype(np.float32)
    model = ClusterModel(1, profiles, np.full(CLUSTERS, 1 / CLUSTERS, np.float32), 0.01)
    ended = EndedRequest(
        "",
        8192,
        RoutedTrace.of(random.integers(0, 256, (8192, 58, 8)).astype(np.int16)),
        [block.identity for block in identify(range(8192), BLOCK)],
    )
    took = []
    for _ in range(5):
        began = time.perf_counter()
        request_profiles(
            [ended],
            model,
            linear(layers=58, experts=256, ranks=32),
            3,
            np.zeros(32, np.intp),
            block_size=BLOCK,
            max_blocks=1024,
            sampled=[True],
        )
        took.append(1e3 * (time.perf_counter() - began))
    out.add(
        "ms for a rank to profile a prompt of 8,192 tokens",
        statistics.median(took),
        "58 x 256, K = 32, 512 blocks and a sample",
    )


# (d) Drift


class Watched(NamedTuple):
    """False alarms before the change; seconds from the change to its detection (infinite: none)."""

    false_alarms: int
    seconds: float


def watch(flow: Flow, before: Mix, after: Mix, rate: float, seed: int) -> Watched:
    """Run an hour of one mix, then another."""
    config, random = TrackerConfig(), np.random.default_rng(seed)
    drift, alarms = DriftDetector(config, LAYERS, EXPERTS), []
    for second, (counts, tokens) in enumerate(flow.seconds(before, after, HOUR, rate, HOUR + AFTER, random)):
        now = float(second + 1)
        drift.observe(counts, tokens, now)
        if (
            second % round(config.publish_seconds) == 0
            and (shift := drift.evaluate(now)) is not None
            and not shift.settled
        ):
            alarms.append(now)
    late = [now - HOUR for now in alarms if now > HOUR]
    return Watched(sum(now <= HOUR for now in alarms), late[0] if late else float("inf"))


def measure_drift(out: Report, seeds: int) -> list[Target]:
    flow, fast = Flow(), TrackerConfig().fast_seconds
    code, text = mix(CODE), mix(TEXT)
    flips = {
        "code -> text": (code, text),
        "text -> code": (text, code),
        "3:1 -> 1:3": (0.75 * code + 0.25 * text, 0.25 * code + 0.75 * text),
    }
    false_alarms, slowest = 0, 0.0
    for name, (before, after) in flips.items():
        for rate in (2.0, 8.0):
            found = [watch(flow, before, after, rate, seed) for seed in range(seeds)]
            times = [each.seconds / fast for each in found]
            false_alarms += sum(each.false_alarms for each in found)
            slowest = max(slowest, *times)
            note = (
                f"worst {max(times):.2f}; {sum(each.false_alarms for each in found)} false alarms in"
                f" {seeds} h"
            )
            out.add(
                f"fast time constants to notice {name}, {rate:g} requests/s", statistics.median(times), note
            )
    return [
        Target(
            "fast time constants until a flipped mix is noticed, worst of all",
            slowest,
            SILENCES,
            at_least=False,
            unit="",
        ),
        Target(
            f"false alarms in {2 * len(flips) * seeds} stationary hours",
            false_alarms,
            0,
            at_least=False,
            unit="",
        ),
    ]


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Measure the tracker's costs, and its time to detect a popularity shift."""
    out = Report("The tracker", ["figure", "median", "and"])
    out.targets += measure_ingest(out, *((1, 0.5) if quick else (5, 1.0)))
    out.targets += measure_reports(out, 3 if quick else 20)
    out.targets += measure_predictions(out, 2000 if quick else 20_000)
    measure_profile(out)
    out.targets += measure_drift(out, 2 if quick else 10)
    out.notes.append(
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; drift in virtual time, {HOUR} s"
        " before the flip"
    )
    out.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
