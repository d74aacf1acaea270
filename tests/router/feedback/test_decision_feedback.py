"""Feedback on decisions: measured speeds, re-priced decisions, predictions compared with observations, and
removed series.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from fleet.facts.activity import RequestProfile, RequestsProfiled
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import Capabilities, EngineJoined
from fleet.placement import linear
from fleet.signatures import pack
from fleet.timing import EngineSpeed
from router.feedback.decision_feedback import LEARNT_OF_A_RANK, PROBE_SECONDS, TICK_SECONDS
from router.fleet_state.reservations import PREFILL, SEQUENCES, Booking
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.cost import TERMS
from router.scheduling.decision import Decision
from router.scheduling.routing_request import FIRST_TRY, Attempt, RoutingRequest
from router.scheduling.speed_correction import DECODE_SPEED, HALF_LIFE_SECONDS
from router.service import RouterService
from router.telemetry.metrics import LAPS
from router.telemetry.request_log import RequestLog
from tests.router.learnt_tables import halves, published_clusters, tables
from tests.router.router_fixture import SHAPE, metric
from tests.router.sync.test_peer_routers import RouterNetwork

SPEED = EngineSpeed(prefill_token=1e-3, step=0.01, decode_sequence=1e-4, decode_block=0.0, dispatch=0.0)
FAR = EngineSpeed(prefill_token=1e-3, step=0.01, decode_sequence=1e-4, dispatch=1e-3)
_fresh = count(100_000)
PLAIN = Capabilities(experts=False, kv_events=False)


@pytest.fixture
async def network() -> AsyncIterator[RouterNetwork]:
    async with RouterNetwork() as network:
        yield network


def series(service: RouterService, name: str, **labels: str) -> float:
    """Return the value of one series of the service's metrics; 0.0 when there is none."""
    return metric(service.metrics, name, **labels)


def need(tokens: int, output: int = 20) -> RoutingRequest:
    """Return a request whose prompt shares no prefix with any other."""
    return RoutingRequest(
        "demo", TokenPrompt([next(_fresh), *range(tokens - 1)]), tokens + output, output, None
    )


def book(
    service: RouterService, asked: RoutingRequest, attempt: Attempt = FIRST_TRY
) -> tuple[Decision, Booking]:
    return service.book(
        RequestLog("r", service.new_decision_id(), "/v1/completions", 0.0), asked, "", attempt
    )


def terms(service: RouterService, joined: EngineJoined, name: str, asked: RoutingRequest) -> float:
    """Return a cost term of a request at the engine's first rank now, ms."""
    decision = service.decide(asked, "d")
    at = [int(target) for target in decision.at].index(decision.target_table.index[joined.worker_id, 0])
    return float(decision.scores.terms[TERMS.index(name), at])


async def serve(
    service: RouterService, slowness: float, tokens: int, joined: EngineJoined, *, reports: bool
) -> None:
    """Serve one request on an engine whose times are `slowness` times those that it states."""
    bus = service.fleet_subscriber
    assert bus is not None
    decision, booking = book(service, need(tokens, 64))
    mine = decision.target.key[0] == joined.worker_id
    factor = slowness if mine else 1.0
    queued, running = (
        int(decision.load[PREFILL, decision.chosen]),
        int(decision.load[SEQUENCES, decision.chosen]) + 1,
    )
    step = SPEED.step + SPEED.decode_sequence * running
    await asyncio.sleep(factor * ((tokens + queued) * SPEED.prefill_token + 1.5 * step))
    service.first_token(booking)
    for _ in range(4):
        await asyncio.sleep(16 * factor * step)
        service.emitted(booking, 16)
        if reports:
            bus.handle(
                KvMetrics(
                    worker_id=decision.target.key[0],
                    running=running,
                    active_decode_blocks=0,
                    step_seconds=factor * step,
                )
            )
    service.release(booking)


