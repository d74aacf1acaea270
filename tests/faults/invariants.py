"""What has to hold after every fault, judged from outside: by the ranks' memory itself, by what is stored,
and by what each process holds open."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleet.handover import RankState
from fleet.placement import EMPTY, Placement
from fleet.requests.handovers import HandoverDescribed
from tests.faults.expert_contents import (
    CELLS,
    RANKS,
    SHAPE,
    SLOTS,
    lies_there,
    memory_of,
    part_lies_there,
    place_of_part,
)
from tests.faults.fleet_fixture import Engine, Process, until

SETTLE_SECONDS = 15.0
CONNECTIONS = 4 * (RANKS - 1)
"""descriptors that a process may come to have beside those of its first moment: of connections to the others,
made when they are first needed"""
FREE = CELLS - SHAPE.layers * SLOTS


def shared_memory() -> set[str]:
    """Names in the machine's shared memory that UCX gives: experts lie in memory without a name, and names of
    other programs come and go as they like."""
    return {file.name for file in Path("/dev/shm").glob("ucx_*")}


def at_rest(messages: HandoverDescribed | None, states: Sequence[RankState]) -> bool:
    """Nothing is under way, and every cell that is not served from is free, or staged where that is so for
    long."""
    if messages is None or messages.state not in states or messages.quarantined or messages.draining:
        return False
    return messages.free == FREE or messages.state in (RankState.STAGED, RankState.READY)


async def settle(
    engine: Engine, ranks: Sequence[int] = range(RANKS), *, states: Sequence[RankState] = (RankState.SERVING,)
) -> list[HandoverDescribed]:
    """Wait until these ranks have nothing under way any more, and every cell is accounted for: served from,
    or free."""
    messages: dict[int, HandoverDescribed | None] = {}

    async def resting() -> bool:
        for rank in ranks:
            assert engine.ranks[rank].alive, f"{engine.ranks[rank].name} has died:\n{engine.ranks[rank].tail}"
            messages[rank] = await engine.described(rank)
        return all(at_rest(one, states) for one in messages.values())

    await until(resting, lambda: f"{engine.name} settles; it says {messages}", SETTLE_SECONDS)
    return [one for one in messages.values() if one is not None]


async def judge(engine: Engine) -> Placement:
    """All ranks serve the last placement on record, its sharded layers included, every expert from bytes that
    are its own. The placement."""
    engine.deployment.check()
    await settle(engine)
    latest = await until(lambda: _agreed(engine), f"{engine.name} serves what is on record", SETTLE_SECONDS)
    found = await asyncio.gather(*(process.ask() for process in engine.ranks))
    held: Counter[tuple[int, int]] = Counter()
    for rank, (process, standing) in enumerate(zip(engine.ranks, found, strict=True)):
        assert standing["epoch"] == standing["served"] == latest.epoch, (
            f"{process.name}: {standing}, on record is epoch {latest.epoch}"
        )
        assert np.array_equal(standing["slots"], latest.on_rank(rank)), (
            f"{process.name} serves {standing['slots']}, on record is {latest.on_rank(rank)}"
        )
        assert (standing["sharded"], standing["digest"]) == (list(latest.sharded), latest.digest), (
            f"{process.name} has layers {standing['sharded']} sharded, on record is {latest!r}"
        )
        held.update(judge_memory(process, rank, standing))
    assert len(held) == SHAPE.layers * SHAPE.experts, (
        f"{engine.name}: experts without a holder; there are {sorted(held)}"
    )
    flips = {tuple(map(tuple, standing["flips"])) for standing in found}
    assert len(flips) == 1, f"{engine.name}: ranks flipped at different steps: {flips}"
    return latest


async def _agreed(engine: Engine) -> Placement | None:
    """What is on record, once all ranks serve its epoch."""
    latest = engine.history.latest
    messages = [await engine.described(rank) for rank in range(RANKS)]
    return latest if all(one is not None and one.served == latest.epoch for one in messages) else None


def judge_memory(process: Process, rank: int, standing: dict[str, Any]) -> list[tuple[int, int]]:
    """The (layer, expert) that a rank serves, each of which lies in its cell to the last bit; of a sharded
    layer, the rank's part of each."""
    cells, slots = np.array(standing["cells"]), np.array(standing["slots"])
    assert len(np.unique(cells)) == cells.size, f"{process.name}: two slots are in one cell: {cells}"
    cut = [(layer, expert) for layer in standing["sharded"] for expert in range(SHAPE.experts)]
    held = [
        (layer, int(expert), int(cells[layer, slot]))
        for (layer, slot), expert in np.ndenumerate(slots)
        if expert != EMPTY
    ]
    with memory_of(process.pid, standing["descriptor"], standing["cell_bytes"]) as memory:
        wrong = [
            (layer, expert) for layer, expert, cell in held if not lies_there(memory[cell], layer, expert)
        ]
        wrong_parts = [
            (layer, expert)
            for layer, expert in cut
            if not part_lies_there(memory[cells[layer, place_of_part(expert)[0]]], layer, expert, rank)
        ]
    assert not wrong, f"{process.name} serves experts {wrong} from bytes that are not theirs"
    assert not wrong_parts, f"{process.name} serves its parts of {wrong_parts} from bytes that are not theirs"
    return [(layer, expert) for layer, expert, _ in held] + cut


class Belongings:
    """What ranks hold open while they are at rest: it must not grow from one fault to the next."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[dict[str, Any], int]] = {}
        self._shared = shared_memory()

    async def check(self, engine: Engine) -> None:
        """Compare with the first time that these processes were looked at."""
        for process in engine.ranks:
            now, descriptors = await self._until_it_is_as_before(process)
            before, first = self._before.setdefault(process.pid, (now, descriptors))
            assert now == before, f"{process.name} has {now}, and had {before}"
            assert descriptors <= first + CONNECTIONS, (
                f"{process.name} has {descriptors} descriptors open, and had {first}"
            )
        await until(
            lambda: not shared_memory() - self._shared,
            lambda: f"shared memory is as before: {shared_memory() - self._shared}",
            SETTLE_SECONDS,
        )

    async def _until_it_is_as_before(self, process: Process) -> tuple[dict[str, Any], int]:
        """What it has, and how many descriptors: tasks that answer a question take a moment to end."""
        for _ in range(50):
            standing = await process.ask("belongings")
            assert len(set(standing["threads"])) == len(standing["threads"]), (
                f"{process.name} has a thread twice: {standing['threads']}"
            )
            now = {name: standing[name] for name in ("tasks", "requests", "leases")}
            if self._before.get(process.pid, (now, 0))[0] == now:
                break
            await asyncio.sleep(0.05)
        return now, standing["descriptors"]
