"""A worker behind Dynamo's own runtime, in one process: discovery in memory, requests over TCP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.dynamo.address import DynamoAddress
from engine_adapter.dynamo.card import card_of, write_model_folder
from engine_adapter.dynamo.membership import DynamoFailed, DynamoMembership
from engine_adapter.dynamo.worker import DynamoWorker
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.simulated.model.faults import FaultOrder
from tests.engine_adapter.dynamo.request_builders import request

pytest.importorskip("dynamo._core", reason="needs the extra dynamo")
ADDRESS = DynamoAddress("connectiontest")


@asynccontextmanager
async def member(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[tuple[Any, SimulatedEngine, Any]]:
    """A client of the endpoint, the engine behind it, and the instance."""
    from dynamo.runtime import DistributedRuntime

    from engine_adapter.dynamo.connection import DynamoConnection

    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_EVENT_PLANE_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_SELF_HOST_METADATA", "0")
    monkeypatch.setenv("DYN_LOG", "error")
    config = SimulatedConfig(**{"ranks": 2, "time_scale": 1.0} | settings)
    engine = SimulatedEngine(config)
    runs = [asyncio.create_task(rank.run(), name="a rank under test") for rank in engine.ranks]
    write_model_folder(
        folder, engine.tokenizer.archive, end_token=engine.tokenizer.end, vocabulary=1000, max_context=512
    )
    ranks = dict(enumerate(engine.ranks))
    runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", event_plane="zmq")
    connection = DynamoConnection(runtime, ADDRESS)
    card = card_of(
        engine.ranks[0].description, folder, ranks=config.ranks, max_running=8, engine="sim", worker_id=7
    )
    membership = DynamoMembership(connection, DynamoWorker(ranks, {}), ranks, card, 0.2)
    await membership.open()
    async with membership:
        yield await runtime.endpoint(ADDRESS.endpoint).client(), engine, connection.instance_id
    for run in runs:
        run.cancel()
    await asyncio.wait(runs)


async def test_requests_reach_the_engine_and_errors_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynamo.llm.exceptions import InvalidArgument
    from dynamo.runtime import Context

    async with member(tmp_path / "model", monkeypatch) as (client, engine, instance):
        assert client.instance_ids() == [instance]
        chunks = [chunk async for chunk in await client.direct(request(dp_rank=1), instance, annotated=False)]
        assert sum(len(chunk["token_ids"]) for chunk in chunks) == 5
        assert chunks[-1]["finish_reason"] == "length"
        assert engine.ranks[1].take_facts().kv
        with pytest.raises(InvalidArgument, match=r"^n: "):
            async for _ in await client.direct(request(n=2), instance, annotated=False):
                pass
        context = Context(metadata={"traceparent": "00-1-2-01"})
        stream = await client.direct(request(max_tokens=2000), instance, annotated=False, context=context)
        await anext(stream)
        context.stop_generating()
        async with asyncio.timeout(20):
            rest = [chunk async for chunk in stream]
            while any(rank.take_facts().load.running for rank in engine.ranks):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert sum(len(chunk["token_ids"]) for chunk in rest) < 1900


async def test_a_full_or_failed_engine_is_an_error_that_routers_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the second kind a frontend continues the request elsewhere."""
    full = {"max_running": 1, "max_waiting": 1, "ranks": 1}
    async with member(tmp_path / "model", monkeypatch, **full) as (client, engine, instance):
        first = await client.direct(request(max_tokens=2000), instance, annotated=False)
        await anext(first)
        second = asyncio.ensure_future(client.direct(request(), instance, annotated=False))
        async with asyncio.timeout(20):
            while not engine.ranks[0].take_facts().load.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match=r"^Unavailable: the rank is full"):
            async for _ in await client.direct(request(), instance, annotated=False):
                pass
        engine.order(FaultOrder(fault="die"))
        with pytest.raises(ValueError, match=r"^Unavailable: the engine was ordered to die"):
            async for _ in first:
                pass
        await asyncio.gather(second, return_exceptions=True)


async def test_requests_that_are_not_over_in_time_are_left_to_other_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with member(tmp_path / "model", monkeypatch) as (client, _, instance):
        stream = await client.direct(request(max_tokens=5000), instance, annotated=False)
        await anext(stream)
    with pytest.raises(ValueError, match=r"^Unavailable: .*time for open requests is over"):
        async for _ in stream:
            pass


async def test_a_plane_that_does_not_exist_is_named() -> None:
    from engine_adapter.dynamo.connection import DynamoConnection, DynamoPlanes

    with pytest.raises(DynamoFailed, match="discovery='none'"):
        await DynamoConnection.open(DynamoPlanes(discovery="none"), ADDRESS)
