"""Answers whose tokens arrive in token frames: the client's view, and the state left behind."""

import asyncio
import json
import re
import socket

import pytest
from aiohttp import web

from fleet.completions.token_frames import TokenPiece, encode
from fleet.facts.engines import Capabilities
from tests.router.router_fixture import (
    Answered,
    House,
    MockRank,
    OpenHouse,
    Serve,
    chat,
    rendered,
    until,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
FRAMES = Capabilities(kv_events=False, token_frames=True)


async def framing_ranks(house: House, serve_rank: Serve, packed: bytes, count: int = 1) -> list[MockRank]:
    """Start engines of one rank, and wait until each has a connection for token frames: a first request to
    it opens one.
    """
    ranks = [await serve_rank(MockRank(packed)) for _ in range(count)]
    for number, rank in enumerate(ranks):
        await house.join(f"engine{number}", [rank.url], packed, worker_id=number + 1, capabilities=FRAMES)
        async with house.service.upstream.call(rank.url, TEXT, WARM, [], []) as call:
            call.cut("warm")
        await until(lambda rank=rank: rank.carriers)  # type: ignore[misc]
        rank.requests.clear()
        rank.asked.clear()
    return ranks


WARM = b'{"prompt": [1], "max_tokens": 1}'


def text_of(answer: Answered) -> str:
    return "".join(
        choice["delta"].get("content") or "" for event in answer.events for choice in event["choices"]
    )


def told(answer: Answered) -> list[object]:
    """Return the events without what differs from request to request."""
    return [{**event, "id": "", "created": 0} for event in answer.events]


async def two_engines(house: House, serve_rank: Serve, packed: bytes) -> tuple[MockRank, MockRank]:
    """Start two engines. Return the one that gets requests as the first: the other is busy."""
    ranks = await framing_ranks(house, serve_rank, packed, 2)
    busy = next(one for one in house.service.view.target_table("demo").targets if one.url == ranks[1].url)
    house.service.scheduler.reservations.book(busy.key, (100_000, 1, 100, 0), 0.0)
    return ranks[0], ranks[1]


BODIES = [
    (CHAT, chat(stream=True, stream_options={"include_usage": True})),
    (CHAT, chat(stream=True, n=3)),
    (CHAT, chat(stream=True, max_tokens=1)),
    (TEXT, {"model": "demo", "prompt": "ab", "max_tokens": 9, "seed": 3, "stream": True}),
    (
        TEXT,
        {
            "model": "demo",
            "prompt": "ab",
            "max_tokens": 9,
            "seed": 3,
            "stream": True,
            "return_token_ids": True,
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_clients_get_the_same_stream_as_from_events(
    house: House, serve_rank: Serve, byte_archive: bytes, path: str, body: dict[str, object]
) -> None:
    (rank,) = await framing_ranks(house, serve_rank, byte_archive)
    framed = await house.post(path, body)
    assert rank.in_frames == body.get("n", 1)
    rank.break_frames()
    await until(lambda: not rank.carriers)
    plain = await house.post(path, body)
    assert rank.in_frames == body.get("n", 1), "this one came in events"
    if body.get("n", 1) == 1:
        assert told(framed) == told(plain)
    else:  # choices interleave in any order
        assert sorted(map(str, told(framed))) == sorted(map(str, told(plain)))


async def test_an_unstreamed_answer_is_the_same(house: House, serve_rank: Serve, byte_archive: bytes) -> None:
    (rank,) = await framing_ranks(house, serve_rank, byte_archive)
    rank.cached_tokens = 2
    answer = await house.post(CHAT, chat(max_tokens=30))
    prompt = rank.tokenizer.encode_rendered(rendered("hello there"))
    assert answer.json["choices"][0]["message"]["content"] == rank.text(prompt, 5, 30)
    assert answer.json["usage"]["completion_tokens"] == 30
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert rank.in_frames == 1


async def test_a_stream_after_an_idle_while_still_comes_in_frames(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(keepalive_seconds=0.05)
    (rank,) = await framing_ranks(house, serve_rank, byte_archive)
    await asyncio.sleep(0.2)
    house.service.upstream.prune()
    await asyncio.sleep(0.1)
    await house.post(CHAT, chat(stream=True))
    assert rank.in_frames == 1


async def test_log_probabilities_come_in_events(house: House, serve_rank: Serve, byte_archive: bytes) -> None:
    (rank,) = await framing_ranks(house, serve_rank, byte_archive)
    answer = await house.post(CHAT, chat(stream=True, logprobs=True, top_logprobs=1))
    assert answer.events[1]["choices"][0]["logprobs"]["content"]
    assert rank.in_frames == 0


@pytest.mark.parametrize("died_after", [0, 1, 7, 39])
async def test_a_stream_whose_rank_dies_is_continued_elsewhere_unbroken(
    house: House, serve_rank: Serve, bpe_archive: bytes, died_after: int
) -> None:
    first, second = await two_engines(house, serve_rank, bpe_archive)
    first.die_after = died_after
    answer = await house.post(CHAT, chat(max_tokens=40, stream=True, stream_options={"include_usage": True}))
    prompt = first.tokenizer.encode_rendered(rendered("hello there"))
    assert text_of(answer) == first.text(prompt, 5, 40)
    assert answer.events[-1]["usage"]["completion_tokens"] == 40
    assert (first.in_frames, second.in_frames) == (1, 1)
    continued = second.requests[0]
    assert (continued.emitted, continued.max_tokens) == (died_after, 40 - died_after)
    assert house.service.scheduler.reservations.open_bookings == 1, "the one of this test"


async def test_all_streams_are_continued_when_their_frames_are_lost_and_frames_return(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    rank, second = await two_engines(house, serve_rank, bpe_archive)
    rank.hold_after = 5
    answering = [
        asyncio.ensure_future(house.post(CHAT, chat(f"number {at}", max_tokens=20, stream=True)))
        for at in range(4)
    ]
    await until(lambda: rank.in_frames == 4)
    rank.hold_after = None
    rank.break_frames()
    for at, answer in enumerate(await asyncio.gather(*answering)):
        prompt = rank.tokenizer.encode_rendered(rendered(f"number {at}"))
        assert text_of(answer) == rank.text(prompt, 5, 20)

    assert second.in_frames == 4

    async def again() -> bool:
        async with house.service.upstream.call(rank.url, TEXT, WARM, [], []) as call:
            return call.framed

    async with asyncio.timeout(5):
        while not await again():  # noqa: ASYNC110 (the connection is opened again in the background)
            await asyncio.sleep(0.05)


async def test_an_error_in_a_frame_ends_the_attempt_alone(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    rank, second = await two_engines(house, serve_rank, bpe_archive)
    rank.hold_after = 3
    other = asyncio.ensure_future(house.post(CHAT, chat("other", stream=True)))
    await until(lambda: rank.in_frames == 1)
    rank.hold_after, rank.garbage_after = None, 4
    failing = asyncio.ensure_future(house.post(CHAT, chat(max_tokens=30, stream=True)))
    answer = await failing
    prompt = rank.tokenizer.encode_rendered(rendered("hello there"))
    assert text_of(answer) == rank.text(prompt, 5, 30)
    assert second.requests[0].emitted == 5
    assert not other.done()
    other.cancel()


async def test_frames_that_cannot_be_read_are_as_good_as_lost(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    rank, _ = await two_engines(house, serve_rank, bpe_archive)
    rank.hold_after = 3
    answering = asyncio.ensure_future(house.post(CHAT, chat(max_tokens=20, stream=True)))
    await until(lambda: rank.in_frames == 1)
    rank.hold_after = None
    ((carrier, _),) = rank.carriers.values()
    await carrier.write(encode([TokenPiece(10**9, [1], "of nobody")]))
    await carrier.write(b"no frame\n")
    prompt = rank.tokenizer.encode_rendered(rendered("hello there"))
    assert text_of(await answering) == rank.text(prompt, 5, 20)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_vanishes_cancels_the_rank_at_once(
    house: House, serve_rank: Serve, bpe_archive: bytes, *, stream: bool
) -> None:
    (rank,) = await framing_ranks(house, serve_rank, bpe_archive)
    rank.left.clear()
    rank.hold_after = 2
    request = asyncio.ensure_future(house.post(CHAT, chat(stream=stream)))
    await until(lambda: rank.in_frames == 1)
    request.cancel()
    async with asyncio.timeout(2):
        await rank.left.wait()
    await until(lambda: house.service.scheduler.reservations.open_bookings == 0)
    rank.hold_after = None
    assert (await house.post(CHAT, chat())).status == 200


async def test_a_rank_that_falls_silent_is_given_up(
    open_house: OpenHouse, serve_rank: Serve, bpe_archive: bytes
) -> None:
    house = await open_house(between_tokens_seconds=0.2)
    rank, second = await two_engines(house, serve_rank, bpe_archive)
    rank.hold_after = 4
    answering = asyncio.ensure_future(house.post(CHAT, chat(max_tokens=20, stream=True)))
    await until(lambda: rank.in_frames == 1)
    rank.hold_after = None
    prompt = rank.tokenizer.encode_rendered(rendered("hello there"))
    assert text_of(await answering) == rank.text(prompt, 5, 20)
    assert [request.emitted for request in rank.requests + second.requests] == [0, 4]


async def test_a_client_that_reads_slowly_holds_up_nobody_and_misses_nothing(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    (rank,) = await framing_ranks(house, serve_rank, byte_archive)
    with socket.socket() as narrow:
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect(("127.0.0.1", int(house.url.rsplit(":", 1)[1])))
        reader, writer = await asyncio.open_connection(sock=narrow.dup(), limit=4096)
    body = b'{"model":"demo","messages":[{"role":"user","content":"a"}],"max_tokens":1500,"seed":5,"stream":true}'
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    await until(lambda: rank.in_frames == 1)
    async with asyncio.timeout(30):
        assert (await house.post(CHAT, chat(stream=True))).status == 200
    answer = b""
    while b"[DONE]" not in answer:
        answer += await reader.read(4096)
    said = re.findall(rb'"delta":{"content":("(?:[^"\\]|\\.)*")}', answer)
    prompt = rank.tokenizer.encode_rendered(rendered("a"))
    assert "".join(map(json.loads, said)) == rank.text(prompt, 5, 1500)
    writer.close()


class WithoutFrames(MockRank):
    """Rank of an engine that declares token frames and has none, as behind a proxy of the site."""

    async def token_frames(self, http: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound


async def test_a_rank_without_frames_streams_events_though_it_declared_them(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    rank = await serve_rank(WithoutFrames(bpe_archive))
    await house.join("alone", [rank.url], bpe_archive, capabilities=FRAMES)
    for _ in range(3):
        assert (await house.post(CHAT, chat(stream=True))).status == 200
    assert rank.in_frames == 0


async def test_an_older_rank_is_never_asked_for_frames(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(bpe_archive))
    await house.join("alone", [rank.url], bpe_archive)
    for _ in range(3):
        assert (await house.post(CHAT, chat(stream=True))).status == 200
    assert not rank.carriers
    assert rank.in_frames == 0
