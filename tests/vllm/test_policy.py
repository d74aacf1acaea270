"""Whose policy is in force: the map stays without an agent; vLLM's own takes over where that was asked for, and
hands back when the agent is there."""

from pathlib import Path

import numpy as np
import pytest

from tests.conftest import free_port
from tests.vllm.conftest import SECRET
from tests.vllm.server import Options, vllm
from tests.vllm.traffic import prompts, streaming, unbroken
from tests.vllm.worker_agent import WorkerAgent, random_map, wrong_slots

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
EAGER = {"step_interval": 150, "window_size": 100}
"""vLLM's own policy acts often."""


@pytest.mark.parametrize("fallback", [False, True])
async def test_vllms_own_policy_acts_only_without_an_agent_and_only_if_asked_for(
    tmp_path: Path, fallback: bool
) -> None:
    secret, port = tmp_path / "secret", free_port()
    secret.write_bytes(SECRET)
    environment = {"ROOST_PATIENCE_SECONDS": "5", **({"ROOST_FALLBACK": "vllm"} if fallback else {})}
    options = Options(
        attention="dp", agent=f"127.0.0.1:{port}", secret=secret, eplb=EAGER, environment=environment
    )
    agent = WorkerAgent(SECRET, epoch=40)
    async with vllm(options, tmp_path) as server:
        expected = await unbroken(server, prompts(8))
        async with streaming(server, expected) as traffic:
            await traffic.more(2000)  # some 500 steps
            async with agent.serving(port):
                await agent.until_connected()
                worker = agent.workers[0]
                layers, slots = worker.map.shape
                initial = np.arange(slots) % worker.hello.experts
                is_initial = all(np.array_equal(row, initial) for row in worker.map)
                assert is_initial is not fallback
                assert [one.hello.map for one in agent.workers.values()] == [worker.hello.map] * 2
                assert (worker.hello.flipped, worker.hello.epoch) == (0, 0)
                assert [status.epoch for status in agent.statuses()] == [40, 40]
                assert wrong_slots(agent, worker.map) == []
                table = random_map(np.random.default_rng(1), layers, slots, worker.hello.experts)
                await agent.carry_out(table)
                await agent.until_checked(table)
                assert wrong_slots(agent, table) == []
                await traffic.more(1000)
                assert all(len(one.moved) == 1 for one in agent.workers.values()), "the agent's map stays"
    assert (traffic.differ, traffic.failed) == ([], [])
