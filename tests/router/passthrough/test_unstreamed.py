"""Unstreamed answers of static backends: their timeouts, and the assumed load until they arrive."""

import asyncio

import pytest
from aiohttp import web

from router.config import BackendConfig
from router.fleet_state.engine_state import EngineStatus
from tests.router.foreign_servers import ForeignServer, Handler, in_front_of, saying, serving
from tests.router.router_fixture import House, OpenHouse, chat, until

CHAT = "/v1/chat/completions"


class Held:
    """Server that answers when the test releases it."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.answered = asyncio.Event()

    async def answer(self, _: web.Request) -> web.Response:
        self.requested.set()
        await self.answered.wait()
        return web.json_response({"id": "held"})


def after(seconds: float) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(seconds)
        return web.json_response({"id": "slow"})

    return answer


async def test_an_unstreamed_answer_has_no_first_token_limit_and_is_requested_once(
    open_house: OpenHouse,
) -> None:
    async with (
        serving(ForeignServer("one", after(0.5))) as one,
        serving(ForeignServer("two", after(0.5))) as two,
    ):
        house = await in_front_of(open_house, one, two, first_token_seconds=0.1, between_tokens_seconds=0.1)
        answer = await house.post(CHAT, chat())
        assert (answer.status, answer.json) == (200, {"id": "slow"})
        assert len(one.requests) + len(two.requests) == 1


async def test_at_the_total_limit_the_client_learns_its_name_and_no_other_server_is_tried(
    open_house: OpenHouse,
) -> None:
    async with (
        serving(ForeignServer("one", Held().answer)) as one,
        serving(ForeignServer("two", Held().answer)) as two,
    ):
        house = await in_front_of(open_house, one, two, answer_seconds=0.2, breaker_failures=1)
        answer = await house.post(CHAT, chat())
        assert (answer.status, answer.json["error"]["code"]) == (504, "answer_timeout")
        assert "answer_seconds" in answer.json["error"]["message"]
        assert len(one.requests) + len(two.requests) == 1
        assert (await house.post("/v1/route", chat())).json["excluded"] == []  # being slow opens no breaker


async def test_a_stream_keeps_its_first_token_limit(open_house: OpenHouse) -> None:
    async with serving(ForeignServer("one", Held().answer)) as server:
        house = await in_front_of(open_house, server, first_token_seconds=0.1, max_attempts=1)
        answer = await house.post(CHAT, chat(stream=True))
        assert (answer.status, answer.json["error"]["code"]) == (503, "upstream_failed")


async def test_an_answer_is_requested_elsewhere_when_probes_show_that_its_server_hangs(
    open_house: OpenHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.passthrough.unstreamed.LOOK_SECONDS", 0.01)
    held = Held()
    async with serving(ForeignServer("one", held.answer)) as hung:
        house = await in_front_of(
            open_house, hung, probe_timeout_seconds=0.05, no_engine_wait_seconds=0.01, max_attempts=2
        )
        pending = asyncio.create_task(house.post(CHAT, chat()), name="asks")
        await held.requested.wait()
        hung.listing.clear()  # its event loop hangs: requests stay open, probes go unanswered
        answer = await pending
        assert answer.status == 503
        assert house.service.scheduler.reservations.open_bookings == 0


async def test_an_answer_is_given_up_when_the_heartbeats_of_the_server_itself_stop(
    open_house: OpenHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of ours without a tokenizer: the process that should answer is the one that beats."""
    monkeypatch.setattr("router.passthrough.unstreamed.LOOK_SECONDS", 0.01)
    held = Held()
    async with serving(ForeignServer("own", held.answer)) as hung:
        house = await open_house(dead_after_seconds=600.0, max_attempts=1)
        joined = await house.join("own", [hung.url], None)
        pending = asyncio.create_task(house.post(CHAT, chat()), name="asks")
        await held.requested.wait()
        house.service.view.sweep(house.service.clock() + 601.0, 600.0, 9e9)
        answer = await pending
        assert (answer.status, answer.json["error"]["code"]) == (503, "upstream_failed")
        state = house.service.view.engine(joined.worker_id)
        assert state is not None
        assert state.status is EngineStatus.DEAD
        assert house.service.scheduler.reservations.open_bookings == 0


async def test_an_answer_of_a_server_that_refuses_new_connections_is_awaited(
    open_house: OpenHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.passthrough.unstreamed.LOOK_SECONDS", 0.01)
    held = Held()
    async with serving(ForeignServer("one", held.answer)) as stopping:
        house = await in_front_of(open_house, stopping)
        pending = asyncio.create_task(house.post(CHAT, chat()), name="asks")
        await held.requested.wait()
        await stopping.refuse_connections()
        await until(lambda: not house.service.view.models(live=True))
        held.answered.set()
        assert (await pending).json == {"id": "held"}


async def test_a_server_that_dies_while_its_answer_is_awaited_is_replaced(open_house: OpenHouse) -> None:
    async def die(http: web.Request) -> web.Response:
        assert http.transport is not None
        http.transport.abort()
        return web.Response()

    async with (
        serving(ForeignServer("one", die)) as dying,
        serving(ForeignServer("two", saying({"id": "two"}))) as willing,
    ):
        house = await in_front_of(open_house, dying, willing, policy="round_robin")
        assert [(await house.post(CHAT, chat(f"q{number}"))).json for number in range(6)] == [
            {"id": "two"}
        ] * 6


def promised(house: House) -> tuple[int, int]:
    """Return outstanding prefill tokens and requests, as the next decision would see them."""
    table = house.service.view.target_table("demo")
    load = house.service.scheduler.reservations.load(table.rows, house.service.clock())
    return int(load[0].sum()), int(load[1].sum())


async def test_a_prompt_counts_as_computed_after_the_time_that_it_should_take(open_house: OpenHouse) -> None:
    """4,000 tokens at 0.125 ms are due after half a second; the answer arrives much later."""
    held = Held()
    async with serving(ForeignServer("one", held.answer)) as server:
        house = await open_house(
            bus=False, named_backends=(_stated(server.url, tokens_per_second=8_000.0),), probe_seconds=0.05
        )
        await until(lambda: house.service.view.models(live=True))
        begun = asyncio.get_running_loop().time()
        pending = asyncio.create_task(house.post(CHAT, chat("word " * 3200)), name="asks")
        await held.requested.wait()
        tokens, requests = promised(house)
        assert requests == 1
        assert tokens >= 4000
        await until(lambda: promised(house) == (0, 1))
        assert asyncio.get_running_loop().time() - begun >= 0.5
        held.answered.set()
        assert (await pending).status == 200
        assert promised(house) == (0, 0)


async def test_many_answers_share_one_timer_and_an_answer_before_its_time_is_no_trouble(
    open_house: OpenHouse,
) -> None:
    async with serving(ForeignServer("one", saying({"id": "quick"}))) as server:
        house = await open_house(
            bus=False, named_backends=(_stated(server.url, tokens_per_second=10_000.0),), probe_seconds=0.05
        )
        await until(lambda: house.service.view.models(live=True))
        answers = await asyncio.gather(
            *(house.post(CHAT, chat(f"{number} " * number * 20)) for number in range(30))
        )
        assert {answer.status for answer in answers} == {200}
        assert promised(house) == (0, 0)
        await asyncio.sleep(0.2)  # past the times at which they would have been due
        assert promised(house) == (0, 0)


def _stated(url: str, tokens_per_second: float) -> BackendConfig:
    return BackendConfig(
        name="stated", url=url, prompt_tokens_per_second=tokens_per_second, output_tokens_per_second=1000.0
    )
