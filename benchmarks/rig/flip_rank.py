"""A rank of the embedded engine as a separate process under closed load, with a diary of token times and
steps.

    python -m benchmarks.rig.flip_rank JOB RANK

It consists of the parts of `roost worker` (engine, agent, expert readers), without the HTTP server: requests
come from this process. JOB is a file with `Job` as JSON. The process prints `ready` on standard output once
it serves and has joined. When standard input ends it stops, and writes RANK.npz beside JOB.
"""

import asyncio
import gc
import itertools
import sys
import time
import zipfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.demo_model import checkpoint_path
from deploy.process import alongside, until_ready
from engine_adapter.agent.copy_runner import Staging
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.config import AgentConfig, EmbeddedConfig, TransferConfig
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.embedded.model_runner import Forward, PreparedEpoch, SequenceWork
from engine_adapter.embedded.setup import MovableExperts, RankSetup, build_setup
from engine_adapter.embedded.switching.attention_switch import LastRound
from engine_adapter.engine import ExpertMemory
from engine_adapter.transfer.nixl_loader import agent_name
from engine_adapter.transfer.rate_limit import RateLimit
from engine_adapter.transfer.selection import open_transfers
from fleet.placement import Placement

PROMPT = 8
NEW = 240
AnyEngine = TypeVar("AnyEngine", bound=EmbeddedEngine)


class Job(msgspec.Struct, frozen=True):
    nats: str
    engine: str
    worker_id: int
    ranks: int
    slots: int
    """per rank and layer"""
    ballast_bytes: int
    sequences: int
    """concurrent sequences per rank"""
    transfer: dict[str, int | float | str | None]
    checkpoint: str = ""
    """folder; empty: the demo model"""
    spare_layers: int = 1
    settings: dict[str, Any] = {}
    """further settings of `EmbeddedConfig`"""


