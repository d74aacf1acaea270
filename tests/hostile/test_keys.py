"""Callers who present wrong keys, claim to be others, or ask for more than their key allows."""

import random
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bus.memory import MemoryBroker, MemoryBus
from router.access.api_keys import ALL_RIGHTS, key_line
from router.config import RouterConfig
from router.service import RouterService
from tests.router.router_fixture import House, MockRank, OpenHouse, Serve, chat, until
from tests.web_server import served_web

CHAT, TEXT, ROUTE, RESERVE, RELEASE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/route",
    "/v1/route/reserve",
    "/v1/route/release",
)
READ = {"/v1/models": "infer", "/v1/models/demo": "infer", "/v1/decisions/x": "route", "/metrics": "metrics", "/docs": "docs", "/redoc": "docs",
        "/openapi.json": "docs"}  # fmt: skip
POSTED = {CHAT: "infer", TEXT: "infer", ROUTE: "route", RESERVE: "route", RELEASE: "route"}


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


@pytest.fixture
async def guarded(
    open_house: OpenHouse, tmp_path: Path, serve_rank: Serve, byte_archive: bytes
) -> tuple[House, MockRank]:
    """A router whose key "KIND" belongs to the tenant of that name: with one right each, `all`, and `low` of
    the least urgent class."""
    lines = [key_line(right, right, None, frozenset({right})) for right in sorted(ALL_RIGHTS)]
    lines += [
        key_line("all", "all", "high", ALL_RIGHTS),
        key_line("low", "low", "low", frozenset({"infer", "route"})),
    ]
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    house = await open_house(api_key_file=file)
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("alone", [rank.url], byte_archive)
    return house, rank


async def test_every_route_but_health_needs_a_valid_key(guarded: tuple[House, MockRank]) -> None:
    house, rank = guarded
    for headers in (
        None,
        bearer("wrong"),
        bearer(""),
        {"authorization": "all"},
        {"authorization": "Basic all"},
        bearer("all all"),
    ):
        answers = [await house.get(path, headers=headers) for path in READ]
        answers += [await house.post(path, chat(), headers=headers) for path in POSTED]
        assert {answer.status for answer in answers} == {401}
        assert {answer.headers["www-authenticate"] for answer in answers} == {"Bearer"}
        assert {answer.headers["connection"] for answer in answers} == {
            "close"
        }  # nobody uploads without a key
        assert {answer.json["error"]["code"] for answer in answers} == {"invalid_api_key"}
    assert (await house.get("/health")).json == {"status": "alive"}
    assert not rank.requests


async def test_each_route_needs_its_right_and_no_other(guarded: tuple[House, MockRank]) -> None:
    house, _ = guarded
    for right in sorted(ALL_RIGHTS):
        for path, needed in READ.items():
            answer = await house.get(path, headers=bearer(right))
            assert (answer.status == 403) == (needed != right), (path, right, answer.body)
        for path, needed in POSTED.items():
            body = (
                chat()
                if path == CHAT or needed == "route"
                else {"model": "demo", "prompt": "abc", "max_tokens": 3}
            )
            answer = await house.post(path, body, headers=bearer(right))
            assert (answer.status == 403) == (needed != right), (path, right, answer.body)
            if needed != right:
                assert answer.json["error"]["code"] == "insufficient_rights"


async def test_ready_says_no_more_than_that_to_those_without_the_right(
    guarded: tuple[House, MockRank],
) -> None:
    house, _ = guarded
    await until(lambda: house.service.ready)
    for headers in (None, bearer("wrong"), bearer("infer")):
        assert (await house.get("/ready", headers=headers)).json == {"ready": True}
    assert (await house.get("/ready", headers=bearer("metrics"))).json == {
        "ready": True,
        "models": ["demo"],
        "missing": [],
    }


async def test_a_key_calls_itself_no_other_tenant_and_no_more_urgent_class(
    guarded: tuple[House, MockRank], caplog: pytest.LogCaptureFixture
) -> None:
    house, _ = guarded
    caplog.set_level("INFO", logger="roost.access")
    attempts = [
        ("low", "high", "low"),
        ("infer", "high", "normal"),
        ("infer", "low", "low"),
        ("all", "high", "high"),
        ("all", "", "normal"),
    ]
    for key, priority, granted in attempts:
        caplog.clear()
        answer = await house.post(
            CHAT, chat(user="other"), headers=bearer(key, **{"x-tenant-id": "other", "x-priority": priority})
        )
        assert answer.status == 200
        house.service.bookkeeping.catch_up()
        (line,) = (
            msgspec.json.decode(record.getMessage())
            for record in caplog.records
            if record.name == "roost.access"
        )
        assert line["priority"] == granted


