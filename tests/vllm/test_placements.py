"""Maps come into force on a real vLLM while it streams, on all ranks or on none, and change no token."""

import asyncio
import logging
import signal

import httpx
import numpy as np
import psutil
import pytest

from engine_adapter.vllm import wire
from tests.vllm.conftest import Deployment
from tests.vllm.traffic import prompts, stream, streaming
from tests.vllm.worker_agent import slots_by_rows, wrong_slots

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
logger = logging.getLogger(__name__)


async def test_twenty_random_maps_come_into_force_under_streams_and_change_no_token(
    deployment: Deployment,
) -> None:
    agent, seconds = deployment.agent, []
    async with streaming(deployment.server, deployment.expected) as traffic:
        for seed in range(20):
            table = deployment.random_map(seed)
            seconds.append(await agent.carry_out(table))
            await agent.until_checked(table)
            assert wrong_slots(agent, table) == []
        await asyncio.sleep(2)
    logger.info(
        "%s: 20 maps, seconds until in force: median %.2f, most %.2f; %d streams, %d differ",
        deployment.server.options.attention,
        np.median(seconds),
        max(seconds),
        traffic.finished,
        len(traffic.differ),
    )
    assert traffic.finished >= 10
    assert (traffic.differ, traffic.failed) == ([], [])
    assert all(not worker.mismatches for worker in agent.workers.values())
    assert [status.flipped for status in agent.statuses()] == [agent.statuses()[0].handover] * 2


async def test_a_map_that_one_rank_never_got_is_not_carried_out_until_it_has_it(
    deployment: Deployment,
) -> None:
    agent = deployment.agent
    async with streaming(deployment.server, deployment.expected) as traffic:
        for lost in (0, 1):
            old, table = agent.statuses()[0].served, deployment.random_map(100 + lost)
            message = agent.staging(table)
            agent.workers[1 - lost].send(message)
            agent.to_all(wire.PermitVote(handover=message.handover))
            await agent.until(lambda other=1 - lost: agent.statuses()[other].state == "voting")
            await traffic.more(100)  # many votes that fail
            assert agent.in_force(old)
            agent.workers[lost].send(message)
            agent.workers[lost].send(wire.PermitVote(handover=message.handover))
            await agent.until_in_force(table)
    assert (traffic.differ, traffic.failed) == ([], [])


async def test_counters_and_captured_experts_agree(deployment: Deployment) -> None:
    """Two paths of vLLM: its own counters by physical expert, and the routers' capture hook."""
    agent, server = deployment.agent, deployment.server
    await asyncio.sleep(2)
    layers, experts = len(deployment.initial), deployment.experts
    for worker in agent.workers.values():
        worker.demand.clear()
        worker.routed.clear()
    asked = prompts(4, seed=77)
    async with httpx.AsyncClient(timeout=120) as client:
        for at, prompt in enumerate(asked):
            await stream(client, server, prompt, at % server.targets)
    await agent.until(lambda: sum(len(one.routed) for one in agent.workers.values()) == len(asked))
    await asyncio.sleep(2)
    counted = np.zeros((layers, experts), np.int64)
    captured = np.zeros_like(counted)
    for worker in agent.workers.values():
        for told in worker.demand:
            if told.demand:
                counted += np.frombuffer(told.demand, "<i8").reshape(layers, experts)
        for request in worker.routed:
            rows = np.frombuffer(request.experts, "<i2").reshape(request.positions, layers, request.top_k)
            assert request.first + request.positions == request.prompt_tokens + 39, (
                "the last token is not routed"
            )
            for layer in range(layers):
                captured[layer] += np.bincount(rows[:, layer].ravel(), minlength=experts)
    assert counted.sum() > 0
    assert counted.tolist() == captured.tolist()


async def test_copies_are_chosen_by_the_row_as_the_planner_assumes(deployment: Deployment) -> None:
    """vLLM's counters of each physical expert, and the planner's rule over the captured experts. The requests
    run one after another, so that every row is known. The hash itself is a stand-in's on the CPU (`tests/fleet`
    compares it with vLLM's kernel); the order of the copies and the rows are vLLM's own."""
    agent, server, table = deployment.agent, deployment.server, deployment.random_map(78)
    async with streaming(server, deployment.expected):
        await agent.carry_out(table)
    await asyncio.sleep(2)
    for worker in agent.workers.values():
        worker.demand.clear()
        worker.routed.clear()
    asked = prompts(6, seed=78)
    async with httpx.AsyncClient(timeout=120) as client:
        for at, prompt in enumerate(asked):
            await stream(client, server, prompt, at % server.targets)
    await agent.until(lambda: sum(len(one.routed) for one in agent.workers.values()) == len(asked))
    await asyncio.sleep(2)
    served = deployment.digest(table)
    predicted = np.zeros((server.targets, *table.shape), np.int64)
    for worker in agent.workers.values():
        for request in worker.routed:
            predicted[worker.hello.target] += slots_by_rows(table, request)
    for worker in agent.workers.values():
        assert {told.served for told in worker.demand} == {served}
        assert worker.counted().tolist() == predicted[worker.hello.target].tolist()
    used = [np.count_nonzero(predicted.sum(axis=0)[0][table[0] == expert]) for expert in np.unique(table[0])]
    assert max(used) > 1, "later copies served, too"


async def test_workers_come_back_to_an_agent_that_restarts_and_tell_what_they_serve(
    deployment: Deployment,
) -> None:
    agent = deployment.agent
    before = {rank: (worker.hello.instance, worker.status) for rank, worker in agent.workers.items()}
    agent.forget()
    agent.epoch = 999
    await agent.until_connected()
    for rank, worker in agent.workers.items():
        instance, status = before[rank]
        assert status is not None
        assert worker.hello.instance == instance
        assert (worker.hello.flipped, worker.hello.epoch) == (status.flipped, status.epoch)
        assert worker.status == status, "an epoch that an agent invents does not replace the worker's"


async def test_after_kill_9_of_a_worker_clients_get_errors_and_nothing_hangs(deployment: Deployment) -> None:
    agent, server = deployment.agent, deployment.server
    async with streaming(server, deployment.expected) as traffic:
        message = agent.staging(deployment.random_map(500))
        agent.to_all(message)
        await agent.until_state(message.handover, "staged")
        await traffic.more(4)
        victim = agent.workers[1].hello.pid
        agent.to_all(wire.PermitVote(handover=message.handover))
        psutil.Process(victim).send_signal(signal.SIGKILL)
        await agent.until(lambda: not agent.workers, 60)
        await asyncio.to_thread(server.process.wait, 60)
        await asyncio.sleep(1)
    assert traffic.failed, "clients are told"
    assert traffic.differ == []
