"""The stream of a worker: silence ends it, and time limits cost one timer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.config import RouterConfig
from router.dynamo.wire.requests import read_request
from router.dynamo.worker_stream import SilenceLimit, WorkerStream
from router.health.attempt_failures import AttemptFailure
from router.upstream.rank_client import UpstreamFailed
from tests.router.dynamo.fake_workers import FakeContext

SHORT, LONG = 0.005, 600.0
REQUEST = read_request({"token_ids": [1, 2, 3]})


async def items_of(*token_ids: int, then: asyncio.Event) -> AsyncIterator[Any]:
    for one in token_ids:
        yield {"token_ids": [one]}
    await then.wait()
    yield {"token_ids": [], "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("tokens", "config", "how"),
    [
        ((), RouterConfig(first_token_seconds=SHORT), AttemptFailure.FIRST_TOKEN_TIMEOUT),
        ((7,), RouterConfig(between_tokens_seconds=SHORT), AttemptFailure.STALLED),
    ],
)
async def test_a_silent_worker_fails(
    tokens: tuple[int, ...], config: RouterConfig, how: AttemptFailure
) -> None:
    items = items_of(*tokens, then=asyncio.Event())
    stream = WorkerStream(items, FakeContext(), REQUEST, 0, config, [])
    for one in tokens:
        assert (piece := await stream.next()) is not None
        assert piece.token_ids == [one]
    with pytest.raises(UpstreamFailed) as failed:
        await stream.next()
    assert failed.value.how is how


async def test_a_limit_holds_for_its_own_wait_only() -> None:
    limit, arrives = SilenceLimit(), asyncio.Event()
    with limit.of(SHORT):
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(4 * SHORT, arrives.set)
    with limit.of(LONG):
        await arrives.wait()
    with pytest.raises(TimeoutError), limit.of(SHORT):
        await asyncio.Event().wait()
    limit.close()


async def test_a_cancelled_wait_is_no_silence() -> None:
    limit = SilenceLimit()

    async def waits() -> None:
        with limit.of(LONG):
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    limit.close()


async def test_a_slow_reader_is_not_taken_for_a_silent_worker() -> None:
    limit, slept = SilenceLimit(), asyncio.Event()
    with limit.of(SHORT):
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(4 * SHORT, slept.set)
    await slept.wait()
    with limit.of(LONG):
        await asyncio.sleep(0)
    limit.close()
