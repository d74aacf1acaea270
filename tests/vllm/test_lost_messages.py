"""Staging messages lost, late, doubled or different at each single rank, maps that must be refused, and ranks
that stop: under traffic, on a real vLLM. Nobody hangs, and no token differs."""

import asyncio
import contextlib
import logging
import random
import signal
from collections.abc import AsyncIterator

import numpy as np
import psutil
import pytest

from engine_adapter.vllm import wire
from tests.vllm.conftest import Deployment
from tests.vllm.traffic import Traffic, streaming
from tests.vllm.worker_agent import Table, packed, wrong_slots

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1200),
]
ROUNDS = 5
logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def undisturbed(deployment: Deployment) -> AsyncIterator[Traffic]:
    """Four streams that must not notice anything, and both ranks must serve one map at the end."""
    agent = deployment.agent
    async with streaming(deployment.server, deployment.expected) as traffic:
        yield traffic
        await traffic.more(400)  # several whole streams
        assert agent.in_force(agent.statuses()[0].served)
    assert traffic.finished >= 4
    assert (traffic.differ, traffic.failed) == ([], [])
    logger.info("%s: %d streams, 0 differ", deployment.server.options.attention, traffic.finished)


async def bring_into_force(deployment: Deployment, table: Table) -> None:
    """Carry a map out, and check every slot."""
    agent = deployment.agent
    await agent.carry_out(table)
    await agent.until_checked(table)
    assert wrong_slots(agent, table) == []


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_map_whose_message_is_dropped_at_one_rank_is_never_carried_out(
    deployment: Deployment, rank: int
) -> None:
    agent = deployment.agent
    async with undisturbed(deployment):
        for turn in range(ROUNDS):
            old, message = agent.statuses()[0].served, agent.staging(deployment.random_map(turn))
            agent.workers[1 - rank].send(message)
            agent.to_all(wire.PermitVote(handover=message.handover))
            await agent.until(lambda: agent.statuses()[1 - rank].state == "voting")
            await asyncio.sleep(2)
            assert agent.in_force(old)
            agent.to_all(wire.DropMap(handover=message.handover, reason="never staged everywhere"))
            ends = {rank: ("idle", message.handover), 1 - rank: ("refused", message.handover)}
            await agent.until(lambda ends=ends: agent.states() == ends)
        await bring_into_force(deployment, deployment.random_map(40))


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_map_whose_message_is_late_at_one_rank_comes_into_force_then(
    deployment: Deployment, rank: int
) -> None:
    agent, rng = deployment.agent, random.Random(rank)
    async with undisturbed(deployment):
        for turn in range(ROUNDS):
            table = deployment.random_map(200 + turn)
            message = agent.staging(table)
            permit = wire.PermitVote(handover=message.handover)
            agent.workers[1 - rank].send(message)
            agent.workers[1 - rank].send(permit)
            await asyncio.sleep(rng.choice([0.0, 0.02, 0.1, 0.5, 4.0]))
            agent.workers[rank].send(message)
            await asyncio.sleep(rng.choice([0.0, 0.02, 0.1, 0.5]))
            agent.workers[rank].send(permit)
            await agent.until_in_force(table)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_message_that_comes_twice_at_one_rank_carries_its_map_out_once(
    deployment: Deployment, rank: int
) -> None:
    agent = deployment.agent
    async with undisturbed(deployment):
        for turn in range(ROUNDS):
            moves = [len(worker.moved) for _, worker in sorted(agent.workers.items())]
            table = deployment.random_map(300 + turn)
            message = agent.staging(table)
            permit = wire.PermitVote(handover=message.handover)
            for sent in (message, permit):
                agent.to_all(sent)
                agent.workers[rank].send(sent)
            await agent.until_in_force(table)
            for sent in (message, permit):
                agent.workers[rank].send(sent)
            await asyncio.sleep(1)
            after = [len(worker.moved) for _, worker in sorted(agent.workers.items())]
            assert [new - old for old, new in zip(moves, after, strict=True)] == [1, 1]


@pytest.mark.parametrize("rank", [0, 1])
async def test_ranks_that_hold_different_maps_carry_out_neither(deployment: Deployment, rank: int) -> None:
    agent = deployment.agent
    async with undisturbed(deployment):
        for turn in range(ROUNDS):
            old, message = agent.statuses()[0].served, agent.staging(deployment.random_map(400 + turn))
            other = wire.StageMap(
                handover=message.handover,
                epoch=message.epoch,
                replaces=message.replaces,
                map=packed(deployment.random_map(450 + turn)),
            )
            agent.workers[rank].send(message)
            agent.workers[1 - rank].send(other)
            agent.to_all(wire.PermitVote(handover=message.handover))
            await agent.until_state(message.handover, "voting")
            await asyncio.sleep(2)
            assert agent.in_force(old)
            agent.to_all(wire.DropMap(handover=message.handover, reason="differ"))
            await agent.until_state(message.handover, "refused")


async def test_maps_that_vllm_could_not_serve_are_refused_and_nothing_changes(deployment: Deployment) -> None:
    agent, table = deployment.agent, deployment.random_map(600)
    lost = table.copy()
    lost[1][lost[1] == 3] = 4
    empty, beyond = table.copy(), table.copy()
    empty[0, 5], beyond[0, 5] = -1, deployment.experts
    narrow = np.ascontiguousarray(table[:, :-2])
    async with undisturbed(deployment):
        for bad, words in (
            (lost, "has no slot"),
            (narrow, "wrong width"),
            (empty, "is empty"),
            (beyond, "names expert"),
            (None, "stale map"),
        ):
            old, message = agent.statuses()[0].served, agent.staging(table if bad is None else bad)
            if bad is None:
                stale = deployment.digest(deployment.random_map(700))
                message = wire.StageMap(
                    handover=message.handover, epoch=message.epoch, replaces=stale, map=message.map
                )
            agent.to_all(message)
            await agent.until_state(message.handover, "idle")
            assert all(words in one.reason for one in agent.statuses())
            agent.to_all(wire.PermitVote(handover=message.handover))
            await asyncio.sleep(1)
            assert agent.in_force(old)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_stops_for_a_while_around_a_vote_delays_the_map_only(
    deployment: Deployment, rank: int
) -> None:
    agent = deployment.agent
    victim = psutil.Process(agent.workers[rank].hello.pid)
    async with undisturbed(deployment):
        for turn in range(3):
            table = deployment.random_map(800 + turn)
            message = agent.staging(table)
            agent.to_all(message)
            await agent.until_state(message.handover, "staged")
            victim.send_signal(signal.SIGSTOP)
            try:
                agent.to_all(wire.PermitVote(handover=message.handover))
                await asyncio.sleep(3)
            finally:
                victim.send_signal(signal.SIGCONT)
            await agent.until_in_force(table)


async def test_a_connection_that_is_lost_amid_a_handover_changes_nothing_and_is_made_again(
    deployment: Deployment,
) -> None:
    agent = deployment.agent
    async with undisturbed(deployment):
        for turn in range(ROUNDS):
            table = deployment.random_map(900 + turn)
            message = agent.staging(table)
            agent.to_all(message)
            await agent.until_state(message.handover, "staged")
            agent.forget()
            await agent.until_connected()
            await agent.until_state(message.handover, "staged")
            agent.to_all(wire.PermitVote(handover=message.handover))
            await agent.until_in_force(table)
