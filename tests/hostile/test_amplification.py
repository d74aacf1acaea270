"""What a client or a server writes comes back, and into logs and spans, cut to a bound."""

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.router.router_fixture import MockRank, OpenHouse, Serve, chat, until
from tests.web_server import served_web

CHAT = "/v1/chat/completions"
LONG = "x" * 900_000
SMALL = 3000
"""Characters of an answer, a log line or a span's attribute."""


@asynccontextmanager
async def _backend(error: str) -> AsyncIterator[str]:
    """A server that fails every request with this text."""

    async def fail(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": error}}, status=500)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "demo", "object": "model"}]})

    app = web.Application()
    app.router.add_post(CHAT, fail)
    app.router.add_get("/v1/models", models)
    async with served_web(app) as url:
        yield url


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (chat(model=LONG), 404),
        (chat(priority=LONG), 400),
        (chat(**{LONG: 1}, model=3), 400),
        ({"model": LONG, "prompt": "hi"}, 404),
    ],
    ids=["model", "priority", "field", "text model"],
)
async def test_long_names_make_small_answers_log_lines_and_spans(
    open_house: OpenHouse,
    serve_rank: Serve,
    byte_archive: bytes,
    caplog: pytest.LogCaptureFixture,
    body: dict[str, object],
    status: int,
) -> None:
    """Before, a model's name of 8 MB came back in the answer, and made 17 MB of log."""
    caplog.set_level(logging.INFO)
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    house = await open_house(tracer_provider=provider)
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("e0", [rank.url], byte_archive)
    answer = await house.post(CHAT if "messages" in body else "/v1/completions", body)
    await until(exporter.get_finished_spans)
    assert answer.status == status
    assert len(answer.body) < SMALL
    assert max(len(record.getMessage()) for record in caplog.records) < SMALL
    assert len([record for record in caplog.records if record.name == "roost.access"]) == 1
    for span in exporter.get_finished_spans():
        assert len(span.name) < SMALL
        assert max(len(str(value)) for value in (span.attributes or {}).values()) < SMALL


async def test_a_servers_long_error_makes_short_log_lines(
    open_house: OpenHouse, caplog: pytest.LogCaptureFixture
) -> None:
    """Such texts may quote the prompt."""
    caplog.set_level(logging.INFO)
    async with _backend("quoted " * 8000) as backend:
        house = await open_house(bus=False, backends=(backend,), max_attempts=2)
        await until(lambda: house.service.view.models(live=True))
        answer = await house.post(CHAT, chat())
        house.service.bookkeeping.catch_up()
    assert answer.status >= 500
    lines = [
        record.getMessage() for record in caplog.records if record.name in ("roost.access", "router.service")
    ]
    assert any("quoted" in line for line in lines)
    assert max(map(len, lines)) < SMALL
    access = [json.loads(record.getMessage()) for record in caplog.records if record.name == "roost.access"]
    assert len(access[0]["error"]) <= 500