@dataclass(slots=True)
class Diary:
    """Record of events, in seconds of the machine-wide clock."""

    token: list[float] = field(default_factory=list)
    """time of a token"""
    answer: list[int] = field(default_factory=list)
    """number of its answer on this rank"""
    gap: list[float] = field(default_factory=list)
    """time since the previous token of the same answer"""
    step: list[float] = field(default_factory=list)
    """end of a forward pass"""
    collectives: list[int] = field(default_factory=list)
    """collectives made by then"""
    epoch: list[int] = field(default_factory=list)
    """epoch served"""
    flip: list[float] = field(default_factory=list)
    """time at which the step thread flipped to an epoch"""
    flip_seconds: list[float] = field(default_factory=list)
    """duration of the flip"""
    rounds: list[LastRound] = field(default_factory=list)
    """switches of attention"""
    stage_name: list[str] = field(default_factory=list)
    """pull, verify or prepare, in the order of their ends"""
    stage_begin: list[float] = field(default_factory=list)
    stage_end: list[float] = field(default_factory=list)

    def save(self, path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for one in fields(self):
                with archive.open(f"{one.name}.npy", "w") as entry:
                    np.save(entry, np.asarray(getattr(self, one.name)))

    def note_token(self, answer: int, last: float) -> float:
        """Note a token that comes now, and return its time. last: that of the one before; 0: it is the
        first."""
        now = time.monotonic()
        if last:
            self.token.append(now)
            self.answer.append(answer)
            self.gap.append(now - last)
        return now


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedStaging(Staging):
    """Means to copy experts that write the stages of staging into the diary."""

    diary: Diary

    def trace(
        self, traceparent: str, name: str, began: int, attributes: dict[str, str | int], failure: str = ""
    ) -> None:
        now = time.monotonic()
        self.diary.stage_name.append(name)
        self.diary.stage_begin.append(now - 1e-9 * (time.time_ns() - began))
        self.diary.stage_end.append(now)


@dataclass(frozen=True, slots=True)
class WatchedSteps:
    """Forward pass that writes the diary."""

    machine: RankSetup
    experts: MovableExperts
    diary: Diary

    @property
    def arena(self) -> ExpertMemory:
        return self.experts.arena

    @property
    def cells(self) -> NDArray[np.int32]:
        return self.experts.cells

    def prepare(self, placement: Placement, cells: NDArray[np.int32]) -> PreparedEpoch:
        return self.experts.prepare(placement, cells)

    def adopt(self, prepared: PreparedEpoch) -> None:
        began = time.monotonic()
        self.experts.adopt(prepared)
        self.diary.flip.append(began)
        self.diary.flip_seconds.append(time.monotonic() - began)
        found = None if self.machine.attention is None else self.machine.attention.last_round
        if found is not None and self.diary.rounds[-1:] != [found]:
            self.diary.rounds.append(found)

    def forward(self, work: Sequence[SequenceWork], tokens_by_rank: Sequence[int] | None = None) -> Forward:
        found = self.machine.runner.forward(work, tokens_by_rank)
        self.diary.step.append(time.monotonic())
        self.diary.collectives.append(self.machine.step_sync.collectives)
        self.diary.epoch.append(len(self.diary.flip))
        return found


async def stream(engine: EmbeddedEngine, diary: Diary, seed: int) -> None:
    """Stream one answer after another, forever."""
    dice = np.random.default_rng(seed)
    for number in itertools.count(seed << 32):
        last = 0.0
        request = GenerationRequest(
            prompt=dice.integers(32, 127, PROMPT).tolist(),
            max_tokens=NEW + int(dice.integers(NEW)),
            ignore_eos=True,
        )
        async for _ in await engine.submit(request):
            last = diary.note_token(number, last)


@asynccontextmanager
async def serving(
    job: Job, folder: Path, rank: int, diary: Diary, kind: type[AnyEngine]
) -> AsyncIterator[AnyEngine]:
    """Run a rank until the context ends. It has joined when the context begins."""
    subjects = Subjects()

    def build(config: EmbeddedConfig, number: int, run_directory: Path | None) -> RankSetup:
        machine = build_setup(config, number, run_directory)
        assert machine.experts is not None
        watched = WatchedSteps(machine, machine.experts, diary)
        return replace(machine, runner=watched, experts=watched)

    settings: dict[str, Any] = {"kv_blocks": 512, **job.settings}
    config = EmbeddedConfig(
        checkpoint=job.checkpoint or checkpoint_path(),
        ranks=job.ranks,
        slots_per_rank=job.slots,
        ballast_bytes=job.ballast_bytes,
        spare_layers=job.spare_layers,
        **settings,
    )
    who = AgentIdentity(
        engine=job.engine,
        worker_id=job.worker_id,
        node="here",
        urls=tuple(f"http://127.0.0.1:{1 + number}" for number in range(job.ranks)),
    )
    transfer = TransferConfig(**job.transfer)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        bus = await NatsBus.connect(job.nats, subjects, BusConfig(), name=f"{job.engine}/{rank}")
        stack.push_async_callback(bus.close)
        engine = kind(config, rank, folder, build=build)
        await engine.start()
        assert engine.experts is not None
        limit = RateLimit.of(transfer)
        transfers = await open_transfers(
            transfer, engine.experts.memory, agent_name(job.engine, rank), one_machine=True, limit=limit
        )
        for way in transfers:
            stack.push_async_callback(way.close)
        agent = Agent(
            bus,
            subjects,
            engine,
            who,
            AgentConfig(),
            WatchedStaging(transfers=transfers, config=transfer, limit=limit, diary=diary),
        )
        running = await stack.enter_async_context(alongside(engine.run(), f"steps of rank {rank}"))
        speaking = await stack.enter_async_context(alongside(agent.run(), f"agent of rank {rank}"))
        await until_ready(agent.joined, running, speaking)
        gc.collect()
        gc.freeze()
        yield engine


async def serve(job: Job, folder: Path, rank: int) -> None:
    """Run a rank under closed load until standard input ends, and write its diary."""
    diary = Diary()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serving(job, folder, rank, diary, EmbeddedEngine))
        for number in range(job.sequences):
            await stack.enter_async_context(
                alongside(stream(engine, diary, 1000 * rank + number), f"stream {number} of rank {rank}")
            )
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        with suppress(EOFError):
            await asyncio.to_thread(sys.stdin.read)
        diary.save(folder / f"{rank}.npz")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    asyncio.run(serve(msgspec.json.decode(path.read_bytes(), type=Job), path.parent, int(sys.argv[2])))
