"""One start of vLLM as engines: facts of its targets, and requests of the agent's own."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from roost_vllm.wire import RoutedRequest, WorkerDemand

from deploy.process import alongside
from engine_adapter.engine import RankFacts
from engine_adapter.vllm.config import VllmConfig
from engine_adapter.vllm.deployment import VllmDeployment
from engine_adapter.vllm.discovery import discover
from engine_adapter.vllm.server import VllmServer
from engine_adapter.vllm.worker_server import WorkerServer
from tests.engine_adapter.vllm.plugin_workers import (
    EXPERT_BYTES,
    EXPERTS,
    LAYERS,
    SECRET,
    SLOTS,
    TOP_K,
    PluginWorker,
    connected,
    placement,
    until,
    vote,
)
from tests.engine_adapter.vllm.recorded_server import RECORDING, RecordedVllm, recorded_vllm


class Followed:
    """A deployment with two workers, and all facts of its targets."""

    def __init__(self, server: RecordedVllm, deployment: VllmDeployment, workers: list[PluginWorker]) -> None:
        self.server, self.deployment, self.workers = server, deployment, workers
        self.facts: list[list[RankFacts]] = [[], []]

    def take(self, target: int) -> list[RankFacts]:
        self.facts[target].append(self.deployment.targets[target].take_facts())
        return self.facts[target]

    def pairs(self, target: int) -> int:
        taken = [one.activations for one in self.take(target)]
        return sum(int(one.counts.sum()) for one in taken if one is not None)

    def demand(self, rank: int, tokens: int, served: str | None = None) -> WorkerDemand:
        pairs = np.zeros((LAYERS, EXPERTS), "<i8")
        pairs[:, rank] = tokens * TOP_K
        slots = np.zeros((LAYERS, 2 * SLOTS), "<i8")
        slots[:, rank * SLOTS] = tokens * TOP_K
        return WorkerDemand(
            served=self.workers[rank].mailbox.served if served is None else served,
            steps=4,
            seconds=0.2,
            tokens=tokens,
            demand=pairs.tobytes(),
            slots=slots.tobytes(),
        )


@asynccontextmanager
async def followed(**about: Any) -> AsyncIterator[Followed]:
    async def next_epoch() -> int:
        return 1

    async with asyncio.timeout(30), recorded_vllm() as server:
        config = VllmConfig(urls=(server.url,), listen="127.0.0.1:0", load_seconds=0.02, **about)
        found = await discover(config, [VllmServer(server.url, None, 5)])
        workers = [PluginWorker(0), PluginWorker(1)]
        listening = WorkerServer(config, SECRET, next_epoch)
        async with alongside(listening.serve(), "workers"):
            await listening.listening.wait()
            async with connected(listening, *workers):
                maps = await listening.another(None)
                deployment = VllmDeployment(found, config, maps)
                async with alongside(deployment.run(), "deployment"):
                    yield Followed(server, deployment, workers)


async def test_demand_and_dispatch_reach_the_target_under_the_epoch_of_their_map() -> None:
    async with followed() as vllm:
        vllm.workers[1].send(vllm.demand(1, tokens=10))
        await until(lambda: vllm.pairs(1) == 10 * TOP_K * LAYERS)
        assert vllm.pairs(0) == 0
        (sent,) = [one for facts in vllm.facts[1] for one in facts.sent]
        assert (sent.epoch, sent.tokens, sent.steps, sent.pairs) == (1, 10, 4, 20)
        assert sent.local.tolist() == sent.served.tolist() == [20.0, 20.0]
        assert sent.remote_ranks.tolist() == [10.0, 10.0]


async def test_counts_of_a_map_without_an_epoch_are_dropped() -> None:
    async with followed() as vllm:
        vllm.workers[0].send(vllm.demand(0, tokens=10, served="unknown"))
        vllm.workers[0].send(vllm.demand(0, tokens=3))
        await until(lambda: vllm.pairs(0) > 0)
        assert vllm.pairs(0) == 3 * TOP_K * LAYERS


async def test_counts_after_a_move_have_the_new_epoch_and_the_move_its_time() -> None:
    async with followed() as vllm:
        maps = vllm.deployment.maps
        assert maps is not None
        for rank in range(2):
            maps.stage(rank, 3, placement(1, epoch=2))
            maps.permit(rank, 3)
        await until(lambda: all(worker.mailbox.proposal() for worker in vllm.workers))
        assert vote(vllm.workers)
        await until(lambda: maps.placement.epoch == 2)
        assert vllm.deployment.targets[1].placement == placement(1, epoch=2)
        vllm.workers[0].send(vllm.demand(0, tokens=10))
        await until(lambda: any(facts.sent for facts in vllm.take(0)))
        (sent,) = [one for facts in vllm.facts[0] for one in facts.sent]
        (move,) = sent.rearrangements
        # one place further, rank 0 gets expert 4 and rank 1 expert 2, in each layer
        assert (sent.epoch, move.layers, move.bytes) == (2, LAYERS, LAYERS * EXPERT_BYTES)
        assert move.seconds == 1.25


async def test_ended_requests_are_told_by_their_decision() -> None:
    async with followed() as vllm:
        chosen = np.zeros((2, LAYERS, TOP_K), "<i2").tobytes()
        for name in ("chatcmpl-roost-nudge-1", "chatcmpl-2eff768cce2281139a3c"):
            vllm.workers[1].send(
                RoutedRequest(
                    request=name, prompt_tokens=3, first=1, positions=2, top_k=TOP_K, experts=chosen
                )
            )
        await until(lambda: any(facts.ended for facts in vllm.take(1)))
        (ended,) = [one for facts in vllm.facts[1] for one in facts.ended]
        assert (ended.decision, ended.routed.shape) == ("2eff768cce2281139a3c", (3, LAYERS, TOP_K))


async def test_load_and_cached_tokens_are_polled() -> None:
    async with followed() as vllm:
        await until(lambda: vllm.server.readings >= 3)  # the first one is of the discovery
        vllm.server.metrics = RECORDING["loaded"]
        await until(lambda: vllm.take(1)[-1].load.running == 2)
        cached = [one.activations.cached_tokens for one in vllm.facts[1] if one.activations is not None]
        assert sum(cached) == 352  # vllm:prompt_tokens_cached_total


async def test_each_reading_of_the_load_is_told_once() -> None:
    async with followed() as vllm:
        target = vllm.deployment.targets[0]
        seen = []
        for _ in range(4):
            await target.wait_facts()
            seen.append(target.take_facts().load.reading)
        asked = vllm.server.readings - 1  # the first one was of the discovery
    assert seen == sorted(set(seen))
    assert len(seen) <= asked


async def test_a_nudge_is_short_salted_and_marked() -> None:
    async with followed(vote_steps=8) as vllm:
        maps = vllm.deployment.maps
        assert maps is not None
        await maps.nudge()
        await maps.nudge()
        (first, headers), (second, _) = vllm.server.generated
    assert (first["model"], first["max_tokens"], first["ignore_eos"]) == ("small", 9, True)
    assert first["cache_salt"] != second["cache_salt"]
    assert headers["x-request-id"].startswith("roost-nudge-")
    assert headers["x-data-parallel-rank"] == "0"


async def test_nudge_false_leaves_an_idle_engine_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with followed(nudge=False) as vllm:
        assert vllm.deployment.maps is not None
        await vllm.deployment.maps.nudge()
        assert not vllm.server.generated
    assert "its placement waits for traffic" in caplog.text


async def test_a_nudge_that_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with followed(misses=1000) as vllm:
        vllm.server.up = False
        assert vllm.deployment.maps is not None
        await vllm.deployment.maps.nudge()
    assert "the agent's own request failed" in caplog.text


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda worker: setattr(worker, "missing", ("EplbState.step",)), "lacks what the plugin needs"),
        (
            lambda worker: setattr(worker, "targets", 1),
            "the workers form 1 data-parallel ranks, the server has 2",
        ),
    ],
)
async def test_an_engine_whose_experts_cannot_be_moved_joins_without_them(
    change: Callable[[PluginWorker], None], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def next_epoch() -> int:
        return 1

    async with asyncio.timeout(30), recorded_vllm() as server:
        config = VllmConfig(urls=(server.url,), listen="127.0.0.1:0")
        found = await discover(config, [VllmServer(server.url, None, 5)])
        workers = [PluginWorker(0), PluginWorker(1)]
        for worker in workers:
            change(worker)
        listening = WorkerServer(config, SECRET, next_epoch)
        async with alongside(listening.serve(), "workers"):
            await listening.listening.wait()
            async with connected(listening, *workers):
                deployment = VllmDeployment(found, config, await listening.another(None))
    about = deployment.targets[0].description
    assert (about.rearranges, about.shape, about.capabilities.experts) == (False, None, False)
    assert deployment.targets[0].placement is None
    assert why in caplog.text
