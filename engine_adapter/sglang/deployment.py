"""One start of an SGLang server: its ranks as engines, and the tasks that follow it."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine_adapter.engine import Activations, EngineDescription, EngineFailed
from engine_adapter.foreign.kv_blocks import KvBlocks
from engine_adapter.foreign.kv_stream import KvStream
from engine_adapter.sglang.config import SglangConfig
from engine_adapter.sglang.discovery import FoundServer
from engine_adapter.sglang.load import rank_load
from engine_adapter.sglang.rank import GenerateApi, SglangRank
from engine_adapter.sglang.recorder import ReadCounts, RecorderFollower
from engine_adapter.sglang.server import RankReading, ScalingState, SglangServer
from fleet.facts.engines import Capabilities

log = logging.getLogger(__name__)


class SglangDeployment:
    """Engines of the data-parallel ranks of one start of SGLang. `run` follows it until it is gone."""

    def __init__(
        self,
        found: FoundServer,
        config: SglangConfig,
        server: SglangServer,
        api_key: str | None,
        read_counts: ReadCounts,
    ) -> None:
        """read_counts: reads files of the recorder."""
        self.found = found
        self._config = config
        self._server = server
        self._read_counts = read_counts
        self._counts = (
            found.experts is not None and found.recorder != "none" and config.recorder_folder is not None
        )
        self._routed = (
            found.experts is not None and found.info.enable_return_routed_experts and config.routed_share > 0
        )
        api = GenerateApi(
            server.base,
            api_key,
            incremental=found.info.incremental_streaming_output,
            routed_share=config.routed_share,
            connect_seconds=config.answer_seconds,
        )
        self.ranks = tuple(
            SglangRank(
                self._description(number),
                found.tokenizer,
                api,
                found.experts if self._routed else None,
                number if len(found.ranks) > 1 else None,
                counts=not self._counts,
            )
            for number in found.ranks
        )
        self._blocks = [KvBlocks(found.block_size, found.kv_blocks) for _ in found.ranks]
        self._streams = [
            KvStream(f"rank {number} of {found.model}", source, blocks, rank.cached)
            for number, source, blocks, rank in zip(
                found.ranks, found.kv, self._blocks, self.ranks, strict=False
            )
        ]
        self._reading = 0
        self._readings: list[RankReading | None] = [None] * len(found.ranks)
        self._scaling = ScalingState()

    def _description(self, number: int) -> EngineDescription:
        found = self.found
        return EngineDescription(
            kind="sglang",
            model=found.model,
            rank=number,
            ranks=len(found.ranks),
            block_size=found.block_size,
            kv_blocks=found.kv_blocks,
            max_context=found.max_context,
            max_batch_tokens=found.max_batch_tokens,
            capabilities=Capabilities(
                kv_events=bool(found.kv),
                load=True,
                experts=self._counts or self._routed,
                token_ids=True,
                passes_fields=True,
                isolates_tenants=True,
            ),
            tokenizer=found.tokenizer.archive,
            shape=None if found.experts is None else found.experts.shape,
        )

    async def run(self) -> None:
        """Follow the server until cancelled. EngineFailed, perhaps in a group, when it is gone, has started
        anew, or has another number of ranks."""
        if not self.found.info.incremental_streaming_output:
            log.info(
                "%s repeats the answer in each event of a stream; --incremental-streaming-output spares that",
                self._server.base,
            )
        async with asyncio.TaskGroup() as tasks:
            for rank in self.ranks:
                tasks.create_task(rank.run(), name="requests to SGLang")
            for stream in self._streams:
                tasks.create_task(stream.run(), name="KV events of SGLang")
            tasks.create_task(self._poll(), name="load of SGLang")
            if self._counts and self.found.experts is not None:
                follower = RecorderFollower(
                    self._server,
                    Path(self._config.recorder_folder or ""),
                    self.found.recorder,
                    self.found.experts.shape,
                    self._read_counts,
                    self._activated,
                    targets=len(self.ranks),
                    seconds=self._config.recorder_seconds,
                )
                tasks.create_task(follower.run(), name="expert records of SGLang")

    def _activated(self, parts: Sequence[Activations]) -> None:
        for rank, part in zip(self.ranks, parts, strict=True):
            rank.activated(part)

    async def _poll(self) -> None:
        """Read the load until the server stays away."""
        misses = 0
        while True:
            try:
                self._take(await self._server.loads())
                if self.found.info.elastic_ep_backend is not None:
                    self._follow_scaling(await self._server.scaling())
                misses = 0
            except EngineFailed as error:
                misses += 1
                if isinstance(error, RanksChanged):
                    raise
                log.warning("reading %d of %d failed: %s", misses, self._config.misses, error)
                if misses >= self._config.misses:
                    raise
            await asyncio.sleep(self._config.load_seconds)

    def _take(self, readings: tuple[RankReading, ...]) -> None:
        """Report the load of each rank. RanksChanged when there are others than before."""
        numbers = tuple(reading.dp_rank for reading in readings)
        if numbers != self.found.ranks:
            raise RanksChanged(f"{self._server.base} has the ranks {numbers} now, not {self.found.ranks}")
        for number, now in enumerate(readings):
            load = rank_load(
                now,
                self._readings[number],
                block_size=self.found.block_size,
                kv_blocks=self.found.kv_blocks,
                cached_blocks=len(self._blocks[number]),
            )
            self._reading += 1
            self.ranks[number].loaded(replace(load, reading=self._reading), 0)
            self._readings[number] = now

    def _follow_scaling(self, state: ScalingState) -> None:
        """Log the phases of elastic expert parallelism. Its new ranks are found by their load."""
        if state.scale_phase != self._scaling.scale_phase or state.last_error != self._scaling.last_error:
            log.info(
                "%s: elastic expert parallelism: phase %s, %s ranks%s%s",
                self._server.base,
                state.scale_phase,
                state.effective_ep_size,
                "" if state.pending_ep_size is None else f", {state.pending_ep_size} pending",
                f", error: {state.last_error}" if state.last_error else "",
            )
        self._scaling = state


class RanksChanged(EngineFailed):
    """The server has other ranks than it was found with."""
