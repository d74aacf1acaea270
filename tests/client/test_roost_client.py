"""The client before a router: decisions, reservations, the fleet, plans and events."""

import asyncio
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bus import Message
from client import MissedEvents, ReceivedEvent, RoostClient, RoostError
from client import roost_client as module
from deploy.http.server import HttpServer
from deploy.http.sockets import listen, url_of
from fleet.facts.engines import EngineLeft
from fleet.requests.control_loop import LoopDescribed, SetLoopState
from fleet.requests.plans import PlanDescribed
from migration.model.plan_record import PlanRecord
from router.access.api_keys import key_line
from router.api.app import create_app
from router.scheduling.decision_record import DecisionRecord
from tests.conftest import free_port
from tests.router.router_fixture import House, MockRank, OpenHouse, Serve, chat, until

PLAN = PlanRecord(
    engine="a",
    worker_id="1",
    model="demo",
    epoch=0,
    policy="weighted",
    tokens_per_second=1.0,
    pairs=1.0,
    judged_pairs=1.0,
    next_window=True,
)


@pytest.fixture
async def house(open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes) -> House:
    """A router with one engine of one rank."""
    house = await open_house()
    rank = await serve_rank(MockRank(byte_archive))
    await house.join("a", [rank.url], byte_archive)
    return house


async def leave(house: House, number: int) -> None:
    await house.bus.record(
        house.subjects.membership("e"), EngineLeft(engine="e", worker_id=number, reason="test")
    )


async def test_decisions_and_reservations_are_the_routers_own_records(house: House) -> None:
    async with RoostClient(house.url + "/v1") as roost:
        decided = await roost.decide(chat(), without=["experts"], session="s")
        assert decided.chosen == "a/0"
        async with roost.reserved(chat(), priority="high") as chosen:
            assert chosen.url == next(house.service.view.engines()).joined.urls[0]
            assert isinstance(await roost.decision(chosen.id), DecisionRecord)
            assert (await roost.release(chosen.id, first_token=True)).outcome == "noted"
            assert (await roost.status()).engines[0].ranks[0].requests == 1
        assert (await roost.release(chosen.id)).outcome == "unknown"
        assert (await roost.status()).engines[0].ranks[0].requests == 0


async def test_a_refusal_has_the_status_the_code_and_the_words_of_the_router(house: House) -> None:
    async with RoostClient(house.url) as roost:
        with pytest.raises(RoostError, match="gone") as refused:
            await roost.decide(chat(), gone=["a"])
        assert (refused.value.status, bool(refused.value.code)) == (400, True)
        with pytest.raises(RoostError, match="model") as refused:
            await roost.decide(chat(model="other"))
        assert refused.value.status == 404


async def test_the_loop_is_paused_and_resumed(house: House) -> None:
    states: list[bool] = []

    async def planner(request: Message) -> Message:
        if isinstance(request, SetLoopState):
            states.append(request.paused)
        return LoopDescribed(
            policy="weighted",
            automatic=True,
            paused=bool(states and states[-1]),
            budget_bytes=1,
            budget_seconds=2.0,
            cycle_seconds=3.0,
        )

    async with house.bus.serve(house.subjects.loop, planner), RoostClient(house.url) as roost:
        assert (await roost.loop()).paused is False
        assert (await roost.pause_loop("load test")).paused is True
        assert (await roost.resume_loop()).paused is False
    assert states == [True, False]


async def test_no_router_is_an_error_that_names_the_address() -> None:
    async with RoostClient(f"http://127.0.0.1:{free_port()}") as roost:
        with pytest.raises(RoostError, match="no answer of the router at http") as refused:
            await roost.status()
    assert refused.value.status == 0


async def test_a_plan_is_the_planners_record(house: House) -> None:
    async def planner(_: Message) -> Message:
        return PlanDescribed(engine="a", worker_id=1, record=msgspec.json.encode(PLAN))

    async with house.bus.serve(house.subjects.describe_plan, planner), RoostClient(house.url) as roost:
        assert await roost.plan("a", policy="full", budget_bytes=5) == PLAN


async def test_events_survive_routers_that_stop_and_start(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("router.api.event_routes.RETRY_MILLISECONDS", 10)
    port, count, found = free_port(), 30, list[int]()

    async def serve(stack: AsyncExitStack) -> HttpServer:
        door = listen("127.0.0.1", port)
        assert url_of(door) == f"http://127.0.0.1:{port}"
        return await stack.enter_async_context(HttpServer(create_app(house.service), door, drain_seconds=0.1))

    async def restart() -> None:
        for number in range(count):
            if number % 10 == 0:
                await stack.aclose()
                await serve(stack)
            await leave(house, number)
            await asyncio.sleep(0.002)

    async with (
        AsyncExitStack() as stack,
        asyncio.timeout(20),
        RoostClient(f"http://127.0.0.1:{port}") as roost,
    ):
        await serve(stack)
        async with aclosing(roost.events(["EngineLeft"], after=0)) as events:
            restarting = asyncio.create_task(restart())
            async for event in events:
                assert isinstance(event, ReceivedEvent)
                assert isinstance(event.message, EngineLeft)
                found.append(event.message.worker_id)
                if len(found) == count:
                    break
            await restarting
    assert found == list(range(count))


async def test_missed_events_are_given_as_such(house: House) -> None:
    await leave(house, 1)
    async with RoostClient(house.url) as roost, aclosing(roost.events(after=999)) as events:
        gap = await anext(events)
    assert isinstance(gap, MissedEvents)
    assert "lost its log" in gap.reason


async def test_events_since_a_time_are_given_once(house: House) -> None:
    await leave(house, 1)
    async with RoostClient(house.url) as roost, aclosing(roost.events(["EngineLeft"], since="1h")) as events:
        first: Any = await anext(events)
        await leave(house, 2)
        second: Any = await anext(events)
    assert [first.message.worker_id, second.message.worker_id] == [1, 2]
    await until(lambda: not house.service.events.reading_now)  # type: ignore[union-attr]


async def test_a_key_without_the_right_ends_the_iteration_with_the_reason(
    open_house: OpenHouse, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("weak", "acme", None, frozenset({"metrics"})))
    house = await open_house(api_key_file=str(keys))
    async with RoostClient(house.url, "weak") as roost:
        assert (await roost.status()).engines == []
        with pytest.raises(RoostError, match="admin") as refused:
            await anext(roost.events())
        assert (refused.value.status, refused.value.code) == (403, "insufficient_rights")


async def test_a_client_outside_its_context_says_how_it_is_used() -> None:
    with pytest.raises(RuntimeError, match="async with RoostClient"):
        await RoostClient("http://127.0.0.1:1").status()
