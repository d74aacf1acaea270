"""What the bus says about the fleet now: engines, ranks, load, epochs, placements."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import typer
from numpy.typing import NDArray

from bus import Bus, BusError, Received
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.subjects import Subjects
from deploy.commandline import console, fail, in_json, show, table
from deploy.process import run as run_process
from fleet.events import (
    EngineHeartbeat,
    EngineJoined,
    EngineLeft,
    KvMetrics,
    MigrationCommitted,
    MigrationPlanned,
    MigrationStaged,
    PlacementCommitted,
    RankDrained,
)
from fleet.experts import ExpertId
from fleet.placement import FULL, Placement

LISTEN_SECONDS = 1.5
"""Longer than the interval of heartbeats and load reports."""
_SAME = 0.1
"""percent by which a share may differ and still be taken for the even one"""
Found = TypeVar("Found")


@dataclass(slots=True)
class EngineNow:
    """One engine that has joined and not left."""

    joined: EngineJoined
    heartbeat: EngineHeartbeat | None = None
    load: dict[int, KvMetrics] = field(default_factory=dict)
    """by rank"""
    drains: dict[int | None, str] = field(default_factory=dict)
    """why no new requests go to a rank, or (None) to any"""

    migrating: str = ""
    """id of the plan that is being carried out; empty: none is"""

    def drained(self, rank: int) -> str | None:
        """Why a rank gets no new requests; None: it gets them."""
        return self.drains.get(None, self.drains.get(rank))

    @property
    def complete(self) -> bool:
        """Whether everything that can be heard of it was heard."""
        return self.heartbeat is not None and (not self.joined.capabilities.load or len(self.load) == len(self.joined.urls))


def show_status(bus_config: BusConfig, routers: Sequence[str], *, as_json: bool) -> None:
    """Engines, ranks, their load and epochs; and where each of several router processes can be asked how it is."""
    engines, rejected = on_bus(bus_config, _engines_now)
    if as_json:
        said = {"nats": bus_config.url, "namespace": bus_config.namespace, "engines": [_record(engine) for engine in engines], "rejected": rejected}
        show(in_json({**said, "routers": list(routers)}))
        return
    console().print(f"NATS {bus_config.url}, namespace {bus_config.namespace}: {len(engines)} engine{'s' * (len(engines) != 1)}")
    if routers:
        console().print(f"router processes, each alone: {' '.join(routers)}")
    if engines:
        table(HEAD, (row for engine in engines for row in _rows(engine)))
    for engine in engines:
        if engine.migrating:
            console().print(f"{engine.joined.engine}: plan {engine.migrating} is being carried out; see roost events --kind migration --since 10m")


def show_placement(bus_config: BusConfig, layer: int | None, *, as_json: bool) -> None:
    """Per engine its epoch, its slots, and the experts of each rank, of one layer or of all."""
    placements = on_bus(bus_config, _placements_now)
    for name, now in placements.items():
        if layer is not None and layer >= now.layers:
            fail(f"engine {name} has MoE layers 0 to {now.layers - 1}, not {layer}")
    if as_json:
        show(in_json({name: _placement_record(now, layer) for name, now in placements.items()}))
        return
    if not placements:
        console().print("no engine with experts has joined")
    for name, now in placements.items():
        console().print(
            f"{name}: epoch {now.epoch}, {now.layers} layers x {now.experts} experts on {now.ranks} ranks, {now.slots_per_rank} slots each per layer"
        )
        rows = ((str(at), *(_experts(now, at, rank) for rank in range(now.ranks))) for at in _shown_layers(now, layer))
        table(("layer", *(f"rank {rank}" for rank in range(now.ranks))), rows)
        if not now.even:
            console().print("e*30%,k50%,n20%: this replica takes 30 % of what nobody keeps, keeps 50 % of its rank's own tokens, takes 20 % of its node's")


def on_bus(config: BusConfig, ask: Callable[[Bus, Subjects], Awaitable[Found]]) -> Found:
    """Ask something over the bus, and end the command when that is impossible."""
    found: list[Found] = []

    async def asked() -> None:
        subjects = Subjects(config.namespace)
        bus = await NatsBus.connect(config.url, subjects, config, name="roost")
        try:
            found.append(await ask(bus, subjects))
        finally:
            await bus.close()

    code = run_process(asked(), expected=(BusError,), hint="is `roost up` running? Name its NATS server with --nats URL")
    if code or not found:
        raise typer.Exit(code)
    return found[0]


async def _engines_now(bus: Bus, subjects: Subjects) -> tuple[list[EngineNow], dict[str, int]]:
    """Engines by name; waits for a sign of each, for at most LISTEN_SECONDS."""
    async with AsyncExitStack() as stack:
        heard = await stack.enter_async_context(bus.subscribe(subjects.heartbeats, subjects.kv_metrics))
        engines = await members(bus, subjects)
        await note_plans(bus, subjects, engines)
        by_worker = {engine.joined.worker_id: engine for engine in engines}
        try:
            async with asyncio.timeout(LISTEN_SECONDS):
                async for received in heard:
                    _note(by_worker, received)
                    if all(engine.complete for engine in engines):
                        break
        except TimeoutError:
            pass  # what was not heard is shown as silent
        return engines, dict(bus.rejected)


async def members(bus: Bus, subjects: Subjects) -> list[EngineNow]:
    """The engines that have joined and not left, by name, and what of them is drained; their state is not known yet."""
    last: dict[str, EngineJoined | EngineLeft] = {}
    async for received in bus.replay(subjects.membership(), latest=True, follow=False):
        if isinstance(received.message, EngineJoined | EngineLeft):
            last[received.message.engine] = received.message
    found = {joined.engine: EngineNow(joined) for _, joined in sorted(last.items()) if isinstance(joined, EngineJoined)}
    async for received in bus.replay(subjects.drains(), latest=True, follow=False):
        said = received.message
        if isinstance(said, RankDrained) and said.draining and said.engine in found and found[said.engine].joined.worker_id == said.worker_id:
            found[said.engine].drains[said.rank] = said.reason
    return list(found.values())


async def note_plans(bus: Bus, subjects: Subjects, engines: Sequence[EngineNow]) -> None:
    """The last word about an engine's plans tells whether one is under way."""
    by_worker = {engine.joined.worker_id: engine for engine in engines}
    async for received in bus.replay(subjects.migrations(), latest=True, follow=False):
        match received.message:
            case MigrationPlanned() | MigrationStaged() | MigrationCommitted(last=False) as said if said.worker_id in by_worker:
                by_worker[said.worker_id].migrating = said.plan


