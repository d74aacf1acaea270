"""Experts of our own engines behind Dynamo: priced in the router's decisions, and returned to those who ask."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from benchmarks.rig.processes import ROOST
from engine_adapter.simulated.model.config import SimulatedConfig
from fleet.experts import ModelShape
from router.dynamo.wire.experts import as_answer
from router.foreign_api.routed_experts_parser import TokenUsage, counted
from tests.conftest import NatsServer, free_port
from tests.dynamo.deployment import DynamoDeployment, DynamoFrontend, until
from tests.dynamo.environment import ROOT
from tests.dynamo.routing import WORKERS, frontend, metric, roost, spans_of

pytestmark = pytest.mark.slow

TRACE = "0af7651916cd43dd8448eb211c80319c"
TEXTS = ("The owl sat in the old tower", "def add(a, b): return a", "Bread needs flour, water and salt")
PRICED = ("roost.term.experts_ms", "roost.remote_ranks", "roost.local_share")


async def tracker(dynamo: DynamoDeployment, nats: str) -> str:
    """Start the tracker, and return the URL of its metrics."""
    port = free_port()
    await dynamo.start(
        "tracker",
        [*ROOST, "tracker", "--nats", nats, "--metrics", f"127.0.0.1:{port}"],
        PYTHONPATH=str(ROOT),
    )
    return f"http://127.0.0.1:{port}"


async def ask(
    door: DynamoFrontend, number: int, headers: Mapping[str, str] | None = None, **more: Any
) -> Any:
    """Ask for a short completion, which must succeed."""
    (model,) = await door.models()
    prompt = f"{TEXTS[number % len(TEXTS)]} {number}"
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **more}
    answer = await door.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("kind", ["embedded", "simulated"])
async def test_ranks_of_the_fleet_are_priced_with_their_experts(
    dynamo: DynamoDeployment, nats_server: NatsServer, kind: str
) -> None:
    """One trace leads from the client to the worker, with every candidate and its expert terms.

    They weigh nothing until predictions have proved themselves. The simulated engine's prompts are
    predictable, so there the test waits for that.
    """
    spans, worker_spans = dynamo.folder / "router-spans.jsonl", dynamo.folder / "worker-spans.jsonl"
    options = ("--nats", nats_server.url)
    await tracker(dynamo, nats_server.url)
    await dynamo.worker(
        "moe", "--engine", kind, "--ranks", "2", "--dynamo", WORKERS, "--spans", str(worker_spans), *options
    )
    dynamo.variables |= {"DYN_LOGGING_JSONL": "true", "DYN_LOG": "info"}  # else the frontend makes no spans
    url = await roost(dynamo, "--spans", str(spans), *options)
    door = await frontend(dynamo)
    (model,) = await door.models()
    asked = 0

    async def priced() -> bool:
        """The tracker has learnt from some requests, and the router has its tables."""
        nonlocal asked
        asked += 1
        await ask(door, asked)
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{url}/v1/route", json={"model": model, "prompt": TEXTS[0]})
        found = answer.json()["candidates"]
        known = len(found) == 2 and all(one["remote_ranks"] is not None for one in found)
        return known and (kind == "embedded" or {one["experts_note"] for one in found} == {None})

    await until(priced, "the experts of both ranks are priced")
    await ask(door, 0, {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})

    async def traced() -> bool:
        ended = [spans_of(spans, TRACE, name) for name in ("roost.decide", "roost.forward")]
        return all([*ended, spans_of(worker_spans, TRACE, "")])

    await until(traced, "router and worker have recorded the trace")
    (decision,) = spans_of(spans, TRACE, "roost.decide")
    candidates = {one["attributes"]["roost.candidate"]: one["attributes"] for one in decision["events"]}
    assert set(candidates) == {"moe/0", "moe/1"}
    for attributes in candidates.values():
        assert set(PRICED) <= set(attributes), attributes
    (attempt,) = spans_of(spans, TRACE, "roost.forward")
    assert attempt["attributes"]["roost.chosen"] in candidates
    assert {span["service"] for span in spans_of(worker_spans, TRACE, "")} == {"roost-engine"}


async def test_experts_that_clients_or_the_router_ask_for(
    dynamo: DynamoDeployment, nats_server: NatsServer
) -> None:
    """The tracker learns from those that the router asks for; clients that did not ask see none."""
    shape = SimulatedConfig().model_shape
    counts = await tracker(dynamo, nats_server.url)
    await dynamo.worker("one", "--engine", "simulated", "--ranks", "2", "--dynamo", WORKERS)
    url = await roost(
        dynamo,
        "--nats",
        nats_server.url,
        ROOST_DYNAMO_ROUTED_EXPERTS_SHARE="1",
        ROOST_DYNAMO_LAYERS=str(shape.layers),
        ROOST_DYNAMO_EXPERTS=str(shape.experts),
        ROOST_DYNAMO_TOP_K=str(shape.top_k),
    )
    door = await frontend(dynamo)
    for number in range(5):
        unasked = await ask(door, number)
        assert "routed_experts" not in json.dumps(unasked)
    found = await ask(door, 9, nvext={"extra_fields": ["routed_experts"]})
    _check(found, shape)

    async def learnt() -> bool:
        return await metric(counts, "roost_tracker_imports") >= 6

    await until(learnt, "the tracker has counted the experts of six answers")
    assert await metric(url, "roost_router_foreign_routings_total", 'outcome="told"') == 6


def _check(answer: dict[str, Any], shape: ModelShape) -> None:
    """Check the experts of an answer: one row per computed token, k distinct experts in each layer."""
    usage = answer["usage"]
    held = answer["nvext"]["routed_experts"]
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    found = counted([as_answer(held)], shape, TokenUsage(prompt, completion, held["start"]))
    assert found is not None
    assert found.tokens == prompt + completion - 1 - held["start"]
    pairs = found.prompt + found.completion
    assert (pairs.sum(axis=1) == found.tokens * shape.top_k).all()
