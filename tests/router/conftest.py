"""Fixtures of the router's tests; what they are made of is in `houses`."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bus.memory import MemoryBroker, MemoryBus
from fleet.completions.token_frames import PATH as FRAMES_PATH
from router.api.app import create_app
from router.config import RouterConfig
from router.service import RouterService
from tests.router.router_fixture import (
    TEMPLATE,
    House,
    MockRank,
    OpenHouse,
    Serve,
    archive,
    bpe,
    running,
    served_app,
)
from tests.web_server import served_web


@pytest.fixture(scope="session")
def byte_archive() -> bytes:
    return archive(bpe(257), {"eos_token": "<eos>", "chat_template": TEMPLATE})


@pytest.fixture(scope="session")
def bpe_archive() -> bytes:
    return archive(bpe(400), {"eos_token": "<eos>", "chat_template": TEMPLATE})


@pytest.fixture
async def serve_rank() -> AsyncIterator[Serve]:
    """Put a mock rank on a port of its own; fills in its url."""
    async with contextlib.AsyncExitStack() as stack:

        async def serve(rank: MockRank) -> MockRank:
            app = web.Application()
            app.router.add_post("/v1/completions", rank.completions)
            app.router.add_get(FRAMES_PATH, rank.token_frames)
            rank.url = await stack.enter_async_context(served_web(app))
            return rank

        yield serve


@pytest.fixture
async def open_house() -> AsyncIterator[OpenHouse]:
    """Start a router: `await open_house(setting=value, ...)`; bus=False for one without a bus, broker=... for
    one on another's bus."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            *,
            bus: bool = True,
            broker: MemoryBroker | None = None,
            tracer_provider: Any = None,
            **settings: Any,
        ) -> House:
            settings = {"dead_after_seconds": 60.0, "connect_seconds": 1.0} | settings
            config = RouterConfig(**settings)
            broker = broker or MemoryBroker()
            speaker = MemoryBus(broker)
            service = RouterService(MemoryBus(broker) if bus else None, broker.subjects, config)
            await stack.enter_async_context(running(service))
            url = await stack.enter_async_context(
                served_app(
                    create_app(service, tracer_provider=tracer_provider),
                    config,
                    service.metrics.connection_cut,
                )
            )
            http = await stack.enter_async_context(aiohttp.ClientSession())
            return House(service, url, speaker, broker, broker.subjects, http)

        yield start


@pytest.fixture
async def house(open_house: OpenHouse) -> House:
    return await open_house()