def _note(by_worker: dict[int, EngineNow], received: Received) -> None:
    message = received.message
    if isinstance(message, EngineHeartbeat) and message.worker_id in by_worker:
        by_worker[message.worker_id].heartbeat = message
    elif isinstance(message, KvMetrics) and message.worker_id in by_worker:
        by_worker[message.worker_id].load[message.dp_rank] = message


def _record(engine: EngineNow) -> dict[str, Any]:
    joined = engine.joined
    ranks = [
        {
            "rank": rank,
            "url": url,
            "running": load.running if (load := engine.load.get(rank)) else None,
            "waiting": load.waiting if load else None,
            "prefill_tokens": load.active_prefill_tokens if load else None,
            "used_blocks": load.kv_used_blocks if load else None,
            "draining": engine.drained(rank),
        }
        for rank, url in enumerate(joined.urls)
    ]
    return {
        "engine": joined.engine,
        "worker_id": str(joined.worker_id),
        "model": joined.model,
        "node": joined.node,
        "alive": engine.heartbeat is not None,
        "epoch": engine.heartbeat.epoch if engine.heartbeat else None,
        "migrating": engine.migrating or None,
        "layout": joined.layout,
        "block_size": joined.block_size,
        "kv_blocks": joined.kv_blocks,
        "max_context": joined.max_context,
        "capabilities": joined.capabilities,
        "ranks": ranks,
    }


HEAD = ("engine", "rank", "state", "model", "layout", "epoch", "running", "waiting", "prefill tokens", "KV blocks", "URL")