@pytest.mark.looptime
@pytest.mark.parametrize(("slowness", "reports"), [(3.0, True), (1 / 3, False)])
async def test_speeds_wrong_by_three_are_corrected_after_some_tens_of_requests(
    network: RouterNetwork, slowness: float, reports: bool
) -> None:
    liar = await network.engine("liar", speed=SPEED, capabilities=PLAIN)
    service = await network.ready_router()
    asked = need(400, 64)
    honest_prefill, honest_decode = (
        terms(service, liar, "prefill", asked),
        terms(service, liar, "decode", asked),
    )
    for number in range(30):
        await serve(service, slowness, 100 + 37 * (number % 7), liar, reports=reports)
    await asyncio.sleep(TICK_SECONDS)
    assert terms(service, liar, "prefill", asked) == pytest.approx(slowness * honest_prefill, rel=0.15)
    assert terms(service, liar, "decode", asked) == pytest.approx(slowness * honest_decode, rel=0.15)
    honest = await network.engine("honest", speed=SPEED, capabilities=PLAIN)
    await asyncio.sleep(1.1)  # until its heartbeat
    wanted = honest if slowness > 1 else liar
    assert service.decide(asked, "d").target.key[0] == wanted.worker_id
    assert series(service, "speed_factor", worker_id=str(liar.worker_id), of="prefill") == pytest.approx(
        slowness, rel=0.15
    )
    await asyncio.sleep(4 * HALF_LIFE_SECONDS)
    assert terms(service, liar, "prefill", asked) == pytest.approx(honest_prefill)


@pytest.mark.looptime
async def test_a_restarted_engine_is_believed_anew(network: RouterNetwork) -> None:
    liar = await network.engine("liar", speed=SPEED, capabilities=PLAIN)
    service = await network.ready_router()
    for _ in range(40):
        await serve(service, 3.0, 200, liar, reports=True)
    await asyncio.sleep(TICK_SECONDS)
    assert series(service, "speed_factor", of="prefill") > 2
    again = await network.engine("liar", speed=SPEED, capabilities=PLAIN, worker_id=77)
    await asyncio.sleep(1.0)
    assert service.view.engine(liar.worker_id) is None
    assert service.scheduler.speeds.of(service.view.target_table("demo"), 0) == (1.0, 1.0)
    assert series(service, "speed_factor", worker_id=str(liar.worker_id)) == 0.0
    assert series(service, "speed_factor", worker_id=str(again.worker_id), of="prefill") == 1.0


@pytest.mark.looptime
async def test_a_request_that_outlives_its_engine_says_nothing_of_the_next_one(
    network: RouterNetwork,
) -> None:
    await network.engine("e", speed=SPEED, capabilities=PLAIN)
    service = await network.ready_router()
    outliving = [book(service, need(100))[1] for _ in range(2)]
    service.first_token(outliving[0])
    await network.engine("e", speed=SPEED, capabilities=PLAIN, worker_id=77)
    await asyncio.sleep(1.1)
    for _ in range(20):
        await serve(service, 2.0, 200, network.engines[-1], reports=False)
    service.first_token(outliving[1])
    for _ in range(40):
        service.emitted(outliving[0], 16)
    await asyncio.sleep(TICK_SECONDS)
    assert series(service, "speed_factor", worker_id="77", of="prefill") == pytest.approx(2.0, rel=0.15)


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("attempt", "queued"), [(Attempt(2), 0.0), (FIRST_TRY, 0.5)], ids=["retried or continued", "queued"]
)
async def test_disturbed_requests_say_nothing_of_speed(
    network: RouterNetwork, attempt: Attempt, queued: float
) -> None:
    liar = await network.engine("liar", speed=SPEED, capabilities=PLAIN)
    service = await network.ready_router()
    for _ in range(40):
        request_log = RequestLog("r", service.new_decision_id(), "/v1/completions", 0.0)
        request_log.queued_seconds = queued
        _, booking = service.book(request_log, need(200), "", attempt)
        await asyncio.sleep(3.0)
        service.first_token(booking)
        service.release(booking)
    await asyncio.sleep(TICK_SECONDS)
    assert service.scheduler.speeds.of(service.view.target_table("demo"), 0) == (1.0, 1.0)
    assert terms(service, liar, "prefill", need(100)) == pytest.approx(100.0)


