"""Ranks that die, stall or refuse, and clients that disconnect: the client's view, and the state left
behind."""

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from router.attempt import make_attempt
from router.prefix_index.prompt import TokenPrompt
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
    rendered,
    until,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture(params=["byte", "bpe"])
def packed(request: pytest.FixtureRequest, byte_archive: bytes, bpe_archive: bytes) -> bytes:
    return byte_archive if request.param == "byte" else bpe_archive


async def two_engines(house: House, serve_rank: Serve, packed: bytes) -> tuple[MockRank, MockRank]:
    """Start two engines of one rank. Return the one that gets a request first as the first, whatever the tie
    break chooses.
    """
    ranks = [await serve_rank(MockRank(packed)), await serve_rank(MockRank(packed))]
    for number, rank in enumerate(ranks):
        await house.join(f"engine{number}", [rank.url], packed, worker_id=number + 1)
    chosen = (await house.post("/v1/route", chat())).json["chosen"]
    busy = house.service.view.target_table("demo").targets[0 if chosen == "engine1/0" else 1]
    house.service.scheduler.reservations.book(
        busy.key, (100_000, 1, 100, 0), 0.0
    )  # a load that makes the other engine the first choice
    return (ranks[0], ranks[1]) if busy.key[0] == 2 else (ranks[1], ranks[0])


def text_of(answer: Answered) -> str:
    return "".join(
        choice["delta"].get("content") or "" for event in answer.events for choice in event["choices"]
    )


