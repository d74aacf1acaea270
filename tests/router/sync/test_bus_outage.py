"""Two routers on a real NATS server that hangs, or dies and returns, while requests are answered: none is
lost or sent twice.
"""

import asyncio
import contextlib
import itertools
import signal
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest

from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from fleet.facts.engines import EngineHeartbeat, EngineJoined
from router.api.app import create_app
from router.config import RouterConfig
from router.service import RouterService
from tests.conftest import NatsServer
from tests.router.router_fixture import (
    MockRank,
    Serve,
    chat,
    engine_joined,
    rendered,
    running,
    served_app,
    until,
)

AWAY_SECONDS = 10.0
BEFORE, AFTER = 1.5, 4.0
TOKENS = 12
SUBJECTS = Subjects("away")
CONFIG = BusConfig(namespace="away")


async def beat(bus: NatsBus, engines: list[EngineJoined]) -> None:
    while True:
        for joined in engines:
            voice = bus.publisher(SUBJECTS.heartbeats(joined.engine))
            await voice.publish(EngineHeartbeat(engine=joined.engine, worker_id=joined.worker_id, epoch=0))
        await asyncio.sleep(1.0)


@contextlib.asynccontextmanager
async def router(server: NatsServer) -> AsyncIterator[tuple[RouterService, str]]:
    bus = await NatsBus.connect(server.url, SUBJECTS, CONFIG)
    config = RouterConfig()
    service = RouterService(bus, SUBJECTS, config)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(bus.close)
        await stack.enter_async_context(running(service))
        yield service, await stack.enter_async_context(served_app(create_app(service)))


async def away(server: NatsServer, how: str) -> None:
    await asyncio.sleep(BEFORE)
    if how == "hangs":
        server.send(signal.SIGSTOP)
    else:
        server.stop(signal.SIGKILL)
    await asyncio.sleep(AWAY_SECONDS)
    if how == "hangs":
        server.send(signal.SIGCONT)
    else:
        await asyncio.to_thread(server.start)
    await asyncio.sleep(AFTER)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hangs", "dies"])
async def test_ten_seconds_without_nats_lose_no_request_and_double_none(
    how: str, nats_server: NatsServer, serve_rank: Serve, byte_archive: bytes
) -> None:
    ranks = [await serve_rank(MockRank(byte_archive)) for _ in range(3)]
    numbers, answered, excluded = itertools.count(), Counter[int](), Counter[str]()
    async with contextlib.AsyncExitStack() as stack:
        speaker = await NatsBus.connect(nats_server.url, SUBJECTS, CONFIG)
        stack.push_async_callback(speaker.close)
        digest = await speaker.put_blob(byte_archive)
        engines = [engine_joined(f"e{at}", [rank.url], digest) for at, rank in enumerate(ranks)]
        for joined in engines:
            await speaker.record(SUBJECTS.membership(joined.engine), joined)
        beating = asyncio.create_task(beat(speaker, engines), name="beats hearts")
        stack.callback(beating.cancel)
        routers = [await stack.enter_async_context(router(nats_server)) for _ in range(2)]
        http = await stack.enter_async_context(aiohttp.ClientSession())
        for service, _ in routers:
            await until(
                lambda service=service: service.ready and len(service.view.target_table("demo").targets) == 3,
                10.0,
            )

        async def ask(url: str, over: asyncio.Event) -> None:
            while not over.is_set():
                number = next(numbers)
                async with http.post(
                    f"{url}/v1/chat/completions",
                    data=msgspec.json.encode(chat(f"request {number}", seed=number, max_tokens=TOKENS)),
                ) as answer:
                    body = await answer.json()
                    assert answer.status == 200, body
                    prompt = ranks[0].tokenizer.encode_rendered(rendered(f"request {number}"))
                    assert body["choices"][0]["message"]["content"] == ranks[0].text(prompt, number, TOKENS)
                answered[number] += 1
                await asyncio.sleep(0.02)

        async def look(over: asyncio.Event) -> None:
            while not over.is_set():
                for service, _ in routers:
                    excluded.update(
                        f"{out.engine}: {out.reason}" for out in service.view.target_table("demo").excluded
                    )
                await asyncio.sleep(0.05)

        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for _, url in routers * 2:
                tasks.create_task(ask(url, over), name=f"asks {url}")
            tasks.create_task(look(over), name="looks whom the routers leave out")
            await away(nats_server, how)
            over.set()
        assert excluded == Counter()
        assert all(not service.bus_silent for service, _ in routers)
        assert all(b"roost_router_peers 1.0" in service.metrics.exposition() for service, _ in routers)
    assert sorted(answered) == list(range(next(numbers)))
    assert max(answered.values()) == 1
    assert sum(len(rank.requests) for rank in ranks) == len(answered) > 500
