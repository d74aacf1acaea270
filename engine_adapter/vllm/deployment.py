"""One start of a vLLM deployment: its targets as engines, and the tasks that follow it."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from engine_adapter.engine import EngineDescription, EngineFailed
from engine_adapter.foreign.kv_blocks import KvBlocks
from engine_adapter.foreign.kv_stream import KvStream
from engine_adapter.foreign.target import ServerTarget
from engine_adapter.vllm.config import VllmConfig
from engine_adapter.vllm.discovery import Deployment
from engine_adapter.vllm.load import rank_load
from engine_adapter.vllm.metrics_text import MetricsReading, RankLoadReading
from engine_adapter.vllm.reports import DemandSplit, MoveTimes, ended_request, engine_shape
from engine_adapter.vllm.server import RANK_HEADER, VllmServer
from engine_adapter.vllm.wire import MapMoved, RoutedRequest, WorkerDemand
from engine_adapter.vllm.worker_maps import Report, WorkerMaps
from fleet.dispatch import ROW_HASH, SPLIT
from fleet.facts.engines import Capabilities
from fleet.placement import Placement

log = logging.getLogger(__name__)


class ServerGone(EngineFailed):
    """The HTTP server does not answer any more."""


class VllmDeployment:
    """Engines of the targets of one start of vLLM. `run` follows it until it is gone."""

    def __init__(self, found: Deployment, config: VllmConfig, maps: WorkerMaps | None = None) -> None:
        """maps: the workers of this vLLM, all connected. None: the engine is a member without its experts."""
        self.found = found
        self._config = config
        self._workers_instance = None if maps is None else maps.instance
        self.maps = maps if maps is not None and _fits(maps, found) else None
        self._shape = None if self.maps is None else engine_shape(self.maps.hello)
        self.exact = found.tokenizer is not None and all(target.kv is not None for target in found.targets)
        """The blocks of the KV caches are known by their hashes."""
        self.targets = tuple(
            ServerTarget(self._description(number), self._placement) for number in range(len(found.targets))
        )
        self._blocks = [KvBlocks(found.block_size, target.kv_blocks) for target in found.targets]
        self._streams = [
            KvStream(
                f"rank {number} of {found.model}",
                target.kv,
                self._blocks[number],
                self.targets[number].cached,
            )
            for number, target in enumerate(found.targets)
            if target.kv is not None and self.exact
        ]
        self._reading = 0
        self._readings: list[RankLoadReading | None] = [None] * len(found.targets)
        if self.maps is not None:
            hello = self.maps.hello
            self._demand = DemandSplit(hello)
            self._moves = MoveTimes(hello, self.maps.placement.expert_of_slot)
            self.maps.on_report = self._reported
            self.maps.nudge_target = self._nudge

    @property
    def instance(self) -> str:
        """Identity of this start of vLLM: that of its workers, also where their experts cannot be
        represented."""
        if self._workers_instance is not None:
            return self._workers_instance
        return f"{' '.join(dict.fromkeys(self.urls))} {self.found.started}"

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URL of each target."""
        return tuple(target.server.base for target in self.found.targets)

    def _description(self, number: int) -> EngineDescription:
        found, shape = self.found, self._shape
        return EngineDescription(
            kind="vllm",
            model=found.model,
            models=found.models,
            rank=number,
            ranks=len(found.targets),
            rank_header=RANK_HEADER if found.shares_url else "",
            block_size=found.block_size,
            kv_blocks=found.targets[number].kv_blocks,
            max_context=found.max_context,
            max_batch_tokens=self._config.max_batch_tokens,
            capabilities=Capabilities(
                kv_events=self.exact,
                load=True,
                experts=shape is not None,
                token_ids=False,
                passes_fields=True,
                returns_ids=True,
                isolates_tenants=True,
            ),
            tokenizer=found.tokenizer,
            shape=None if shape is None else shape.shape,
            dispatch=SPLIT if shape is None else ROW_HASH,
            rearranges=shape is not None,
            gathers_all=shape is not None and shape.gathers_all,
        )

    def _placement(self) -> Placement | None:
        return None if self.maps is None else self.maps.placement

    async def run(self) -> None:
        """Follow the deployment until cancelled. EngineFailed, perhaps in a group, when it is gone or another
        start of it has taken its place."""
        self._explain()
        async with asyncio.TaskGroup() as tasks:
            for stream in self._streams:
                tasks.create_task(stream.run(), name="KV events of vLLM")
            tasks.create_task(self._poll(), name="load of vLLM")
            if self.maps is not None:
                tasks.create_task(self._watch_maps(self.maps), name="maps of vLLM")

    async def survivors(self) -> list[str]:
        """Return the parts of this deployment that are still there although its HTTP server is gone."""
        alive = await asyncio.gather(*(stream.alive() for stream in self._streams))
        publishers = [
            f"the publisher of KV events at {target.kv.endpoint}"
            for target, there in zip(self.found.targets, alive, strict=False)
            if there and target.kv is not None
        ]
        pids = {} if self.maps is None else self.maps.pids
        return publishers + [f"expert rank {rank}, process {pid}" for rank, pid in pids.items()]

    def _explain(self) -> None:
        """Log what is missing for exact prefix routing."""
        if self.found.tokenizer is None:
            log.warning(
                "%s: its tokenizer is not on this machine: prompts are routed by guesses, not by exact"
                " blocks; name a folder with tokenizer.json (--tokenizer DIR)",
                self.found.model,
            )
        without = [number for number, target in enumerate(self.found.targets) if target.kv is None]
        if without:
            log.warning(
                "%s: rank %s publishes no KV events: prompts are routed by guesses; start vLLM with"
                ' --kv-events-config \'{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:5557",'
                ' "endpoint": "tcp://*:5657"}\'',
                self.found.model,
                ", ".join(map(str, without)),
            )

    async def _watch_maps(self, maps: WorkerMaps) -> None:
        while not maps.replaced:
            await maps.changed()
        raise EngineFailed(f"vLLM's own policy has moved the experts of {self.found.model}")

    def _reported(self, rank: int, message: Report, epoch: int | None) -> None:
        """Hand a report of an expert rank to its target. ValueError when it contradicts itself."""
        if self.maps is None:
            return
        hello = self.maps.hello
        target = self.targets[rank * hello.targets // hello.ranks]
        match message:
            case WorkerDemand() if epoch is not None:
                activations, dispatch = self._demand.add(rank, message, epoch)
                if activations is not None:
                    target.activated(activations)
                if dispatch is not None:
                    target.dispatched(dispatch)
            case RoutedRequest():
                ended = ended_request(message, hello)
                if ended is not None:
                    target.ended(ended)
            case MapMoved():
                time = self._moves.add(rank, message)
                if time is not None:
                    self.targets[0].rearranged(time)

    async def _nudge(self) -> None:
        """Make the engine take as many steps as lie between two votes, if that is allowed."""
        if not self._config.nudge:
            log.info("%s is idle: its placement waits for traffic ([vllm] nudge is false)", self.found.model)
            return
        target = self.found.targets[0]
        rank = target.rank if self.found.shares_url else None
        try:
            await target.server.nudge(self.found.model, rank, self._config.vote_steps + 1)
        except EngineFailed as error:
            log.warning("the agent's own request failed: %s", error)

    async def _poll(self) -> None:
        """Read the load until the server stays away."""
        servers: Sequence[VllmServer] = list({target.server: None for target in self.found.targets})
        misses = 0
        while True:
            try:
                found = await asyncio.gather(*(server.metrics() for server in servers))
                misses = 0
            except EngineFailed as error:
                misses += 1
                log.warning("reading %d of %d failed: %s", misses, self._config.misses, error)
                if misses >= self._config.misses:
                    raise ServerGone(str(error)) from error
            else:
                self._take(dict(zip(servers, found, strict=True)))
            await asyncio.sleep(self._config.load_seconds)

    def _take(self, found: dict[VllmServer, MetricsReading]) -> None:
        started = found[self.found.targets[0].server].started
        if None not in (started, self.found.started) and started != self.found.started:
            raise EngineFailed(f"{self.found.targets[0].server.base} has started anew")
        for number, source in enumerate(self.found.targets):
            now, before = found[source.server].load(source.rank), self._readings[number]
            load = rank_load(now, before, kv_blocks=source.kv_blocks, cached_blocks=len(self._blocks[number]))
            cached = 0 if before is None else int(now.cached_tokens - before.cached_tokens)
            self._reading += 1
            self.targets[number].loaded(replace(load, reading=self._reading), cached)
            self._readings[number] = now


def _fits(maps: WorkerMaps, found: Deployment) -> bool:
    """Return True if the experts of these workers can be represented. Log why they cannot."""
    why = ""
    if maps.refusal:
        why = maps.refusal
    elif maps.hello.targets != len(found.targets):
        why = (
            f"the workers form {maps.hello.targets} data-parallel ranks, the server has {len(found.targets)}"
        )
    elif maps.hello.ranks % maps.hello.targets:
        why = f"{maps.hello.ranks} expert ranks do not divide into {maps.hello.targets} data-parallel ranks"
    if why:
        log.warning("%s joins without its experts: %s", found.model, why)
    return not why
