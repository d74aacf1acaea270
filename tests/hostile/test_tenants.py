"""Tenants who guess what others asked, read others' decisions, and end others' reservations."""

# ruff: noqa: F811 fixtures are named like what is imported

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bus.memory import MemoryBus
from engine_adapter.serving.http import RankApp
from fleet.facts.engines import Capabilities
from router.access.api_keys import key_line
from router.api.bus_api import BusApi
from router.api.library import Decider
from tests.contract.conftest import tiny_checkpoint  # noqa: F401 a fixture
from tests.contract.engine_doors import embedded
from tests.router.conftest import byte_archive, open_house, serve_rank  # noqa: F401 the router's fixtures
from tests.router.router_fixture import House, MockRank, OpenHouse, Serve, chat, served_app, until
from tests.simulated_engines import simulated_engine
from tests.unmeasured_engines import skip_calibration

TENANTS = ("acme", "rival")
PROMPT = "{0} dollars a piece is our offer, which must stay unknown before Friday, delivered in May. " * 2


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def guarded(open_house: OpenHouse, tmp_path: Path) -> House:
    """A router whose keys are named like their tenants."""
    file = tmp_path / "keys"
    rights = frozenset({"infer", "route"})
    gateway = key_line("gateway", "gateway", None, rights | {"any_tenant"})
    file.write_text("\n".join([*(key_line(tenant, tenant, None, rights) for tenant in TENANTS), gateway]))
    return await open_house(api_key_file=file)


@asynccontextmanager
async def simulated_house(house: House) -> AsyncIterator[str]:
    async with simulated_engine(MemoryBus(house.broker), house.subjects, "sim", ranks=1, time_scale=0.01):
        await until(lambda: "demo" in house.service.view.models(live=True) and house.service.ready)
        yield "demo"


@asynccontextmanager
async def embedded_house(house: House, checkpoint: Path, archive: bytes) -> AsyncIterator[str]:
    async with AsyncExitStack() as stack:
        tried = await stack.enter_async_context(
            embedded(checkpoint, kv_blocks=200, max_context=512, model="demo")
        )
        url = await stack.enter_async_context(served_app(RankApp(tried.engine)))  # type: ignore[arg-type]
        about = {"block_size": 16, "shape": None, "placement": None, "layout": None}
        await house.join(
            "embedded",
            [url],
            archive,
            capabilities=Capabilities(kv_events=False, isolates_tenants=True),
            **about,
        )
        yield "demo"


@pytest.fixture(params=["simulated", "embedded"])
async def attacked(request: pytest.FixtureRequest, guarded: House) -> AsyncIterator[House]:
    """The router before one engine that serves "demo"."""
    if request.param == "simulated":
        async with simulated_house(guarded):
            yield guarded
        return
    skip_calibration(request.getfixturevalue("monkeypatch"))
    async with embedded_house(
        guarded, request.getfixturevalue("tiny_checkpoint"), request.getfixturevalue("byte_archive")
    ):
        yield guarded


async def cached(
    house: House, key: str, dollars: int, headers: dict[str, str] | None = None, **more: Any
) -> int:
    """`cached_tokens` of an answer to a prompt that names a price."""
    body = {"model": "demo", "prompt": PROMPT.format(dollars), "max_tokens": 2, **more}
    answer = await house.post("/v1/completions", body, headers=bearer(key) | (headers or {}))
    assert answer.status == 200, answer.body
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


async def overlap(house: House, key: str) -> int:
    """Blocks of the prompt that names 41 dollars that the cheapest rank is believed to hold for a tenant."""
    record = await house.post(
        "/v1/route", {"model": "demo", "prompt": PROMPT.format(41)}, headers=bearer(key)
    )
    return int(record.json["candidates"][0]["overlap_blocks"])


async def until_overlap(house: House, key: str) -> None:
    async with asyncio.timeout(5):
        while not await overlap(house, key):  # noqa: ASYNC110 KV events arrive when they do
            await asyncio.sleep(0.01)


async def test_a_guess_of_another_tenants_prompt_reads_no_cached_tokens(attacked: House) -> None:
    assert await cached(attacked, "acme", 41) == 0
    known = await cached(attacked, "acme", 41)
    assert known > 0, "else the test says nothing"
    assert [await cached(attacked, "rival", dollars) for dollars in (41, 42, 40)] == [0, 0, 0]
    assert await cached(attacked, "acme", 41) == known


async def test_a_tenant_cannot_name_itself_into_anothers_cache(attacked: House) -> None:
    """Neither by the tenant header, nor by the body's user, nor by a cache_salt."""
    await cached(attacked, "acme", 41)
    salts = ["acme", attacked.service.credentials.cache_salt("acme", None)]
    guesses = [await cached(attacked, "rival", 41, cache_salt=salt, user="acme") for salt in salts]
    assert guesses == [0, 0]
    await cached(attacked, "acme", 77)
    assert await cached(attacked, "rival", 77, headers={"x-tenant-id": "acme"}) == 0


async def test_a_gateway_that_may_speak_for_a_tenant_uses_that_tenants_cache(attacked: House) -> None:
    await cached(attacked, "acme", 41)
    assert await cached(attacked, "gateway", 41, headers={"x-tenant-id": "acme"}) > 0
    assert await cached(attacked, "gateway", 41) == 0


