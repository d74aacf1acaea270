"""Ranks that fail at times, or for a while: every request is answered once, and failing ranks are excluded,
over HTTP.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from aiohttp import web

from bus.memory import MemoryBus
from fleet.completions import RankRequest
from fleet.facts.engines import RankDrained
from router.api.app import create_app
from router.service import RouterService
from tests.router.router_fixture import (
    Answered,
    House,
    MockRank,
    OpenHouse,
    Serve,
    chat,
    engine_joined,
    rendered,
    running,
    served_app,
    until,
)

CHAT = "/v1/chat/completions"
FAULTS = ("server_error", "hang_up", "break_early", "garbage", "break_late", "no_finish", "end_early")
MOST_FAULTS = 3
"""of one request: it finds a rank that answers, since there are four"""
TOKENS = 24


class FaultyRank(MockRank):
    """One in a fixed number of forwards fails, over all ranks that share `turns`, each time in another
    way. No request fails more than `MOST_FAULTS` times over all ranks that share `faults`."""

    def __init__(self, packed: bytes, turns: Iterator[int], faults: Counter[str], every: int) -> None:
        super().__init__(packed)
        self.turns = turns
        self.faults = faults
        """of each request, by its id"""
        self.every = every
        self.asked_at_once: Counter[str] = Counter()
        """open forwards of one request, by its id"""
        self.failed: Counter[str] = Counter()

    async def completions(self, http: web.Request) -> web.StreamResponse:
        request_id = http.headers["x-request-id"]
        self.asked_at_once[request_id] += 1
        assert self.asked_at_once[request_id] == 1, "the same request is here twice at once"
        try:
            return await self._answered(http, request_id)
        finally:
            self.asked_at_once[request_id] -= 1

    async def _answered(self, http: web.Request, request_id: str) -> web.StreamResponse:
        turn = next(self.turns)
        if turn % self.every or self.faults[request_id] == MOST_FAULTS:
            return await super().completions(http)
        self.faults[request_id] += 1
        fault = FAULTS[turn // self.every % len(FAULTS)]
        self.failed[fault] += 1
        if fault == "server_error":
            return web.json_response({"error": {"message": "out of luck"}}, status=500)
        assert http.transport is not None
        if fault == "hang_up":
            http.transport.abort()
            return web.Response()
        request = msgspec.json.decode(await http.read(), type=RankRequest)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        whole = list(self._chunks(request))
        kept = {"break_early": 1, "garbage": 3, "end_early": 2}.get(fault, len(whole) - 2)
        for chunk in whole[: max(0, kept)]:
            await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
        if fault == "garbage":
            await response.write(b'data: {"error": {"message": "rank lost"}}\n\n')
        elif fault == "no_finish":
            await response.write(b"data: [DONE]\n\n")
        elif fault != "end_early":
            http.transport.abort()
        return response


async def faulty_engines(
    house: House, serve_rank: Serve, packed: bytes, every: int, ranks: tuple[int, ...] = (2, 2)
) -> list[FaultyRank]:
    turns, faults, found = itertools.count(1), Counter[str](), []
    for number, count in enumerate(ranks, start=1):
        mocks = [FaultyRank(packed, turns, faults, every) for _ in range(count)]
        for mock in mocks:
            await serve_rank(mock)
        await house.join(f"e{number}", [mock.url for mock in mocks], packed, worker_id=number)
        found += mocks
    return found


def text_of(answer: Answered) -> str:
    """Return the text of an answer, streamed or not, which must be good."""
    assert answer.status == 200, answer.body
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert not any("error" in event for event in answer.events), answer.events
        return "".join(
            choice["delta"].get("content") or "" for event in answer.events for choice in event["choices"]
        )
    content: str = answer.json["choices"][0]["message"]["content"]
    assert answer.json["usage"]["completion_tokens"] == TOKENS
    return content


async def send_all(house: House, urls: list[str], rank: MockRank, count: int, at_once: int) -> None:
    """Send this number of different requests over these routers. Each answer is compared with the undisturbed
    one.
    """
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            content = f"request number {number} " + "word " * (number % 7)
            body = msgspec.json.encode(chat(content, seed=number, max_tokens=TOKENS, stream=bool(number % 3)))
            async with house.http.post(urls[number % len(urls)] + CHAT, data=body) as response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                answer = Answered(response.status, headers, await response.read())
            assert text_of(answer) == rank.text(
                rank.tokenizer.encode_rendered(rendered(content)), number, TOKENS
            )

    async with asyncio.TaskGroup() as clients:
        for _ in range(at_once):
            clients.create_task(client(), name="sends one request after another")


def idle(service: RouterService) -> bool:
    """Return True if no trace of any request is left."""
    return service.scheduler.reservations.open_bookings == 0 and service.scheduler.health.open_visits == 0


def in_all(mocks: list[FaultyRank]) -> Counter[str]:
    return sum((mock.failed for mock in mocks), Counter())


async def test_with_a_tenth_of_all_forwards_failing_no_request_is_lost_or_doubled(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    mocks = await faulty_engines(house, serve_rank, byte_archive, every=10)
    gone = await house.join(
        "refuses", ["http://127.0.0.1:9"], byte_archive, worker_id=9
    )  # connections to it are refused
    async with asyncio.TaskGroup() as tasks:
        beats = tasks.create_task(beating(house, gone), name="beats")
        await send_all(house, [house.url], mocks[0], 240, 16)
        beats.cancel()
    assert in_all(mocks).total() >= 24
    assert set(in_all(mocks)) == set(FAULTS)
    await until(lambda: idle(house.service))
    metrics = (await house.get("/metrics")).body.decode()
    assert 'roost_router_retries_total{cause="connect"}' in metrics
    assert "roost_router_retries_refused_total 0.0" in metrics


async def beating(house: House, joined: Any) -> None:
    """Send signs of life repeatedly, so that the rank is tried repeatedly."""
    while True:
        await house.beat(joined)
        await asyncio.sleep(0.05)


async def test_two_routers_lose_nothing_while_ranks_fail(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    mocks = await faulty_engines(house, serve_rank, byte_archive, every=10)
    async with AsyncExitStack() as stack:
        second = await stack.enter_async_context(
            running(RouterService(MemoryBus(house.broker), house.subjects, house.service.config))
        )
        url = await stack.enter_async_context(served_app(create_app(second)))
        await until(lambda: second.view.models(live=False))
        for state in list(second.view.engines()):
            await house.beat(state.joined)
        await until(
            lambda: (
                len(second.view.target_table("demo").targets) == 4
                and second.tokenizer(second.view.target_table("demo").tokenizer) is not None
            )
        )
        await send_all(house, [house.url, url], mocks[0], 120, 16)
        for service in (house.service, second):
            await until(lambda service=service: idle(service))
    assert in_all(mocks).total() >= 12


async def test_attempts_and_retries_are_bounded_when_everything_fails(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    # Retries after a connection that was not made in time need no budget.
    limits = {"max_attempts": 3, "retry_share": 0.2, "min_retries": 10, "connect_seconds": 30.0}
    house = await open_house(breaker_failures=1000, **limits)
    mocks = await faulty_engines(house, serve_rank, byte_archive, every=1, ranks=(1, 1, 1, 1, 1))
    for mock in mocks:
        mock.turns = itertools.repeat(len(FAULTS))  # HTTP 500, always
    first = await house.post(CHAT, chat())
    assert (first.status, sum(mock.failed.total() for mock in mocks)) == (503, 3)
    assert "3 ranks failed this request" in first.json["error"]["message"]
    answers = await asyncio.gather(*(house.post(CHAT, chat(f"number {number}")) for number in range(99)))
    assert {answer.status for answer in answers} == {503}
    assert all("retry-after" in answer.headers for answer in answers)
    refused = [
        answer
        for answer in answers
        if "too many of the last requests were tried again" in answer.json["error"]["message"]
    ]
    forwards = sum(mock.failed.total() for mock in mocks)
    assert len(refused) >= 60
    # A fifth of the requests that came, and of those still open.
    assert 100 + 10 <= forwards <= 100 + 0.2 * (100 + 100) + 1
    metrics = (await house.get("/metrics")).body.decode()
    assert f"roost_router_retries_refused_total {float(len(refused))}" in metrics


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_engine_dies_waits_for_the_next_one(
    house: House, serve_rank: Serve, byte_archive: bytes, *, stream: bool, tokens: int
) -> None:
    ranks = [await serve_rank(MockRank(byte_archive)) for _ in range(2)]
    ranks[0].die_after = tokens
    ranks[1].answer_status = 503  # it lost the other rank
    await house.join("e1", [rank.url for rank in ranks], byte_archive, worker_id=1)
    asked = asyncio.ensure_future(house.post(CHAT, chat(stream=stream, max_tokens=TOKENS)))
    await until(lambda: len(house.service.wait_queue) == 1)
    ranks[0].die_after, ranks[1].answer_status = None, 200
    await house.join("e1", [rank.url for rank in ranks], byte_archive, worker_id=2)
    prompt = ranks[0].tokenizer.encode_rendered(rendered("hello there"))
    assert text_of(await asked) == ranks[0].text(prompt, 5, TOKENS)
    await until(lambda: idle(house.service))


async def test_a_request_whose_engine_failed_and_does_not_return_is_refused_in_words(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(queue_wait_seconds=0.3)
    rank = await serve_rank(MockRank(byte_archive))
    rank.die_after = 0
    await house.join("alone", [rank.url], byte_archive)
    answer = await house.post(CHAT, chat())
    assert (answer.status, answer.json["error"]["code"]) == (503, "queue_timeout")
    message = answer.json["error"]["message"]
    assert "1 attempts of this request failed, the last with broken, and no other rank had room" in message


async def test_a_request_whose_engine_failed_is_refused_at_once_where_none_may_wait(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(queue_requests=0)
    rank = await serve_rank(MockRank(byte_archive))
    rank.die_after = 0
    await house.join("alone", [rank.url], byte_archive)
    answer = await house.post(CHAT, chat())
    assert (answer.status, answer.json["error"]["code"]) == (503, "upstream_failed")


async def test_a_breaker_opens_is_reported_and_closes_again(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(breaker_failures=3, breaker_seconds=0.8, policy="round_robin")
    bad, good = [await serve_rank(MockRank(byte_archive)) for _ in range(2)]
    for number, rank in enumerate((bad, good), start=1):
        await house.join(f"e{number}", [rank.url], byte_archive, worker_id=number)
    bad.answer_status = 500
    while len(bad.requests) < 3:
        assert (await house.post(CHAT, chat())).status == 200
    record = (await house.post("/v1/route", chat())).json
    assert record["excluded"] == [
        {
            "engine": "e1",
            "rank": 0,
            "reason": "its breaker is open: too many failures in a row; excluded for 0.8 s",
        }
    ]
    await until(lambda: 'dp_rank="0"' in exposed(house, "rank_excluded"))
    assert 'cause="breaker"' in exposed(house, "rank_excluded")
    assert "roost_router_breakers_opened_total 1.0" in exposed(house, "breakers_opened_total")
    asked_before = len(bad.requests)
    for _ in range(4):
        await house.post(CHAT, chat())
    assert len(bad.requests) == asked_before
    bad.answer_status = 200
    await until(
        lambda: (
            not house.service.scheduler.health.exclusions(
                house.service.view.target_table("demo"), house.service.clock()
            ).every
        )
    )
    for _ in range(4):
        assert (await house.post(CHAT, chat())).status == 200
    assert len(bad.requests) > asked_before
    assert not (await house.post("/v1/route", chat())).json["excluded"]


def exposed(house: House, name: str) -> str:
    """Return the samples of a metric family."""
    lines = house.service.metrics.exposition().decode().splitlines()
    return "\n".join(line for line in lines if line.startswith(f"roost_router_{name}"))


async def test_breakers_never_leave_a_model_without_ranks_and_that_is_reported(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(breaker_failures=1, breaker_seconds=60.0)
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("alone", [rank.url], byte_archive)
    rank.answer_status = 500
    assert (await house.post(CHAT, chat())).status == 503
    rank.answer_status = 200
    answer = await house.post(CHAT, chat())
    assert answer.status == 200
    record = (await house.get(f"/v1/decisions/{answer.headers['x-roost-decision-id']}")).json
    assert [(ignored["engine"], ignored["rank"]) for ignored in record["ignored"]] == [("alone", 0)]
    assert "its breaker is open" in record["ignored"][0]["reason"]
    assert "decisions_in_panic_total 1.0" in exposed(house, "decisions_in_panic_total")
    assert not (await house.post("/v1/route", chat())).json["ignored"]  # it answered: the breaker is closed


async def test_a_clients_own_error_and_a_busy_rank_open_no_breaker(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(breaker_failures=1, max_attempts=2)
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("alone", [rank.url], byte_archive)
    for status, answered in ((400, (400,)), (429, (429, 503))):
        rank.answer_status = status
        assert (await house.post(CHAT, chat())).status in answered
    assert not house.service.scheduler.health.exclusions(
        house.service.view.target_table("demo"), house.service.clock()
    ).every


async def test_a_client_that_leaves_frees_the_probe_of_a_half_open_breaker(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(breaker_failures=1, breaker_seconds=0.05)
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("alone", [rank.url], byte_archive)
    rank.answer_status = 500
    await house.post(CHAT, chat())
    rank.answer_status, rank.hold_after = 200, 0
    await asyncio.sleep(0.06)
    rank.asked.clear()
    probe = asyncio.ensure_future(house.post(CHAT, chat(stream=True)))
    await rank.asked.wait()
    health, table = house.service.scheduler.health, house.service.view.target_table("demo")
    assert "half open" in next(iter(health.exclusions(table, house.service.clock()).every.values()))
    probe.cancel()
    await until(lambda: not health.exclusions(table, house.service.clock()).every)
    rank.hold_after = None
    assert (await house.post(CHAT, chat())).status == 200


# Drains


async def drain(house: House, worker_id: int, rank: int | None, *, draining: bool = True) -> None:
    engine = f"e{worker_id}"
    drained = RankDrained(
        engine=engine, worker_id=worker_id, rank=rank, draining=draining, reason="new fan" if draining else ""
    )
    await house.bus.record(house.subjects.drains(engine, rank), drained)


def draining(service: RouterService) -> int:
    return len(service.scheduler.health.exclusions(service.view.target_table("demo"), service.clock()).hard)


async def test_a_draining_rank_finishes_its_streams_and_gets_no_new_ones(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    rank, other = [await serve_rank(MockRank(byte_archive)) for _ in range(2)]
    await house.join("e1", [rank.url], byte_archive, worker_id=1)
    rank.hold_after = 3
    async with house.http.post(house.url + CHAT, json=chat(stream=True)) as response:
        await rank.asked.wait()
        await house.join("e2", [other.url], byte_archive, worker_id=2)
        await drain(house, 1, None)
        await until(lambda: draining(house.service) == 1)
        for number in range(6):
            assert (await house.post(CHAT, chat(f"number {number}"))).status == 200
        assert (len(rank.requests), len(other.requests)) == (1, 6)
        record = (await house.post("/v1/route", chat())).json
        assert record["excluded"] == [{"engine": "e1", "rank": 0, "reason": "draining: new fan"}]
        rank.hold_after = None
        rank.break_off()  # the stream is continued where requests may go
        body = await response.read()
    answer = Answered(response.status, {"content-type": "text/event-stream"}, body)
    assert text_of(answer) == rank.text(rank.tokenizer.encode_rendered(rendered("hello there")), 5, 12)
    await drain(house, 1, None, draining=False)
    await until(lambda: draining(house.service) == 0)


async def test_when_every_rank_drains_new_requests_are_refused_in_words(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    ranks = [await serve_rank(MockRank(byte_archive)) for _ in range(2)]
    await house.join("e1", [rank.url for rank in ranks], byte_archive, worker_id=1)
    for number in (0, 1):
        await drain(house, 1, number)
    await until(lambda: draining(house.service) == 2)
    answer = await house.post(CHAT, chat())
    assert (answer.status, answer.json["error"]["code"]) == (503, "draining")
    assert "every rank that serves the model 'demo' is draining" in answer.json["error"]["message"]
    assert "retry-after" in answer.headers
    await drain(house, 1, 1, draining=False)
    await until(lambda: draining(house.service) == 1)
    assert (await house.post(CHAT, chat())).status == 200
    assert len(ranks[1].requests) == 1


async def test_a_router_that_starts_later_hears_of_drains_and_an_engine_that_starts_again_is_used(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(byte_archive))
    joined = await house.join("e1", [rank.url, rank.url + "/"], byte_archive, worker_id=1)
    await drain(house, 1, None)
    async with running(RouterService(MemoryBus(house.broker), house.subjects, house.service.config)) as later:
        await until(lambda: later.view.engine(1) is not None)
        await house.beat(joined)
        await until(lambda: draining(later) == 2)
    again = engine_joined("e1", [rank.url], await house.bus.put_blob(byte_archive), worker_id=2)
    await house.bus.record(house.subjects.membership("e1"), again)
    await house.beat(again)
    await until(
        lambda: (
            len(house.service.view.target_table("demo").targets) == 1
            and house.service.view.target_table("demo").targets[0].key == (2, 0)
        )
    )
    assert draining(house.service) == 0


# Clients that leave while they wait


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_it_waits_for_a_place_is_never_forwarded(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes, *, stream: bool
) -> None:
    house = await open_house(max_requests_per_rank=1)
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("alone", [rank.url], byte_archive)
    rank.hold_after = 1
    first = asyncio.ensure_future(house.post(CHAT, chat()))
    await rank.asked.wait()
    second = asyncio.ensure_future(house.post(CHAT, chat("second", stream=stream)))
    await until(lambda: len(house.service.wait_queue) == 1)
    second.cancel()
    await until(lambda: len(house.service.wait_queue) == 0)
    first.cancel()
    await until(lambda: idle(house.service))
    rank.hold_after = None
    assert (await house.post(CHAT, chat("third"))).status == 200
    assert len(rank.requests) == 2


class SlowRank(MockRank):
    """Lets its clients wait for the first token."""

    delay = 0.0

    async def completions(self, http: web.Request) -> web.StreamResponse:
        await asyncio.sleep(self.delay)
        return await super().completions(http)


async def test_a_rank_that_delays_all_requests_is_ejected_for_a_while(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(outlier_factor=3.0, policy="round_robin", correction_limit=1.0)
    ranks = [SlowRank(byte_archive) for _ in range(4)]
    for rank in ranks:
        await serve_rank(rank)
    await house.join("e1", [rank.url for rank in ranks], byte_archive, worker_id=1)
    ranks[2].delay = 0.4
    async with asyncio.timeout(10):
        while not (excluded := (await house.post("/v1/route", chat())).json["excluded"]):
            await asyncio.gather(
                *(house.post(CHAT, chat(f"number {number}", max_tokens=1)) for number in range(16))
            )
    assert [out["rank"] for out in excluded] == [2]
    assert "an outlier of its model" in excluded[0]["reason"]
    assert 'dp_rank="2"' in exposed(house, "rank_excluded")
    assert 'cause="outlier"' in exposed(house, "rank_excluded")
