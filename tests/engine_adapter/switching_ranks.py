"""Ranks of an embedded engine in one process, without agents, whose attention the test changes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeForCausalLM

from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.sampling import GREEDY, Sampling
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.embedded.expert_handover import RankExperts
from engine_adapter.embedded.model_runner import Forward, PreparedEpoch, SequenceWork
from engine_adapter.embedded.setup import ForwardPass, RankSetup, build_setup
from engine_adapter.embedded.switching.attention_switch import AttentionSwitch
from engine_adapter.engine import RankFacts
from engine_adapter.serving.generation import AnswerDelta, AnswerStream
from fleet.layout import AttentionKind
from fleet.placement import EMPTY, Placement
from tests.engine_adapter.kv_event_mirror import KvEventMirror

SAFE_MARGIN = 1e-3
"""Logits this close may change places, because layouts add in different orders."""


@dataclass
class Witness:
    """A forward pass that counts its steps."""

    runner: ForwardPass
    switch: AttentionSwitch
    steps: int = 0
    tokens: int = 0

    def forward(self, work: Sequence[SequenceWork], tokens_by_rank: Sequence[int] | None = None) -> Forward:
        found = self.runner.forward(work, tokens_by_rank)
        self.steps += 1
        self.tokens += sum(len(one.tokens) for one in work)
        return found


@dataclass
class SwitchingRank:
    engine: EmbeddedEngine
    seen: Witness
    known: KvEventMirror = field(default_factory=KvEventMirror)
    """KV blocks that the rank has reported"""

    async def submit(
        self, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY, **changes: Any
    ) -> AnswerStream:
        request = GenerationRequest(prompt=list(prompt), max_tokens=count, sampling=sampling, ignore_eos=True)
        return await self.engine.submit(replace(request, **changes))

    @property
    def blocks(self) -> dict[int, int | None]:
        """Hashes of the KV blocks that it has reported, with those of their parents."""
        return self.known.parents

    @property
    def held(self) -> int:
        """Pages that requests hold."""
        return self.take_facts().load.decode_blocks

    def take_facts(self) -> RankFacts:
        """Facts since the last call. Keeps the blocks: a parent must be known before its child."""
        facts = self.engine.take_facts()
        self.known.apply(facts.kv)
        return facts


@dataclass
class SwitchingRanks:
    ranks: list[SwitchingRank]

    @property
    def placement(self) -> Placement:
        found = [rank.engine.placement for rank in self.ranks]
        assert len({one.epoch for one in found}) == 1
        return found[0]

    @property
    def experts(self) -> list[RankExperts]:
        return [rank.engine.experts for rank in self.ranks if rank.engine.experts is not None]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of data-parallel attention."""
        return self.ranks[0].engine.description.kv_block_bytes

    async def prepare(self, attention: AttentionKind) -> list[PreparedEpoch]:
        """Let all ranks prepare to change their attention, as a handover does."""
        now = self.placement
        target = Placement(
            now.expert_of_slot,
            experts=now.experts,
            ranks=now.ranks,
            epoch=now.epoch + 1,
            sharded=now.sharded,
            attention=attention,
        )
        return await asyncio.gather(*(one.prepare(target, one.cells) for one in self.experts))

    async def change_to(self, attention: AttentionKind) -> None:
        """Let all ranks change their attention."""
        prepared = await self.prepare(attention)
        await asyncio.gather(
            *(one.adopt(adoption) for one, adoption in zip(self.experts, prepared, strict=True))
        )
        assert self.placement == prepared[0].placement

    @property
    def held(self) -> int:
        """Pages that requests hold."""
        return sum(rank.held for rank in self.ranks)

    @property
    def used(self) -> int:
        """Pages that are not free."""
        return sum(rank.take_facts().load.used_blocks for rank in self.ranks)

    @property
    def blocks(self) -> set[int]:
        """Hashes of all blocks that any rank has."""
        for rank in self.ranks:
            rank.take_facts()
        return {block for rank in self.ranks for block in rank.blocks}


@asynccontextmanager
async def switching_ranks(
    checkpoint: Path, folder: Path, ranks: int, layers: int, experts: int, **settings: Any
) -> AsyncIterator[SwitchingRanks]:
    """An engine in EXPERTS_TP that serves until the block ends. settings: of `EmbeddedConfig`."""
    slots = -(-experts // ranks)
    file = Path(mkdtemp(dir=folder)) / "placement.json"
    start = Placement(
        np.full((layers, ranks * slots), EMPTY, np.int16),
        experts=experts,
        ranks=ranks,
        sharded=tuple(range(layers)),
    )
    file.write_bytes(msgspec.json.encode(start.record()))
    seen: dict[int, Witness] = {}

    def build(config: EmbeddedConfig, rank: int, run_directory: Path | None) -> RankSetup:
        setup = build_setup(config, rank, run_directory)
        assert setup.attention is not None
        seen[rank] = Witness(setup.runner, setup.attention)
        return replace(setup, runner=seen[rank])

    config = EmbeddedConfig(
        checkpoint=checkpoint,
        ranks=ranks,
        threads=1,
        placement=file,
        **{"kv_blocks": 64, "max_batch_tokens": 64, "max_running": 8, "max_waiting": 64} | settings,
    )
    meeting = Path(mkdtemp(dir=folder))
    engines = [EmbeddedEngine(config, rank, meeting, build=build) for rank in range(ranks)]
    await asyncio.gather(*(engine.start() for engine in engines))
    runs = [asyncio.create_task(engine.run(), name=f"rank {at}") for at, engine in enumerate(engines)]
    await asyncio.sleep(0)
    try:
        yield SwitchingRanks([SwitchingRank(engine, seen[at]) for at, engine in enumerate(engines)])
        assert not any(run.done() for run in runs)
    finally:
        for run in runs:
            run.cancel()
        await asyncio.wait(runs)


async def collected(stream: AnswerStream) -> AnswerDelta:
    """All of an answer that is read as it comes."""
    merged = AnswerDelta()
    async for delta in stream:
        merged.absorb(delta)
    return merged


def judge(oracle: Qwen3MoeForCausalLM, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Check that each token is the one that transformers finds most likely, or nearly so, behind those before
    it, whatever layouts computed it."""
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    best = logits.max(dim=1).values
    chosen: NDArray[Any] = logits[torch.arange(len(tokens)), torch.tensor(list(tokens))].numpy()
    assert (best.numpy() - chosen).max(initial=0.0) < SAFE_MARGIN
