"""The stream of a worker is read ahead of the frontend; silence ends it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from itertools import count
from typing import Any

import pytest

from router.config import RouterConfig
from router.dynamo.wire.requests import read_request
from router.dynamo.worker_stream import AHEAD, WorkerStream
from router.health.attempt_failures import AttemptFailure
from router.upstream.rank_client import UpstreamFailed
from tests.router.dynamo.fake_workers import FakeContext
from tests.router.router_fixture import until

LIMITS = RouterConfig(first_token_seconds=50.0, between_tokens_seconds=20.0)
REQUEST = read_request({"token_ids": [1, 2, 3]})


def stream_of(items: AsyncIterator[Any], config: RouterConfig | None = None) -> "closing[WorkerStream]":
    return closing(WorkerStream(items, FakeContext(), REQUEST, 0, config or RouterConfig(), []))


async def items_of(*token_ids: int, then: asyncio.Event) -> AsyncIterator[Any]:
    for one in token_ids:
        yield {"token_ids": [one]}
    await then.wait()
    yield {"token_ids": [], "finish_reason": "stop"}


async def tokens_of(stream: WorkerStream, into: list[int]) -> None:
    while (piece := await stream.next()) is not None:
        into += piece.token_ids


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("tokens", "limit", "how"),
    [([], 50.0, AttemptFailure.FIRST_TOKEN_TIMEOUT), ([7, 8], 20.0, AttemptFailure.STALLED)],
)
async def test_a_silent_worker_fails_after_its_last_piece(
    tokens: list[int], limit: float, how: AttemptFailure
) -> None:
    loop, got = asyncio.get_running_loop(), list[int]()
    with stream_of(items_of(*tokens, then=asyncio.Event()), LIMITS) as stream:
        with pytest.raises(UpstreamFailed) as failed:
            await tokens_of(stream, got)
    assert (got, failed.value.how) == (tokens, how)
    assert loop.time() == pytest.approx(limit)


async def test_pieces_that_wait_go_to_the_frontend_together() -> None:
    end = asyncio.Event()
    end.set()
    with stream_of(items_of(7, 8, 9, then=end)) as stream:
        first = await stream.next()
        assert first is not None
        assert (first.item["token_ids"], first.finished) == ([7, 8, 9], True)
        assert await stream.next() is None


async def test_they_go_one_by_one_where_the_frontend_looks_for_a_stop_text() -> None:
    end = asyncio.Event()
    end.set()
    request = read_request({"token_ids": [1], "stop_conditions": {"stop": ["x"]}})
    got = []
    with closing(
        WorkerStream(items_of(7, 8, then=end), FakeContext(), request, 0, RouterConfig(), [])
    ) as stream:
        while (piece := await stream.next()) is not None:
            got.append(piece.token_ids)
    assert got == [[7], [8], []]


async def test_a_worker_that_breaks_off_fails_after_its_last_piece() -> None:
    async def breaks_off() -> AsyncIterator[Any]:
        yield {"token_ids": [7]}
        raise UpstreamFailed(AttemptFailure.DISCONNECTED, "gone")

    with stream_of(breaks_off()) as stream:
        await asyncio.sleep(0)
        assert (await stream.next() or REQUEST).token_ids == [7]
        with pytest.raises(UpstreamFailed, match="gone"):
            await stream.next()


@pytest.mark.looptime
async def test_a_slow_frontend_holds_the_worker_up_and_is_not_taken_for_its_silence() -> None:
    sent, got, last = count(), list[int](), 3 * AHEAD

    async def many() -> AsyncIterator[Any]:
        for number in range(last):
            next(sent)
            yield {"token_ids": [number], "finish_reason": "stop" if number == last - 1 else None}

    with stream_of(many(), LIMITS) as stream:
        await asyncio.sleep(1000.0)
        assert next(sent) == AHEAD
        await tokens_of(stream, got)
    assert got == list(range(last))


@pytest.mark.looptime
async def test_a_whole_answer_may_take_longer_than_the_limits() -> None:
    got: list[int] = []

    async def slow() -> AsyncIterator[Any]:
        for number in range(20):
            await asyncio.sleep(19.0)
            yield {"token_ids": [number], "finish_reason": "stop" if number == 19 else None}

    with stream_of(slow(), LIMITS) as stream:
        await tokens_of(stream, got)
    assert got == list(range(20))


async def test_a_stream_that_is_closed_reads_no_further() -> None:
    ended = asyncio.Event()

    async def endless() -> AsyncIterator[Any]:
        try:
            yield {"token_ids": [1]}
            await asyncio.Event().wait()
        finally:
            ended.set()

    with stream_of(endless()) as stream:
        assert await stream.next() is not None
    await until(ended.is_set)
