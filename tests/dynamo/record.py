"""Record what a real frontend sends to a worker of ours, what the worker answers, and what then is on the
event plane and in discovery, for the fast tests that replay it.

make record-dynamo

One frontend in KV mode before a simulated engine of two ranks, once with each event plane.
"""

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import nats
import zmq
import zmq.asyncio

from deploy.parts.dynamo import planes
from engine_adapter.dynamo.address import DynamoAddress
from engine_adapter.dynamo.card import card_of, write_model_folder
from engine_adapter.dynamo.connection import DynamoConnection
from engine_adapter.dynamo.membership import DynamoMembership
from engine_adapter.dynamo.requests import UnservableRequest
from engine_adapter.dynamo.worker import DynamoWorker
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.simulated.model.text import VOCABULARY
from tests.conftest import NatsServer
from tests.dynamo.deployment import NAMESPACE, DynamoDeployment, DynamoFrontend
from tests.dynamo.environment import ROOT, VERSION

RECORDED = ROOT / "tests" / "engine_adapter" / "dynamo" / f"dynamo-{VERSION}.json"
_PROMPT = "the quick owl goes to the river and waits by the old bridge near the lantern of the tower"
_CHAT = [{"role": "system", "content": "be gentle"}, {"role": "user", "content": _PROMPT}]
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "the same again": {},
    "longer": {"prompt": _PROMPT + " because the heron follows the crane over the valley", "max_tokens": 20},
    "no limit": {"max_tokens": None},
    "token ids": {"prompt": list(range(5, 45))},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "seed": 11},
    "log probabilities": {"logprobs": 2},
    "stop strings": {"stop": ["owl", "the river"]},
    "no end": {"ignore_eos": True},
    "salt of a tenant": {"nvext": {"cache_salt": "tenant-a"}},
    "sampling beyond OpenAI's": {"top_k": 5, "repetition_penalty": 1.0, "min_p": 0.0, "temperature": 0.5},
    "priority": {"nvext": {"agent_hints": {"priority": 3, "osl": 20}}},
    "several choices": {"n": 2, "temperature": 0.5},
    "a penalty": {"presence_penalty": 0.5},
    "least tokens": {"min_tokens": 4},
}
CHATS: dict[str, dict[str, Any]] = {
    "chat": {},
    "chat with log probabilities": {"logprobs": True, "top_logprobs": 2},
    "chat with a schema": {"response_format": {"type": "json_object"}},
}


class RecordedWorker(DynamoWorker):
    """A worker that keeps each request with its answer or refusal."""

    def __init__(self, ranks: dict[int, Any]) -> None:
        super().__init__(ranks, {})
        self.kept: list[dict[str, Any]] = []

    async def generate(self, request: object, context: Any) -> AsyncGenerator[dict[str, Any]]:
        kept: dict[str, Any] = {"request": request, "chunks": [], "refused": None}
        self.kept.append(kept)
        try:
            async for chunk in super().generate(request, context):
                kept["chunks"].append(chunk)
                yield chunk
        except UnservableRequest as error:
            kept["refused"] = str(error)
            raise


class Recorded:
    """A worker with a simulated engine of two ranks in this process."""

    def __init__(self, engine: SimulatedEngine, worker: RecordedWorker, membership: DynamoMembership) -> None:
        self._engine = engine
        self._worker = worker
        self._membership = membership
        self.requests: dict[str, dict[str, Any]] = {}

    async def ask_all(self, frontend: DynamoFrontend) -> None:
        """Send all requests, one after the other, and report what each changed in the engine."""
        (model,) = await frontend.models()
        asked = [
            (name, "/v1/completions", {"prompt": _PROMPT, **fields}) for name, fields in COMPLETIONS.items()
        ]
        asked += [
            (name, "/v1/chat/completions", {"messages": _CHAT, **fields}) for name, fields in CHATS.items()
        ]
        for name, path, fields in asked:
            before = len(self._worker.kept)
            body = {"model": model, "max_tokens": 6, "temperature": 0, **fields}
            answer = await frontend.client.post(path, json=body)
            print(answer.status_code, name, answer.text[:120])
            if len(self._worker.kept) > before:
                self.requests[name] = {
                    "body": body,
                    "status": answer.status_code,
                    **self._worker.kept[before],
                }
            for number, rank in enumerate(self._engine.ranks):
                self._membership.report(number, rank.take_facts())
            await asyncio.sleep(0.3)


