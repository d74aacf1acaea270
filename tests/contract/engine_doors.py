"""Engines of all kinds that the contract tests try, each started small."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from deploy.process import alongside
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.sampling import Sampling
from engine_adapter.config import AgentConfig, EmbeddedConfig
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.embedded.setup import build_setup
from engine_adapter.engine import RankFacts
from engine_adapter.openai_backend import BackendAgent, BackendAgentConfig
from engine_adapter.serving.generation import AnswerDelta, AnswerStream
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.simulated.model.faults import FaultOrder
from engine_adapter.vllm.config import VllmConfig
from engine_adapter.vllm.deployment import VllmDeployment
from engine_adapter.vllm.discovery import discover
from engine_adapter.vllm.server import VllmServer
from fleet.blocks import local_hashes, salted_seed, sequence_hashes
from fleet.facts.dynamo_kv import KvChange
from fleet.facts.engine_kinds import EngineKind
from fleet.facts.engines import EngineJoined
from fleet.settings import FilePath
from tests.engine_adapter.sglang.fake_server import PAGES, fake_sglang
from tests.engine_adapter.sglang.test_rank import deployed
from tests.engine_adapter.vllm.recorded_server import RECORDING, RecordedVllm, recorded_vllm
from tests.engine_adapter.vllm.test_deployment import followed
from tests.unmeasured_engines import skip_calibration
from tests.web_server import served_web

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"kv_blocks": 24, "max_batch_tokens": 48, "max_running": 4, "max_waiting": 4}
BLOCK, VLLM_BLOCK = 16, 32
TOKENIZER = FilePath(str(ROOT / "deploy/demo_model/checkpoint"))
PROMPT = [ord(letter) for letter in "a prompt that is longer than three blocks of tokens"]
SAMPLED = Sampling(temperature=1.0, seed=77)


@dataclass
class Tried:
    """A serving rank under test, and everything it has said."""

    engine: Any
    run: "asyncio.Task[None]"
    fail: Callable[[], None]
    """make it fail by itself"""
    ranks: Sequence[Any]
    """all of the engine, this one among them"""
    kv: list[KvChange | str] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0
    counts: Any = 0
    ended: list[Any] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)

    async def ask(self, prompt: Sequence[int] = PROMPT, max_tokens: int = 12, **more: Any) -> AnswerDelta:
        return await (await self.submit(prompt, max_tokens, **more)).rest()

    async def submit(self, prompt: Sequence[int] = PROMPT, max_tokens: int = 12, **more: Any) -> AnswerStream:
        answer: AnswerStream = await self.engine.submit(
            GenerationRequest(prompt=list(prompt), max_tokens=max_tokens, ignore_eos=True, **more)
        )
        return answer

    def take(self) -> RankFacts:
        facts: RankFacts = self.engine.take_facts()
        load = facts.load
        assert min(load.running, load.waiting, load.prefill_tokens, load.decode_blocks, load.used_blocks) >= 0
        assert load.decode_blocks <= load.used_blocks <= self.engine.description.kv_blocks
        self.kv += facts.kv
        self.ended += facts.ended
        self.sent += facts.sent
        if facts.activations is not None:
            self.tokens += facts.activations.tokens
            self.cached += facts.activations.cached_tokens
            self.counts = self.counts + facts.activations.counts
        return facts

    async def idle(self) -> RankFacts:
        """The facts of the moment from which nothing is left to do."""
        async with asyncio.timeout(10):
            while (facts := self.take()).load.running or facts.load.waiting:
                await self.engine.wait_facts()
        return self.take()


Starter = Callable[..., AbstractAsyncContextManager[Tried]]


@asynccontextmanager
async def serving(
    engine: Any, tasks: Iterable["asyncio.Task[None]"], fail: Callable[[], None], ranks: Sequence[Any] = ()
) -> AsyncIterator[Tried]:
    runs = list(tasks)
    await asyncio.sleep(0)
    try:
        yield Tried(engine, runs[-1], fail, ranks or [engine])
    finally:
        for run in runs:
            run.cancel()
        await asyncio.wait(runs)


@asynccontextmanager
async def simulated(**settings: Any) -> AsyncIterator[Tried]:
    """The second of two ranks; hundred times as fast as it says."""
    config = SimulatedConfig(
        **{**SMALL, "ranks": 2, "time_scale": 0.01, "max_context": 256, "activity_seconds": 0.01} | settings
    )
    engine = SimulatedEngine(config)
    for rank in engine.ranks:
        await rank.start()
    runs = [
        asyncio.create_task(rank.run(), name=f"rank {number} under test")
        for number, rank in enumerate(engine.ranks)
    ]
    async with serving(
        engine.ranks[1], runs, lambda: engine.order(FaultOrder(fault="die")), engine.ranks
    ) as tried:
        yield tried


class _Failing:
    """A forward pass that can be told to fail."""

    def __init__(self) -> None:
        self.told = False

    def build(self, *arguments: Any) -> Any:
        machine = build_setup(*arguments)
        forward = machine.runner.forward

        def fails(*work: Any) -> Any:
            if self.told:
                raise RuntimeError("told to fail")
            return forward(*work)

        machine.runner.forward = fails  # type: ignore[method-assign]
        return machine


@asynccontextmanager
async def embedded(checkpoint: Path, **settings: Any) -> AsyncIterator[Tried]:
    config = EmbeddedConfig(**{**SMALL, "checkpoint": checkpoint, "threads": 1, "seed": 1} | settings)
    failing = _Failing()
    engine = EmbeddedEngine(config, build=failing.build)
    await engine.start()

    def fail() -> None:
        failing.told = True

    async with serving(
        engine, [asyncio.create_task(engine.run(), name="the engine under test")], fail
    ) as tried:
        yield tried


def starter(request: pytest.FixtureRequest) -> Starter:
    """Return what starts the rank that the parameter names."""
    if request.param == "simulated":
        return simulated
    if request.param == "SGLang, a fake":
        return sglang
    skip_calibration(request.getfixturevalue("monkeypatch"))
    return functools.partial(embedded, request.getfixturevalue("tiny_checkpoint"))


async def mixed(tried: Tried) -> None:
    """Have a rank of ours compute prompts that share prefixes, more than its cache holds; some are
    cancelled."""
    dice = np.random.default_rng(5)
    stems = [dice.integers(1, 256, 40).tolist() for _ in range(3)]
    for _ in range(4):
        prompts = [
            stems[dice.integers(3)][: dice.integers(1, 41)]
            + dice.integers(1, 256, dice.integers(1, 60)).tolist()
            for _ in range(8)
        ]
        answers = [await tried.submit(prompt, int(dice.integers(1, 40))) for prompt in prompts]
        for answer in answers[:2]:
            await anext(answer, None)
            answer.cancel()
        tried.take()
        for answer in answers[2:]:
            await answer.rest()


@dataclass
class Recorded:
    """A data-parallel rank of a vLLM that says what was recorded (`tests/engine_adapter/vllm/record.py`)."""

    tried: Tried
    server: RecordedVllm
    rank: int

    async def play(self) -> None:
        """Have the server publish all that it published; its caches are cleared before the end."""
        await self.server.publish(len(RECORDING["steps"]) - 1)
        last = chained(RECORDING["steps"][-1]["requests"][self.rank])
        async with asyncio.timeout(20):
            while "cleared" not in self.tried.kv or held_after(self.tried.kv, 24) != last:
                await self.tried.engine.wait_facts()
                self.tried.take()
            known = self.tried.take().load.reading
            while self.tried.take().load.reading == known:  # the load is polled
                await self.tried.engine.wait_facts()


def chained(request: dict[str, Any]) -> set[int]:
    """Hashes of the full blocks that a recorded request leaves in a cache: its last token was never an
    input."""
    ids = [*request["prompt"], *request["answer"][:-1]]
    return set(sequence_hashes(local_hashes(ids, VLLM_BLOCK, salted_seed(request["salt"]))))


@asynccontextmanager
async def recorded() -> AsyncIterator[Recorded]:
    """The second of two ranks."""
    async with recorded_vllm() as server:
        config = VllmConfig(urls=(server.url,), listen="127.0.0.1:0", load_seconds=0.02, tokenizer=TOKENIZER)
        deployment = VllmDeployment(await discover(config, [VllmServer(server.url, None, 5)]), config)
        async with alongside(deployment.run(), "the deployment under test") as run:
            rank = deployment.targets[1]
            yield Recorded(Tried(rank, run, lambda: None, deployment.targets), server, 1)


@asynccontextmanager
async def with_plugin() -> AsyncIterator[Tried]:
    """The second of two ranks of a recorded vLLM whose workers have the plugin, and have reported demand."""
    async with followed(tokenizer=TOKENIZER) as one, alongside(one.deployment.run(), "under test") as run:
        tried = Tried(one.deployment.targets[1], run, lambda: None, one.deployment.targets)
        await one.server.publish(len(RECORDING["steps"]) - 2)
        one.workers[1].send(one.demand(1, tokens=5))
        async with asyncio.timeout(20):
            while not tried.tokens or not tried.kv or not tried.take().load.used_blocks:
                await tried.engine.wait_facts()
                tried.take()
        yield tried


@asynccontextmanager
async def sglang(*, works: bool = False) -> AsyncIterator[Tried]:
    """The second of two ranks of a fake SGLang. works: it has computed many requests, and has said so."""
    async with fake_sglang() as server, deployed(server) as deployment:
        rank = deployment.ranks[1]
        tried = Tried(rank, asyncio.create_task(asyncio.Event().wait()), lambda: None, deployment.ranks)  # type: ignore[arg-type]
        try:
            if works:
                await mixed(tried)
            cached = server.caches[1].parent
            async with asyncio.timeout(20):
                while tried.take().load.used_blocks != len(cached) or len(held_after(tried.kv, PAGES)) != len(
                    cached
                ):
                    await rank.wait_facts()
            yield tried
        finally:
            tried.run.cancel()


@asynccontextmanager
async def openai_compatible() -> AsyncIterator[Tried]:
    """The agent of a server that lists one model."""
    async with serving_at({"/v1/models": {"data": [{"id": "m"}]}}) as url:
        agent = BackendAgent(BackendAgentConfig(url=url))
        await agent.start()
        async with alongside(agent.run(), "under test") as run:
            yield Tried(agent, run, lambda: None, [agent])


@asynccontextmanager
async def serving_at(answers: dict[str, Any]) -> AsyncIterator[str]:
    """Serve JSON by path; yield the URL."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(answers[request.path])

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with served_web(app) as url:
        yield url


