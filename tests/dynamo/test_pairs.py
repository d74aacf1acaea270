"""Roost before Dynamo's own pairs of prefill and decode workers."""

import asyncio
import json
import signal
from typing import Any

import httpx
import pytest

from deploy.sections import DEMO_CHECKPOINT
from tests.conftest import free_port
from tests.dynamo.deployment import DynamoDeployment, DynamoProcess, until
from tests.dynamo.environment import PYTHON
from tests.dynamo.test_router import frontend, roost

pytestmark = pytest.mark.slow


async def mocker(dynamo: DynamoDeployment, name: str, mode: str, *options: str) -> DynamoProcess:
    """Start one of Dynamo's mockers in one of the roles."""
    component = "prefill" if mode == "prefill" else "backend"
    command = [str(PYTHON), "-m", "dynamo.mocker", "--model-path", str(DEMO_CHECKPOINT)]
    command += ["--model-name", "tiny", "--endpoint", f"dyn://workers.{component}.generate"]
    command += ["--block-size", "16", "--num-gpu-blocks-override", "4096", "--speedup-ratio", "10"]
    return await dynamo.start(name, [*command, "--disaggregation-mode", mode, *options])


async def decisions(url: str, dynamo: DynamoDeployment, count: int) -> list[Any]:
    """Return the record of each request, by the router's log, once it names as many."""
    lines: list[Any] = []

    async def logged() -> bool:
        log = (dynamo.folder / "roost.log").read_text()
        lines[:] = [json.loads(line) for line in log.splitlines() if line.startswith('{"time"')]
        return len(lines) == count

    await until(logged, f"the log names {count} requests")
    async with httpx.AsyncClient() as client:
        answers = [await client.get(f"{url}/v1/decisions/{one['decision_id']}") for one in lines]
    return [answer.json() for answer in answers]


async def test_pairs_of_mockers_serve_and_a_killed_prefill_worker_loses_nothing(
    dynamo: DynamoDeployment,
) -> None:
    prefill = [await mocker(dynamo, f"prefill-{number}", "prefill") for number in range(2)]
    for number in range(2):
        await mocker(dynamo, f"decode-{number}", "decode")
    url = await roost(dynamo)
    door = await frontend(dynamo)

    async def ask(number: int) -> int:
        prompt = f"group {number % 3} " + "and some more words " * 8
        answer = await door.complete(prompt, max_tokens=8, ignore_eos=True)
        return int(answer["usage"]["completion_tokens"])

    assert [await ask(number) for number in range(6)] == [8] * 6
    records = await decisions(url, dynamo, 6)
    for record in records:
        assert record["prefill"]["failure"] is None
        assert record["prefill"]["decision"]["model"] == "tiny (prefill)"
        assert {one["engine"].split("-")[0] for one in record["candidates"]} == {"backend"}

    asked = 6

    async def known() -> bool:
        nonlocal asked
        asked += 1
        await ask(0)
        last = (await decisions(url, dynamo, asked))[-1]["prefill"]["decision"]
        return bool(last["candidates"][0]["overlap_blocks"])

    await until(known, "the prefill worker is chosen by its prefix")
    prefill[0].process.send_signal(signal.SIGKILL)
    assert await asyncio.gather(*(ask(number) for number in range(8))) == [8] * 8
    prefill[1].process.send_signal(signal.SIGKILL)
    assert await asyncio.gather(*(ask(number) for number in range(8))) == [8] * 8
    last = (await decisions(url, dynamo, asked + 16))[-1]
    assert last["prefill"]["failure"]


async def test_mockers_that_meet_transfer_while_the_prefill_runs(dynamo: DynamoDeployment) -> None:
    await mocker(dynamo, "prefill", "prefill", "--bootstrap-ports", str(free_port()))
    await mocker(dynamo, "decode", "decode")
    url = await roost(dynamo)
    door = await frontend(dynamo)
    for number in range(3):
        answer = await door.complete(f"{number} " + "and some words " * 9, max_tokens=8, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 8
    records = await decisions(url, dynamo, 3)
    assert [record["prefill"]["failure"] for record in records] == [None] * 3
