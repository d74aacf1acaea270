"""Reload of settings while a router runs: all or nothing, between two decisions, and always recorded."""

import asyncio
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from fleet.facts.engines import ConfigChanged
from fleet.reloading import differing
from router.config import RouterConfig
from router.reload import RELOADABLE, reloaded
from tests.router.router_fixture import House, MockRank, OpenHouse, Serve, chat, until

NAMES = {field.name for field in fields(RouterConfig)}


def test_every_reloadable_setting_exists_and_secrets_and_sockets_are_not_among_them() -> None:
    assert NAMES >= RELOADABLE
    assert not RELOADABLE & {
        "host",
        "port",
        "api_key_file",
        "backends",
        "backend_key_file",
        "processes",
        "replicate_bookings",
        "session_header",
    }


def test_differences_are_reported_as_toml_writes_them() -> None:
    old = RouterConfig()
    new = replace(
        old, queue_weight=2.5, policy="kv", replicate_bookings=False, classes=("a", "normal"), max_attempts=6
    )
    assert differing(old, new) == {
        "policy": ('"cost"', '"kv"'),
        "queue_weight": ("1.0", "2.5"),
        "classes": ('["high", "normal", "low"]', '["a", "normal"]'),
        "max_attempts": ("5", "6"),
        "replicate_bookings": ("true", "false"),
    }


def test_one_setting_that_needs_a_restart_refuses_all() -> None:
    old = RouterConfig()
    said = reloaded(old, replace(old, port=9000, queue_weight=2.0), 7)
    assert said.changed == {}
    assert (
        said.refused == "these settings need a restart: port (now 8600, asked for 9000); nothing was changed"
    )


async def recorded(house: House) -> list[ConfigChanged]:
    return [
        received.message
        async for received in house.bus.replay(house.subjects.config(), follow=False)
        if isinstance(received.message, ConfigChanged)
    ]


def reading(config: RouterConfig) -> Callable[[], RouterConfig]:
    return lambda: config


async def test_a_reload_changes_the_next_decision_and_is_recorded(
    house: House, serve_rank: Serve, bpe_archive: bytes
) -> None:
    rank = await serve_rank(MockRank(bpe_archive))
    await house.join("alone", [rank.url], bpe_archive)
    before = (await house.post("/v1/route", chat())).json
    new = replace(house.service.config, queue_weight=0.0, policy="least_loaded", max_requests_per_rank=1)
    said = await house.service.reload(reading(new))
    assert said.refused is None
    assert said.changed == {
        "policy": ('"cost"', '"least_loaded"'),
        "queue_weight": ("1.0", "0.0"),
        "max_requests_per_rank": ("512", "1"),
    }
    after = (await house.post("/v1/route", chat())).json
    assert (before["policy"], after["policy"]) == ("cost", "least_loaded")
    assert (before["weights"]["queue"], after["weights"]["queue"]) == (1.0, 0.0)
    assert await recorded(house) == [said]
    assert said.instance == house.service.instance
    assert 'config_reloads_total{outcome="changed"} 1.0' in (await house.get("/metrics")).body.decode()


async def test_settings_of_every_part_take_effect(house: House) -> None:
    service = house.service
    new = replace(
        service.config,
        retry_share=0.5,
        min_retries=3,
        breaker_failures=2,
        breaker_seconds=9.0,
        session_affinity_seconds=60.0,
        settle_seconds=0.5,
        connect_seconds=0.25,
        kept_decisions=5,
    )
    await service.reload(reading(new))
    assert service.config is new
    assert (service.retries.share, service.retries.min_retries) == (0.5, 3)
    health = service.scheduler.health
    for visit in range(2):
        health.began(visit, (1, 0), None, 0.0)
        opened = health.failed(visit, 0.0)
    assert opened


async def test_a_setting_that_needs_a_restart_changes_nothing_and_is_recorded(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    old = house.service.config
    said = await house.service.reload(reading(replace(old, host="0.0.0.0", queue_weight=3.0)))
    assert said.refused is not None
    assert "host" in said.refused
    assert house.service.config is old
    assert await recorded(house) == [said]
    assert "new settings are refused" in caplog.text


async def test_settings_that_cannot_be_read_change_nothing(house: House) -> None:
    old = house.service.config

    def bad() -> RouterConfig:
        raise ValueError("roost.toml:3: no key 'quue_weight' in [router]; did you mean queue_weight?")

    said = await house.service.reload(bad)
    assert said.refused == "roost.toml:3: no key 'quue_weight' in [router]; did you mean queue_weight?"
    assert house.service.config is old
    assert await recorded(house) == [said]


async def test_a_reload_works_without_a_bus(open_house: OpenHouse) -> None:
    house = await open_house(bus=False)
    said = await house.service.reload(reading(replace(house.service.config, max_attempts=7)))
    assert said.changed == {"max_attempts": ("5", "7")}
    assert house.service.config.max_attempts == 7


async def test_a_reload_without_differences_is_reported_too(house: House) -> None:
    said = await house.service.reload(reading(replace(house.service.config)))
    assert (said.changed, said.refused) == ({}, None)
    assert await recorded(house) == [said]


async def test_limits_queue_and_classes_are_those_of_the_new_settings(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(max_requests_per_rank=1, queue_requests=0)
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("alone", [rank.url], byte_archive)
    target = house.service.view.target_table("demo").targets[0]
    taken = house.service.scheduler.reservations.book(target.key, (0, 1, 0, 0), house.service.clock())
    assert (await house.post("/v1/chat/completions", chat())).status == 429
    await house.service.reload(
        reading(replace(house.service.config, queue_requests=4, classes=("gold", "tin"), default_class="tin"))
    )
    waiting = [
        asyncio.create_task(house.post("/v1/chat/completions", chat(), {"x-priority": name}))
        for name in ("tin", "gold")
    ]
    await until(lambda: len(house.service.wait_queue) == 2)
    house.service.release(taken)
    assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200]
    taken = house.service.scheduler.reservations.book(target.key, (0, 1, 0, 0), house.service.clock())
    await house.service.reload(reading(replace(house.service.config, max_requests_per_rank=2)))
    assert (await house.post("/v1/chat/completions", chat())).status == 200
    house.service.release(taken)