async def test_ids_and_seeds_do_not_come_from_the_generator_whose_numbers_are_shown() -> None:
    def service() -> RouterService:
        broker = MemoryBroker()
        return RouterService(MemoryBus(broker), broker.subjects, RouterConfig(), chance=random.Random(7))

    one, other = service(), service()
    drawn = [
        (at.new_request_id(), at.new_decision_id().removeprefix(at.tag), at.draw_seed())
        for at in (one, other)
    ]
    assert all(first != second for first, second in zip(*drawn, strict=True))
    assert (len(drawn[0][0]), len(drawn[0][1]), len(one.tag)) == (24, 12, 8)
    assert 0 <= drawn[0][2] < 2**63


async def test_no_secret_is_in_a_log_line_an_answer_a_span_a_metric_or_a_record(
    open_house: OpenHouse,
    tmp_path: Path,
    serve_rank: Serve,
    byte_archive: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    known, unknown, fleet = "rk_9f1d-a-known-key", "rk_77aa-not-a-known-key", "3c0e-secret-of-the-fleet"
    (tmp_path / "keys").write_text(key_line(known, "acme", None, ALL_RIGHTS))
    (tmp_path / "fleet").write_text(fleet)
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    files = {"api_key_file": tmp_path / "keys", "fleet_secret_file": tmp_path / "fleet"}
    house = await open_house(tracer_provider=provider, **files)
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("alone", [rank.url], byte_archive)
    shown = []
    for key in (known, unknown):
        answers = [await house.post(path, chat(), headers=bearer(key)) for path in POSTED]
        decision = answers[0].headers.get("x-roost-decision-id", "x")
        answers += [
            await house.get(path, headers=bearer(key)) for path in (*READ, f"/v1/decisions/{decision}")
        ]
        assert answers[0].status == (200 if key is known else 401)
        shown += [f"{answer.headers} {answer.body.decode()}" for answer in answers]
    await house.service.reload(lambda: house.service.config)
    shown += [span.to_json() for span in spans.get_finished_spans()]
    assert len(spans.get_finished_spans()) > len(POSTED)
    assert not any(secret in text for secret in (known, unknown, fleet) for text in (*shown, caplog.text))
    assert [headers["Authorization"] for headers in rank.headers] == [
        f"Bearer {fleet}"
    ]  # and not the client's key


async def test_keys_are_revoked_and_added_by_a_reload(
    guarded: tuple[House, MockRank], caplog: pytest.LogCaptureFixture
) -> None:
    house, _ = guarded
    caplog.set_level("DEBUG")
    file = house.service.config.api_key_file
    assert file is not None
    old, new = key_line("all", "all", None, ALL_RIGHTS), key_line("rk_new-secret", "acme", None, ALL_RIGHTS)
    file.write_text(f"{old}\n{new}\n")
    assert (await house.get("/metrics", headers=bearer("rk_new-secret"))).status == 401
    assert (await house.service.reload(lambda: house.service.config)).refused is None
    assert [
        (await house.get("/metrics", headers=bearer(key))).status for key in ("all", "rk_new-secret")
    ] == [
        200,
        200,
    ]  # both, while clients change
    file.write_text(new)
    report = await house.service.reload(lambda: house.service.config)
    assert report.changed == {
        "api_key_file contents": ("2 keys of 2 tenants", "1 keys of 1 tenants: 0 added, 1 removed, 0 changed")
    }
    assert [
        (await house.get("/metrics", headers=bearer(key))).status for key in ("all", "rk_new-secret")
    ] == [401, 200]
    for broken in ("rk_new-secret\n", ""):
        file.write_text(broken)
        report = await house.service.reload(lambda: house.service.config)
        assert report.refused is not None
        assert str(file) in report.refused
        assert (await house.get("/metrics", headers=bearer("rk_new-secret"))).status == 200
    assert "rk_new-secret" not in caplog.text


async def test_the_backends_key_is_read_again_by_a_reload(open_house: OpenHouse, tmp_path: Path) -> None:
    presented: list[str | None] = []

    async def models(http: web.Request) -> web.Response:
        presented.append(http.headers.get("authorization"))
        return web.json_response({"object": "list", "data": [{"id": "demo", "max_model_len": 100}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    file = tmp_path / "backend"
    file.write_text("first-key\n")
    async with served_web(app) as url:
        house = await open_house(bus=False, backends=(url,), backend_key_file=file, probe_seconds=0.05)
        await until(lambda: "Bearer first-key" in presented)
        file.write_text("second-key\n")
        report = await house.service.reload(lambda: house.service.config)
        assert report.changed == {"backend_key_file contents": ("a key", "another key")}
        await until(lambda: "Bearer second-key" in presented)