def _rows(engine: EngineNow) -> Iterator[tuple[str, ...]]:
    joined, beat = engine.joined, engine.heartbeat
    layout = "-" if joined.layout is None else f"{joined.layout.attention} h={joined.layout.boundary}"
    about = (joined.model, layout, _or_dash(None if beat is None else beat.epoch))
    for rank, url in enumerate(joined.urls):
        load = engine.load.get(rank, KvMetrics(worker_id=joined.worker_id))
        promised = (_or_dash(load.running), _or_dash(load.waiting), _or_dash(load.active_prefill_tokens))
        blocks = f"{_or_dash(load.kv_used_blocks)}/{joined.kv_blocks}" if joined.kv_blocks else "-"
        yield (joined.engine, str(rank), _state(engine, rank), *about, *promised, blocks, url)


def _state(engine: EngineNow, rank: int) -> str:
    alive, reason = "silent" if engine.heartbeat is None else "alive", engine.drained(rank)
    return alive if reason is None else f"{alive}, draining" + (f": {reason}" if reason else "")


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


async def _placements_now(bus: Bus, subjects: Subjects) -> dict[str, Placement]:
    """The last placement recorded for each engine that is a member; its join's where nothing newer was recorded for it."""
    joins = {engine.joined.engine: engine.joined for engine in await members(bus, subjects)}
    found = {name: Placement.from_record(joined.placement) for name, joined in joins.items() if joined.placement is not None}
    async for received in bus.replay(subjects.placements(), latest=True, follow=False):
        message = received.message
        if isinstance(message, PlacementCommitted) and message.engine in joins and joins[message.engine].worker_id == message.worker_id:
            found[message.engine] = Placement.from_record(message.placement)
    return found


def _shown_layers(now: Placement, layer: int | None) -> range:
    return range(now.layers) if layer is None else range(layer, layer + 1)


def _placement_record(now: Placement, layer: int | None) -> dict[str, Any]:
    return {
        "epoch": now.epoch,
        "layers": now.layers,
        "experts": now.experts,
        "ranks": now.ranks,
        "slots_per_rank": now.slots_per_rank,
        "expert_of_slot": {str(at): [now.on_rank(rank)[at].tolist() for rank in range(now.ranks)] for at in _shown_layers(now, layer)},
        "split": None if now.even else {name: _of_layers(now, part, layer) for name, part in now.split._asdict().items()},
    }


def _of_layers(now: Placement, part: NDArray[np.uint16], layer: int | None) -> dict[str, list[list[int]]]:
    """By layer and rank, as the slots are."""
    return {str(at): part[at].reshape(now.ranks, -1).tolist() for at in _shown_layers(now, layer)}


def _experts(now: Placement, layer: int, rank: int) -> str:
    """The experts in a rank's slots, in runs; `*` marks those with more than one replica, and says what this one takes where that is uneven."""
    first = rank * now.slots_per_rank
    held = sorted((int(expert), slot) for slot, expert in enumerate(now.on_rank(rank)[layer], start=first) if expert >= 0)
    replicas = {expert: len(now.holders(ExpertId(layer, expert))) for expert, _ in held}
    copied = [f"{expert}*{_uneven(now, layer, slot, replicas[expert])}" for expert, slot in held if replicas[expert] > 1]
    return " ".join([*_runs([expert for expert, _ in held if replicas[expert] == 1]), *copied]) or "-"


def _uneven(now: Placement, layer: int, slot: int, replicas: int) -> str:
    """What a slot takes of the tokens that nobody keeps, keeps of its rank's own, and takes of its node's, each where it is not the usual."""
    keep, spill, near = (100 * int(part[layer, slot]) / FULL for part in now.split)
    said = [] if abs(spill - 100 / replicas) < _SAME else [f"{spill:.0f}%"]
    return ",".join([*said, *([f"k{keep:.0f}%"] if keep < 100 else []), *([f"n{near:.0f}%"] if near else [])])


def _runs(numbers: Sequence[int]) -> list[str]:
    """0 1 2 5 as "0-2", "5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