@pytest.mark.looptime
async def test_steps_of_a_load_that_is_over_say_nothing(network: RouterNetwork) -> None:
    joined = await network.engine("e", speed=SPEED, capabilities=PLAIN)
    service = await network.ready_router()
    voice = network.bus.publisher(network.subjects.kv_metrics)
    for _ in range(40):
        await voice.publish(KvMetrics(worker_id=joined.worker_id, running=0, step_seconds=0.5))
        await voice.publish(
            KvMetrics(
                worker_id=joined.worker_id, running=10, step_seconds=SPEED.step + 10 * SPEED.decode_sequence
            )
        )
    await asyncio.sleep(2 * TICK_SECONDS)
    assert series(service, "speed_factor", of="decode") == pytest.approx(1.0)


@pytest.mark.looptime
async def test_a_rank_that_has_served_nothing_seems_no_faster_than_its_slow_engine(
    network: RouterNetwork,
) -> None:
    joined = await network.engine("e", ranks=2, speed=SPEED, capabilities=PLAIN)
    service = await network.ready_router()
    voice = network.bus.publisher(network.subjects.kv_metrics)
    slow = 2.0 * (SPEED.step + SPEED.decode_sequence)
    for _ in range(40):
        await voice.publish(KvMetrics(worker_id=joined.worker_id, dp_rank=1, running=1, step_seconds=slow))
    await asyncio.sleep(2 * TICK_SECONDS)
    table, speeds = service.view.target_table("demo"), service.scheduler.speeds
    assert [speeds.of(table, rank)[DECODE_SPEED] for rank in (0, 1)] == pytest.approx([2.0, 2.0], rel=0.1)


@pytest.mark.looptime
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
async def test_steps_of_no_sensible_length_are_refused(network: RouterNetwork, seconds: float) -> None:
    joined = await network.engine("e", speed=SPEED, capabilities=PLAIN)
    service = await network.ready_router()
    before = series(service, "bus_messages_refused_total")
    await network.bus.publisher(network.subjects.kv_metrics).publish(
        KvMetrics(worker_id=joined.worker_id, running=1, step_seconds=seconds)
    )
    await asyncio.sleep(0.1)
    assert series(service, "bus_messages_refused_total") == before + 1


@pytest.mark.looptime
async def test_first_tokens_are_measured_as_predicted_and_as_observed(network: RouterNetwork) -> None:
    await network.engine("e", speed=SPEED, capabilities=PLAIN)
    service = await network.ready_router()
    _, booking = book(service, need(1000))
    await asyncio.sleep(2.0)
    service.first_token(booking)
    service.first_token(booking)
    service.feedback.learn()
    assert series(service, "observed_first_token_seconds_count", model="demo") == 1
    assert series(service, "observed_first_token_seconds_sum", model="demo") == pytest.approx(2.0)
    assert series(service, "predicted_first_token_seconds_sum", model="demo") == pytest.approx(
        1.0 + 2.5 * 0.0101
    )  # two chunks of 512 tokens, and a step


@pytest.mark.looptime
async def test_a_busy_rank_teaches_no_more_than_a_few_first_tokens_per_tick(network: RouterNetwork) -> None:
    for name in ("a", "b"):
        await network.engine(name, speed=SPEED, capabilities=PLAIN)
    service = await network.ready_router()

    async def answer(requests: int) -> Counter[int]:
        booked = [book(service, need(10)) for _ in range(requests)]
        await asyncio.sleep(0.001)
        for _, booking in booked:
            service.first_token(booking)
            service.release(booking)
        return Counter(decision.target.key[0] for decision, _ in booked)

    def learnt() -> float:
        return series(service, "observed_first_token_seconds_count", model="demo")

    assert min((await answer(100)).values()) > LEARNT_OF_A_RANK
    await asyncio.sleep(2 * TICK_SECONDS)
    assert learnt() == 2 * LEARNT_OF_A_RANK
    await answer(2)
    await asyncio.sleep(2 * TICK_SECONDS)
    assert learnt() == 2 * LEARNT_OF_A_RANK + 2