@pytest.fixture
def outcomes(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    caplog.set_level(logging.INFO, logger="roost.access")
    return lambda: [
        json.loads(record.getMessage())
        for record in caplog.records
        if record.name == "roost.access" and "/chat" in record.getMessage()
    ]


@pytest.mark.parametrize("died_after", [1, 2, 3, 7, 20, 39])
async def test_a_stream_whose_rank_dies_is_continued_elsewhere_unbroken(
    house: House, serve_rank: Serve, packed: bytes, died_after: int
) -> None:
    first, second = await two_engines(house, serve_rank, packed)
    first.die_after = died_after
    answer = await house.post(CHAT, chat(max_tokens=40, stream=True, stream_options={"include_usage": True}))
    prompt = first.tokenizer.encode_rendered(rendered("hello there"))
    assert text_of(answer) == first.text(prompt, 5, 40)
    assert [choice["delta"].get("role") for event in answer.events for choice in event["choices"]].count(
        "assistant"
    ) == 1
    assert len({event["id"] for event in answer.events}) == 1
    assert answer.events[-1]["usage"]["prompt_tokens"] == len(prompt)
    assert answer.events[-1]["usage"]["completion_tokens"] == 40
    continued = second.requests[0]
    assert isinstance(continued.prompt, list)
    assert (continued.emitted, continued.max_tokens) == (died_after, 40 - died_after)
    assert continued.prompt == prompt + first.ids(prompt, 5, died_after)


@pytest.mark.parametrize("weights", ["b" * 32, None])
async def test_a_stream_of_old_weights_is_not_continued_on_new_ones(
    house: House, serve_rank: Serve, packed: bytes, weights: str | None
) -> None:
    """A rolling update of a checkpoint under one name must not change the model in the middle of an
    answer."""
    ranks = [await serve_rank(MockRank(packed)), await serve_rank(MockRank(packed))]
    ranks[0].die_after = 7
    await house.join("old", [ranks[0].url], packed, worker_id=1, weights_digest="a" * 32)
    await house.join("new", [ranks[1].url], packed, worker_id=2, weights_digest=weights)
    busy = house.service.view.target_table("demo").targets[1]
    house.service.scheduler.reservations.book(busy.key, (100_000, 1, 100, 0), 0.0)
    answer = await house.post(CHAT, chat(max_tokens=40, stream=True))
    error = answer.events[-1]["error"]
    assert error["code"] == "weights_changed"
    assert "this answer was begun with weights aaaaaaaaaaaa" in error["message"]
    assert not ranks[1].requests
    assert "".join(
        choice["delta"].get("content") or "" for event in answer.events[:-1] for choice in event["choices"]
    )


async def test_a_stream_is_continued_by_the_one_engine_with_its_weights_and_the_decision_says_why(
    house: House, serve_rank: Serve, packed: bytes
) -> None:
    ranks = [await serve_rank(MockRank(packed)) for _ in range(3)]
    ranks[0].die_after = 7
    for number, (rank, weights) in enumerate(zip(ranks, ("a" * 32, "b" * 32, "a" * 32), strict=True)):
        await house.join(f"engine{number}", [rank.url], packed, worker_id=number + 1, weights_digest=weights)
    for target, load in zip(
        house.service.view.target_table("demo").targets, (0, 1_000, 100_000), strict=True
    ):
        house.service.scheduler.reservations.book(target.key, (load, 1, 100, 0), 0.0)
    answer = await house.post(CHAT, chat(max_tokens=40, stream=True))
    prompt = ranks[0].tokenizer.encode_rendered(rendered("hello there"))
    assert text_of(answer) == ranks[0].text(prompt, 5, 40)
    assert [len(rank.requests) for rank in ranks] == [1, 0, 1]
    continued = house.service.scheduler.kept.get(f"{answer.headers['x-roost-decision-id']}-a2")
    assert continued is not None
    reasons = {one.engine: one.reason for one in continued.record().excluded}
    assert (
        reasons["engine1"]
        == "it serves weights bbbbbbbbbbbb; this answer was begun with weights aaaaaaaaaaaa"
    )


async def test_a_request_without_a_token_is_tried_on_other_weights(
    house: House, serve_rank: Serve, packed: bytes
) -> None:
    ranks = [await serve_rank(MockRank(packed)), await serve_rank(MockRank(packed))]
    ranks[0].die_after = 0
    await house.join("old", [ranks[0].url], packed, worker_id=1, weights_digest="a" * 32)
    await house.join("new", [ranks[1].url], packed, worker_id=2, weights_digest="b" * 32)
    busy = house.service.view.target_table("demo").targets[1]
    house.service.scheduler.reservations.book(busy.key, (100_000, 1, 100, 0), 0.0)
    answer = await house.post(CHAT, chat(max_tokens=40, stream=True))
    assert text_of(answer) == ranks[1].text(
        ranks[1].tokenizer.encode_rendered(rendered("hello there")), 5, 40
    )


async def test_a_stream_that_makes_progress_may_break_more_often_than_max_attempts(
    open_house: OpenHouse, serve_rank: Serve, bpe_archive: bytes
) -> None:
    house = await open_house(max_attempts=2)
    ranks = [await serve_rank(MockRank(bpe_archive)) for _ in range(4)]
    for number, rank in enumerate(ranks):
        rank.die_after = 6
        await house.join(f"engine{number}", [rank.url], bpe_archive, worker_id=number + 1)
    answer = await house.post(CHAT, chat(max_tokens=20, stream=True))
    prompt = ranks[0].tokenizer.encode_rendered(rendered("hello there"))
    assert text_of(answer) == ranks[0].text(prompt, 5, 20)
    assert [len(rank.requests) for rank in ranks] == [1, 1, 1, 1]


async def test_an_unstreamed_answer_survives_the_death_of_its_rank(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    first, second = await two_engines(house, serve_rank, bpe_archive)
    first.die_after = 5
    answer = await house.post(CHAT, chat(max_tokens=20))
    prompt = first.tokenizer.encode_rendered(rendered("hello there"))
    assert answer.json["choices"][0]["message"]["content"] == first.text(prompt, 5, 20)
    assert answer.json["usage"]["completion_tokens"] == 20
    assert second.requests[0].emitted == 5


async def test_a_drawn_seed_is_kept_for_the_continuation(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    first, second = await two_engines(house, serve_rank, bpe_archive)
    first.die_after = 4
    answer = await house.post(CHAT, {**chat(max_tokens=16), "seed": None})
    assert answer.status == 200
    assert second.requests[0].seed == first.requests[0].seed


@pytest.mark.parametrize("how", ["disconnected", "server_error", "busy", "garbage"])
async def test_a_rank_that_fails_before_the_first_token_is_replaced(
    house: House, serve_rank: Serve, bpe_archive: bytes, how: str, outcomes: Any
) -> None:
    first, second = await two_engines(house, serve_rank, bpe_archive)
    first.die_after = 0 if how == "disconnected" else None
    first.answer_status = {"server_error": 500, "busy": 429}.get(how, 200)
    first.garbage_after = 0 if how == "garbage" else None
    answer = await house.post(CHAT, chat(stream=True))
    assert answer.status == 200
    assert text_of(answer) == first.text(first.tokenizer.encode_rendered(rendered("hello there")), 5, 12)
    assert (len(first.requests), len(second.requests)) == (1, 1)
    assert second.requests[0].emitted == 0
    await until(lambda: outcomes())
    assert (outcomes()[0]["retries"], outcomes()[0]["outcome"]) == (1, "answered")


async def test_the_failed_decision_is_named_by_the_one_that_replaces_it(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    first, _ = await two_engines(house, serve_rank, bpe_archive)
    first.answer_status = 500
    answer = await house.post(CHAT, chat())
    record = (await house.get(f"/v1/decisions/{answer.headers['x-roost-decision-id']}")).json
    assert (record["attempt"], record["cause"]) == (2, "server_error")
    before = (await house.get(f"/v1/decisions/{record['replaces']}")).json
    assert before["chosen"] != record["chosen"]
    assert record["excluded"] == [
        {"engine": before["chosen"][:-2], "rank": 0, "reason": "this request failed there before"}
    ]


async def test_an_unreachable_engine_is_excluded_until_its_next_heartbeat(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(bpe_archive))
    gone = await house.join("gone", ["http://127.0.0.1:9"], bpe_archive, worker_id=1)
    await house.join("there", [rank.url], bpe_archive, worker_id=2)
    house.service.scheduler.reservations.book(
        (2, 0), (100_000, 1, 100, 0), 0.0
    )  # the other engine is tried first
    assert (await house.post(CHAT, chat())).status == 200
    assert len(rank.requests) == 1
    assert "unreachable" in house.service.view.target_table("demo").excluded[0].reason
    await house.beat(gone)
    await until(lambda: len(house.service.view.target_table("demo").targets) == 2)


async def test_when_every_rank_fails_the_answer_is_503_and_nothing_stays_booked(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    for rank in await two_engines(house, serve_rank, bpe_archive):
        rank.answer_status = 500
    open_before = house.service.scheduler.reservations.open_bookings
    answer = await house.post(CHAT, chat())
    assert answer.status == 503
    assert "retry-after" in answer.headers
    assert house.service.scheduler.reservations.open_bookings == open_before


async def test_a_stream_that_no_rank_can_continue_ends_in_an_error_event(
    house: House, serve_rank: Serve, bpe_archive: bytes, outcomes: Any
) -> None:
    rank = await serve_rank(MockRank(bpe_archive))
    rank.die_after = 3
    await house.join("alone", [rank.url], bpe_archive)
    answer = await house.post(CHAT, chat(stream=True))
    assert answer.status == 200
    assert answer.events[-1]["error"]["type"] == "server_error"
    await until(lambda: outcomes())
    assert outcomes()[0]["outcome"] == "broken"


async def test_ids_are_never_given_to_an_engine_with_another_tokenizer(
    house: House, serve_rank: Serve, byte_archive: bytes, bpe_archive: bytes
) -> None:
    first, other = await serve_rank(MockRank(bpe_archive)), await serve_rank(MockRank(byte_archive))
    joined = await house.join("first", [first.url], bpe_archive, worker_id=1)
    stranger = engine_joined("other", [other.url], await house.bus.put_blob(byte_archive), worker_id=2)
    await house.bus.record(house.subjects.membership("other"), stranger)
    await house.beat(stranger)
    await until(
        lambda: any(
            "tokenizer differs" in out.reason for out in house.service.view.target_table("demo").excluded
        )
    )
    first.hold_after = 3
    async with house.http.post(house.url + CHAT, json=chat(stream=True)) as response:
        first.hold_after = None
        house.service.view.leave(joined.worker_id)
        assert [target.engine.engine for target in house.service.view.target_table("demo").targets] == [
            "other"
        ]
        first.break_off()
        body = await response.read()
    assert b"use another tokenizer" in body
    assert not other.requests


async def test_a_lone_rank_is_retried_when_the_connection_broke_before_any_answer(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(bpe_archive))
    await house.join("alone", [rank.url], bpe_archive)
    rank.hang_up_once = True
    answer = await house.post(CHAT, chat())
    assert answer.status == 200
    assert len(rank.requests) == 1


async def test_a_lost_finish_reason_is_made_up_for_without_losing_text(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    first, _ = await two_engines(house, serve_rank, bpe_archive)
    first.forget_finish = True
    answer = await house.post(CHAT, chat(max_tokens=9))
    assert answer.json["choices"][0]["finish_reason"] == "length"
    assert answer.json["choices"][0]["message"]["content"] == first.text(
        first.tokenizer.encode_rendered(rendered("hello there")), 5, 9
    )


async def test_a_silent_rank_is_given_up(
    open_house: OpenHouse, serve_rank: Serve, bpe_archive: bytes
) -> None:
    house = await open_house(first_token_seconds=0.2, between_tokens_seconds=0.1)
    first, second = await two_engines(house, serve_rank, bpe_archive)
    for held in (0, 3):
        first.hold_after = held
        second.requests.clear()
        answer = await house.post(CHAT, chat(stream=True))
        assert text_of(answer) == first.text(first.tokenizer.encode_rendered(rendered("hello there")), 5, 12)
        assert second.requests[0].emitted == held


async def test_choices_of_one_request_survive_a_death_each_on_its_own(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    first, second = await two_engines(house, serve_rank, bpe_archive)
    first.die_after = 6
    answer = await house.post(CHAT, chat(n=3, max_tokens=10))
    prompt = first.tokenizer.encode_rendered(rendered("hello there"))
    assert [choice["message"]["content"] for choice in answer.json["choices"]] == [
        first.text(prompt, seed, 10) for seed in (5, 6, 7)
    ]
    assert len(second.requests) >= len(first.requests) >= 1


async def test_a_request_cancelled_at_any_moment_leaves_no_booking(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(bpe_archive))
    await house.join("alone", [rank.url], bpe_archive)
    service, booked = house.service, []
    tokenizer = service.view.target_table("demo").sent_tokenizer

    async def forever(*_: object) -> None:
        await asyncio.Event().wait()

    for turns in range(6):
        need = RoutingRequest("demo", TokenPrompt(list(range(40))), 60, 10, tokenizer)
        request_log = RequestLog("r", f"d{turns}", CHAT, service.clock())
        request = asyncio.create_task(
            make_attempt(service, request_log, need, FIRST_TRY, forever, begun=False)
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        booked.append(service.scheduler.reservations.open_bookings)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert service.scheduler.reservations.open_bookings == 0
    assert booked == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_vanishes_cancels_the_rank_at_once(
    house: House, serve_rank: Serve, bpe_archive: bytes, outcomes: Any, *, stream: bool
) -> None:
    rank = await serve_rank(MockRank(bpe_archive))
    await house.join("alone", [rank.url], bpe_archive)
    rank.hold_after = 2
    request = asyncio.ensure_future(house.post(CHAT, chat(stream=stream)))
    await rank.asked.wait()
    request.cancel()
    async with asyncio.timeout(2):
        await rank.left.wait()
    await until(lambda: house.service.scheduler.reservations.open_bookings == 0)
    await until(lambda: outcomes())
    assert outcomes()[0]["outcome"] == "client_gone"
    rank.hold_after = None
    assert (await house.post(CHAT, chat())).status == 200


async def test_a_client_that_vanishes_cancels_all_of_its_choices(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(bpe_archive))
    await house.join("alone", [rank.url], bpe_archive)
    rank.hold_after = 2
    request = asyncio.ensure_future(house.post(CHAT, chat(n=4, stream=True)))
    await until(lambda: len(rank.requests) == 4)
    request.cancel()
    await until(lambda: house.service.scheduler.reservations.open_bookings == 0)
    await until(lambda: rank.leavers == 4)


async def test_a_client_that_vanishes_while_sending_its_body_is_forgotten(
    house: House, outcomes: Any
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(house.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf")
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.close()
    await writer.wait_closed()
    await until(lambda: outcomes())
    assert outcomes()[0]["outcome"] == "client_gone"


async def test_connections_to_ranks_are_kept_and_used_again(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(bpe_archive))
    await house.join("alone", [rank.url], bpe_archive)
    for stream in (False, True, False, True):
        assert (await house.post(CHAT, chat(stream=stream))).status == 200
    assert len(rank.peers) == 1
