"""Roost as decider for a frontend that sees the workers itself, and the end of a router between both."""

import asyncio

import httpx
import pytest

from tests.dynamo.deployment import DynamoDeployment, until
from tests.dynamo.routing import WORKERS, frontend, metric, mocker, roost, roost_process

pytestmark = pytest.mark.slow


async def served_by(client: httpx.AsyncClient, body: dict[str, object], headers: dict[str, str]) -> int:
    """Return the instance that served a request."""
    asked = {**body, "nvext": {"extra_fields": ["worker_id"], **body.get("nvext", {})}}  # type: ignore[dict-item]
    answer = await client.post("/v1/completions", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["nvext"]["worker_id"]["decode_worker_id"])


async def test_a_stock_frontend_serves_by_the_worker_that_roost_chose(dynamo: DynamoDeployment) -> None:
    for number in range(2):
        await mocker(dynamo, number)
    url = await roost(dynamo)
    direct = await dynamo.frontend("kv", "--namespace", WORKERS, workers=2)
    body = {"model": "tiny", "prompt": "The owl sat in the old tower and looked at the moon", "max_tokens": 8}
    async with httpx.AsyncClient(base_url=url, timeout=60) as router:

        async def both() -> bool:
            choice = (await router.post("/v1/route", json=body)).json()
            return len(choice["candidates"]) == 2

        await until(both, "the router knows both workers")
        for _ in range(3):
            choice = (await router.post("/v1/route/reserve", json=body)).json()
            chosen = choice["headers"]["x-dynamo-worker-instance-id"]
            assert await served_by(direct.client, body, {"x-dynamo-worker-instance-id": chosen}) == int(
                chosen
            )
            named = {**body, "nvext": {"backend_instance_id": int(chosen)}}
            assert await served_by(direct.client, named, {}) == int(chosen)
            released = await router.post("/v1/route/release", json={"id": choice["id"]})
            assert released.status_code == 200, released.text
        candidates = (await router.post("/v1/route", json=body)).json()["candidates"]
    # also where the frontend's own index would choose the worker with the prefix
    for one in candidates:
        headers = {"x-dynamo-worker-instance-id": one["worker_id"]}
        assert await served_by(direct.client, body, headers) == int(one["worker_id"])


async def test_a_router_that_stops_finishes_its_requests(dynamo: DynamoDeployment) -> None:
    await mocker(dynamo, 0)
    url, process = await roost_process(dynamo)
    door = await frontend(dynamo)
    asked = [
        asyncio.ensure_future(door.complete(f"number {number}", max_tokens=150, ignore_eos=True))
        for number in range(6)
    ]

    async def serving() -> bool:
        return await metric(url, "roost_router_requests_in_flight") == len(asked)

    await until(serving, "all requests are open")
    assert await process.end() == 0, process.log.read_text()
    counts = [answer["usage"]["completion_tokens"] for answer in await asyncio.gather(*asked)]
    assert counts == [150] * len(asked)