@pytest.mark.looptime
async def test_a_load_that_was_believed_wrongly_is_regretted_once_it_is_reported(
    network: RouterNetwork,
) -> None:
    one, other = [await network.engine(name, speed=SPEED, capabilities=PLAIN) for name in ("a", "b")]
    service = await network.ready_router()
    await network.report(one, active_prefill_tokens=1)
    await network.report(other, active_prefill_tokens=100)
    await asyncio.sleep(1.0)
    decision, booking = book(service, need(500))
    assert decision.target.key[0] == one.worker_id
    await asyncio.sleep(0.15)
    await network.report(one, active_prefill_tokens=501 + 2000, running=1)  # our own 500, and 2,000 of others
    await network.report(other, active_prefill_tokens=100)
    await network.report(
        one, active_prefill_tokens=0, running=1
    )  # the first report counts; later ones show progress
    await asyncio.sleep(2 * TICK_SECONDS)
    assert series(service, "regret_seconds_count", model="demo") == 1
    assert series(service, "regret_seconds_sum", model="demo") == pytest.approx(1.901 + 20 * 1e-4, abs=0.01)
    service.release(booking)


@pytest.mark.looptime
async def test_one_decision_a_tick_is_looked_at_again(network: RouterNetwork) -> None:
    await network.engine("e", speed=SPEED, capabilities=PLAIN)
    service = await network.ready_router(max_queue_seconds=1e6)
    for _ in range(200):
        _, booking = book(service, need(10))
        service.release(booking)
        await asyncio.sleep(0.01)
    await asyncio.sleep(1.0)
    assert 3 <= series(service, "regret_seconds_count") <= 2.0 / TICK_SECONDS
    assert series(service, "regret_seconds_sum") == 0.0


async def priced_router(network: RouterNetwork) -> tuple[EngineJoined, RouterService]:
    """Return a router that has clusters and tables, and an engine of two ranks whose placement is aligned
    with them.
    """
    placement = linear(layers=SHAPE.layers, experts=SHAPE.experts, ranks=2).record()
    joined = await network.engine("e", ranks=2, speed=FAR, shape=SHAPE, placement=placement)
    service = await network.ready_router()
    assert service.fleet_subscriber is not None
    service.fleet_subscriber.learn_clusters("demo", halves(skew=50.0))
    service.fleet_subscriber.tracker.add("demo")
    await network.bus.publisher(network.subjects.clusters).publish(published_clusters(halves(skew=50.0)))
    await network.bus.publisher(network.subjects.tables).publish(tables(shares=(0.9, 0.1)))
    for _ in range(100):
        await asyncio.sleep(0.1)
        prediction = service.decide(need(100), "d").prediction
        if prediction is not None and prediction.priced.all():
            return joined, service
    raise AssertionError("never priced")


def profiled(
    joined: EngineJoined, decision: Decision, weights: Any, local: float, **more: Any
) -> RequestsProfiled:
    profile = RequestProfile(
        decision=decision.id,
        tokens=120,
        cached_tokens=0,
        signature=pack(np.asarray(weights)).tobytes(),
        local=local,
        **more,
    )
    return RequestsProfiled(
        engine="e",
        worker_id=joined.worker_id,
        rank=decision.target.rank,
        model="demo",
        epoch=0,
        clusters=1,
        requests=(profile,),
    )


@pytest.mark.looptime
async def test_locality_is_measured_as_predicted_and_as_observed_and_counts_as_regret(
    network: RouterNetwork,
) -> None:
    joined, service = await priced_router(network)
    voice = network.bus.publisher(network.subjects.requests_profiled("e"))
    decision, booking = book(service, need(100))
    assert decision.target.rank == 0
    assert decision.prediction is not None
    await asyncio.sleep(3 * TICK_SECONDS)
    service.release(booking)
    assert series(service, "regret_seconds_count") == 0  # it waits for the request's profile
    await voice.publish(profiled(joined, decision, [0.0, 1.0], 0.02))
    await asyncio.sleep(0.1)
    assert series(service, "locality_predicted_sum", model="demo") == pytest.approx(
        float(decision.prediction.local[0])
    )
    assert series(service, "locality_observed_sum", model="demo") == pytest.approx(0.02)
    assert series(service, "profiles_received_total", outcome="ours") == 1
    assert series(service, "regret_seconds_count") == 1
    assert series(service, "regret_seconds_sum") > 0.1  # the other rank would have served all of it locally


