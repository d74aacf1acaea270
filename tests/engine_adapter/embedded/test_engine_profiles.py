"""From a request at a rank's HTTP face to what its agent says of it on the bus, against the routers of
transformers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bus import Message, Subscription
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.config import AgentConfig, EmbeddedConfig
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.serving.http import RankApp
from fleet.blocks import local_hashes, sequence_hashes
from fleet.facts.activity import RequestProfile, RequestsProfiled
from fleet.facts.demand import ClustersPublished
from fleet.signatures import PACKED, ClusterModel, pack

CHECKPOINT = Path(__file__).resolve().parents[3] / "deploy/demo_model/checkpoint"
LAYERS, EXPERTS, TOP_K, BLOCK = 4, 32, 4, 16
SUBJECTS = Subjects()
CONFIG = AgentConfig(facts_seconds=0.01, experts_seconds=0.05, heartbeat_seconds=0.2, samples_per_second=1e3)
PREFIX = list(Path(__file__).read_bytes()[:100])
TAILS = [list(b"def encode(self, text):\n"), list(b"Die Datei wird gelesen")]
CLEAR = 1e-5
"""A choice is compared where the last chosen expert leads the first not chosen by more: closer calls are
rounding."""


def clusters() -> ClusterModel:
    profiles = np.random.default_rng(1).dirichlet(np.full(EXPERTS, 0.3), size=(8, LAYERS))
    model = ClusterModel(9, np.float32(profiles), np.full(8, 1 / 8, np.float32), 0.2)
    return ClusterModel.from_record(model.record())


class Routers:
    """The experts that transformers' own routers choose, by position."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()

    def chosen(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """One-hot int64 [positions, layers, experts], and bool [positions, layers]: where the choice is
        clear."""
        with torch.no_grad():
            by_layer = self._model(torch.tensor([list(tokens)]), output_router_logits=True).router_logits
        logits = torch.stack(by_layer, dim=1).numpy()
        order = np.sort(logits, axis=2)
        chosen = logits >= order[:, :, -TOP_K, None]
        return chosen.astype(np.int64), order[:, :, -TOP_K] - order[:, :, -TOP_K - 1] > CLEAR


@pytest.fixture(scope="module")
def routers() -> Routers:
    return Routers()


@dataclass
class Rank:
    """One rank under its agent, with a client of its HTTP face."""

    engine: EmbeddedEngine
    client: httpx.AsyncClient

    async def complete(self, prompt: list[int], decision: str, **more: Any) -> list[int]:
        body = {
            "prompt": prompt,
            "max_tokens": 20,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        } | more
        response = await self.client.post(
            "/v1/completions", json=body, headers={"x-roost-decision-id": decision}
        )
        assert response.status_code == 200, response.text
        ids: list[int] = response.json()["choices"][0]["token_ids"]
        return ids


@asynccontextmanager
async def fleet(ranks: int, folder: Path, broker: MemoryBroker) -> AsyncIterator[list[Rank]]:
    """An engine, all ranks in this process, and a tracker that knows clusters."""

    async def answer(_: Message) -> Message:
        return ClustersPublished(model="demo", record=clusters().record())

    config = EmbeddedConfig(checkpoint=CHECKPOINT, model="demo", ranks=ranks, kv_blocks=128, threads=1)
    who = AgentIdentity(engine="a", worker_id=5, node="n", urls=("http://x",) * ranks)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(MemoryBus(broker).serve(SUBJECTS.describe_profile, answer))
        engines = [EmbeddedEngine(config, rank, folder) for rank in range(ranks)]
        await asyncio.gather(*(engine.start() for engine in engines))
        agents = [Agent(MemoryBus(broker), SUBJECTS, engine, who, CONFIG) for engine in engines]
        tasks = [asyncio.create_task(one.run(), name=f"{one} under test") for one in (*engines, *agents)]
        clients = [
            httpx.AsyncClient(
                transport=httpx.ASGITransport(RankApp(engine)), base_url="http://rank", timeout=30
            )
            for engine in engines
        ]
        for client in clients:
            await stack.enter_async_context(client)
        await asyncio.gather(*(agent.joined.wait() for agent in agents))
        try:
            yield [Rank(engine, client) for engine, client in zip(engines, clients, strict=True)]
        finally:
            for task in reversed(tasks):
                task.cancel()
            await asyncio.wait(tasks)


async def profile_of(feed: Subscription, decision: str) -> tuple[RequestsProfiled, RequestProfile]:
    """The one profile of a decision, and the message it came in."""
    async with asyncio.timeout(10):
        async for received in feed:
            assert isinstance(received.message, RequestsProfiled)
            found = [one for one in received.message.requests if one.decision == decision]
            if found:
                assert len(found) == 1
                return received.message, found[0]
    raise AssertionError("the subscription ended")


async def clusters_are_known(rank: Rank, feed: Subscription) -> None:
    async with asyncio.timeout(10):
        while True:
            await rank.complete([1], "warm", max_tokens=1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await profile_of(feed, "warm")
                    return


def assert_counts(found: np.ndarray, chosen: np.ndarray, clear: np.ndarray) -> None:
    """found [layers, experts] are the counts of chosen [n, layers, experts], but for close calls."""
    assert np.abs(found.astype(np.int64) - chosen.sum(axis=0)).sum() <= 2 * (~clear).sum() * TOP_K
    assert found.sum() == chosen.shape[0] * LAYERS * TOP_K


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_request_is_profiled_as_the_models_own_routers_chose_and_a_second_one_only_for_what_it_computed(
    routers: Routers, tmp_path: Path, ranks: int
) -> None:
    broker, at = MemoryBroker(SUBJECTS), ranks - 1
    requests = MemoryBus(broker).subscribe(SUBJECTS.requests_profiled())
    async with requests as feed, fleet(ranks, tmp_path, broker) as served:
        await clusters_are_known(served[at], feed)
        for decision, tail, reused in (("one", TAILS[0], 0), ("two", TAILS[1], len(PREFIX) // BLOCK)):
            prompt = PREFIX + tail
            tokens = prompt + await served[at].complete(prompt, decision)
            message, one = await profile_of(feed, decision)
            assert (message.engine, message.rank, message.model, message.epoch, message.clusters) == (
                "a",
                at,
                "demo",
                0,
                9,
            )
            assert (one.tokens, one.cached_tokens, one.block_size) == (
                len(tokens) - 1 - reused * BLOCK,
                reused * BLOCK,
                BLOCK,
            )
            hashes, full = sequence_hashes(local_hashes(tokens)), (len(tokens) - 1) // BLOCK
            assert np.frombuffer(one.blocks, "<u8").tolist() == hashes[reused:full]
            assert one.parent == (hashes[reused - 1] if reused else None)
            chosen, clear = routers.chosen(tokens[:-1])
            assert clear.mean() > 0.99
            own = slice(reused * BLOCK, None)
            assert one.sample is not None
            prompt_counts, completion_counts = (
                one.sample.prompt.array().astype(np.int64),
                one.sample.completion.array().astype(np.int64),
            )
            assert_counts(
                prompt_counts, chosen[reused * BLOCK : len(prompt)], clear[reused * BLOCK : len(prompt)]
            )
            assert_counts(completion_counts, chosen[len(prompt) :], clear[len(prompt) :])
            assert one.signature == pack(clusters().signature(prompt_counts + completion_counts)).tobytes()
            near = (
                chosen[own, :, at * EXPERTS // ranks : (at + 1) * EXPERTS // ranks].sum() / chosen[own].sum()
            )
            assert one.local == pytest.approx(near, abs=(~clear[own]).sum() / clear[own].size)
            for block in range(reused, full):
                rows = slice(block * BLOCK, (block + 1) * BLOCK)
                if clear[rows].all():
                    packed = one.block_signatures[(block - reused) * PACKED : (block - reused + 1) * PACKED]
                    assert packed == pack(clusters().signature(chosen[rows].sum(axis=0))).tobytes()


async def test_a_request_that_is_cancelled_half_way_is_profiled_as_far_as_it_came(
    routers: Routers, tmp_path: Path
) -> None:
    broker = MemoryBroker(SUBJECTS)
    requests = MemoryBus(broker).subscribe(SUBJECTS.requests_profiled())
    async with requests as feed, fleet(1, tmp_path, broker) as (rank,):
        await clusters_are_known(rank, feed)
        expected = GenerationRequest(prompt=PREFIX, max_tokens=1500, ignore_eos=True, decision="gone")
        answer = await rank.engine.submit(expected)
        assert (await anext(answer)).token_ids
        answer.cancel()
        _, one = await profile_of(feed, "gone")
    assert len(PREFIX) <= one.tokens < len(PREFIX) + 1499
    assert one.sample is not None
    assert_counts(one.sample.prompt.array(), *routers.chosen(PREFIX))
    assert one.sample.completion.array().sum() == (one.tokens - len(PREFIX)) * LAYERS * TOP_K
