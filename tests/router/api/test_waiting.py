"""Waiting over HTTP: admission order, sources of priority, and reports of the wait."""

import asyncio
import json
import logging
from collections import Counter
from typing import Any

import pytest

from fleet.facts.dynamo_kv import KvMetrics
from router.fleet_state.reservations import Booking
from router.prefix_index.prompt import TextPrompt
from router.scheduling.routing_request import FIRST_TRY, RoutingRequest
from router.telemetry.request_log import RequestLog
from tests.router.router_fixture import (
    Answered,
    House,
    MockRank,
    OpenHouse,
    Serve,
    chat,
    engine_joined,
    until,
)
from tests.router.telemetry.test_tracing import Traces, about

CHAT = "/v1/chat/completions"


async def alone(house: House, serve_rank: Serve, packed: bytes, **rank: Any) -> MockRank:
    """Start one engine of one rank."""
    mock = await serve_rank(MockRank(packed))
    for name, value in rank.items():
        setattr(mock, name, value)
    await house.join("alone", [mock.url], packed)
    return mock


def fill(house: House) -> Booking:
    """Occupy the only slot of the only rank."""
    target = house.service.view.target_table("demo").targets[0]
    return house.service.scheduler.reservations.book(target.key, (0, 1, 0, 0), house.service.clock())


