"""An unmodified frontend of Dynamo before our engines."""

import asyncio
import contextlib
import json
import logging
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.rig.processes import ROOST
from deploy.sections import DEMO_CHECKPOINT
from tests.conftest import NatsServer, free_port
from tests.dynamo.deployment import NAMESPACE, DynamoDeployment, DynamoFrontend, streamed, until
from tests.dynamo.environment import ROOT

pytestmark = pytest.mark.slow
log = logging.getLogger(__name__)

EMBEDDED = ("--engine", "embedded")
SIMULATED = ("--engine", "simulated")
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
BLOCK = 16
TEXTS = (
    "The owl sat in the old tower and looked over the river.",
    "Write one line about bread and flour.",
    "def add(a, b):",
    "Ünïcödé: a naïve café, 東京, and an owl 🦉 at night",
)


def rank_urls(dynamo: DynamoDeployment, worker: str) -> list[str]:
    """Return the HTTP servers of a worker's ranks, which its logs name."""
    logs = sorted((dynamo.folder / "state").rglob(f"{worker}*.log"))
    found = [re.search(r" serves on (http\S+(?: http\S+)*)", log.read_text()) for log in logs]
    return [url for match in found if match for url in match.group(1).split()]


async def direct(url: str, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    """Return the first choice of the rank's own server."""
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{url}/v1/completions", json={"prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["choices"][0]
        return found


async def test_texts_are_those_of_the_engine_itself(dynamo: DynamoDeployment) -> None:
    await dynamo.worker("one", *EMBEDDED, "--ranks", "2")
    frontend = await dynamo.frontend("round-robin", workers=2)
    (url, _) = rank_urls(dynamo, "one")
    for text in TEXTS:
        for fields in (
            GREEDY,
            GREEDY | {"temperature": 0.8, "top_p": 0.9, "seed": 3},
            GREEDY | {"ignore_eos": False},
        ):
            expected = await direct(url, text, **fields)
            found = (await frontend.complete(text, **fields))["choices"][0]
            assert (found["text"], found["finish_reason"]) == (expected["text"], expected["finish_reason"])
        fields = {"temperature": 0, "max_tokens": 24}  # with ignore_eos the frontend ignores stop strings too
        whole = (await direct(url, text, **fields))["text"]
        for stop in (whole[3:4], whole[2:5]):
            expected = await direct(url, text, **fields, stop=[stop])
            found = (await frontend.complete(text, **fields, stop=[stop]))["choices"][0]
            assert (found["text"], found["finish_reason"]) == (expected["text"], "stop")
    expected = await direct(url, TEXTS[0], **GREEDY, logprobs=2)
    found = (await frontend.complete(TEXTS[0], **GREEDY, logprobs=2))["choices"][0]
    assert found["logprobs"]["token_logprobs"] == pytest.approx(
        expected["logprobs"]["token_logprobs"], abs=1e-4
    )
    assert found["logprobs"]["tokens"] == expected["logprobs"]["tokens"]


async def test_chats_are_rendered_by_the_card_and_answered_by_the_engine(dynamo: DynamoDeployment) -> None:
    await dynamo.worker("one", *EMBEDDED, "--ranks", "1")
    frontend = await dynamo.frontend("round-robin")
    messages = [{"role": "user", "content": "How do I bake bread?"}]
    answer = await frontend.client.post(
        "/v1/chat/completions",
        json={"model": "roost-demo", "messages": messages, "temperature": 0, "max_tokens": 24},
    )
    rendered = await _rendered(messages)
    (url,) = rank_urls(dynamo, "one")
    expected = await direct(url, rendered, temperature=0, max_tokens=24)
    assert answer.json()["choices"][0]["message"]["content"] == expected["text"]
    assert answer.json()["usage"]["prompt_tokens"] == len(rendered)


async def _rendered(messages: list[dict[str, str]]) -> list[int]:
    """Return the prompt of a chat by the reference implementation of its template."""
    script = (
        "import json, sys, transformers\n"
        "tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "print(json.dumps(list(tokenizer.apply_chat_template(json.loads(sys.argv[2]),"
        " add_generation_prompt=True, return_dict=True)['input_ids'])))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        str(DEMO_CHECKPOINT),
        json.dumps(messages),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    found: list[int] = json.loads(out)
    return found


def prompts(groups: int, each: int) -> list[str]:
    """Return prompts of some groups, in turn: 96 bytes that a group shares and 40 of their own."""
    return [
        (f"Group {group} shares this beginning. " * 4)[:96]
        + f" Question {number} of group {group}: {'x' * 20}"
        for number in range(each)
        for group in range(groups)
    ]


async def quiet(frontend: DynamoFrontend) -> None:
    """Wait until the index of the frontend has taken all events: none for a quarter of a second."""
    seen = -1.0
    while (now := await frontend.metric("dynamo_component_kv_cache_events_applied")) != seen:
        seen = now
        await asyncio.sleep(0.25)


@pytest.mark.parametrize(("kind", "events"), [("embedded", "zmq"), ("simulated", "nats")])
async def test_its_kv_mode_routes_by_our_events_and_counts_the_hits_that_we_have(
    tmp_path: Path, nats_server: NatsServer, kind: str, events: str
) -> None:
    """Two engines of two ranks. What the frontend's index expects of each request is what the engine found."""
    async with DynamoDeployment(tmp_path, events, nats_server.url) as dynamo:
        for name in ("one", "two"):
            await dynamo.worker(name, "--engine", kind, "--ranks", "2")
        frontend = await dynamo.frontend("kv", workers=4 if kind == "embedded" else 2)
        await hits_are_those_of_the_engines(frontend, kind)


async def hits_are_those_of_the_engines(frontend: DynamoFrontend, kind: str) -> None:
    """The frontend draws a rank for the first prompt of a group, where all are idle. That all groups get the
    same one has a chance of 1 in 16,000.
    """
    expected, found, chosen = [], [], Counter[tuple[int, int]]()
    for text in prompts(groups=8, each=3):
        answer = await frontend.complete(
            text, temperature=0, max_tokens=3, nvext={"extra_fields": ["worker_id", "timing"]}
        )
        tokens = answer["usage"]["prompt_tokens"]
        expected.append(round(answer["nvext"]["timing"]["kv_hit_rate"] * -(-tokens // BLOCK)))
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] // BLOCK)
        worker = answer["nvext"]["worker_id"]
        chosen[worker["decode_worker_id"], worker["decode_dp_rank"]] += 1
        await quiet(frontend)
    log.info(
        "%s: %d blocks found, %d expected; requests by rank %s",
        kind,
        sum(found),
        sum(expected),
        sorted(chosen.values()),
    )
    assert found == expected
    assert sum(found) >= 8 * 2 * (96 // BLOCK if kind == "embedded" else 1)
    assert len(chosen) > 1


async def test_streams_continue_elsewhere_when_an_engine_is_killed(dynamo: DynamoDeployment) -> None:
    workers = [await dynamo.worker(name, *SIMULATED, "--ranks", "2") for name in ("one", "two")]
    frontend = await dynamo.frontend("round-robin", "--migration-limit", "3", workers=2)
    model = (await frontend.models())[0]
    asked = [
        {"model": model, "prompt": f"the owl number {number}", **GREEDY, "max_tokens": 120}
        for number in range(8)
    ]
    whole = [await _text(frontend, body) for body in asked]
    streams = [asyncio.create_task(_text(frontend, body), name="a stream") for body in asked]
    await asyncio.sleep(0.5)
    workers[0].kill_engine()
    assert await asyncio.gather(*streams) == whole
    for body, text in zip(asked, whole, strict=True):
        assert await _text(frontend, body) == text, "requests after the loss"


async def _text(frontend: DynamoFrontend, body: dict[str, Any]) -> str:
    return "".join(
        [choice["text"] async for chunk in streamed(frontend, body) for choice in chunk["choices"]]
    )


@pytest.mark.parametrize("kind", ["embedded", "simulated"])
async def test_a_worker_that_stops_leaves_discovery_first_and_finishes_its_streams(
    dynamo: DynamoDeployment, kind: str
) -> None:
    """No migration: a stream that broke would fail."""
    settings = dynamo.folder / "patient.toml"
    settings.write_text("[worker]\ndrain_seconds = 60.0\ngrace_seconds = 90.0\n")
    leaver = await dynamo.worker("one", "--engine", kind, "--ranks", "2", "--config", str(settings))
    frontend = await dynamo.frontend("round-robin", "--migration-limit", "0")
    model = (await frontend.models())[0]
    body = {"model": model, "prompt": "the owl", **GREEDY, "max_tokens": 100}
    whole = await _text(frontend, body)
    stream = streamed(frontend, body)
    begun = (await anext(stream))["choices"][0]["text"]
    leaver.process.terminate()
    await until(_gone(dynamo), "discovery forgets the worker")
    assert leaver.process.returncode is None, "it left before the stream was over"
    rest = [choice["text"] async for chunk in stream for choice in chunk["choices"]]
    assert begun + "".join(rest) == whole
    assert await leaver.process.wait() == 0
    assert not [file for file in (dynamo.folder / "discovery").rglob("*") if file.is_file()]


def _gone(dynamo: DynamoDeployment) -> Any:
    async def gone() -> bool:
        return not dynamo.instances()

    return gone


async def test_what_the_engine_cannot_do_is_a_clear_error_of_the_client(dynamo: DynamoDeployment) -> None:
    await dynamo.worker("one", *SIMULATED, "--ranks", "1")
    frontend = await dynamo.frontend("round-robin")
    model = (await frontend.models())[0]
    for fields, complaint in (({"n": 2}, "n:"), ({"presence_penalty": 1.0}, "presence_penalty:")):
        answer = await frontend.client.post(
            "/v1/completions", json={"model": model, "prompt": "the owl", **fields}
        )
        assert (answer.status_code, answer.json()["message"][: len(complaint)]) == (400, complaint)


async def test_a_client_that_goes_away_frees_its_place(dynamo: DynamoDeployment) -> None:
    """One place: a second request is served only once the first one has been cancelled in the engine."""
    settings = dynamo.folder / "one-place.toml"
    settings.write_text("[simulated]\nmax_running = 1\nmax_waiting = 4\ntime_scale = 50.0\n")
    await dynamo.worker("one", *SIMULATED, "--ranks", "1", "--config", str(settings))
    frontend = await dynamo.frontend("round-robin")
    model = (await frontend.models())[0]
    body = {"model": model, "prompt": "the owl", **GREEDY, "max_tokens": 4000}
    stream = streamed(frontend, body)
    await anext(stream)
    second = asyncio.create_task(_text(frontend, body | {"max_tokens": 2}), name="waits for the place")
    await asyncio.sleep(1)
    assert not second.done()
    await stream.aclose()
    async with asyncio.timeout(30):
        assert await second


async def test_a_worker_that_is_killed_restarts_and_is_found_again(dynamo: DynamoDeployment) -> None:
    worker = await dynamo.worker("one", *SIMULATED, "--ranks", "2")
    frontend = await dynamo.frontend("round-robin")
    before = await frontend.complete("the owl", **GREEDY)
    (first,) = dynamo.instances()
    (rank,) = worker.ranks()
    rank.kill()

    async def served_again() -> bool:
        if [file for file in dynamo.instances() if file != first] == []:
            return False
        with contextlib.suppress(AssertionError, IndexError, httpx.HTTPError):
            return (await frontend.complete("the owl", **GREEDY))["choices"] == before["choices"]
        return False

    await until(served_again, "the new incarnation serves")


async def test_an_engine_of_a_fleet_serves_a_frontend_of_dynamo_as_well(dynamo: DynamoDeployment) -> None:
    """`roost up` with an engine in Dynamo: both routers give the same answers, from one engine and its cache."""
    port = free_port()
    settings = dynamo.folder / "both.toml"
    settings.write_text(f'[worker]\ndynamo = "{NAMESPACE}"\n')
    await dynamo.start(
        "up",
        [
            *ROOST,
            "up",
            "--engine",
            "simulated",
            "--engines",
            "1",
            "--port",
            str(port),
            "--config",
            str(settings),
        ],
        PYTHONPATH=str(ROOT),
    )
    frontend = await dynamo.frontend("kv")
    roost = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)

    async def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await roost.get("/ready")).status_code == 200
        return False

    await until(ready, "the fleet's own router serves")
    prompt = prompts(1, 1)[0]
    body = {"model": (await frontend.models())[0], "prompt": prompt, **GREEDY}
    ours = (await roost.post("/v1/completions", json=body)).json()
    theirs = await frontend.complete(prompt, **GREEDY)
    assert theirs["choices"][0]["text"] == ours["choices"][0]["text"]
    await quiet(frontend)
    again = await frontend.complete(prompt, **GREEDY, nvext={"extra_fields": ["timing"]})
    assert again["nvext"]["timing"]["kv_hit_rate"] > 0
    await roost.aclose()