@contextlib.asynccontextmanager
async def recorded_worker(folder: Path) -> AsyncIterator[Recorded]:
    """Join the deployment that the environment names."""
    config = SimulatedConfig(ranks=2, output_tokens=30, time_scale=0.1)
    engine = SimulatedEngine(config)
    tokenizer = engine.tokenizer
    runs = [asyncio.create_task(rank.run(), name="a rank") for rank in engine.ranks]
    write_model_folder(
        folder, tokenizer.archive, end_token=tokenizer.end, vocabulary=VOCABULARY, max_context=config.context
    )
    ranks = dict(enumerate(engine.ranks))
    card = card_of(engine.ranks[0].description, folder, ranks=2, max_running=8, engine="sim", worker_id=7)
    worker = RecordedWorker(ranks)
    connection = await DynamoConnection.open(planes(os.environ), DynamoAddress(NAMESPACE))
    membership = DynamoMembership(connection, worker, ranks, card, 5.0)
    await membership.open()
    async with membership:
        yield Recorded(engine, worker, membership)
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)


def discovered(folder: Path) -> dict[str, Any]:
    """Return the records in discovery, by path."""
    root = folder / "discovery" / "v1"
    files = sorted(file for file in root.rglob("*") if file.is_file())
    return {str(file.relative_to(root)): json.loads(file.read_text()) for file in files}


def without_places(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a recording without the folder in which it was made."""
    cleaned: dict[str, Any] = json.loads(json.dumps(found).replace(str(folder), "/models"))
    return cleaned


@contextlib.asynccontextmanager
async def heard_on_nats(url: str) -> AsyncIterator[list[dict[str, str]]]:
    """Messages of the event plane, as NATS delivers them."""
    heard: list[dict[str, str]] = []

    async def keep(message: Any) -> None:
        heard.append({"subject": message.subject, "data": base64.b64encode(message.data).decode()})

    client = await nats.connect(url)
    await client.subscribe("namespace.>", cb=keep)
    await client.flush()
    yield heard
    await client.drain()


async def hear_zmq(folder: Path, heard: list[list[str]]) -> None:
    """Collect the messages of all ZMQ channels in discovery, until cancelled."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    for record in discovered(folder).values():
        if record.get("type") == "EventChannel":
            socket.connect(record["transport"]["config"]["endpoint"])
    try:
        while True:
            heard.append([base64.b64encode(frame).decode() for frame in await socket.recv_multipart()])
    finally:
        context.destroy(linger=0)


async def record(folder: Path, events: str, url: str) -> dict[str, Any]:
    """Record the deployment that the environment of this process names."""
    async with DynamoDeployment(folder, events, url) as deployment, contextlib.AsyncExitStack() as stack:
        heard: list[Any] = await stack.enter_async_context(heard_on_nats(url)) if events == "nats" else []
        recorded = await stack.enter_async_context(recorded_worker(folder / "model"))
        frontend = await deployment.frontend("kv")
        found = discovered(folder)
        listening = asyncio.create_task(hear_zmq(folder, heard), name="listens")
        await asyncio.sleep(1)
        await recorded.ask_all(frontend)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        return {"requests": recorded.requests, "messages": list(heard), "discovery": found}


def main(folder: Path) -> None:
    """Record both event planes, each in a process of its own: the runtime reads its variables there once."""
    server = NatsServer(folder / "store")
    server.start()
    found = {}
    try:
        for events in ("nats", "zmq"):
            place = folder / events
            place.mkdir()
            environment = {**os.environ, **DynamoDeployment(place, events, server.url).variables}
            command = [sys.executable, "-m", "tests.dynamo.record", events, str(place), server.url]
            subprocess.run(command, cwd=ROOT, env=environment, check=True)
            found[events] = without_places(json.loads((place / "recorded.json").read_text()), place)
    finally:
        server.stop()
    RECORDED.write_text(
        json.dumps({"version": VERSION, **found}, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        plane, place, nats_url = sys.argv[1:]
        result = asyncio.run(record(Path(place), plane, nats_url))
        (Path(place) / "recorded.json").write_text(json.dumps(result), encoding="utf-8")
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
