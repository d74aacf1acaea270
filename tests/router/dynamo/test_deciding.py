"""Callers that keep their own frontend of Dynamo ask over HTTP which worker a request should get."""

from typing import Any

import aiohttp

from router.api.app import create_app
from tests.router.dynamo.fake_workers import DynamoFleet, dynamo_fleet
from tests.router.router_fixture import TEMPLATE, archive, bpe, served_app


async def post(fleet: DynamoFleet, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with (
        served_app(create_app(fleet.service)) as url,
        aiohttp.ClientSession() as client,
        client.post(url + path, json={"model": "tiny", **body}) as answer,
    ):
        return answer.status, await answer.json()


async def load_tokenizer(fleet: DynamoFleet) -> None:
    digest = next(iter(fleet.follower.workers.values())).joined.tokenizer
    assert digest is not None
    packed = archive(bpe(300), {"eos_token": "<eos>", "chat_template": TEMPLATE})
    await fleet.service.tokenizers.add(digest, packed)


async def test_the_choice_names_the_instance() -> None:
    async with dynamo_fleet(2**64 - 11, 2**63 + 12) as fleet:
        await load_tokenizer(fleet)
        messages = [{"role": "user", "content": "hello there"}]
        status, found = await post(fleet, "/v1/route", {"messages": messages})
        assert status == 200, found
        assert {int(one["worker_id"]) for one in found["candidates"]} == {2**64 - 11, 2**63 + 12}
        status, found = await post(fleet, "/v1/route/reserve", {"prompt": [1, 2, 3], "max_tokens": 4})
        assert (status, found["prompt_tokens"]) == (200, 3)
        assert found["url"].startswith("dynamo://dynamo.backend.generate/")


async def test_requests_themselves_belong_to_the_frontend() -> None:
    async with dynamo_fleet(11) as fleet:
        await load_tokenizer(fleet)
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
            ("/v1/completions", {"prompt": "hello"}),
        ):
            status, found = await post(fleet, path, body)
            assert status == 404
            assert "send the request to its frontend" in found["error"]["message"]
        assert all(state.obstacle is None for state in fleet.service.view.engines())
