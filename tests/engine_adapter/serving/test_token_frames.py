"""Token frames of a rank: the tokens of a router's streams in one connection, beside what stays as it was."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import pytest

from deploy.http.server import HttpServer
from deploy.http.sockets import listen, url_of
from engine_adapter.serving.http import RankApp
from fleet.completions.token_frames import HEADER, PATH, FrameReader, TokenPiece

Starter = Callable[..., AbstractAsyncContextManager[Any]]
PROMPT = "a prompt of more than two blocks of tokens"
IDS = list(PROMPT.encode())


class Frames:
    """A router's frames connection. State: all frames read so far."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.name = response.headers[HEADER]
        self.read: list[list[TokenPiece]] = []
        self.ended = False
        self._response = response
        self._news = asyncio.Event()

    async def run(self) -> None:
        reader = FrameReader(10**6)
        with contextlib.suppress(aiohttp.ClientError):
            async for data in self._response.content.iter_any():
                self.read += [frame for frame in reader.feed(data.lstrip(b"\n")) if frame]
                self._news.set()
        self.ended = True
        self._news.set()

    def of(self, number: int) -> list[TokenPiece]:
        return [piece for frame in self.read for piece in frame if piece.number == number]

    async def until(self, fact: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not fact():
                self._news.clear()
                await self._news.wait()

    async def end(self, number: int) -> TokenPiece:
        """Wait for the end of an answer. Return its pieces as one."""
        await self.until(lambda: any(piece.end for piece in self.of(number)))
        pieces = self.of(number)
        ids = [token for piece in pieces for token in piece.token_ids]
        return TokenPiece(number, ids, "".join(piece.text for piece in pieces), pieces[-1].end)


class Rank:
    """A rank's HTTP server, and a router's way to it."""

    def __init__(self, http: aiohttp.ClientSession, server: HttpServer) -> None:
        self.http = http
        self.server = server

    async def post(self, header: str | None, **body: Any) -> aiohttp.ClientResponse:
        asked = {"prompt": IDS, "temperature": 0, "stream": True, "return_token_ids": True} | body
        return await self.http.post("/v1/completions", json=asked, headers={HEADER: header} if header else {})


@contextlib.asynccontextmanager
async def served(engine: Any) -> AsyncIterator[tuple[Rank, Frames]]:
    door = listen("127.0.0.1", 0)
    async with (
        HttpServer(RankApp(engine), door, drain_seconds=5) as server,
        aiohttp.ClientSession(url_of(door)) as http,
        http.get(PATH) as response,
    ):
        frames = Frames(response)
        reading = asyncio.create_task(frames.run(), name="reads frames")
        yield Rank(http, server), frames
        reading.cancel()
        await asyncio.wait([reading])


async def test_an_answer_in_frames_has_the_ids_text_and_usage_of_one_in_events(
    pretend_engine: Starter,
) -> None:
    async with pretend_engine() as started, served(started.engine) as (rank, frames):
        response = await rank.post(f"{frames.name}/7", max_tokens=12)
        assert (response.status, response.headers[HEADER], await response.read()) == (200, "7", b"")
        answer = await frames.end(7)
        expected = started.runner.alone(IDS, 12)
        assert (answer.token_ids, answer.text) == (expected, bytes(expected).decode())
        assert answer.end is not None
        assert answer.end.usage is not None
        assert (answer.end.finish_reason, answer.end.usage.prompt_tokens) == ("length", len(IDS))
        assert answer.end.usage.completion_tokens == 12


async def test_the_streams_of_a_step_share_a_frame(pretend_engine: Starter) -> None:
    async with pretend_engine() as started, served(started.engine) as (rank, frames):
        posts = [
            asyncio.ensure_future(rank.post(f"{frames.name}/{number}", prompt=[97 + number], max_tokens=200))
            for number in range(8)
        ]
        await asyncio.gather(*posts)
        for number in range(8):
            assert (await frames.end(number)).token_ids == started.runner.alone([97 + number], 200)
        assert len(frames.read) < 8 * 200 / 2, "far fewer frames than tokens"


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (None, {}),
        ("of a rank that was restarted/3", {}),
        ("NAME", {}),
        ("NAME/3", {"logprobs": 1}),
        ("NAME/3", {"return_token_ids": False}),
    ],
)
async def test_what_frames_cannot_carry_comes_in_events(
    pretend_engine: Starter, header: str | None, body: dict[str, Any]
) -> None:
    async with pretend_engine() as started, served(started.engine) as (rank, frames):
        response = await rank.post(header and header.replace("NAME", frames.name), max_tokens=5, **body)
        events = (await response.read()).split(b"\n\n")
        assert HEADER not in response.headers
        assert events[-2] == b"data: [DONE]"
        text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])
        assert text == bytes(started.runner.alone(IDS, 5)).decode()
        assert frames.read == []


async def idle(engine: Any) -> None:
    async with asyncio.timeout(3):
        while (load := engine.take_facts().load).running or load.waiting or load.decode_blocks:
            await engine.wait_facts()


async def test_closing_a_request_cancels_it_and_no_other(pretend_engine: Starter) -> None:
    async with pretend_engine() as started, served(started.engine) as (rank, frames):
        leaving = await rank.post(f"{frames.name}/1", max_tokens=400)
        staying = await rank.post(f"{frames.name}/2", prompt=[98], max_tokens=300)
        leaving.close()
        assert (await frames.end(2)).token_ids == started.runner.alone([98], 300)
        assert await staying.read() == b""
        await idle(started.engine)


async def test_a_router_that_vanishes_cancels_all_its_streams(pretend_engine: Starter) -> None:
    async with pretend_engine() as started, served(started.engine) as (rank, frames):
        responses = [await rank.post(f"{frames.name}/{number}", max_tokens=400) for number in range(3)]
        frames._response.close()
        await idle(started.engine)
        assert [await response.read() for response in responses] == [b""] * 3
        later = await rank.post(f"{frames.name}/9", max_tokens=2)
        assert b"[DONE]" in await later.read()


async def test_a_refusal_has_its_own_status(pretend_engine: Starter) -> None:
    async with pretend_engine() as started, served(started.engine) as (rank, frames):
        response = await rank.post(f"{frames.name}/1", max_tokens=10**6)
        assert (response.status, HEADER in response.headers) == (400, False)
        started.runner.failure = ArithmeticError("no numbers")
        response = await rank.post(f"{frames.name}/2", max_tokens=5)
        assert (response.status, (await response.json())["error"]["code"]) == (503, "engine_failed")


async def test_an_engine_that_fails_ends_its_streams_with_an_error(pretend_engine: Starter) -> None:
    async with pretend_engine() as started, served(started.engine) as (rank, frames):
        await rank.post(f"{frames.name}/1", max_tokens=400)
        started.runner.failure = ArithmeticError("no numbers")
        end = (await frames.end(1)).end
        assert end is not None
        assert (end.finish_reason, bool(end.error)) == (None, True)


async def test_a_stopping_rank_finishes_its_streams_then_its_frames(pretend_engine: Starter) -> None:
    async with pretend_engine() as started, served(started.engine) as (rank, frames):
        await rank.post(f"{frames.name}/1", max_tokens=100)
        async with asyncio.timeout(4):
            await rank.server.__aexit__()
        assert (await frames.end(1)).token_ids == started.runner.alone(IDS, 100)
        await frames.until(lambda: frames.ended)
