"""Tests with a real vLLM run where ROOST_VLLM_PYTHON names the Python of its environment: `make test-vllm`
and `make test-vllm-slow` do that. `make test` collects none of them."""

import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from engine_adapter.vllm import wire
from tests.vllm.server import Options, Vllm, vllm
from tests.vllm.traffic import Prompt, prompts, unbroken
from tests.vllm.worker_agent import Table, WorkerAgent, random_map

collect_ignore_glob = [] if os.environ.get("ROOST_VLLM_PYTHON") else ["test_*.py"]
SECRET = b"known to both"
logging.getLogger("httpx").setLevel(logging.WARNING)  # one line for each stream


@dataclass
class Deployment:
    """A vLLM, the agent of its workers, and the streams of some prompts before any map."""

    server: Vllm
    agent: WorkerAgent
    expected: dict[Prompt, list[int]]
    initial: Table

    @property
    def experts(self) -> int:
        """Logical experts of a layer."""
        return self.agent.workers[0].hello.experts

    def digest(self, table: Table) -> str:
        """Return the digest of a map."""
        return wire.map_digest(table, self.experts)

    def random_map(self, seed: int) -> Table:
        """Return a random map that vLLM can serve."""
        import numpy as np

        layers, slots = self.initial.shape
        return random_map(np.random.default_rng(seed), layers, slots, self.experts)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["tp", "dp"])
async def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Deployment]:
    """One vLLM over two ranks for all tests of a module: with tensor, then with data parallelism."""
    folder = tmp_path_factory.mktemp(f"vllm-{request.param}")
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    async with WorkerAgent(SECRET).serving() as agent:
        options = Options(attention=request.param, agent=f"127.0.0.1:{agent.port}", secret=secret)
        async with vllm(options, folder) as server:
            await agent.until_connected()
            expected = await unbroken(server, prompts(12))
            yield Deployment(server, agent, expected, agent.workers[0].map)
