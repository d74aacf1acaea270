"""Roost between an unmodified frontend of Dynamo and Dynamo's workers."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.conftest import NatsServer
from tests.dynamo.deployment import DynamoDeployment, until
from tests.dynamo.environment import PYTHON
from tests.dynamo.routing import WORKERS, frontend, metric, mocker, roost, spans_of

pytestmark = pytest.mark.slow

REQUESTS, TOKENS, KILLED_EVERY = 200, 120, 5.0


@pytest_asyncio.fixture(params=["zmq", "nats"])
async def on_plane(
    request: pytest.FixtureRequest, tmp_path: Path, nats_server: NatsServer
) -> AsyncIterator[DynamoDeployment]:
    """A deployment with either event plane."""
    async with DynamoDeployment(tmp_path, request.param, nats_server.url) as deployment:
        yield deployment


async def test_no_request_is_lost_while_workers_are_killed(on_plane: DynamoDeployment) -> None:
    dynamo = on_plane
    mockers = [await mocker(dynamo, number) for number in range(4)]
    url = await roost(dynamo)
    door = await frontend(dynamo)
    limit = asyncio.Semaphore(8)

    async def ask(number: int) -> int:
        prompt = f"group {number % 8} " + "and some more words " * (number % 8 + 2) + str(number)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
        async with limit:
            if number % 2:
                whole = await door.complete(prompt, max_tokens=TOKENS, ignore_eos=True)
                return int(whole["usage"]["completion_tokens"])
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            answer = await door.client.post("/v1/completions", json=body)
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            assert lines[-1] == "[DONE]", answer.text[-500:]
            return int(json.loads(lines[-2])["usage"]["completion_tokens"])

    async def kill() -> None:
        for at in range(1000):
            await asyncio.sleep(KILLED_EVERY)
            mockers[at % 4].process.send_signal(signal.SIGKILL)
            mockers[at % 4] = await mocker(dynamo, 10 + at)

    killer = asyncio.create_task(kill())
    try:
        counts = await asyncio.gather(*(ask(number) for number in range(REQUESTS)))
    finally:
        killer.cancel()
    assert counts == [TOKENS] * REQUESTS
    assert await metric(url, "roost_router_retries_total") > 0, "no worker died while it served a request"


async def test_overlaps_are_those_of_dynamos_own_router(on_plane: DynamoDeployment) -> None:
    dynamo = on_plane
    for number in range(4):
        await mocker(dynamo, number)
    url = await roost(dynamo)
    door = await frontend(dynamo)
    prompts = [[(group * 100 + at) % 250 for at in range(40 + 16 * group)] for group in range(8)]
    for prompt in prompts:
        await door.complete(prompt, max_tokens=4)
    ours: dict[int, dict[int, int]] = {}
    theirs: dict[int, dict[int, int]] = {}

    async def equal() -> bool:
        async with httpx.AsyncClient(timeout=60) as client:
            for at, prompt in enumerate(prompts):
                answer = await client.post(f"{url}/v1/route", json={"model": "tiny", "prompt": prompt})
                assert answer.status_code == 200, answer.text
                ours[at] = {
                    int(one["worker_id"]): one["overlap_blocks"]
                    for one in answer.json()["candidates"]
                    if one["overlap_blocks"]
                }
        theirs.update(await _dynamos_overlaps(dynamo, prompts))
        return ours == theirs

    await until(equal, "the overlaps of both are equal")
    assert sum(value for one in ours.values() for value in one.values()) >= 8 * 2


async def _dynamos_overlaps(dynamo: DynamoDeployment, prompts: list[list[int]]) -> dict[int, dict[int, int]]:
    """Return the overlap in blocks of each prompt with each worker, as Dynamo's KvRouter sees it."""
    program = (
        "import asyncio, json, sys\n"
        "from dynamo._core import DistributedRuntime, KvRouter, KvRouterConfig\n"
        "async def main():\n"
        "    runtime = DistributedRuntime(asyncio.get_running_loop(), 'file', 'tcp', event_plane=sys.argv[2])\n"
        "    router = KvRouter(runtime.endpoint('workers.backend.generate'), 16, KvRouterConfig())\n"
        "    await asyncio.sleep(2)\n"
        "    found = [await router.get_overlap_scores(one) for one in json.loads(sys.argv[1])]\n"
        "    print(json.dumps([{str(w['worker_id']): w['device_blocks'] for w in one['workers']} for one in found]))\n"
        "asyncio.run(main())\n"
    )
    child = await asyncio.create_subprocess_exec(
        *(str(PYTHON), "-c", program, json.dumps(prompts), dynamo.variables["DYN_EVENT_PLANE"]),
        env=os.environ | dynamo.variables | {"PYTHONPATH": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    out, _ = await child.communicate()
    lines = [line for line in out.decode().splitlines() if line.startswith("[{")]
    return {
        at: {int(worker): blocks for worker, blocks in one.items() if blocks}
        for at, one in enumerate(json.loads(lines[-1]))
    }


async def test_requests_that_others_send_to_the_workers_count(on_plane: DynamoDeployment) -> None:
    """A frontend of Dynamo, which sees the workers itself, sends to one of them."""
    dynamo = on_plane
    for number in range(2):
        await mocker(dynamo, number)
    url = await roost(dynamo)
    direct = await dynamo.frontend("kv", "--namespace", WORKERS)

    async def loads(client: httpx.AsyncClient) -> dict[int, int]:
        answer = await client.post(f"{url}/v1/route", json={"model": "tiny", "prompt": [1, 2, 3]})
        assert answer.status_code == 200, answer.text
        return {int(one["worker_id"]): one["load"]["requests"] for one in answer.json()["candidates"]}

    async with httpx.AsyncClient(timeout=60) as client:
        busy, idle = await loads(client)
        body = {
            "model": "tiny",
            "max_tokens": 1500,
            "ignore_eos": True,
            "nvext": {"backend_instance_id": busy},
        }
        prompts = [[(number * 50 + at) % 250 for at in range(200)] for number in range(4)]
        asked = [
            asyncio.ensure_future(direct.client.post("/v1/completions", json={**body, "prompt": one}))
            for one in prompts
        ]

        async def seen() -> bool:
            found = await loads(client)
            return found[busy] >= 3 and found[idle] == 0

        await until(seen, "the router knows of them")
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

        async def over() -> bool:
            return set((await loads(client)).values()) == {0}

        await until(over, "the router knows that they are over")


async def test_constraints_that_no_worker_meets_are_an_error_of_the_frontend(
    dynamo: DynamoDeployment,
) -> None:
    await mocker(dynamo, 0)
    await roost(dynamo)
    door = await frontend(dynamo)
    wish = {"routing_constraints": {"required_taints": ["gpu/none"]}}
    body = {"model": "tiny", "prompt": "The owl", "max_tokens": 4}
    answer = await door.client.post("/v1/completions", json={**body, "nvext": wish})
    assert answer.status_code == 503, answer.text
    assert set(answer.json()) == {"message", "type", "code"}
    assert (await door.client.post("/v1/completions", json=body)).status_code == 200


async def test_one_trace_leads_from_the_client_to_our_worker(dynamo: DynamoDeployment) -> None:
    spans = dynamo.folder / "router-spans.jsonl"
    worker_spans = dynamo.folder / "worker-spans.jsonl"
    for name in ("one", "two"):
        await dynamo.worker(
            name, "--engine", "simulated", "--ranks", "1", "--dynamo", "workers", "--spans", str(worker_spans)
        )
    dynamo.variables |= {"DYN_LOGGING_JSONL": "true", "DYN_LOG": "info"}  # else the frontend makes no spans
    await roost(dynamo, "--spans", str(spans))
    door = await frontend(dynamo)
    trace = "0af7651916cd43dd8448eb211c80319c"
    model = (await door.models())[0]
    for _ in range(3):
        answer = await door.client.post(
            "/v1/completions",
            json={"model": model, "prompt": "The owl sat in the old tower", "max_tokens": 8},
            headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"},
        )
        assert answer.status_code == 200, answer.text

    refused = await door.client.post(
        "/v1/completions",
        json={"model": model, "prompt": "The owl", "presence_penalty": 0.5, "max_tokens": 4},
    )
    assert refused.status_code == 400, refused.text

    async def traced() -> bool:
        return len(spans_of(spans, trace, "roost.decide")) == 3 and bool(spans_of(worker_spans, trace, ""))

    await until(traced, "router and worker have recorded the trace")
    assert {span["service"] for span in spans_of(worker_spans, trace, "")} == {"roost-engine"}
    candidates = [event for span in spans_of(spans, trace, "roost.decide") for event in span["events"]]
    assert len(candidates) == 6
    assert {event["name"] for event in candidates} == {"roost.candidate"}


async def test_the_span_before_a_mocker_has_the_request_id_of_the_mockers_own_span(
    dynamo: DynamoDeployment,
) -> None:
    spans = dynamo.folder / "router-spans.jsonl"
    dynamo.variables |= {"DYN_LOGGING_JSONL": "true", "DYN_LOG": "info"}
    worker = await mocker(dynamo, 0)
    await roost(dynamo, "--spans", str(spans))
    door = await frontend(dynamo)
    trace = "0af7651916cd43dd8448eb211c80319d"
    body = {"model": "tiny", "prompt": "The owl sat in the old tower", "max_tokens": 8}
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    answer = await door.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text

    async def traced() -> bool:
        return bool(spans_of(spans, trace, "text_completion"))

    await until(traced, "the router has recorded the trace")
    (span,) = spans_of(spans, trace, "text_completion")
    lines = [json.loads(line) for line in worker.log.read_text().splitlines() if line.startswith("{")]
    (served,) = [
        line for line in lines if line.get("endpoint") == "generate" and line["message"] == "request received"
    ]
    assert served["request_id"] == span["attributes"]["roost.request.id"]
    assert served["trace_id"] == trace