@pytest.fixture
async def two_routers(
    open_house: OpenHouse, guarded: House, serve_rank: Serve, byte_archive: bytes
) -> AsyncIterator[tuple[House, House]]:
    """Two routers with the same keys on one bus, before one rank."""
    rank = await serve_rank(MockRank(byte_archive))
    other = await open_house(broker=guarded.broker, api_key_file=guarded.service.config.api_key_file)
    joined = await guarded.join("alone", [rank.url], byte_archive)
    await until(
        lambda: (
            other.service.view.engine(joined.worker_id) is not None
            and other.service.ready
            and guarded.service.ready
        )
    )
    async with asyncio.TaskGroup() as tasks:
        interfaces = [BusApi(house.bus, house.subjects, Decider(house.service)) for house in (guarded, other)]
        running = [tasks.create_task(one.run(), name="answers over the bus") for one in interfaces]
        for one in interfaces:
            await one.listening.wait()
        yield guarded, other
        for task in running:
            task.cancel()


async def test_another_tenants_decision_is_as_unknown_as_one_that_never_was(
    two_routers: tuple[House, House],
) -> None:
    one, other = two_routers
    made = (await one.post("/v1/chat/completions", chat(), headers=bearer("acme"))).headers[
        "x-roost-decision-id"
    ]
    never = made[:-4] + "0000"
    for house in (one, other):
        assert (await house.get(f"/v1/decisions/{made}", headers=bearer("acme"))).json["tenant"] == "acme"
        assert (await house.get(f"/v1/decisions/{made}", headers=bearer("gateway"))).status == 200
        answers = [
            await house.get(f"/v1/decisions/{decision}", headers=bearer("rival"))
            for decision in (made, never)
        ]
        assert [answer.status for answer in answers] == [404, 404]
        assert answers[0].body.replace(made.encode(), never.encode()) == answers[1].body


async def test_another_tenants_reservation_cannot_be_released_here_or_through_another_router(
    two_routers: tuple[House, House],
) -> None:
    one, other = two_routers
    held = (await one.post("/v1/route/reserve", chat(), headers=bearer("acme"))).json["id"]
    await until(lambda: other.service.peers is not None and other.service.peers.booked_elsewhere(held))
    for first_token in (True, False):
        body = {"id": held, "first_token": first_token}
        assert (await one.post("/v1/route/release", body, headers=bearer("rival"))).json[
            "outcome"
        ] == "unknown"
        never = {"id": held[:-4] + "0000", "first_token": first_token}
        answers = [
            await other.post("/v1/route/release", each, headers=bearer("rival")) for each in (body, never)
        ]
        assert [answer.json["outcome"] for answer in answers] == ["passed_on", "passed_on"]
    marker = (await one.post("/v1/route/reserve", chat(), headers=bearer("rival"))).json["id"]
    await until(lambda: other.service.peers is not None and other.service.peers.booked_elsewhere(marker))
    await other.post("/v1/route/release", {"id": marker}, headers=bearer("rival"))
    await until(
        lambda: len(one.service.external_reservations) == 1
    )  # what was passed on before it has arrived, too
    assert (await other.post("/v1/route/release", {"id": held}, headers=bearer("acme"))).json[
        "outcome"
    ] == "passed_on"
    await until(lambda: len(one.service.external_reservations) == 0)


async def test_metrics_name_tenants_with_a_key_and_no_others(two_routers: tuple[House, House]) -> None:
    house, _ = two_routers
    for tenant in ("acme", *(f"unknown-{number}" for number in range(5))):
        assert (
            await house.post(
                "/v1/chat/completions", chat(), headers=bearer("gateway") | {"x-tenant-id": tenant}
            )
        ).status == 200
    lines = house.service.metrics.exposition().decode().splitlines()
    counted = dict(
        line.rsplit(" ", 1) for line in lines if line.startswith("roost_router_tenant_requests_total{")
    )
    assert {name: float(value) for name, value in counted.items()} == {
        'roost_router_tenant_requests_total{outcome="answered",tenant="acme"}': 1.0,
        'roost_router_tenant_requests_total{outcome="answered",tenant="other"}': 5.0,
    }


async def test_an_engine_that_does_not_isolate_tenants_is_marked(
    two_routers: tuple[House, House], caplog: pytest.LogCaptureFixture
) -> None:
    house, _ = two_routers
    decisions = [
        (await house.post("/v1/chat/completions", chat(), headers=bearer("acme"))).headers[
            "x-roost-decision-id"
        ]
        for _ in range(2)
    ]
    assert {
        (await house.get(f"/v1/decisions/{one}", headers=bearer("acme"))).json["cache"] for one in decisions
    } == {"shared"}
    assert (
        len(
            [
                record
                for record in caplog.records
                if "engine alone does not isolate tenants" in record.getMessage()
            ]
        )
        == 1
    )
    assert (
        'roost_router_shared_cache_requests_total{model="demo"} 2.0'
        in house.service.metrics.exposition().decode()
    )


async def test_a_router_that_comes_later_learns_salted_blocks_from_snapshots(
    guarded: House, open_house: OpenHouse
) -> None:
    async with simulated_house(guarded):
        await cached(guarded, "acme", 41)
        late = await open_house(broker=guarded.broker, api_key_file=guarded.service.config.api_key_file)
        await until(lambda: late.service.ready)
        await cached(
            guarded, "rival", 40
        )  # a snapshot that was made for another router may be older; events that follow show it
        await until_overlap(late, "acme")
        assert await overlap(late, "rival") == 0


async def test_a_price_that_is_asked_for_says_nothing_of_what_another_tenant_asked(attacked: House) -> None:
    """`/v1/route` names the blocks that are cached: an oracle that costs no answer at all."""
    await cached(attacked, "acme", 41)
    await cached(attacked, "acme", 41)

    await until_overlap(attacked, "acme")
    assert await overlap(attacked, "rival") == 0