def begin(house: House, headers: dict[str, str] | None = None, **more: Any) -> "asyncio.Task[Answered]":
    return asyncio.create_task(house.post(CHAT, chat(**more), headers=headers), name="asks")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, logger="roost.access")
    return lambda: [
        json.loads(record.getMessage()) for record in caplog.records if record.name == "roost.access"
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_waits_for_a_place_and_says_so_in_its_log_line(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes, lines: Any, *, stream: bool
) -> None:
    house = await open_house(max_requests_per_rank=1)
    await alone(house, serve_rank, byte_archive)
    taken = fill(house)
    waiting = begin(house, stream=stream)
    await until(lambda: len(house.service.wait_queue) == 1)
    house.service.release(taken)
    assert (await waiting).status == 200
    assert (await house.post(CHAT, chat())).status == 200
    await until(lambda: len(lines()) == 2)
    waited, direct = lines()
    assert waited["queued_ms"] > 0.0
    assert direct["queued_ms"] == 0.0
    assert waited["priority"] == direct["priority"] == "normal"
    assert house.service.scheduler.reservations.open_bookings == 0


async def test_a_wait_is_a_span_of_its_own(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    traces = Traces()
    house = await open_house(max_requests_per_rank=1, tracer_provider=traces.provider)
    await alone(house, serve_rank, byte_archive)
    assert (await house.post(CHAT, chat())).status == 200
    assert not traces.named("roost.queue")
    taken = fill(house)
    waiting = begin(house, headers={"x-priority": "high"})
    await until(lambda: len(house.service.wait_queue) == 1)
    house.service.release(taken)
    await waiting
    await until(lambda: len(traces.named("chat demo")) == 2)
    span, server = traces.named("roost.queue")[0], traces.named("chat demo")[1]
    assert span.parent is not None
    assert span.parent.span_id == server.context.span_id
    assert about(span) == {"roost.priority": "high"}
    assert about(server)["roost.queued_ms"] > 0.0
    decided = traces.named("roost.decide")[1]
    assert span.end_time is not None
    assert decided.start_time is not None
    assert decided.start_time <= span.end_time  # decided during the wait, woken afterwards


async def test_a_refused_wait_says_why_in_its_span(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    traces = Traces()
    house = await open_house(max_requests_per_rank=1, tracer_provider=traces.provider)
    await alone(house, serve_rank, byte_archive)
    fill(house)
    answer = await house.post(CHAT, chat(), headers={"x-request-timeout-ms": "60"})
    assert (answer.status, answer.json["error"]["code"]) == (503, "queue_timeout")
    assert int(answer.headers["retry-after"]) >= 1
    await until(lambda: traces.named("roost.queue"))
    assert about(traces.named("roost.queue")[0])["error.type"] == "queue_timeout"


async def test_a_request_names_its_class(
    house: House, serve_rank: Serve, byte_archive: bytes, lines: Any
) -> None:
    await alone(house, serve_rank, byte_archive)
    cases: list[tuple[dict[str, str], dict[str, Any], str]] = [
        ({}, {}, "normal"),
        ({"x-priority": "high"}, {}, "high"),
        ({}, {"priority": "low"}, "low"),
        ({"x-priority": "high"}, {"priority": "low"}, "high"),
        ({}, {"priority": 0}, "normal"),
        ({}, {"priority": -3}, "high"),
        ({"x-priority": "1"}, {}, "low"),
    ]
    for headers, body, _ in cases:
        assert (await house.post(CHAT, chat(max_tokens=1, **body), headers=headers)).status == 200
    await until(lambda: len(lines()) == len(cases))
    assert [line["priority"] for line in lines()] == [named for _, _, named in cases]


async def test_what_is_no_class_and_no_deadline_is_a_400(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    rank = await alone(house, serve_rank, byte_archive)
    classes: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({"x-priority": "urgent"}, {}),
        ({}, {"priority": "urgent"}),
        ({}, {"priority": 1.5}),
    ]
    for headers, body in classes:
        answer = await house.post(CHAT, chat(**body), headers=headers)
        assert (answer.status, answer.json["error"]["param"]) == (400, "priority")
    for timeout in ("soon", "0", "-5", "1e3", "9" * 40):
        answer = await house.post(CHAT, chat(), headers={"x-request-timeout-ms": timeout})
        assert (answer.status, answer.json["error"]["param"]) == (400, "x-request-timeout-ms")
    assert not rank.requests


async def test_classes_and_their_header_are_settings(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes, lines: Any
) -> None:
    house = await open_house(classes=("gold", "tin"), default_class="tin", priority_header="x-metal")
    await alone(house, serve_rank, byte_archive)
    assert (await house.post(CHAT, chat(), headers={"x-metal": "gold"})).status == 200
    assert (
        "gold, tin" in (await house.post(CHAT, chat(), headers={"x-metal": "high"})).json["error"]["message"]
    )
    await until(lambda: lines())
    assert lines()[0]["priority"] == "gold"


async def test_the_openapi_document_names_the_headers(house: House) -> None:
    post = (await house.get("/openapi.json")).json["paths"][CHAT]["post"]
    assert [one["name"] for one in post["parameters"] if one["in"] == "header"] == [
        "x-priority",
        "x-request-timeout-ms",
    ]
    assert "queue_timeout" in post["responses"]["503"]["description"]


async def test_choices_that_wait_leave_with_their_client(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(max_requests_per_rank=1)
    rank = await alone(house, serve_rank, byte_archive, hold_after=1)
    asking = begin(house, n=5, stream=True)
    await until(lambda: len(house.service.wait_queue) == 4 and rank.requests)
    await asyncio.sleep(0.03)
    asking.cancel()
    await until(
        lambda: len(house.service.wait_queue) == 0 and house.service.scheduler.reservations.open_bookings == 0
    )


async def test_a_client_that_leaves_while_no_engine_lives_is_forgotten(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes, lines: Any
) -> None:
    house = await open_house(no_engine_wait_seconds=30.0)
    await alone(house, serve_rank, byte_archive)
    house.service.view.leave(house.service.view.target_table("demo").targets[0].key[0])
    asking = begin(house)
    await until(lambda: len(house.service.wait_queue) == 1)
    await asyncio.sleep(0.03)
    asking.cancel()
    await until(lambda: len(house.service.wait_queue) == 0)
    await until(lambda: lines())
    assert lines()[0]["outcome"] == "client_gone"


async def test_a_client_that_leaves_while_it_waits_leaves_the_queue(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes, lines: Any
) -> None:
    house = await open_house(max_requests_per_rank=1)
    rank = await alone(house, serve_rank, byte_archive)
    taken = fill(house)
    waiting = begin(house)
    await until(lambda: len(house.service.wait_queue) == 1)
    await asyncio.sleep(0.03)  # the watch of its client starts after 20 ms
    waiting.cancel()
    await until(lambda: len(house.service.wait_queue) == 0)
    house.service.release(taken)
    await until(lambda: lines())
    assert lines()[0]["outcome"] == "client_gone"
    assert house.service.scheduler.reservations.open_bookings == 0
    assert not rank.requests


async def test_a_stream_whose_rank_died_waits_for_a_place_instead_of_failing(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(max_requests_per_rank=1)
    first, second = await serve_rank(MockRank(byte_archive)), await serve_rank(MockRank(byte_archive))
    first.die_after = 3
    await house.join("first", [first.url], byte_archive, worker_id=1)
    await house.join("second", [second.url], byte_archive, worker_id=2)
    taken = house.service.scheduler.reservations.book((2, 0), (0, 1, 0, 0), house.service.clock())
    broken = begin(house, stream=True)
    await until(lambda: len(house.service.wait_queue) == 1)
    others = [begin(house, headers={"x-priority": "high"}, max_tokens=1) for _ in range(2)]
    await until(
        lambda: sum(len(rank.requests) for rank in (first, second)) + len(house.service.wait_queue) >= 4
    )
    house.service.release(taken)
    answer = await broken
    assert answer.status == 200
    assert "error" not in answer.events[-1]
    assert second.requests[0].emitted == 3
    assert [(await other).status for other in others] == [200, 200]


async def test_choices_are_admitted_each_on_its_own(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(max_requests_per_rank=1)
    rank = await alone(house, serve_rank, byte_archive)
    answer = await house.post(CHAT, chat(n=4, stream=True))
    assert answer.status == 200
    assert [choice["finish_reason"] for event in answer.events for choice in event["choices"]].count(
        "length"
    ) == 4
    assert len(rank.requests) == 4
    assert house.service.scheduler.reservations.open_bookings == 0


async def test_a_request_whose_answer_has_not_begun_is_refused_completely(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(max_requests_per_rank=2, queue_requests=1)
    rank = await alone(house, serve_rank, byte_archive, hold_after=1)
    answer = await house.post(CHAT, chat(n=4))
    assert (answer.status, answer.json["error"]["code"]) == (429, "saturated")
    await until(lambda: house.service.scheduler.reservations.open_bookings == 0)
    assert len(house.service.wait_queue) == 0
    assert len(rank.requests) <= 2


async def test_a_request_waits_for_an_engine_that_restarts(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house()
    rank = await alone(house, serve_rank, byte_archive)
    joined = house.service.view.engine(house.service.view.target_table("demo").targets[0].key[0])
    assert joined is not None
    house.service.view.leave(joined.joined.worker_id)
    waiting = begin(house)
    await until(lambda: len(house.service.wait_queue) == 1)
    await house.join("alone", [rank.url], byte_archive, worker_id=77)
    assert (await waiting).status == 200
    assert house.service.view.target_table("demo").targets[0].key == (77, 0)


async def test_an_unknown_model_and_a_router_without_engines_are_reported_at_once(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    assert (await house.post(CHAT, chat())).json["error"]["code"] == "no_engine"
    await alone(house, serve_rank, byte_archive)
    assert (await house.post(CHAT, chat(model="other"))).status == 404
    assert len(house.service.wait_queue) == 0


async def test_plain_servers_are_waited_for_as_well(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(max_requests_per_rank=1)
    await house.bus.record(
        house.subjects.membership("plain"),
        joined := engine_joined("plain", ["http://127.0.0.1:9"], None, worker_id=5),
    )
    await house.beat(joined)
    await until(lambda: house.service.view.target_table("demo").targets)
    fill(house)
    answer = await house.post(CHAT, chat(), headers={"x-request-timeout-ms": "50"})
    assert (answer.status, answer.json["error"]["code"]) == (503, "queue_timeout")


async def test_a_burst_over_http_is_answered_completely_and_once(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(max_requests_per_rank=4)
    ranks = [await serve_rank(MockRank(byte_archive)) for _ in range(4)]
    await house.join("four", [rank.url for rank in ranks], byte_archive)
    answers = await asyncio.gather(
        *(begin(house, content=f"question {number}", max_tokens=2) for number in range(160))
    )
    assert Counter(answer.status for answer in answers) == {200: 160}
    prompts = [tuple(request.prompt) for rank in ranks for request in rank.requests]
    assert len(prompts) == len(set(prompts)) == 160
    assert house.service.scheduler.reservations.open_bookings == 0
    assert "roost_router_queue_requests" in (await house.get("/metrics")).body.decode()


async def test_a_rank_whose_kv_blocks_are_held_is_saturated(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(max_kv_share=0.5, queue_requests=0)
    await alone(house, serve_rank, byte_archive)  # 1,000 blocks
    worker_id = house.service.view.target_table("demo").targets[0].key[0]
    house.service.scheduler.reservations.report((worker_id, 0), (0, 1, 500, 1), house.service.clock())
    assert (await house.post(CHAT, chat())).status == 200
    house.service.scheduler.reservations.report((worker_id, 0), (0, 1, 501, 1), house.service.clock())
    assert (await house.post(CHAT, chat())).status == 429
    await house.bus.publisher(house.subjects.kv_metrics).publish(
        KvMetrics(worker_id=worker_id, running=1, active_decode_blocks=20)
    )
    await until(lambda: house.service.scheduler.places("demo", house.service.clock()))
    assert (await house.post(CHAT, chat())).status == 200


async def test_a_broken_decision_does_not_stop_the_waiting_of_others(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(max_requests_per_rank=1)
    await alone(house, serve_rank, byte_archive)
    taken = fill(house)
    service = house.service

    class Broken(TextPrompt):
        def chained(self, block_size: int) -> Any:
            raise RuntimeError("a fault of the router")

    digest = service.view.target_table("demo").tokenizer
    request_log = RequestLog("broken", "broken", CHAT, service.clock())
    bad = asyncio.create_task(
        service.wait_queue.admit(
            request_log, RoutingRequest("demo", Broken(b"x", "demo"), 0, 1, digest), "", FIRST_TRY, begun=True
        ),
        name="is broken",
    )
    await until(lambda: len(service.wait_queue) == 1)
    good = begin(house)
    await until(lambda: len(service.wait_queue) == 2)
    service.release(taken)
    assert (await good).status == 200
    with pytest.raises(RuntimeError, match="a fault of the router"):
        await bad


async def test_a_rank_that_answers_busy_is_excluded_for_a_moment(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    ranks = [await serve_rank(MockRank(byte_archive)) for _ in range(2)]
    await house.join("two", [rank.url for rank in ranks], byte_archive)
    ranks[0].answer_status = 429
    answers = [await house.post(CHAT, chat(f"question {number}", max_tokens=1)) for number in range(8)]
    assert {answer.status for answer in answers} == {200}
    assert len(ranks[0].requests) <= 2  # and not one attempt per request
    record = (await house.get(f"/v1/decisions/{answers[-1].headers['x-roost-decision-id']}")).json
    assert [out["reason"] for out in record["excluded"]] in ([], ["saturated: it reported so a moment ago"])


async def test_a_request_waits_for_a_rank_that_says_it_is_busy(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    rank = await alone(house, serve_rank, byte_archive, answer_status=429)
    waiting = begin(house)
    await until(lambda: len(house.service.wait_queue) == 1)
    rank.answer_status = 200
    assert (await waiting).status == 200
    assert len(rank.requests) == 2
    assert house.service.scheduler.reservations.open_bookings == 0


async def test_a_stream_whose_rank_died_waits_for_one_that_says_it_is_busy(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    first, second = await serve_rank(MockRank(byte_archive)), await serve_rank(MockRank(byte_archive))
    first.die_after, second.answer_status = 3, 429
    await house.join("first", [first.url], byte_archive, worker_id=1)
    await house.join("second", [second.url], byte_archive, worker_id=2)
    taken = house.service.scheduler.reservations.book(
        (2, 0), (100_000, 1, 0, 0), house.service.clock()
    )  # the other engine is tried first
    broken = begin(house, stream=True)
    await until(lambda: len(house.service.wait_queue) == 1)
    second.answer_status = 200
    answer = await broken
    assert "error" not in answer.events[-1]
    assert second.requests[-1].emitted == 3
    house.service.release(taken)


async def test_a_rank_that_stays_busy_is_reported_as_429(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(max_attempts=2)
    rank = await alone(house, serve_rank, byte_archive, answer_status=429)
    answer = await house.post(CHAT, chat())
    assert (answer.status, answer.json["error"]["code"]) == (429, "saturated")
    assert int(answer.headers["retry-after"]) >= 1
    assert len(rank.requests) == 2
