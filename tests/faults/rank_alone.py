"""A rank without a model, in a process of its own: everything that handovers need of one, and nothing else.

`python rank_alone.py LIFE.json` lives until its standard input ends. Real: the bus, the agent with its part
in handovers, the books of the cells, the transfer, the memory. Not: steps compute nothing (`lockstep`), and
experts are bytes that everybody knows (`contents`). Asked by a line on its standard input, it says in a line
of JSON how it stands.
"""

import asyncio
import gc
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.process import alongside, first_failure, set_up_logging, until_ready
from engine_adapter.agent.copy_runner import Staging
from engine_adapter.agent.engine_agent import Agent
from engine_adapter.agent.handover_agent import HandoverAgent
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.config import AgentConfig, TransferConfig
from engine_adapter.engine import EngineDescription, RankFacts, RankLoad
from engine_adapter.transfer.mapped_memory import MappedCells
from engine_adapter.transfer.nixl_loader import agent_name
from engine_adapter.transfer.selection import open_transfers
from fleet.facts.engines import Capabilities
from fleet.placement import EMPTY, Placement, PlacementRecord
from fleet.timing import EngineSpeed
from tests.faults.expert_contents import CELLS, POISON, SHAPE, TENSORS, content, part, place_of_part
from tests.faults.lockstep import Steps


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told at birth."""

    engine: str
    worker_id: int
    rank: int
    ranks: int
    nats: str
    namespace: str
    meet: str
    """file of the steps' headers"""
    placement: PlacementRecord
    replaces: int | None = None
    transfer: dict[str, Any]
    agent: dict[str, Any]


class _Adoption(NamedTuple):
    placement: Placement
    cells: NDArray[np.int32]


class Experts:
    """What a handover asks of a rank (`engine_adapter.engine.Experts`)."""

    def __init__(self, life: Life, placement: Placement) -> None:
        self.placement = placement
        self.memory = MappedCells(TENSORS, CELLS, life.ranks)
        layers, slots = placement.layers, placement.slots_per_rank
        self.cells = np.arange(layers * slots, dtype=np.int32).reshape(layers, slots)
        self.steps = Steps(Path(life.meet), life.rank, life.ranks, placement)
        for cell in range(CELLS):
            self.memory.cell(cell)[:] = POISON
        for (layer, slot), expert in np.ndenumerate(placement.on_rank(life.rank)):
            if expert != EMPTY:
                known = content(layer, int(expert))
                self.memory.cell(int(self.cells[layer, slot]))[: len(known)] = known
        for layer in placement.sharded:
            for expert in range(placement.experts):
                group, at = place_of_part(expert)
                known = part(layer, expert, life.rank)
                self.memory.cell(int(self.cells[layer, group]))[at : at + len(known)] = known

    async def prepare(self, placement: Placement, cells: NDArray[np.int32]) -> _Adoption:
        return _Adoption(placement, cells.copy())

    def forget(self, adoption: _Adoption) -> None:
        """Nothing is held for it."""

    async def adopt(self, adoption: _Adoption) -> None:
        await self.steps.adopted(adoption.placement)
        self.placement, self.cells = adoption.placement, adoption.cells


class RankAlone:
    """One rank of an engine (`engine_adapter.engine.Engine`)."""

    handover_seconds = 0.0

    def __init__(self, life: Life) -> None:
        self.experts = Experts(life, Placement.from_record(life.placement))
        self.description = EngineDescription(
            model="bytes",
            rank=life.rank,
            ranks=life.ranks,
            block_size=16,
            kv_blocks=16,
            max_context=256,
            max_batch_tokens=64,
            capabilities=Capabilities(kv_events=False, experts=False),
            shape=SHAPE,
            unshardable="",
            tp_refusal="",
            speed=EngineSpeed(step=1e-3, decode_sequence=1e-5, expert_pair=1e-5, dispatch=0.0),
        )

    @property
    def placement(self) -> Placement:
        return self.experts.placement

    async def start(self) -> None:
        """It begins as it is."""

    async def wait_facts(self) -> None:
        await asyncio.Event().wait()  # there is never anything new

    def take_facts(self) -> RankFacts:
        return RankFacts(kv=(), load=RankLoad(0, 0, 0, 0, 0), activations=None)

    async def run(self) -> None:
        await self.experts.steps.run()


def standing(engine: RankAlone, handovers: HandoverAgent) -> dict[str, Any]:
    """How the rank stands, for the judge."""
    memory, experts = engine.experts.memory, engine.experts
    return {
        "epoch": experts.placement.epoch,
        "digest": experts.placement.digest,
        "sharded": experts.placement.sharded,
        "served": experts.steps.served,
        "flips": experts.steps.flips,
        "slots": experts.placement.on_rank(engine.description.rank).tolist(),
        "cells": experts.cells.tolist(),
        "descriptor": memory.descriptor,
        "cell_bytes": memory.cell_bytes,
    }


def belongings(handovers: HandoverAgent) -> dict[str, Any]:
    """What the process holds open; it takes a while to find out."""
    gc.collect()
    return {
        "tasks": sorted(re.sub(r"Task-[0-9]+", "a task", task.get_name()) for task in asyncio.all_tasks()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "requests": sum(type(one).__name__ == "nixl_xfer_handle" for one in gc.get_objects()),
        "leases": handovers.protocol.cell_table.leases,
    }


async def answer_questions(
    engine: RankAlone, handovers: HandoverAgent, reply: Callable[[str], object]
) -> None:
    """Until standard input ends: a line asks how the rank stands."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        while question := await reader.readline():
            reply(
                json.dumps(
                    belongings(handovers) if question == b"belongings\n" else standing(engine, handovers)
                )
                + "\n"
            )
    finally:
        transport.close()


def own_voice() -> Callable[[str], object]:
    """Says lines on what standard output was: libraries write to it as they like, and are in the log from now
    on."""
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return messages.write


async def live(life: Life) -> None:
    reply = own_voice()
    set_up_logging("info")
    config, subjects = (
        BusConfig(url=life.nats, namespace=life.namespace, reconnect_max_seconds=0.2),
        Subjects(life.namespace),
    )
    async with AsyncExitStack() as stack:
        bus = await NatsBus.connect(config.url, subjects, config, name=f"{life.engine}/{life.rank}")
        stack.push_async_callback(bus.close)
        engine = RankAlone(life)
        who = AgentIdentity(
            engine=life.engine,
            worker_id=life.worker_id,
            node="here",
            urls=tuple(f"http://127.0.0.1:{9 + rank}" for rank in range(life.ranks)),
            replaces=life.replaces,
        )
        transfer = TransferConfig(**life.transfer)
        transfers = await open_transfers(
            transfer, engine.experts.memory, agent_name(life.engine, life.rank), one_machine=False
        )
        for way in transfers:
            stack.push_async_callback(way.close)
        agent = Agent(
            bus,
            subjects,
            engine,
            who,
            AgentConfig(**life.agent),
            Staging(config=transfer, transfers=transfers),
        )
        assert agent.handovers is not None
        stepping = await stack.enter_async_context(alongside(engine.run(), "steps"))
        speaking = await stack.enter_async_context(alongside(agent.run(), "agent"))
        await until_ready(agent.joined, stepping, speaking)
        reply("joined\n")
        requested = await stack.enter_async_context(
            alongside(answer_questions(engine, agent.handovers, reply), "answers the judge")
        )
        await asyncio.wait([stepping, speaking, requested], return_when=asyncio.FIRST_COMPLETED)
        if not requested.done():
            await first_failure([stepping, speaking])


if __name__ == "__main__":
    asyncio.run(live(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Life)))