DOORS: dict[str, EngineKind] = {
    "embedded": "embedded",
    "simulated": "simulated",
    "recorded vLLM": "vllm",
    "recorded vLLM with the plugin": "vllm",
    "SGLang, a fake": "sglang",
    "OpenAI-compatible": "openai",
}
"""By name, the kind of engine that is behind it."""


@asynccontextmanager
async def worked_at(request: pytest.FixtureRequest) -> AsyncIterator[Tried]:
    """A rank, at the door that the parameter names, that has computed many requests, and is idle."""
    match request.param:
        case "recorded vLLM":
            async with recorded() as vllm:
                await vllm.play()
                yield vllm.tried
        case "recorded vLLM with the plugin":
            async with with_plugin() as tried:
                yield tried
        case "OpenAI-compatible":
            async with openai_compatible() as tried:
                yield tried
        case "SGLang, a fake":
            async with sglang(works=True) as tried:
                yield tried
        case _:
            async with starter(request)() as tried:
                await mixed(tried)
                yield tried


async def announced(tried: Tried) -> EngineJoined:
    """Return the join that the agent of the first rank announces."""
    broker, subjects, first = MemoryBroker(Subjects()), Subjects(), tried.ranks[0]
    about = first.description
    shared = bool(about.rank_header)
    who = AgentIdentity(
        engine="e",
        worker_id=1,
        node="n",
        urls=tuple("http://a" if shared else f"http://{rank}" for rank in range(about.ranks)),
    )
    agent = Agent(MemoryBus(broker), subjects, first, who, AgentConfig())
    async with alongside(agent.run(), "its agent"):
        await agent.joined.wait()
        joined = (await anext(MemoryBus(broker).replay(subjects.membership("e")))).message
    assert isinstance(joined, EngineJoined)
    return joined


def held_after(changes: Sequence[KvChange | str], limit: int) -> set[int]:
    """The blocks that are there in the end; every change must make sense when it comes."""
    held: set[int] = set()
    for change in changes:
        if isinstance(change, str):
            held.clear()
            continue
        if change.stored is not None:
            assert change.stored.parent_hash is None or change.stored.parent_hash in held
            names = [block.block_hash for block in change.stored.blocks]
            assert names == sequence_hashes(
                [block.tokens_hash for block in change.stored.blocks], change.stored.parent_hash
            )
            assert not held.intersection(names)
            held.update(names)
        if change.removed is not None:
            assert held.issuperset(change.removed.block_hashes)
            held.difference_update(change.removed.block_hashes)
        assert len(held) <= limit
    return held