@pytest.mark.looptime
async def test_profiles_of_others_are_ignored_and_a_request_without_a_profile_is_settled_in_the_end(
    network: RouterNetwork,
) -> None:
    joined, service = await priced_router(network)
    voice = network.bus.publisher(network.subjects.requests_profiled("e"))
    decision, booking = book(service, need(100))
    service.release(booking)
    elsewhere = profiled(joined, decision, [1.0, 0.0], 0.9)
    unknown = profiled(joined, decision, [1.0, 0.0], 0.9)
    for message in (
        RequestsProfiled(**{**_fields(elsewhere), "worker_id": 5}),
        RequestsProfiled(
            **{
                **_fields(unknown),
                "requests": (RequestProfile(decision="ffff", tokens=1, cached_tokens=0, signature=b""),),
            }
        ),
    ):
        await voice.publish(message)
    await asyncio.sleep(0.2)
    assert series(service, "profiles_received_total", outcome="unknown") == 2
    assert series(service, "locality_observed_count") == 0
    await asyncio.sleep(PROBE_SECONDS + 1)
    assert series(service, "regret_seconds_count") == 1


def _fields(event: RequestsProfiled) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


@pytest.mark.looptime
async def test_nonsense_in_a_profile_changes_nothing_but_is_survived(network: RouterNetwork) -> None:
    joined, service = await priced_router(network)
    voice = network.bus.publisher(network.subjects.requests_profiled("e"))
    for local, signature, cached in ((float("nan"), b"\xff" * 8, -5), (7.0, b"", 10**9), (-1.0, b"123", 3)):
        decision, booking = book(service, need(100))
        service.release(booking)
        await asyncio.sleep(3 * TICK_SECONDS)
        profile = RequestProfile(
            decision=decision.id, tokens=1, cached_tokens=cached, signature=signature, local=local
        )
        await voice.publish(
            RequestsProfiled(
                **{**_fields(profiled(joined, decision, [1.0, 0.0], 0.5)), "requests": (profile,)}
            )
        )
        await asyncio.sleep(0.1)
    assert series(service, "regret_seconds_count") == 3
    assert series(service, "locality_observed_count") == 0


@pytest.mark.looptime
async def test_many_profiles_are_dropped_unread(network: RouterNetwork) -> None:
    joined, service = await priced_router(network)
    voice = network.bus.publisher(network.subjects.requests_profiled("e"))
    decision, booking = book(service, need(100))
    service.release(booking)
    for _ in range(500):
        await voice.publish(profiled(joined, decision, [1.0, 0.0], 0.9))
    await asyncio.sleep(5.0)
    read, unread = (
        series(service, "profiles_received_total", outcome=outcome) for outcome in ("ours", "unread")
    )
    assert read < 100
    assert read + unread == 500


@pytest.mark.looptime
async def test_ranks_stages_and_terms_are_exported_and_lost_workers_are_not(network: RouterNetwork) -> None:
    one, other = [await network.engine(name, speed=SPEED, capabilities=PLAIN) for name in ("a", "b")]
    service = await network.ready_router()
    decisions = [book(service, need(100)) for _ in range(2 * LAPS)]
    promised = sum(
        series(service, "rank_prefill_tokens", worker_id=str(joined.worker_id), dp_rank="0")
        for joined in (one, other)
    )
    assert promised == 2 * LAPS * 100
    assert series(service, "rank_sequences", model="demo") == 2 * LAPS
    assert (
        series(service, "overhead_seconds_count", stage="score")
        == series(service, "overhead_seconds_count", stage="book")
        == 2
    )
    assert series(service, "overhead_seconds_count", stage="decide") == 2 * LAPS
    assert series(service, "term_seconds_count", term="prefill") == 2 * LAPS
    expected = (
        sum(float(decision.scores.terms[TERMS.index("queue"), decision.chosen]) for decision, _ in decisions)
        / 1000
    )
    assert series(service, "term_seconds_sum", model="demo", term="queue") == pytest.approx(expected)
    assert series(service, "decisions_total", worker_id=str(one.worker_id)) == LAPS
    service.forget_worker(one.worker_id)
    assert series(service, "decisions_total", worker_id=str(one.worker_id)) == 0
    assert series(service, "rank_sequences", worker_id=str(one.worker_id)) == 0
    for _, booking in decisions:
        service.release(booking)
    assert service.feedback.watched == 0
