"""The ranks of an embedded engine in one process: its steps on threads, its agents over a bus, and reads through
shared memory. Only the processes are missing."""

import asyncio
import runpy
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import Qwen3MoeForCausalLM

from bus import Bus
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from deploy.process import alongside
from engine_adapter.agent.copy_runner import Staging
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.handover_agent import HandoverAgent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.config import AgentConfig, EmbeddedConfig, TransferConfig
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.embedded.expert_handover import RankExperts
from engine_adapter.embedded.model_runner import Forward, SequenceWork
from engine_adapter.embedded.setup import ForwardPass, RankSetup, build_setup
from engine_adapter.serving.generation import AnswerStream
from engine_adapter.transfer.selection import open_transfers
from fleet.handover import Cell
from fleet.placement import Placement
from tests.engine_adapter.expert_bytes import ExpertBytes
from tests.faults.fleet_fixture import until

ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = Subjects()
WORKER = 11
READING = TransferConfig(backend="shared", lease_seconds=2.0, audit_seconds=1.0, min_seconds=30.0)
"""Every cell is audited once a second, and a busy machine makes no read overdue."""
REPORTING = AgentConfig(heartbeat_seconds=0.2, facts_seconds=0.02, lease_seconds=0.6, load_seconds=0.2)


def write_speaking_model(folder: Path, **changes: Any) -> Qwen3MoeForCausalLM:
    """Save a tiny random model whose tokens are bytes; return it as transformers reads it, in fp32."""
    tiny = runpy.run_path(str(Path(__file__).with_name("tiny_models.py")))["write_tiny"]
    model: Qwen3MoeForCausalLM = tiny(folder, vocab_size=256, eos_token_id=0, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "deploy/demo_model/checkpoint" / name, folder)
    return model


@dataclass
class Witness:
    """A forward pass that keeps the logits it computed."""

    runner: ForwardPass
    rows: list[NDArray[np.float32]] = field(default_factory=list)
    steps: int = 0

    def forward(self, work: Sequence[SequenceWork], tokens_by_rank: Sequence[int] | None = None) -> Forward:
        found = self.runner.forward(work, tokens_by_rank)
        self.rows += list(found.logits.numpy().copy())
        self.steps += 1
        return found


@dataclass
class EmbeddedRank:
    engine: EmbeddedEngine
    agent: Agent
    seen: Witness

    @property
    def experts(self) -> RankExperts:
        assert self.engine.experts is not None
        return self.engine.experts

    @property
    def handovers(self) -> HandoverAgent:
        assert self.agent.handovers is not None
        return self.agent.handovers

    async def submit(self, prompt: Sequence[int], count: int, salt: str = "") -> AnswerStream:
        return await self.engine.submit(
            GenerationRequest(prompt=list(prompt), max_tokens=count, ignore_eos=True, salt=salt)
        )


@dataclass
class EmbeddedRanks:
    """All ranks of one engine, which has joined."""

    ranks: list[EmbeddedRank]
    running: list["asyncio.Task[None]"]
    known: ExpertBytes

    @property
    def placement(self) -> Placement:
        """What all ranks serve."""
        found = [rank.engine.placement for rank in self.ranks]
        assert all(one == found[0] for one in found), [one.epoch for one in found]
        return found[0]

    @property
    def readable(self) -> bool:
        """Every rank knows the checksums of what it serves, so that the others may read it."""
        tables = [rank.handovers.protocol.cell_table for rank in self.ranks]
        return all(table.sealed(one) for table in tables for one in table.residents())

    @property
    def at_rest(self) -> bool:
        """Nothing is under way on any rank, every cell without a slot is free, and nothing is leased."""
        for rank in self.ranks:
            table, cells = rank.handovers.protocol.cell_table, rank.experts.cells
            spare = rank.experts.memory.cells - cells.size
            if not rank.handovers.protocol.at_rest or table.leases or table.count(Cell.FREE) != spare:
                return False
        return len({rank.engine.placement.epoch for rank in self.ranks}) == 1

    def check(self) -> None:
        """The books of every rank agree, and every served cell holds what it must, to the last bit."""
        for number, rank in enumerate(self.ranks):
            table = rank.handovers.protocol.cell_table
            table.check_integrity()
            assert np.array_equal(table.table, rank.experts.cells)
            self.known.check(rank.engine.placement, number, rank.experts.memory, rank.experts.cells)
        for task in self.running:
            assert not task.done(), task


@asynccontextmanager
async def embedded_ranks(
    broker: MemoryBroker | Sequence[Bus],
    checkpoint: Path,
    folder: Path,
    ranks: int,
    name: str = "a",
    **settings: Any,
) -> AsyncIterator[EmbeddedRanks]:
    """An engine that serves until the block ends, and whose experts can be read. broker: or a bus for each
    rank. settings: of `EmbeddedConfig`."""
    seen: dict[int, Witness] = {}

    def build(config: EmbeddedConfig, rank: int, run_directory: Path | None) -> RankSetup:
        setup = build_setup(config, rank, run_directory)
        seen[rank] = Witness(setup.runner)
        return replace(setup, runner=seen[rank])

    config = EmbeddedConfig(
        checkpoint=checkpoint,
        ranks=ranks,
        threads=1,
        **{"kv_blocks": 128, "max_batch_tokens": 256, "max_running": 16} | settings,
    )
    who = AgentIdentity(
        engine=name,
        worker_id=WORKER,
        node="here",
        urls=tuple(f"http://127.0.0.1:{9 + rank}" for rank in range(ranks)),
    )
    meeting = Path(mkdtemp(dir=folder))
    async with AsyncExitStack() as stack:
        engines = [EmbeddedEngine(config, rank, meeting, build=build) for rank in range(ranks)]
        await asyncio.gather(*(engine.start() for engine in engines))
        running = [
            await stack.enter_async_context(alongside(engine.run(), f"steps of rank {rank}"))
            for rank, engine in enumerate(engines)
        ]
        found = []
        for rank, one in enumerate(engines):
            assert one.experts is not None
            transfers = await open_transfers(READING, one.experts.memory, f"{name}-{rank}", one_machine=True)
            for way in transfers:
                stack.push_async_callback(way.close)
            staging = Staging(transfers=transfers, config=READING)
            bus = MemoryBus(broker) if isinstance(broker, MemoryBroker) else broker[rank]
            agent = Agent(bus, SUBJECTS, one, who, REPORTING, staging)
            found.append(EmbeddedRank(one, agent, seen[rank]))
        for number, rank in enumerate(found):
            running.append(
                await stack.enter_async_context(alongside(rank.agent.run(), f"agent of rank {number}"))
            )
        async with asyncio.timeout(20):
            await asyncio.gather(*(rank.agent.joined.wait() for rank in found))
        engine = EmbeddedRanks(found, running, ExpertBytes(checkpoint))
        await until(lambda: engine.readable, "all experts can be read", 20)
        yield engine
